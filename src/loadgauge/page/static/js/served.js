/** A server, or a pass without training: its verdict, the memory of a card by part, and its times. */
import { h, swatch } from "./dom.js";
import { t, term } from "./i18n.js";
import { fixed, gib, percent, seconds, significant } from "./numbers.js";
import { Panel } from "./panel.js";
import { delta, pinned, say } from "./pin.js";
import { verdictOf } from "./verdicts.js";

const COLOURS = { weights: "states", cache: "gradients", activations: "activations", logits: "temporary", graphs: "loss", draft: "outside" };
const colour = (part) => `var(--${COLOURS[part] ?? "transient"})`;
const parts = ({ memory }) => Object.entries(memory.parts).filter(([, bytes]) => bytes);

/** Rows of times: what, seconds and their range. */
function times(found) {
  const { served } = found;
  const first = served ? [served.first, served.first_range] : found.first && [found.first.seconds, [found.first.low, found.first.high]];
  const token = served ? [served.token, served.token_range] : found.mean_token && [found.mean_token, found.mean_token_range];
  return [["first", first], ["token", token]].filter(([, one]) => one);
}

function verdict(found) {
  const { memory } = found;
  const [word, kind] = verdictOf(memory);
  const then = pinned()?.estimate;
  return h("div", { role: "status", style: { display: "grid", gap: "4px" } },
    h("p", { class: "cheapest", style: { margin: 0 } }, h("strong", { style: { color: kind ? `var(--${kind})` : "inherit" } }, t(`fit.${word}`)), " ",
      h("span", { "data-value": memory.total }, t("served.needs", { total: gib(memory.total), low: gib(memory.low), high: gib(memory.high) })), memory.capacity === null ? "" : t("post.room", { capacity: gib(memory.capacity) }), " ", delta(memory.total, then?.memory.total, say.gib, true)),
    times(found).map(([name, [value, [low, high]]]) => h("p", { "data-time": name, "data-value": value }, t(`served.${name}`, { time: seconds(value), low: seconds(low), high: seconds(high) }), " ",
      delta(value, then && times(then).find(([other]) => other === name)?.[1][0], say.seconds, true))),
    found.tokens_per_second ? h("p", {}, t("served.rate", { rate: fixed(found.tokens_per_second), requests: significant(found.tokens_per_second / found.layout.answer) }), found.money_per_million ? ` ${t("served.money", { money: significant(found.money_per_million) })}` : "") : null,
    found.pool ? h("p", {}, t("served.pool", { cache: gib(found.pool.bytes), tokens: fixed(found.pool.tokens) })) : null,
    found.largest_batch ? h("p", {}, t("served.largest", { batch: fixed(found.largest_batch) })) : null);
}

/** A card's memory as one bar, its capacity as a line. */
function bar(found) {
  const { memory } = found;
  const top = 1.06 * Math.max(memory.capacity ?? 0, memory.high);
  const share = (bytes) => `${(100 * bytes) / top}%`;
  return h("div", { role: "img", "aria-label": parts(found).map(([part, bytes]) => `${term(part)} ${gib(bytes)} GiB`).join(", ") },
    h("div", { style: { position: "relative", display: "flex", height: "46px", background: "var(--surface)" } },
      parts(found).map(([part, bytes]) => h("i", { title: `${term(part)}: ${gib(bytes, 2)} GiB`, style: { width: share(bytes), background: colour(part) } })),
      memory.capacity === null ? null : h("div", { style: { position: "absolute", top: 0, bottom: 0, left: share(memory.capacity), "border-left": "2px dashed var(--exposed)" } })),
    h("p", { class: "legend foot" }, parts(found).map(([part, bytes]) => swatch(colour(part), `${term(part)} ${gib(bytes, 2)} GiB (${percent(bytes / memory.total, 0)})`))));
}

export const served = () => new Panel({
  id: "served",
  wide: true,
  draw: (place, { estimate }) => place.replaceChildren(verdict(estimate), h("h3", {}, t("served.memory")), bar(estimate)),
  table: ({ estimate }) => ({
    columns: [{ text: t("served.part"), words: true }, "GiB"],
    rows: parts(estimate).map(([part, bytes]) => [term(part), gib(bytes, 3)]),
  }),
  sub: ({ estimate: { task, model, layout } }) => t("served.sub", { task: term(task), model: model.name, gpus: fixed(layout.gpus) }),
});
