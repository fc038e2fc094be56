/** What to change next: each row is another run, really estimated by the server. */
import { later } from "./api.js";
import { h } from "./dom.js";
import { refusal, t, term } from "./i18n.js";
import { GIB, seconds, signed, significant } from "./numbers.js";
import { Panel, scrolled } from "./panel.js";
import { flags, set } from "./state.js";
import { verdictOf } from "./verdicts.js";

let rows = null;
let problem = "";
let asked = "";
let busy = false;

export const changes = new Panel({ id: "changes", draw, sub: () => t("changes.sub") });

const request = later("changes", 450, () => { busy = true; changes.show({}); }, (found) => {
  [rows, problem, busy] = [found.rows, "", false];
  changes.show({});
}, (error) => {
  [rows, problem, busy] = [null, refusal(error.message) || t("unreachable"), false];
  changes.show({});
});

/** Asks anew, once nothing moves any more. */
export function followChanges() {
  const key = JSON.stringify(flags);
  if (key === asked) return;
  asked = key;
  request.start({ flags: { ...flags } });
}

export function forgetChanges() {
  request.stop();
  asked = "";
}

function effect(value, text, less = true) {
  if (value === null || value === undefined) return "–";
  if (!value) return "0";
  return h("span", { class: value < 0 === less ? "good" : "bad" }, signed(text(Math.abs(value)), value));
}

function draw(place) {
  if (problem) return place.replaceChildren(h("p", { class: "waiting" }, problem));
  if (!rows) return place.replaceChildren(h("p", { class: "waiting" }, t("working")));
  if (!rows.length) return place.replaceChildren(h("p", { class: "waiting" }, t("changes.none")));
  const cells = rows.map((row) => [
    h("span", {}, changed(row), row.note ? h("span", { class: "note" }, term(row.note)) : null),
    effect(row.memory_delta, (value) => `${significant(value / GIB)} GiB`), effect(row.step_delta, seconds),
    tag(row),
    h("button", { class: "pill", type: "button", "aria-label": `${t("apply")}: ${plain(row)}`, onclick: () => set(row.flags, { push: true }) }, t("apply")),
  ]);
  const columns = [{ text: t("change"), words: true }, t("memory"), t("step.title"), "", ""];
  const box = scrolled(t("changes.title"), { columns, rows: cells });
  box.style.opacity = busy ? ".55" : "";
  place.replaceChildren(box);
}

/** What fits and computes something else says so. */
function tag(row) {
  const [word, kind] = verdictOf(row);
  if (!kind) return "";
  const numerics = word === "yes" && row.numerics;
  return h("span", { class: `tag ${numerics ? "warn" : kind}` }, t(numerics ? "changes.numerics" : `fit.${word}`));
}

/** What a row changes; a measured run stays what it was, and is only described otherwise. */
const entries = (row) => Object.entries(row.flags).filter(([flag]) => flag !== "measured");

const plain = (row) => entries(row).map(([flag, value]) => `${flag} ${value || "–"}`).join(", ");

/** The change in the page's words: flag, what it was, what it would be. */
function changed(row) {
  return h("strong", {}, entries(row).map(([flag, value]) => {
    const name = t(`flag.${flag}`);
    const shown = name.startsWith("flag.") ? flag : name;
    if (value === "true" || value === true) return shown;
    if (!value || value === "false") return t("changes.without", { flag: shown });
    return `${shown} ${flags[flag] ? `${term(flags[flag])} → ` : ""}${term(String(value))}`;
  }).join(", "));
}
