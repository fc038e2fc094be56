"""Out-of-memory diagnoses as text: the output of `loadgauge why` for an error, a snapshot and a trace."""

from loadgauge.core.base import gib, in_gib, sums
from loadgauge.core.text.table import Column, Paper, draw, heading, points
from loadgauge.pytorch.why.answer import Diagnosis, OfError, estimated
from loadgauge.pytorch.why.causes import NEEDS

FITS = {True: "yes", False: "no", None: ""}
MOST_CAUSES, MOST_HOLDERS = 6, 12
LEAST = 0.001
"""Share of what was held from which a purpose has a line."""


def write_error(answer: OfError, target: Paper, *, brief: bool = False) -> None:
    """Write what the text of an out-of-memory error says, where its traceback says it was, and the remedies; brief: no figures"""
    error, place = answer.error, answer.place
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
    if not brief:
        target.print()
    if rows and not brief:
        draw(target, [Column("", "right"), Column("what the error says")], rows)
        target.print()
    named = answer.setup is not None and error.cause == NEEDS
    points(target, (*answer.remedies, *answer.notes)[: int(not named) if brief else None])
    if answer.setup is None:
        command = (
            f"`loadgauge why {answer.file} --model MODEL --gpu GPU --micro-batch N` estimates what would make it fit"
        )
        points(target, [command] if error.cause == NEEDS else [])
    elif size := answer.same_size(answer.setup):
        points(target, [f"{gib(error.tried or 0)} = {size}"])
    _changes(answer, target, brief)


def write_trace(answer: Diagnosis, target: Paper, *, brief: bool = False) -> None:
    """Write the causes that a trace shows, and its peak when traced again with other flags; brief: the causes alone."""
    trace, _, retraced = answer.shown
    _causes(answer, target, brief)
    if retraced and not brief:
        again = [
            [change.flags, in_gib(change.peak), f"{change.peak / trace.allocated - 1:+.0%}", change.why]
            for change in retraced
        ]
        draw(
            target,
            [Column("flags", wrap=True), Column("peak, GiB", "right"), Column("", "right"), Column("", wrap=True)],
            [["(as it was)", in_gib(trace.allocated), "", ""], *again],
            title="Traced again, with other flags",
        )
    _changes(answer, target)


def write_snapshot(answer: Diagnosis, target: Paper, *, brief: bool = False) -> None:
    """Write the causes that a snapshot shows, and the memory at its peak by line of the program; brief: the causes alone."""
    snapshot, _ = answer.shown
    _causes(answer, target, brief)
    target.print(f"\nPEAK  {gib(snapshot.peak)} allocated at once, over {snapshot.events:,} events")
    if brief:
        _changes(answer, target)
        return
    held = sums((holder.where, holder.nbytes) for holder in snapshot.holders)
    blocks = sums((holder.where, holder.blocks) for holder in snapshot.holders)
    ordered = sorted(((nbytes, blocks[where], where) for where, nbytes in held.items()), key=lambda row: -row[0])
    rest = ordered[MOST_HOLDERS:]
    more = (sum(row[0] for row in rest), sum(row[1] for row in rest), f"{len(rest)} more")
    draw(
        target,
        [Column("GiB", "right"), Column("", "right"), Column("blocks", "right"), Column("held by", wrap=True)],
        [
            [in_gib(nbytes), f"{nbytes / max(1, snapshot.peak):.0%}", f"{count:,}", where]
            for nbytes, count, where in [*ordered[:MOST_HOLDERS], *([more] if rest else [])]
        ],
        title="What was held at the peak, by line (--json: by stack)",
    )
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
    _changes(answer, target)


def _changes(answer: Diagnosis, target: Paper, brief: bool = False) -> None:
    """Write the estimate of the run in words, and that of each change which lowers its memory, where a run is named."""
    if answer.setup is None:
        return
    if brief:
        points(target, [f"Estimated: {estimated(answer.setup)}"], "")
    else:
        heading(target, f"Estimated: {estimated(answer.setup)}")
    tried = [
        f"{flags}: {gib(change.result.memory.total)}, {change.result.memory.verdict} ({change.note})"
        for flags, change in answer.alternatives()
    ]
    points(target, tried[: 1 if brief else None] or ["no change that was tried makes it smaller"])


def _causes(answer: Diagnosis, target: Paper, brief: bool) -> None:
    findings = answer.shown[1]
    points(target, [f"CAUSE  {answer.verdict}"], "")
    points(target, [f"{cause.evidence}" for cause in findings.causes[:1]])
    whole = max(1, sum(findings.parts.values()))
    rows = [
        [in_gib(nbytes), f"{nbytes / whole:.0%}", name]
        for name, nbytes in findings.parts.items()
        if nbytes >= LEAST * whole
    ]
    if not brief:
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
