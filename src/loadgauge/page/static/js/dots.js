/** What a trace or a measurement found, kept for as long as the page is: one of each, handed in with every question. */
const PLACE = "dots";
const listeners = [];
let kept = read();

/** As the server wants them, which draws them where they belong. */
export const dots = () => Object.values(kept).map(({ name, ...found }) => found);

/** The name that the dropped file had. */
export const fileOf = (source) => kept[source]?.name ?? "";

export const onDots = (listener) => listeners.push(listener);

/** Keeps one in place of an earlier one. False where the browser keeps no copy. */
export function keepDots(found) {
  kept = { ...kept, [found.source]: found };
  return changed();
}

/** Takes those of a source away, or all. */
export function forgetDots(source) {
  kept = source ? Object.fromEntries(Object.entries(kept).filter(([name]) => name !== source)) : {};
  changed();
}

function changed() {
  let done = true;
  try {
    sessionStorage.setItem(PLACE, JSON.stringify(kept));
  } catch {
    done = false;
  }
  listeners.forEach((listener) => listener());
  return done;
}

function read() {
  try {
    return JSON.parse(sessionStorage.getItem(PLACE)) ?? {};
  } catch {
    return {};
  }
}
