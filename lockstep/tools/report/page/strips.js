// Strips: the numbers of each token of one response, one line per number. What PPO gave credit for, and what came of it.

const STRIPS = [
  { name: "probability", about: "probability of the token before the update", kind: "plain", of: (t) => t.log_prob && t.log_prob.map(Math.exp), low: 0, high: 1 },
  { name: "ratio", about: "probability after the update over before", kind: "signed", of: (t) => t.log_ratio, shown: Math.exp, least: 0.02 },
  { name: "ratio to sampler", about: "trainer's probability over the sampler's", kind: "signed", of: (t) => t.sampler_log_ratio, shown: Math.exp, least: 0.02 },
  { name: "advantage", about: "what the actor learns from", kind: "signed", of: (t) => t.advantage },
  { name: "value", about: "the critic's estimate before the token", kind: "plain", of: (t) => t.value },
  { name: "TD error", about: "reward + gamma * next value - value", kind: "signed", of: (t) => t.td_error },
  { name: "return", about: "what the critic learns from", kind: "plain", of: (t) => t.return },
  { name: "reward", about: "score, less the KL penalty where that is on", kind: "signed", of: (t) => t.reward },
  { name: "KL", about: "log-prob less the reference's", kind: "signed", of: (t) => t.kl, least: 0.01 },
  { name: "entropy", about: "of the policy at the token", kind: "plain", of: (t) => t.entropy, low: 0 },
  { name: "mask", about: "1 where the policy wrote the token", kind: "plain", of: (t) => t.mask, low: 0, high: 1 },
];
const STRIP_HEIGHT = 24;

/** The strips that the tokens have: {name, about, values, scale, text(i)}. */
function stripsOf(tokens) {
  return STRIPS.flatMap((strip) => {
    const values = strip.of(tokens);
    if (!values) return [];
    let low = strip.low === undefined ? Infinity : strip.low;
    let high = strip.high === undefined ? -Infinity : strip.high;
    for (const value of values) {
      if (Number.isNaN(value)) continue; // a token without this number, such as an environment's log-prob
      if (strip.low === undefined) low = Math.min(low, value);
      if (strip.high === undefined) high = Math.max(high, value);
    }
    const least = strip.least || 1e-3; // rounding is not worth a colour
    if (values.length) high = Math.max(high, strip.kind === "signed" ? least : low + least);
    const shown = strip.shown || ((value) => value);
    return [{ name: strip.name, about: strip.about, values, scale: { kind: strip.kind, low, high }, text: (i) => short(shown(values[i])),
      range: values.length ? `${short(shown(low))} … ${short(shown(high))}` : "" }];
  });
}

/** The strips as one picture with a token cursor. `onMove(i)` hears of the token under it. */
function makeStrips(tokens, strips, onMove) {
  const canvas = el("canvas", { "aria-hidden": "true" });
  const slider = el("div", { class: "strip-canvas", role: "slider", tabindex: 0, "aria-label": "Token", "aria-valuemin": 0, "aria-valuemax": Math.max(0, tokens.length - 1) }, canvas);
  const labels = el("div", { class: "strip-labels" }, ...strips.map((strip) => el("div", { title: strip.about, text: strip.name })));
  const ranges = el("div", { class: "strip-ranges" }, ...strips.map((strip) => el("div", { text: strip.range })));
  const node = el("div", { class: "strips" }, labels, slider, ranges);
  const state = { node, token: -1, cell: 0 };
  state.draw = () => {
    state.cell = Math.max(3, Math.min(28, Math.floor((slider.clientWidth || 400) / Math.max(1, tokens.length))));
    drawStrips(canvas, strips, tokens.length, state);
  };
  state.move = (i) => {
    if (!tokens.length) return;
    state.token = Math.max(0, Math.min(tokens.length - 1, i));
    slider.setAttribute("aria-valuenow", state.token);
    const x = state.token * state.cell;
    if (x < slider.scrollLeft || x + state.cell > slider.scrollLeft + slider.clientWidth) slider.scrollLeft = x - slider.clientWidth / 2;
    state.draw();
    slider.setAttribute("aria-valuetext", onMove(state.token));
  };
  const point = (event) => state.move(Math.floor((event.clientX - canvas.getBoundingClientRect().left) / state.cell));
  slider.addEventListener("pointerdown", point);
  slider.addEventListener("pointermove", point);
  new ResizeObserver(state.draw).observe(slider);
  return state;
}

function drawStrips(canvas, strips, count, state) {
  const ratio = Math.min(devicePixelRatio || 1, 30_000 / (Math.max(1, count) * state.cell)); // a canvas is at most 32,767 pixels wide
  const width = Math.max(1, count * state.cell);
  const height = strips.length * STRIP_HEIGHT;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  strips.forEach((strip, line) => {
    for (let i = 0; i < count; i++) {
      pen.fillStyle = colourOf(strip.values[i], strip.scale);
      pen.fillRect(i * state.cell, line * STRIP_HEIGHT + 2, state.cell - (state.cell > 6 ? 1 : 0), STRIP_HEIGHT - 4);
    }
  });
  if (state.token >= 0) {
    pen.strokeStyle = isDark() ? "#fff" : "#000";
    pen.lineWidth = 1.5;
    pen.strokeRect(state.token * state.cell + 0.5, 0.75, state.cell - 1, height - 1.5);
  }
}
