/** Tasks to learn by: the list, and the one that is being solved, whose goal is looked at in every answer (`data/tasks.toml`). */
import { why } from "./drawer.js";
import { find, h } from "./dom.js";
import { has, language, t } from "./i18n.js";
import { significant } from "./numbers.js";
import { Panel } from "./panel.js";
import { flags, look, replace, view } from "./state.js";
import { verdictOf } from "./verdicts.js";

const UNITS = { GiB: 2 ** 30, GB: 1e9, "%": 0.01, s: 1, "": 1 };
const DONE = "tasks";
let tracks = [];
let all = [];
let last = null;
/** What of the task is open: its hint, its answer. */
let shown = { id: "", hint: false, answer: false };

const done = () => (localStorage.getItem(DONE) ?? "").split(",").filter(Boolean);
const words = (task) => task[language] ?? task.en;
const current = () => all.find((one) => one.id === view.task);
const after = (task) => all[all.indexOf(task) + 1];

export const tasks = new Panel({ id: "learn", wide: true, draw, sub: () => t("learn.sub", { done: done().length, count: all.length }) });

export function knowTasks(known) {
  [tracks, all] = [known.tracks, known.tasks];
  tasks.show({});
  tell();
}

const split = (some) => [false, true].map((rl) => Object.fromEntries(Object.entries(some).filter(([name]) => name.startsWith("rl-") === rl)));

/** Goes to a task's beginning, or to the beginning with changes. */
function go(task, changes = {}) {
  const [run, rl] = split({ ...task.start, ...changes });
  last = null;
  const old = Object.fromEntries(Object.keys(view).filter((name) => name.startsWith("rl-")).map((name) => [name, null]));
  look({ ...old, ...rl, task: task.id, tab: Object.keys(rl).length ? "posttrain" : null }, { push: true });
  replace(run, { mine: Object.keys(run) });
  tell();
  scrollTo(0, 0);
}

function draw(place) {
  const solved = done();
  place.replaceChildren(...tracks.map((track) => h("section", { class: "track-of-tasks" }, h("h3", {}, words(track)),
    h("ol", {}, all.filter((one) => one.track === track.id).map((one) => h("li", { class: solved.includes(one.id) ? "done" : null },
      h("button", { type: "button", "data-task": one.id, onclick: () => go(one) }, words(one).goal, solved.includes(one.id) ? h("span", { class: "good" }, ` ✓ ${t("learn.solved")}`) : null)))))));
}

const at = (answer, path) => (path.includes("/") ? path.split("/").map((one) => at(answer, one)).reduce((one, other) => one / other) : path.split(".").reduce((part, name) => part?.[name], answer));

/** A goal: where it is read, what is asked, and whether an answer has it. */
function goal(text, answer) {
  const [path, sign, value] = text.split(" ");
  const is = at(answer, path);
  if (sign === "==") return { path, wanted: value, is, met: is === value };
  const [, number, unit] = /^([\d.]+)(.*)$/.exec(value);
  const asked = number * UNITS[unit];
  return { path, wanted: `${sign === "<=" ? "≤" : "≥"} ${number} ${unit}`.trimEnd(), is: `${significant(is / UNITS[unit])} ${unit}`.trimEnd(), met: sign === "<=" ? is <= asked : is >= asked };
}

/** Flags that the task keeps, and that are another way now. */
const moved = (task) => task.keep.filter((name) => ((name.startsWith("rl-") ? view : flags)[name] ?? "") !== (task.start[name] ?? ""));

/** An answer of the run, or of after pre-training (rl); null: there is none. */
export function checkTask(answer, rl = false) {
  const task = current();
  if (!task || task.start["rl-task"] !== undefined !== rl) return;
  last = answer;
  tell();
}

const name = (flag) => (has(`flag.${flag}`) ? t(`flag.${flag}`) : flag.startsWith("rl-") ? t(`post.${flag.slice(3)}`) : flag);
const label = (path) => t(`goal.${path.split("/")[0]}`);

/** The strip of the task that is being solved. */
export function tell() {
  const place = find("#task");
  const task = current();
  place.hidden = !task;
  if (!task) return;
  if (shown.id !== task.id) shown = { id: task.id, hint: false, answer: false };
  const kept = moved(task);
  const goals = last ? task.goal.map((one) => goal(one, last)) : [];
  const solved = goals.length > 0 && !kept.length && goals.every((one) => one.met);
  if (solved && !done().includes(task.id)) {
    localStorage.setItem(DONE, [...done(), task.id].join());
    tasks.show({});
  }
  const { goal: wanted, hint, why: lesson } = words(task);
  const track = words(tracks.find((one) => one.id === task.track));
  const button = (text, onclick, kind = "pill") => h("button", { class: kind, type: "button", onclick }, text);
  const next = after(task);
  const answer = Object.entries(task.answer).map(([flag, value]) => `--${flag.replace(/^rl-/, "")} ${value === "true" ? "" : value}`.trim()).join(" ");
  place.classList.toggle("solved", solved);
  place.replaceChildren(
    h("p", { class: "say" }, h("span", {}, `${t("learn.task", { number: all.indexOf(task) + 1, count: all.length })} · ${track}`), h("button", { class: "close", type: "button", "aria-label": t("learn.leave"), onclick: () => { look({ task: null }); tell(); } }, "×")),
    h("p", { class: "goal" }, wanted),
    h("ul", { class: "goals" }, goals.map((one) => h("li", { class: one.met ? "good" : "bad" }, `${one.met ? "✓" : "○"} ${label(one.path)} `, one.path.endsWith("verdict") ? t(`fit.${verdictOf({ verdict: one.is })[0]}`) : `${one.is} (${one.wanted})`)),
      kept.map((flag) => h("li", { class: "bad" }, `○ ${t("learn.keep", { flag: name(flag), value: task.start[flag] ?? t("learn.unset") })}`))),
    solved ? h("p", { class: "lesson" }, h("strong", { class: "good" }, `${t("learn.done")} `), lesson) : "",
    shown.hint && !solved ? h("p", { class: "lesson" }, hint) : "",
    shown.answer && !solved ? h("p", { class: "lesson" }, h("code", {}, answer), " ", button(t("learn.apply"), () => go(task, task.answer))) : "",
    h("div", { class: "buttons" },
      solved && next ? button(t("learn.next"), () => go(next), "primary") : "",
      solved || shown.hint ? "" : button(t("learn.hint"), () => { shown.hint = true; tell(); }),
      task.part ? button(t("learn.equation"), () => formula(task)) : "",
      solved || shown.answer ? "" : button(t("learn.answer"), () => { shown.answer = true; tell(); }),
      button(t("learn.again"), () => go(task)), button(t("learn.all"), () => look({ tab: "learn" }, { push: true })),
      h("span", { class: "mute" }, t("learn.more"), " ", h("code", {}, `loadgauge equation ${task.equation}`))));
}

/** Opens the formula behind a task with the run's own numbers. */
const formula = (task) => why(task.part, has(`part.${task.part}`) ? t(`part.${task.part}`) : label(task.goal[0].split(" ")[0]));
