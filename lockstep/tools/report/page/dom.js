// Elements are made here, and texts are set with textContent only: nothing of the data is ever read as markup.

/** An element. `props`: "class", "text", "on" ({event: listener}), and attributes. */
function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same in SVG. */
function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function byId(id) {
  return document.getElementById(id);
}

/** Replace what a node has; null is left out. */
function refill(node, ...children) {
  node.replaceChildren(...children.filter((child) => child !== null));
}

/** A labelled control: the label is its accessible name. */
function labelled(text, control) {
  return el("label", { class: "field" }, el("span", { text }), control);
}

function select(name, options, value, listener) {
  const control = el("select", { "aria-label": name, on: { change: () => listener(control.value) } });
  for (const [key, text] of options) control.append(el("option", { value: key, text, selected: key === value }));
  return control;
}

/** The text with characters that cannot be seen, or that turn the direction of others, as signs. */
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu, (sign) => {
    const code = sign.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}
