/** Keys, and the list of them under "?". */
import { find, h } from "./dom.js";
import { t } from "./i18n.js";
import { pin, swap } from "./pin.js";
import { copyCommand, copyLink } from "./share.js";
import { flags, look, set, view } from "./state.js";
import { openTab, swapLanguage, TABS } from "./tabs.js";
import { toggleTheme } from "./theme.js";

const twice = (flag, factor) => {
  const now = Number(flags[flag] ?? find(`#flag-${flag}-number`)?.value) || 1;
  set({ [flag]: String(Math.max(1, factor > 1 ? now * 2 : Math.floor(now / 2))) });
};

const KEYS = {
  "?": openHelp, "/": () => find("#flag-model").focus(), p: pin, x: swap, l: copyLink, c: copyCommand, d: toggleTheme, g: swapLanguage,
  e: () => find("#share").click(), o: () => find("#file").click(),
  a: () => look({ tables: view.tables ? null : ["treemap", "moments", "lanes", "schedule", "layouts", "roofline", "accuracy"].join(",") }),
  "]": () => twice("tp", 2), "[": () => twice("tp", .5), "}": () => twice("pp", 2), "{": () => twice("pp", .5), "=": () => twice("micro-batch", 2), "-": () => twice("micro-batch", .5),
};

export function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || find("dialog[open]")) return;
    if (event.target.matches?.("input:not([type=range]):not([type=checkbox]), textarea, select")) return;
    const place = event.key === "0" ? 9 : Number(event.key) - 1;
    if (TABS[place]) openTab(place);
    else if (KEYS[event.key]) KEYS[event.key]();
    else return;
    event.preventDefault();
  });
  find("#help").addEventListener("click", (event) => { if (event.target.id === "help") event.target.close(); });
}

export function openHelp() {
  const rows = [
    [["?"], "help"], [["1", "…", "9", "0"], "tabs"], [["/"], "model"], [["o"], "open"], [["[", "]"], "tp"], [["{", "}"], "pp"], [["-", "="], "micro"],
    [["p"], "pin"], [["x"], "swap"], [["l"], "link"], [["c"], "command"], [["e"], "export"], [["a"], "tables"], [["d"], "theme"], [["g"], "language"], [["←", "→"], "walk"], [["Esc"], "close"],
  ];
  const dialog = find("#help");
  dialog.setAttribute("aria-labelledby", "help-title");
  dialog.replaceChildren(h("div", { class: "sheet" }, h("header", {}, h("h2", { id: "help-title" }, t("help.title")), h("button", { class: "close", type: "button", "aria-label": t("close"), onclick: () => dialog.close() }, "×")),
    h("dl", { class: "keys" }, rows.flatMap(([keys, what]) => [h("dt", {}, keys.map((key) => (key === "…" ? "…" : h("kbd", {}, key)))), h("dd", {}, t(`key.${what}`))])), h("p", { class: "under" }, t("help.under"))));
  dialog.showModal();
}

