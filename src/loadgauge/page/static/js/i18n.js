/** Words: every text of the page comes from messages/<language>.json. */
import { message } from "./api.js";

export const LANGUAGES = { en: "English", zh: "简体中文" };
let words = {};
let refusals = [];
export let language = "en";

export const preferred = () => (navigator.languages ?? []).some((one, place) => one.startsWith("zh") && place === 0) ? "zh" : "en";

export async function speak(wanted) {
  language = wanted in LANGUAGES ? wanted : "en";
  [words, refusals] = await Promise.all([message(language), language === "en" ? [] : message(`errors.${language}`).then(templates)]);
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
}

/** A text by its key, with {names} filled in. */
export function t(key, values = {}) {
  const text = words[key];
  if (text === undefined) return key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

/** Sentences of the library's errors with {} for what they name, the longest first: each as a pattern, and its translation. */
function templates(all) {
  const plain = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return Object.entries(all).sort(([one], [other]) => other.replaceAll("{}", "").length - one.replaceAll("{}", "").length)
    .map(([text, form]) => [new RegExp(`^${text.split("{}").map(plain).join("(.*?)")}$`, "s"), form]);
}

/**
 * What the library refuses, in the page's language: "config.json: tp: must be ..." keeps its file and key. Several reasons are
 * each translated; what no template matches stays as it is.
 */
export function refusal(text) {
  if (!text || !refusals.length) return text ?? "";
  const whole = translated(text);
  if (whole !== null) return whole;
  const named = /^((?:[^\s:]+|flag [^\s:]+): )(.+)$/s.exec(text);
  const inner = named ? refusal(named[2]) : text;
  if (named && inner !== named[2]) return `${named[1].trimEnd().slice(0, -1)}：${inner}`;
  const parts = text.split("; ");
  return parts.length > 1 ? parts.map(refusal).join("；") : text;
}

function translated(text) {
  for (const [pattern, form] of refusals) {
    const found = pattern.exec(text);
    if (!found) continue;
    if (found.slice(1).some((value) => value.includes("; ") && !value.startsWith("; "))) continue;
    let at = 0;
    return form.replace(/\{(\d*)\}/g, (_, number) => refusal(found[1 + (number === "" ? at++ : Number(number))]));
  }
  return null;
}

export const has = (key) => key in words;

/** Words of the library, such as names of moments and operations; those without a translation stay. */
export function term(text) {
  if (text === undefined || text === null) return "";
  const whole = words.terms?.[text];
  if (whole !== undefined) return whole;
  for (const [pattern, form] of words.patterns ?? []) {
    const found = new RegExp(`^${pattern}$`).exec(text);
    if (found) return form.replace(/\$(\d)/g, (_, number) => term(found[Number(number)]));
  }
  return text;
}

/** An operation or tensor by its name in the library: mlp.gate_up is "MLP gate up". */
export function named(text) {
  if (!/^[a-z_0-9]+(\.[a-z_0-9]+)+$/.test(text)) return term(text);
  return text.split(".").map((one) => words.segments?.[one] ?? one.replaceAll("_", " ")).join(" ");
}

export const locale = () => (language === "zh" ? "zh-CN" : "en-US");
