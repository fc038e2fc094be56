/** One file, without a server: an estimate, and sliders that read its table. */
import { answerAt, commandAt, position, unpacked } from "./api.js";
import { find, glyph, h } from "./dom.js";
import { others } from "./figure.js";
import { has, preferred, refusal, speak, t, term } from "./i18n.js";
import { lanes } from "./lanes.js";
import { fixed } from "./numbers.js";
import { phases } from "./phases.js";
import { Panel, repaint } from "./panel.js";
import { passes, taskTable } from "./passes.js";
import { follow } from "./pin.js";
import { knowAnswer, listenToPrint } from "./print.js";
import { served } from "./served.js";
import { copy } from "./share.js";
import { decoded, encoded, flags, look, onChange, set, view } from "./state.js";
import { dark, dress, toggleTheme } from "./theme.js";
import { treemap } from "./treemap.js";
import { verdict } from "./verdict.js";

const narrow = matchMedia("(max-width: 900px)");
const PANELS = [];
/** A run after pre-training is one panel, with its verdict in it. */
const ofTask = () => new Panel({ id: "posttrain", wide: true, draw: (place, { estimate }) => place.replaceChildren(...passes(estimate, run.flags.price)), table: ({ estimate }) => taskTable(estimate),
  sub: ({ estimate: { task, model, gpus } }) => t("post.sub", { task: task.toUpperCase(), model: model.name, gpus: fixed(gpus.all) }) });
let run = null;
let answer = null;
const updates = [];

const shown = (axis, value) => (["seq-len", "micro-batch", "prompts", "samples", "batch", "context"].includes(axis) ? fixed(Number(value)) : axis === "gpu" ? value : term(value));
const name = (axis) => t(has(`flag.${axis}`) ? `flag.${axis}` : `post.${axis}`);
/** Whether the table has an answer where only this flag is moved to a value. */
function reaches(axis, value) {
  try {
    return Boolean(answerAt({ ...flags, [axis]: value }));
  } catch {
    return false;
  }
}

const controls = {
  range(axis, values) {
    const range = h("input", { type: "range", id: `flag-${axis}`, min: 0, max: values.length - 1, step: 1, oninput: () => set({ [axis]: values[range.value] }) });
    const number = h("output", { for: range.id });
    const end = h("b", {});
    const beyond = (at) => axis !== "zero" && (at === values.length - 1 || (!at && values[0] !== "1"));
    updates.push((place) => {
      const at = values.indexOf(place[axis]);
      end.textContent = beyond(at) ? t("single.end") : "";
      range.value = at;
      range.style.setProperty("--fill", `${(100 * at) / (values.length - 1)}%`);
      number.textContent = shown(axis, place[axis]);
      range.setAttribute("aria-valuetext", number.textContent);
    });
    return h("div", { class: "slide row" }, h("label", { for: range.id }, name(axis)), range, number,
      h("p", { class: "ends" }, h("span", {}, shown(axis, values[0])), end, h("span", {}, shown(axis, values.at(-1)))));
  },
  choice(axis, values) {
    const options = values.map((one) => h("option", { value: one }, shown(axis, one)));
    const select = h("select", { class: "field", id: `flag-${axis}`, onchange: () => set({ [axis]: select.value }) }, options);
    updates.push((place) => {
      select.value = place[axis];
      options.forEach((option) => { option.textContent = `${shown(axis, option.value)}${reaches(axis, option.value) ? "" : " …"}`; });
    });
    return h("div", { class: "row pick" }, h("label", { for: select.id }, name(axis)), select);
  },
};

function buildSettings() {
  updates.length = 0;
  const rows = Object.entries(run.axes).filter(([, values]) => values.length > 1)
    .map(([axis, values]) => (["recompute", "gpu", "weight-format"].includes(axis) ? controls.choice : controls.range)(axis, values));
  const back = h("button", { class: "pill", type: "button", id: "back", onclick: () => set(run.here) }, t("single.back"));
  updates.push((place) => { back.disabled = Object.keys(place).every((axis) => place[axis] === run.here[axis]); });
  const remedy = run.remedy ? h("p", { class: "hint", id: "remedy" }, t("single.remedy"), " ", h("code", {}, run.remedy)) : "";
  find("#settings").setAttribute("aria-label", t("settings"));
  find("#settings").replaceChildren(h("fieldset", { class: "group" }, h("legend", {}, t("single.try")), remedy, rows, h("p", { class: "hint" }, t("single.table", { count: fixed(run.count) })), back));
}

function buildTop() {
  find("#skip").textContent = t("skip");
  find("#title").textContent = t("page.title");
  const { model, gpu, layout } = run.own.estimate;
  find("#subject").textContent = [model.name, gpu && `${fixed(layout.gpus)} × ${gpu}`].filter(Boolean).join(" · ");
  const chinese = document.documentElement.lang.startsWith("zh");
  find("#tools").replaceChildren(
    h("button", { class: "tool", type: "button", onclick: () => setTimeout(() => print(), 50) }, t("print")),
    h("button", { class: "tool", type: "button", id: "language", lang: chinese ? "en" : "zh-CN", onclick: () => look({ lang: chinese ? "en" : "zh" }) }, chinese ? "English" : "中文"),
    h("button", { class: "tool glyph", type: "button", id: "theme", title: t("theme"), "aria-label": t("theme"), onclick: toggleTheme }, glyph(dark() ? "sun" : "moon")));
}

/** Below the figures: what was assumed and what is not counted, of the run that the file was written for. */
function buildNotes() {
  const { assumed = {}, not_counted: uncounted = [] } = run.own.estimate;
  const list = (id, title, lines) => h("details", { class: "card", id, open: true }, h("summary", {}, title), h("ul", {}, lines.map((line) => h("li", {}, line))));
  const command = h("pre", { class: "formula", tabindex: "0", id: "command" });
  updates.push(() => { command.textContent = commandAt(flags); });
  find("#foot").replaceChildren(
    h("section", { class: "card on", "aria-labelledby": "on" }, h("h2", { id: "on" }, t("single.on")), h("p", { class: "hint" }, t("single.install")), command,
      h("button", { class: "pill", type: "button", id: "copy", onclick: () => copy(commandAt(flags), t("copied.command", { command: commandAt(flags) })) }, t("copy.command"))),
    list("assumed", t("honesty.assumed", { count: Object.keys(assumed).length }), Object.entries(assumed).map(([flag, text]) => [h("code", {}, flag), " ", term(text)])),
    list("uncounted", t("honesty.uncounted", { count: uncounted.length }), uncounted.map((line) => refusal(term(line)))),
    h("p", {}, t("single.foot", { version: run.version })));
}

/** Draws the answer at the place where the sliders stand; without one, why, above the last that there was. */
function draw() {
  const place = position(flags);
  updates.forEach((update) => update(place));
  const problem = find("#problem");
  try {
    answer = answerAt(flags);
    problem.hidden = true;
  } catch (error) {
    problem.hidden = false;
    problem.replaceChildren(error.kind === "Beyond" ? h("strong", {}, t("single.beyond")) : h("strong", {}, t("problem")),
      error.kind === "Beyond" ? h("code", {}, commandAt(flags)) : h("span", {}, refusal(error.message)));
  }
  document.body.classList.toggle("stale", !problem.hidden);
  if (!problem.hidden) return;
  knowAnswer({ ...answer, command: commandAt(flags) });
  if (!answer.estimate.layout?.weight_format && !answer.estimate.roles) verdict(answer);
  for (const one of PANELS) one.show(answer);
}

/** The run as written is held beside another one, and every figure says how it differs. */
async function moved() {
  const place = position(flags);
  const own = Object.keys(place).every((axis) => place[axis] === run.here[axis]);
  look({ pin: own ? null : encoded({ ...run.flags, ...run.here }) });
  await follow(() => {});
  draw();
}

async function dressed() {
  await speak(view.lang ?? preferred());
  run.beyond = t("single.formulas");
  buildTop();
  buildSettings();
  buildNotes();
}

// On a narrow screen the sliders stand below the verdict that they move, above the charts; below a panel that begins with its verdict.
function placeSettings() {
  if (narrow.matches) find(PANELS.length === 1 ? "#panels" : "#verdict").after(find("#settings"));
  else find("#work").before(find("#settings"));
}

async function begin() {
  dress();
  run = await unpacked();
  const { roles, layout } = run.own.estimate;
  PANELS.push(...(roles ? [ofTask()] : layout.weight_format ? [served()] : [treemap, phases, lanes]));
  PANELS.push(...others(run.figures, PANELS));
  placeSettings();
  narrow.addEventListener("change", placeSettings);
  const asked = decoded(location.hash.slice(1));
  Object.assign(view, Object.fromEntries(["lang", "theme"].filter((name) => asked[`~${name}`]).map((name) => [name, asked[`~${name}`]])));
  dress();
  Object.assign(flags, run.flags, run.here, Object.fromEntries(Object.keys(run.axes).filter((axis) => run.axes[axis].includes(asked[axis])).map((axis) => [axis, asked[axis]])));
  await dressed();
  find("#panels").replaceChildren(...PANELS.map((one) => one.build()));
  find("#panels").removeAttribute("role");
  await moved();
  listenToPrint();
  onChange(({ flags: asked, view: seen }) => {
    if (seen.has("lang")) dressed().then(() => { repaint(true); draw(); });
    if (seen.has("theme")) { dress(); buildTop(); }
    if (seen.has("tables")) repaint();
    if (asked) moved();
  });
}

begin();
