/** Elements, made in one line: h("button", {class: "act", onclick: f}, "text"). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name in PROPERTIES) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const swatch = (background, text) => h("span", {}, h("i", { style: { background } }), text);

const PROPERTIES = { value: 1, checked: 1, disabled: 1, hidden: 1 };

export const find = (selector, within = document) => within.querySelector(selector);

export function shape(tag, attributes = {}, ...inside) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

/** A drawing of 16 by 16, as in the header's buttons. */
export function glyph(name) {
  return shape("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, shape("path", { d: GLYPHS[name], fill: "none", stroke: "currentColor", "stroke-width": "1.5", "stroke-linecap": "round", "stroke-linejoin": "round" }));
}

const GLYPHS = {
  pin: "M9.8 2.2l4 4-2.3.7-2.6 2.6.3 2.6-1.2 1.2-5.3-5.3 1.2-1.2 2.6.3L9.1 4.5zM5.2 10.8L2 14",
  link: "M6.5 9.5l3-3M7 4.6l1.4-1.4a3 3 0 0 1 4.3 4.3L11.3 9M9 11.4l-1.4 1.4a3 3 0 0 1-4.3-4.3L4.7 7",
  share: "M8 10V2.2M5.2 4.8L8 2l2.8 2.8M3 8.5V13h10V8.5",
  moon: "M13.4 9.8A5.8 5.8 0 0 1 6.2 2.6a5.8 5.8 0 1 0 7.2 7.2z",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM8 1.4v1.2M8 13.4v1.2M1.4 8h1.2M13.4 8h1.2M3.3 3.3l.9.9M11.8 11.8l.9.9M12.7 3.3l-.9.9M4.2 11.8l-.9.9",
  help: "M5.9 6a2.1 2.1 0 1 1 3.1 1.9c-.7.4-1 .8-1 1.6M8 11.8v.1M8 1.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13z",
  table: "M2 3.5h12v9H2zM2 6.5h12M2 9.5h12M6.5 3.5v9",
  locked: "M4.5 7.2V5.5a3.5 3.5 0 0 1 7 0v1.7M3.5 7.2h9v6h-9z",
  open: "M4.5 7.2V5.5a3.5 3.5 0 0 1 6.7-1.4M3.5 7.2h9v6h-9z",
  sliders: "M2 4.5h7M12 4.5h2M2 11.5h2M7 11.5h7M9 3v3M4.5 10v3",
};
