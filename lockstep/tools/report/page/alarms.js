// Alarms: what the run itself warned of.

function allAlarms() {
  return store.head.runs.flatMap((run, number) => run.alarms.map((alarm) => ({ ...alarm, run: number })));
}

function alarmSummary() {
  const alarms = allAlarms();
  if (!alarms.length) return null;
  const text = `${alarms.length} ${alarms.length === 1 ? "alarm" : "alarms"}: ${[...new Set(alarms.map((alarm) => alarm.name))].join(", ")}`;
  return el("button", { class: "alarm-summary", text, on: { click: () => openTab("alarms") } });
}

/** The text, with what stands between backticks as code. */
function withCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? el("code", { text: part }) : el("span", { text: part })));
}

function drawAlarms() {
  const alarms = allAlarms();
  byId("tab-alarms").textContent = alarms.length ? `Alarms (${alarms.length})` : "Alarms";
  const cards = alarms.map((alarm) => el("article", { class: "card alarm" },
    el("h2", { text: visible(String(alarm.name)) }),
    el("p", { class: "path", text: `${store.head.runs[alarm.run].name}, step ${short(alarm.step)}` }),
    el("p", { class: "alarm-text" }, ...withCode(visible(String(alarm.text || "")))),
    alarm.key ? el("p", {}, "Key to turn: ", ...withCode(/[\s`]/.test(alarm.key) ? visible(String(alarm.key)) : `\`${visible(String(alarm.key))}\``)) : null,
    el("dl", {}, ...Object.entries(alarm.numbers || {}).map(([name, value]) => el("div", {}, el("dt", { text: name }), el("dd", {
      text: typeof value === "number" ? short(value) : visible(JSON.stringify(value)),
    })))),
    alarm.samples && alarm.samples.length ? el("details", {}, el("summary", { text: `${alarm.samples.length} samples of that step` }),
      ...alarm.samples.map((sample) => el("pre", { class: "alarm-sample", text: visible(JSON.stringify(sample, null, 1)) }))) : null));
  byId("alarms").replaceChildren(...(cards.length ? cards : [el("p", { class: "empty", text: "No alarm was raised in these runs." })]));
}
