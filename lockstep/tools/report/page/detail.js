// One sample: its texts, its tokens with their strips, and the other samples of its prompt.

const detail = { row: -1, strips: null, colouring: "advantage", siblings: "step" };

async function showDetail(row) {
  detail.row = row;
  const [texts, tokens] = await Promise.all([textsOf(row), tokensOf(row)]);
  if (detail.row !== row) return;
  const { rows } = store;
  const run = store.runs[rows.run[row]];
  const outcome = OUTCOME_TEXTS[store.head.outcomes[rows.outcome[row]]];
  const facts = [["reward", short(rows.reward[row])], ["tokens", short(rows.length[row])], ["KL", short(rows.kl[row])], ["outcome", outcome || "–"]];
  const title = `${store.runs.length > 1 ? `${store.head.runs[rows.run[row]].name}, ` : ""}${rows.validation[row] ? "validation at" : ""} step ${rows.step[row]}`;
  const panel = byId("detail");
  detail.strips = null;
  refill(panel,
    el("div", { class: "detail-head" },
      el("button", { class: "back", id: "detail-back", text: "← List", on: { click: closeDetail } }),
      el("h2", { text: title }),
      el("span", { class: "moves" },
        el("button", { class: "quiet", "aria-label": "Previous sample", text: "k ↑", on: { click: () => moveSelection(-1) } }),
        el("button", { class: "quiet", "aria-label": "Next sample", text: "j ↓", on: { click: () => moveSelection(1) } }))),
    el("dl", { class: "facts" }, ...facts.map(([name, text]) => el("div", {}, el("dt", { text: name }), el("dd", { text })))),
    texts.failure ? el("pre", { class: "failure", text: visible(texts.failure) }) : null,
    textBox("Prompt", texts.prompt, "prompt"),
    tokens ? tokenPart(tokens, run) : textBox("Response", texts.response, "response"),
    texts.truth === null || texts.truth === undefined ? null : textBox("Ground truth", asText(texts.truth)),
    texts.said ? saidTable(texts.said) : null,
    siblingPart(row));
  if (detail.strips) detail.strips.draw();
  panel.scrollTop = 0;
}

function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

function textBox(title, text, name = "") {
  return el("section", { class: `box ${name}` }, el("h3", { text: title }), el("pre", { dir: "auto", text: visible(text) }));
}

/** What the reward function returned beside the score. */
function saidTable(said) {
  const facts = Object.entries(said).map(([name, value]) => el("div", {}, el("dt", { text: visible(name) }), el("dd", { text: visible(typeof value === "number" ? short(value) : asText(value)) })));
  return el("section", { class: "box" }, el("h3", { text: "What the reward said" }), el("dl", { class: "said" }, ...facts));
}

/** The response as tokens, coloured by one of the strips, and the strips. */
function tokenPart(tokens, run) {
  const strips = stripsOf(tokens);
  const words = Array.from(tokens.token, (token) => run.words.get(token) ?? `⟨${token}⟩`);
  const spans = words.map((word, i) => el("span", { "data-token": i, class: tokens.mask && !tokens.mask[i] ? "not-own" : null, text: visible(word) || "∅" }));
  const text = el("div", { class: "tokens" }, ...turnsOf(tokens, spans));
  const readout = el("div", { class: "readout" });
  const paint = () => {
    const strip = strips.find((one) => one.name === detail.colouring);
    spans.forEach((span, i) => {
      span.style.backgroundColor = strip ? colourOf(strip.values[i], strip.scale, 0.55) : "";
    });
  };
  const onMove = (i) => {
    text.querySelector(".here")?.classList.remove("here");
    spans[i].classList.add("here");
    const numbers = strips.map((strip) => [strip.name, strip.text(i)]);
    readout.replaceChildren(el("span", { class: "readout-token", text: `${i}  ${JSON.stringify(visible(words[i]))}` }),
      ...numbers.map(([name, number]) => el("span", { "data-strip": name }, el("b", { text: name }), ` ${number}`)));
    return `token ${i} ${visible(words[i])}: ${numbers.map(([name, number]) => `${name} ${number}`).join(", ")}`;
  };
  detail.strips = makeStrips(tokens, strips, onMove);
  text.addEventListener("click", (event) => {
    const place = event.target.dataset.token;
    if (place !== undefined) detail.strips.move(Number(place));
  });
  const names = strips.map((strip) => [strip.name, strip.name]);
  const colouring = select("Colour the tokens by", [["", "nothing"], ...names], names.some(([name]) => name === detail.colouring) ? detail.colouring : "", (name) => {
    detail.colouring = name;
    paint();
  });
  paint();
  return el("section", { class: "box response" }, el("h3", {}, el("span", { text: "Response" }), labelled("Colour by", colouring)), text, readout, detail.strips.node);
}

/** The tokens in boxes: one, or of an episode one for each turn of the policy and each answer of its environment. */
function turnsOf(tokens, spans) {
  const box = (part) => el("pre", { dir: "auto" }, ...part);
  if (!tokens.turn) return [box(spans)];
  const boxes = [];
  for (let start = 0, end = 0; start < spans.length; start = end) {
    const isOwn = tokens.mask[start];
    while (end < spans.length && tokens.turn[end] === tokens.turn[start] && tokens.mask[end] === isOwn) end++;
    boxes.push(el("p", { class: "turn", text: isOwn ? `turn ${tokens.turn[start]}` : "environment" }), box(spans.slice(start, end)));
  }
  return boxes;
}

/** Rows of the same prompt: in the same step, or anywhere. */
function siblingsOf(row, where) {
  const { rows } = store;
  const found = [];
  for (let other = 0; other < rows.count; other++) {
    const isSame = where === "step"
      ? rows.run[other] === rows.run[row] && rows.step[other] === rows.step[row] && rows.validation[other] === rows.validation[row] && rows.group[other] === rows.group[row]
      : rows.prompt[other] === rows.prompt[row];
    if (isSame && store.runs[rows.run[other]].shown) found.push(other);
  }
  return found;
}

function siblingPart(row) {
  const grid = el("div", { class: "siblings" });
  const count = el("span", { class: "count" });
  const draw = () => {
    const found = siblingsOf(row, detail.siblings);
    count.textContent = found.length > 48 ? `48 of ${found.length}` : String(found.length);
    grid.replaceChildren(...found.slice(0, 48).map((other) => sibling(other, other === row)));
  };
  const where = select("Samples of this prompt from", [["step", "this step"], ["anywhere", "every step and run"]], detail.siblings, (value) => {
    detail.siblings = value;
    draw();
  });
  draw();
  return el("section", { class: "box" }, el("h3", {}, el("span", { text: "Samples of this prompt" }), count, labelled("From", where)), grid);
}

function sibling(row, isThis) {
  const { rows } = store;
  const dot = el("span", { class: "run-dot", hidden: store.runs.length < 2 });
  dot.style.background = runColour(rows.run[row]);
  const text = el("span", { class: "sibling-text", dir: "auto", text: "…" });
  textsOf(row).then((texts) => {
    text.textContent = visible(texts.response.slice(0, 600));
  });
  return el("button", { class: `sibling ${rewardClass(rows.reward[row])}`, "data-row": row, "aria-current": isThis, on: { click: () => choose(row) } },
    el("span", { class: "sibling-head" }, dot, el("b", { text: short(rows.reward[row]) }), ` step ${rows.step[row]}${rows.validation[row] ? " val" : ""}, ${short(rows.length[row])} tokens`), text);
}
