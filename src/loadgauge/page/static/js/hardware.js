/** The GPUs side by side. */
import { h } from "./dom.js";
import { t } from "./i18n.js";
import { gib, scaled, significant } from "./numbers.js";
import { Panel } from "./panel.js";
import { flags, set } from "./state.js";

let cards = [];
let sorted = ["peak", -1];

export const knowCards = (known) => { cards = known.gpus; };

const VALUES = {
  name: (card) => card.name, capacity: (card) => card.capacity, bandwidth: (card) => card.memory_bandwidth, peak: (card) => card.peak_flops?.bf16,
  eight: (card) => card.peak_flops?.fp8, link: (card) => card.link?.bandwidth, domain: (card) => card.link?.domain, nic: (card) => card.nic_bandwidth, tdp: (card) => card.tdp,
};
const SHOWN = {
  name: (one) => one, capacity: (one) => `${gib(one)} GiB`, bandwidth: (one) => scaled(one, "B/s"), peak: (one) => scaled(one, "FLOP/s"), eight: (one) => scaled(one, "FLOP/s"),
  link: (one) => scaled(one, "B/s"), domain: (one) => String(one), nic: (one) => scaled(one, "B/s"), tdp: (one) => `${significant(one)} W`,
};

export const hardware = new Panel({ id: "hardware", wide: true, draw, sub: () => t("hardware.sub") });

function draw(place) {
  const [by, way] = sorted;
  const most = Object.fromEntries(["capacity", "bandwidth", "peak"].map((name) => [name, Math.max(...cards.map((card) => VALUES[name](card) ?? 0))]));
  const order = [...cards].sort((a, b) => {
    const [one, other] = [VALUES[by](a), VALUES[by](b)];
    if (one === undefined || one === null) return 1;
    if (other === undefined || other === null) return -1;
    return way * (typeof one === "string" ? -one.localeCompare(other) : one - other) || a.name.localeCompare(b.name);
  });
  const names = Object.keys(VALUES);
  place.replaceChildren(h("div", { class: "scroll", style: { "max-height": "620px" }, tabindex: "0", role: "group", "aria-label": t("hardware.title") }, h("table", { class: "data cards" },
    h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col", class: name === "name" ? "text" : null, "aria-sort": name === by ? (way < 0 ? "descending" : "ascending") : "none" },
      h("button", { type: "button", onclick: () => { sorted = [name, name === by ? -way : -1]; draw(place); } }, t(`hardware.${name}`)))), h("th", { scope: "col" }, h("span", { class: "unseen" }, t("apply"))))),
    h("tbody", {}, order.map((card) => {
      const key = card.id ?? card.key;
      return h("tr", { class: key === flags.gpu ? "mine" : null }, names.map((name) => {
        const value = VALUES[name](card);
        const text = value === undefined || value === null ? "–" : SHOWN[name](value);
        return h("td", { class: name === "name" ? "text" : null, title: name === "name" ? card.notes ?? "" : null }, text, most[name] && value ? h("span", { class: "bar", style: { width: `${(100 * value) / most[name]}%` } }) : null);
      }), h("td", {}, h("button", { class: "pill", type: "button", disabled: key === flags.gpu, "aria-label": `${t("hardware.use")}: ${card.name}`, onclick: () => set({ gpu: key }, { push: true }) }, t("hardware.use"))));
    })))));
}
