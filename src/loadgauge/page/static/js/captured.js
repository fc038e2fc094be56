/** A model that is captured from its own code: how far that is, and then what must be known of it. */
import { onCapture } from "./api.js";
import { find, h } from "./dom.js";
import { refusal, t, term } from "./i18n.js";
import { seconds } from "./numbers.js";
import { set } from "./state.js";

/** The axis and its degree, with which an objection begins. */
const SUBJECT = /^[a-z]+ = \d+(, [a-z]+ = \d+)*[:：] */;

/** What is under way; the numbers below are still those of the run before. */
export function listenToCaptures() {
  onCapture((capture) => {
    const place = find("#capturing");
    place.hidden = !capture;
    if (!capture) return;
    document.body.classList.add("stale");
    find("#problem").hidden = true;
    const text = t("capturing", { name: capture.name, stage: t(`capturing.${capture.stage}`) });
    if (place.firstChild?.textContent !== text) place.replaceChildren(h("span", { role: "status" }, text), h("b", {}), h("progress", { "aria-label": text }), h("span", { class: "mute" }, t("capturing.note")));
    place.children[1].textContent = seconds(Math.round(capture.seconds) || 1);
  });
}

/** Of a captured model: the road that was taken, the axes that it does not have, what was taken for granted. */
export function captured({ captured: found }) {
  const place = find("#captured");
  place.hidden = !found;
  if (!found) return;
  const reasons = {};
  for (const [axis, why] of Object.entries(found.closed)) (reasons[refusal(why).replace(SUBJECT, "")] ??= []).push(axis);
  const points = [...Object.entries(reasons).map(([why, axes]) => [t("captured.closed", { axes: axes.join(", ") }), why]), ...found.notes.map((note) => [t("captured.unknown"), refusal(term(note))])];
  place.replaceChildren(h("strong", {}, term(found.how)), points.length ? h("ul", {}, points.map(([name, text]) => h("li", {}, h("b", {}, name), ` ${text}`))) : "");
}

/** Takes the axes away that captured layers do not have. */
export const reopen = (axes) => h("button", { class: "pill", type: "button", id: "reopen", onclick: () => set({ ...Object.fromEntries(axes.map((axis) => [axis, null])), ...(axes.includes("tp") ? { "sequence-parallel": null } : {}) }, { push: true }) }, t("captured.reopen", { axes: axes.map((axis) => `${axis} 1`).join(", ") }));
