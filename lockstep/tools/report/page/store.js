// What the page knows. Blocks are added to it; texts and tokens stay packed until a row of theirs is looked at.

const store = {
  head: null,
  runs: [], // {steps, times, columns: Map name -> values, intervals: Map name -> Map step -> [low, high], settings, words: Map}
  rows: { count: 0 }, // count, and a typed array for each column of the samples
  texts: [], // {first, data, rows: promise}, by first
  tokens: [],
};
const ROW_TYPES = {
  run: Uint8Array, step: Int32Array, validation: Uint8Array, prompt: Int32Array, group: Int32Array, tokens: Int32Array,
  reward: Float32Array, length: Float32Array, kl: Float32Array, outcome: Uint8Array,
};
const MAX_OPEN_BLOCKS = 80;

/** Take in a block. */
async function addBlock(kind, first, data) {
  if (kind === "texts" || kind === "tokens") store[kind].push({ first, data, opened: null });
  else if (kind === "rows") addRows(await unpackColumns(data));
  else if (kind === "head") store.head = await unpackJson(data);
  else if (kind === "metrics") addMetrics(await unpackJson(data));
  else if (kind === "settings") addSettings(await unpackJson(data));
  else if (kind === "vocabulary") addWords(await unpackJson(data));
}

function runOf(number) {
  while (store.runs.length <= number) {
    store.runs.push({ steps: [], times: [], columns: new Map(), intervals: new Map(), settings: null, words: new Map(), shown: true });
  }
  return store.runs[number];
}

function addSettings(part) {
  runOf(part.run).settings = part;
}

function addWords(part) {
  for (const [token, text] of Object.entries(part.texts)) runOf(part.run).words.set(Number(token), text);
}

function addMetrics(part) {
  const run = runOf(part.run);
  const before = run.steps.length;
  run.steps.push(...part.steps);
  run.times.push(...part.times);
  for (const [name, values] of Object.entries(part.columns)) {
    if (!run.columns.has(name)) run.columns.set(name, new Array(before).fill(null));
    run.columns.get(name).push(...values);
  }
  for (const column of run.columns.values()) while (column.length < run.steps.length) column.push(null);
  for (const [name, ends] of Object.entries(part.intervals)) {
    if (!run.intervals.has(name)) run.intervals.set(name, new Map());
    for (const [step, low, high] of ends) run.intervals.get(name).set(step, [low, high]);
  }
}

function addRows(columns) {
  const { rows } = store;
  const added = columns.run.length;
  for (const [name, kind] of Object.entries(ROW_TYPES)) {
    const joined = new kind(rows.count + added);
    if (rows.count) joined.set(rows[name]);
    joined.set(columns[name], rows.count);
    rows[name] = joined;
  }
  rows.count += added;
}

/** The block of that kind which has the row, opened. */
function openBlock(kind, row, unpack) {
  const blocks = store[kind];
  let low = 0;
  let high = blocks.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (blocks[middle].first <= row) low = middle;
    else high = middle - 1;
  }
  const block = blocks[low];
  if (!block.opened) {
    const open = blocks.filter((other) => other.opened);
    if (open.length >= MAX_OPEN_BLOCKS) open.sort((a, b) => a.used - b.used)[0].opened = null;
    block.opened = unpack(block.data);
  }
  block.used = performance.now();
  return block;
}

/** {prompt, response, truth, failure, said} of a sample. */
async function textsOf(row) {
  const block = openBlock("texts", row, unpackJson);
  const rows = await block.opened;
  let i = row - block.first;
  const [, response, truth, failure, said] = rows[i];
  while (rows[i][0] === 0) i--; // the same prompt as the row before
  return { prompt: rows[i][0], response, truth, failure, said };
}

/** {length, column: values} of a sample's tokens; null where there are none. */
async function tokensOf(row) {
  const position = store.rows.tokens[row];
  if (position < 0) return null;
  const block = openBlock("tokens", position, unpackColumns);
  const columns = await block.opened;
  let start = 0;
  for (let i = 0; i < position - block.first; i++) start += columns.lengths[i];
  const length = columns.lengths[position - block.first];
  const own = { length };
  for (const [name, values] of Object.entries(columns)) if (name !== "lengths") own[name] = values.subarray(start, start + length);
  return own;
}
