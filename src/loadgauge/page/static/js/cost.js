/** Which card is cheapest for this run: GPU kinds side by side, at the prices of several clouds as the user types them. */
import { ask, latest } from "./api.js";
import { h } from "./dom.js";
import { language, refusal, t } from "./i18n.js";
import { described, loaded } from "./layouts.js";
import { counted, gib, money, seconds, significant } from "./numbers.js";
import { Panel } from "./panel.js";
import { flags, set } from "./state.js";
import { verdictOf } from "./verdicts.js";

const KEPT = "prices";
const USUAL = ["h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "a100-sxm4-80gb", "mi300x", "l40s", "rtx4090"];
const MOST_CLOUDS = 6;
const PAGE = crypto.randomUUID();
let known = [];
let sheet = remembered();
let found = null;
let problem = "";
/** Of each card its own best layout, once asked for: flags and words; for one job only. */
let own = new Map();
let ownJob = "";
let planning = null;
let built = "";
let cells = new Map();

export const costs = new Panel({ id: "costs", wide: true, draw, sub: () => t("costs.sub", { gpus: flags.gpus ?? 1, tokens: flags.tokens ?? t("costs.billion") }) });

/** The catalogue's cards. */
export const knowPrices = (catalogue) => { known = catalogue.gpus.map((one) => ({ id: one.id ?? one.key, name: one.name })); };

function remembered() {
  const empty = { clouds: ["", ""], prices: {}, shown: null };
  try {
    return { ...empty, ...JSON.parse(localStorage.getItem(KEPT)) };
  } catch {
    return empty;
  }
}

function remember() {
  try {
    localStorage.setItem(KEPT, JSON.stringify(sheet));
  } catch { /* kept until the page is left */ }
}

const shown = () => [...new Set([...(flags.gpu ? [flags.gpu] : []), ...(sheet.shown ?? USUAL)])];
const name = (id) => known.find((one) => one.id === id)?.name ?? id;

/** The prices of a card; where none was typed, that of the settings for the card they are about. */
function prices(id) {
  const typed = sheet.clouds.map((_, at) => sheet.prices[id]?.[at] ?? null);
  return id === flags.gpu && flags.price && typed.every((one) => one === null) ? [Number(flags.price) || null, ...typed.slice(1)] : typed;
}

const request = latest("cards", (answer) => {
  [found, problem] = [answer, ""];
  fill();
}, (error) => {
  [found, problem] = [null, refusal(error.message) || t("unreachable")];
  fill();
});

const jobKey = () => JSON.stringify([Object.entries(flags).filter(([flag]) => !["gpu", "price"].includes(flag)).sort()]);

/** Asks anew: after a change of the run, of a price, of the cards. */
export function followCosts() {
  if (!costs.element?.isConnected) return;
  if (ownJob !== jobKey()) [own, ownJob, planning] = [new Map(), jobKey(), null];
  costs.show({});
  request({ flags: { ...flags }, cards: Object.fromEntries(shown().map((id) => [id, own.get(id)?.flags ?? {}])), prices: Object.fromEntries(shown().map((id) => [id, prices(id)])) });
}

function draw(place) {
  const key = JSON.stringify([shown(), sheet.clouds.length, language, flags.gpu, flags.price, known.length, [...own.keys()]]);
  if (key !== built || !place.firstChild) {
    built = key;
    place.replaceChildren(h("p", { class: "cheapest", role: "status" }), grid(), tools());
  }
  fill();
}

/** The table; its prices are typed into it, so that it stays while its other cells change. */
function grid() {
  cells = new Map();
  const cell = (id, what, kind = "") => {
    const one = h("td", { class: kind });
    cells.set(`${id} ${what}`, one);
    return one;
  };
  const clouds = sheet.clouds.map((text, at) => h("th", { scope: "col", class: "cloud" }, h("input", { class: "field", type: "text", value: text, placeholder: t("costs.cloud", { number: at + 1 }), "aria-label": t("costs.cloud", { number: at + 1 }), onchange: (event) => { sheet.clouds[at] = event.target.value.trim(); remember(); fill(); } })));
  const rows = shown().map((id) => h("tr", { "data-gpu": id, class: id === flags.gpu ? "mine" : null }, h("th", { scope: "row", class: "text" }, name(id), h("span", { class: "note" })), cell(id, "fits"), cell(id, "step"), cell(id, "days"), cell(id, "hours"),
    ...sheet.clouds.map((_, at) => h("td", { class: "cloud" }, price(id, at), output(id, at))), cell(id, "bar", "bar-cell"),
    h("td", {}, id === flags.gpu && !own.has(id) ? h("span", { class: "note" }, t("layouts.yours")) : h("span", { class: "end" }, h("button", { class: "pill", type: "button", "aria-label": `${t("hardware.use")}: ${name(id)}`, onclick: () => use(id) }, t("hardware.use")), id === flags.gpu ? null : h("button", { class: "cross", type: "button", "aria-label": t("costs.remove", { gpu: name(id) }), onclick: () => drop(id) }, "×")))));
  return h("div", { class: "scroll", style: { "max-height": "none" }, tabindex: "0", role: "group", "aria-label": t("costs.title") }, h("table", { class: "data costs" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "text" }, "GPU"), ...["memory", "step.title", "days.title", "costs.hours"].map((key) => h("th", { scope: "col" }, t(key))), ...clouds, h("th", { scope: "col" }, t("costs.least")), h("th", { scope: "col" }, h("span", { class: "unseen" }, t("apply"))))), h("tbody", {}, rows)));
}

function price(id, at) {
  return h("input", { class: "field number", type: "text", inputmode: "decimal", autocomplete: "off", value: prices(id)[at] ?? "", placeholder: "–", "aria-label": t("costs.price", { gpu: name(id), cloud: sheet.clouds[at] || t("costs.cloud", { number: at + 1 }) }), oninput: (event) => {
    const value = Number(event.target.value.replace(",", "."));
    event.target.toggleAttribute("aria-invalid", event.target.value.trim() !== "" && !(value > 0));
    const row = sheet.clouds.map((_, place) => prices(id)[place]);
    row[at] = value > 0 ? value : null;
    sheet.prices[id] = row;
    remember();
    followCosts();
  } });
}

function output(id, at) {
  const one = h("span", { class: "note", "data-cost": at });
  cells.set(`${id} cost ${at}`, one);
  return one;
}

function fill() {
  const line = costs.chart?.querySelector(".cheapest");
  if (!line) return;
  if (problem) return line.replaceChildren(h("span", { class: "bad" }, problem));
  if (!found) return line.replaceChildren(t("working"));
  const most = Math.max(0, ...found.rows.flatMap((row) => row.costs.filter((one) => one !== null)));
  for (const row of found.rows) fillRow(row, most);
  line.replaceChildren(...said());
  return undefined;
}

const cloud = (at) => sheet.clouds[at] || t("costs.cloud", { number: at + 1 });

/** The answer in words. */
function said() {
  const { cheapest, close } = found;
  if (!cheapest) return [t("costs.ask")];
  const row = found.rows.find((one) => one.gpu === cheapest.gpu);
  return [h("strong", {}, t("costs.cheapest", { gpu: name(cheapest.gpu), cloud: cloud(cheapest.price), cost: money(cheapest.cost).join(" ").trim() })), " ",
    t("costs.takes", { days: days(row.days), low: money(row.cost_low).join(" ").trim(), high: money(row.cost_high).join(" ").trim() }), close.length ? ` ${t("costs.close", { gpus: close.map(name).join(", ") })}` : ""];
}

const days = (value) => (value >= 1 ? t("unit.days", { value: significant(value) }) : `${significant(24 * value)} ${t("unit.hours")}`);

function fillRow(row, most) {
  const put = (what, ...content) => cells.get(`${row.gpu} ${what}`)?.replaceChildren(...content);
  const none = row.verdict === "does not fit";
  const [word, kind] = verdictOf(row);
  put("fits", row.memory === null ? "–" : h("span", {}, `${gib(row.memory)} GiB`, h("span", { class: "note" }, h("span", { class: kind }, kind ? t(`fit.${word}`) : ""))));
  put("step", row.step === null ? "–" : seconds(row.step));
  put("days", row.days === null ? "–" : days(row.days));
  put("hours", row.gpu_hours === null ? "–" : counted(row.gpu_hours));
  const costs_ = row.costs.filter((one) => one !== null);
  row.costs.forEach((cost, at) => {
    const cell = cells.get(`${row.gpu} cost ${at}`);
    if (!cell) return;
    const best = found.cheapest?.gpu === row.gpu && found.cheapest.price === at;
    cell.className = `note${best ? " best" : ""}`;
    cell.dataset.value = cost ?? "";
    cell.replaceChildren(cost === null || none ? "" : money(cost).join(" ").trim());
  });
  const least = costs_.length && !none ? Math.min(...costs_) : null;
  put("bar", least === null ? "" : h("span", { class: "least" }, money(least).join(" ").trim(), h("span", { class: "bullet", "aria-hidden": "true" }, h("i", { style: { width: `${(100 * least) / most}%`, ...(found.cheapest?.gpu === row.gpu ? { background: "var(--good)" } : {}) } }))));
  const line = costs.chart.querySelector(`tr[data-gpu="${CSS.escape(row.gpu)}"]`);
  line?.classList.toggle("out", none || Boolean(row.error));
  line?.querySelector("th .note").replaceChildren(row.error ? h("span", { class: "bad" }, refusal(row.error)) : own.get(row.gpu)?.words ?? (planning === row.gpu ? t("layouts.busy") : ""));
}

function use(id) {
  const cheapest = prices(id).filter((one) => one !== null);
  set({ ...own.get(id)?.flags, gpu: id, ...(cheapest.length ? { price: String(Math.min(...cheapest)) } : {}) }, { push: true });
}

function drop(id) {
  sheet.shown = (sheet.shown ?? USUAL).filter((one) => one !== id);
  remember();
  followCosts();
}

/** Another card, another cloud, and the best layout on each card. */
function tools() {
  const there = shown();
  const more = h("select", { class: "field", "aria-label": t("costs.add"), onchange: () => {
    sheet.shown = [...(sheet.shown ?? USUAL), more.value];
    remember();
    followCosts();
  } }, h("option", { value: "" }, t("costs.add")), known.filter((one) => !there.includes(one.id)).map((one) => h("option", { value: one.id }, one.name)));
  const clouds = (change) => {
    change();
    remember();
    followCosts();
  };
  return h("div", { class: "buttons" }, more,
    h("button", { class: "pill", type: "button", disabled: sheet.clouds.length >= MOST_CLOUDS, onclick: () => clouds(() => sheet.clouds.push("")) }, t("costs.cloud.add")),
    h("button", { class: "pill", type: "button", disabled: sheet.clouds.length < 2, onclick: () => clouds(() => {
      sheet.clouds.pop();
      for (const row of Object.values(sheet.prices)) row.length = Math.min(row.length, sheet.clouds.length);
    }) }, t("costs.cloud.remove")),
    h("button", { class: "pill", type: "button", id: "best-of-each", onclick: bestOfEach }, t("costs.best")), h("p", { class: "under" }, t("costs.note")));
}

/** Plans on one card after the other; each gets its own best layout, on as many GPUs. */
async function bestOfEach() {
  const job = ownJob;
  const asked = { ...flags };
  for (const id of shown()) {
    if (ownJob !== job) return;
    planning = id;
    fill();
    const there = { ...asked, gpu: id };
    if (id !== asked.gpu) for (const flag of ["nic-bandwidth", "link-bandwidth", "gpus-per-node", "memory", "measured"]) delete there[flag];
    try {
      const plan = await ask("plan", { flags: there, locks: [], page: PAGE });
      if (ownJob !== job) return;
      if (plan.points.length) own.set(id, { flags: loaded(plan, plan.best[0], there), words: described(plan.points[plan.best[0]], plan) });
    } catch { /* the row says what the estimate says */ }
    planning = null;
    followCosts();
  }
}
