/** The tabs and the tools at the top. */
import { find, glyph, h } from "./dom.js";
import { LANGUAGES, language, t } from "./i18n.js";
import { openHelp } from "./keyboard.js";
import { pin } from "./pin.js";
import { copyCommand, copyLink, exportTo, saveFile } from "./share.js";
import { view } from "./state.js";
import { openTab, swapLanguage, tab, TABS } from "./tabs.js";
import { dark, toggleTheme } from "./theme.js";

let dialects = [];
/** What runs are exported to most; the others are behind one more click. */
const USUAL = new Set(["transformers", "trl", "axolotl", "deepspeed", "megatron"]);

export function buildHeader(known) {
  dialects = known?.dialects ?? dialects;
  find("#skip").textContent = t("skip");
  const tabs = find("#tabs");
  tabs.setAttribute("aria-label", t("tabs"));
  tabs.replaceChildren(...TABS.map((name, place) => h("button", { role: "tab", type: "button", id: `tab-${name}`, "aria-controls": "panels", onclick: () => openTab(place) }, t(`tab.${name}`))));
  tabs.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -99, End: 99 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(TABS.length - 1, TABS.indexOf(tab()) + step));
    openTab(next);
    find(`#tab-${TABS[next]}`).focus();
  };
  find("#tools").replaceChildren(
    h("button", { class: "tool side-toggle", type: "button", "aria-controls": "settings", "aria-expanded": "false", "aria-label": t("settings"), onclick: (event) => event.currentTarget.setAttribute("aria-expanded", String(find("#settings").classList.toggle("open"))) }, glyph("sliders"), h("span", { class: "word" }, t("settings"))),
    tool("pin", "pin", t("pin"), pin, { "aria-pressed": String(Boolean(view.pin)), id: "pin" }),
    menu(),
    h("button", { class: "tool", type: "button", id: "language", lang: language === "zh" ? "en" : "zh-CN", onclick: swapLanguage }, language === "zh" ? LANGUAGES.en : LANGUAGES.zh.slice(2)),
    tool("theme", dark() ? "sun" : "moon", t("theme"), toggleTheme, {}, true),
    tool("keys", "help", t("help.title"), openHelp, {}, true));
  mark();
}

function tool(id, icon, text, action, attributes = {}, bare = false) {
  return h("button", { class: `tool${bare ? " glyph" : ""}`, type: "button", id, title: text, "aria-label": text, onclick: action, ...attributes }, glyph(icon), bare ? null : h("span", { class: "word" }, text));
}

/** Which tab is open, whether something is pinned, sun or moon. */
export function mark() {
  for (const name of TABS) {
    const element = find(`#tab-${name}`);
    if (!element) return;
    // Where the row of tabs is wider than the screen, the open one is brought into sight once.
    if (name === tab() && element.getAttribute("aria-selected") !== "true") find("#tabs").scrollLeft = element.offsetLeft - find("#tabs").offsetLeft - 40;
    element.setAttribute("aria-selected", String(name === tab()));
    element.tabIndex = name === tab() ? 0 : -1;
  }
  find("#panels").setAttribute("aria-labelledby", `tab-${tab()}`);
  find("#pin")?.setAttribute("aria-pressed", String(Boolean(view.pin)));
  find("#theme")?.firstChild.replaceWith(glyph(dark() ? "sun" : "moon"));
}

function menu() {
  const items = [
    h("button", { role: "menuitem", type: "button", tabindex: "-1", id: "copy-link", onclick: copyLink }, t("copy.link"), h("kbd", {}, "l")),
    h("button", { role: "menuitem", type: "button", tabindex: "-1", id: "copy-command", onclick: copyCommand }, t("copy.command"), h("kbd", {}, "c")),
    h("button", { role: "menuitem", type: "button", tabindex: "-1", id: "save-file", onclick: saveFile }, t("share.file")),
    h("button", { role: "menuitem", type: "button", tabindex: "-1", onclick: () => setTimeout(() => print(), 50) }, t("print")),
  ];
  const others = [];
  for (const one of dialects) {
    const name = one.name ?? one;
    const item = h("button", { role: "menuitem", type: "button", tabindex: "-1", "data-dialect": name, onclick: () => exportTo(name) }, t("export.to", { dialect: name }));
    (USUAL.has(name) ? items : others).push(item);
  }
  const all = (open) => { more.hidden = open; others.forEach((one) => { one.hidden = !open; }); };
  const more = h("button", { role: "menuitem", type: "button", tabindex: "-1", id: "more-dialects", onclick: (event) => { event.stopPropagation(); all(true); others[0].focus(); } }, t("export.more", { count: others.length }));
  items.push(more, ...others);
  const list = h("div", { role: "menu", hidden: true, "aria-label": t("share"), onkeydown: (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const there = items.filter((one) => !one.hidden);
    if (step) { event.preventDefault(); there[(there.indexOf(document.activeElement) + step + there.length) % there.length].focus(); }
    if (event.key === "Escape") { shut(); button.focus(); }
    if (event.key === "Tab") shut();
  }, onclick: () => shut() }, items);
  const shut = () => { list.hidden = true; button.setAttribute("aria-expanded", "false"); };
  const button = h("button", { class: "tool", type: "button", id: "share", "aria-haspopup": "menu", "aria-expanded": "false", title: t("share"), onclick: () => {
    list.hidden = !list.hidden;
    button.setAttribute("aria-expanded", String(!list.hidden));
    all(false);
    if (!list.hidden) items[0].focus();
  } }, glyph("share"), h("span", { class: "word" }, t("share")));
  button.setAttribute("aria-label", t("share"));
  document.addEventListener("pointerdown", (event) => { if (!event.target.closest?.(".menu")) shut(); });
  return h("div", { class: "menu" }, button, list);
}
