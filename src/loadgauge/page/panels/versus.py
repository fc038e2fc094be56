"""Two runs as a diff of ledgers: every part of the memory, of the step and of the network, and which of its numbers differ."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.answers.figures.lanes import lanes
from loadgauge.core.answers.figures.network import network
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.setup import Setup
from loadgauge.page.inputs.flags import State, job_of
from loadgauge.page.inputs.uploads import Uploads
from loadgauge.page.panels.reasons import reason

MOST = 4
"""Numbers that are named for a difference."""
ALIKE = 1e-9
SMALL = 1e-3
"""Relative difference below which a number is no reason."""


class Versus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two runs: `a` is the pinned one, `flags` the present one."""

    flags: State
    a: State


class Side(NamedTuple):
    """One of the two runs."""

    given: Setup
    result: Estimate


class Why(NamedTuple):
    """A number that differs; as text where it is a line of the ledger."""

    what: str
    a: float | str | None
    b: float | str | None
    unit: str = "text"


def versus(question: Versus, uploads: Uploads) -> dict[str, Any]:
    """Compare two runs part by part.

    Returns rows of `memory` [bytes at the peak], `time` [s of a step] and `network` [s exposed]: id as in `explain`, values in A
    and B (None: there is no such part), and which numbers behind them differ; then the totals, and the moments of the peaks.
    """
    a, b = (Side(setup, setup.estimate()) for setup in (job_of(question.a, uploads), job_of(question.flags, uploads)))
    memories = a.result.memory, b.result.memory
    times = a.result.time, b.result.time
    return {
        "memory": [row for part in PARTS if (row := _part(a, b, part)) is not None],
        "time": list(_lanes(a, b)),
        "network": list(_traffic(a, b)),
        "totals": {
            "memory": [memory.total for memory in memories],
            "time": [None if time is None else time.step for time in times],
        },
        "moments": [memory.moment for memory in memories],
        "stages": [memory.rank.stage for memory in memories],
    }


def _row(id: str, a: float | None, b: float | None, why: list[Why]) -> dict[str, Any]:
    return {"id": id, "a": a, "b": b, "why": [why_row._asdict() for why_row in why[:MOST]]}


def _same(a: float, b: float, within: float = ALIKE) -> bool:
    return abs(a - b) <= within * max(abs(a), abs(b))


def _part(a: Side, b: Side, part: str) -> dict[str, Any] | None:
    """One part of the memory: which letters of its formulas differ, and where it has none, which lines."""
    before, after = a.result.memory.parts[part], b.result.memory.parts[part]
    if not before and not after:
        return None
    if _same(before, after):
        return _row(part, before, after, [])
    first, second = a.result.explain(part), b.result.explain(part)
    legends = [
        {name: entry for formula in side.formulas for name, entry in formula.legend.items()} for side in (first, second)
    ]
    why = [
        Why(legends[0][name][0], float(legends[0][name][1]), float(legends[1][name][1]), "count")
        for name in legends[0]
        if name in legends[1] and not _same(legends[0][name][1], legends[1][name][1])
    ]
    lines = [{step.what: step.nbytes for step in side.steps if step.nbytes} for side in (first, second)]
    gone = [step for step in lines[0] if step not in lines[1]]
    come = [step for step in lines[1] if step not in lines[0]]
    why += [Why("", here, there) for here, there in zip_longest(gone, come)]
    why += [
        Why(step, lines[0][step], lines[1][step], "B")
        for step in lines[0]
        if step in lines[1] and not _same(lines[0][step], lines[1][step])
    ]
    return _row(part, before, after, why)


def _lanes(a: Side, b: Side) -> Iterator[dict[str, Any]]:
    """The parts of a step."""
    seconds = [{lane["lane"]: lane["seconds"] for lane in lanes(side.result) or ()} for side in (a, b)]
    for lane in {**seconds[0], **seconds[1]}:
        before, after = seconds[0].get(lane), seconds[1].get(lane)
        id = f"lane/{lane}"
        yield _row(id, before, after, _numbers(a, b, id, before, after))


def _traffic(a: Side, b: Side) -> Iterator[dict[str, Any]]:
    """Yield what each axis exposes on the network."""
    exposed = [
        {f"network/{row['axis']}/{row['what']}": row["exposed_seconds"] for row in network(side.result) or ()}
        for side in (a, b)
    ]
    for id in {**exposed[0], **exposed[1]}:
        before, after = exposed[0].get(id), exposed[1].get(id)
        yield _row(id, before, after, _numbers(a, b, id, before, after, always=True))


def _numbers(
    a: Side, b: Side, id: str, before: float | None, after: float | None, *, always: bool = False
) -> list[Why]:
    """The numbers behind a figure of both runs that differ; always: also where the figure itself does not."""
    if before is None or after is None or (_same(before, after) and not always):
        return []
    both = [_behind(reason(side.given, side.result, id)) for side in (a, b)]
    return [
        Why(meaning, value, both[1][meaning][0], unit)
        for meaning, (value, unit) in both[0].items()
        if meaning in both[1]
        and not _same(value, both[1][meaning][0], SMALL)
        and not (_same(value, before) and _same(both[1][meaning][0], after))
    ]


def _behind(reason_parts: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """The numbers of a figure's formulas by what they mean; what a formula of the largest alone holds, only where it is named."""
    return {
        meaning: (formula["numbers"][letter], formula["units"][letter])
        for formula in reason_parts["formulas"]
        for letter, meaning in formula["meaning"].items()
    }
