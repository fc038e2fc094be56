/** The tabs, and the switches that both the header and the keyboard offer. */
import { language } from "./i18n.js";
import { look, view } from "./state.js";

export const TABS = ["run", "layouts", "network", "why", "hardware", "cost", "posttrain", "fleet", "accuracy", "learn"];
export const tab = () => (TABS.includes(view.tab) ? view.tab : "run");

/** Opens the tab at a place in the list. */
export const openTab = (place) => look({ tab: place ? TABS[place] : null }, { push: true });

export const swapLanguage = () => look({ lang: language === "zh" ? "en" : "zh" });
