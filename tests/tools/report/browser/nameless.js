// Controls without an accessible name.
() => {
  const nameOf = (node) => node.getAttribute("aria-label") || node.textContent.trim() || (node.labels?.length && node.labels[0].textContent.trim());
  const controls = [...document.querySelectorAll("button, input, select, [role=slider], [role=tab]")];
  return controls.filter((node) => !nameOf(node)).map((node) => node.outerHTML.slice(0, 200));
}
