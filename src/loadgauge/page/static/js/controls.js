/** The left side: one control for each flag. A control shows what was said, or, paler, what is assumed. */
import { glyph, h } from "./dom.js";
import { groupsOf } from "./fields.js";
import { has, refusal, t, term } from "./i18n.js";
import { counted, gib } from "./numbers.js";
import { flags, look, replace, set, view } from "./state.js";

/** What cards are sold for, in the order of their menu. */
const SEGMENTS = ["datacenter", "workstation", "consumer", "laptop", "unified"];

const updates = [];
let catalogue = { models: [], gpus: [] };
let used = {};

export const locks = () => (view.lock ?? "").split(",").filter(Boolean);
const value = (flag) => flags[flag] ?? used[flag] ?? "";
const said = (flag) => flag in flags;
/** What the server offers for a flag: its choices, or the numbers within its bounds. Empty until the catalogue is here. */
function offered(flag) {
  const { choices = [], min, max } = catalogue.flags?.find((one) => one.name === flag) ?? {};
  return choices.length || typeof max !== "number" ? choices : Array.from({ length: max - min + 1 }, (_, at) => String(min + at));
}

/** The kinds of GPU of the catalogue. */
export const cards = () => catalogue.gpus;

export function buildControls(place, drop, fetched) {
  catalogue = fetched ?? catalogue;
  updates.length = 0;
  place.replaceChildren(drop, presets(), ...groupsOf(catalogue.flags).map(([name, fields]) => group(name, fields)));
  refresh();
}

/** After an answer: what was assumed is known now. */
export function refresh(answer) {
  if (answer) used = known(answer.estimate);
  updates.forEach((update) => update(answer));
}

/** Ready-made runs to begin with. */
function presets() {
  const known = catalogue.presets ?? [];
  if (!known.length) return "";
  const select = h("select", { class: "field preset", id: "preset", "aria-label": t("preset"), onchange: () => {
    replace(known[select.value].flags, { mine: [] });
    select.value = "";
  } }, h("option", { value: "" }, t("preset")), known.map((one, place) => h("option", { value: place }, one.name)));
  return select;
}

/** What the run has, by flags: said or assumed. */
function known({ layout, training }) {
  const found = {};
  for (const [name, value] of Object.entries({ ...layout, ...training })) {
    if (value !== null && typeof value !== "object") found[name.replaceAll("_", "-")] = String(value);
  }
  return found;
}

function group(name, fields) {
  const plain = fields.filter((field) => !field.more).map(control);
  const more = fields.filter((field) => field.more);
  const box = h("fieldset", { class: "group", "data-group": name }, h("legend", {}, t(`group.${name}`)), plain);
  if (more.length) {
    const open = more.some((field) => said(field.flag));
    box.append(h("details", { class: "more", open }, h("summary", {}, t("more")), more.map(control)));
  }
  if (name === "model") box.append(fact((answer) => answer && [[t("fact.params"), counted(answer.estimate.model.params)], ...(answer.estimate.model.active_params !== answer.estimate.model.params ? [[t("fact.active"), counted(answer.estimate.model.active_params)]] : [])]));
  if (name === "layout") box.append(fact((answer) => answer && [["DP", String(answer.estimate.layout.dp)], [t("fact.microbatches"), String(answer.estimate.layout.num_microbatches)]]));
  if (name === "cluster") box.append(fact((answer) => answer?.estimate.memory.capacity && [[t("fact.usable"), `${gib(answer.estimate.memory.capacity)} GiB`]]));
  if (name === "honesty") box.append(honesty());
  return box;
}

function fact(rows) {
  const box = h("div");
  updates.push((answer) => answer && box.replaceChildren(...(rows(answer) || []).map(([name, text]) => h("div", { class: "fact" }, h("span", {}, name), h("span", {}, text)))));
  return box;
}

const id = (flag) => `flag-${flag.replace("~", "")}`;

function row(field, input, { slide = false, full = false } = {}) {
  const lock = field.locks ? lockOf(field.flag) : null;
  const label = input.matches?.("input, select") ? h("label", { for: id(field.flag) }, t(`flag.${field.flag}`)) : h("span", { class: "label", id: `label-${field.flag}` }, t(`flag.${field.flag}`));
  if (has(`help.${field.flag}`)) label.title = t(`help.${field.flag}`);
  const kinds = ["row", slide && (lock ? "lockable" : "slide"), full && "full"].filter(Boolean).join(" ");
  const element = h("div", { class: kinds, "data-flag": field.flag }, label, input);
  if (lock && slide) element.append(lock);
  else if (lock) {
    const end = h("span", { class: "end" }, input, lock);
    element.append(end);
  }
  updates.push(() => element.classList.toggle("assumed", !said(field.flag)));
  return element;
}

function lockOf(flag) {
  const button = h("button", { class: "lock", type: "button", onclick: () => {
    const names = new Set(locks());
    if (!names.delete(flag)) names.add(flag);
    look({ lock: [...names].join(",") });
  } });
  updates.push(() => {
    const on = locks().includes(flag);
    if (button.getAttribute("aria-pressed") === String(on)) return;
    button.setAttribute("aria-pressed", String(on));
    button.setAttribute("aria-label", t("lock", { flag: t(`flag.${flag}`) }));
    button.title = t("lock", { flag: t(`flag.${flag}`) });
    button.replaceChildren(glyph(on ? "locked" : "open"));
  });
  return button;
}

const KINDS = {
  slider(field) {
    const last = Math.round(Math.log2(field.to / field.from));
    const range = h("input", { type: "range", min: 0, max: last, step: 1, id: id(field.flag), oninput: () => {
      const next = String(field.from * 2 ** range.value);
      number.value = next;
      fill();
      set({ [field.flag]: next });
    } });
    const number = h("input", { class: "field number", type: "text", inputmode: "numeric", autocomplete: "off", id: `${id(field.flag)}-number`, "aria-label": t(`flag.${field.flag}`), onchange: () => set({ [field.flag]: number.value.replace(/[\s,_]/g, "") }) });
    const fill = () => {
      range.style.setProperty("--fill", `${(100 * range.value) / last}%`);
      range.setAttribute("aria-valuetext", number.value);
    };
    const element = row(field, range, { slide: true });
    range.after(number);
    updates.push(() => {
      const now = value(field.flag);
      if (document.activeElement !== number) number.value = now;
      const at = Math.max(0, Math.min(last, Math.round(Math.log2((Number(now) || field.from) / field.from))));
      if (Number(range.value) !== at) range.value = at;
      fill();
    });
    return element;
  },
  choice(field) {
    const select = h("select", { class: "field side", id: id(field.flag), onchange: () => set({ [field.flag]: select.value }, { push: true }) });
    const choices = offered(field.flag);
    const none = h("option", { value: "" });
    select.append(none, ...choices.map((one) => h("option", { value: one }, term(one))));
    updates.push(() => {
      none.textContent = used[field.flag] && !said(field.flag) ? `${term(used[field.flag])} · ${t("auto")}` : t("auto");
      const now = flags[field.flag] ?? "";
      if (now && !choices.includes(now) && ![...select.options].some((one) => one.value === now)) select.append(h("option", { value: now }, now));
      select.value = now;
    });
    return row(field, select);
  },
  suggest(field) {
    const list = h("datalist", { id: `list-${field.flag}` }, offered(field.flag).map((one) => h("option", { value: one })));
    const element = KINDS.text(field);
    element.querySelector("input").setAttribute("list", list.id);
    element.append(list);
    return element;
  },
  text(field) {
    const input = h("input", { class: "field side", type: "text", autocomplete: "off", spellcheck: "false", id: id(field.flag), onchange: () => set({ [field.flag]: input.value.trim() }, { push: true }) });
    updates.push(() => {
      if (document.activeElement !== input) input.value = flags[field.flag] ?? "";
      input.placeholder = used[field.flag] ?? (has(`hint.${field.flag}`) ? t(`hint.${field.flag}`) : "–");
    });
    return row(field, input);
  },
  switch(field) {
    const input = h("input", { class: "switch", type: "checkbox", role: "switch", id: id(field.flag), onchange: () => set({ [field.flag]: input.checked ? "true" : null }, { push: true }) });
    updates.push(() => { input.checked = flags[field.flag] === "true"; });
    return row(field, input);
  },
  ranges(field) {
    const input = h("input", { class: "switch", type: "checkbox", role: "switch", id: id(field.flag), onchange: () => look({ ranges: input.checked ? null : "off" }) });
    updates.push(() => { input.checked = view.ranges !== "off"; });
    return row(field, input);
  },
  segments(field) {
    const choices = offered(field.flag);
    const buttons = choices.map((one) => h("button", { type: "button", role: "radio", onclick: () => set({ [field.flag]: one }, { push: true }) }, one));
    const box = h("span", { class: "segments", role: "radiogroup", "aria-labelledby": `label-${field.flag}`, onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const at = Math.max(0, Math.min(buttons.length - 1, buttons.indexOf(document.activeElement) + step));
      buttons[at].focus();
      buttons[at].click();
    } }, buttons);
    updates.push(() => buttons.forEach((button, at) => {
      const on = value(field.flag) === choices[at];
      button.setAttribute("aria-checked", String(on));
      button.tabIndex = on || (at === 0 && !choices.includes(value(field.flag))) ? 0 : -1;
    }));
    return row(field, box);
  },
  method(field) {
    const select = h("select", { class: "field side", id: id(field.flag), onchange: () => set({
      full: { qlora: null, "lora-rank": null, "lora-targets": null, base: null, adapter: null, "virtual-tokens": null },
      lora: { qlora: null, "lora-rank": flags["lora-rank"] ?? "16", base: null },
      qlora: { qlora: "true", "lora-rank": flags["lora-rank"] ?? "16" },
    }[select.value], { push: true }) }, ["full", "lora", "qlora"].map((one) => h("option", { value: one }, t(`method.${one}`))));
    updates.push(() => { select.value = flags.qlora === "true" ? "qlora" : flags["lora-rank"] || flags.adapter ? "lora" : "full"; });
    return row(field, select);
  },
  model(field) {
    const list = h("datalist", { id: "list-model" }, catalogue.models.map((one) => h("option", { value: one.name }, counted(one.params))));
    const input = h("input", { class: "field", id: id(field.flag), list: "list-model", autocomplete: "off", spellcheck: "false", "aria-label": t("flag.model"), onchange: () => set({ model: input.value.trim() }, { push: true }), onfocus: () => input.select() });
    updates.push(() => { if (document.activeElement !== input) input.value = flags.model?.startsWith("upload:") ? view.file ?? flags.model : flags.model ?? ""; });
    return h("div", { class: "row full", "data-flag": "model" }, input, list);
  },
  gpu(field) {
    const select = h("select", { class: "field", id: id(field.flag), "aria-label": t("flag.gpu"), onchange: () => set({ gpu: select.value }, { push: true }) },
      h("option", { value: "" }, t("gpu.none")), SEGMENTS.map((segment) => h("optgroup", { label: t(`segment.${segment}`) },
        catalogue.gpus.filter((one) => (one.segment ?? "datacenter") === segment).map((one) => h("option", { value: one.key ?? one.id }, one.name)))));
    updates.push(() => { select.value = flags.gpu ?? ""; });
    return h("div", { class: "row full", "data-flag": "gpu" }, select);
  },
};

const control = (field) => KINDS[field.kind](field);

function honesty() {
  const box = h("div");
  updates.push((answer) => {
    if (!answer) return;
    const { assumed = {}, not_counted = [], basis = {} } = answer.estimate;
    const opened = [...box.querySelectorAll("details")].map((one) => one.open);
    const parts = [
      [t("honesty.assumed", { count: Object.keys(assumed).length }), h("ul", { class: "notes" }, Object.entries(assumed).map(([flag, text]) => h("li", {}, h("span", { class: "mono" }, flag), h("span", {}, term(text)))))],
      [t("honesty.uncounted", { count: not_counted.length }), h("ul", { class: "notes plain" }, not_counted.map((text) => h("li", {}, refusal(term(text)))))],
      [t("honesty.basis"), h("ul", { class: "notes" }, Object.entries(basis).map(([name, from]) => h("li", {}, h("span", {}, t(`part.${name}`).startsWith("part.") ? term(name) : t(`part.${name}`)), h("span", {}, term(from)))))],
    ];
    box.replaceChildren(...parts.map(([title, list], at) => h("details", { class: "more", open: opened[at] }, h("summary", {}, title), list)));
  });
  return box;
}
