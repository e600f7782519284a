// Numbers and times as people read them; colours.

const RUN_COLOURS = ["var(--run0)", "var(--run1)", "var(--run2)", "var(--run3)", "var(--run4)", "var(--run5)"];

function runColour(number) {
  return RUN_COLOURS[number % RUN_COLOURS.length];
}

/** A number with about so many digits; a dash where there is none. */
function short(value, digits = 4) {
  if (typeof value === "string") return value; // "nan", "inf"
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return value.toFixed(0);
  return String(Number(value.toPrecision(digits)));
}

function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function isDark() {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function mix(from, to, share) {
  const part = from.map((channel, i) => Math.round(channel + (to[i] - channel) * share));
  return `rgb(${part[0]},${part[1]},${part[2]})`;
}

/** The colour of `value` on a scale {kind, low, high}: "signed" from orange by nothing to blue, "plain" from nothing to violet.
 *  `most` below 1 leaves it pale, to be read on. */
function colourOf(value, scale, most = 1) {
  const nothing = isDark() ? [38, 42, 51] : [244, 245, 247];
  if (Number.isNaN(value)) return mix(nothing, nothing, 0);
  if (scale.kind === "signed") {
    const share = Math.min(1, Math.abs(value) / (Math.max(-scale.low, scale.high) || 1));
    const end = value < 0 ? (isDark() ? [235, 124, 65] : [209, 84, 22]) : isDark() ? [82, 156, 245] : [30, 100, 200];
    return mix(nothing, end, most * Math.sqrt(share));
  }
  const share = scale.high > scale.low ? (value - scale.low) / (scale.high - scale.low) : 1;
  return mix(nothing, isDark() ? [160, 130, 240] : [98, 66, 190], most * Math.min(1, Math.max(0, share)));
}
