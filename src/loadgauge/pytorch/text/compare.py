"""Formula, trace and measurement as text: what `loadgauge compare` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.units import GIB, KIB, MIB, flops
from loadgauge.core.text.table import GLUE, Column, Paper, draw, heading, points, section
from loadgauge.pytorch.text.measure import scratch_note

if TYPE_CHECKING:
    from loadgauge.pytorch.compare.compare import Cause, Comparison, Difference
    from loadgauge.pytorch.device.untraced import Hidden

MOST_CAUSES = 8
LEAST = 0.005
"""Share of a difference from which a cause has a line."""
SHORT = {"peak of forward and backward": "peak fwd + bwd", "peak of the optimizer step": "peak of the step",
         "hidden from tracers": "hidden, estimated"}  # fmt: skip


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write formula, trace and measurement side by side, and what the differences are attributed to; brief: the table alone."""
    comparison: Comparison = answer.shown
    rows = [
        [
            SHORT.get(row.quantity, row.quantity),
            _number(row.formula, row.unit),
            _number(row.trace, row.unit),
            _share(row.formula, row.trace),
            _number(row.measured, row.unit),
            _share(row.trace, row.measured),
        ]
        for row in comparison.rows
    ]
    columns = [Column(""), *(Column(name, "right") for name in ("formula", "trace", "", "measured", ""))]
    ways = f"formula, trace as on {comparison.device}"
    if comparison.measured_on:
        ways += f", measured on {comparison.measured_on}"
    else:
        rows, columns = [row[:4] for row in rows], columns[:4]
    draw(target, columns, rows, title=f"{comparison.target}: {ways}; percent: against the column to the left")
    if brief:
        return
    heading(target, "Differences over 1 %, by operation" if comparison.differences else "No difference is over 1 %")
    for difference in comparison.differences:
        points(target, [_difference(difference)])
        points(target, _why(difference), mark=" " * 4)
    section(
        target,
        "Hidden from tracers: to be added on a GPU",
        [f"{_number(line.nbytes, 'bytes')}: {line.name} ({_range(line)}; {line.basis})" for line in comparison.hidden],
    )
    heading(target, "Not counted by the trace" + (" or the measurement" if comparison.measured_on == "cpu" else ""))
    points(target, comparison.not_counted)
    if comparison.real is not None and comparison.real.scratch:
        points(target, [scratch_note(comparison.real.scratch, comparison.real.scratch_ops)])


def _range(hidden: Hidden) -> str:
    where = "in the allocator" if hidden.where == "allocated" else "outside the allocator"
    if hidden.low == hidden.high:
        return where
    return f"{where}; from {_number(hidden.low, 'bytes')} to {_number(hidden.high, 'bytes')}"


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "FLOP":
        return flops(value)
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if value >= size:
            shown = value / size
            return f"{shown:,.{0 if shown >= 1000 else 1 if shown >= 100 else 2}f} {name}"
    return f"{value:,.0f} B"


def _share(first: float | None, second: float | None) -> str:
    return f"{second / first - 1:+.2%}" if first and second is not None else ""


def _difference(difference: Difference) -> str:
    first, second = difference.ways
    unit = "FLOP" if difference.quantity.startswith("FLOP") else "bytes"
    amount = f"{_number(abs(difference.amount), unit)} {'more' if difference.amount > 0 else 'less'}"
    return f"{difference.quantity}: {second} has {amount} than {first} ({difference.share:+.1%})"


def _why(difference: Difference) -> list[str]:
    unit = "FLOP" if difference.quantity.startswith("FLOP") else "bytes"
    large = [cause for cause in difference.causes if abs(cause.amount) > LEAST * abs(difference.amount)][:MOST_CAUSES]
    rest = [cause.amount for cause in difference.causes if cause not in large]
    unexplained = abs(difference.unexplained) > LEAST * abs(difference.amount)
    return [
        *(f"{_signed(cause.amount, unit)} {cause.op}{_many(cause)}" for cause in large),
        *([f"{_signed(sum(rest), unit)} in {len(rest)} more"] if rest else []),
        *([f"{_signed(difference.unexplained, unit)} not attributed to an operation"] if unexplained else []),
    ]


def _many(cause: Cause) -> str:
    """How many operations a cause sums, and where they are."""
    return (f", {cause.count} times" if cause.count > 1 else "") + (f" ({cause.where})" if cause.where else "")


def _signed(value: float, unit: str) -> str:
    text = f"{'-' if value < 0 else '+'}{_number(abs(value), unit)}"
    return f"{text:>12}".replace(" ", GLUE)
