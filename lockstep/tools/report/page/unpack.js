// A block: base64 of gzip of JSON or of packed columns (lockstep/tools/report/html.py says how they are packed).

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** The payload of a block, as an ArrayBuffer. */
function gunzip(text) {
  const stream = new Blob([fromBase64(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

async function unpackJson(text) {
  return JSON.parse(new TextDecoder().decode(await gunzip(text)));
}

/** {name: typed array}. */
async function unpackColumns(text) {
  const data = await gunzip(text);
  const size = new DataView(data).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, size)));
  const kinds = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array, f2: Uint16Array };
  const columns = {};
  for (const [name, kind, count, offset] of header) {
    const values = new kinds[kind](data, 4 + size + offset, count);
    columns[name] = kind === "f2" ? fromHalf(values) : values;
  }
  return columns;
}

/** Bits of float16 -> float32. */
function fromHalf(bits) {
  const values = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) {
    const exponent = (bits[i] >> 10) & 31;
    const fraction = bits[i] & 1023;
    const sign = bits[i] & 0x8000 ? -1 : 1;
    if (exponent === 0) values[i] = sign * fraction * 2 ** -24;
    else if (exponent === 31) values[i] = fraction ? NaN : sign * Infinity;
    else values[i] = sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return values;
}
