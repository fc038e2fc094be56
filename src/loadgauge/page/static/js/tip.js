/** One small note beside the pointer, for everything that is hovered. */
import { find, h } from "./dom.js";

const tip = find("#tip");

/** rows: pairs of text and value, under a title. */
export function showTip(x, y, title, rows = []) {
  tip.replaceChildren(h("b", {}, title), rows.length ? h("table", {}, h("tbody", {}, rows.map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", {}, value))))) : "");
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18}px`;
}

export const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });

let timer = 0;
export function toast(text) {
  const place = find("#toast");
  place.textContent = text;
  place.classList.add("on");
  clearTimeout(timer);
  timer = setTimeout(() => place.classList.remove("on"), 2400);
}
