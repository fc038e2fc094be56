/** The frame of a panel: title, what it says, the chart, and the same as a table. Drawn only while it can be seen. */
import { glyph, h } from "./dom.js";
import { t } from "./i18n.js";
import { look, view } from "./state.js";
import { onTheme } from "./theme.js";

const all = new Map();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const panel = entry.target.panel;
    panel.seen = entry.isIntersecting;
    if (panel.seen && panel.stale) panel.paint();
  }
}, { rootMargin: "200px" });

/**
 * what: {id, title() where it is no message, wide, draw(chart, data, panel), table(data) -> {columns, rows}, sub(data), acts: [elements], before(): when it is seen,
 * idle(data) -> the line that stands for a panel with nothing to draw}.
 * A column is a text above numbers, or {text, words: true} above texts; a cell is text or an element.
 */
export class Panel {
  constructor(what) {
    this.what = what;
    this.data = null;
    this.stale = false;
    this.seen = false;
    this.element = null;
    all.set(what.id, this);
  }

  build() {
    const { id, acts = () => [] } = this.what;
    this.title = h("h2", { id: `title-${id}` });
    this.sub = h("p", { class: "sub" });
    this.toggle = this.what.table && h("button", { class: "act", type: "button", onclick: () => this.flip() }, glyph("table"), h("span"));
    this.acts = h("div", { class: "acts" });
    this.chart = h("div", { class: "chart" });
    this.sheet = h("div", { class: "scroll", tabindex: "0", role: "group", hidden: true });
    this.element = h("section", { class: "card panel", id: `panel-${id}`, "aria-labelledby": `title-${id}` },
      h("div", { class: "head" }, this.title, this.acts, this.sub), this.chart, this.sheet);
    this.element.panel = this;
    this.moreActs = acts;
    this.label();
    watcher.observe(this.element);
    return this.element;
  }

  label() {
    const { id } = this.what;
    this.title.textContent = this.what.title?.() ?? t(`${id}.title`);
    this.sheet.setAttribute("aria-label", this.title.textContent);
    if (this.toggle) this.toggle.lastChild.textContent = t("table");
    this.acts.replaceChildren(...this.moreActs(this), ...(this.toggle ? [this.toggle] : []));
    this.press();
  }

  get open() {
    return (view.tables ?? "").split(",").includes(this.what.id);
  }

  flip() {
    const names = new Set((view.tables ?? "").split(",").filter(Boolean));
    if (!names.delete(this.what.id)) names.add(this.what.id);
    look({ tables: [...names].join(",") });
  }

  press() {
    this.toggle?.setAttribute("aria-pressed", String(this.open));
    this.sheet.hidden = !this.open;
    this.chart.hidden = this.open && !this.what.keeps;
  }

  /** New data; drawn at once where it can be seen. */
  show(data) {
    this.data = data;
    this.stale = true;
    if (this.element?.isConnected && this.seen) this.paint();
  }

  paint() {
    this.stale = false;
    if (!this.element) return;
    this.what.before?.();
    this.press();
    const idle = this.data ? this.what.idle?.(this.data) : null;
    this.element.classList.toggle("idle", Boolean(idle));
    this.sub.replaceChildren(idle || (this.data ? this.what.sub?.(this.data) ?? "" : ""));
    if (idle) return this.rest();
    if (!this.chart.hidden) this.what.draw(this.chart, this.data, this);
    if (this.open && this.what.table) this.sheet.replaceChildren(this.data ? table(this.what.table(this.data)) : "");
    return undefined;
  }

  /** There is nothing to draw: one line says so. */
  rest() {
    this.sheet.hidden = this.chart.hidden = true;
  }
}

export function table({ columns, rows, caption, mine }) {
  return h("table", { class: "data" },
    caption ? h("caption", {}, caption) : null,
    h("thead", {}, h("tr", {}, columns.map((column) => [column, column.text ?? (column.words ? "" : column)]).map(([column, text]) => h(text ? "th" : "td", { scope: text ? "col" : null, class: column.words ? "text" : null }, text)))),
    h("tbody", {}, rows.map((row, place) => h("tr", { class: mine?.(place) ? "mine" : null }, row.map((cell, at) => h("td", { class: columns[at].words ? "text" : null }, cell ?? ""))))));
}

export const scrolled = (label, what) => h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": label }, table(what));

export const panel = (id) => all.get(id);

/** Draws again what can be seen; everything: on paper, all that is there. */
export function repaint(relabel = false, everything = false) {
  for (const one of all.values()) {
    if (!one.element) continue;
    if (relabel) one.label();
    one.stale = true;
    if ((one.seen || everything) && one.element.isConnected) one.paint();
  }
}

onTheme(() => repaint());
