/** Files that are handed in: a model's config, a job of another tool, an error text, a snapshot. */
import { ask, send } from "./api.js";
import { find, h } from "./dom.js";
import { keepDots } from "./dots.js";
import { refusal, t, term } from "./i18n.js";
import { fixed } from "./numbers.js";
import { became, readBeside, unread, words } from "./origin.js";
import { flags, look, own, replace, view } from "./state.js";
import { toast } from "./tip.js";

let read = null;
const tellers = [];

/** Calls back with what the server found in a file that tells of memory that ran out. */
export const onWhy = (teller) => tellers.push(teller);

export function dropZone() {
  const input = h("input", { type: "file", multiple: true, hidden: true, id: "file", "aria-label": t("drop.title"), onchange: () => { take([...input.files]); input.value = ""; } });
  const button = h("button", { class: "drop", type: "button", id: "drop", onclick: () => input.click() }, h("strong", {}, t("drop.title")), t("drop.kinds"));
  return h("div", {}, button, input, h("div", { id: "read", role: "status" }, read ? summary() : ""));
}

export function listenToDrops() {
  const stop = (event) => { event.preventDefault(); document.body.classList.toggle("dropping", event.type === "dragover"); };
  addEventListener("dragover", stop);
  addEventListener("dragleave", stop);
  addEventListener("drop", (event) => { stop(event); take([...event.dataTransfer.files]); });
  addEventListener("paste", (event) => {
    const text = event.clipboardData.getData("text");
    if (!event.target.matches?.("input, textarea") && text.trim().startsWith("{")) give({ name: "config.json", text });
  });
}

const PICKLE = 0x80;
const LARGE = 3e6;
const SMALL = 5e5;
const MOST = 2 ** 30;
/** What stays when a file becomes the run, where the user has chosen it. */
const CARD = ["gpu", "gpus"];

/** Files that are dropped together are one run. */
async function take(files) {
  for (const [at, file] of files.entries()) {
    const first = file.size > MOST ? [] : new Uint8Array(await file.slice(0, 1).arrayBuffer());
    const with_ = { together: at > 0 };
    if (file.size > MOST) refused(file.name, () => t("drop.large", { size: fixed(file.size / MOST, 1), most: 1 }));
    else if (first[0] === PICKLE || file.size > LARGE) await given(file.name, () => send("snapshot?device=0", file), with_);
    else await give({ name: file.name, text: await file.text() }, with_);
  }
}

/** Hands in a text under a name. */
export const give = (body, { together = false } = {}) => given(body.name, () => ask("drop", { ...body, flags: chosen(CARD) }), { text: body.text, together });

const chosen = (names) => Object.fromEntries(names.filter((name) => own.has(name) && name in flags).map((name) => [name, flags[name]]));

function refused(name, reason) {
  const problem = reason();
  read = { problem, name };
  show();
  unread(name, reason);
  tellers.forEach((teller) => teller(null, problem));
}

async function given(name, question, how) {
  say(t("loading"));
  try {
    took(await question(), name, how);
  } catch (error) {
    refused(name, () => refusal(error.message) || t("unreachable"));
  }
}

function took(found, name, { text, together }) {
  read = { ...found, name };
  for (const key of [found.flags.model, found.flags.lengths]) {
    if (key?.startsWith("upload:") && text) keep(key, { name, text });
  }
  if (found.why || found.dots) readBeside();
  if (found.why) tellers.forEach((teller) => teller({ ...found, text }));
  if (found.dots) {
    if (!keepDots({ ...found.dots, name })) toast(t("drop.unkept"));
    look({ tab: null }, { push: true });
  } else if (found.why) {
    look({ tab: "why" }, { push: true });
  } else {
    become(found, name, together);
  }
  show();
  toast(t("drop.read", { name }));
}

/**
 * The file becomes the run: what it does not say is not said, but for the card that the user has chosen. Lengths are of the run that
 * is shown; a config adds the model to a job that has none, and to one that is dropped together with it.
 */
function become(found, name, together) {
  const adds = found.kind === "lengths" || (found.kind === "config" && (together || !flags.model));
  const kept = adds ? { ...flags } : chosen(found.flags.model && !together ? CARD : [...CARD, "model"]);
  const next = { ...(found.kind === "lengths" ? { ...kept, "seq-len": null } : kept), ...found.flags };
  if (together && kept.model?.startsWith("upload:") && found.kind !== "config") next.model = kept.model;
  if (found.longest < Number(next["seq-len"])) next["seq-len"] = found.longest;
  if (next.model?.startsWith("upload:") && found.flags.model === next.model) look({ file: name });
  const stays = Object.keys(kept).filter((flag) => next[flag] === kept[flag] && !(flag in found.flags && !CARD.includes(flag)));
  const mine = found.kind === "lengths" ? [...own, "lengths", "seq-len"] : [...stays.filter((flag) => own.has(flag)), "model"];
  const changed = replace(next, { mine });
  if (found.kind === "lengths") return;
  const how = changed ? (adds ? "origin.added" : stays.length ? "origin.kept" : "origin.alone") : "origin.again";
  const value = (flag) => (flag === "model" ? words({ flags: { model: flags.model }, file: view.file }) : flags[flag]);
  became(name, () => t(how, { kept: stays.map((flag) => `${t(`flag.${flag}`)} ${value(flag)}`).join(", ") }), found.message, changed);
}

/** For after a restart of the server. Without it, that asks for the file again. */
function keep(key, file) {
  const text = JSON.stringify(file);
  try {
    sessionStorage.setItem(key, text);
    // The last run's file is there when the page opens again; of older ones none.
    Object.keys(localStorage).filter((name) => name.startsWith("upload:")).forEach((name) => localStorage.removeItem(name));
    if (text.length < SMALL) localStorage.setItem(key, text);
  } catch {
    toast(t("drop.unkept"));
  }
}

/** After a restart of the server: gives a model's file in again. True where it was there. */
export async function handAgain(key) {
  const kept = sessionStorage.getItem(key) ?? localStorage.getItem(key);
  if (!kept) return false;
  try {
    await ask("drop", JSON.parse(kept));
    return true;
  } catch {
    return false;
  }
}

const say = (text) => find("#read")?.replaceChildren(h("div", { class: "read" }, text));
const show = () => find("#read")?.replaceChildren(summary());

function summary() {
  if (read.problem) return h("div", { class: "read" }, h("strong", { class: "bad" }, read.name), h("div", {}, read.problem));
  const unread = read.unread ?? [];
  return h("div", { class: "read" }, h("strong", {}, read.name), read.message ? h("div", {}, refusal(term(read.message))) : null,
    unread.length ? h("details", { class: "more" }, h("summary", {}, t("drop.unread", { count: unread.length })), h("ul", {}, unread.map((one) => h("li", {}, typeof one === "string" ? one : one.text ?? JSON.stringify(one))))) : null);
}
