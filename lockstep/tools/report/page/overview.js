// Overview: what the run came to, and every metric as a curve.

const FIRST_CURVES = [
  /^val-core\/.*\/mean@\d+$/, /^critic\/score\/mean$/, /^(train|val)\/(loss|nll|accuracy|margin|kl)$/, /^actor\/(reward_kl_penalty|kl_loss)$/, /^actor\/ppo_kl$/,
  /^actor\/entropy$/, /^response_length\/mean$/, /^response_length\/clip_ratio$/, /^training\/groups_with_signal$/, /^actor\/pg_clipfrac$/,
  /^actor\/grad_norm$/, /^critic\/vf_explained_var$/, /^training\/rollout_log_probs_diff_max$/, /^perf\/throughput$/,
];
const VALIDATION_LOSSES = /^val\/(loss|nll|accuracy|kl)$/;
const HIDDEN_CURVES = /^(training\/global_step|training\/epoch)$|^val-aux\/.*\/(low|high)$|^val-first\//;
let curves = [];
let shownNames = "";

/** Series of a metric in the runs that are shown. */
function seriesOf(metric) {
  return store.runs.flatMap((run, number) => {
    const ys = run.columns.get(metric);
    if (!run.shown || !ys) return [];
    const begin = run.times.find((time) => time !== null) || 0;
    const xs = chartOptions.x === "time" ? run.times.map((time) => time - begin) : run.steps;
    const known = run.intervals.get(metric);
    const partial = isValidation(metric) ? run.steps.map((_, i) => shareOfRows(run, i) < 1) : null;
    const whole = { number, name: store.head.runs[number].name, xs, ys, partial, intervals: known ? run.steps.map((step) => known.get(step)) : null };
    const again = run.columns.get(`val-first/${metric}`);
    if (!again) return [whole];
    // The rows of the validation before training, which were a part, are a series of their own: later steps have them as val-first.
    const first = { ...whole, name: `${whole.name}, rows of the first validation`, ys: ys.map((y, i) => (partial[i] ? y : again[i])), partial: ys.map(() => true), intervals: null };
    return [{ ...whole, ys: ys.map((y, i) => (partial[i] ? null : y)) }, first];
  });
}

function isValidation(metric) {
  return /^val(-core|-aux)?\//.test(metric);
}

/** The share of the validation's rows that was validated at the i-th step: before training it may be a part. */
function shareOfRows(run, i) {
  const share = (run.columns.get("val-aux/share_of_rows") || [])[i];
  return typeof share === "number" ? share : 1;
}

function metricNames() {
  const names = new Set();
  for (const run of store.runs) for (const name of run.columns.keys()) if (!HIDDEN_CURVES.test(name)) names.add(name);
  return [...names];
}

function drawOverview() {
  const names = metricNames();
  const top = () => [el("div", { class: "cards" }, ...store.runs.map(card)), alarmSummary()];
  if (names.length && names.join("\n") === shownNames) { // a live run: what the reader has opened, searched and scrolled to stays
    refill(byId("overview-top"), ...top());
    return redrawCurves();
  }
  shownNames = names.join("\n");
  const first = FIRST_CURVES.flatMap((pattern) => names.filter((name) => pattern.test(name))).filter((name, i, all) => all.indexOf(name) === i);
  const rest = names.filter((name) => !first.includes(name)).sort();
  curves = [];
  const panel = byId("overview");
  const charts = (list) => el("div", { class: "charts" }, ...list.map((name) => {
    const chart = makeChart(name, () => seriesOf(name));
    curves.push(chart);
    return chart;
  }));
  const groups = Map.groupBy ? Map.groupBy(rest, (name) => name.split("/")[0]) : groupBy(rest);
  refill(panel,
    fill(el("div", { id: "overview-top" }), {}, top()),
    curveControls(),
    names.length ? charts(first) : el("p", { class: "empty", text: "No step is done yet." }),
    ...[...groups].map(([group, list]) => el("details", { class: "group" },
      el("summary", {}, el("span", { text: group }), el("span", { class: "count", text: list.length })), charts(list))),
  );
}

function groupBy(names) {
  const groups = new Map();
  for (const name of names) groups.set(name.split("/")[0], [...(groups.get(name.split("/")[0]) || []), name]);
  return groups;
}

function redrawCurves() {
  for (const chart of curves) chart.redraw();
}

function curveControls() {
  const smoothing = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: chartOptions.smoothing, on: { input: () => {
    chartOptions.smoothing = Number(smoothing.value);
    redrawCurves();
  } } });
  const search = el("input", { type: "search", id: "metric-search", placeholder: "e.g. clip", autocomplete: "off", on: { input: () => {
    const wanted = search.value.toLowerCase();
    for (const chart of curves) chart.hidden = !chart.dataset.metric.toLowerCase().includes(wanted);
    for (const group of document.querySelectorAll("#overview details.group")) {
      group.hidden = ![...group.querySelectorAll(".chart")].some((chart) => !chart.hidden);
      group.open = Boolean(wanted) && !group.hidden;
    }
  } } });
  const axis = select("Horizontal axis", [["step", "step"], ["time", "time"]], chartOptions.x, (value) => {
    chartOptions.x = value;
    redrawCurves();
  });
  return el("div", { class: "controls" }, labelled("Find a metric", search), labelled("Horizontal axis", axis), labelled("Smoothing", smoothing));
}

/** Seconds until a run of `total` steps is done, at the speed of its last five; 0 where that is not known, or the page is not live. */
function secondsLeft(run, total) {
  if (!total || document.documentElement.dataset.mode !== "live") return 0;
  const times = run.steps.map((step, i) => [step, run.times[i]]).filter(([step, time]) => step > 0 && typeof time === "number").slice(-6);
  if (times.length < 2) return 0;
  const [[firstStep, firstTime], [lastStep, lastTime]] = [times[0], times[times.length - 1]];
  return lastStep > firstStep ? ((total - lastStep) * (lastTime - firstTime)) / (lastStep - firstStep) : 0;
}

/** The headline of one run. */
function card(run, number) {
  const known = store.head.runs[number];
  const facts = [];
  const lastOf = (name) => (run.columns.get(name) || []).findLast((value) => value !== null);
  const firstOf = (name) => (run.columns.get(name) || []).find((value, i) => value !== null && !(isValidation(name) && shareOfRows(run, i) < 1));
  const change = (name) => [...new Set([short(firstOf(name)), short(lastOf(name))])].join(" → ");
  if (run.steps.length) {
    const last = run.steps[run.steps.length - 1];
    facts.push(["steps", known.total ? `${short(last)} of ${short(known.total)}` : short(last)]);
    const seconds = secondsLeft(run, known.total);
    if (seconds > 0) facts.push(["left, at the last steps' speed", duration(seconds)]);
  }
  const times = run.times.filter((time) => time !== null);
  if (times.length > 1) facts.push(["time", duration(times[times.length - 1] - times[0])]);
  for (const name of [...run.columns.keys()].filter((metric) => FIRST_CURVES[0].test(metric) || VALIDATION_LOSSES.test(metric)).slice(0, 2)) {
    const ends = run.intervals.get(name) && run.intervals.get(name).get(run.steps.findLast((step) => run.intervals.get(name).has(step)));
    facts.push([name.split("/").slice(1).join("/"), `${change(name)}${range(ends)}`]);
    const [before, again] = [(run.columns.get(name) || []).find((value) => value !== null), lastOf(`val-first/${name}`)];
    if (again !== undefined) facts.push(["the same on the rows of the first validation", `${short(before)} → ${short(again)}`]);
  }
  for (const [name, text] of [["critic/score/mean", "training reward"], ["response_length/mean", "response length"]]) {
    if (run.columns.has(name)) facts.push([text, change(name)]);
  }
  if (run.columns.has("perf/throughput")) facts.push(["tokens/s per device", short(lastOf("perf/throughput"))]);
  const dot = el("span", { class: "run-dot" });
  dot.style.background = runColour(number);
  return el("article", { class: "card" },
    el("h2", {}, dot, el("span", { text: known.name }), el("span", { class: "badge", text: known.recipe })),
    known.folder === known.name ? null : el("p", { class: "path", text: known.folder }),
    el("dl", {}, ...facts.map(([name, text]) => el("div", {}, el("dt", { text: name }), el("dd", { text })))),
    ...known.notes.map((note) => el("p", { class: "note", text: note })));
}
