/** Puts the page together: an answer is asked for whenever a flag changes, and only what can be seen is drawn. */
import { accuracy, fetchAccuracy } from "./accuracy.js";
import { ask, latest } from "./api.js";
import { captured, listenToCaptures, reopen } from "./captured.js";
import { changes, followChanges, forgetChanges } from "./changes.js";
import { buildControls, refresh } from "./controls.js";
import { compare, followCompare } from "./compare.js";
import { costs, followCosts, knowPrices } from "./cost.js";
import { find, h } from "./dom.js";
import { dots, onDots } from "./dots.js";
import { dropZone, handAgain, listenToDrops } from "./drop.js";
import { others } from "./figure.js";
import { fleet, followFleet, relabelFleet } from "./fleet.js";
import { hardware, knowCards } from "./hardware.js";
import { buildHeader, mark } from "./header.js";
import { preferred, refusal, speak, t } from "./i18n.js";
import { listenToKeys } from "./keyboard.js";
import { lanes } from "./lanes.js";
import { best, followPlan, holdPlan, layouts } from "./layouts.js";
import { moments } from "./moments.js";
import { network, relabel } from "./network.js";
import { answered, draw as drawOrigin, knowDoors, onReturn, unestimated } from "./origin.js";
import { repaint } from "./panel.js";
import { parallel } from "./parallel.js";
import { banner, follow, pinned } from "./pin.js";
import { followPosttrain, knowObjectives, posttrain, relabelPosttrain } from "./posttrain.js";
import { knowAnswer, listenToPrint } from "./print.js";
import { roofline } from "./roofline.js";
import { schedule } from "./schedule.js";
import { knowCommand } from "./share.js";
import { flags, forgetRun, keepRun, load, onChange, view } from "./state.js";
import { tab } from "./tabs.js";
import { checkTask, knowTasks, tasks, tell as tellTask } from "./tasks.js";
import { dress } from "./theme.js";
import { treemap } from "./treemap.js";
import { verdict } from "./verdict.js";
import { askAgain, cause, oom } from "./why.js";

const ESTIMATED = [treemap, moments, lanes, schedule, network, roofline];
const TABS = {
  run: [treemap, moments, lanes, layouts, schedule, network, changes],
  layouts: [layouts, moments, parallel, best],
  network: [network, lanes, changes, schedule],
  why: [oom, cause, treemap, changes],
  hardware: [roofline, lanes, hardware],
  cost: [costs],
  posttrain: [posttrain],
  fleet: [fleet],
  accuracy: [accuracy],
  learn: [tasks],
};
let answer = null;
let known = null;
let begun = 0;
let trouble = null;
let dressed = null;

/** What comes before the page's words is shown once they are there. */
const estimate = latest("estimate", async (found) => { await dressed; arrived(found); }, async (error, { flags: asked }) => {
  await dressed;
  if (asked.model?.startsWith("upload:") && error.kind === "ConfigError" && !handAgain.tried) {
    handAgain.tried = true;
    if (await handAgain(asked.model)) return request();
    if (forgetRun()) return undefined;
  }
  return refused(error);
});

function request() {
  begun = performance.now();
  performance.mark("asked");
  estimate({ flags: { ...flags }, want: wanted(), dots: dots() });
  if (tab() === "posttrain") followPosttrain();
}

/** The schedule and its kin are worked out only where they are shown. */
function wanted() {
  const here = new Set(TABS[tab()].map((one) => one.what.id));
  return ESTIMATED.map((one) => one.what.id).filter((id) => here.has(id));
}

function arrived(found) {
  handAgain.tried = false;
  answer = found;
  keepRun();
  knowCommand(found.command);
  knowAnswer(found);
  document.body.classList.remove("stale");
  trouble = null;
  tellTrouble();
  draw();
  answered();
  checkTask(found.estimate);
  refresh(found);
  followChanges();
  if (tab() === "why") askAgain();
  followCosts();
  if (tab() === "fleet") followFleet();
  const started = begun;
  requestAnimationFrame(() => setTimeout(() => performance.measure("answered", { start: started, end: performance.now() })));
}

function refused(error) {
  trouble = unestimated(error) ? null : error;
  if (!trouble) document.body.classList.remove("stale");
  tellTrouble();
}

/** The answer that a file had put aside is shown again. */
onReturn(() => answer && verdict(answer));

/** Why there is no answer; said again in another language. After pre-training is another run, which says its own. */
function tellTrouble() {
  const place = find("#problem");
  place.hidden = !trouble || tab() === "posttrain";
  if (trouble) document.body.classList.toggle("stale", !place.hidden);
  if (place.hidden) return;
  place.replaceChildren(h("strong", {}, t("problem")), h("span", {}, refusal(trouble.message) || t("unreachable")), trouble.closed ? reopen(trouble.closed) : "");
}

function draw() {
  if (!answer) return;
  verdict(answer);
  captured(answer);
  const shown = new Set(TABS[tab()]);
  for (const one of ESTIMATED) if (shown.has(one) && answer.panels[one.what.id] !== undefined) one.show(answer);
  followPlan(answer);
  followCompare();
  if (shown.has(hardware)) hardware.show({});
  banner();
}

/** The panels of a tab; while a run is pinned, first the two runs side by side. */
const shown = () => (pinned() && ["run", "layouts", "network", "hardware"].includes(tab()) ? [compare, ...TABS[tab()]] : TABS[tab()]);

/** A tab's panels, in their order. A panel is built when it is first shown. */
function arrange() {
  mark();
  const panels = shown();
  find("#panels").replaceChildren(...panels.map((one) => {
    const element = one.element ?? one.build();
    element.classList.toggle("wide", Boolean(one.what.wide) || (tab() === "network" && one === network));
    return element;
  }));
  find("#verdict").hidden = ["accuracy", "posttrain", "learn"].includes(tab());
  tellTrouble();
  for (const one of panels) if (!ESTIMATED.includes(one) && one !== layouts && one !== changes && one !== compare) one.show({});
  if (tab() === "cost") followCosts();
  if (tab() === "fleet") followFleet();
  if (tab() === "posttrain") followPosttrain();
  if (tab() === "accuracy") fetchAccuracy(() => tab() === "accuracy");
}

async function dressWords() {
  await speak(view.lang ?? preferred());
  buildHeader(known);
  buildControls(find("#settings"), dropZone(), known);
  find("#settings").setAttribute("aria-label", t("settings"));
  find("#title").textContent = t("page.title");
  tellTrouble();
  drawOrigin();
  tellTask();
  find("#foot").replaceChildren(h("span", {}, t("foot.local")), h("span", {}, t("foot.keys")));
  relabel();
  relabelFleet();
  relabelPosttrain();
  find("#panel-oom .chart")?.replaceChildren();
}

onChange(async ({ flags: asked, view: seen, address }) => {
  if (seen.has("task")) tellTask();
  if (seen.has("lang")) {
    await dressWords();
    if (answer) { refresh(answer); verdict(answer); captured(answer); banner(); }
    repaint(true);
  }
  if (tab() === "posttrain" && [...seen].some((name) => name.startsWith("rl-"))) followPosttrain();
  if (seen.has("theme")) { dress(); mark(); }
  if (address) relabelPosttrain();
  if (seen.has("tab") || address) {
    arrange();
    if (!asked) request();
  }
  if (seen.has("pin")) { mark(); follow(versus); }
  if (seen.has("tables")) repaint();
  if (seen.has("ranges") && answer) verdict(answer);
  if (seen.has("lock") && answer) { refresh(answer); followPlan(answer); }
  if (asked) {
    holdPlan();
    forgetChanges();
    refresh();
    request();
  }
});

/** Figures that no script draws come last on their tabs. */
function knowFigures({ figures }) {
  for (const one of others(figures, ESTIMATED)) {
    ESTIMATED.push(one);
    one.what.shown.forEach((name) => TABS[name]?.push(one));
    if (TABS[tab()].includes(one)) arrange(), request();
  }
}

/** Something was pinned, or no longer is. */
function versus() {
  arrange();
  draw();
}

onDots(request);

async function begin() {
  if (location.search.includes("token=")) history.replaceState(history.state, "", `${location.pathname}${location.hash}`);
  load();
  dress();
  request();
  dressed = dressWords();
  await dressed;
  arrange();
  listenToDrops();
  listenToCaptures();
  listenToKeys();
  listenToPrint();
  known = await ask("catalogue");
  knowCards(known);
  knowPrices(known);
  knowDoors(known);
  knowTasks(known);
  knowObjectives(known);
  knowFigures(known);
  if (tab() === "posttrain") followPosttrain();
  followCosts();
  buildHeader(known);
  buildControls(find("#settings"), dropZone(), known);
  if (answer) draw(), refresh(answer);
  follow(versus);
  performance.mark("complete");
}

begin();
