// Line charts in SVG: one or several runs, a band or bars for intervals, the raw line faint behind the smoothed one.

const CHART = { height: 168, left: 52, right: 10, top: 8, bottom: 22 };
const chartOptions = { smoothing: 0, x: "step" };

/** Draws when it comes into view; `redraw` draws again. `series()`: [{number, name, xs, ys, intervals}]. */
function makeChart(title, series) {
  const value = el("span", { class: "chart-value" });
  const frame = el("div", { class: "chart-frame" });
  const figure = el("figure", { class: "chart", "data-metric": title },
    el("figcaption", {}, el("span", { class: "chart-title", text: title, title }), value), frame);
  let isSeen = false;
  const redraw = () => {
    if (isSeen) drawChart(frame, value, title, series());
  };
  new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting) && !isSeen) {
      isSeen = true;
      redraw();
    }
  }, { rootMargin: "200px" }).observe(figure);
  figure.redraw = redraw;
  return figure;
}

function drawChart(frame, value, title, all) {
  frame.replaceChildren();
  const series = all.map(thinned).filter((one) => one.xs.length);
  const odd = all.reduce((sum, one) => sum + one.ys.filter((y) => typeof y === "string").length, 0);
  if (!series.length) {
    frame.append(el("p", { class: "empty", text: odd ? "no finite value" : "no values in the runs shown" }));
    value.textContent = "";
    return;
  }
  const width = Math.max(220, frame.clientWidth || 320);
  const plot = svg("svg", { viewBox: `0 0 ${width} ${CHART.height}`, width, height: CHART.height, role: "img", "aria-label": summary(title, series) });
  const scale = scales(series, width);
  axes(plot, scale, width);
  for (const one of series) drawSeries(plot, one, scale);
  frame.append(plot);
  const last = () => {
    value.textContent = series.map((one) => short(one.ys[one.ys.length - 1])).join("  ") + (odd ? `  (${odd} not finite)` : "");
  };
  last();
  follow(plot, value, series, scale, width, last);
}

/** Without gaps, and at most about a thousand points: the mean of each stretch. */
function thinned(one) {
  const kept = { ...one, xs: [], ys: [], intervals: [], partial: [] };
  const finite = [];
  one.ys.forEach((y, i) => {
    if (typeof y === "number" && Number.isFinite(one.xs[i])) finite.push(i);
  });
  const stretch = Math.max(1, Math.ceil(finite.length / 1000));
  for (let start = 0; start < finite.length; start += stretch) {
    const part = finite.slice(start, start + stretch);
    kept.xs.push(one.xs[part[part.length - 1]]);
    kept.ys.push(part.reduce((sum, i) => sum + one.ys[i], 0) / part.length);
    kept.partial.push(Boolean(one.partial) && part.some((i) => one.partial[i]));
    kept.intervals.push(one.intervals ? one.intervals[part[part.length - 1]] : undefined);
  }
  return kept;
}

function smoothed(ys, weight) {
  let mean = 0;
  let norm = 0;
  return ys.map((y) => {
    mean = weight * mean + (1 - weight) * y;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

function summary(title, series) {
  const texts = series.map((one) => {
    const low = one.ys.reduce((a, b) => Math.min(a, b));
    const high = one.ys.reduce((a, b) => Math.max(a, b));
    return `${one.name}: first ${short(one.ys[0])}, last ${short(one.ys[one.ys.length - 1])}, from ${short(low)} to ${short(high)}`;
  });
  return `${title}. ${texts.join(". ")}`;
}

function scales(series, width) {
  const range = { x0: Infinity, x1: -Infinity, y0: Infinity, y1: -Infinity };
  for (const one of series) {
    one.xs.forEach((x, i) => {
      const [low, high] = one.intervals[i] || [one.ys[i], one.ys[i]];
      range.x0 = Math.min(range.x0, x);
      range.x1 = Math.max(range.x1, x);
      range.y0 = Math.min(range.y0, low, one.ys[i]);
      range.y1 = Math.max(range.y1, high, one.ys[i]);
    });
  }
  if (range.x0 === range.x1) range.x1 = range.x0 + 1;
  if (range.y0 === 0 && range.y1 === 0) range.y1 = 1;
  const margin = (range.y1 - range.y0) * 0.06 || Math.abs(range.y1) * 0.1 || 1;
  range.y0 -= margin;
  range.y1 += margin;
  const across = width - CHART.left - CHART.right;
  const up = CHART.height - CHART.top - CHART.bottom;
  return {
    ...range,
    x: (x) => CHART.left + ((x - range.x0) / (range.x1 - range.x0)) * across,
    y: (y) => CHART.top + (1 - (y - range.y0) / (range.y1 - range.y0)) * up,
  };
}

/** Round numbers within the range. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function axes(plot, scale, width) {
  for (const y of ticks(scale.y0, scale.y1, 4)) {
    plot.append(svg("line", { class: "grid", x1: CHART.left, x2: width - CHART.right, y1: scale.y(y), y2: scale.y(y) }));
    plot.append(svg("text", { class: "tick", x: CHART.left - 6, y: scale.y(y) + 4, "text-anchor": "end", text: short(y) }));
  }
  const marks = ticks(scale.x0, scale.x1, Math.max(2, Math.floor(width / 90)));
  for (const x of marks.filter((mark) => chartOptions.x === "time" || Number.isInteger(mark))) {
    const text = chartOptions.x === "time" ? duration(x) : short(x);
    plot.append(svg("text", { class: "tick", x: scale.x(x), y: CHART.height - 6, "text-anchor": "middle", text }));
  }
}

function drawSeries(plot, one, scale) {
  const colour = runColour(one.number);
  const isJoined = (i) => i > 0 && one.partial[i] === one.partial[i - 1]; // a validation of a part of the rows is another measurement
  const line = (ys) => ys.map((y, i) => `${isJoined(i) ? "L" : "M"}${scale.x(one.xs[i]).toFixed(1)} ${scale.y(y).toFixed(1)}`).join("");
  const path = (ys, name) => {
    const node = svg("path", { class: name, d: line(ys) });
    node.style.stroke = colour;
    if (one.partial[0] && one.partial[one.partial.length - 1]) node.setAttribute("stroke-dasharray", "4 3");
    plot.append(node);
  };
  one.intervals.forEach((ends, i) => {
    if (!ends) return;
    const x = scale.x(one.xs[i]);
    const bar = svg("path", { class: "interval", d: `M${x - 3} ${scale.y(ends[0])}h6m-3 0V${scale.y(ends[1])}m-3 0h6` });
    bar.style.stroke = colour;
    plot.append(bar);
  });
  if (chartOptions.smoothing && one.ys.length > 2) {
    path(one.ys, "line raw");
    path(smoothed(one.ys, chartOptions.smoothing), "line");
  } else path(one.ys, "line");
  if (one.xs.length <= 60) {
    one.xs.forEach((x, i) => {
      const dot = svg("circle", { class: "dot", cx: scale.x(x), cy: scale.y(one.ys[i]), r: one.xs.length === 1 ? 3.5 : 2 });
      if (one.partial[i]) {
        dot.style.fill = "none";
        dot.style.stroke = colour;
        dot.classList.add("partial");
        dot.setAttribute("r", 3.5);
      } else dot.style.fill = colour;
      plot.append(dot);
    });
  }
}

/** The values under the pointer, in the caption. */
function follow(plot, value, series, scale, width, last) {
  const cursor = svg("line", { class: "cursor", y1: CHART.top, y2: CHART.height - CHART.bottom, x1: -9, x2: -9 });
  plot.append(cursor);
  plot.addEventListener("pointermove", (event) => {
    const x = ((event.clientX - plot.getBoundingClientRect().left) / plot.clientWidth) * width;
    const found = series.map((one) => {
      let best = 0;
      for (let i = 1; i < one.xs.length; i++) if (Math.abs(scale.x(one.xs[i]) - x) < Math.abs(scale.x(one.xs[best]) - x)) best = i;
      return { one, i: best };
    });
    const place = scale.x(found[0].one.xs[found[0].i]);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    const at = found[0].one.xs[found[0].i];
    const where = chartOptions.x === "time" ? duration(at) : `step ${short(at)}`;
    value.textContent = `${where}:  ${found.map(({ one, i }) => short(one.ys[i]) + range(one.intervals[i]) + (one.partial[i] ? " (of a part of the rows)" : "")).join("  ")}`;
  });
  plot.addEventListener("pointerleave", () => {
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    last();
  });
}

function range(ends) {
  return ends ? ` [${short(ends[0])}, ${short(ends[1])}]` : "";
}
