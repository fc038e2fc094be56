/** Every layout that fits: memory against speed, the Pareto front, and where the present run lies. */
import { later } from "./api.js";
import { axis, lines, Plot, tooltip } from "./chart.js";
import { h } from "./dom.js";
import { t, term } from "./i18n.js";
import { fixed, GIB, gib, percent, seconds } from "./numbers.js";
import { Panel, table } from "./panel.js";
import { pinned } from "./pin.js";
import { locks } from "./controls.js";
import { flags, set } from "./state.js";
import { colour } from "./theme.js";

const LAYOUT = ["tp", "pp", "vpp", "cp", "ep", "etp", "zero", "micro-batch", "recompute", "schedule", "sequence-parallel", "replicas", "stage-layers"];
const ONE = ["vpp", "cp", "ep", "etp", "replicas"];
const PAGE = crypto.randomUUID();
const plot = new Plot();
const listeners = [];
let found = null;
let asked = "";
let busy = false;
let problem = "";
let present = null;

export const plan = () => found;
export const onPlan = (listener) => listeners.push(listener);
export const column = (name) => found.columns.indexOf(name);

export const layouts = new Panel({
  id: "layouts", draw, sub: () => (found ? t("layouts.sub", { fitting: fixed(found.fitting), valid: fixed(found.valid), front: found.pareto.length, shown: fixed(found.points.length) }) : t("layouts.ask")),
  table: () => frontTable(),
});

export const best = new Panel({ id: "best", wide: true, draw: drawBest, sub: () => t("best.sub") });

function drawBest(place) {
  if (!found) return place.replaceChildren(waiting());
  return place.replaceChildren(h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": t("best.title") }, table(bestTable())));
}

const waiting = () => h("p", { class: "waiting" }, problem || t(busy ? "layouts.busy" : "working"));

function told() {
  layouts.show({ answer: present });
  best.show({});
  listeners.forEach((listener) => listener());
}

const request = later("plan", 900, () => { busy = true; told(); }, (answer) => {
  [found, busy, problem] = [answer.points.length ? answer : null, false, answer.points.length ? "" : missed(answer)];
  told();
}, (error) => {
  if (error.kind === "Replaced") return;
  [found, busy, problem] = [null, false, error.message || t("unreachable")];
  told();
});

/** Nothing fits: what comes closest. */
function missed(answer) {
  return answer.nearest_miss ? t("layouts.missed", { gib: gib(answer.nearest_miss.missing) }) : answer.error ?? t("layouts.empty");
}

/** The layouts depend on all but the layout itself, where it is not locked. */
export function followPlan(answer, wanted) {
  present = answer;
  layouts.show({ answer });
  const held = locks();
  const key = JSON.stringify([Object.entries(flags).filter(([name]) => !LAYOUT.includes(name) || held.includes(name)).sort(), held]);
  if (key === asked || !wanted) return;
  asked = key;
  request.start({ flags: { ...flags }, locks: held, page: PAGE });
}

export function holdPlan() {
  request.stop();
  if (busy || !found) asked = "";
  busy = false;
}

/** A layout becomes the run: each column that is a flag, where it is not the flag's absence. */
export function load(place) {
  const point = found.points[place];
  const next = { ...found.apply };
  found.columns.forEach((name, at) => {
    const flag = name.replaceAll("_", "-");
    if (!LAYOUT.includes(flag)) return;
    const value = point[at];
    const absent = value === "" || value === null || value === false || (ONE.includes(flag) && Number(value) === 1);
    next[flag] = absent ? null : String(value);
  });
  set(next, { push: true });
}

export function described(point) {
  const get = (name) => point[column(name)];
  const words = ["tp", "pp", "vpp", "cp", "ep", "dp"].filter((name) => column(name) >= 0 && get(name) > 1).map((name) => `${name.toUpperCase()} ${get(name)}`);
  return [...words, `ZeRO ${get("zero")}`, `${t("micro")} ${get("micro_batch")}`].join(" · ");
}

function draw(place) {
  if (!found) return place.replaceChildren(waiting());
  const [memory, mfu] = [column("memory"), column("mfu")];
  const xy = (at) => [found.points[at][memory] / GIB, 100 * found.points[at][mfu], at];
  const front = new Set(found.pareto);
  const capacity = present?.estimate.memory.capacity;
  const ring = (answer, paint, name) => (answer?.estimate.time ? [{ type: "scatter", name, symbolSize: 17, silent: true, z: 9, itemStyle: { color: "transparent", borderColor: paint, borderWidth: 2.5 }, data: [[answer.estimate.memory.total / GIB, 100 * answer.estimate.time.mfu]], label: { show: true, formatter: name, position: "right", distance: 8, color: paint, fontSize: 12, fontWeight: 600, fontFamily: colour("font"), backgroundColor: colour("surface"), padding: [2, 5], borderRadius: 4 } }] : []);
  const option = {
    grid: { left: 44, right: 14, top: 22, bottom: 40 },
    tooltip: tooltip({ trigger: "item", formatter: ({ data }) => {
      const point = found.points[data[2]];
      return point ? lines(described(point), [[t("memory"), `${gib(point[memory])} GiB`], ["MFU", percent(point[mfu])], [t("step.title"), seconds(point[column("step")])], [t("flag.recompute"), term(String(point[column("recompute")]))], [t("layouts.load"), ""]]) : "";
    } }),
    xAxis: axis({ type: "value", scale: true, min: 0, max: capacity ? Math.ceil(capacity / GIB) : undefined, name: t("layouts.x"), nameLocation: "middle", nameGap: 24, splitLine: { show: false } }),
    yAxis: axis({ type: "value", min: 0, name: "MFU", nameGap: 8, axisLabel: { formatter: "{value}%" } }),
    series: [
      { type: "scatter", symbolSize: 4.5, itemStyle: { color: colour("gathered"), opacity: .55 }, data: found.points.map((_, at) => at).filter((at) => !front.has(at)).map(xy), large: false, progressive: 0 },
      { type: "line", name: "front", symbolSize: 8, symbol: "circle", showAllSymbol: true, lineStyle: { color: colour("states"), width: 2 }, itemStyle: { color: colour("surface"), borderColor: colour("states"), borderWidth: 2 }, data: [...found.pareto].sort((a, b) => found.points[a][memory] - found.points[b][memory]).map(xy) },
      ...ring(present, colour("exposed"), t("layouts.yours")), ...ring(pinned(), colour("accent"), "A"),
    ],
  };
  place.querySelector(".waiting")?.remove();
  plot.draw(place, option, t("layouts.label", { fitting: fixed(found.fitting), front: found.pareto.length }), (engine) => engine.on("click", ({ data }) => data?.[2] !== undefined && load(data[2])));
  place.classList.toggle("working", busy);
  layouts.plot = plot;
}

const columnsOf = () => [{ text: t("layout"), words: true }, { text: "GiB" }, { text: "MFU" }, { text: t("step.title") }, { text: t("flag.recompute") }, { text: t("flag.schedule") }, { text: "" }];

function rowOf(at) {
  const point = found.points[at];
  const get = (name) => point[column(name)];
  return [h("span", {}, described(point)), gib(get("memory")), percent(get("mfu")), seconds(get("step")), term(String(get("recompute"))), get("pp") > 1 ? get("schedule") : "–",
    h("button", { class: "pill", type: "button", "aria-label": `${t("layouts.use")}: ${described(point)}`, onclick: () => load(at) }, t("layouts.use"))];
}

const frontTable = () => (found ? { columns: columnsOf(), rows: [...found.pareto].sort((a, b) => found.points[b][column("mfu")] - found.points[a][column("mfu")]).map(rowOf), caption: t("layouts.front") } : { columns: [], rows: [] });
const bestTable = () => ({ columns: columnsOf(), rows: found.best.map(rowOf) });
