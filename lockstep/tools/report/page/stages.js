// Time and memory by stage.

const AROUND = ["step", "testing", "save_checkpoint"];
const STAGE_COLOURS = ["#4c7fd9", "#e08a3c", "#57a773", "#b565c4", "#c9a227", "#3fa7b5", "#d1596b", "#8a7f6d", "#7a6fe0", "#6b8f3a", "#b0785a", "#94a3b8"];

/** [{step, stages: [[name, seconds], ...]}]: stages in the order in which they ran, then what is done beside the step. */
function stageTimes(run) {
  const names = [...run.columns.keys()].filter((name) => name.startsWith("timing_s/")).map((name) => name.slice(9));
  const inside = names.filter((name) => !AROUND.includes(name));
  return run.steps.map((step, i) => {
    const value = (name) => (run.columns.get(`timing_s/${name}`) || [])[i];
    const stages = inside.map((name) => [name, value(name)]).filter(([, seconds]) => typeof seconds === "number");
    const rest = typeof value("step") === "number" ? value("step") - stages.reduce((sum, [, seconds]) => sum + seconds, 0) : 0;
    if (rest > 0) stages.push(["(none of them)", rest]);
    for (const name of AROUND.slice(1)) if (typeof value(name) === "number") stages.push([name, value(name)]);
    return { step, stages };
  }).filter((one) => one.stages.length);
}

function drawStages() {
  const parts = store.runs.flatMap((run, number) => (run.shown ? [runStages(run, number)] : []));
  byId("stages").replaceChildren(...parts);
}

function runStages(run, number) {
  const times = stageTimes(run);
  const found = [...new Set(times.flatMap((one) => one.stages.map(([name]) => name)))];
  const isInside = (name) => run.columns.has(`timing_s/${name}`) && !AROUND.includes(name);
  const names = [...found.filter(isInside), ...found.filter((name) => !isInside(name))];
  const colour = (name) => STAGE_COLOURS[names.indexOf(name) % STAGE_COLOURS.length];
  const section = el("section", { class: "run-stages" }, el("h2", { text: store.head.runs[number].name }));
  if (!times.length) section.append(el("p", { class: "empty", text: "This run has no times of stages." }));
  else {
    const one = el("div", { class: "one-step" });
    const show = (i) => one.replaceChildren(...oneStep(times[i], colour));
    section.append(el("h3", { text: "Seconds by step" }), stackedBars(times, colour, show), one, stageTable(times, names, colour));
    show(times.length - 1);
  }
  section.append(el("h3", { text: "Peak memory by stage" }), memoryTable(run));
  return section;
}

/** At most 160 bars: each the mean of some steps. A click, or the slider, chooses a step. */
function stackedBars(times, colour, show) {
  const width = 960;
  const height = 190;
  const each = Math.ceil(times.length / 160);
  const bars = [];
  for (let i = 0; i < times.length; i += each) bars.push(meanTimes(times.slice(i, i + each)));
  const most = Math.max(...bars.map((bar) => bar.total)) || 1;
  const wide = (width - 50) / bars.length;
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height + 20}`, class: "bars", role: "img", "aria-label": `Seconds of each stage by step, at most ${duration(most)}` });
  for (const y of ticks(0, most, 4)) {
    const at = height - (y / most) * (height - 10);
    plot.append(svg("line", { class: "grid", x1: 46, x2: width, y1: at, y2: at }), svg("text", { class: "tick", x: 40, y: at + 4, "text-anchor": "end", text: short(y) }));
  }
  bars.forEach((bar, i) => {
    let y = height;
    for (const [name, seconds] of bar.stages) {
      const tall = (seconds / most) * (height - 10);
      y -= tall;
      const rect = svg("rect", { x: 50 + i * wide, y, width: Math.max(0.5, wide - Math.min(1, wide / 5)), height: tall });
      rect.style.fill = colour(name);
      rect.append(svg("title", { text: `step ${bar.step}: ${name} ${duration(seconds)}` }));
      plot.append(rect);
    }
  });
  const slider = el("input", { type: "range", min: 0, max: times.length - 1, value: times.length - 1, "aria-label": "Step", on: { input: () => show(Number(slider.value)) } });
  plot.addEventListener("click", (event) => {
    const box = plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    slider.value = Math.floor(((x - 50) / (width - 50)) * times.length);
    show(Number(slider.value));
  });
  return el("div", {}, plot, slider);
}

function meanTimes(part) {
  const sums = new Map();
  for (const one of part) for (const [name, seconds] of one.stages) sums.set(name, (sums.get(name) || 0) + seconds);
  const stages = [...sums].map(([name, seconds]) => [name, seconds / part.length]);
  return { step: part[0].step, stages, total: stages.reduce((sum, [, seconds]) => sum + seconds, 0) };
}

/** The stages of one step one after the other, on one line. */
function oneStep({ step, stages }, colour) {
  const total = stages.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  const line = el("div", { class: "timeline", role: "img", "aria-label": `Step ${step}: ${stages.map(([name, s]) => `${name} ${duration(s)}`).join(", ")}` });
  for (const [name, seconds] of stages) {
    const part = el("span", { title: `${name} ${duration(seconds)}`, text: seconds / total > 0.08 ? name : "" });
    part.style.flexGrow = seconds / total;
    part.style.background = colour(name);
    line.append(part);
  }
  return [el("p", { class: "path", text: `Step ${step}: ${duration(total)}` }), line];
}

function stageTable(times, names, colour) {
  const mean = meanTimes(times);
  const sums = new Map(mean.stages);
  const rows = names.map((name) => {
    const dot = el("span", { class: "run-dot" });
    dot.style.background = colour(name);
    const seconds = sums.get(name);
    return el("tr", {}, el("th", { scope: "row" }, dot, el("span", { text: name })), el("td", { text: duration(seconds) }), el("td", { text: `${((100 * seconds) / mean.total).toFixed(1)} %` }));
  });
  return el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ...["stage", "mean of all steps", "share"].map((text) => el("th", { scope: "col", text })))), el("tbody", {}, ...rows));
}

function memoryTable(run) {
  const peak = (prefix, stage) => (run.columns.get(`${prefix}/${stage}`) || []).filter((value) => typeof value === "number").reduce((a, b) => Math.max(a, b), 0);
  const [allocated, reserved] = ["perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"];
  const stages = [...run.columns.keys()].filter((name) => name.startsWith(`${allocated}/`)).map((name) => name.slice(allocated.length + 1));
  if (!stages.length) return el("p", { class: "empty", text: "This run measured no GPU memory (it ran on a CPU)." });
  const most = Math.max(...stages.map((stage) => Math.max(peak(allocated, stage), peak(reserved, stage))));
  const bar = (value) => {
    const inner = el("span", { class: "bar" });
    inner.style.width = `${(100 * value) / most}%`;
    return el("td", {}, el("span", { class: "bar-box" }, inner), el("span", { text: `${value.toFixed(1)} GB` }));
  };
  const rows = stages.map((stage) => el("tr", {}, el("th", { scope: "row", text: stage }), bar(peak(allocated, stage)), bar(peak(reserved, stage))));
  return el("table", { class: "plain memory" }, el("thead", {}, el("tr", {}, ...["stage", "allocated", "reserved"].map((text) => el("th", { scope: "col", text })))), el("tbody", {}, ...rows));
}
