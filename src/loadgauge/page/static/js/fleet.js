/** The run on a fleet: what failures, spares and checkpoints make of its days. The server simulates. */
import { ask, latest } from "./api.js";
import { h, shape as svg, swatch } from "./dom.js";
import { asksBy } from "./drawer.js";
import { refusal, t, term } from "./i18n.js";
import { ticks } from "./lanes.js";
import { counted, fixed, money, percent, scaled, seconds } from "./numbers.js";
import { Panel, table } from "./panel.js";
import { flags } from "./state.js";

const FAILURES = ["studies", "llama3", "none"];
const RECOVER = ["restart", "elastic", "reroute"];
const INTERVALS = [null, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 240];
const asked = { spares: 1, every: null, failures: "studies", recover: "restart" };
let found = null;
let problem = "";
let sent = "";
let controls = null;

const word = (name) => t(`fleet.time.${name.replaceAll(" ", "-")}`);

export const fleet = new Panel({
  id: "fleet",
  wide: true,
  draw,
  sub: () => (found ? t("fleet.sub", { runs: found.runs, tokens: found.assumed_tokens ?? counted(found.tokens) }) : ""),
  table: () => ({
    columns: [{ text: t("fleet.second"), words: true }, t("share.of")],
    rows: Object.entries(found?.time ?? {}).map(([name, share]) => [word(name), percent(share, 2)]),
  }),
});

const request = latest("fleet", (answer) => { [found, problem] = [answer, ""]; fleet.show({}); },
  (error) => { problem = refusal(error.message) || t("unreachable"); fleet.show({}); });

/** Asks anew where the flags or the controls have changed. */
export function followFleet() {
  const body = { flags: { ...flags }, ...asked };
  const key = JSON.stringify(body);
  if (key === sent) return;
  sent = key;
  request(body);
}

function choice(name, values) {
  const box = h("select", { class: "field", style: { width: "auto" }, id: `fleet-${name}`, onchange: () => { asked[name] = box.value; followFleet(); } }, values.map((value) => h("option", { value, selected: asked[name] === value ? "" : null }, t(`fleet.${name}.${value}`))));
  return h("label", { for: `fleet-${name}` }, t(`fleet.${name}`), " ", box);
}

function slider(name, most, step, at, read, said) {
  const shown = h("output", { for: `fleet-${name}` });
  const range = h("input", { type: "range", id: `fleet-${name}`, min: 0, max: most, step, value: at, oninput: () => { asked[name] = read(range.value); label(); followFleet(); } });
  const label = () => {
    shown.textContent = said();
    range.style.setProperty("--fill", `${(100 * range.value) / most}%`);
    range.setAttribute("aria-valuetext", shown.textContent);
  };
  label();
  return h("div", { class: "whatif" }, h("label", { for: `fleet-${name}` }, t(`fleet.${name}`)), range, shown);
}

function build() {
  return h("div", {}, h("p", { class: "legend" }, choice("failures", FAILURES), choice("recover", RECOVER)),
    slider("spares", 10, 0.5, asked.spares, Number, () => `${asked.spares} %`),
    slider("every", INTERVALS.length - 1, 1, INTERVALS.indexOf(asked.every), (place) => INTERVALS[place], () => (asked.every ? `${asked.every} min` : t("fleet.best"))));
}

/** Days under a drawing, at their places between two ends. */
function axis(low, high, marks) {
  const place = (value) => `${(100 * (value - low)) / (high - low || 1)}%`;
  return h("div", { "aria-hidden": "true", style: { position: "relative", height: "18px", "font-size": "13px", color: "var(--mute)" } }, marks.map((value) => h("span", { style: { position: "absolute", left: place(value), transform: value === low ? "none" : value === high ? "translateX(-100%)" : "translateX(-50%)", "white-space": "nowrap" } }, `${fixed(value, high - low < 5 ? 1 : 0)}${value === marks.at(-1) ? ` ${t("fleet.days-unit")}` : ""}`)));
}

const titled = (shape, text) => { const title = svg("title"); title.textContent = text; shape.append(title); return shape; };

/** The first simulated run from left to right; each failure is as wide as the time it takes. */
function timeline() {
  const picture = svg("svg", { viewBox: "0 0 1000 44", width: "100%", height: "44", preserveAspectRatio: "none", role: "img", "aria-label": t("fleet.timeline", { count: found.events.length }) },
    svg("rect", { x: 0, y: 6, width: 1000, height: 32, fill: "var(--compute)" }));
  const { columns } = found;
  const most = Math.max(...columns.map(([, share]) => share));
  for (const [at, [count, share]] of columns.entries()) {
    const shape = svg("rect", { x: (1000 * at) / columns.length, y: 38 - (32 * share) / most, width: 1000 / columns.length, height: (32 * share) / most, fill: "var(--exposed)" });
    const day = (place) => fixed((found.first_days * place) / columns.length, 1);
    picture.append(titled(shape, t("fleet.stretch", { low: day(at), high: day(at + 1), count, share: percent(share) })));
  }
  if (columns.length) return h("div", {}, picture, axis(0, found.first_days, ticks(found.first_days)), h("p", { class: "note" }, t("fleet.columns", { count: fixed(columns.reduce((sum, [count]) => sum + count, 0)), share: percent(most) })));
  for (const [at, cause, lost] of found.events) {
    const width = Math.max(1.5, (1000 * lost) / 86400 / found.first_days);
    picture.append(titled(svg("rect", { x: (1000 * at) / found.first_days, y: 0, width, height: 44, fill: "var(--exposed)" }), `${t("fleet.day")} ${fixed(at, 1)}: ${term(cause)}, ${seconds(lost)}`));
  }
  return h("div", {}, picture, axis(0, found.first_days, ticks(found.first_days)));
}

/** How many of the runs take how many days; dashed the tenth, the middle and the ninetieth of a hundred. */
function distribution() {
  const { counts, low, high } = found.bins;
  const top = Math.max(...counts);
  const { p10, p50, p90 } = found.days;
  const label = t("fleet.distribution", { low: fixed(low, 1), high: fixed(high, 1) });
  const day = (place) => fixed(low + ((high - low) * place) / counts.length, 1);
  const picture = svg("svg", { viewBox: "0 0 1000 120", width: "100%", height: "120", preserveAspectRatio: "none", role: "img", "aria-label": label },
    ...counts.map((count, place) => titled(svg("rect", { x: (1000 * place) / counts.length + 2, y: 120 - (116 * count) / top, width: 1000 / counts.length - 4, height: (116 * count) / top, fill: "var(--compute)" }), t("fleet.column", { low: day(place), high: day(place + 1), count }))),
    ...[p10, p50, p90].map((value) => ({ x: (1000 * (value - low)) / (high - low || 1) })).map(({ x }) => svg("line", { x1: x, x2: x, y1: 0, y2: 120, stroke: "var(--ink)", "stroke-dasharray": "4 4", "vector-effect": "non-scaling-stroke" })));
  return h("div", {}, picture, axis(low, high, [0, 1, 2, 3, 4].map((place) => low + ((high - low) * place) / 4)));
}

/** A number that explains itself, as `loadgauge fleet --explain` does. */
const told = (topic, name, ...content) => asksBy(() => ask("fleet", { ...JSON.parse(sent), why: topic }), `fleet/${topic}`, name, ...content);

function where() {
  const parts = Object.entries(found.shares).filter(([, share]) => share > 0.0005);
  return h("p", { class: "legend foot" }, parts.map(([name, share]) => swatch(name === "progress" ? "var(--compute)" : name === "idle spares" ? "var(--temporary)" : "var(--exposed)", told(name.replaceAll(" ", "-"), word(name), `${word(name)} ${percent(share)}`))));
}

/** The answer: each number with what it is called. */
function numbers() {
  const { days, goodput, interruptions, checkpoint } = found;
  const rows = [
    ["days", t("days.title"), t("unit.days", { value: fixed(days.p50, 1) }), t("fleet.range", { low: fixed(days.p10, 1), high: fixed(days.p90, 1) })],
    ["goodput", t("fleet.goodput"), percent(goodput.p50), t("fleet.range", { low: percent(goodput.p10), high: percent(goodput.p90) })],
    ["failures", t("fleet.interruptions"), fixed(interruptions.p50), t("fleet.range", { low: fixed(interruptions.p10), high: fixed(interruptions.p90) })],
    ...(checkpoint.every ? [["checkpoint", t("fleet.every"), seconds(checkpoint.every), ""]] : []),
    ["tokens-per-second", t("fleet.rate"), scaled(found.tokens_per_second, "tok/s"), ""],
    ...(found.energy_kwh ? [["energy", t("fleet.energy"), scaled(1000 * found.energy_kwh, "Wh"), ""]] : []),
    ...(found.cost ? [["", t("cost.title"), money(found.cost).join(" ").trim(), ""]] : []),
  ];
  return h("div", { role: "status" }, h("dl", { class: "facts" }, rows.map(([topic, name, value, under]) => h("div", {}, h("dt", {}, name), h("dd", {}, topic ? told(topic, name, value) : value, under ? h("span", { class: "note" }, under) : null)))));
}

function tiers() {
  if (!found.tiers.length) return h("p", { class: "note" }, t("fleet.no-tiers"));
  const columns = [{ text: t("fleet.tier"), words: true }, "GPU", "GB/s", t("fleet.narrower"), t("fleet.busy")];
  return table({ columns, rows: found.tiers.map((one) => [one.tier, fixed(one.span), fixed(one.bandwidth / 1e9, 1), `${fixed(one.oversubscription, 1)}:1`,
    h("span", {}, percent(one.busy), h("span", { class: "bullet", "aria-hidden": "true" }, h("i", { style: { width: `${Math.min(100, 100 * one.busy)}%` } })))]) });
}

function draw(place) {
  controls ??= build();
  const body = [];
  if (problem) body.push(h("p", { class: "waiting", role: "status" }, problem));
  else if (!found) body.push(h("p", { class: "waiting" }, t("working")));
  else {
    body.push(numbers(),
      h("h3", {}, t("fleet.timeline-title")), timeline(), where(),
      h("h3", {}, t("fleet.distribution-title")), distribution(), h("h3", {}, found.tiers.length ? told("tiers", t("fleet.tiers"), t("fleet.tiers")) : t("fleet.tiers")), tiers());
  }
  place.replaceChildren(controls, h("div", { style: { display: "grid", gap: "12px", marginTop: "12px" } }, body));
}

/** The words of the controls, in another language. */
export const relabelFleet = () => { controls = null; };
