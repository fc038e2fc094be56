/** A against B as a diff of ledgers: each part in both runs, the difference, and which numbers behind it differ. */
import { later } from "./api.js";
import { asks, explain } from "./drawer.js";
import { h } from "./dom.js";
import { refusal, t, term } from "./i18n.js";
import { amount, bytes, seconds, signed } from "./numbers.js";
import { Panel } from "./panel.js";
import { pinned } from "./pin.js";
import { decoded, flags, view } from "./state.js";

let found = null;
let problem = "";
let asked = "";

export const compare = new Panel({ id: "compare", wide: true, draw, sub: () => (found ? said() : t("working")) });

const request = later("versus", 60, () => {}, (answer) => {
  [found, problem] = [answer, ""];
  compare.show({});
}, (error) => {
  [found, problem] = [null, refusal(error.message) || t("unreachable")];
  compare.show({});
});

/** Asks anew, while something is pinned. */
export function followCompare() {
  if (!pinned()) return;
  const key = JSON.stringify([flags, view.pin]);
  if (key === asked) return;
  asked = key;
  request.start({ flags: { ...flags }, a: decoded(view.pin ?? "") });
}

/** Where the peaks are not of the same moment, parts of different moments are compared. */
function said() {
  const [one, other] = found.moments;
  return one === other && found.stages[0] === found.stages[1] ? t("compare.sub") : t("compare.moments", { a: term(one), b: term(other) });
}

const GROUPS = [["memory", bytes], ["time", seconds], ["network", seconds]];

function draw(place) {
  if (problem) return place.replaceChildren(h("p", { class: "waiting" }, problem));
  if (!found) return place.replaceChildren(h("p", { class: "waiting" }, t("working")));
  const columns = ["A", "B", t("compare.change")];
  return place.replaceChildren(h("div", { class: "scroll", style: { "max-height": "none" }, tabindex: "0", role: "group", "aria-label": t("compare.title") }, h("table", { class: "data compare" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "text" }, t("part")), ...columns.map((text) => h("th", { scope: "col" }, text)), h("th", { scope: "col", class: "text why" }, t("compare.why")))),
    ...GROUPS.map(([group, say]) => body(group, say)).filter(Boolean))));
}

function body(group, say) {
  const rows = found[group];
  if (!rows.length) return null;
  const differ = rows.filter((row) => row.why.length || (row.a ?? 0) !== (row.b ?? 0));
  const order = [...differ].sort((one, other) => Math.abs((other.b ?? 0) - (other.a ?? 0)) - Math.abs((one.b ?? 0) - (one.a ?? 0)));
  const alike = rows.length - differ.length;
  const total = found.totals[group];
  return h("tbody", { "data-group": group }, h("tr", { class: "group-row" }, h("th", { scope: "rowgroup", class: "text" }, t(`compare.${group}`)), ...(total ? [h("td", {}, value(total[0], say)), h("td", {}, value(total[1], say)), h("td", {}, change(total[0], total[1], say))] : [h("td"), h("td"), h("td")]), h("td", { class: "text mute" }, alike ? t("compare.alike", { count: alike }) : "")),
    order.map((row) => h("tr", { "data-row": row.id }, h("td", { class: "text" }, named(row.id)), h("td", { "data-value": row.a ?? "" }, value(row.a, say)), h("td", { "data-value": row.b ?? "" }, row.b === null ? "–" : opening(row, say)), h("td", {}, change(row.a, row.b, say)), h("td", { class: "text why" }, why(row)))));
}

const value = (one, say) => (one === null || one === undefined ? "–" : say(one));
const isPart = (id) => !id.includes("/");

function named(id) {
  const [kind, axis, ...rest] = id.split("/");
  if (isPart(id)) return t(`part.${id}`);
  return kind === "lane" ? t(`lane.${axis}`) : `${axis.toUpperCase()} · ${term(rest.join("/"))}`;
}

/** B's number opens its explanation. */
function opening(row, say) {
  if (!isPart(row.id)) return asks(row.id, named(row.id), say(row.b));
  return h("button", { class: "asks", type: "button", title: t("explain.open"), onclick: () => explain({ id: row.id, part: row.id }) }, say(row.b));
}

function change(one, other, say) {
  const size = (other ?? 0) - (one ?? 0);
  if (!size || (one === null && other === null)) return "–";
  return h("span", { class: size < 0 ? "good" : "bad", "data-change": size }, signed(say(Math.abs(size)), size));
}

function why(row) {
  if (row.a === null) return t("compare.only", { run: "B" });
  if (row.b === null) return t("compare.only", { run: "A" });
  return h("ul", { class: "reasons" }, row.why.map((one) => {
    const say = (value) => (value === null ? "–" : one.unit === "text" ? term(value).replaceAll(" x ", " × ") : amount(value, one.unit));
    return h("li", {}, one.what ? h("span", { class: "mute" }, `${term(one.what).replaceAll(" x ", " × ")} `) : null, say(one.a), h("span", { class: "mute" }, " → "), say(one.b));
  }));
}
