/** Memory through one step: what is alive on the worst rank, part upon part, under the line of what there is. */
import { axis, lines, Plot, tooltip } from "./chart.js";
import { h } from "./dom.js";
import { fileOf, forgetDots } from "./dots.js";
import { t, term } from "./i18n.js";
import { groups, momentTable, ORDER } from "./phases.js";
import { bytes, fixed, GIB, gib, seconds, significant } from "./numbers.js";
import { Panel } from "./panel.js";
import { pinned } from "./pin.js";
import { colour } from "./theme.js";

const plot = new Plot();

export const moments = new Panel({
  id: "moments",
  draw,
  sub: ({ panels: { moments: found } }) => t("moments.sub", { stage: found.rank.stage, peak: term(found.peak) }),
  table: (answer) => momentTable(answer, {
    rows: (answer.panels.moments.dots ?? []).flatMap((found) => found.dots.map((dot) => [title(found, dot), h("span", { "data-dot": `${found.source} ${dot.phase}`, "data-value": dot.bytes }, bytes(dot.bytes)), ...ORDER.map(() => "–")])),
    caption: answer.panels.moments.dots?.length ? ["GiB", t("dots.inside"), ...answer.panels.moments.dots.map(unlike)].filter(Boolean).join("; ") : "GiB",
  }),
});

const title = (found, dot) => t(`dots.${found.source}.${dot.phase.replaceAll(" ", "_")}`);
const SHAPES = { traced: "circle", measured: "diamond" };

function draw(place, answer) {
  const { curve, capacity, dots = [] } = answer.panels.moments;
  const at = Object.fromEntries(curve.columns.map((name, column) => [name, column]));
  const used = ORDER.filter((part) => curve.rows.some((row) => row[at[part]] > 0));
  const end = curve.rows.at(-1)[0];
  const rows = widened(begun(curve.rows), end);
  const memory = answer.estimate.memory;
  const then = pinned()?.panels.moments;
  const top = Math.max(capacity ?? 0, memory.total, ...dots.flatMap((found) => found.dots.map((dot) => dot.height)), then ? pinned().estimate.memory.total : 0) / GIB;
  const series = used.map((part) => ({
    name: part, type: "line", stack: "parts", symbol: "none", silent: true, lineStyle: { width: 0 }, color: colour(part),
    areaStyle: { opacity: 1, color: colour(part) }, data: rows.map((row) => [row[0], row[at[part]] / GIB]),
  }));
  series.push({
    name: "peak", type: "line", data: [], markLine: {
      silent: true, symbol: "none", data: [
        ...(capacity ? [{ yAxis: capacity / GIB, lineStyle: { color: colour("bad"), type: [5, 4], width: 1.5 }, label: { formatter: t("moments.usable", { gib: gib(capacity) }), position: "insideEndTop", color: colour("bad"), fontSize: 13, fontWeight: 500 } }] : []),
        { yAxis: memory.total / GIB, lineStyle: { color: colour("ink"), type: [2, 3], width: 1, opacity: .55 }, label: { formatter: t("moments.peak", { gib: gib(memory.total) }), position: "insideStartTop", color: colour("ink"), fontSize: 13, fontWeight: 500 } },
      ],
    },
  });
  if (then) {
    const scale = end / then.curve.rows.at(-1)[0];
    series.push({ name: "A", type: "line", symbol: "none", silent: true, color: colour("accent"), lineStyle: { width: 1.5, type: [2, 3] }, data: then.curve.rows.map((row) => [row[0] * scale, row.slice(1).reduce((sum, one) => sum + one, 0) / GIB]) });
  }
  for (const found of dots) {
    series.push({
      name: found.source, type: "scatter", z: 9, symbol: SHAPES[found.source], symbolSize: found.source === "traced" ? 11 : 13, silent: true, clip: false,
      itemStyle: { color: colour("surface"), borderColor: colour("ink"), borderWidth: 2.5, opacity: 1 }, data: found.dots.map((dot) => [dot.t, dot.height / GIB]),
    });
  }
  if (!place.querySelector(".legend")) place.append(h("p", { class: "legend foot" }), h("div", { class: "differs", role: "status" }));
  place.querySelector(".differs").replaceChildren(...dots.map(apart).filter(Boolean));
  place.querySelector(".legend").replaceChildren(
    ...groups(used),
    ...(then ? [h("span", {}, h("i", { class: "line", style: { "border-color": "var(--accent)" } }), "A")] : []),
    ...dots.map((found) => h("span", { "data-source": found.source, title: t("dots.inside") }, h("i", { class: `dot ${SHAPES[found.source]}` }), `${t(`dots.${found.source}`)}: ${fileOf(found.source)}`,
      h("button", { class: "cross", type: "button", "aria-label": t("dots.remove", { name: fileOf(found.source) }), title: t("dots.remove", { name: fileOf(found.source) }), onclick: () => forgetDots(found.source) }, "×"))),
    ...(curve.microbatches > curve.microbatches_shown ? [h("span", {}, t("moments.shown", { shown: fixed(curve.microbatches_shown), all: fixed(curve.microbatches) }))] : []));
  plot.draw(place, {
    grid: { left: 36, right: 8, top: 20, bottom: 24 },
    tooltip: tooltip({ trigger: "axis", axisPointer: { type: "line", lineStyle: { color: colour("edge") } }, formatter: (points) => {
      const line = points.find((point) => point.seriesType === "line" && point.seriesName !== "A");
      const x = points[0].value[0];
      const row = line ? rows[line.dataIndex] : curve.rows.reduce((one, other) => (Math.abs(other[0] - x) < Math.abs(one[0] - x) ? other : one));
      const near = dots.flatMap((found) => found.dots.filter((dot) => Math.abs(dot.t - x) <= end / 100).flatMap((dot) => [
        [title(found, dot), bytes(dot.bytes), colour("ink")], ...(dot.estimated === null ? [] : [[t("dots.estimated"), bytes(dot.estimated)]])]));
      const shown = used.filter((part) => row[at[part]] > 0).reverse();
      return lines(`${curve.timed ? seconds(row[0]) : significant(row[0])} · ${bytes(row.slice(1).reduce((sum, one) => sum + one, 0))}`, shown.map((part) => [t(`part.${part}`), bytes(row[at[part]]), colour(part)]).concat(near));
    } }),
    xAxis: axis({ type: "value", min: 0, max: end, splitLine: { show: false }, axisLabel: { showMaxLabel: false, formatter: (value) => (curve.timed ? seconds(value) : "") } }),
    yAxis: axis({ type: "value", min: 0, max: Math.ceil((top * 1.09) / 4) * 4, name: "GiB", nameGap: 2, nameTextStyle: { color: colour("mute"), fontSize: 13, align: "right", padding: [0, 4, 0, 0] }, axisLabel: { showMaxLabel: false, formatter: (value) => fixed(value) } }),
    series,
  }, t("moments.label", { total: gib(memory.total), moment: term(memory.moment), capacity: capacity ? gib(capacity) : "–" }));
}

/** From the start of the step: until the first moment that is known, what is there at every moment. */
function begun(rows) {
  if (rows[0][0] <= 0) return rows;
  const always = rows[0].map((_, at) => (at ? rows.reduce((least, row) => Math.min(least, row[at]), Infinity) : 0));
  return [always, ...rows];
}

/** What lasts no time in the schedule, as the loss between a forward and its backward, is as wide as can be seen. */
function widened(rows, end) {
  const width = end / 250;
  const wide = [];
  rows.forEach((row, place) => {
    const sudden = row[0] === rows[place - 1]?.[0] && row[0] === rows[place + 1]?.[0];
    wide.push(sudden ? [row[0] - width / 2, ...row.slice(1)] : row);
    if (sudden) wide.push([row[0] + width / 2, ...row.slice(1)]);
  });
  return wide.map((row, place) => (place && row[0] < wide[place - 1][0] ? [wide[place - 1][0], ...row.slice(1)] : row));
}

/** In what a trace or a measurement is of another run than the page's. */
function apart(found) {
  const words = unlike(found);
  return words ? h("p", { class: "warn", "data-differs": found.source }, words) : null;
}

function unlike(found) {
  const said = (what, value) => (what === "weights" ? bytes(value) : typeof value === "number" ? fixed(value) : term(value));
  const rows = found.differs.map(({ what, there, here }) => t("dots.row", { what: t(`dots.of.${what}`), there: said(what, there), here: said(what, here) }));
  const values = { source: t(`dots.${found.source}`), rows: rows.join(t("dots.comma")) };
  return [rows.length ? t("dots.differs", values) : "", found.unsaid ? t("dots.unsaid", values) : ""].filter(Boolean).join(" ");
}
