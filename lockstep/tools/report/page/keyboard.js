// Keys.

const KEYS = [
  ["1 … 5", "the parts of the report"], ["j, k", "next and previous sample"], ["↑, ↓", "the same"], ["←, →", "previous and next token"],
  ["[, ]", "previous and next sample of the same prompt"], ["/", "find"], ["Esc", "leave a field, a sample"], ["?", "this list"],
];

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches("input[type=search], input[type=number], select, textarea");
  if (event.key === "Escape") return escape(event.target, isTyping);
  if (isTyping || event.target.matches("input[type=range]")) return;
  const inSamples = !byId("samples").hidden && samplesMade;
  const actions = {
    "/": () => byId({ overview: "metric-search", samples: "sample-search", settings: "settings-search" }[openTabName()] || "tab-overview")?.focus(),
    "?": () => byId("help").showModal(),
  };
  TABS.forEach((name, i) => { actions[i + 1] = () => openTab(name); });
  if (inSamples) {
    Object.assign(actions, { j: () => moveSelection(1), k: () => moveSelection(-1), "]": () => moveSibling(1), "[": () => moveSibling(-1) });
    if (!event.target.matches("[role=tab]")) {
      Object.assign(actions, { ArrowDown: () => moveSelection(1), ArrowUp: () => moveSelection(-1) });
      if (detail.strips) Object.assign(actions, { ArrowRight: () => detail.strips.move(detail.strips.token + 1), ArrowLeft: () => detail.strips.move(detail.strips.token - 1) });
    }
  }
  if (event.target.matches("[role=tab]")) {
    const step = (by) => openTab(TABS[(TABS.indexOf(openTabName()) + by + TABS.length) % TABS.length], true);
    Object.assign(actions, { ArrowRight: () => step(1), ArrowLeft: () => step(-1) });
  }
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function escape(target, isTyping) {
  if (isTyping) target.blur();
  else if (document.body.classList.contains("in-detail")) closeDetail();
}

function makeHelp() {
  byId("help-keys").replaceChildren(...KEYS.map(([key, text]) => el("div", {}, el("dt", {}, el("kbd", { text: key })), el("dd", { text }))));
  byId("help-button").addEventListener("click", () => byId("help").showModal());
  byId("help-close").addEventListener("click", () => byId("help").close());
}
