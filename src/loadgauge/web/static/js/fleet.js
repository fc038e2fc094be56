/** The run on a fleet: what failures, spares and checkpoints make of its days. The server simulates. */
import { latest } from "./api.js";
import { h } from "./dom.js";
import { refusal, t } from "./i18n.js";
import { counted, fixed, percent, scaled, seconds } from "./numbers.js";
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
    columns: [{ text: t("fleet.second"), words: true }, { text: t("share.of") }],
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

const svg = (tag, given = {}, ...inside) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(given)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
};

/** The first simulated run from left to right; each failure is as wide as the time it takes. */
function timeline() {
  const picture = svg("svg", { viewBox: "0 0 1000 44", width: "100%", height: "44", preserveAspectRatio: "none", role: "img", "aria-label": t("fleet.timeline", { count: found.events.length }) },
    svg("rect", { x: 0, y: 6, width: 1000, height: 32, fill: "var(--compute)" }));
  for (const [at, cause, lost] of found.events) {
    const width = Math.max(1, (1000 * lost) / 86400 / found.first_days);
    const title = svg("title");
    title.textContent = `${t("fleet.day")} ${fixed(at, 1)}: ${cause}, ${seconds(lost)}`;
    picture.append(svg("rect", { x: (1000 * at) / found.first_days, y: 0, width, height: 44, fill: "var(--exposed)" }, title));
  }
  return picture;
}

/** How many of the runs take how many days. */
function distribution() {
  const { counts, low, high } = found.bins;
  const top = Math.max(...counts);
  return svg("svg", { viewBox: "0 0 1000 120", width: "100%", height: "120", preserveAspectRatio: "none", role: "img", "aria-label": t("fleet.distribution", { low: fixed(low, 1), high: fixed(high, 1) }) },
    ...counts.map((count, place) => svg("rect", { x: (1000 * place) / counts.length + 2, y: 120 - (116 * count) / top, width: 1000 / counts.length - 4, height: (116 * count) / top, fill: "var(--compute)" })));
}

function where() {
  const parts = Object.entries(found.time).filter(([, share]) => share > 0.0005);
  return h("p", { class: "legend foot" }, parts.map(([name, share]) => h("span", {}, h("i", { style: { background: name === "progress" ? "var(--compute)" : "var(--exposed)" } }), `${word(name)} ${percent(share)}`)));
}

function tiers() {
  if (!found.tiers.length) return h("p", { class: "note" }, t("fleet.no-tiers"));
  const columns = [{ text: t("fleet.tier"), words: true }, { text: "GPU" }, { text: "GB/s" }, { text: t("fleet.narrower") }, { text: t("fleet.busy") }];
  return table({ columns, caption: t("fleet.tiers"), rows: found.tiers.map((one) => [one.tier, fixed(one.span), fixed(one.bandwidth / 1e9, 1), `${fixed(one.oversubscription, 1)}:1`,
    h("span", {}, percent(one.busy), h("span", { class: "bullet", "aria-hidden": "true" }, h("i", { style: { width: `${Math.min(100, 100 * one.busy)}%` } })))]) });
}

function draw(place) {
  controls ??= build();
  const body = [];
  if (problem) body.push(h("p", { class: "waiting", role: "status" }, problem));
  else if (!found) body.push(h("p", { class: "waiting" }, t("working")));
  else {
    const { days, goodput, interruptions } = found;
    body.push(
      h("p", { role: "status" }, h("strong", {}, t("fleet.days", { days: fixed(days.p50, 1), low: fixed(days.p10, 1), high: fixed(days.p90, 1) })), " ",
        t("fleet.goodput", { goodput: percent(goodput.p50), count: fixed(interruptions.p50), every: found.checkpoint.every ? seconds(found.checkpoint.every) : "–", rate: scaled(found.tokens_per_second, "tok/s") })),
      h("h3", {}, t("fleet.timeline-title")), timeline(), where(),
      h("h3", {}, t("fleet.distribution-title")), distribution(),
      h("p", { class: "note" }, t("fleet.distribution", { low: fixed(found.bins.low, 1), high: fixed(found.bins.high, 1) })), tiers());
  }
  place.replaceChildren(controls, h("div", { style: { display: "grid", gap: "12px", marginTop: "12px" } }, body));
}

/** The words of the controls, in another language. */
export const relabelFleet = () => { controls = null; };
