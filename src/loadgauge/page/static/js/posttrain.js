/** After pre-training: memory through the phases of a step, the step as lanes, and how long answers are. The server estimates. */
import { answerLengths } from "./answers.js";
import { latest } from "./api.js";
import { h, swatch } from "./dom.js";
import { refusal, t, term } from "./i18n.js";
import { ticks } from "./lanes.js";
import { counted, fixed, gib, money, percent, seconds, significant } from "./numbers.js";
import { Panel, table } from "./panel.js";
import { flags, look, view } from "./state.js";
import { checkTask } from "./tasks.js";
import { verdictOf } from "./verdicts.js";

/** Tasks and ways to a reference, of the catalogue. */
let offered = { tasks: [], references: [] };
const COLOURS = { actor: "states", policy: "states", reference: "gradients", critic: "activations", "reward model": "loss", teacher: "loss", engine: "outside", trainer: "temporary" };
let found = null;
let problem = null;
let sent = "";
let controls = null;
let lengths = null;
let drawn = "";

const NONE = { rollout: false, reference: false, models: [], forms: [] };
/** What a task has, as the server's record of tasks says. */
const had = (name = asked("task")) => offered.tasks.find((one) => one.name === name) ?? NONE;

export const knowObjectives = (catalogue) => { offered = catalogue.posttrain; controls = null; };

const rolls = () => had().rollout;

const forms = () => had().forms;

/** What is asked, as the address has it; of another task's forms of the loss nothing. */
function asked(name) {
  const first = { task: "grpo", prompts: "64", samples: "8", "prompt-len": "1024", answers: "exp:2000,8192", rollout: `vllm:tp=${Math.min(8, Number(flags.tp ?? 1))},utilization=0.6,sleep=1`, placement: "colocated" };
  const said = view[`rl-${name}`] ?? first[name] ?? "";
  return name === "loss-terms" && !forms().includes(said) ? "" : said;
}

function fields() {
  const { reference, models } = had();
  return ["task", ...(rolls() ? ["prompts", "samples", "prompt-len", "answers", "rollout", "placement", "staleness"] : []),
    ...(reference ? ["reference"] : []), ...models.flatMap((one) => one === "critic" ? [one, "critic-batch"] : [one]),
    ...(forms().length ? ["loss-terms"] : []), ...(asked("task") === "opd" ? ["on-policy"] : []), "steps"];
}

export const posttrain = new Panel({
  id: "posttrain",
  wide: true,
  draw,
  sub: () => (found && !problem ? t("post.sub", { task: found.task.toUpperCase(), model: found.model.name, gpus: fixed(found.gpus.all) }) : ""),
  table: () => ({
    columns: [{ text: t("post.phase"), words: true }, ...roles().map((one) => ({ text: `${term(one)} [GiB]` })), t("post.together"), t("post.range"), t("post.seconds")],
    rows: (found?.memory.phases ?? []).map((phase) => [term(phase.phase), ...roles().map((role) => gib(held(phase, role), 2)), gib(phase.total, 2), `${gib(phase.low)} – ${gib(phase.high)}`,
      seconds(found.time?.phases.find((one) => one.name === phase.phase)?.seconds ?? 0)]),
  }),
});

const roles = () => [...new Set((found?.memory.phases ?? []).flatMap((phase) => phase.parts.map((part) => part.role)))];
const held = (phase, role) => phase.parts.reduce((sum, part) => sum + (part.role === role ? part.bytes : 0), 0);

const request = latest("posttrain", (answer) => { [found, problem] = [answer, null]; posttrain.show({}); checkTask(answer, true); },
  (error) => { problem = error; posttrain.show({}); });

/** Asks anew where the flags or the controls have changed. */
export function followPosttrain() {
  if (!offered.tasks.length) return;
  const body = { flags: { ...flags }, asked: Object.fromEntries(fields().map((name) => [name, asked(name)])) };
  const key = JSON.stringify(body);
  if (key === sent) return;
  sent = key;
  request(body);
}

const change = (name, value) => look({ [`rl-${name}`]: value });

function choice(name, values, say) {
  const box = h("select", { class: "field", style: { width: "auto" }, id: `post-${name}`, onchange: () => change(name, box.value) }, values.map((value) => h("option", { value, selected: asked(name) === value }, say(value))));
  return h("label", { for: `post-${name}` }, t(`post.${name}`), " ", box);
}

function field(name, width, more = {}) {
  const box = h("input", { class: "field", style: { width }, id: `post-${name}`, value: asked(name), placeholder: more.list ? t("post.nobody") : "0", onchange: () => change(name, box.value.trim()), ...more });
  return h("label", { for: `post-${name}` }, t(`post.${name}`), " ", box);
}

const whole = { type: "number", min: 0, step: 1 };
const FORM = {
  task: () => choice("task", [...offered.tasks].sort((one, other) => other.rollout - one.rollout).map((one) => one.name), (value) => value.toUpperCase()),
  prompts: () => field("prompts", "76px", whole),
  samples: () => field("samples", "64px", whole),
  "prompt-len": () => field("prompt-len", "80px", whole),
  rollout: () => field("rollout", "250px"),
  placement: () => field("placement", "130px"),
  staleness: () => field("staleness", "56px", whole),
  reference: () => choice("reference", ["", ...offered.references], (value) => t(`reference.${value || "usual"}`)),
  "reward-model": () => field("reward-model", "150px", { list: "list-model" }),
  "loss-terms": () => choice("loss-terms", ["", ...forms()], (value) => t(`form.${value || "usual"}`)),
  "on-policy": () => field("on-policy", "64px", { type: "number", min: 0, max: 1, step: "any", placeholder: "1" }),
  critic: () => field("critic", "150px", { list: "list-model", placeholder: t("post.like-actor") }),
  "critic-batch": () => field("critic-batch", "64px", { ...whole, min: 1, placeholder: flags["micro-batch"] ?? "1" }),
  steps: () => field("steps", "80px", { ...whole, min: 1, placeholder: "–" }),
  teacher: () => field("teacher", "190px", { list: "list-model" }),
};

function build() {
  lengths = rolls() ? answerLengths(asked("answers"), (text) => change("answers", text)) : null;
  return h("p", { class: "legend", style: { gap: "8px 16px" } }, fields().filter((name) => FORM[name]).map((name) => FORM[name]()));
}

const grid = (...inside) => h("div", { style: { display: "grid", gap: "10px", "margin-top": "10px" } }, ...inside);

function verdict() {
  const worst = found.memory.phases.find((phase) => phase.phase === found.worst);
  const [word, kind] = verdictOf(found);
  const { time, rollout } = found;
  return h("div", { role: "status", style: { display: "grid", gap: "4px" } },
    h("p", { class: "cheapest", style: { margin: 0 } }, h("strong", { style: { color: kind ? `var(--${kind})` : "inherit" } }, t(`fit.${word}`)), " ",
      t("post.needs", { total: gib(worst.total), low: gib(worst.low), high: gib(worst.high), phase: term(worst.phase) }), found.capacity === null ? "" : t("post.room", { capacity: gib(found.capacity) })),
    h("p", {}, time ? t("post.step", { step: seconds(time.step), low: seconds(time.low), high: seconds(time.high), bound: term(time.bound) }) : refusal(found.untimed), time?.generation ? ` ${t("post.rate", { rate: fixed(time.tokens_per_second_per_gpu) })}` : time ? ` ${t("post.trained", { rate: fixed(time.tokens_per_second_per_gpu) })}` : ""),
    time?.days ? h("p", { id: "post-run" }, h("strong", { "data-value": time.days }, t("post.run", { steps: fixed(time.steps), days: significant(time.days), hours: counted(time.gpu_hours) })), " ", time.cost === null ? t("post.priceless") : h("strong", { "data-value": time.cost }, t("post.money", { money: money(time.cost).join(" ").trim(), price: flags.price }))) : null,
    rollout ? h("p", {}, t("post.cache", { cache: gib(rollout.cache), once: fixed(rollout.at_once), asked: fixed(rollout.asked), replicas: fixed(rollout.replicas) }), time?.generation ? ` ${t("post.tail", { idle: percent(time.generation.idle, 0), tail: percent(time.generation.tail / time.generation.seconds, 0) })}` : "") : null,
    found.remedies.map((one) => h("p", {}, t("post.next"), " ", h("code", {}, one.flags), ` (${t(`fit.${verdictOf(one.memory)[0]}`)}, ${gib(one.memory.total)} GiB)`)),
    found.left_out.length ? h("p", { class: "note" }, t("post.left-out", { flags: found.left_out.join(", ") })) : null);
}

/** A column for each phase, a colour for each role, the capacity as a line. */
function band() {
  const top = 1.06 * Math.max(found.capacity ?? 0, ...found.memory.phases.map((phase) => phase.high));
  const share = (bytes) => `${(100 * bytes) / top}%`;
  const worst = (phase) => phase.phase === found.worst;
  return h("div", { role: "img", "aria-label": t("post.band-label", { phases: found.memory.phases.map((phase) => `${term(phase.phase)} ${gib(phase.total)} GiB`).join(", ") }) },
    h("div", { style: { position: "relative", display: "flex", height: "230px", "border-bottom": "1px solid var(--edge)" } },
      found.memory.phases.map((phase) => h("div", { style: { flex: "1", position: "relative", display: "flex", "flex-direction": "column-reverse", "border-right": "1px solid var(--surface)", background: worst(phase) ? "var(--accent-pale)" : "none" } },
        roles().map((role) => [role, held(phase, role)]).filter(([, bytes]) => bytes).map(([role, bytes]) => h("i", { title: `${term(phase.phase)} · ${term(role)}: ${gib(bytes, 2)} GiB`, style: { height: share(bytes), background: `var(--${COLOURS[role] ?? "transient"})` } })),
        h("i", { title: t("post.range"), style: { position: "absolute", left: "50%", bottom: share(phase.low), height: share(phase.high - phase.low), "border-left": "2px solid var(--ink)" } }))),
      found.capacity === null ? null : h("div", { style: { position: "absolute", left: 0, right: 0, bottom: share(found.capacity), "border-top": "2px dashed var(--exposed)", "pointer-events": "none" } },
        h("span", { style: { position: "absolute", right: "4px", bottom: "2px", padding: "0 4px", "font-size": "13px", color: "var(--bad)", background: "var(--surface)" } }, t("post.capacity", { capacity: gib(found.capacity) })))),
    h("div", { style: { display: "flex", "font-size": "13px", "text-align": "center" } }, found.memory.phases.map((phase) => h("div", { style: { flex: "1", "font-weight": worst(phase) ? "650" : "400" } }, `${worst(phase) ? "▲ " : ""}${term(phase.phase)}`, h("br"), `${gib(phase.total)} GiB`, worst(phase) ? h("div", {}, t("post.worst")) : null))),
    h("p", { class: "legend foot" }, roles().map((role) => swatch(`var(--${COLOURS[role] ?? "transient"})`, term(role)))));
}

/** Phases one after another; two sides that run at once begin together. */
function lanes() {
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

const assumed = () => table({ caption: t("post.assumed"), columns: [{ text: t("post.flag"), words: true }, { text: "", words: true }], rows: Object.entries(found.assumed) });

function draw(place) {
  const form = fields().join();
  if (!controls || drawn !== form || !place.contains(controls)) {
    [controls, drawn] = [build(), form];
    place.replaceChildren(controls, grid(), ...(lengths ? [lengths.element] : []), grid());
  }
  const [, answer] = place.children;
  const last = place.lastElementChild;
  if (problem) answer.replaceChildren(h("p", { class: "waiting", role: "status" }, refusal(problem.message) || t("unreachable")));
  else if (!found) answer.replaceChildren(h("p", { class: "waiting" }, t("working")));
  else {
    answer.replaceChildren(verdict(), h("h3", {}, t("post.band")), band(), ...(found.time ? [h("h3", {}, t("post.lanes")), lanes()] : []));
    if (found.histogram) lengths?.show(found.histogram);
    last.replaceChildren(h("p", { class: "note" }, t("post.basis")), h("p", { class: "note" }, h("code", {}, found.command)), h("details", {}, h("summary", {}, t("post.assumed")), assumed()));
  }
  if (problem) last.replaceChildren();
}

/** The words of the controls, in another language. */
export const relabelPosttrain = () => { controls = null; };
