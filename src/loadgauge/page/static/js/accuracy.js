/** Measured against predicted: the published runs that the package carries, each with its source. */
import { ask } from "./api.js";
import { axis, lines, Plot, tooltip } from "./chart.js";
import { h, swatch } from "./dom.js";
import { openDrawer } from "./drawer.js";
import { t, term } from "./i18n.js";
import { bytes, fixed, percent, seconds } from "./numbers.js";
import { Panel } from "./panel.js";
import { colour } from "./theme.js";

const plot = new Plot("tall");
const found = { rows: [], done: 0, of: 0, complete: false };
let problem = "";
let running = false;
let kind = "";
let only = "";

/** Colours of the sources with most runs; the others share one. */
const PAINTS = ["states", "activations", "outside", "gradients", "loss"];
const nameOf = (row) => row.name ?? row.source;

export const accuracy = new Panel({
  id: "accuracy", wide: true, draw, keeps: false,
  acts: () => kinds().map((one) => h("button", { class: "act", type: "button", "aria-pressed": String(one === chosen()), onclick: () => { kind = one; accuracy.label(); accuracy.show({}); } }, term(one))),
  sub: said,
  table: () => ({
    columns: [{ text: t("run"), words: true }, t("accuracy.measured"), t("accuracy.predicted"), t("accuracy.off"), { text: t("source"), words: true }],
    rows: rows().map((row) => [h("span", {}, h("button", { class: "act", type: "button", onclick: () => open(row) }, row.id), row.gpu ? h("span", { class: "note" }, row.gpu) : null), shown(row.measured), shown(row.predicted), off(row), nameOf(row)]),
  }),
});

const kinds = () => [...new Set(found.rows.map((row) => row.quantity))];
const chosen = () => (kind && kinds().includes(kind) ? kind : kinds()[0]);
const rows = () => found.rows.filter((row) => row.quantity === chosen() && row.measured > 0 && row.predicted > 0);
const shown = (value) => (chosen() === "memory" ? bytes(value) : seconds(value));
const off = (row) => `${row.error >= 0 ? "+" : "−"}${percent(Math.abs(row.error))}`;

function said() {
  const all = found.summary?.[chosen()]?.all;
  const progress = found.complete ? "" : t("accuracy.progress", { done: fixed(found.done), of: fixed(found.of) });
  if (!all) return progress;
  const here = { count: fixed(all.expressible), median: percent(all.median), most: percent(all.p90) };
  const apart = chosen() === "time" ? found.left_out : null;
  if (!apart) return progress + t("accuracy.sub", here);
  return `${progress}${t("accuracy.apart", { median: percent(apart.median), most: percent(apart.p90), covered: percent(apart.covered) })} ${t("accuracy.within", here)}`;
}

/** What ran, where it is written, and where it is far off why. */
function open(row) {
  const facts = [
    [t("accuracy.measured"), shown(row.measured)], [t("accuracy.predicted"), `${shown(row.predicted)} (${shown(row.low)} – ${shown(row.high)})`],
    [t("accuracy.off"), off(row)],
  ];
  openDrawer(row.id,
    h("p", {}, [row.model, row.hardware, row.layout].filter(Boolean).join(" · ")),
    h("dl", { class: "facts" }, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    row.cause ? h("p", {}, h("strong", {}, t("accuracy.cause")), " ", row.cause) : null,
    row.flags ? h("pre", { class: "formula", tabindex: "0" }, row.flags) : null,
    row.assumed?.length ? h("div", {}, h("strong", {}, t("accuracy.open")), h("ul", {}, ...row.assumed.map((line) => h("li", {}, line)))) : null,
    h("p", {}, t("source"), ": ", row.link ? h("a", { href: row.link, target: "_blank", rel: "noopener noreferrer" }, row.where) : row.where));
}

/** The server works them out some at a time; they are shown as they come, while the view is open. */
export async function fetchAccuracy(wanted) {
  if (running || found.complete) return;
  running = true;
  problem = "";
  try {
    while (!found.complete && wanted()) {
      const more = await ask(`validation?since=${found.rows.length}`);
      Object.assign(found, more, { rows: [...found.rows.slice(0, more.since), ...more.rows] });
      accuracy.label();
      accuracy.show({});
    }
  } catch (error) {
    problem = error.message || t("unreachable");
    accuracy.show({});
  }
  running = false;
}

function draw(place) {
  const every = rows();
  const points = every.some((row) => nameOf(row) === only) ? every.filter((row) => nameOf(row) === only) : every;
  if (!points.length) return place.replaceChildren(h("p", { class: "waiting" }, problem || t(found.complete ? "accuracy.none" : "working")));
  place.querySelector(".waiting")?.remove();
  const all = points.flatMap((row) => [row.measured, row.predicted]);
  const [low, high] = [Math.min(...all) * .8, Math.max(...all) * 1.25];
  const counts = new Map();
  for (const row of every) counts.set(nameOf(row), (counts.get(nameOf(row)) ?? 0) + 1);
  const sources = [...counts.keys()].sort((one, other) => counts.get(other) - counts.get(one));
  const paint = (at) => PAINTS[at] ?? "temporary";
  const band = (share, type, opacity) => ({ type: "line", silent: true, symbol: "none", lineStyle: { color: colour("mute"), width: 1, type, opacity }, data: [[low, low * share], [high, high * share]] });
  const span = high / low > 30 ? "log" : "value";
  
  if (!place.querySelector(".legend")) place.append(h("p", { class: "legend foot" }));
  place.querySelector(".legend").replaceChildren(...sources.map((source, at) => h("button", { class: "act", type: "button", "aria-pressed": String(source === only), onclick: () => { only = source === only ? "" : source; accuracy.show({}); } }, swatch(`var(--${paint(at)})`, `${source} ${fixed(counts.get(source))}`))));
  return plot.draw(place, {
    grid: { left: 64, right: 20, top: 18, bottom: 44 },
    tooltip: tooltip({ trigger: "item", formatter: ({ data }) => (data?.row ? lines(data.row.id, [[t("accuracy.measured"), shown(data.row.measured)], [t("accuracy.predicted"), shown(data.row.predicted)], [t("accuracy.off"), off(data.row)], [t("source"), nameOf(data.row)]]) : "") }),
    xAxis: axis({ type: span, min: low, max: high, name: t("accuracy.measured"), nameLocation: "middle", nameGap: 28, axisLabel: { formatter: shown, showMinLabel: false, showMaxLabel: false } }),
    yAxis: axis({ type: span, min: low, max: high, name: t("accuracy.predicted"), nameLocation: "middle", nameRotate: 90, nameGap: 46, axisLabel: { formatter: shown, showMinLabel: false, showMaxLabel: false } }),
    series: [band(1, "solid", .9), band(1.1, [3, 4], .7), band(1 / 1.1, [3, 4], .7),
      ...sources.map((source, at) => ({ type: "scatter", name: source, symbolSize: 8, itemStyle: { color: colour(paint(at)), opacity: .75 }, data: points.filter((row) => nameOf(row) === source).map((row) => ({ value: [row.measured, row.predicted], row })) }))],
  }, t("accuracy.label", { count: fixed(points.length) }), (engine) => engine.on("click", ({ data }) => data?.row && open(data.row)));
}
