/** What slides in from the right: the explanation of a block, an exported file. */
import { ask } from "./api.js";
import { find, h } from "./dom.js";
import { has, named, refusal, t, term } from "./i18n.js";
import { amount, bytes, fixed, significant } from "./numbers.js";
import { flags } from "./state.js";
import { scrolled, table } from "./panel.js";
import { hideTip } from "./tip.js";

const drawer = find("#drawer");
let origin = null;
drawer.addEventListener("click", (event) => { if (event.target === drawer) drawer.close(); });
drawer.addEventListener("close", () => origin?.isConnected && origin.focus());

export function openDrawer(title, ...content) {
  const head = h("h2", { id: "drawer-title" }, title);
  drawer.setAttribute("aria-labelledby", "drawer-title");
  drawer.replaceChildren(h("div", { class: "sheet" }, h("header", {}, head, h("button", { class: "close", type: "button", "aria-label": t("close"), onclick: () => drawer.close() }, "×")), ...content));
  hideTip();
  if (!drawer.open) {
    origin = document.activeElement;
    drawer.showModal();
  }
  drawer.scrollTop = 0;
}

const section = (title, ...content) => h("section", {}, h("h3", {}, title), ...content);

/** A block of the treemap, or a part of the memory. */
export const explain = (node) => why(node.id, node.id === node.part ? t(`part.${node.part}`) : `${t(`part.${node.part}`)} · ${named(node.label)}`);

/** Why a figure is what it is: its formula with the user's numbers, its summands, its source. name: what the page calls it */
export async function why(id, name, question = () => ask("explain", { flags, id })) {
  openDrawer(name, h("p", { class: "mute" }, t("loading")));
  let found;
  try {
    found = await question();
  } catch (error) {
    return openDrawer(name, h("p", { class: "bad" }, refusal(error.message) || t("unreachable")));
  }
  return openDrawer(name, h("p", { class: "big", "data-value": found.value }, amount(found.value, found.unit), found.unit === "B" ? h("small", {}, `${fixed(found.value)} B`) : null), ...reasoned(found));
}

/** A number that opens its explanation. */
export const asks = (id, name, ...content) => asksBy(undefined, id, name, ...content);

/** The same, by a question of its own. */
export const asksBy = (question, id, name, ...content) => h("button", { class: "asks", type: "button", "aria-haspopup": "dialog", "data-why": id, title: t("explain.open"), onclick: (event) => { event.stopPropagation(); why(id, name, question); } }, ...content);

function reasoned(found) {
  const parts = [];
  if (found.formulas.length) parts.push(section(t("explain.formula"), found.formulas.map(derivation)));
  if (found.rule) parts.push(section(t("explain.rule"), h("p", {}, readable(term(found.rule)), found.basis ? h("span", { class: "mute" }, ` · ${term(found.basis)}`) : null)));
  if (found.steps.length) {
    const name = (step) => (step.id && has(`part.${step.id}`) ? t(`part.${step.id}`) : has(step.what) ? t(step.what) : stepName(step.what));
    const cell = (step) => {
      const text = amount(step.value, step.unit);
      if (!step.id) return text;
      return h("button", { class: "asks", type: "button", title: t("explain.open"), onclick: () => (has(`part.${step.id}`) ? explain({ id: step.id, part: step.id }) : why(step.id, name(step))) }, text);
    };
    const noted = found.steps.some((step) => step.note);
    const whole = found.steps.reduce((sum, step) => sum + step.value, 0);
    parts.push(section(t("explain.steps"), table({
      columns: [{ text: t("what"), words: true }, ...(noted ? [t("explain.often")] : []), { text: t(found.steps[0].unit === "s" ? "time" : "size") }, t("share.of")],
      rows: [...found.steps.map((step) => [name(step), ...(noted ? [readable(term(step.note))] : []), cell(step), whole ? `${fixed((100 * step.value) / whole, 1)}%` : ""]), [h("strong", {}, t("total")), ...(noted ? [""] : []), h("strong", {}, amount(whole, found.steps[0].unit)), ""]],
    })));
  }
  if (found.tensors?.length) {
    const title = t("explain.tensors", { count: found.tensors.length });
    parts.push(section(title, scrolled(title, {
      columns: [{ text: t("tensor"), words: true }, t("elements"), t("itemsize"), t("size"), { text: t("saved_by"), words: true }],
      rows: found.tensors.map((one) => [h("span", {}, h("span", { class: "mono" }, one.name), h("span", { class: "note" }, term(one.layer))), fixed(one.numel), one.itemsize === null ? "–" : significant(one.itemsize), bytes(one.bytes), one.saved_by.join(", ")]),
    })));
  }
  if (found.notes.length) parts.push(section(t("explain.notes"), h("ul", { class: "notes plain" }, found.notes.map((line) => h("li", {}, term(line))))));
  return [...parts, ...sources(found)];
}

/** "layer: mlp.gate_up" in the page's words. */
const stepName = (text) => {
  const [layer, operation] = text.split(": ");
  return operation ? h("span", {}, named(operation), h("span", { class: "note" }, term(layer))) : readable(term(text));
};

const largest = (text) => text.replace(/^(.*, )(.+): ([a-z_0-9.]+)$/, (_, head, layer, operation) => `${term(head.slice(0, -2))}: ${named(operation)}, ${term(layer)}`);

/** A formula, the same with the user's numbers in it, and what its letters stand for. */
function derivation(one) {
  const filled = one.letters.replace(/([A-Za-z]\w*)(\*\*)?/g, (whole, letter, power = "") => {
    if (!(letter in one.numbers)) return whole;
    const text = amount(one.numbers[letter], one.units[letter]);
    return power && text.includes(" ") ? `(${text})${power}` : `${text}${power}`;
  });
  return h("div", { class: "derivation" }, h("p", { class: "under" }, /: [a-z_0-9.]+$/.test(one.what) ? largest(one.what) : term(one.what)),
    h("pre", { class: "formula", tabindex: "0" }, readable(one.letters)), h("pre", { class: "formula numbers", tabindex: "0" }, `${readable(filled)} = `, h("strong", { "data-value": one.value }, amount(one.value, one.unit))),
    h("dl", { class: "letters" }, Object.entries(one.numbers).flatMap(([letter, value]) => [h("dt", {}, letter), h("dd", { "data-value": value }, amount(value, one.units[letter])), h("dd", { class: "mute" }, term(one.meaning[letter]).replace(/ \[[^\]]+\]$/, ""))])));
}

const sources = (found) => (found.sources?.length ? [section(t("explain.source"), found.sources.map((one) => h("p", {}, one.url ? h("a", { href: one.url, target: "_blank", rel: "noopener noreferrer" }, one.text) : term(one.text))))] : []);

/** Products with a dot. */
const readable = (formula) => formula.replaceAll("**", "^").replace(/\s*\*\s*/g, " · ").replaceAll(" x ", " × ");
