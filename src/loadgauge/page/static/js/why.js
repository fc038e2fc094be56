/** Why did it run out of memory? An error's text or a snapshot, read; what held the memory, and what would free it. */
import { ask as question } from "./api.js";
import { cards } from "./controls.js";
import { h, swatch } from "./dom.js";
import { give, onWhy } from "./drop.js";
import { t, term } from "./i18n.js";
import { bytes, fixed } from "./numbers.js";
import { isSample, toField } from "./origin.js";
import { Panel, scrolled } from "./panel.js";
import { flags, replace, set } from "./state.js";
import { find } from "./dom.js";

let found = null;
let problem = "";

export const oom = new Panel({ id: "oom", wide: true, draw: ask, sub: () => t("oom.sub") });
export const cause = new Panel({ id: "cause", wide: true, draw: tell, idle: () => (found?.why || problem ? null : t("cause.none")), sub: () => (found?.message ? term(found.message) : "") });

onWhy((answer, trouble) => {
  found = answer ?? found;
  problem = trouble ?? "";
  cause.show({});
  cause.element?.scrollIntoView({ block: "nearest" });
});

function ask(place) {
  if (place.firstChild) return;
  const text = h("textarea", { class: "paste", id: "oom-text", spellcheck: "false", placeholder: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.06 GiB is free. …", "aria-label": t("oom.paste") });
  place.replaceChildren(text, h("div", { class: "buttons" },
    h("button", { class: "primary", type: "button", onclick: () => text.value.trim() && give({ name: "error.txt", text: text.value }) }, t("oom.ask")),
    h("button", { class: "pill", type: "button", onclick: () => find("#file").click() }, t("oom.file"))));
}

function tell(place) {
  if (problem) return place.replaceChildren(h("p", { class: "waiting bad" }, problem));
  if (found.kind !== "oom") return place.replaceChildren(filled(found.why), ...parts(found.why));
  const yours = h("section", { id: "oom-yours", "aria-live": "polite" });
  place.replaceChildren(...answered(found.why), filled(found.why), ...parts(found.why), yours);
  if (found.text) estimate(found, yours);
}

const ANSWERED = ["cause", "headline", "held", "place", "remedies", "contradictions"];

/** The answer to an error's text, as the command line has it: the cause, where it was, and what to do, the first step first. */
function answered(why) {
  const held = why.held ? `: ${bytes(why.held)}${why.capacity ? ` / ${bytes(why.capacity)}` : ""}` : "";
  const at = why.place ?? {};
  const rows = [["phase", at.phase && `${term(at.phase)}: ${term(at.tensor)}`], ["at", at.frame], ["from", at.own === at.frame ? "" : at.own]];
  return [
    h("p", { class: "cause" }, h("strong", {}, `${t("why.cause")}: ${term(why.cause)}${held}`)),
    ...rows.filter(([, text]) => text).map(([name, text]) => h("p", {}, h("strong", {}, t("pair", { name: t(`why.${name}`) })), text)),
    h("h3", {}, t("why.remedies")), h("ul", { class: "remedies" }, why.remedies.map((one) => h("li", {}, term(one)))),
  ];
}

/** The settings have changed: what they need now, beside the same error. */
export const askAgain = () => { if (found?.text && find("#oom-yours")) estimate(found, find("#oom-yours")); };

/** The run of the page, where it is no sample: what it needs by the estimate, and the changes with which it would have fitted. */
async function estimate(of, place) {
  let yours;
  try {
    yours = await question("fitting", { flags, text: of.text });
  } catch {
    return undefined;
  }
  if (found !== of) return undefined;
  place.classList.toggle("sample", isSample());
  if (isSample()) return place.replaceChildren(h("h3", {}, t("why.yours")), h("p", {}, t("why.sample"), " ", toField("model", t("unanswered.model"), "pill")), ...offers(of.why, { ...yours, vocabulary: 0 }));
  const needs = { total: bytes(yours.total), moment: term(yours.moment), verdict: term(yours.verdict), batch: yours.micro_batch, tokens: yours.seq_len };
  return place.replaceChildren(h("h3", {}, t("why.yours")), h("p", {}, t("why.needs", needs), yours.size ? ` ${t("why.size", { size: yours.size })}` : ""),
    ...offers(of.why, yours), h("ul", {}, yours.changes.map((one) => h("li", {}, h("code", {}, one.flags), `: ${bytes(one.memory.total)}, ${term(one.memory.verdict)} (${term(one.note)})`))));
}

const NEAR = 0.005;

/** What the error says otherwise than the settings: the tokens of its logits, and the card; a click takes it over. */
function offers(why, yours) {
  const rows = [];
  const tokens = why.place?.tensor.includes("vocabulary") && yours.vocabulary ? why.tried / 4 / yours.vocabulary : 0;
  const whole = Math.round(tokens / 64) * 64;
  if (whole && Math.abs(tokens / whole - 1) < NEAR && whole !== yours.micro_batch * yours.seq_len) {
    const change = whole % yours.seq_len ? { "seq-len": whole / yours.micro_batch } : { "micro-batch": whole / yours.seq_len };
    rows.push(h("p", { id: "said-tokens" }, t("why.tokens", { tokens: fixed(whole), vocabulary: fixed(yours.vocabulary), here: fixed(yours.micro_batch * yours.seq_len) }), " ",
      h("button", { class: "pill", type: "button", onclick: () => set(change, { push: true }) }, Object.entries(change).map(([flag, value]) => `${t(`flag.${flag}`)} ${value}`).join())));
  }
  if (why.capacity && Math.abs(why.capacity / (yours.capacity ?? 1) - 1) > 2 * NEAR) {
    // Of the sample no layout is kept: one card has none.
    const one = (gpu) => (isSample() ? replace({ model: flags.model, gpu, gpus: 1 }, { mine: ["gpu", "gpus"] }) : set({ gpu, gpus: 1, memory: null }, { push: true }));
    const same = cards().filter(({ capacity }) => Math.abs(capacity / why.capacity - 1) < 2 * NEAR);
    const choice = h("select", { class: "field", style: { width: "auto" }, id: "said-card", "aria-label": t("flag.gpu"), onchange: () => one(choice.value) },
      h("option", { value: "" }, "…"), same.map((one) => h("option", { value: one.key ?? one.id }, one.name)));
    if (same.length) rows.push(h("p", {}, h("label", { for: choice.id }, t("why.card", { size: bytes(why.capacity) })), " ", choice));
  }
  return rows;
}

const HELD = [["allocated", "states"], ["idle", "outside"], ["beside", "temporary"], ["others", "activations"], ["free", "idle"]];

/** What the device's memory held when it ran out, as far as the text says it. */
function filled(why) {
  const parts = HELD.filter(([name]) => why[name] > 0);
  if (!why.capacity || parts.length < 2) return "";
  return h("div", {}, h("div", { class: "gauge high", role: "img", "aria-label": parts.map(([name]) => `${title(name)} ${bytes(why[name])}`).join(", ") },
    h("div", { class: "bars" }, parts.map(([name, paint]) => h("i", { style: { position: "static", flex: `${why[name]} 0 0`, background: `var(--${paint})` } })))),
  h("p", { class: "legend" }, parts.map(([name, paint]) => swatch(`var(--${paint})`, `${title(name)} ${bytes(why[name])}`))));
}

const COUNTS = new Set(["blocks", "events", "device", "own", "event"]);
const shown = (name, value) => (typeof value !== "number" ? String(value) : COUNTS.has(name) ? String(value) : Number.isInteger(value) ? bytes(value) : fixed(value, 2));
const title = (name) => { const text = t(`why.${name}`); return text.startsWith("why.") ? term(name.replaceAll("_", " ")) : text; };

/** What the library says of it, whatever it has: texts, counts, lists. */
function parts(why) {
  const texts = [];
  const facts = [];
  const lists = [];
  for (const [name, value] of Object.entries(why)) {
    if (why.remedies && ANSWERED.includes(name)) continue;
    if (value === null || value === "" || (Array.isArray(value) && !value.length)) continue;
    if (typeof value === "string") texts.push(h("p", {}, h("strong", {}, t("pair", { name: title(name) })), term(value)));
    else if (typeof value === "number" || typeof value === "boolean") facts.push(h("div", {}, h("dt", {}, title(name)), h("dd", { "data-value": value }, typeof value === "boolean" ? t(value ? "yes" : "no") : shown(name, value))));
    else if (Array.isArray(value)) lists.push([title(name), value]);
    else {
      const inner = Object.entries(value);
      if (inner.every(([, one]) => typeof one !== "object")) facts.push(...inner.map(([key, one]) => h("div", {}, h("dt", {}, title(key)), h("dd", { "data-value": one }, shown(key, one)))));
      else lists.push([title(name), inner.map(([key, one]) => (typeof one === "object" && one ? { name: key, ...one } : { name: key, value: one }))]);
    }
  }
  return [...texts, facts.length ? h("dl", { class: "facts" }, facts) : "", ...lists.map(([name, rows]) => h("section", {}, h("h3", {}, name), listed(rows, name)))];
}

function listed(rows, name) {
  if (typeof rows[0] !== "object") return h("ul", {}, rows.map((one) => h("li", {}, term(String(one)))));
  const keys = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((key) => rows.some((row) => typeof row[key] !== "object" || Array.isArray(row[key])));
  const words = (key) => rows.some((row) => typeof row[key] === "string" || Array.isArray(row[key]));
  return scrolled(name, {
    columns: keys.map((key) => ({ text: title(key), words: words(key) })),
    rows: rows.map((row) => keys.map((key) => (row[key] === undefined || row[key] === null ? "–" : Array.isArray(row[key]) ? row[key].join(" · ") : typeof row[key] === "boolean" ? t(row[key] ? "yes" : "no") : typeof row[key] === "number" ? shown(key, row[key]) : term(row[key])))),
  });
}
