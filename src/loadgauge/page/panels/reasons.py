"""Why a figure of the page is what it is: formula with the user's numbers, the summands, the source.

The formulas are those of `answers.why`, which `estimate --explain` prints; here they are put to the page's figures, with the
unit of each letter.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from loadgauge.core.answers.figures.lanes import KINDS, kind_of, lanes
from loadgauge.core.answers.figures.network import network
from loadgauge.core.answers.figures.treemap import Node, treemap
from loadgauge.core.answers.why.of_estimate import OF_LANES, reason as reason_of
from loadgauge.core.answers.why.of_memory import memory_line, memory_reason
from loadgauge.core.answers.why.of_needs import need_reason
from loadgauge.core.answers.why.reason import Line, Reason
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.sources import cite
from loadgauge.core.estimate.explain import Explanation, Kept
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.time.bandwidth_needs import NetworkCase
from loadgauge.core.estimate.time.cost import Budget
from loadgauge.core.estimate.workings import TimedOperation
from loadgauge.core.resolve.setup import Setup

MOST = 12
"""Summands that are shown one by one; the others together."""
UNITS = {
    "byte": "B",
    "bytes": "B",
    "byte/s": "B/s",
    "GPU-hours": "hours",
    "steps": "count",
    "GPUs": "count",
    "interruptions": "count",
}
"""The page's names of units, where they differ from a line's."""
ADDRESSES = (
    (re.compile(r"\(arXiv:([\w.\-/]+)\)"), "https://arxiv.org/abs/{}"),
    (re.compile(r"\((https?://[^\s)]+)\)"), "{}"),
    (re.compile(r"\(((?:github\.com|huggingface\.co|docs\.nvidia\.com|pytorch\.org)/[^\s)]+)\)"), "https://{}"),
)
"""Forms of the places that sources name."""
ENDS = ("t*r_l", "t*r_h", "t_l*r_l", "t_h*r_h")
"""The formulas of both ends of the range of a step."""
TOPIC_OF = {lane: topic for topic, lane in OF_LANES.items()}


class Step(NamedTuple):
    """A summand. id: of the figure that explains it; note: beside it, such as how often it comes"""

    what: str
    value: float
    unit: str = "s"
    id: str = ""
    note: str = ""


def reason(setup: Setup, result: Estimate, id: str, tree: list[Node] | None = None) -> dict[str, Any]:
    """Explain a figure by its id: fit, step, rate, mfu, days, cost, lane/<lane>, network/<axis>/<what>, or a block of the treemap.

    Returns the value and its unit, formulas, summands (`steps`), the rule, notes and sources, as plain values; of a block its
    tensors too [bytes]. tree: the treemap, where it is there already. Raises `ConfigError` for what this run does not have.
    """
    name, _, rest = id.partition("/")
    if name in PARTS:
        return _block(result, id, treemap(result) if tree is None else tree)
    if name == "fit":
        return _fit(result)
    if result.time is None or name not in FIGURES:
        raise _none(id)
    if name in ("days", "cost"):
        budget = setup.budget(result)
        if budget is None or (name == "cost" and budget.price is None):
            raise _none(id)
        return _whole(result, budget, name)
    return OF_STEP[name](result, rest)


def _none(id: str) -> ConfigError:
    return ConfigError(f"no figure {id[:60]!r} in this run", key="id")


def shown(
    value: float, unit: str, reason_shown: Reason, lines: Iterable[Line], steps: Iterable[Step] = ()
) -> dict[str, Any]:
    """The page's form of a reason. lines: those of its formulas that are about the figure"""
    return {
        "value": value,
        "unit": unit,
        "rule": reason_shown.rule,
        "basis": reason_shown.basis,
        "formulas": [_formula(line) for line in lines if line.letters],
        "steps": [step._asdict() for step in steps],
        "notes": list(reason_shown.notes),
        "sources": [{"text": text, "url": address(text)} for source in reason_shown.sources for text in _works(source)],
    }


def _works(source: str) -> list[str]:
    """The works behind a source: those of measured kernels are named by their keys."""
    head, measured, keys = source.partition("measured kernels: ")
    return [str(cite(key)) for key in keys.split(", ")] if measured and not head else [source]


def address(text: str) -> str | None:
    """Return where a source says to find it.

    >>> address("Korthikanti et al., Reducing Activation Recomputation (arXiv:2205.05198)")
    'https://arxiv.org/abs/2205.05198'
    """
    matches = ((pattern.search(text), form) for pattern, form in ADDRESSES)
    return next((form.format(match[1]) for match, form in matches if match), None)


def _formula(line: Line) -> dict[str, Any]:
    return {
        "what": line.what,
        "letters": line.letters,
        "value": line.value,
        "unit": UNITS.get(line.unit, line.unit),
        "numbers": {name: number for name, (_, number) in line.legend.items()},
        # The letters of a part of the memory are sizes, whose units its formula does not carry.
        "units": {} if line.unit == "bytes" else {name: unit_of(meaning) for name, (meaning, _) in line.legend.items()},
        "meaning": {name: meaning for name, (meaning, _) in line.legend.items()},
    }


def unit_of(meaning: str) -> str:
    """Return the unit of a letter from what it means, in the words of `loadgauge.core.answers.why`.

    >>> unit_of("seconds of a step"), unit_of("16-bit peak of a GPU [FLOP/s]"), unit_of("GPUs")
    ('s', 'FLOP/s', 'count')
    """
    if meaning.endswith("]"):
        return {"byte/s": "B/s"}.get(unit := meaning.rpartition("[")[2][:-1], unit)
    for start, unit in STARTS:
        if meaning.startswith(start):
            return unit
    return "count"


STARTS = (
    ("seconds of a day", "count"), ("seconds", "s"), ("its seconds", "s"), ("launch", "s"), ("bytes read and written", "count"),
    ("bytes", "B"), ("memory of the card", "B"), ("lower end", "B"), ("upper end", "B"), ("its FLOPs", "FLOP"),
    ("model FLOPs", "FLOP"), ("hardware FLOPs", "FLOP"), ("FLOPs", "FLOP"), ("tokens", "tokens"), ("days", "days"),
    ("GPU-hours", "hours"), ("price", "money"), ("share", "share"), ("bandwidth", "B/s"),
)  # fmt: skip
"""Units of letters by how their meanings begin; all others are counts and factors."""


def _fit(result: Estimate) -> dict[str, Any]:
    """The peak as the sum of its parts, against what a program may use of the card."""
    memory = result.memory
    parts = sorted(((memory.parts[part], part) for part in PARTS if memory.parts[part]), reverse=True)
    verdict = reason_of(result, "verdict")
    return shown(memory.total, "B", verdict, verdict.lines[1:], (Step(part, size, "B", part) for size, part in parts))


def _block(result: Estimate, id: str, tree: list[Node]) -> dict[str, Any]:
    """A block of the treemap: the part of the memory that it is of, and its own tensors."""
    part = id.partition("/")[0]
    explanation, block = result.explain(part), find(tree, id)
    value = result.memory.parts[part] if block is None else block["bytes"]
    lines = (memory_line(formula, "bytes") for formula in explanation.formulas)
    steps = (Step(step.what, step.nbytes, "B") for step in explanation.steps)
    return {**shown(value, "B", memory_reason(explanation), lines, steps), "tensors": _tensors(explanation, id)}


def find(nodes: list[Node], id: str) -> Node | None:
    """Return the block with this id (`part/layer/...`) in a tree of blocks; None where there is none."""
    for node in nodes:
        if node["id"] == id:
            return node
        if id.startswith(f"{node['id']}/") and (inner := find(node["children"], id)) is not None:
            return inner
    return None


def _tensors(explanation: Explanation, id: str) -> list[dict[str, Any]]:
    """The tensors of a block: all of its part, or those of the layer, operation or tensor that the id names."""
    path = id.partition("/")[2]
    chosen = [tensor for tensor in explanation.tensors if not path or _within(tensor, path)]
    return [
        {
            "layer": tensor.layer,
            "name": tensor.name,
            "numel": tensor.numel,
            "bytes": tensor.nbytes,
            "itemsize": tensor.nbytes / tensor.numel if tensor.numel else None,
            "saved_by": list(tensor.by),
        }
        for tensor in chosen or explanation.tensors
    ]


def _within(tensor: Kept, path: str) -> bool:
    """Return whether a tensor is under `layer/operation/tensor`."""
    layer, _, rest = path.partition("/")
    operation, _, name = rest.partition("/")
    if tensor.layer != layer:
        return False
    return (not name or tensor.name == name) and (
        not operation or any(by.removesuffix(" (runs again)") == operation for by in tensor.by)
    )


# -- a step ---------------------------------------------------------------------------------------------------------------


def _step(result: Estimate, _: str) -> dict[str, Any]:
    time_reason = reason_of(result, "time")
    steps = [
        Step(f"lane.{lane['lane']}", lane["seconds"], "s", f"lane/{lane['lane']}")
        for lane in lanes(result) or ()
        if lane["seconds"]
    ]
    ends = [line for line in time_reason.lines if line.letters in ENDS]
    return shown(result.timing.step, "s", time_reason, ends, steps)


def _figure(topic: str, name: str, unit: str, kept: str = "") -> Callable[[Estimate, str], dict[str, Any]]:
    """Explain a number of the time by the lines of a topic; kept: by those of this unit alone."""

    def of(result: Estimate, _: str) -> dict[str, Any]:
        figure = reason_of(result, topic)
        return shown(
            getattr(result.time, name), unit, figure, [line for line in figure.lines if kept in ("", line.unit)]
        )

    return of


def _lane(result: Estimate, lane: str) -> dict[str, Any]:
    drawn = next((row for row in lanes(result) or () if row["lane"] == lane), None)
    if drawn is None:
        raise _none(f"lane/{lane}")
    seconds = drawn["seconds"]
    if lane in KINDS:
        behind = reason_of(result, lane)
        timed = sorted(
            (operation for operation in result.workings.operations if kind_of(operation) == lane),
            key=lambda operation: -operation.each,
        )
        share = seconds / sum(operation.each for operation in timed)
        steps = [
            Step(f"{operation.layer}: {operation.operation.name}", operation.each * share, note=_often(operation))
            for operation in timed
        ]
        return shown(seconds, "s", behind, behind.lines, _shortened(steps))
    rows = sorted((row for row in result.network if row.lane == lane), key=lambda row: -row.seconds)
    if not seconds:
        # All of it is hidden: there is nothing on the critical path to explain.
        rule = "all of it overlaps with compute: it adds nothing to the step"
        hidden = Reason(topic=lane, what=lane, value=0.0, unit="s", basis=result.basis["network"], rule=rule)
        return shown(seconds, "s", hidden, ())
    behind = reason_of(result, TOPIC_OF[lane])
    steps = [
        Step(
            row.what,
            row.exposed_seconds,
            note=f"{row.calls_per_step:g} x {row.collective}, {row.ranks} ranks",
        )
        for row in rows
    ]
    name = f"({rows[0].axis}, {rows[0].what}:" if rows else ""
    return shown(seconds, "s", behind, [line for line in behind.lines if name in line.what], _shortened(steps))


def _often(timed: TimedOperation) -> str:
    return f"{timed.times:g} x"


def _shortened(steps: list[Step]) -> list[Step]:
    """The first summands, and the others as one."""
    rest = steps[MOST:]
    more = [Step("all others", sum(step.value for step in rest), rest[0].unit, note=f"{len(rest)} x")] if rest else []
    return steps[:MOST] + more


def _network(result: Estimate, rest: str) -> dict[str, Any]:
    """The bandwidth that an axis needs, from the bytes and the seconds it has for them."""
    axis, _, purpose = rest.partition("/")
    row = next(
        (row_of for row_of in network(result) or () if (row_of["axis"], row_of["what"]) == (axis, purpose)), None
    )
    if row is None:
        raise _none(f"network/{rest}")
    assert result.cluster is not None
    case = NetworkCase.of_step(result.workings.step)
    need = need_reason(case, case.answer(), axis, result.cluster.gpus_per_node)
    link = f"({purpose}, {'between' if row['link'] == 'outer' else 'inside'} nodes)"
    return shown(row["need"], "B/s", need, [line for line in need.lines if link in line.what])


OF_STEP: dict[str, Callable[[Estimate, str], dict[str, Any]]] = {
    "step": _step, "rate": _figure("time", "tokens_per_second_per_gpu", "tokens/s", "tokens/s"),
    "mfu": _figure("mfu", "mfu", "share"), "lane": _lane, "network": _network,
}  # fmt: skip


# -- the whole run ----------------------------------------------------------------------------------------------------------


def _whole(result: Estimate, budget: Budget, name: str) -> dict[str, Any]:
    """The days or the cost of the run, and what they are worked out from."""
    money = reason_of(result, "money", budget)
    wanted = ("steps", "days", "GPU-hours") if name == "days" else ("GPU-hours", "cost")
    value = budget.days if budget.cost is None or name == "days" else budget.cost
    return shown(
        value, "days" if name == "days" else "money", money, [line for line in money.lines if line.what in wanted]
    )


FIGURES = frozenset({"fit", *OF_STEP, "days", "cost"})
"""What can be asked for, by the first word of its id."""
