/** Files that are handed in: a model's config, a job of another tool, an error text, a snapshot. */
import { ask, send } from "./api.js";
import { find, h } from "./dom.js";
import { keepDots } from "./dots.js";
import { refusal, t, term } from "./i18n.js";
import { flags, look, set } from "./state.js";
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

async function take(files) {
  for (const file of files) {
    const first = new Uint8Array(await file.slice(0, 1).arrayBuffer());
    if (first[0] === PICKLE || file.size > LARGE) await given(file.name, () => send("snapshot?device=0", file));
    else await give({ name: file.name, text: await file.text() });
  }
}

/** Hands in a text under a name. */
export const give = (body) => given(body.name, () => ask("drop", body), body.text);

async function given(name, question, text) {
  say(t("loading"));
  try {
    took(await question(), name, text);
  } catch (error) {
    read = { problem: refusal(error.message) || t("unreachable"), name };
    show();
    tellers.forEach((teller) => teller(null, read.problem));
  }
}

function took(found, name, text) {
  read = { ...found, name };
  const next = { ...Object.fromEntries((found.clears ?? []).map((flag) => [flag, null])), ...found.flags };
  for (const key of [next.model, next.lengths]) {
    if (key?.startsWith("upload:") && text) keep(key, { name, text });
  }
  if (found.why) tellers.forEach((teller) => teller({ ...found, text }));
  if (found.dots) {
    if (!keepDots({ ...found.dots, name })) toast(t("drop.unkept"));
    look({ tab: null }, { push: true });
  } else if (found.why) {
    look({ tab: "why" }, { push: true });
  } else {
    if (next.model?.startsWith("upload:")) look({ file: name });
    if (found.kind === "config") next["stage-layers"] = null;
    if (found.longest < Number(flags["seq-len"])) next["seq-len"] = found.longest;
    set(next, { push: true });
  }
  show();
  toast(t("drop.read", { name }));
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
  return h("div", { class: "read" }, h("strong", {}, read.name), read.message ? h("div", {}, term(read.message)) : null,
    unread.length ? h("details", { class: "more" }, h("summary", {}, t("drop.unread", { count: unread.length })), h("ul", {}, unread.map((one) => h("li", {}, typeof one === "string" ? one : one.text ?? JSON.stringify(one))))) : null);
}
