/** Light, dark, or as the system has it; and the colours, for what is drawn on a canvas. */
import { look, view } from "./state.js";

const system = matchMedia("(prefers-color-scheme: dark)");
let cache = new Map();
const listeners = [];

let paper = false;
/** Paper is light. */
export const onPaper = (on) => { paper = on; };

export const dark = () => !paper && (view.theme ? view.theme === "dark" : system.matches);

export function dress() {
  const wanted = dark() ? "dark" : "light";
  if (document.documentElement.dataset.theme === wanted) return;
  document.documentElement.dataset.theme = wanted;
  cache = new Map();
  listeners.forEach((listener) => listener());
}

export const onTheme = (listener) => listeners.push(listener);
system.addEventListener("change", dress);

export const toggleTheme = () => look({ theme: dark() ? "light" : "dark" });

export function colour(name) {
  if (!cache.has(name)) cache.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return cache.get(name);
}

export const GROUPS = ["states", "activations", "temporary", "outside"];
export const PARTS = {
  weights: "states", gradients: "states", optimizer: "states", activations: "activations", loss: "activations",
  gathered: "temporary", transient: "temporary", evaluation: "temporary", outside: "outside",
};
