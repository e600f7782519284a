// Which samples are shown, and in which order.

const view = {
  order: new Uint32Array(0), // row numbers, as they are shown
  sort: "step",
  descending: true,
  ranges: { step: [null, null], reward: [null, null], length: [null, null], kl: [null, null] },
  split: "all",
  outcome: "all",
  withTokens: false,
  text: "",
  found: null, // rows that have the text: Uint8Array, or null without a search
};

/** Compute `view.order` anew. */
function applyFilters() {
  const { rows } = store;
  const wanted = [];
  const ranges = Object.entries(view.ranges).filter(([, [low, high]]) => low !== null || high !== null);
  const outcome = view.outcome === "all" ? -1 : store.head.outcomes.indexOf(view.outcome);
  for (let row = 0; row < rows.count; row++) {
    if (!store.runs[rows.run[row]].shown) continue;
    if (view.split !== "all" && rows.validation[row] !== Number(view.split === "validation")) continue;
    if (outcome >= 0 && rows.outcome[row] !== outcome) continue;
    if (view.withTokens && rows.tokens[row] < 0) continue;
    if (view.found && !view.found[row]) continue;
    if (ranges.every(([name, [low, high]]) => isWithin(rows[name][row], low, high))) wanted.push(row);
  }
  view.order = sorted(Uint32Array.from(wanted), rows[view.sort], view.descending);
}

function isWithin(value, low, high) {
  return (low === null || value >= low) && (high === null || value <= high); // never of NaN
}

/** Rows by a column; those without a number last; equal ones in the order of the run. */
function sorted(order, column, descending) {
  const sign = descending ? -1 : 1;
  const key = new Float64Array(column.length);
  for (let i = 0; i < key.length; i++) key[i] = Number.isNaN(column[i]) ? Infinity : sign * column[i];
  return order.sort((a, b) => key[a] - key[b] || a - b || 0);
}

/** Mark the rows whose prompt or response has the text; `say` hears how far it is. Returns false when another search overtook it. */
async function search(text, say) {
  view.text = text;
  if (!text) {
    view.found = null;
    return true;
  }
  const wanted = text.toLowerCase();
  const found = new Uint8Array(store.rows.count);
  for (const [i, block] of store.texts.entries()) {
    const rows = await (block.opened || unpackJson(block.data));
    if (view.text !== text) return false;
    let prompt = false;
    rows.forEach((row, j) => {
      if (row[0] !== 0) prompt = row[0].toLowerCase().includes(wanted);
      if (prompt || row[1].toLowerCase().includes(wanted)) found[block.first + j] = 1;
    });
    if (i % 20 === 19) say(`searching ${Math.round((100 * i) / store.texts.length)} %`);
  }
  view.found = found;
  return true;
}
