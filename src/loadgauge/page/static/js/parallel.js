/** The same layouts on parallel axes: brush an axis, and only what passes through it stays. */
import { Plot } from "./chart.js";
import { h } from "./dom.js";
import { t, term } from "./i18n.js";
import { fixed, GIB } from "./numbers.js";
import { Panel } from "./panel.js";
import { column, described, load, onPlan, plan } from "./layouts.js";
import { colour } from "./theme.js";

const AXES = ["tp", "pp", "vpp", "cp", "ep", "zero", "micro_batch", "recompute", "memory", "mfu"];
const plot = new Plot();
let chosen = [];

export const parallel = new Panel({ id: "parallel", wide: true, draw, sub: () => t("parallel.sub") });
onPlan(() => parallel.show({}));

function draw(place) {
  const found = plan();
  if (!found) return place.replaceChildren(h("p", { class: "waiting" }, t("working")));
  const axes = AXES.filter((name) => column(name) >= 0 && (["memory", "mfu"].includes(name) || new Set(found.points.map((point) => point[column(name)])).size > 1));
  const value = (point, name) => {
    const one = point[column(name)];
    if (name === "memory") return one / GIB;
    if (name === "mfu") return 100 * one;
    return String(one);
  };
  const names = { memory: "GiB", mfu: "MFU %", micro_batch: t("flag.micro-batch"), recompute: t("flag.recompute"), zero: "ZeRO" };
  const option = {
    parallel: { left: 36, right: 48, top: 34, bottom: 16, parallelAxisDefault: { nameTextStyle: { color: colour("ink"), fontSize: 13, fontWeight: 600 }, nameGap: 14, axisLine: { lineStyle: { color: colour("edge") } }, axisTick: { show: false }, axisLabel: { color: colour("ink"), fontSize: 13, textBorderColor: colour("surface"), textBorderWidth: 3 }, areaSelectStyle: { width: 18, color: colour("accent"), opacity: .25, borderColor: colour("accent") } } },
    parallelAxis: axes.map((name, dim) => {
      const numeric = ["memory", "mfu"].includes(name);
      const values = [...new Set(found.points.map((point) => value(point, name)))].sort((a, b) => (isNaN(a) ? String(a).localeCompare(b) : a - b));
      return { dim, z: 12, name: names[name] ?? name.toUpperCase(), type: numeric ? "value" : "category", ...(numeric ? { min: "dataMin", max: "dataMax", axisLabel: { showMinLabel: true, formatter: (one) => fixed(one) } } : { data: values, axisLabel: { formatter: (one) => term(one) } }) };
    }),
    series: [{ type: "parallel", lineStyle: { width: 1, opacity: found.points.length > 800 ? .06 : .2, color: colour("states") }, inactiveOpacity: .015, activeOpacity: .6, progressive: 0, data: found.points.map((point) => axes.map((name) => value(point, name))) }],
  };
  place.querySelector(".waiting")?.remove();
  if (!place.querySelector(".under")) place.append(h("div", { class: "buttons" }, h("p", { class: "under", role: "status" })));
  plot.draw(place, option, t("parallel.label"), (engine) => engine.on("axisareaselected", () => {
    chosen = engine.getModel().getSeries()[0].getRawIndicesByActiveState("active");
    tell(place);
  }));
  chosen = [];
  tell(place);
}

/** What the brush has left, with its fastest. */
function tell(place) {
  const found = plan();
  const fastest = chosen.reduce((best, at) => (best === null || found.points[at][column("step")] < found.points[best][column("step")] ? at : best), null);
  place.querySelector(".buttons").replaceChildren(h("p", { class: "under", role: "status" }, chosen.length ? t("parallel.left", { count: fixed(chosen.length), best: described(found.points[fastest]) }) : t("parallel.hint")),
    ...(chosen.length ? [h("button", { class: "pill", type: "button", onclick: () => load(fastest) }, t("layouts.use"))] : []));
}
