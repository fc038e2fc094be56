/** ECharts, fetched once the first chart can be seen; without animation, in the page's colours. */
import { h } from "./dom.js";
import { t } from "./i18n.js";
import { colour } from "./theme.js";

let library = null;
const plots = new Set();

/** Every drawing takes the size of its place at once: paper does not wait for observers. */
export const resizePlots = () => plots.forEach((plot) => plot.engine && plot.element.isConnected && plot.engine.resize());

/** A drawing place of ECharts inside a panel's chart. It is made on first use and follows its size. */
export class Plot {
  /** kind: "tall" for a higher one, which may also change its axes between two drawings. */
  constructor(kind = "") {
    this.kind = kind;
    this.engine = null;
    this.wanted = null;
    this.size = { width: 0, height: 0 };
    plots.add(this);
  }

  /** Draws an option; afterwards(engine) is called once, when the engine is there. */
  draw(place, option, label, afterwards) {
    if (!this.element || this.element.parentNode !== place) {
      this.engine?.dispose();
      this.engine = null;
      this.element = h("div", { class: `plot ${this.kind}`, role: "img" });
      place.prepend(this.element);
    }
    this.element.setAttribute("aria-label", label);
    this.wanted = option;
    if (this.engine) return this.put(option);
    library ??= import("/static/vendor/echarts/echarts.min.js");
    return library.then((echarts) => {
      if (!this.engine && this.element.isConnected) {
        this.engine = echarts.init(this.element, null, { renderer: "canvas" });
        new ResizeObserver(([{ contentRect }]) => {
          this.size = contentRect;
          if (!contentRect.width) return;
          this.engine.resize();
          this.resized?.();
        }).observe(this.element);
        afterwards?.(this.engine);
      }
      if (this.engine) this.put(this.wanted);
    });
  }

  put(option) {
    const whole = { animation: false, textStyle: { fontFamily: colour("font") }, ...option };
    this.engine.setOption(whole, this.kind ? { notMerge: true } : { replaceMerge: ["series"] });
  }
}

/** An axis that does not shout. */
export function axis(extra = {}) {
  return {
    axisLine: { show: false }, axisTick: { show: false }, nameTextStyle: { color: colour("mute"), fontSize: 13 },
    axisLabel: { color: colour("mute"), fontSize: 13, hideOverlap: true }, splitLine: { lineStyle: { color: colour("line") } },
    ...extra, ...(extra.axisLabel ? { axisLabel: { color: colour("mute"), fontSize: 13, hideOverlap: true, ...extra.axisLabel } } : {}),
  };
}

export function tooltip(extra = {}) {
  return {
    confine: true, backgroundColor: colour("raised"), borderColor: colour("line"), padding: [8, 11], transitionDuration: 0,
    textStyle: { color: colour("ink"), fontSize: 13 }, extraCssText: "box-shadow: var(--shadow-high); border-radius: 9px;", ...extra,
  };
}

const clean = (text) => String(text).replace(/[&<>"]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);

/** Text for a tooltip: a title and rows of name and value. Names may come from files, and are never markup. */
export function lines(title, rows) {
  const cells = rows.map(([name, value, paint]) => `<tr><td>${paint ? `<i style="display:inline-block;width:8px;height:8px;border-radius:3px;margin-right:6px;background:${clean(paint)}"></i>` : ""}${clean(name)}</td><td style="text-align:right;padding-left:18px">${clean(value)}</td></tr>`);
  return `<b style="font-weight:600">${clean(title)}</b><table style="border-spacing:0">${cells.join("")}</table>`;
}

export const nothing = (place, key) => place.replaceChildren(h("p", { class: "waiting" }, t(key)));
