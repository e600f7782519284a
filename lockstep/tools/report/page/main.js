// The page begins here: take in the blocks, draw, and (live) ask for more.

const TABS = ["overview", "samples", "stages", "settings", "alarms"];
const POLL_MS = 2000;
const drawn = new Set();
const live = { epoch: null, since: 0 };

function openTabName() {
  return TABS.find((name) => !byId(name).hidden);
}

/** Show a part; it is drawn when it is first shown, and after every change. */
function openTab(name, focus = false) {
  for (const tab of TABS) {
    byId(tab).hidden = tab !== name;
    const button = byId(`tab-${tab}`);
    button.setAttribute("aria-selected", tab === name);
    button.tabIndex = tab === name ? 0 : -1;
  }
  if (focus) byId(`tab-${name}`).focus();
  document.body.dataset.tab = name;
  if (!location.hash.startsWith(`#${name}`)) history.replaceState(null, "", `#${name}`);
  if (!drawn.has(name)) {
    drawn.add(name);
    ({ overview: drawOverview, samples: drawSamples, stages: drawStages, settings: drawSettings, alarms: drawAlarms })[name]();
  }
}

/** Draw the open part again, and the others when they are opened. */
function redraw() {
  drawn.clear();
  drawRuns();
  drawAlarms();
  openTab(openTabName());
}

/** The runs' names, each with a switch where there are several. */
function drawRuns() {
  const names = store.head.runs.map((run) => run.name);
  byId("title").textContent = names.join(" · ");
  document.title = `${names.join(" · ")} - Lockstep report`;
  byId("runs").hidden = names.length < 2;
  byId("runs").replaceChildren(...names.map((name, number) => {
    const dot = el("span", { class: "run-dot" });
    dot.style.background = runColour(number);
    const isShown = runOf(number).shown;
    return el("button", { class: "run-switch", "aria-pressed": isShown, on: { click: () => {
      runOf(number).shown = !isShown;
      redraw();
    } } }, dot, el("span", { text: name }));
  }));
}

async function begin() {
  for (const name of TABS) byId(`tab-${name}`).addEventListener("click", () => openTab(name));
  document.addEventListener("keydown", onKey);
  makeHelp();
  let wait = 0;
  addEventListener("resize", () => {
    clearTimeout(wait);
    wait = setTimeout(redrawCurves, 150);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  if (document.documentElement.dataset.mode === "live") return poll();
  for (const node of document.querySelectorAll("script.block")) {
    await addBlock(node.dataset.kind, Number(node.dataset.first), node.textContent);
    node.remove();
  }
  start();
}

function start() {
  drawRuns();
  drawAlarms();
  const [tab, row] = location.hash.slice(1).split("/");
  openTab(TABS.includes(tab) ? tab : "overview");
  if (row !== undefined && Number(row) < store.rows.count) choose(Number(row));
  requestAnimationFrame(() => setTimeout(() => {
    performance.mark("first-view");
    document.documentElement.dataset.ready = "";
  }));
}

/** Ask the server what is new, again and again. */
async function poll() {
  const status = byId("status");
  try {
    const asked = live.epoch === null ? "" : `&epoch=${live.epoch}`;
    const answer = await fetch(`/blocks?since=${live.since}${asked}`);
    if (!answer.ok) throw new Error(await answer.text());
    const { epoch, blocks } = await answer.json();
    if (live.epoch !== null && epoch !== live.epoch) return location.reload(); // the run went back to a checkpoint
    for (const block of blocks) await addBlock(block.kind, block.first, block.data);
    live.since += blocks.length;
    if (live.epoch === null) start();
    else if (blocks.length) redraw();
    live.epoch = epoch;
    status.textContent = "live";
  } catch (error) {
    status.textContent = `waiting: ${error.message}`;
  }
  setTimeout(poll, POLL_MS);
}

begin();
