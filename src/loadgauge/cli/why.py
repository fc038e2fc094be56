"""`loadgauge why`: what held the memory when it ran out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from loadgauge.cli.options import run_options
from loadgauge.cli.param_types import Whole
from loadgauge.errors import ConfigError
from loadgauge.oom.files import LARGEST_TEXT, content_of
from loadgauge.optional_deps import needs_torch
from loadgauge.units import gib, in_gib

if TYPE_CHECKING:
    from loadgauge.advise.try_ import Tried
    from loadgauge.oom.diagnose import Findings
    from loadgauge.oom.message import OutOfMemory
    from loadgauge.oom.remedies import Retraced
    from loadgauge.oom.snapshot import Snapshot
    from loadgauge.resolve.setup import Setup
    from loadgauge.trace.trace import Trace

FITS = {True: "yes", False: "no", None: ""}
MOST_CAUSES, MOST_HOLDERS = 6, 12
LEAST = 0.001
"""Share of what was held from which a purpose has a line."""
SCARCE = 0.1


@click.command("why")
@click.argument("file")
@click.option("--gpu-index", default=0, show_default=True, type=Whole(0, 10**6), help="Which device of a snapshot.")
@click.option(
    "--model", metavar="MODEL", help="What was trained: changes are then estimated too, with the flags of the run."
)
@run_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document, in bytes.")
def command(file: str, gpu_index: int, model: str | None, as_json: bool, **flags: Any) -> None:
    """What held the memory, and what would free it? FILE is the text of a CUDA out-of-memory error ("-": from standard
    input, up to 256 MB), a snapshot that `torch.cuda.memory._dump_snapshot` has written, or what `loadgauge trace --json` says.

    A snapshot is a pickle; it is read without running anything in it. With --model and the flags of `estimate` that
    describe the run, every change that would make it fit is estimated.

    \b
    loadgauge why error.txt
    loadgauge why snapshot.pickle --model llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3 --seq-len 8192
    """
    given = _run(model, flags)
    document = _found(file, gpu_index, as_json)
    changes = [] if given is None else _changes(given)
    if as_json:
        from loadgauge.report.table import document as printed

        if given is not None:
            document["changes"] = [
                {
                    "flags": change.flags,
                    "note": change.note,
                    "total": change.result.memory.total,
                    "fits": change.result.memory.fits,
                }
                for change in changes
            ]
        printed(document)
    elif given is not None:
        _advise(given, changes)


def _run(model: str | None, flags: dict[str, Any]) -> Setup | None:
    """The run that the flags describe; None where no model is named."""
    if model is None:
        said = [name for name, value in flags.items() if value not in (None, False)]
        if said:
            raise click.UsageError(f"--{said[0].replace('_', '-')} describes a run, which needs --model")
        return None
    from loadgauge.resolve.resolve import resolve_job
    from loadgauge.spec.job import Job

    if flags["gpu"] is None:
        raise click.UsageError("--model needs --gpu, to say what would fit")
    return resolve_job(Job(model=model, **flags))


def _changes(given: Setup) -> list[Tried]:
    from loadgauge.advise.advice import advice

    return advice(given)


def _advise(given: Setup, changes: list[Tried]) -> None:
    from loadgauge.report.table import console, heading, points

    target = console()
    result = given.estimate()
    memory = result.memory
    heading(target, f"Estimated: {gib(memory.total)} at {memory.moment}, {memory.verdict} on {given.job.gpu}")
    points(
        target,
        (
            f"{change.flags}: {gib(change.result.memory.total)}, {change.result.memory.verdict} ({change.note})"
            for change in changes
        ),
    )
    if not changes:
        points(target, ["no change that was tried makes it smaller"])


def _found(file: str, gpu_index: int, as_json: bool) -> dict[str, Any]:
    """What a file says, printed; as a document where JSON is wanted."""
    if file == "-":
        return _text(_typed(), as_json)
    path = Path(file)
    if _begins(path) == PICKLE:
        from loadgauge.oom.diagnose import of_file

        return _snapshot(*of_file(path, gpu_index), as_json)
    text = content_of(path, LARGEST_TEXT).decode("utf-8", errors="replace")
    if text.startswith("{") and '"at_peak"' in text:
        return _trace(path, text, as_json)
    return _text(text, as_json)


PICKLE = b"\x80"
"""The byte that a snapshot begins with."""


def _begins(path: Path) -> bytes:
    """The first byte of a regular file. A pipe or a device is not opened."""
    if not path.is_file():
        content_of(path, 0)  # says what it is instead
    with path.open("rb") as opened:
        return opened.read(1)


def _typed() -> str:
    """What standard input says, up to the limit."""
    text = sys.stdin.read(LARGEST_TEXT + 1)
    if len(text) > LARGEST_TEXT:
        raise ConfigError(f"is larger than {LARGEST_TEXT / 1e6:,.0f} MB", file="-")
    return text


def _trace(path: Path, text: str, as_json: bool) -> dict[str, Any]:
    needs_torch("why")
    from loadgauge.oom.diagnose import of_trace
    from loadgauge.oom.remedies import retrace
    from loadgauge.trace.trace import Trace

    try:
        trace = msgspec.json.decode(text, type=Trace)
    except msgspec.DecodeError as error:
        raise ConfigError(f"is no trace: {error}", file=str(path)) from None
    _check(trace, path)
    findings = of_trace(trace)
    again = retrace(trace)
    if not as_json:
        _causes(findings)
        _again(trace, again)
    document = {"causes": msgspec.to_builtins(findings.causes), "parts": findings.parts, "peak": trace.peak.total}
    return {**document, "retraced": msgspec.to_builtins(again)}


def _check(trace: Trace, path: Path) -> None:
    """Raises ConfigError for bytes that cannot be."""
    sizes = [trace.allocated, trace.peak.total, trace.saved_nbytes, *trace.peak.categories.values()]
    sizes += [piece.nbytes for piece in trace.at_peak]
    wrong = next((size for size in sizes if size < 0), None)
    if wrong is not None:
        raise ConfigError(f"is no trace: {wrong:,} bytes", file=str(path))
    if not trace.allocated:
        raise ConfigError("is a trace in which nothing was allocated", file=str(path))


def _again(trace: Trace, again: Sequence[Retraced]) -> None:
    from loadgauge.report.table import Column, console, draw

    if not again:
        return
    rows = [["(as it was)", in_gib(trace.allocated), "", ""]]
    rows += [[one.flags, in_gib(one.peak), f"{one.peak / trace.allocated - 1:+.0%}", one.why] for one in again]
    columns = [Column("flags", wrap=True), Column("peak, GiB", "right"), Column("", "right"), Column("", wrap=True)]
    draw(console(), columns, rows, title="Traced again, with other flags")


def _causes(findings: Findings) -> None:
    from loadgauge.report.table import Column, console, draw, heading, points

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


def _text(text: str, as_json: bool) -> dict[str, Any]:
    from loadgauge.oom.message import REMEDIES, parse
    from loadgauge.report.table import Column, console, draw, points

    error: OutOfMemory = parse(text)
    document = {**msgspec.structs.asdict(error), "cause": error.cause}
    if as_json:
        return document
    target = console()
    target.print(f"CAUSE  {error.cause}")
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
    notes = [REMEDIES[error.cause]]
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
    return document


def _snapshot(snapshot: Snapshot, why: Findings, as_json: bool) -> dict[str, Any]:
    from loadgauge.report.table import Column, console, draw, points

    document = {**msgspec.to_builtins(snapshot), "causes": msgspec.to_builtins(why.causes), "parts": why.parts}
    if as_json:
        return document
    _causes(why)
    target = console()
    target.print(f"\nPEAK  {gib(snapshot.peak)} allocated at once, over {snapshot.events:,} events")
    merged: dict[str, list[int]] = {}
    for holder in snapshot.holders:
        nbytes, blocks = merged.get(holder.where, [0, 0])
        merged[holder.where] = [nbytes + holder.nbytes, blocks + holder.blocks]
    ordered = sorted(merged.items(), key=lambda item: -item[1][0])
    rows = [
        [in_gib(nbytes), f"{nbytes / max(1, snapshot.peak):.0%}", f"{blocks:,}", where]
        for where, (nbytes, blocks) in ordered[:MOST_HOLDERS]
    ]
    rest = ordered[MOST_HOLDERS:]
    if rest:
        nbytes = sum(size for _, (size, _) in rest)
        blocks = sum(many for _, (_, many) in rest)
        rows.append([in_gib(nbytes), f"{nbytes / max(1, snapshot.peak):.0%}", f"{blocks:,}", f"{len(rest)} more"])
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
    return document
