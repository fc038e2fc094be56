/** The table of a file that was written, in place of the server: `api.js` has the same names. Nothing is asked of anyone. */
let run = null;

/** Unpacks what the file carries, once: {flags, command, axes, here, own, cells, explained, messages, version}. */
export async function unpacked() {
  const packed = Uint8Array.from(atob(document.querySelector("#run").textContent.trim()), (letter) => letter.charCodeAt(0));
  run = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  return run;
}

export class Refused extends Error {
  constructor(message, kind) {
    super(message);
    this.kind = kind;
  }
}

/** Its words; what the page calls A is here the run that the file was written for. */
export const message = async (name) => {
  const words = run.messages[name];
  return words["single.delta"] ? { ...words, "pin.delta": words["single.delta"], "pin.same": words["single.same"] } : words;
};

/** The flags that a slider moves, as they stand. */
export const position = (flags) => Object.fromEntries(Object.keys(run.axes).map((axis) => [axis, flags[axis] ?? run.here[axis]]));
const key = (place) => Object.values(place).join(" ");
/** Whether something else was changed than what sliders move. */
const elsewhere = (flags) => [...new Set([...Object.keys(flags), ...Object.keys(run.flags)])].some((name) => !(name in run.axes) && flags[name] !== run.flags[name]);

/** The answer at a place of the table. Raises `Refused`: where it has none, with the kind "Beyond". */
export function answerAt(flags) {
  const place = position(flags);
  const cell = key(place) === key(run.here) ? {} : run.cells[key(place)];
  if (!cell || elsewhere(flags)) throw new Refused("", "Beyond");
  if (cell.error) throw new Refused(cell.error, "NoRun");
  return { ...run.own, ...cell, estimate: { ...run.own.estimate, ...cell.estimate, memory: { ...run.own.estimate.memory, ...cell.estimate?.memory } } };
}

/** The command line of a place: the file's own, with what differs. */
export function commandAt(flags) {
  let text = run.command;
  for (const [axis, value] of Object.entries({ ...flags, ...position(flags) })) {
    if (value === (run.here[axis] ?? run.flags[axis])) continue;
    const said = new RegExp(` --${axis} (?:'[^']*'|\\S+)`);
    const word = value === "true" ? ` --${axis}` : ` --${axis} ${value}`;
    text = said.test(text) ? text.replace(said, word) : text + word;
  }
  return text;
}

export async function ask(path, { flags, id }) {
  if (path === "estimate") return answerAt(flags);
  const here = key(position(flags)) === key(run.here) && !elsewhere(flags);
  if (path === "explain" && here && run.explained[id]) return run.explained[id];
  const topic = id?.split("/").slice(id.startsWith("lane/") ? 1 : 0)[0];
  throw new Refused(`${run.beyond ?? ""} ${commandAt(flags)} --explain ${topic}`.trim(), "Beyond");
}
