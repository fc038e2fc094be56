/** A step of several passes: its verdict, memory through its phases, and the step as lanes; for the page and for a file of one run. */
import { h, swatch } from "./dom.js";
import { refusal, t, term } from "./i18n.js";
import { ticks } from "./lanes.js";
import { counted, fixed, gib, money, percent, seconds, significant } from "./numbers.js";
import { table } from "./panel.js";
import { delta, pinned, say } from "./pin.js";
import { verdictOf } from "./verdicts.js";

const COLOURS = { actor: "states", policy: "states", reference: "gradients", critic: "activations", "reward model": "loss", teacher: "loss", engine: "outside", trainer: "temporary" };
const roles = (found) => [...new Set(found.memory.phases.flatMap((phase) => phase.parts.map((part) => part.role)))];
const held = (phase, role) => phase.parts.reduce((sum, part) => sum + (part.role === role ? part.bytes : 0), 0);

/** The same as numbers; found: null where there is no answer yet. */
export const taskTable = (found) => ({
  columns: [{ text: t("post.phase"), words: true }, ...(found ? roles(found) : []).map((one) => ({ text: `${term(one)} [GiB]` })), t("post.together"), t("post.range"), t("post.seconds")],
  rows: (found?.memory.phases ?? []).map((phase) => [term(phase.phase), ...roles(found).map((role) => gib(held(phase, role), 2)), gib(phase.total, 2), `${gib(phase.low)} – ${gib(phase.high)}`,
    seconds(found.time?.phases.find((one) => one.name === phase.phase)?.seconds ?? 0)]),
});

function verdict(found, price) {
  const worst = found.memory.phases.find((phase) => phase.phase === found.worst);
  const [word, kind] = verdictOf(found);
  const { time, rollout } = found;
  const then = pinned()?.estimate.roles ? pinned().estimate : null;
  return h("div", { role: "status", style: { display: "grid", gap: "4px" } },
    h("p", { class: "cheapest", style: { margin: 0 } }, h("strong", { style: { color: kind ? `var(--${kind})` : "inherit" } }, t(`fit.${word}`)), " ",
      t("post.needs", { total: gib(worst.total), low: gib(worst.low), high: gib(worst.high), phase: term(worst.phase) }), found.capacity === null ? "" : t("post.room", { capacity: gib(found.capacity) }), " ", delta(worst.total, then?.memory.total, say.gib, true)),
    h("p", {}, time ? t("post.step", { step: seconds(time.step), low: seconds(time.low), high: seconds(time.high), bound: term(time.bound) }) : refusal(found.untimed), time?.generation ? ` ${t("post.rate", { rate: fixed(time.tokens_per_second_per_gpu) })}` : time ? ` ${t("post.trained", { rate: fixed(time.tokens_per_second_per_gpu) })}` : "", " ", delta(time?.step, then?.time?.step, say.seconds, true)),
    time?.days ? h("p", { id: "post-run" }, h("strong", { "data-value": time.days }, t("post.run", { steps: fixed(time.steps), days: significant(time.days), hours: counted(time.gpu_hours) })), " ", time.cost === null ? t("post.priceless") : h("strong", { "data-value": time.cost }, t("post.money", { money: money(time.cost).join(" ").trim(), price }))) : null,
    rollout ? h("p", {}, t("post.cache", { cache: gib(rollout.cache), once: fixed(rollout.at_once), asked: fixed(rollout.asked), replicas: fixed(rollout.replicas) }), time?.generation ? ` ${t("post.tail", { idle: percent(time.generation.idle, 0), tail: percent(time.generation.tail / time.generation.seconds, 0) })}` : "") : null,
    found.remedies.map((one) => h("p", {}, t("post.next"), " ", h("code", {}, one.flags), ` (${t(`fit.${verdictOf(one.memory)[0]}`)}, ${gib(one.memory.total)} GiB)`)),
    found.left_out?.length ? h("p", { class: "note" }, t("post.left-out", { flags: found.left_out.join(", ") })) : null);
}

/** A column for each phase, a colour for each role, the capacity as a line. */
function band(found) {
  const top = 1.06 * Math.max(found.capacity ?? 0, ...found.memory.phases.map((phase) => phase.high));
  const share = (bytes) => `${(100 * bytes) / top}%`;
  const worst = (phase) => phase.phase === found.worst;
  return h("div", { role: "img", "aria-label": t("post.band-label", { phases: found.memory.phases.map((phase) => `${term(phase.phase)} ${gib(phase.total)} GiB`).join(", ") }) },
    h("div", { style: { position: "relative", display: "flex", height: "230px", "border-bottom": "1px solid var(--edge)" } },
      found.memory.phases.map((phase) => h("div", { style: { flex: "1", position: "relative", display: "flex", "flex-direction": "column-reverse", "border-right": "1px solid var(--surface)", background: worst(phase) ? "var(--accent-pale)" : "none" } },
        roles(found).map((role) => [role, held(phase, role)]).filter(([, bytes]) => bytes).map(([role, bytes]) => h("i", { title: `${term(phase.phase)} · ${term(role)}: ${gib(bytes, 2)} GiB`, style: { height: share(bytes), background: `var(--${COLOURS[role] ?? "transient"})` } })),
        h("i", { title: t("post.range"), style: { position: "absolute", left: "50%", bottom: share(phase.low), height: share(phase.high - phase.low), "border-left": "2px solid var(--ink)" } }))),
      found.capacity === null ? null : h("div", { style: { position: "absolute", left: 0, right: 0, bottom: share(found.capacity), "border-top": "2px dashed var(--exposed)", "pointer-events": "none" } },
        h("span", { style: { position: "absolute", right: "4px", bottom: "2px", padding: "0 4px", "font-size": "13px", color: "var(--bad)", background: "var(--surface)" } }, t("post.capacity", { capacity: gib(found.capacity) })))),
    h("div", { style: { display: "flex", "font-size": "13px", "text-align": "center" } }, found.memory.phases.map((phase) => h("div", { style: { flex: "1", "font-weight": worst(phase) ? "650" : "400" } }, `${worst(phase) ? "▲ " : ""}${term(phase.phase)}`, h("br"), `${gib(phase.total)} GiB`, worst(phase) ? h("div", {}, t("post.worst")) : null))),
    h("p", { class: "legend foot" }, roles(found).map((role) => swatch(`var(--${COLOURS[role] ?? "transient"})`, term(role)))));
}

/** Phases one after another; two sides that run at once begin together. */
function lanes(found) {
  const { phases, step } = found.time;
  const at = { rollout: 0, trainer: 0 };
  const spans = phases.map((phase) => {
    const own = Object.keys(found.time.sides).length && phase.side !== "both" ? [phase.side] : ["rollout", "trainer"];
    const start = Math.max(...own.map((side) => at[side]));
    for (const side of own) at[side] = start + phase.seconds;
    return [phase, start];
  });
  const end = Math.max(at.rollout, at.trainer);
  const share = (value) => `${(100 * value) / end}%`;
  const marks = ticks(end);
  return h("div", { class: "lanes", role: "group", "aria-label": t("post.lanes") }, spans.flatMap(([phase, start]) => [
    h("span", { class: "name" }, term(phase.name)),
    h("span", { class: "track", style: { "--tick": share(marks[1] ?? end) } }, h("i", { class: phase.name === "weight sync" ? "exposed" : phase.name === "rest" ? "idle" : "", title: `${seconds(phase.low)} – ${seconds(phase.high)}`, style: { left: share(start), width: share(phase.seconds) } })),
    h("span", { class: "value", "data-value": phase.seconds }, seconds(phase.seconds), h("small", {}, percent(phase.seconds / step, 0))),
  ]), h("span"), h("span", { class: "axis" }, marks.map((one) => h("span", { style: { left: share(one) } }, `${fixed(one, marks[1] < 1 ? 2 : 0)}${one === marks.at(-1) ? " s" : ""}`))), h("span"));
}

/** What there is to see of an answer, from its verdict down. */
export const passes = (found, price) => [verdict(found, price), h("h3", {}, t("post.band")), band(found), ...(found.time ? [h("h3", {}, t("post.lanes")), lanes(found)] : [])];
