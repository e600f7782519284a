// The list of samples. Only the rows in sight are elements, so that a hundred thousand scroll like ten.

const ROW_HEIGHT = 46;
const COLUMNS = [
  ["step", "step"], ["reward", "reward"], ["length", "tokens"], ["kl", "KL"], ["outcome", "outcome"],
];
const OUTCOME_TEXTS = { stop: "ended", length: "cut at limit", missing: "reward missing", error: "failed", abort: "aborted", "": "" };
const list = { scroller: null, space: null, cells: [], selected: -1, onSelect: null };

/** The list with its sortable heads; `onSelect(row)` hears of choices. */
function makeTable(onSelect, onSort) {
  list.onSelect = onSelect;
  const heads = COLUMNS.map(([name, text]) => {
    const button = el("button", { "data-sort": name, on: { click: () => onSort(name) } }, el("span", { text }));
    return el("div", { role: "columnheader", class: `cell ${name}` }, button);
  });
  heads.push(el("div", { role: "columnheader", class: "cell text", text: "prompt and response" }));
  list.space = el("div", { class: "space", role: "presentation" });
  list.scroller = el("div", { class: "scroller", tabindex: 0, "aria-label": "Samples; arrow keys or j and k choose one", role: "rowgroup", on: { scroll: drawRows } }, list.space);
  list.head = el("div", { class: "row head", role: "row" }, ...heads);
  list.table = el("div", { class: "table", role: "grid", "aria-label": "Samples" }, list.head, list.scroller);
  new ResizeObserver(drawRows).observe(list.scroller);
  return list.table;
}

/** Show `view.order` from its beginning, or (`keep`) where it was. */
function showOrder(keep = false) {
  list.space.style.height = `${view.order.length * ROW_HEIGHT}px`;
  if (!keep) list.scroller.scrollTop = 0;
  list.table.setAttribute("aria-rowcount", view.order.length);
  for (const head of list.head.children) {
    const button = head.querySelector("button");
    if (!button) continue;
    const isSorted = button.dataset.sort === view.sort;
    head.setAttribute("aria-sort", isSorted ? (view.descending ? "descending" : "ascending") : "none");
  }
  drawRows();
}

function drawRows() {
  const first = Math.max(0, Math.floor(list.scroller.scrollTop / ROW_HEIGHT) - 4);
  const last = Math.min(view.order.length, first + Math.ceil(list.scroller.clientHeight / ROW_HEIGHT) + 9);
  while (list.cells.length < last - first) list.cells.push(makeRow());
  const needed = list.cells.slice(0, last - first);
  needed.forEach((cells, i) => fillRow(cells, first + i));
  list.space.replaceChildren(...needed.map((cells) => cells.node));
}

function makeRow() {
  const dot = el("span", { class: "run-dot" });
  const cells = { run: dot };
  for (const [name] of COLUMNS) cells[name] = el("div", { class: `cell ${name}`, role: "gridcell" });
  cells.prompt = el("span", { class: "excerpt-prompt" });
  cells.response = el("span", { class: "excerpt-response" });
  cells.step.append(dot, (cells.stepText = el("span")));
  const text = el("div", { class: "cell text", role: "gridcell" }, cells.prompt, cells.response);
  cells.node = el("div", { class: "row", role: "row", on: { click: () => list.onSelect(cells.row) } }, ...COLUMNS.map(([name]) => cells[name]), text);
  return cells;
}

function fillRow(cells, place) {
  const row = view.order[place];
  const { rows } = store;
  cells.node.style.transform = `translateY(${place * ROW_HEIGHT}px)`;
  cells.node.setAttribute("aria-rowindex", place + 1);
  cells.node.setAttribute("aria-selected", row === list.selected);
  cells.node.dataset.row = row;
  cells.row = row;
  cells.run.style.background = runColour(rows.run[row]);
  cells.run.hidden = store.runs.length < 2;
  cells.stepText.textContent = `${rows.step[row]}${rows.validation[row] ? " val" : ""}`;
  for (const name of ["reward", "length", "kl"]) cells[name].textContent = short(rows[name][row], 3);
  cells.reward.className = `cell reward ${rewardClass(rows.reward[row])}`;
  const outcome = store.head.outcomes[rows.outcome[row]];
  cells.outcome.textContent = OUTCOME_TEXTS[outcome];
  cells.outcome.className = `cell outcome is-${outcome}`;
  cells.prompt.textContent = "";
  cells.response.textContent = "…";
  textsOf(row).then((texts) => {
    if (cells.row !== row) return;
    cells.prompt.textContent = excerpt(question(texts.prompt), 160);
    cells.response.textContent = excerpt(texts.response, 160);
  });
}

function rewardClass(reward) {
  if (Number.isNaN(reward)) return "unknown";
  return reward > 0 ? "good" : "bad";
}

/** A prompt from the last message of a user on, in the usual chat templates: what tells it from others. */
function question(prompt) {
  const marks = [...prompt.matchAll(/<[^<>]*user(?:[^<>]*>|\n)|>user\n|>user<[^<>]*>/g)];
  const last = marks[marks.length - 1];
  return last ? prompt.slice(last.index + last[0].length).trimStart() : prompt;
}

function excerpt(text, most) {
  const cut = text.length <= most ? text : `${text.slice(0, most)}…`;
  return visible(cut).replace(/\s+/g, " ");
}

/** Mark a row as chosen and bring it into sight. */
function selectInList(row) {
  list.selected = row;
  const place = view.order.indexOf(row);
  if (place >= 0) {
    const { scrollTop, clientHeight } = list.scroller;
    if (place * ROW_HEIGHT < scrollTop) list.scroller.scrollTop = place * ROW_HEIGHT;
    else if ((place + 1) * ROW_HEIGHT > scrollTop + clientHeight) list.scroller.scrollTop = (place + 1) * ROW_HEIGHT - clientHeight;
  }
  drawRows();
}
