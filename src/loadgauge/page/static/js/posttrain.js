/** After pre-training: memory through the phases of a step, the step as lanes, and how long answers are. The server estimates. */
import { answerLengths } from "./answers.js";
import { latest } from "./api.js";
import { h } from "./dom.js";
import { refusal, t, term } from "./i18n.js";
import { fixed } from "./numbers.js";
import { Panel, table } from "./panel.js";
import { passes, taskTable } from "./passes.js";
import { flags, look, view } from "./state.js";
import { checkTask } from "./tasks.js";

/** Tasks and ways to a reference, of the catalogue. */
let offered = { tasks: [], references: [] };
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
  table: () => taskTable(found),
});

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
    answer.replaceChildren(...passes(found, flags.price));
    if (found.histogram) lengths?.show(found.histogram);
    last.replaceChildren(h("p", { class: "note" }, t("post.basis")), h("p", { class: "note" }, h("code", {}, found.command)), h("details", {}, h("summary", {}, t("post.assumed")), assumed()));
  }
  if (problem) last.replaceChildren();
}

/** The words of the controls, in another language. */
export const relabelPosttrain = () => { controls = null; };
