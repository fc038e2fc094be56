/** Copy the link, copy the command line, export the run to another tool's dialect. */
import { ask } from "./api.js";
import { openDrawer } from "./drawer.js";
import { h } from "./dom.js";
import { refusal, t } from "./i18n.js";
import { address, flags } from "./state.js";
import { toast } from "./tip.js";

let command = "";
export const knowCommand = (text) => { command = text; };

export async function copy(text, said) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "unseen", value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast(said);
}

export const copyLink = () => copy(address(), t("copied.link"));
export const copyCommand = () => copy(command, t("copied.command", { command }));

/** The run as one file that opens anywhere; its table takes seconds. */
export async function saveFile() {
  toast(t("share.writing"));
  try {
    save(await ask("export", { flags, dialect: "html" }));
  } catch (error) {
    toast(refusal(error.message) || t("unreachable"));
  }
}

const save = (found) => {
  const link = h("a", { href: URL.createObjectURL(new Blob([found.text], { type: "text/plain" })), download: found.filename });
  link.click();
  URL.revokeObjectURL(link.href);
};

export async function exportTo(dialect) {
  const title = t("export.title", { dialect });
  openDrawer(title, h("p", { class: "mute" }, t("loading")));
  try {
    show(title, await ask("export", { flags, dialect }));
  } catch (error) {
    openDrawer(title, h("p", { class: "bad" }, refusal(error.message) || t("unreachable")));
  }
}

function show(title, found) {
  const missing = found.not_expressed ?? [];
  openDrawer(title, h("div", {}, h("h3", {}, found.filename), h("pre", { class: "formula", tabindex: "0", id: "exported" }, found.text),
    h("div", { class: "buttons" }, h("button", { class: "primary", type: "button", onclick: () => copy(found.text, t("copied.file", { name: found.filename })) }, t("copy")), h("button", { class: "pill", type: "button", onclick: () => save(found) }, t("save")))),
  missing.length ? h("section", {}, h("h3", {}, t("export.missing")), h("ul", {}, missing.map((one) => h("li", {}, typeof one === "string" ? one : Object.values(one).join(": "))))) : null);
}
