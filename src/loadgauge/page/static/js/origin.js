/** Where the run that is shown comes from: the sample, a file, the user. A file without an answer stands in place of the verdict. */
import { find, h } from "./dom.js";
import { refusal, t, term } from "./i18n.js";
import { encoded, flags, look, onChange, own, replace, view } from "./state.js";

/** The file that is the run: {name, how: what is said of it, flags}; waits: there is no answer yet. */
let file = null;
/** The file that has no answer: {name, reason, notes, became: whether it is the run}. */
let unanswered = null;
/** The run of the answer that is there. */
let last = null;
/** The three runs to begin with: one card, a node, a cluster. */
let doors = [];
const listeners = [];

/** Calls back when the answer of the run before is shown again. */
export const onReturn = (listener) => listeners.push(listener);

/** A file has become the run. how: says what was kept; notes: what the server says of it; waits: an answer is asked for. */
export function became(name, how, notes, waits) {
  file = { name, how, notes, waits, flags: encoded(flags) };
  unanswered = null;
  if (!waits) draw();
}

/** A file that cannot be read: the answer that is there is not of it. reason: says why. */
export function unread(name, reason) {
  unanswered = { name, reason };
  draw();
}

/** Whether the model that is shown is the sample's: neither a file nor the user said it. */
export const isSample = () => !file && !own.has("model");

/** Another file was read, which is no run: what was refused before it is over. */
export function readBeside() {
  if (unanswered && !unanswered.became) goBack();
}

export function knowDoors(known) {
  doors = ["card", "node", "cluster"].map((door) => known.presets.find((one) => one.door === door));
  draw();
}

/** The run has no answer. Returns whether that is said here, because the run is that of a file. */
export function unestimated(error) {
  if (!file?.waits) return false;
  const notes = () => refusal(term(file.notes));
  const none = !flags.model && file.notes;
  unanswered = { name: file.name, reason: none ? notes : () => refusal(error.message) || t("unreachable"), notes: none ? null : notes, became: true };
  draw();
  return true;
}

/** The run has an answer. */
export function answered() {
  if (file) file = file.flags === encoded(flags) ? { ...file, waits: false } : null;
  last = { flags: { ...flags }, own: [...own], file: view.file ?? null };
  unanswered = null;
  draw();
}

// Another run is gone to, or a setting of the run before is changed: it is no longer about the file.
onChange((change) => {
  if (!change.address && !(change.flags && unanswered && !unanswered.became)) return;
  unanswered = null;
  if (change.address) file = null;
  draw();
});

function goBack() {
  const { became: gone } = unanswered;
  unanswered = file = null;
  if (gone) {
    replace(last.flags, { mine: last.own });
    look({ file: last.file });
  }
  draw();
  listeners.forEach((listener) => listener());
}

/** A run in a few words. */
export const words = ({ flags: run, file: name }) => [run.model?.startsWith("upload:") ? name ?? run.model : run.model, run.gpu ? `${run.gpus ?? 1} × ${run.gpu}` : null].filter(Boolean).join(" · ");

const button = (text, onclick, kind = "pill") => h("button", { class: kind, type: "button", onclick }, text);
const choose = (kind) => button(t("origin.choose"), () => find("#file").click(), kind);
/** What is missing, as a button that leads to its field. */
export const toField = (flag, text, kind = "asks") => button(text, () => { find("#settings").classList.add("open"); find(`#flag-${flag}`)?.focus(); }, kind);

/** Says both; once more in another language. */
export function draw() {
  document.body.classList.toggle("unanswered", Boolean(unanswered));
  const place = find("#unanswered");
  place.hidden = !unanswered;
  if (unanswered) {
    const { name, notes, became: run } = unanswered;
    const reason = unanswered.reason();
    document.title = `${name} · loadgauge`;
    place.replaceChildren(h("p", { class: "big bad" }, t(run ? "unanswered.run" : "unanswered.file")),
      h("p", {}, h("strong", {}, name), reason.startsWith(name) ? reason.slice(name.length) : `: ${reason}`), notes ? h("p", { class: "under" }, notes()) : "",
      run ? "" : h("p", { class: "under" }, t("unanswered.kinds", { kinds: t("drop.kinds") })),
      last ? h("p", { class: "under" }, t("unanswered.aside", { run: words(last) })) : "",
      h("div", { class: "buttons" }, run && !flags.model ? toField("model", t("unanswered.model"), "primary") : choose("primary"), last ? button(t("unanswered.back"), goBack) : ""));
  }
  const line = find("#origin");
  line.hidden = Boolean(unanswered) || !last || (own.size > 0 && !file);
  if (line.hidden) return;
  if (file) line.replaceChildren(h("strong", {}, file.name), ` ${file.how()}`);
  else line.replaceChildren(h("strong", {}, t("origin.sample")), ` ${t("origin.start", { run: words(last) })}`, choose("pill"), h("div", { class: "doors" }, doors.map((one) => h("button", { class: "door", type: "button", "data-door": one.door, "aria-pressed": String(one.flags.model === last.flags.model && one.flags.gpus === last.flags.gpus), onclick: () => replace(one.flags, { mine: [] }) }, h("strong", {}, t(`door.${one.door}`)), one.name)),
    doors.length ? h("button", { class: "door", type: "button", "data-door": "learn", onclick: () => look({ tab: "learn" }, { push: true }) }, h("strong", {}, t("tab.learn")), t("door.learn")) : ""));
}
