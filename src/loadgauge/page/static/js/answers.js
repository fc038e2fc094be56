/** How long answers are: a histogram over octaves of tokens, whose mean and maximum are dragged, or moved by the keyboard. */
import { h } from "./dom.js";
import { t } from "./i18n.js";
import { fixed, percent } from "./numbers.js";

const LAWS = ["exp", "lognormal", "uniform", "fixed"];
const LOW = 4;
const HIGH = 17;
const GRID = Array.from({ length: HIGH - LOW + 1 }, (_, place) => 2 ** (LOW + place));

/** The words of `--answers`, as its parts. */
export function read(text) {
  const [, name, rest] = /^(?:(exp|lognormal|uniform):)?(.+)$/.exec(text) ?? [null, "exp", "2000,8192"];
  const numbers = rest.split(",").map(Number);
  const most = numbers.at(-1);
  return { law: name ?? "fixed", middle: numbers.length > 1 ? numbers[0] : Math.max(16, Math.round(most / 4)), spread: numbers.length > 2 ? numbers[1] : 0.8, most };
}

const say = ({ law, middle, spread, most }) => ({ exp: `exp:${middle},${most}`, lognormal: `lognormal:${middle},${spread},${most}`, uniform: `uniform:${most}` })[law] ?? String(most);
const tokens = (octave) => { const value = 2 ** octave; return value < 256 ? Math.round(value) : 16 * Math.round(value / 16); };
const place = (value) => Math.min(1, Math.max(0, (Math.log2(value) - LOW) / (HIGH - LOW)));
const percentOf = (share) => `${100 * share}%`;

/** The histogram and what moves it; text: `--answers`, changed(text): when it was moved. */
export function answerLengths(text, changed) {
  const asked = read(text);
  const bars = h("div", { style: { position: "absolute", inset: "0 0 20px" } });
  const caption = h("p", { class: "note", role: "status" });
  const marks = { middle: mark("var(--ink)"), most: mark("var(--exposed)") };
  const box = h("div", { role: "img", "aria-label": t("post.answers"), style: { position: "relative", height: "140px", cursor: "ew-resize", "touch-action": "none", "user-select": "none" } }, bars, marks.middle, marks.most,
    GRID.map((value) => h("span", { style: { position: "absolute", bottom: "0", left: percentOf(place(value)), transform: "translateX(-50%)", "font-size": "13px", color: "var(--mute)" } }, value < 1024 ? value : `${value / 1024}k`)));
  const ranges = { middle: slider("middle"), most: slider("most") };
  const law = h("select", { class: "field", id: "post-law", style: { width: "auto" }, onchange: () => { asked.law = law.value; told(); } }, LAWS.map((name) => h("option", { value: name, selected: asked.law === name }, t(`law.${name}`))));

  function mark(colour) {
    return h("i", { style: { position: "absolute", top: "0", bottom: "20px", width: "0", "border-left": `2px dashed ${colour}` } });
  }

  function slider(name) {
    const shown = h("output", { for: `post-${name}` });
    const range = h("input", { type: "range", id: `post-${name}`, min: LOW, max: HIGH, step: 0.125, value: Math.log2(asked[name]), oninput: () => move(name, Number(range.value)) });
    const label = h("label", { for: `post-${name}` });
    return { range, shown, label, row: h("div", { class: "whatif" }, label, range, shown) };
  }

  /** No answer is longer than the longest. */
  function move(name, octave) {
    asked[name] = tokens(octave);
    if (name === "middle") asked.most = Math.max(asked.most, asked.middle);
    else asked.middle = Math.min(asked.middle, asked.most);
    told();
  }

  function told() {
    settle();
    changed(say(asked));
  }

  function settle() {
    const both = ["exp", "lognormal"].includes(asked.law);
    ranges.middle.row.hidden = marks.middle.hidden = !both;
    ranges.middle.row.style.display = marks.middle.style.display = both ? "" : "none";
    ranges.middle.label.textContent = t(asked.law === "lognormal" ? "post.median" : "post.mean");
    ranges.most.label.textContent = t("post.most");
    for (const [name, { range, shown }] of Object.entries(ranges)) {
      range.value = Math.log2(asked[name]);
      shown.textContent = t("unit.tokens", { value: fixed(asked[name]) });
      range.setAttribute("aria-valuetext", shown.textContent);
      range.style.setProperty("--fill", percentOf(place(asked[name])));
      marks[name].style.setProperty("left", percentOf(place(asked[name])));
    }
  }

  let held = null;
  const octave = (event) => {
    const { left, width } = box.getBoundingClientRect();
    return Math.round(8 * (LOW + (HIGH - LOW) * Math.min(1, Math.max(0, (event.clientX - left) / width)))) / 8;
  };
  box.addEventListener("pointerdown", (event) => {
    const at = octave(event);
    const near = (name) => Math.abs(Math.log2(asked[name]) - at);
    held = !ranges.middle.row.hidden && near("middle") < near("most") ? "middle" : "most";
    box.setPointerCapture(event.pointerId);
    move(held, at);
  });
  box.addEventListener("pointermove", (event) => { if (held) move(held, octave(event)); });
  for (const end of ["pointerup", "pointercancel"]) box.addEventListener(end, () => { held = null; });
  settle();

  /** The shares of the answers, as the server counts them. */
  function show({ shares, shortest, octave: columns, mean, longest }) {
    const top = Math.max(...shares);
    bars.replaceChildren(...shares.flatMap((share, at) => {
      const start = place(shortest * 2 ** (at / columns));
      if (!share || start >= 1) return [];
      return [h("i", { title: percent(share, 2), style: { position: "absolute", bottom: "0", left: percentOf(start), width: `calc(${100 / (HIGH - LOW) / columns}% - 2px)`, height: percentOf(share / top), background: "var(--compute)" } })];
    }));
    caption.textContent = t("post.lengths", { mean: fixed(mean), longest: fixed(longest), share: percent(top) });
  }

  return { element: h("div", {}, h("h3", {}, t("post.answers")), h("p", { class: "legend" }, h("label", { for: "post-law" }, t("post.law"), " ", law)), box, ranges.middle.row, ranges.most.row, caption), show };
}
