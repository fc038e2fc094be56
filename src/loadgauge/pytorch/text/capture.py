"""A captured training step as text: what `loadgauge capture` prints."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.units import GIB, KIB, MIB, flops
from loadgauge.core.text.table import Column, Paper, bar, draw, points, section

if TYPE_CHECKING:
    from loadgauge.pytorch.capture.answer import Answer as Captured

LONGEST = 400
"""Characters of a formula or a list that are shown; `--json` has all."""


def write(wrapped: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write what a capture says; brief: the peak, and what is alive at it."""
    answer: Captured = wrapped.shown
    at = ", ".join(f"{name} = {value:,}" for name, value in answer.sizes.items())
    needed = answer.needed
    if needed is None:
        points(target, [f"PEAK  {shown(answer.allocated)} in tensors at {at}"], "")
    else:
        from loadgauge.core.text.verdict import verdict_words  # brings much with it

        points(target, [f"{verdict_words(needed)} ({needed.gpu}); {shown(answer.allocated)} in tensors at {at}"], "")
    points(target, [f"{answer.parameters:,} parameters; {answer.operations:,} operations in a step"], "")
    if answer.subject:
        target.print(f"Run on {answer.subject}")
    if answer.pictures:
        total = sum(tokens for _, tokens in answer.pictures)
        each = "; ".join(f"{size}: {tokens:,} tokens" for size, tokens in answer.pictures)
        target.print(f"Pictures of a sequence: {each}; in all {total:,} of its {answer.sizes['s']:,} tokens")
    if answer.sound:
        seconds, tokens = answer.sound
        target.print(f"Sound of a sequence: {seconds:g} s, {tokens:,} of its {answer.sizes['s']:,} tokens")
    unit = _unit(answer.peak)
    alive(target, answer.at_peak, *unit)
    if brief:
        return
    by_phase(target, answer.phases, *unit)
    kept, work = answer.kept, answer.flops
    formulas = (
        ["", ""] if answer.numbers_only else [f" = {_short(kept.formula)} bytes", f" = {_short(work.formula)} FLOP"]
    )
    section(
        target,
        "Formulas" if not answer.numbers_only else "Numbers, at these sizes alone",
        [
            f"kept for backward: {shown(kept.value)}{formulas[0]}",
            f"work of a step: {flops(work.value)}{formulas[1]}",
            *([f"why no formula: {answer.numbers_only}"] if answer.numbers_only else []),
            f"holds where {_short(', '.join(answer.holds))}",
        ],
    )
    section(
        target,
        "The program reads values of tensors here; it got 1, and what hangs on it is not known",
        [
            *(line for line in answer.values if not any(branch.startswith(f"{line} ") for branch in answer.branches)),
            *(f"{line}: one side was taken" for line in answer.branches if answer.values),
        ],
    )
    section(
        target,
        "Assumed, and not counted",
        [*_together(answer.assumed), *(f"not counted: {line}" for line in answer.not_counted)],
    )
    road = "a capture kept on disk, nothing was run" if answer.cached else "captured from the code itself"
    target.print(f"\n{road} (PyTorch {answer.torch}); {answer.seconds:.1f} s.")


def alive(target: Paper, parts: Mapping[str, float], letters: str = "GiB", unit: int = GIB) -> None:
    """Write what is alive at a peak [bytes]. letters, unit: in what"""
    total = sum(parts.values())
    draw(
        target,
        [Column("at the peak"), Column(letters, "right"), Column("", "right"), Column("", style="cyan")],
        [
            [name, f"{nbytes / unit:,.2f}", f"{nbytes / total:.0%}", bar(target, nbytes / total)]
            for name, nbytes in parts.items()
        ],
        title="What is alive",
    )


def by_phase(target: Paper, phases: Mapping[str, float], letters: str = "GiB", unit: int = GIB) -> None:
    """Write the most that is alive in each phase [bytes]. letters, unit: in what"""
    draw(
        target,
        [Column("phase"), Column(f"highest, {letters}", "right")],
        [[name or "preparation", f"{nbytes / unit:,.2f}"] for name, nbytes in phases.items()],
        title="By phase",
    )


def _together(assumed: Sequence[str]) -> list[str]:
    """Return what is said of several lines of a program once, with all of them: as much of each path as `--rows` needs.

    >>> _together(["by the user", "a/b/boxes.py:3: all rows", "a/b/heads.py:7: all rows"])
    ['by the user', 'all rows: b/boxes.py:3, b/heads.py:7']
    """
    lines: dict[str, list[str]] = {}
    for line in assumed:
        match = re.match(r"(\S.*?\.py:\d+): (.*)", line)
        lines.setdefault(match[2] if match else line, []).extend([match[1]] if match else [])
    return [
        assumption
        if not places
        else f"{places[0]}: {assumption}"
        if len(places) == 1
        else f"{assumption}: {', '.join('/'.join(path.split('/')[-2:]) for path in places)}"
        for assumption, places in lines.items()
    ]


def shown(nbytes: float) -> str:
    """Bytes in a unit that shows them.

    >>> shown(3 * 2**30), shown(70_000)
    ('3.00 GiB', '68.36 KiB')
    """
    letters, unit = _unit(nbytes)
    return f"{nbytes / unit:,.2f} {letters}"


def _unit(nbytes: float) -> tuple[str, int]:
    units = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    return next(((letters, unit) for letters, unit in units if nbytes >= unit / 4), ("bytes", 1))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ... (--json has all of it)"
