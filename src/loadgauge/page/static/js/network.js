/** What the network must carry: what each axis needs to stay out of the way, against what its link has. */
import { latest } from "./api.js";
import { asks } from "./drawer.js";
import { h } from "./dom.js";
import { refusal, t, term } from "./i18n.js";
import { scaled, seconds, signed, significant } from "./numbers.js";
import { Panel, scrolled } from "./panel.js";
import { pinned } from "./pin.js";
import { flags, set } from "./state.js";

const ADAPTERS = [12.5, 25, 50, 100, 200, 400];
let what = null;
let answerTo = null;

export const network = new Panel({
  id: "network",
  draw,
  idle: ({ panels: { network: rows } }) => (rows ? (rows.length ? null : t("network.alone")) : t("network.none")),
  sub: () => t("network.sub"),
});

const rate = (value) => (value === null || value === undefined ? "–" : significant(value / 1e9));

function bullet(row) {
  if (!row.need || !row.have) return "";
  const top = Math.max(row.need, row.have) * 1.05;
  return h("span", { class: `bullet ${row.ok ? "" : "over"}`, "aria-hidden": "true" }, h("i", { style: { width: `${(100 * row.need) / top}%` } }), h("u", { style: { left: `${(100 * row.have) / top}%` } }));
}

function rowsOf(rows) {
  const before = pinned()?.panels.network;
  return rows.map((row) => {
    const then = before?.find((one) => one.axis === row.axis && one.what === row.what);
    const change = then ? row.exposed_seconds - then.exposed_seconds : 0;
    return [
      h("span", {}, h("strong", { title: t(`lane.${row.axis}`) }, row.axis.toUpperCase()), h("span", { class: "note" }, term(row.what))),
      h("span", {}, scaled(row.bytes_per_step, "B"), row.window_seconds ? h("span", { class: "note" }, t("network.in", { time: seconds(row.window_seconds) })) : null),
      asks(`network/${row.axis}/${row.what}`, `${row.axis.toUpperCase()} · ${term(row.what)}`, rate(row.need)),
      h("span", {}, rate(row.have), " ", h("span", { class: "mute" }, t(`link.${row.link}`)), bullet(row)),
      h("span", { class: `tag ${row.ok ? "good" : "bad"}`, title: t("network.exposed", { time: seconds(row.exposed_seconds) }) }, row.ok ? t("network.ok") : `+${seconds(row.exposed_seconds)}`),
      ...(before ? [then ? signed(seconds(Math.abs(change)), change) : "–"] : []),
    ];
  });
}

function draw(place, answer) {
  const rows = answer.panels.network;
  place.closest(".panel")?.classList.toggle("low", rows.length < 3);
  const columns = [
    { text: t("traffic"), words: true }, t("network.bytes"), t("network.need"),
    { text: t("network.have"), words: true }, "", ...(pinned() ? [t("pin.against")] : []),
  ];
  const box = scrolled(t("network.title"), { columns, rows: rowsOf(rows) });
  if (!what) what = whatIf();
  if (what.parentNode !== place) place.replaceChildren(box, what);
  else place.replaceChild(box, place.firstChild);
  if (answerTo !== JSON.stringify(flags)) {
    answerTo = JSON.stringify(flags);
    what.querySelector(".said").replaceChildren();
  }
}

/** Another network adapter, tried out. */
function whatIf() {
  const said = h("span", { class: "said", role: "status" });
  const shown = h("output", { for: "what-if" });
  const range = h("input", { type: "range", id: "what-if", min: 0, max: ADAPTERS.length - 1, step: 1, value: 2, oninput: () => {
    label();
    ask({ flags, nic: ADAPTERS[range.value] * 1e9 });
  } });
  const label = () => {
    shown.textContent = `${ADAPTERS[range.value]} GB/s`;
    range.style.setProperty("--fill", `${(100 * range.value) / (ADAPTERS.length - 1)}%`);
    range.setAttribute("aria-valuetext", shown.textContent);
  };
  const ask = latest("what_if", (found) => {
    const change = found.step_delta;
    said.replaceChildren(h("strong", { class: Math.abs(change) < 5e-5 * found.step ? "" : change < 0 ? "good" : "bad" }, t("network.step", { step: seconds(found.step), change: signed(seconds(Math.abs(change)), change) })), " ",
      h("button", { class: "pill", type: "button", onclick: () => set({ "nic-bandwidth": `${ADAPTERS[range.value]}GB/s` }, { push: true }) }, t("apply")));
  }, (error) => said.replaceChildren(h("span", { class: "bad" }, refusal(error.message))));
  label();
  return h("div", { class: "whatif" }, h("label", { for: "what-if" }, t("network.whatif")), range, shown, said);
}

export const relabel = () => { what = null; };
