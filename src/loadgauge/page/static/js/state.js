/** All there is to know of what is shown: the flags of `loadgauge estimate`, and the view. It lives in the fragment. */
export const FIRST = {
  model: "llama-3.1-70b", gpu: "h100-sxm5-80gb", gpus: "256", tp: "8", pp: "4", zero: "1", "sequence-parallel": "true",
  "micro-batch": "1", "global-batch": "512", "seq-len": "8192", tokens: "1T", price: "2.50",
};

export const flags = {};
export const view = {};
/** Flags that the user has decided on, also to leave out: not what the sample or a file says. */
export const own = new Set();
const KEPT = "run";
const DECIDED = "own";
const listeners = [];
let touched = false;
let linked = false;
let timer = 0;
let written = "";

/** Calls back with {flags: bool, view: Set of names} after each change. */
export const onChange = (listener) => listeners.push(listener);

const tell = (change) => listeners.forEach((listener) => listener(change));

/** Changes some flags; null or "" takes one away. mine: the flags that are the user's own; without it all. True where one changed. */
export function set(changes, { push = false, mine = null } = {}) {
  let changed = false;
  for (const [name, value] of Object.entries(changes)) {
    if (!mine || mine.includes(name)) own.add(name);
    else own.delete(name);
    const gone = value === null || value === undefined || value === "" || value === "false";
    if (gone ? !(name in flags) : flags[name] === String(value)) continue;
    changed = true;
    if (gone) delete flags[name];
    else flags[name] = String(value);
  }
  if (!changed) return false;
  touched = true;
  write(push);
  tell({ flags: true, view: new Set() });
  return true;
}

/** Changes what is shown and how, not what is asked. */
export function look(changes, { push = false } = {}) {
  const names = Object.keys(changes).filter((name) => (view[name] ?? "") !== (changes[name] ?? ""));
  if (!names.length) return;
  for (const name of names) {
    if (changes[name] === null || changes[name] === "") delete view[name];
    else view[name] = String(changes[name]);
  }
  write(push);
  tell({ flags: false, view: new Set(names) });
}

export const replace = (next, { mine = null } = {}) => set({ ...Object.fromEntries([...own, ...Object.keys(flags)].map((name) => [name, null])), ...next }, { push: true, mine });

export const encoded = (some) => new URLSearchParams(some).toString().replaceAll("%3A", ":").replaceAll("%2C", ",");

export const decoded = (text) => Object.fromEntries(new URLSearchParams(text));

export function fragment() {
  const seen = Object.fromEntries(Object.entries(view).map(([name, value]) => [`~${name}`, value]));
  return encoded({ ...flags, ...seen });
}

/** Browsers allow few changes of the address in a second: a slider's are gathered. */
function write(push) {
  clearTimeout(timer);
  if (push) return save("pushState");
  timer = setTimeout(() => save("replaceState"), 250);
}

function save(how) {
  const text = fragment();
  if (text === written) return;
  written = text;
  try {
    history[how]({ own: [...own] }, "", `${location.pathname}${location.search}#${text}`);
  } catch { /* a viewer of files that lets no page change its address */ }
}

/** Keeps the run for the next time that the page opens, once it has an answer and is of the user's making. */
export function keepRun() {
  if (!touched) return;
  try {
    localStorage.setItem(KEPT, encoded(flags));
    localStorage.setItem(DECIDED, [...own].join());
  } catch {
    touched = false; // a browser that keeps nothing: the page opens on its example
  }
}

/** The run that the page was left with, and which of its flags are the user's own; without one, the example. */
function lastRun() {
  try {
    const kept = decoded(localStorage.getItem(KEPT) ?? "");
    return kept.model ? [kept, localStorage.getItem(DECIDED)?.split(",") ?? Object.keys(kept)] : [FIRST, []];
  } catch {
    return [FIRST, []];
  }
}

/** The last run can no longer be estimated, as its file is gone: the example, where the address asks for nothing else. */
export function forgetRun() {
  try {
    localStorage.removeItem(KEPT);
  } catch { /* nothing was kept */ }
  if (linked) return false;
  replace(FIRST, { mine: [] });
  return true;
}

/** The address as it will be once everything is written. */
export function address() {
  clearTimeout(timer);
  save("replaceState");
  return location.href;
}

function readFragment() {
  const all = decoded(location.hash.slice(1));
  const seen = {};
  const asked = {};
  for (const [name, value] of Object.entries(all)) {
    if (name.startsWith("~")) seen[name.slice(1)] = value;
    else asked[name] = value;
  }
  return { seen, asked };
}

/** At the start, and when someone goes back or edits the address. */
export function load() {
  const { seen, asked } = readFragment();
  linked = Object.keys(asked).length > 0;
  const { own: decidedThen, run } = history.state ?? {};
  const [next, decided] = linked ? [asked, decidedThen ?? Object.keys(asked)] : run ? [decoded(run), decidedThen] : lastRun();
  const old = new Set([...Object.keys(view), ...Object.keys(seen)].filter((name) => view[name] !== seen[name]));
  for (const name of Object.keys(flags)) delete flags[name];
  for (const name of Object.keys(view)) delete view[name];
  own.clear();
  decided.forEach((name) => own.add(name));
  Object.assign(flags, next);
  Object.assign(view, seen);
  written = location.hash.slice(1);
  // An address that asks for nothing is of this run also when someone comes back to it.
  history.replaceState({ own: [...own], run: encoded(flags) }, "");
  return old;
}

addEventListener("popstate", () => tell({ flags: true, view: load(), address: true }));
