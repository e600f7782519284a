// The browser of samples: filters, list and one sample.

let samplesMade = false;

function drawSamples() {
  const panel = byId("samples");
  if (!store.rows.count) {
    samplesMade = false;
    panel.replaceChildren(el("p", { class: "empty", text: "No samples are kept in these runs (trainer.report_rows is 0, or the recipe has none)." }));
    return;
  }
  if (!samplesMade) {
    samplesMade = true;
    list.selected = -1;
    panel.replaceChildren(filterBar(), el("div", { class: "browser" }, makeTable(choose, sortBy), el("div", { id: "detail", class: "detail", tabindex: -1, "aria-label": "One sample", role: "region" })));
  }
  refreshSamples(true);
  if (list.selected < 0 && view.order.length && innerWidth > 900) { // where list and sample stand side by side
    selectInList(view.order[0]);
    showDetail(view.order[0]);
  }
}

/** Filter and sort again. */
function refreshSamples(keep = false) {
  if (!samplesMade) return;
  const started = performance.now();
  applyFilters();
  showOrder(keep);
  const all = store.head.samples;
  const left = all.found > all.shown ? ` (of ${all.found} in the run)` : "";
  byId("sample-count").textContent = `${view.order.length.toLocaleString("en")} of ${store.rows.count.toLocaleString("en")} samples${left}`;
  byId("samples").dataset.sortMs = (performance.now() - started).toFixed(1);
}

function sortBy(name) {
  view.descending = view.sort === name ? !view.descending : true;
  view.sort = name;
  refreshSamples();
}

function filterBar() {
  const changed = () => refreshSamples();
  const limit = (name, end, text) => el("input", { type: "number", step: "any", class: "limit", "aria-label": `${text} ${end ? "at most" : "at least"}`, placeholder: end ? "to" : "from",
    "data-limit": `${name}-${end}`, on: { input: (event) => {
      view.ranges[name][end] = event.target.value === "" ? null : Number(event.target.value);
      changed();
    } } });
  const pair = (name, text) => el("div", { class: "field", role: "group", "aria-label": text }, el("span", { text }), el("span", { class: "pair" }, limit(name, 0, text), limit(name, 1, text)));
  let wait = 0;
  const find = el("input", { type: "search", id: "sample-search", placeholder: "in prompt or response", autocomplete: "off", on: { input: () => {
    clearTimeout(wait);
    wait = setTimeout(async () => {
      const say = (text) => { byId("sample-count").textContent = text; };
      if (await search(find.value, say)) changed();
    }, 120);
  } } });
  const outcomes = [["all", "any outcome"], ...["stop", "length", "missing", "error", "abort"].map((name) => [name, OUTCOME_TEXTS[name]])];
  const outcome = select("Outcome", outcomes, view.outcome, (value) => { view.outcome = value; changed(); });
  const split = select("Split", [["all", "both"], ["training", "training"], ["validation", "validation"]], view.split, (value) => { view.split = value; changed(); });
  const withTokens = el("input", { type: "checkbox", id: "with-tokens", on: { change: () => { view.withTokens = withTokens.checked; changed(); } } });
  return el("details", { class: "filters", open: innerWidth > 900 },
    el("summary", {}, el("span", { text: "Filters" }), el("span", { id: "sample-count", role: "status" })),
    el("div", { class: "controls" }, labelled("Find", find), labelled("Split", split), labelled("Outcome", outcome),
      pair("reward", "Reward"), pair("length", "Tokens"), pair("kl", "KL"), pair("step", "Step"),
      el("label", { class: "check" }, withTokens, el("span", { text: "only with token strips" }))));
}

/** Show a sample. */
function choose(row) {
  selectInList(row);
  if (document.activeElement.matches("[role=tab]")) list.scroller.focus({ preventScroll: true }); // arrow keys are the samples' now
  document.body.classList.add("in-detail");
  history.replaceState(null, "", `#samples/${row}`);
  return showDetail(row);
}

function closeDetail() {
  document.body.classList.remove("in-detail");
  list.scroller.focus();
}

/** The next sample of the list, or the one before. */
function moveSelection(by) {
  const place = view.order.indexOf(list.selected);
  const next = place < 0 ? 0 : Math.max(0, Math.min(view.order.length - 1, place + by));
  if (view.order.length) choose(view.order[next]);
}

/** The next sample of the same prompt, or the one before. */
function moveSibling(by) {
  if (detail.row < 0) return;
  const found = siblingsOf(detail.row, detail.siblings);
  choose(found[(found.indexOf(detail.row) + by + found.length) % found.length]);
}
