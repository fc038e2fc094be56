/** Figures that have no script of their own, drawn from their data by their form: bars, lines, or areas upon one another. */
import { h } from "./dom.js";
import { t, term } from "./i18n.js";
import { amount } from "./numbers.js";
import { Panel } from "./panel.js";
import { PARTS } from "./theme.js";
import { hideTip, showTip } from "./tip.js";

const TURNS = ["states", "activations", "outside", "temporary"];
const SIZE = [640, 180];
const paint = (names) => Object.fromEntries(names.map((name, place) => [name, `var(--${name in PARTS ? name : TURNS[place % TURNS.length]})`]));
const word = (name) => (name in PARTS ? t(`part.${name}`) : term(name));
const said = (value, data) => amount(value, data.unit === "byte" ? "B" : data.unit);
const sum = (parts) => Object.values(parts).reduce((all, one) => all + one, 0);
const NONE = { time: "step.untimed", stages: "schedule.none" };

/** The panels of figures, as the register describes them, that none of these panels has. */
export const others = (figures, panels) => figures.filter(({ name, form }) => form in FORMS && !panels.some((one) => one.what.id === name)).map(panelOf);

function panelOf({ name, title, form, needs, shown }) {
  const data = (answer) => answer.panels[name];
  return new Panel({
    id: name, shown, title: () => title[document.documentElement.lang.slice(0, 2)] ?? title.en,
    idle: (answer) => (data(answer) ? null : needs ? t(NONE[needs]) : "–"),
    draw: (place, answer) => FORMS[form](place, data(answer), form),
    table: (answer) => TABLES[form](data(answer)),
  });
}

const legend = (colours) => h("p", { class: "legend foot" }, Object.entries(colours).map(([name, colour]) => h("span", {}, h("i", { style: { background: colour } }), word(name))));

function bars(place, data) {
  const rows = Object.entries(data.rows);
  const colours = paint([...new Set(rows.flatMap(([, parts]) => Object.keys(parts)))]);
  const full = 1.02 * Math.max(data.limit ?? 0, ...rows.map(([, parts]) => sum(parts)));
  const share = (value) => `${(100 * value) / full}%`;
  const bar = (parts) => {
    let at = 0;
    return Object.entries(parts).map(([name, value]) => {
      const left = share(at);
      at += value;
      return h("i", { style: { left, width: share(value), background: colours[name], "border-radius": "0" } });
    });
  };
  place.replaceChildren(h("div", { class: "lanes figure", role: "group" }, rows.flatMap(([name, parts]) => [
    h("span", { class: "name" }, term(name)),
    h("span", { class: "track", onpointermove: (event) => showTip(event.clientX, event.clientY, term(name), Object.entries(parts).map(([part, value]) => [word(part), said(value, data)])), onpointerleave: hideTip }, bar(parts), data.limit === null ? null : h("u", { style: { left: share(data.limit) } })),
    h("span", { class: "value", "data-value": sum(parts) }, said(sum(parts), data)),
  ])), Object.keys(colours).length > 1 ? legend(colours) : "");
}

function curves(place, data, form) {
  const stacked = form === "areas";
  const [width, height] = SIZE;
  const series = Object.entries(data.series).filter(([, values]) => values.some(Boolean));
  const colours = paint(series.map(([name]) => name));
  const tops = stacked ? data.x.map((_, at) => series.reduce((all, [, values]) => all + values[at], 0)) : series.flatMap(([, values]) => values);
  const highest = 1.04 * tops.reduce((most, one) => Math.max(most, one), data.limit ?? 0) || 1;
  const corners = (values) => values.map((value, at) => `${((width * data.x[at]) / (data.x.at(-1) || 1)).toFixed(1)},${(height * (1 - value / highest)).toFixed(1)}`);
  const shape = (tag, attributes) => Object.entries(attributes).reduce((made, [name, value]) => (made.setAttribute(name, value), made), document.createElementNS("http://www.w3.org/2000/svg", tag));
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", width: "100%", height, role: "img", "aria-label": series.map(([name]) => word(name)).join(", ") });
  let below = data.x.map(() => 0);
  for (const [name, values] of series) {
    const above = stacked ? values.map((value, at) => value + below[at]) : values;
    svg.append(shape(stacked ? "polygon" : "polyline", { points: [...corners(above), ...(stacked ? corners(below).reverse() : [])].join(" "), fill: stacked ? colours[name] : "none", stroke: stacked ? "none" : colours[name] }));
    if (stacked) below = above;
  }
  if (data.limit !== null) svg.append(shape("polyline", { points: corners(data.x.map(() => data.limit)).join(" "), fill: "none", stroke: "var(--bad)", "stroke-dasharray": "4 3" }));
  place.replaceChildren(svg, h("p", { class: "legend" }, h("span", {}, term(data.along)), h("span", {}, said(highest / 1.04, data))), legend(colours));
}

const sheet = (first, rows, names, data) => ({
  columns: [{ text: first, words: true }, ...names.map((name) => ({ text: word(name) }))],
  rows: rows.map(([name, values]) => [term(name), ...names.map((part) => (values[part] === undefined ? "–" : said(values[part], data)))]),
});
const byRow = (data) => sheet("", Object.entries(data?.rows ?? {}), [...new Set(Object.values(data?.rows ?? {}).flatMap(Object.keys))], data);
const byX = (data) => sheet(term(data?.along), (data?.x ?? []).map((x, at) => [String(x), Object.fromEntries(Object.entries(data.series).map(([name, values]) => [name, values[at]]))]), Object.keys(data?.series ?? {}), data);
const FORMS = { bars, lines: curves, areas: curves };
const TABLES = { bars: byRow, lines: byX, areas: byX };
