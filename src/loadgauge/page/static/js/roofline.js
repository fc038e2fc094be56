/** Roofline: every operation by its FLOPs a byte, under what the GPU's memory and its compute allow. */
import { axis, lines, Plot, tooltip } from "./chart.js";
import { h, swatch } from "./dom.js";
import { t, term } from "./i18n.js";
import { scaled, seconds, significant } from "./numbers.js";
import { Panel } from "./panel.js";
import { pinned } from "./pin.js";
import { colour } from "./theme.js";

const plot = new Plot();
const PAINT = { matmul: "states", attention: "gradients", "memory-bound": "outside" };

export const roofline = new Panel({
  id: "roofline", draw, idle: ({ panels: { roofline: found } }) => (found?.points.length ? null : t("step.untimed")), sub: ({ panels: { roofline: found } }) => (found ? t("roofline.sub", { peak: scaled(found.peak, "FLOP/s"), bandwidth: scaled(found.bandwidth, "B/s"), ridge: significant(found.ridge) }) : ""),
  table: ({ panels: { roofline: found } }) => ({
    columns: [{ text: t("operation"), words: true }, { text: t("layer"), words: true }, t("roofline.intensity"), t("roofline.achieved"), t("roofline.moved"), t("roofline.time")],
    rows: (found?.points ?? []).map((point) => [h("span", { class: "mono" }, point.op), `${point.layers} × ${term(point.layer)}`, point.intensity ? significant(point.intensity) : "–", scaled(point.achieved, "FLOP/s"), scaled(point.bandwidth, "B/s"), seconds(point.step_seconds)]),
  }),
});

const logs = (found, points) => points.filter((point) => point.intensity > 0 && point.achieved > 0).map((point) => ({ value: [point.intensity, point.achieved], point, symbolSize: 7 + 26 * Math.sqrt(point.step_seconds / found.points[0].step_seconds) }));

function draw(place, answer) {
  const found = answer.panels.roofline;
  const usable = found.points.filter((point) => point.intensity > 0);
  const left = 10 ** Math.floor(Math.log10(Math.min(1, ...usable.map((point) => point.intensity))));
  const right = 10 ** Math.ceil(Math.log10(Math.max(found.ridge * 8, ...usable.map((point) => point.intensity))));
  const kinds = Object.keys(PAINT);
  const before = pinned()?.panels.roofline;
  plot.draw(place, {
    grid: { left: 70, right: 16, top: 16, bottom: 40 },
    tooltip: tooltip({ trigger: "item", formatter: ({ data }) => (data?.point ? lines(`${data.point.op} · ${term(data.point.layer)}`, [[t("roofline.intensity"), significant(data.point.intensity)], [t("roofline.achieved"), scaled(data.point.achieved, "FLOP/s")], [t("roofline.moved"), scaled(data.point.bandwidth, "B/s")], [t("roofline.time"), seconds(data.point.step_seconds)]]) : "") }),
    xAxis: axis({ type: "log", min: left, max: right, name: t("roofline.x"), nameLocation: "middle", nameGap: 24, splitLine: { show: false }, axisLabel: { formatter: (value) => significant(value) } }),
    yAxis: axis({ type: "log", min: 10 ** Math.floor(Math.log10(Math.min(left * found.bandwidth, ...usable.map((point) => point.achieved)))), max: 10 ** Math.ceil(Math.log10(found.peak)), axisLabel: { formatter: (value) => scaled(value, "FLOP/s", 1) } }),
    series: [
      { type: "line", silent: true, symbol: "none", lineStyle: { color: colour("ink"), width: 1.5, opacity: .75 }, data: [[left, left * found.bandwidth], [found.ridge, found.peak], [right, found.peak]] },
      ...kinds.map((kind) => ({ type: "scatter", name: kind, itemStyle: { color: colour(PAINT[kind]), opacity: .82, borderColor: colour("surface"), borderWidth: 1 }, data: logs(found, found.points.filter((point) => point.kind === kind)) })),
      ...(before ? [{ type: "scatter", name: "A", silent: true, itemStyle: { color: "transparent", borderColor: colour("accent"), borderWidth: 1.5, borderType: "dashed" }, data: logs(before, before.points) }] : []),
    ],
  }, t("roofline.label", { count: found.points.length }));
  if (!place.querySelector(".legend")) place.append(h("p", { class: "legend foot" }));
  place.querySelector(".legend").replaceChildren(...kinds.map((kind) => swatch(`var(--${PAINT[kind]})`, t(`lane.${kind}`))), h("span", {}, t("roofline.size")));
}
