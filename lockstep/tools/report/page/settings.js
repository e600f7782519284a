// Settings: each run's configuration beside the defaults.

const settingsView = { all: false, wanted: "" };

function drawSettings() {
  const shown = store.runs.map((run, number) => ({ run, number })).filter(({ run }) => run.shown && run.settings);
  const panel = byId("settings");
  const body = el("tbody");
  const count = el("span", { class: "count", role: "status" });
  const update = () => {
    const rows = settingRows(shown).filter((row) => (settingsView.all || row.differs) && row.key.includes(settingsView.wanted));
    count.textContent = `${rows.length} keys`;
    body.replaceChildren(...rows.map((row) => el("tr", { class: row.apart ? "apart" : null },
      el("th", { scope: "row" }, el("code", { text: row.key }), el("p", { text: row.meaning })),
      ...row.values.map((value) => el("td", { class: value === row.standard ? null : "changed", text: visible(value) })),
      el("td", { class: "default", text: visible(row.standard) }))));
  };
  const search = el("input", { type: "search", id: "settings-search", placeholder: "e.g. lr", autocomplete: "off", on: { input: () => {
    settingsView.wanted = search.value.trim();
    update();
  } } });
  const all = el("input", { type: "checkbox", id: "settings-all", on: { change: () => {
    settingsView.all = all.checked;
    update();
  } } });
  all.checked = settingsView.all;
  search.value = settingsView.wanted;
  const head = ["key", ...shown.map(({ number }) => store.head.runs[number].name), "default"];
  refill(panel,
    el("div", { class: "controls" }, labelled("Find a key", search), el("label", { class: "check" }, all, el("span", { text: "also keys at their default" })), count),
    el("table", { class: "plain settings" }, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text })))), body));
  update();
}

/** A row per key: its value in each run, whether one is not the default, and whether the runs differ. */
function settingRows(shown) {
  const rows = new Map();
  shown.forEach(({ run }, place) => {
    for (const [key, value, standard, , meaning] of run.settings.keys) {
      if (!rows.has(key)) rows.set(key, { key, meaning, standard, values: shown.map(() => "–") });
      rows.get(key).values[place] = value;
    }
  });
  return [...rows.values()].map((row) => ({
    ...row,
    differs: row.values.some((value) => value !== row.standard),
    apart: new Set(row.values).size > 1,
  }));
}
