/** The pipeline schedule: every stage in time, forwards blue, backwards orange, the gaps between them the bubble. */
import { h, swatch } from "./dom.js";
import { t } from "./i18n.js";
import { bytes, percent, seconds, significant } from "./numbers.js";
import { Panel } from "./panel.js";
import { pinned } from "./pin.js";
import { colour } from "./theme.js";
import { hideTip, showTip } from "./tip.js";

const LEFT = 62;
const ROW = 34;
const LIVE = 5;
let canvas = null;
let boxes = [];
let chosen = -1;
let width = 0;

export const schedule = new Panel({
  id: "schedule",
  wide: true,
  draw,
  idle: ({ panels: { schedule: found } }) => (found.stages < 2 ? t("schedule.none") : null),
  sub: ({ panels: { schedule: found } }) => said(found),
  table: ({ panels: { schedule: found } }) => ({
    columns: [t("stage"), t("start"), t("end"), { text: t("work"), words: true }, t("microbatch"), t("chunk"), t("live")],
    rows: found.cells.slice(0, 400).map(([stage, start, end, kind, batch, chunk, live]) => [stage, seconds(start), seconds(end), t(`kind.${kind}`), batch, chunk, bytes(live)]),
  }),
});

function said(found) {
  const before = pinned()?.panels.schedule;
  return t(found.chunks > 1 ? "schedule.chunked" : "schedule.sub", {
    name: found.schedule, stages: found.stages, chunks: found.chunks, shown: found.microbatches_shown, all: found.microbatches,
    bubble: found.step_bubble === null ? percent(found.bubble) : percent(found.step_bubble),
  }) + (before && before.step_bubble !== null ? ` · A: ${percent(before.step_bubble)}` : "");
}

function draw(place, answer) {
  const found = answer.panels.schedule;
  if (!canvas || canvas.parentNode !== place) {
    canvas = h("canvas", { class: "pipeline", tabindex: "0", role: "img", onpointermove: hover, onpointerleave: () => { chosen = -1; hideTip(); }, onkeydown: keys, onblur: hideTip });
    place.replaceChildren(canvas, h("p", { class: "legend foot" }), h("span", { class: "unseen", role: "status" }));
    width = place.clientWidth;
    new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width === width) return;
      width = contentRect.width;
      if (schedule.data) schedule.show(schedule.data);
    }).observe(place);
  }
  canvas.setAttribute("aria-label", t("schedule.label", { text: said(found) }));
  place.querySelector(".legend").replaceChildren(...[["forward", "F"], ["backward", "B"], ...(found.cells.some((cell) => cell[3] === "W") ? [["weight-pass", "W"]] : [])].map(([paint, kind]) => swatch(`var(--${paint})`, t(`kind.${kind}`))),
    swatch("var(--idle)", t("schedule.bubble")),
    h("span", {}, h("i", { class: "line", style: { "border-top": "2px solid var(--activations)" } }), t("schedule.live")));
  paint(found);
}

function paint(found) {
  const rows = found.stages_shown;
  const row = rows.length > 8 ? 24 : ROW;
  const height = rows.length * row + 20;
  const ratio = Math.min(devicePixelRatio || 1, 2);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = `500 13px ${colour("font")}`;
  pen.textBaseline = "middle";
  const scale = (width - LEFT - 2) / found.seconds;
  const place = new Map(rows.map((stage, at) => [stage, at]));
  const most = Math.max(1, ...found.cells.map((cell) => cell[6]));
  for (const [stage, at] of place) {
    pen.fillStyle = colour("mute");
    pen.fillText(t("stage.short", { stage }), 0, at * row + (row - 8) / 2 + 1);
    pen.fillStyle = colour("idle");
    pen.beginPath();
    pen.roundRect(LEFT, at * row + 2, width - LEFT - 2, row - 8, 4);
    pen.fill();
  }
  const paints = { F: colour("forward"), B: colour("backward"), BW: colour("backward"), W: colour("weight-pass") };
  boxes = [];
  for (const cell of found.cells) {
    const [stage, start, end, kind, batch, chunk, live] = cell;
    const x = LEFT + start * scale;
    const wide = Math.max(.8, (end - start) * scale - (scale * (end - start) > 4 ? 1 : .3));
    const y = place.get(stage) * row + 2;
    const tall = row - 8 - LIVE - 1;
    pen.globalAlpha = 1 - .62 * (chunk / Math.max(1, found.chunks));
    pen.fillStyle = paints[kind] ?? colour("forward");
    pen.fillRect(x, y, wide, tall);
    pen.globalAlpha = 1;
    const filled = (LIVE * live) / most;
    pen.fillStyle = colour("activations");
    pen.fillRect(x, y + tall + 1 + LIVE - filled, (end - start) * scale + .3, filled);
    boxes.push([x, y, x + wide, y + row - 8, cell]);
    if (wide > 17) {
      pen.fillStyle = kind === "W" ? "#2a2306" : chunk / found.chunks > .5 ? colour("ink") : "#fff";
      pen.textAlign = "center";
      pen.fillText(String(batch), x + wide / 2, y + tall / 2 + .5);
      pen.textAlign = "start";
    }
  }
  pen.fillStyle = colour("mute");
  const bottom = rows.length * row + 9;
  pen.fillText(found.timed ? "0 s" : "0", LEFT, bottom);
  pen.textAlign = "end";
  pen.fillText(found.timed ? seconds(found.seconds) : significant(found.seconds), width - 2, bottom);
  pen.textAlign = "start";
}

const rowsOf = ([stage, start, end, kind, batch, chunk, live], found) => [
  [t("stage"), String(stage)], [t("microbatch"), String(batch)], ...(found.chunks > 1 ? [[t("chunk"), String(chunk)]] : []),
  [t("time"), found.timed ? `${seconds(start)} – ${seconds(end)}` : `${significant(start)} – ${significant(end)}`], [t("live"), bytes(live)],
];

function hover(event) {
  const frame = canvas.getBoundingClientRect();
  const x = event.clientX - frame.left;
  const y = event.clientY - frame.top;
  const hit = boxes.find(([left, top, right, bottom]) => x >= left && x <= right + 1 && y >= top && y <= bottom);
  if (!hit) return hideTip();
  showTip(event.clientX, event.clientY, t(`kind.${hit[4][3]}`), rowsOf(hit[4], schedule.data.panels.schedule));
}

/** The arrows walk through the work, and read it out. */
function keys(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 0, ArrowUp: 0 }[event.key];
  if (step === undefined || !boxes.length) return;
  event.preventDefault();
  const found = schedule.data.panels.schedule;
  if (step) chosen = Math.max(0, Math.min(boxes.length - 1, chosen + step));
  else {
    const stage = boxes[Math.max(0, chosen)][4][0];
    const rows = found.stages_shown;
    const next = rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(stage) + (event.key === "ArrowDown" ? 1 : -1)))];
    chosen = boxes.findIndex((box) => box[4][0] === next);
  }
  const [x, y, , , cell] = boxes[chosen];
  const frame = canvas.getBoundingClientRect();
  const rows = rowsOf(cell, found);
  showTip(frame.left + x, frame.top + y, t(`kind.${cell[3]}`), rows);
  canvas.parentNode.querySelector('[role="status"]').textContent = `${t(`kind.${cell[3]}`)}, ${rows.map((pair) => pair.join(" ")).join(", ")}`;
}
