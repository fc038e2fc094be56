/** One page of paper: the page is laid out as wide as it needs, in light colours, and made as small as it must be. */
import { resizePlots } from "./chart.js";
import { find, h } from "./dom.js";
import { t, term } from "./i18n.js";
import { fixed } from "./numbers.js";
import { repaint } from "./panel.js";
import { dress, onPaper } from "./theme.js";

/** A4 across, within margins of 10 mm, at 96 points an inch; a little less, as browsers round. */
const SHEET = { width: 1045, height: 700 };
const WIDE = 1640;
const root = document.documentElement;
let last = null;

/** The answer that is shown. */
export const knowAnswer = (found) => { last = found; };

export function listenToPrint() {
  addEventListener("beforeprint", () => lay(true));
  addEventListener("afterprint", () => lay(false));
}

function lay(paper) {
  root.classList.toggle("paper", paper);
  onPaper(paper);
  dress();
  const body = document.body;
  body.style.width = paper ? `${WIDE}px` : "";
  body.style.zoom = "";
  repaint(false, paper);
  resizePlots();
  if (!paper) return;
  if (last) colophon(last);
  const height = Math.max(1, find("#body").getBoundingClientRect().height + find("#top").getBoundingClientRect().height);
  const zoom = Math.min(SHEET.width / WIDE, SHEET.height / height);
  body.style.zoom = String(zoom);
  body.style.width = `${SHEET.width / zoom}px`;
  resizePlots();
}

/** What stands below the figures on paper: how to have them again, and what was assumed. */
function colophon({ command, estimate }) {
  find("#subject").textContent = [estimate.model.name, estimate.gpu && `${fixed(estimate.layout.gpus)} × ${estimate.gpu}`].filter(Boolean).join(" · ");
  const { assumed = {}, not_counted = [] } = estimate;
  const line = (name, texts) => (texts.length ? h("p", {}, h("b", {}, name), " ", texts.join("; ")) : null);
  find("#colophon").replaceChildren(...[h("p", { class: "mono" }, command),
    line(t("honesty.assumed", { count: Object.keys(assumed).length }), Object.entries(assumed).map(([flag, text]) => `${flag} ${term(text)}`)),
    line(t("honesty.uncounted", { count: not_counted.length }), not_counted.map((text) => term(text)))].filter(Boolean));
}
