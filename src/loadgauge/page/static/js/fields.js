/**
 * Flags that are shown first, and those with a control of their own. All others stand under "more" of their group, in the order and
 * with the choices and bounds of the server's catalogue, the fields of `Job`.
 */
const axis = (flag, to) => ({ flag, kind: "slider", from: 1, to, locks: true });
const FIRST = {
  model: [{ flag: "model", kind: "model" }],
  method: [{ flag: "method", kind: "method" }, { flag: "precision", kind: "choice" }, { flag: "optimizer", kind: "choice" }, { flag: "framework", kind: "choice" }],
  batch: [{ flag: "seq-len", kind: "slider", from: 512, to: 2 ** 20 }, axis("micro-batch", 64), { flag: "global-batch", kind: "slider", from: 1, to: 16384 }],
  layout: [
    axis("tp", 64), axis("pp", 64), axis("vpp", 16), axis("cp", 64), axis("ep", 256), { flag: "zero", kind: "segments", locks: true },
    { flag: "sequence-parallel", kind: "switch", locks: true }, { flag: "schedule", kind: "choice", locks: true }, { flag: "recompute", kind: "suggest", locks: true },
  ],
  cluster: [{ flag: "gpu", kind: "gpu" }, { flag: "gpus", kind: "slider", from: 1, to: 131072 }, { flag: "tokens", kind: "text" }, { flag: "price", kind: "text" }],
  honesty: [{ flag: "~ranges", kind: "ranges" }, { flag: "measured", kind: "text" }],
};
/** Said by another control, or not for a page. */
const LEFT = ["qlora", "hub"];
/** Where a field's group is another here. */
const ELSEWHERE = { tuning: "honesty", road: "model" };
const GROUP = { money: "cluster" };

const kindOf = ({ type, choices, open }) => (type === "bool" ? "switch" : !choices.length ? "text" : open ? "suggest" : "choice");

/** The groups of controls. known: the flags of the catalogue, none before it is here */
export function groupsOf(known = []) {
  const placed = new Set([...LEFT, ...Object.values(FIRST).flat().map((one) => one.flag)]);
  const rest = known.filter((one) => !placed.has(one.name)).map((one) => ({ flag: one.name, kind: kindOf(one), more: true, group: ELSEWHERE[one.name] ?? GROUP[one.group] ?? one.group }));
  return Object.entries(FIRST).map(([name, fields]) => [name, [...fields, ...rest.filter((one) => one.group === name)]]);
}
