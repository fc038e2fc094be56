"""Why a part of the memory is as large as it is, as a reason: the explanation of `core/estimate/explain.py` in the shape of all."""

from loadgauge.core.answers.why.reason import Line, Reason, Rows
from loadgauge.core.base.units import gib, in_gib
from loadgauge.core.estimate.explain import Explanation, Formula
from loadgauge.core.estimate.result import Estimate, When

UNEVEN = "a size does not divide evenly, so no formula with letters holds"


def memory_reason(explained: Explanation) -> Reason:
    """Return the reason of a part of the memory [bytes].

    >>> from loadgauge import estimate
    >>> memory_reason(estimate("gpt2", seq_len=1024).explain("weights")).topic
    'weights'
    """
    steps = [(step.what, float(step.nbytes), in_gib(step.nbytes, 3)) for step in explained.steps]
    tables = []
    if steps:
        steps.append(("total", float(explained.total), in_gib(explained.total, 3)))
        tables.append(Rows("How it adds up", ("what", "bytes", "GiB"), tuple(steps), summed=True))
    for layer in dict.fromkeys(tensor.layer for tensor in explained.tensors):
        mine = [tensor for tensor in explained.tensors if tensor.layer == layer]
        rows: list[tuple[str | float, ...]] = [
            (kept.name, float(kept.numel), float(kept.nbytes), ", ".join(kept.by)) for kept in mine
        ]
        rows.append(("together", "", float(sum(kept.nbytes for kept in mine)), ""))
        which = f"one {layer} keeps" if layer.startswith("layer") else f"the {layer} keeps"
        tables.append(
            Rows(f"Tensors that {which}", ("tensor", "elements", "bytes", "kept by"), tuple(rows), summed=True)
        )
    formulas = {(each.letters, each.numbers, each.nbytes): each for each in reversed(explained.formulas)}
    return Reason(
        topic=explained.part,
        what="",
        value=float(explained.total),
        unit="byte",
        where=f"On the worst rank (stage {explained.stage}) {_when(explained)}",
        basis=explained.basis,
        rule=explained.rule,
        lines=tuple(memory_line(formula) for formula in reversed(formulas.values())),
        tables=tuple(tables),
        notes=explained.notes,
        sources=explained.sources,
    )


def moment_reason(result: Estimate, at: When) -> Reason:
    """Return what the worst rank holds at a moment of the step, part by part [bytes].

    >>> from loadgauge import estimate
    >>> reason = moment_reason(estimate("gpt2", seq_len=1024), "step")
    >>> reason.value == sum(row[1] for row in reason.rows[:-1])
    True
    """
    memory = result.memory
    moment, peak = memory.moments[memory.index(None, at)], memory.moments[memory.peak]
    rows = [(part, float(nbytes), in_gib(nbytes, 3)) for part, nbytes in moment.parts.items() if nbytes]
    more = (
        "" if moment is peak else f" At the peak of the rank, during {peak.name}, it is {gib(peak.total)} (--at peak)."
    )
    return Reason(
        topic="memory",
        what="",
        value=float(moment.total),
        unit="byte",
        where=f"On the worst rank (stage {memory.rank.stage}) during {moment.name}.{more}",
        basis="derived",
        rule="the sum of what each part holds at that moment",
        columns=("what", "bytes", "GiB"),
        rows=(*rows, ("total", float(moment.total), in_gib(moment.total, 3))),
        notes=(f"--explain {max(rows, key=lambda row: row[1])[0]} --at {at}: how a part adds up",),
    )


def memory_line(formula: Formula, unit: str = "byte") -> Line:
    """Return a formula of the estimate as a line of a reason."""
    return Line(
        what=formula.what if formula.letters else f"{formula.what} ({UNEVEN})",
        letters=formula.letters,
        numbers=formula.numbers,
        value=float(formula.nbytes),
        unit=unit,
        legend={name: (meaning, float(number)) for name, (meaning, number) in formula.legend.items()},
    )


def _when(explained: Explanation) -> str:
    """The moment explained, with the peak and the moment at which the part is largest."""
    peak, largest = explained.moment == explained.peak, explained.total == explained.at_largest
    marks = [*(["the peak of the rank"] if peak else []), *(["where this part is largest"] if largest else [])]
    lines = [f"during {explained.moment}" + (f" ({' and '.join(marks)})." if marks else ".")]
    if not explained.steps:
        lines.append("It is empty at this moment.")
    if not peak:
        lines.append(f"At the peak of the rank, during {explained.peak}, it is {gib(explained.at_peak)} (--at peak).")
    if not largest:
        lines.append(f"It is largest during {explained.largest}: {gib(explained.at_largest)} (--at largest).")
    return " ".join(lines)
