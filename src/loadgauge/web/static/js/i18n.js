/** Words: every text of the page comes from messages/<language>.json. */
export const LANGUAGES = { en: "English", zh: "简体中文" };
let words = {};
export let language = "en";

export const preferred = () => (navigator.languages ?? []).some((one, place) => one.startsWith("zh") && place === 0) ? "zh" : "en";

export async function speak(wanted) {
  language = wanted in LANGUAGES ? wanted : "en";
  words = await (await fetch(`/static/messages/${language}.json`)).json();
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
}

/** A text by its key, with {names} filled in. */
export function t(key, values = {}) {
  const text = words[key];
  if (text === undefined) return key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
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
