/** The moments of a step as bars: what is alive in each on the worst rank, against what the card has. */
import { h, swatch } from "./dom.js";
import { bars } from "./figure.js";
import { t, term } from "./i18n.js";
import { gib } from "./numbers.js";
import { Panel } from "./panel.js";
import { GROUPS, PARTS } from "./theme.js";

/** The parts from the bottom of a stack to its top. */
export const ORDER = ["outside", "weights", "gradients", "optimizer", "gathered", "loss", "activations", "transient", "evaluation"];

/** What the colours of parts stand for. */
export const groups = (used) => GROUPS.filter((group) => used.some((part) => PARTS[part] === group)).map((group) => swatch(`var(--${group})`, t(`group_of.${group}`)));

const whole = (moment) => Object.values(moment.parts).reduce((sum, one) => sum + one, 0);

/** A row for each moment, with its parts [GiB]; more: rows below them, and another caption. */
export const momentTable = ({ estimate: { memory } }, { rows = [], caption = "GiB" } = {}) => ({
  columns: [{ text: t("moment"), words: true }, t("total"), ...ORDER.map((part) => t(`part.${part}`))],
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
  const { capacity, moment: peak } = memory;
  const rows = memory.moments.map(({ name, parts }) => [name, Object.fromEntries(ORDER.filter((part) => parts[part] > 0).map((part) => [part, parts[part]]))]);
  bars(place, { unit: "byte", limit: capacity }, "bars", { rows, kind: "phases", peak, label: t("moments.label", { total: gib(memory.total), moment: term(peak), capacity: capacity === null ? "–" : gib(capacity) }),
    foot: h("p", { class: "legend foot" }, groups(rows.flatMap(([, parts]) => Object.keys(parts))),
      capacity !== null && h("span", {}, h("i", { class: "line", style: { "border-color": "var(--bad)" } }), t("moments.usable", { gib: gib(capacity) }))) });
}
