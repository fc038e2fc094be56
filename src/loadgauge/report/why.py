"""What held the memory as text: what `loadgauge why` prints of an error, a snapshot and a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loadgauge.report.table import Column, console, draw, heading, points
from loadgauge.units import gib, in_gib
from loadgauge.verdict import needs

if TYPE_CHECKING:
    from loadgauge.advise.try_ import Tried
    from loadgauge.oom.diagnose import Findings
    from loadgauge.oom.message import OutOfMemory
    from loadgauge.oom.remedies import Retraced
    from loadgauge.oom.snapshot import Snapshot
    from loadgauge.oom.traceback import Place
    from loadgauge.resolve.setup import Setup
    from loadgauge.trace.trace import Trace

FITS = {True: "yes", False: "no", None: ""}
MOST_CAUSES, MOST_HOLDERS = 6, 12
LEAST = 0.001
"""Share of what was held from which a purpose has a line."""
SCARCE = 0.1
"""Idle share of what PyTorch holds below which little memory is lost to fragmentation."""


def print_error(error: OutOfMemory, remedy: str, found: Place | None = None) -> None:
    """Print what the text of an out-of-memory error says, where its traceback says it was, and the remedy."""
    target = console()
    target.print(f"CAUSE  {error.cause}")
    if found is not None:
        points(target, [f"WHERE  {found.phase}: {found.tensor}", f"AT     {found.frame}"], "")
        if found.own and found.own != found.frame:
            points(target, [f"FROM   {found.own}"], "")
    rows = [
        [gib(value), label] for label, value in (
            ("tried to allocate", error.tried), ("the GPU has", error.capacity), ("free", error.free),
            ("allowed to this process", error.allowed), ("allocated by PyTorch", error.allocated),
            ("of that in private pools", error.pools), ("reserved by PyTorch, not allocated", error.idle),
            ("by this process beside PyTorch", error.beside), ("by other processes", error.others or None),
        ) if value is not None
    ]  # fmt: skip
    target.print()
    draw(target, [Column("", "right"), Column("what the error says")], rows)
    target.print()
    notes = [remedy] if found is None else [found.remedy, remedy]
    if error.cause == "fragmentation" and error.allocated and error.idle is not None:
        share = error.idle / (error.allocated + error.idle)
        if share < SCARCE:
            notes.append(f"only {share:.0%} of what PyTorch holds lies idle: a little more, and the tensors do not fit")
    if error.own is not None:
        notes.append(
            f"process {error.own} is this one: beside it there is no room for what PyTorch holds (in a container a"
            " process does not know its own number)"
        )
    notes += [f"contradiction in the error: {contradiction}" for contradiction in error.contradictions]
    points(target, notes)


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
        pieces = "in pieces that are too small: fragmentation" if snapshot.idle >= snapshot.failed else "which is less"
        notes.append(f"{gib(snapshot.failed)} did not fit; idle were {gib(snapshot.idle)}, {pieces}")
    points(target, notes)


def print_changes(setup: Setup, changes: Sequence[Tried]) -> None:
    """Print the estimate of the run, and that of each change which lowers its memory."""
    target = console()
    memory = setup.estimate().memory
    card = setup.job.gpu or f"a card of {setup.job.memory}"
    heading(target, f"Estimated: {gib(memory.total)} at {memory.moment}, {memory.verdict} on {card}")
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
    rows = [[in_gib(nbytes), f"{nbytes / whole:.0%}", name] for name, nbytes in findings.parts.items()
            if nbytes >= LEAST * whole]  # fmt: skip
    draw(target, [Column("GiB", "right"), Column("", "right"), Column("what was held")], rows, title="At the peak")
    replayed = any(cause.leaves is not None for cause in findings.causes)
    if not replayed:
        heading(target, "What would free most, by what was held")
        points(
            target,
            [f"up to {gib(cause.frees)}: {cause.name}; {cause.remedy}" for cause in findings.causes[:MOST_CAUSES]],
        )
        return
    rows = [["" if cause.leaves is None else in_gib(cause.leaves), FITS[cause.fits], f"{cause.name}: {cause.remedy}"]
            for cause in findings.causes[:MOST_CAUSES]]  # fmt: skip
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
