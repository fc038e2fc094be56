/** Where the time goes: one lane each; pale and hatched what hides under compute, red what sticks out of it. */
import { asks } from "./drawer.js";
import { h, swatch } from "./dom.js";
import { t } from "./i18n.js";
import { fixed, percent, seconds } from "./numbers.js";
import { Panel } from "./panel.js";
import { delta, pinned, say } from "./pin.js";
import { hideTip, showTip } from "./tip.js";

const COMMUNICATION = new Set(["tp", "cp", "ep", "pp", "dp", "zero", "fixed"]);
const COMPUTE = new Set(["matmul", "attention", "memory-bound", "optimizer"]);

export const lanes = new Panel({
  id: "lanes",
  draw,
  idle: (answer) => (answer.panels.lanes ? null : t("step.untimed")),
  sub: ({ estimate: { time, layout } }) => (time ? t(layout.pp > 1 ? "lanes.sub" : "lanes.sub.one", { stage: time.stage, step: seconds(time.step) }) : ""),
  table: (answer) => ({
    columns: [{ text: t("lane"), words: true }, t("lanes.exposed"), t("share.of"), t("lanes.hidden"), ...(pinned() ? [t("pin.against")] : [])],
    rows: (answer.panels.lanes ?? []).map((lane) => [name(lane), seconds(lane.seconds), percent(lane.seconds / answer.estimate.time.step), lane.hidden_seconds ? seconds(lane.hidden_seconds) : "–", ...(pinned() ? [delta(lane.seconds, before(lane)?.seconds ?? 0, say.seconds, true)] : [])]),
  }),
});

const name = (lane) => t(`lane.${lane.lane}`);
const before = (lane) => pinned()?.panels.lanes?.find((one) => one.lane === lane.lane);

/** Round places for the marks of an axis from 0. */
export function ticks(end, most = 6) {
  const rough = end / most;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * size).find((one) => one >= rough);
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, place) => place * step);
}

function draw(place, answer) {
  const found = answer.panels.lanes;
  const { step } = answer.estimate.time;
  const end = Math.max(step, pinned()?.estimate.time?.step ?? 0, ...found.flatMap((lane) => lane.spans.map((span) => span.end)));
  const marks = ticks(end);
  const [scale, unit] = end < 1e-3 ? [1e-6, "µs"] : end < 1 ? [1e-3, "ms"] : [1, "s"];
  const share = (value) => `${(100 * value) / end}%`;
  let start = 0;
  const grid = h("div", { class: "lanes", role: "group", "aria-label": t("lanes.label", { lanes: found.map((lane) => `${name(lane)} ${seconds(lane.seconds)}`).join(", ") }) }, found.flatMap((lane) => {
    const then = before(lane);
    const row = [
      h("span", { class: "name" }, name(lane)),
      h("span", { class: "track", style: { "--tick": share(marks[1] ?? end) }, onpointermove: (event) => showTip(event.clientX, event.clientY, name(lane), [
        [t("lanes.exposed"), seconds(lane.seconds)], [t("share.of"), percent(lane.seconds / step)], [t("lanes.hidden"), lane.hidden_seconds ? seconds(lane.hidden_seconds) : "–"],
        ...(then ? [["A", seconds(then.seconds)]] : []),
      ]), onpointerleave: hideTip }, lane.spans.map((span) => h("i", { class: kind(lane, span), style: { left: share(span.start), width: share(span.end - span.start) } })),
      then?.seconds ? h("i", { class: "was", style: { left: share(start), width: share(then.seconds) } }) : null),
      h("span", { class: "value", "data-value": lane.seconds }, asks(`lane/${lane.lane}`, name(lane), seconds(lane.seconds)), h("small", {}, percent(lane.seconds / step))),
    ];
    start += lane.seconds;
    return row;
  }), h("span"), h("span", { class: "axis" }, marks.map((mark) => h("span", { style: { left: share(mark) } }, mark ? fixed(mark / scale, marks[1] < scale ? 1 : 0) + (mark === marks.at(-1) ? ` ${unit}` : "") : "0"))), h("span"));
  const there = new Set(found.flatMap((lane) => lane.spans.map((span) => kind(lane, span))));
  place.replaceChildren(grid, h("p", { class: "legend foot" }, Object.entries(KINDS).filter(([one]) => there.has(one)).map(([, [colour, word]]) => swatch(colour, t(word)))));
}

const KINDS = {
  "": ["var(--compute)", "lanes.computing"],
  exposed: ["var(--exposed)", "lanes.sticking"],
  pale: ["repeating-linear-gradient(-45deg, var(--hidden) 0 3px, var(--hidden-line) 3px 4px)", "lanes.hiding"],
  idle: ["var(--temporary)", "lanes.waiting"],
};

function kind(lane, span) {
  if (span.hidden) return "pale";
  if (COMPUTE.has(lane.lane)) return "";
  return COMMUNICATION.has(lane.lane) ? "exposed" : "idle";
}

