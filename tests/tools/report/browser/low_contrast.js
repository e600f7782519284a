// Texts with a contrast to their ground below 4.5 (WCAG AA).
() => {
  const part = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\d.]+/g).map(Number).map(part);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const groundOf = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (colour.startsWith("rgb(")) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  for (const node of document.querySelectorAll("h1, h2, h3, .cell, .tabs button, dd, dt, pre, .tokens span, .count, .readout span, summary")) {
    if (!node.offsetParent || !node.textContent.trim()) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(groundOf(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push([node.className, node.textContent.slice(0, 20), contrast.toFixed(2)]);
  }
  return found;
}
