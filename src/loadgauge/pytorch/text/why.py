"""Out-of-memory diagnoses as text: the output of `loadgauge why` for an error, a snapshot and a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loadgauge.core.base import gib, in_gib, needs
from loadgauge.core.text.table import Column, console, draw, heading, points

if TYPE_CHECKING:
    from loadgauge.core.plan.advise.try_ import Tried
    from loadgauge.pytorch.trace.result import Trace
    from loadgauge.pytorch.why.answer import Answer
    from loadgauge.pytorch.why.diagnose import Findings
    from loadgauge.pytorch.why.remedies import Retraced
    from loadgauge.pytorch.why.snapshot import Snapshot

FITS = {True: "yes", False: "no", None: ""}
MOST_CAUSES, MOST_HOLDERS = 6, 12
LEAST = 0.001
"""Share of what was held from which a purpose has a line."""


def print_error(answer: Answer) -> None:
    """Print what the text of an out-of-memory error says, where its traceback says it was, and the remedies."""
    target, error, place = console(), answer.error, answer.place
    points(target, [f"CAUSE  {error.headline}"], "")
    if place is not None:
        points(target, [f"WHERE  {place.phase}: {place.tensor}", f"AT     {place.frame}"], "")
        if place.own and place.own != place.frame:
            points(target, [f"FROM   {place.own}"], "")
    rows = [
        [gib(value), label]
        for label, value in (
            ("tried to allocate", error.tried),
            ("the GPU has", error.capacity),
            ("free", error.free),
            ("allowed to this process", error.allowed),
            ("allocated by PyTorch", error.allocated),
            ("of that in private pools", error.pools),
            ("reserved by PyTorch, not allocated", error.idle),
            ("by this process beside PyTorch", error.beside),
            ("by other processes", error.others or None),
            ("elsewhere: the context, other processes", error.elsewhere),
            *((f"{buffer.name} {buffer.shape}", buffer.nbytes) for buffer in error.buffers),
        )
        if value is not None
    ]
    target.print()
    if rows:
        draw(target, [Column("", "right"), Column("what the error says")], rows)
        target.print()
    points(target, (*answer.remedies, *answer.notes))


def print_next(file: str) -> None:
    """Print what to type to have changes estimated."""
    points(
        console(), [f"`loadgauge why {file} --model MODEL --gpu GPU --micro-batch N` estimates what would make it fit"]
    )


def print_size(tried: int, words: str) -> None:
    """Print how the size that was asked for follows from the model."""
    points(console(), [f"{gib(tried)} = {words}"])


def print_trace_causes(trace: Trace, findings: Findings, retraced: Sequence[Retraced]) -> None:
    """Print the causes that a trace shows, and its peak when traced again with other flags."""
    _print_causes(findings)
    _print_retraced(trace, retraced)


def print_snapshot(snapshot: Snapshot, findings: Findings) -> None:
    """Print the causes that a snapshot shows, and the memory at its peak by line of the program."""
    _print_causes(findings)
    target = console()
    target.print(f"\nPEAK  {gib(snapshot.peak)} allocated at once, over {snapshot.events:,} events")
    merged: dict[str, tuple[int, int]] = {}
    for holder in snapshot.holders:
        nbytes, blocks = merged.get(holder.where, (0, 0))
        merged[holder.where] = (nbytes + holder.nbytes, blocks + holder.blocks)
    ordered = sorted(((nbytes, blocks, where) for where, (nbytes, blocks) in merged.items()), key=lambda row: -row[0])
    rest = ordered[MOST_HOLDERS:]
    lines = ordered[:MOST_HOLDERS]
    if rest:
        lines.append((sum(row[0] for row in rest), sum(row[1] for row in rest), f"{len(rest)} more"))
    rows = [
        [in_gib(nbytes), f"{nbytes / max(1, snapshot.peak):.0%}", f"{blocks:,}", where]
        for nbytes, blocks, where in lines
    ]
    columns = [Column("GiB", "right"), Column("", "right"), Column("blocks", "right"), Column("held by", wrap=True)]
    draw(target, columns, rows, title="What was held at the peak, by line (--json: by stack)")
    target.print()
    share = snapshot.idle / snapshot.reserved if snapshot.reserved else 0
    notes = [
        f"at the end: {gib(snapshot.allocated)} allocated of {gib(snapshot.reserved)} reserved; {share:.0%} lies idle, in"
        f" pieces of up to {gib(snapshot.largest_idle)}"
    ]
    if snapshot.failed:
        pieces = "in pieces that are too small" if snapshot.idle >= snapshot.failed else "which is less"
        notes.append(f"{gib(snapshot.failed)} did not fit; idle were {gib(snapshot.idle)}, {pieces}")
    points(target, notes)


def print_changes(estimated: str, changes: Sequence[Tried]) -> None:
    """Print the estimate of the run in words, and that of each change which lowers its memory."""
    target = console()
    heading(target, f"Estimated: {estimated}")
    points(
        target,
        (
            f"{change.flags}: {gib(change.result.memory.total)}, {change.result.memory.verdict} ({change.note})"
            for change in changes
        ),
    )
    if not changes:
        points(target, ["no change that was tried makes it smaller"])


def describe_change(change: Tried) -> dict[str, Any]:
    """Return a change and its estimated memory [bytes], as `loadgauge why --json` has it."""
    return {"flags": change.flags, "note": change.note, "memory": needs(change.result.memory)}


def _print_causes(findings: Findings) -> None:
    target = console()
    target.print(f"CAUSE  {findings.causes[0].name}" if findings.causes else "CAUSE  nothing stands out")
    points(target, [f"{cause.evidence}" for cause in findings.causes[:1]])
    whole = max(1, sum(findings.parts.values()))
    rows = [
        [in_gib(nbytes), f"{nbytes / whole:.0%}", name]
        for name, nbytes in findings.parts.items()
        if nbytes >= LEAST * whole
    ]
    draw(target, [Column("GiB", "right"), Column("", "right"), Column("what was held")], rows, title="At the peak")
    replayed = any(cause.leaves is not None for cause in findings.causes)
    if not replayed:
        heading(target, "What would free most, by what was held")
        points(
            target,
            [f"up to {gib(cause.frees)}: {cause.name}; {cause.remedy}" for cause in findings.causes[:MOST_CAUSES]],
        )
        return
    rows = [
        ["" if cause.leaves is None else in_gib(cause.leaves), FITS[cause.fits], f"{cause.name}: {cause.remedy}"]
        for cause in findings.causes[:MOST_CAUSES]
    ]
    columns = [Column("peak, GiB", "right"), Column("fits"), Column("against", wrap=True)]
    if all(cause.fits is None for cause in findings.causes):  # nothing failed
        rows, columns = [[row[0], row[2]] for row in rows], [columns[0], columns[2]]
    draw(target, columns, rows, title="The same events with a remedy, replayed on a simulated allocator")


def _print_retraced(trace: Trace, retraced: Sequence[Retraced]) -> None:
    if not retraced:
        return
    rows = [["(as it was)", in_gib(trace.allocated), "", ""]]
    rows += [
        [change.flags, in_gib(change.peak), f"{change.peak / trace.allocated - 1:+.0%}", change.why]
        for change in retraced
    ]
    columns = [Column("flags", wrap=True), Column("peak, GiB", "right"), Column("", "right"), Column("", wrap=True)]
    draw(console(), columns, rows, title="Traced again, with other flags")
