/** A and B: one run is held fast, and everything shows how it differs from the present one. */
import { ask } from "./api.js";
import { find, h } from "./dom.js";
import { t } from "./i18n.js";
import { duration, fixed, GIB, signed, significant } from "./numbers.js";
import { decoded, encoded, flags, look, replace, view } from "./state.js";

let held = "";
let answer = null;

/** The pinned answer, or null. */
export const pinned = () => answer;

/** Fetches what is pinned, where that has changed; calls back when it is known. */
export async function follow(done) {
  const wanted = view.pin ?? "";
  if (wanted === held) return;
  held = wanted;
  answer = null;
  if (wanted) {
    try {
      const found = await ask("estimate", { flags: decoded(wanted) });
      if (held === wanted) answer = found;
    } catch (error) {
      if (error.name !== "AbortError") look({ pin: null });
    }
  }
  banner();
  done();
}

export function banner() {
  const place = find("#pinned");
  place.hidden = !answer;
  place.setAttribute("aria-label", t("pin"));
  if (!answer) return;
  const wanted = decoded(view.pin ?? "");
  const words = Object.entries(wanted).filter(([name]) => name !== "model").map(([name, value]) => (value === "true" ? name : `${name} ${value}`));
  place.replaceChildren(h("b", {}, "A"), h("span", { class: "what", title: words.join(" · ") }, h("strong", {}, `${wanted.model} `), differences(wanted).join(" · ") || words.join(" · ")),
    h("button", { type: "button", onclick: swap }, t("pin.swap")), h("button", { type: "button", onclick: () => look({ pin: null }, { push: true }) }, t("pin.off")));
}

function differences(wanted) {
  const names = new Set([...Object.keys(wanted), ...Object.keys(flags)]);
  names.delete("model");
  return [...names].filter((name) => wanted[name] !== flags[name]).map((name) => `${name} ${wanted[name] ?? "–"} → ${flags[name] ?? "–"}`);
}

export const pin = () => look({ pin: view.pin ? null : encoded(flags) }, { push: true });

export function swap() {
  if (!view.pin) return;
  const now = encoded(flags);
  const then = decoded(view.pin);
  look({ pin: now });
  replace(then);
}

/** How a number differs from the pinned one's: an element, or null. less: true where less is better. */
export function delta(now, then, say, less) {
  if (!answer || then === undefined || then === null || now === undefined || now === null) return null;
  const change = now - then;
  const quiet = Math.abs(change) <= 5e-5 * Math.abs(then);
  const kind = quiet || less === null ? "" : (change < 0) === less ? "good" : "bad";
  return h("span", { class: `delta ${kind}`, "data-delta": change }, quiet ? t("pin.same") : t("pin.delta", { change: signed(say(Math.abs(change)), change) }));
}

export const say = {
  gib: (value) => `${significant(value / GIB)} GiB`,
  seconds: (value) => duration(value).join(" "),
  points: (value) => t("unit.points", { value: fixed(100 * value, 1) }),
  days: (value) => t("unit.days", { value: significant(value) }),
  money: (value) => significant(value),
};
