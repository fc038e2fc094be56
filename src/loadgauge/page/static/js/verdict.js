/** The answer in one row: does it fit, how fast, how well, how long, how much; each with its range. */
import { asks } from "./drawer.js";
import { find, h } from "./dom.js";
import { refusal, t, term } from "./i18n.js";
import { GIB, counted, duration, exact, fixed, gib, money, percent, seconds, significant } from "./numbers.js";
import { toField } from "./origin.js";
import { delta, pinned, say } from "./pin.js";
import { set, view } from "./state.js";
import { GROUPS, PARTS } from "./theme.js";
import { verdictOf } from "./verdicts.js";

export function verdict(answer) {
  const { memory, time } = answer.estimate;
  const then = pinned()?.estimate;
  find("#verdict").replaceChildren(
    fits(answer, then),
    ...(time ? [step(answer, then), mfu(answer, then), days(answer, then), cost(answer, then)] : [untimed(answer)]),
  );
  document.title = memory.capacity ? `${gib(memory.total)} GiB · ${answer.estimate.model.name} · loadgauge` : `${answer.estimate.model.name} · loadgauge`;
}

const between = (range, text) => (view.ranges !== "off" && range ? h("span", { class: "range" }, `${text(range[0])} – ${text(range[1])}`) : null);

function card(id, title, number, unit, exactly, under, change) {
  return h("div", { class: "card", id: `verdict-${id}` }, h("h2", { class: "say" }, title),
    h("p", { class: "big", "data-value": exactly }, exactly === "" ? number : asks(id, title, number, unit ? h("small", {}, unit) : null)),
    ...under.filter(Boolean).map((line) => h("p", { class: "under" }, line)), change);
}

function fits(answer, then) {
  const { memory, layout } = answer.estimate;
  const [word, kind] = verdictOf(memory);
  const room = memory.capacity === null ? null : memory.capacity - memory.total;
  const place = layout.pp > 1 ? t("fit.rank", { stage: memory.rank.stage, stages: layout.pp }) : layout.gpus > 1 ? t("fit.only") : null;
  const left = room === null ? null : t(room >= 0 ? "fit.left" : "fit.over", { gib: gib(Math.abs(room)) });
  return h("div", { class: "card fit", id: "verdict-fit" }, h("h2", { class: "say" }, t("fit.title")),
    h("p", { class: "big" }, h("span", { class: kind, "data-fits": String(memory.fits) }, t(`fit.${word}`)),
      asks("fit", t("fit.needs"), h("span", { class: "of" }, exact(gib(memory.total), memory.total, "B"), memory.capacity === null ? " GiB" : t("fit.of", { capacity: gib(memory.capacity) })))),
    memory.capacity === null ? h("p", { class: "under" }, toField("gpu", t("fit.unasked"))) : gauge(memory, then?.memory),
    leftOut(answer.estimate.model.towers_left_out),
    question(memory.question),
    onHost(answer.host),
    h("p", { class: "under" }, [place, term(memory.moment)].filter(Boolean).join(" · ")),
    h("p", { class: "under" }, [left, view.ranges !== "off" ? t("fit.range", { low: gib(memory.low), high: gib(memory.high) }) : null].filter(Boolean).join(" · ")),
    then ? delta(memory.total, then.memory.total, say.gib, true) : null);
}

/** What of the model itself the verdict leaves out. */
const leftOut = (towers) => towers.length ? h("p", { class: "under" }, t("fit.left-out", { towers: towers.map(({ name, bytes }) => bytes === null ? name : `${name} (≥ ${gib(bytes)} GiB)`).join(", ") })) : null;

/** What a node's memory must hold, and whether the one that was stated does. */
function onHost(host) {
  if (!host || !(host.of || host.bytes > GIB / 20)) return null;
  const [word, kind] = verdictOf({ verdict: host.holds ? "fits" : "does not fit" });
  return h("p", { class: "under" }, t("fit.host", { gib: gib(host.bytes) }), ...(host.of ? [` / ${host.of}: `, h("b", { class: kind }, t(`fit.${word}`))] : []));
}

/** The thing that was not said and decides: each of its values is a button that says it. */
function question(asked) {
  if (!asked) return null;
  const { flag, choices } = asked;
  return h("p", { class: "question" }, h("span", {}, t("fit.question"), " ", h("code", {}, flag), ": "), choices.map(({ value, assumed, total, low, high, verdict: word, fields }) => {
    const [key, kind] = verdictOf({ verdict: word });
    return h("button", { class: "choice", type: "button", "data-choice": value, title: t("fit.range", { low: gib(low), high: gib(high) }), disabled: !Object.keys(fields).length, onclick: () => set(Object.fromEntries(Object.entries(fields).map(([name, word]) => [name.replaceAll("_", "-"), word])), { push: true }) },
      `${value} ${gib(total)} GiB `, h("b", { class: kind }, t(`fit.${key}`)), assumed ? h("span", { class: "mute" }, ` ${t("fit.assumed")}`) : null);
  }));
}

/** The eight parts in a row against what the card has, with the range as a whisker. */
function gauge(memory, then) {
  const full = Math.max(memory.capacity, memory.total, memory.high) * 1.01;
  let at = 0;
  const bars = [];
  for (const group of GROUPS) {
    for (const [part, size] of Object.entries(memory.parts)) {
      if (PARTS[part] !== group || !size) continue;
      bars.push(h("i", { style: { left: `${(100 * at) / full}%`, width: `${(100 * size) / full}%`, background: `var(--${group})` } }));
      at += size;
    }
  }
  const place = (bytes) => `${(100 * bytes) / full}%`;
  return h("div", { class: "gauge", role: "img", "aria-label": t("fit.gauge", { total: gib(memory.total), capacity: gib(memory.capacity) }) },
    h("div", { class: "bars" }, bars),
    view.ranges === "off" ? null : h("span", { class: "whisker", style: { left: place(memory.low), width: `${(100 * (memory.high - memory.low)) / full}%` } }),
    h("span", { class: "limit", style: { left: place(memory.capacity) } }),
    then ? h("span", { class: "was", style: { left: place(Math.min(then.total, full)) } }) : null);
}

function step({ estimate: { time }, ranges = {}, counted = "tokens" }, then) {
  const [number, unit] = duration(time.step);
  return card("step", t("step.title"), number, unit, time.step,
    [between(ranges.step ?? [time.low, time.high], seconds), asks("rate", t("rate.title"), t("step.rate", { rate: time.tokens_per_second_per_gpu < 10 ? significant(time.tokens_per_second_per_gpu, 2) : fixed(time.tokens_per_second_per_gpu), counted: term(counted) }))],
    delta(time.step, then?.time?.step, say.seconds, true));
}

function mfu({ estimate: { time }, ranges = {} }, then) {
  return card("mfu", "MFU", fixed(100 * time.mfu, 1), "%", time.mfu,
    [between(ranges.mfu, (share) => percent(share)), t("mfu.hfu", { hfu: percent(time.hfu) }), t("mfu.rate", { tflops: fixed(time.model_tflops_per_gpu) })],
    delta(time.mfu, then?.time?.mfu, say.points, false));
}

function days({ estimate: { time }, ranges = {} }, then) {
  if (!time.days) return card("days", t("days.title"), "–", "", "", [toField("tokens", t("days.unasked"))]);
  const long = time.days >= 1;
  return card("days", t("days.title"), significant(long ? time.days : time.days * 24), t(long ? "unit.day" : "unit.hours"), time.days,
    [between(ranges.days, (value) => (long ? t("unit.days", { value: significant(value) }) : `${significant(24 * value)} ${t("unit.hours")}`)), `${t("days.for", { tokens: counted(time.tokens) })} · ${t("days.hours", { hours: counted(time.gpu_hours) })}`],
    delta(time.days, then?.time?.days, say.days, true));
}

function cost({ estimate: { time }, ranges = {} }, then) {
  if (!time.cost) return card("cost", t("cost.title"), "–", "", "", [toField(time.days ? "price" : "tokens", t("cost.unasked"))]);
  const [number, unit] = money(time.cost);
  return card("cost", t("cost.title"), number, unit, time.cost,
    [between(ranges.cost, (value) => money(value).join(" ").trim()), time.checkpoint_every ? t("cost.goodput", { goodput: percent(time.goodput) }) : t("cost.price")],
    delta(time.cost, then?.time?.cost, say.money, true));
}

function untimed({ estimate }) {
  return h("div", { class: "card", style: { "grid-column": "span 4" } }, h("h2", { class: "say" }, t("step.title")), h("p", { class: "under" }, (estimate.gpu && refusal(estimate.untimed)) || t("step.untimed")));
}
