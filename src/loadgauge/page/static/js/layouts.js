/** Every layout that fits: memory against speed, the Pareto front, and where the present run lies. */
import { later } from "./api.js";
import { axis, lines, Plot, tooltip } from "./chart.js";
import { h } from "./dom.js";
import { language, refusal, t, term } from "./i18n.js";
import { fixed, GIB, gib, percent, seconds } from "./numbers.js";
import { Panel, scrolled } from "./panel.js";
import { pinned } from "./pin.js";
import { locks } from "./controls.js";
import { flags, set } from "./state.js";
import { colour, dark } from "./theme.js";

const LAYOUT = ["tp", "pp", "vpp", "cp", "ep", "etp", "zero", "micro-batch", "recompute", "schedule", "sequence-parallel", "replicas", "stage-layers"];
const ONE = ["vpp", "cp", "ep", "replicas"];
const PAGE = crypto.randomUUID();
const plot = new Plot();
const listeners = [];
let found = null;
let asked = "";
let busy = false;
let problem = "";
let present = null;
let drawn = null;

export const plan = () => found;
export const onPlan = (listener) => listeners.push(listener);
export const column = (name) => found.columns.indexOf(name);

export const layouts = new Panel({
  id: "layouts", draw, before: planAgain, sub: () => (found ? t("layouts.sub", { fitting: fixed(found.fitting), valid: fixed(found.valid), front: found.pareto.length, shown: fixed(found.points.length) }) : t("layouts.ask")),
  table: () => frontTable(),
});

export const best = new Panel({ id: "best", wide: true, draw: drawBest, sub: () => t("best.sub") });

function drawBest(place) {
  if (!found) return place.replaceChildren(waiting());
  return place.replaceChildren(scrolled(t("best.title"), bestTable()), found.out_of_reach.length ? h("details", { open: true }, h("summary", {}, t("best.beyond")), h("ul", {}, found.out_of_reach.map((text) => h("li", {}, text.replace(/: .*/s, (why) => `: ${refusal(why.slice(2))}`))))) : "");
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
  [found, busy, problem] = [null, false, refusal(error.message) || t("unreachable")];
  told();
});

/** Nothing fits: what comes closest. */
function missed(answer) {
  const miss = answer.nearest_miss;
  if (!miss) return refusal(answer.error) || t("layouts.empty");
  return miss.verdict === "does not fit" ? t("layouts.missed", { gib: gib(miss.missing) }) : t("layouts.unsure", { gib: gib(miss.point.total) });
}

/** The present run has changed: where it lies among the layouts, and perhaps which layouts there are. */
export function followPlan(answer) {
  present = answer;
  layouts.show({ answer });
}

/** Plans anew, once the panel can be seen: the layouts depend on all but the layout itself, where it is not locked. */
function planAgain() {
  const held = locks();
  const key = JSON.stringify([Object.entries(flags).filter(([name]) => !LAYOUT.includes(name) || held.includes(name)).sort(), held]);
  if (key === asked) return;
  asked = key;
  request.start({ flags: { ...flags }, locks: held, page: PAGE });
}

export function holdPlan() {
  request.stop();
  if (busy || !found) asked = "";
  busy = false;
}

/** The flags of a layout of a plan: each column that is a flag, where it is not the flag's absence; null takes one away. */
export function loaded(plan, place, before = flags) {
  const point = plan.points[place];
  const next = { ...plan.apply };
  plan.columns.forEach((name, at) => {
    const flag = name.replaceAll("_", "-");
    if (!LAYOUT.includes(flag)) return;
    const value = point[at];
    const absent = value === "" || value === null || value === false || (ONE.includes(flag) && Number(value) === 1);
    next[flag] = absent ? null : String(value);
  });
  if (next.cp === null && before["cp-comm"]) next["cp-comm"] = null; // it goes with cp above 1 only
  return next;
}

/** A layout becomes the run. */
export const load = (place) => set(loaded(found, place), { push: true });

export function described(point, { columns } = found) {
  const get = (name) => point[columns.indexOf(name)];
  const words = ["tp", "pp", "vpp", "cp", "ep", "dp"].filter((name) => columns.includes(name) && get(name) > 1).map((name) => `${name.toUpperCase()} ${get(name)}`);
  return [...words, `ZeRO ${get("zero")}`, `${t("micro")} ${get("micro_batch")}`].join(" · ");
}

function draw(place) {
  if (!found) return place.replaceChildren(waiting());
  const capacity = present?.estimate.memory.capacity;
  const key = [found, language, dark(), capacity, place];
  if (plot.engine && drawn?.every((one, at) => one === key[at])) return rings(place);
  drawn = key;
  place.querySelector(".waiting")?.remove();
  plot.resized = () => rings(place);
  plot.draw(place, option(capacity), t("layouts.label", { fitting: fixed(found.fitting), front: found.pareto.length }), (engine) => engine.on("click", ({ data }) => data?.[2] !== undefined && load(data[2])));
  return rings(place);
}

const xy = (at) => [found.points[at][column("memory")] / GIB, 100 * found.points[at][column("mfu")], at];

/** The present run and the pinned one, above the drawing: while a slider moves, only these move. */
function rings(place) {
  const marks = [["yours", present], ["pinned", pinned()]].filter(([, answer]) => answer?.estimate.time);
  place.querySelectorAll(".ring").forEach((one) => one.remove());
  if (!plot.engine) return;
  for (const [kind, { estimate: { memory, time } }] of marks) {
    const [x, y] = plot.engine.convertToPixel({ gridIndex: 0 }, [memory.total / GIB, 100 * time.mfu]);
    const edge = plot.size.width - 14;
    place.append(h("span", { class: `ring ${kind}${x > 0.8 * edge ? " flip" : ""}`, style: { left: `${Math.min(x, edge)}px`, top: `${Math.max(12, y)}px` } }, h("b", {}, kind === "pinned" ? "A" : t("layouts.yours"))));
  }
}

function option(capacity) {
  const front = new Set(found.pareto);
  const get = (at, name) => found.points[at][column(name)];
  return {
    grid: { left: 44, right: 14, top: 22, bottom: 40 },
    tooltip: tooltip({ trigger: "item", formatter: ({ data: [, , at] }) => (at === undefined ? "" : lines(described(found.points[at]), [
      [t("memory"), `${gib(get(at, "memory"))} GiB`], ["MFU", percent(get(at, "mfu"))], [t("step.title"), seconds(get(at, "step"))],
      [t("flag.recompute"), term(String(get(at, "recompute")))], [t("layouts.load"), ""],
    ])) }),
    xAxis: axis({ type: "value", min: 0, max: capacity ? Math.ceil(capacity / GIB) : undefined, name: t("layouts.x"), nameLocation: "middle", nameGap: 24, splitLine: { show: false } }),
    yAxis: axis({ type: "value", min: 0, name: "MFU", nameGap: 8, axisLabel: { formatter: "{value}%" } }),
    series: [
      { id: "fitting", type: "scatter", symbolSize: 4.5, itemStyle: { color: colour("gathered"), opacity: .55 }, data: found.points.map((_, at) => at).filter((at) => !front.has(at)).map(xy), progressive: 0 },
      { id: "front", type: "line", symbolSize: 8, symbol: "circle", showAllSymbol: true, lineStyle: { color: colour("states"), width: 2 }, itemStyle: { color: colour("surface"), borderColor: colour("states"), borderWidth: 2 }, data: [...found.pareto].sort((a, b) => get(a, "memory") - get(b, "memory")).map(xy) },
    ],
  };
}

const columnsOf = () => [{ text: t("layout"), words: true }, "GiB", "MFU", t("step.title"), t("flag.recompute"), t("flag.schedule"), ""];

function rowOf(at) {
  const point = found.points[at];
  const get = (name) => point[column(name)];
  return [h("span", {}, described(point)), gib(get("memory")), percent(get("mfu")), seconds(get("step")), term(String(get("recompute"))), get("pp") > 1 ? get("schedule") : "–",
    h("button", { class: "pill", type: "button", "aria-label": `${t("layouts.use")}: ${described(point)}`, onclick: () => load(at) }, t("layouts.use"))];
}

const frontTable = () => (found ? { columns: columnsOf(), rows: [...found.pareto].sort((a, b) => found.points[b][column("mfu")] - found.points[a][column("mfu")]).map(rowOf), caption: t("layouts.front") } : { columns: [], rows: [] });
const bestTable = () => ({ columns: columnsOf(), rows: found.best.map(rowOf) });
