/** Figures that have no script of their own, drawn by their form. */
import { h, shape, swatch } from "./dom.js";
import { t, term } from "./i18n.js";
import { amount } from "./numbers.js";
import { Panel } from "./panel.js";
import { GROUPS, PARTS } from "./theme.js";
import { hideTip, showTip } from "./tip.js";

const paint = (names) => Object.fromEntries(names.map((name, place) => [name, `var(--${name in PARTS ? name : GROUPS[place % 4]})`]));
const word = (name) => (name in PARTS ? t(`part.${name}`) : term(name));
const said = (value, data) => amount(value, data.unit === "byte" ? "B" : data.unit);
const sum = (parts) => Object.values(parts).reduce((all, one) => all + one, 0);
const NONE = { time: "step.untimed", stages: "schedule.none" };

/** Panels for figures that none of these has. */
export const others = (figures, panels) => figures.filter(({ name, form }) => form in FORMS && !panels.some((one) => one.what.id === name)).map(panelOf);

function panelOf({ name, title, form, needs, shown }) {
  const data = ({ panels }) => panels[name];
  return new Panel({
    id: name, shown, title: () => title[document.documentElement.lang.slice(0, 2)] ?? title.en,
    idle: (answer) => (data(answer) ? null : needs ? t(NONE[needs]) : "–"),
    draw: (place, answer) => FORMS[form](place, data(answer), form),
    table: form === "bars" ? (answer) => sheet(data(answer)) : null,
  });
}

const legend = (colours) => h("p", { class: "legend foot" }, Object.entries(colours).map(([name, colour]) => swatch(colour, word(name))));

/** kind: class; peak: the row that is marked. */
export function bars(place, data, form, { kind = "figure", peak, label, foot, rows = Object.entries(data.rows) } = {}) {
  const colours = paint([...new Set(rows.flatMap(([, parts]) => Object.keys(parts)))]);
  const full = 1.02 * Math.max(data.limit ?? 0, ...rows.map(([, parts]) => sum(parts)));
  const share = (value) => `${(100 * value) / full}%`;
  const bar = (parts) => {
    let at = 0;
    return Object.entries(parts).map(([name, value]) => h("i", { style: { left: share((at += value) - value), width: share(value), background: colours[name] } }));
  };
  place.replaceChildren(h("div", { class: `lanes ${kind}`, role: "group", "aria-label": label }, rows.flatMap(([name, parts]) => [
    h("span", { class: `name${name === peak ? " peak" : ""}` }, term(name)),
    h("span", { class: "track", onpointermove: (event) => showTip(event.clientX, event.clientY, term(name), Object.entries(parts).map(([part, value]) => [word(part), said(value, data)])), onpointerleave: hideTip }, bar(parts), data.limit !== null && h("u", { style: { left: share(data.limit) } })),
    h("span", { class: "value", "data-value": sum(parts) }, said(sum(parts), data)),
  ])), foot ?? legend(colours));
}

function curves(place, { x, series, along, limit, unit }, form) {
  const stacked = form === "areas";
  const names = Object.keys(series).filter((name) => series[name].some(Boolean));
  const colours = paint(names);
  const scale = Math.max(limit ?? 0, ...names.flatMap((name) => series[name])) || 1; // SVG takes no billions
  const points = (values) => values.map((value, at) => [x[at] / (x.at(-1) || 1), -value / scale]);
  const line = (values, stroke, dash) => shape("polyline", { points: points(values).join(" "), fill: "none", stroke, "stroke-dasharray": dash, "vector-effect": "non-scaling-stroke" });
  let [below, highest] = [x.map(() => 0), limit ?? 0];
  const drawn = names.map((name) => {
    const [under, above] = [below, series[name].map((value, at) => value + below[at])];
    highest = Math.max(highest, ...above);
    if (!stacked) return line(above, colours[name], "none");
    below = above;
    return shape("polygon", { points: [...points(above), ...points(under).reverse()].join(" "), fill: colours[name] });
  });
  const limits = limit === null ? [] : [line(x.map(() => limit), "var(--bad)", "4 3")];
  place.replaceChildren(shape("svg", { viewBox: `0 ${-highest / scale} 1 ${highest / scale || 1}`, preserveAspectRatio: "none", width: "100%", height: 180, role: "img", "aria-label": names.map(word).join(", ") }, ...drawn, ...limits),
    h("p", { class: "legend" }, h("span", {}, term(along)), h("span", {}, said(highest, { unit }))), legend(colours));
}

const FORMS = { bars, lines: curves, areas: curves };

function sheet({ rows, ...data }) {
  const names = [...new Set(Object.values(rows).flatMap(Object.keys))];
  return {
    columns: [{ words: true }, ...names.map(word)],
    rows: Object.entries(rows).map(([name, parts]) => [term(name), ...names.map((part) => (part in parts ? said(parts[part], data) : "–"))]),
  };
}
