/** Where every byte goes: blocks of the worst rank's memory at its peak moment. Each opens its explanation. */
import { explain } from "./drawer.js";
import { h, swatch } from "./dom.js";
import { named, t, term } from "./i18n.js";
import { bytes, gib, percent, signed, significant, GIB } from "./numbers.js";
import { Panel } from "./panel.js";
import { pinned } from "./pin.js";
import { squarify } from "./squarify.js";
import { hideTip, showTip } from "./tip.js";
import { GROUPS, PARTS } from "./theme.js";

const GAP = 2;
const MOST = 36;
const blocks = new Map();
let ground = null;
let size = { width: 0, height: 0 };
let shown = [];

export const treemap = new Panel({
  id: "treemap",
  draw,
  sub: (answer) => t(answer.estimate.layout.gpus > 1 ? "treemap.sub" : "treemap.sub.one", { moment: term(answer.estimate.memory.moment) }),
  table: (answer) => ({
    columns: [{ text: t("part"), words: true }, { text: t("what"), words: true }, "GiB", t("share.of"), ...(pinned() ? ["A"] : [])],
    rows: leaves(answer.panels.treemap).map((node) => [name(node), label(node), significant(node.bytes / GIB, 4), percent(node.bytes / answer.estimate.memory.total), ...(pinned() ? [old(node) === undefined ? "–" : significant(old(node) / GIB, 4)] : [])]),
  }),
});

const name = (node) => t(`part.${node.part}`);
const label = (node) => (node.id === node.part ? name(node) : named(node.label));

/**
 * Which nodes are drawn as what they are made of: the largest, again and again. Model states only where they are most of
 * the memory: there a block a part says enough.
 */
function opened(tree) {
  const open = new Set();
  const total = tree.reduce((sum, node) => sum + node.bytes, 0);
  const large = (node) => node.bytes > (PARTS[node.part] === "activations" ? 0.06 : 0.4) * total;
  let front = tree.filter((node) => node.bytes > 0);
  while (front.length < MOST) {
    const next = front.filter((node) => node.children?.length && large(node)).sort((a, b) => b.bytes - a.bytes)[0];
    if (!next) break;
    open.add(next.id);
    front = front.filter((node) => node !== next).concat(next.children);
  }
  return open;
}

function leaves(tree, open = opened(tree)) {
  return tree.flatMap((node) => (open.has(node.id) ? leaves(node.children, open) : [node])).filter((node) => node.bytes > 0);
}

let oldNodes = new Map();
let oldAnswer = null;
function old(node) {
  const answer = pinned();
  if (answer !== oldAnswer) {
    oldAnswer = answer;
    oldNodes = new Map(answer ? everything(answer.panels.treemap).map((node) => [node.id, node.bytes]) : []);
  }
  return oldNodes.get(node.id);
}

function draw(chart, answer) {
  if (!ground || ground.parentNode !== chart) {
    ground = h("div", { class: "treemap", role: "group", "aria-label": t("treemap.title"), onkeydown: keys });
    chart.replaceChildren(ground, h("p", { class: "legend foot" }, ""));
    blocks.clear();
    size = { width: ground.clientWidth, height: ground.clientHeight };
    new ResizeObserver(([{ contentRect: { width, height } }]) => {
      if (width === size.width && height === size.height) return;
      size = { width, height };
      if (treemap.data) treemap.show(treemap.data);
    }).observe(ground);
  }
  if (!answer || !size.width) return;
  chart.lastChild.replaceChildren(...GROUPS.map((group) => swatch(`var(--${group})`, t(`group_of.${group}`))));
  const tree = answer.panels.treemap.filter((part) => part.bytes > 0);
  const open = opened(tree);
  const groups = GROUPS.map((group) => tree.filter((part) => PARTS[part.part] === group)).filter((parts) => parts.length);
  const sum = (nodes) => nodes.reduce((all, node) => all + node.bytes, 0);
  const next = [];
  const fill = (nodes, box) => squarify(nodes.map((node) => node.bytes), box).forEach((inner, at) => {
    const inside = nodes[at].children?.filter((node) => node.bytes > 0);
    if (open.has(nodes[at].id)) fill(inside, inner);
    else next.push({ node: nodes[at], box: inner });
  });
  squarify(groups.map(sum), { x: 0, y: 0, ...size }).forEach((box, at) => fill(groups[at], box));
  const kept = new Set();
  for (const one of next) kept.add(place(one, answer));
  for (const [id, element] of blocks) if (!kept.has(id)) { element.remove(); blocks.delete(id); }
  shown = next.map(({ node }) => node.id);
  const current = shown.find((id) => blocks.get(id)?.tabIndex === 0) ?? shown[0];
  for (const [id, element] of blocks) element.tabIndex = id === current ? 0 : -1;
}

function place({ node, box }, answer) {
  let element = blocks.get(node.id);
  if (!element) {
    element = h("button", { class: "block", type: "button", "data-id": node.id, onclick: () => explain(element.node, element), onpointermove: hover, onpointerleave: hideTip, onfocus: () => {
      blocks.forEach((other) => { other.tabIndex = other === element ? 0 : -1; });
    } }, h("span"), " ", h("span"));
    blocks.set(node.id, element);
    ground.append(element);
  }
  element.node = node;
  element.total = answer.estimate.memory.total;
  const width = Math.max(0, box.width - GAP);
  const height = Math.max(0, box.height - GAP);
  const [across, down] = [100 / size.width, 100 / size.height]; // in per cents, so that paper of another width holds it too
  Object.assign(element.style, { left: `${box.x * across}%`, top: `${box.y * down}%`, width: `${width * across}%`, height: `${height * down}%` });
  element.style.setProperty("--fill", `var(--${node.part})`);
  element.style.setProperty("--on", `var(--on-${node.part})`);
  const whole = label(node);
  const title = node.id === node.part ? whole : fitting(whole, width, height);
  element.className = `block${height < 40 ? ` short${width > 6.9 * title.length + 64 && height >= 18 ? " row" : ""}` : height > 56 ? ` tall${height > 76 ? " high" : ""}` : ""}${width < 66 ? " slim" : ""}${width < 40 || height < 18 ? " bare" : ""}`;
  const then = old(node);
  const change = width > 104 && pinned() && then !== undefined && Math.abs(node.bytes - then) > GIB / 200 ? `  ${signed(gib(Math.abs(node.bytes - then), 2), node.bytes - then)}` : "";
  const text = `${gib(node.bytes, node.bytes >= GIB ? 1 : 2)}${width < 58 ? "" : " GiB"}${change}`;
  if (element.firstChild.textContent !== title) element.firstChild.textContent = title;
  if (element.lastChild.textContent !== text) element.lastChild.textContent = text;
  element.setAttribute("aria-label", `${title} ${text}${node.id === node.part ? "" : `, ${name(node)}: ${whole}`}`);
  element.dataset.value = node.bytes;
  return node.id;
}

function hover(event) {
  const { node, total } = event.currentTarget;
  const then = old(node);
  showTip(event.clientX, event.clientY, node.id === node.part ? label(node) : `${name(node)} · ${label(node)}`, [
    [t("size"), bytes(node.bytes)], [t("share.of"), percent(node.bytes / total)],
    ...(pinned() ? [["A", then === undefined ? "–" : bytes(then)]] : []), [t("treemap.open"), ""],
  ]);
}

/** A name as far as it has room: without its first word, the layer's part, where the words after that would be cut off. */
function fitting(whole, width, height) {
  const room = ((width - 14) / 6.6) * (height > 76 ? 3 : height > 56 ? 2 : 1);
  const first = /^[A-Za-z]+ (?!of |that |and |context )(?=[A-Za-z])/.exec(whole);
  return first && whole.length > room ? whole.slice(first[0].length) : whole;
}

const everything = (nodes) => nodes.flatMap((node) => [node, ...everything(node.children ?? [])]);

/** The arrows walk from block to block; Tab passes all of them at once. */
function keys(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const at = shown.indexOf(document.activeElement?.dataset?.id);
  blocks.get(shown[(at + step + shown.length) % shown.length])?.focus();
}
