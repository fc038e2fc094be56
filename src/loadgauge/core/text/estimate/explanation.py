"""The plain text of an explanation of one part of the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgauge.core.base.algebra import Size
from loadgauge.core.base.units import gib, in_gib
from loadgauge.core.estimate.explain import Explanation, Formula, Kept
from loadgauge.core.text.table import Column, console, draw, heading, points

if TYPE_CHECKING:
    from rich.console import Console


def show(explanation: Explanation) -> None:
    """Print an explanation: the total, the formula, the sum of the steps, the tensors, the sources."""
    from rich.text import Text

    target = console()
    target.print(Text(f"{explanation.part}: {gib(explanation.total)} = {whole(explanation.total)} bytes", style="bold"))
    points(
        target,
        [f"On the worst rank (stage {explanation.stage}) {_when(explanation)} Basis: {explanation.basis}."],
        mark="",
    )
    points(target, [f"Rule: {explanation.rule}."], mark="")
    if not explanation.steps:
        points(target, ["It is empty at this moment."], mark="")
    for formula in _once(explanation.formulas):
        _formula(target, formula)
    if explanation.steps:
        rows = [[step.what, whole(step.nbytes), in_gib(step.nbytes, 3)] for step in explanation.steps]
        rows.append(["total", whole(explanation.total), in_gib(explanation.total, 3)])
        columns = [Column("what", wrap=True), Column("bytes", "right"), Column("GiB", "right")]
        draw(target, columns, rows, "How it adds up", [len(rows) - 1])
    _tensors(target, explanation.tensors)
    for title, lines in (("Notes", explanation.notes), ("Sources", explanation.sources)):
        if lines:
            heading(target, title)
            points(target, lines)


def _when(explanation: Explanation) -> str:
    """Return the moment explained, with the peak and the moment at which the part is largest."""
    peak, largest = explanation.moment == explanation.peak, explanation.total == explanation.at_largest
    marks = [*(["the peak of the rank"] if peak else []), *(["where this part is largest"] if largest else [])]
    lines = [f"during {explanation.moment}" + (f" ({' and '.join(marks)})." if marks else ".")]
    if not peak:
        lines.append(
            f"At the peak of the rank, during {explanation.peak}, it is {gib(explanation.at_peak)} (--at peak)."
        )
    if not largest:
        lines.append(f"It is largest during {explanation.largest}: {gib(explanation.at_largest)} (--at largest).")
    return " ".join(lines)


def whole(value: Size) -> str:
    """Format a count with thousands separators; whole floats print as integers.

    >>> whole(22031663104), whole(2.5)
    ('22,031,663,104', '2.5')
    """
    return f"{value:,}" if isinstance(value, int) or value != round(value) else f"{round(value):,}"


def _once(formulas: tuple[Formula, ...]) -> list[Formula]:
    """The formulas, each once."""
    return list(
        {(formula.letters, formula.numbers, formula.nbytes): formula for formula in reversed(formulas)}.values()
    )[::-1]


def _formula(target: Console, formula: Formula) -> None:
    heading(target, formula.what[:1].upper() + formula.what[1:])
    if not formula.letters:
        why = "a size does not divide evenly, so no formula with letters holds"
        points(target, [f"{whole(formula.nbytes)} bytes ({why})"], mark="  ")
        return
    # Formulas are never broken into lines: they are there to be copied.
    for line in (formula.letters, f"= {formula.numbers}", f"= {whole(formula.nbytes)} bytes"):
        target.print(f"  {line}", soft_wrap=True)
    points(
        target,
        (f"{name} = {whole(value)}: {meaning}" for name, (meaning, value) in formula.legend.items()),
        mark="    ",
    )


def _tensors(target: Console, tensors: tuple[Kept, ...]) -> None:
    for layer in dict.fromkeys(tensor.layer for tensor in tensors):
        mine = [tensor for tensor in tensors if tensor.layer == layer]
        rows = [[kept.name, whole(kept.numel), whole(kept.nbytes), ", ".join(kept.by)] for kept in mine]
        rows.append(["together", "", whole(sum(kept.nbytes for kept in mine)), ""])
        columns = [
            Column("tensor"),
            Column("elements", "right"),
            Column("bytes", "right"),
            Column("kept by", wrap=True),
        ]
        title = f"Tensors that one {layer} keeps" if layer.startswith("layer") else f"Tensors that the {layer} keeps"
        draw(target, columns, rows, title, [len(rows) - 1])
