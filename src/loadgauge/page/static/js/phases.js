/** The moments of a step as bars: what is alive in each on the worst rank, against what the card has. */
import { h } from "./dom.js";
import { t, term } from "./i18n.js";
import { bytes, gib } from "./numbers.js";
import { Panel } from "./panel.js";
import { GROUPS, PARTS } from "./theme.js";
import { hideTip, showTip } from "./tip.js";

/** The parts from the bottom of a stack to its top. */
export const ORDER = ["outside", "weights", "gradients", "optimizer", "gathered", "loss", "activations", "transient", "evaluation"];

const whole = (moment) => Object.values(moment.parts).reduce((sum, one) => sum + one, 0);

/** A row for each moment, with its parts [GiB]; more: rows below them, and another caption. */
export const momentTable = ({ estimate: { memory } }, { rows = [], caption = "GiB" } = {}) => ({
  columns: [{ text: t("moment"), words: true }, { text: t("total") }, ...ORDER.map((part) => ({ text: t(`part.${part}`) }))],
  rows: [...memory.moments.map((moment) => [term(moment.name), gib(whole(moment), 2), ...ORDER.map((part) => gib(moment.parts[part] ?? 0, 2))]), ...rows],
  caption,
  mine: (place) => memory.moments[place]?.name === memory.moment,
});

export const phases = new Panel({
  id: "phases",
  draw,
  sub: ({ estimate: { memory } }) => t("moments.sub", { stage: memory.rank.stage, peak: term(memory.moment) }),
  table: (answer) => momentTable(answer),
});

function draw(place, { estimate: { memory } }) {
  const full = 1.02 * Math.max(memory.capacity ?? 0, ...memory.moments.map(whole));
  const share = (size) => `${(100 * size) / full}%`;
  const used = new Set(memory.moments.flatMap(({ parts }) => ORDER.filter((part) => parts[part] > 0)));
  const bar = (moment) => {
    let at = 0;
    return ORDER.filter((part) => moment.parts[part] > 0).map((part) => {
      const left = share(at);
      at += moment.parts[part];
      return h("i", { style: { left, width: share(moment.parts[part]), background: `var(--${part})` } });
    });
  };
  const limit = () => (memory.capacity === null ? null : h("u", { style: { left: share(memory.capacity) } }));
  place.replaceChildren(
    h("div", { class: "lanes phases", role: "group", "aria-label": t("moments.label", { total: gib(memory.total), moment: term(memory.moment), capacity: memory.capacity === null ? "–" : gib(memory.capacity) }) },
      memory.moments.flatMap((moment) => [
        h("span", { class: `name${moment.name === memory.moment ? " peak" : ""}` }, term(moment.name)),
        h("span", { class: "track", onpointermove: (event) => showTip(event.clientX, event.clientY, term(moment.name), ORDER.filter((part) => moment.parts[part] > 0).map((part) => [t(`part.${part}`), bytes(moment.parts[part])])), onpointerleave: hideTip }, bar(moment), limit()),
        h("span", { class: "value", "data-value": whole(moment) }, bytes(whole(moment))),
      ])),
    h("p", { class: "legend foot" }, GROUPS.filter((group) => [...used].some((part) => PARTS[part] === group)).map((group) => h("span", {}, h("i", { style: { background: `var(--${group})` } }), t(`group_of.${group}`))),
      memory.capacity === null ? null : h("span", {}, h("i", { class: "line", style: { "border-color": "var(--bad)" } }), t("moments.usable", { gib: gib(memory.capacity) }))));
}
