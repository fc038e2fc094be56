"""`loadgauge why`: what held the memory when it ran out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from loadgauge.errors import ConfigError
from loadgauge.show.extras import needs_torch
from loadgauge.show.flags import run_options
from loadgauge.units import GIB, gib

if TYPE_CHECKING:
    from loadgauge.measure.causes import Findings
    from loadgauge.measure.oom import OutOfMemory
    from loadgauge.measure.snapshot import Snapshot
    from loadgauge.show.advice import Change
    from loadgauge.show.request import Job

WORDS = {
    "fragmentation": "PyTorch holds enough memory, but in pieces: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "other processes": "other processes hold memory on this GPU: end them, or use another GPU",
    "memory beside the allocator": "much lies beside PyTorch's allocator: NCCL buffers, another library, a second context",
    "the program needs more than there is": (
        "the tensors themselves do not fit: `loadgauge trace` shows which ones, and what would shrink them; a snapshot"
        " (torch.cuda.memory._record_memory_history, _dump_snapshot) names the lines that hold them"
    ),
}


@click.command("why")
@click.argument("file")
@click.option("--gpu-index", default=0, show_default=True, type=int, help="Which device of a snapshot.")
@click.option(
    "--model", metavar="MODEL", help="What was trained: changes are then estimated anew, with the flags of the run."
)
@run_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document, in bytes.")
def command(file: str, gpu_index: int, model: str | None, as_json: bool, **flags: Any) -> None:
    """What held the memory, and what would free it? FILE is the text of a CUDA out-of-memory error ("-": from standard
    input), a snapshot that `torch.cuda.memory._dump_snapshot` has written, or what `loadgauge trace --json` says.

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
        from loadgauge.show.table import document as printed

        if given is not None:
            document["changes"] = [
                {"flags": one.flags, "note": one.note, "total": one.result.memory.total, "fits": one.result.memory.fits}
                for one in changes
            ]
        printed(document)
    elif given is not None:
        _advise(given, changes)


def _run(model: str | None, flags: dict[str, Any]) -> Job | None:
    """The run that the flags describe; None where no model is named."""
    if model is None:
        said = [name for name, value in flags.items() if value not in (None, False)]
        if said:
            raise click.UsageError(f"--{said[0].replace('_', '-')} describes a run, which needs --model")
        return None
    from loadgauge.show.flags import Request
    from loadgauge.show.request import job

    if flags["gpu"] is None:
        raise click.UsageError("--model needs --gpu, to say what would fit")
    return job(Request(model=model, **flags))


def _changes(given: Job) -> list[Change]:
    from loadgauge.show.advice import advice

    return advice(given)


def _advise(given: Job, changes: list[Change]) -> None:
    from loadgauge.show.table import console, heading, points

    target = console()
    result = given.estimate()
    memory = result.memory
    heading(target, f"Estimated: {gib(memory.total)} at {memory.moment}, {memory.verdict} on {given.request.gpu}")
    points(
        target,
        (f"{one.flags}: {gib(one.result.memory.total)}, {one.result.memory.verdict} ({one.note})" for one in changes),
    )
    if not changes:
        points(target, ["no change that was tried makes it smaller"])


def _found(file: str, gpu_index: int, as_json: bool) -> dict[str, Any]:
    """What a file says, printed; as a document where JSON is wanted."""
    if file == "-":
        return _text(sys.stdin.read(), as_json)
    path = Path(file)
    with path.open("rb") as opened:
        first = opened.read(1)
    if first == b"\x80":
        from loadgauge.measure.causes import of_file

        return _snapshot(*of_file(path, gpu_index), as_json)
    text = path.read_text(encoding="utf-8", errors="replace")
    if first == b"{" and '"at_peak"' in text:
        return _trace(path, text, as_json)
    return _text(text, as_json)


def _trace(path: Path, text: str, as_json: bool) -> dict[str, Any]:
    needs_torch("why")
    from loadgauge.measure.causes import of_trace
    from loadgauge.measure.trace import Trace

    try:
        trace = msgspec.json.decode(text, type=Trace)
    except msgspec.DecodeError as error:
        raise ConfigError(f"is no trace: {error}", file=str(path)) from None
    found = of_trace(trace)
    if not as_json:
        _causes(found)
    return {"causes": msgspec.to_builtins(found.causes), "parts": found.parts, "peak": trace.peak.total}


def _causes(found: Findings) -> None:
    from loadgauge.show.table import Column, console, draw, heading, points

    target = console()
    target.print(f"CAUSE  {found.causes[0].name}" if found.causes else "CAUSE  nothing stands out")
    whole = max(1, sum(found.parts.values()))
    rows = [[f"{nbytes / GIB:,.3f}", f"{nbytes / whole:.0%}", name] for name, nbytes in found.parts.items()]
    draw(target, [Column("GiB", "right"), Column("", "right"), Column("what was held")], rows)
    heading(target, "What would free most, by what was held")
    points(
        target, [f"{one.name}: {one.evidence}; {one.remedy} (frees up to {gib(one.frees)})" for one in found.causes[:5]]
    )


def _text(text: str, as_json: bool) -> dict[str, Any]:
    from loadgauge.measure.oom import parse
    from loadgauge.show.table import Column, console, draw, points

    found: OutOfMemory = parse(text)
    document = {**msgspec.structs.asdict(found), "cause": found.cause}
    if as_json:
        return document
    target = console()
    target.print(f"CAUSE  {found.cause}")
    rows = [
        ["tried to allocate", gib(found.tried)],
        *([label, gib(value)] for label, value in (
            ("of the GPU's", found.capacity), ("free", found.free), ("allocated by PyTorch", found.allocated),
            ("reserved by PyTorch, not allocated", found.idle), ("by this process beside PyTorch", found.beside),
            ("by other processes", found.others),
        ) if value is not None),
    ]  # fmt: skip
    draw(target, [Column(""), Column("", "right")], rows)
    target.print()
    points(target, [WORDS[found.cause]])
    return document


def _snapshot(found: Snapshot, why: Findings, as_json: bool) -> dict[str, Any]:
    from loadgauge.show.table import Column, console, draw, points

    document = {**msgspec.to_builtins(found), "causes": msgspec.to_builtins(why.causes), "parts": why.parts}
    if as_json:
        return document
    _causes(why)
    target = console()
    target.print(f"\nPEAK  {gib(found.peak)} allocated at once, over {found.events:,} events")
    rows: list[list[Any]] = [
        [f"{one.nbytes / GIB:,.3f}", f"{one.nbytes / max(1, found.peak):.0%}", f"{one.blocks:,}", one.where]
        for one in found.holders[:15]
    ]
    columns = [Column("GiB", "right"), Column("", "right"), Column("blocks", "right"), Column("held by", wrap=True)]
    draw(target, columns, rows, title="What was held at the peak")
    target.print()
    share = found.idle / found.reserved if found.reserved else 0
    notes = [
        f"at the end: {gib(found.allocated)} allocated of {gib(found.reserved)} reserved; {share:.0%} lies idle, in"
        f" pieces of up to {gib(found.largest_idle)}"
    ]
    if found.failed:
        pieces = "in pieces that are too small: fragmentation" if found.idle >= found.failed else "which is less"
        notes.append(f"{gib(found.failed)} did not fit; idle were {gib(found.idle)}, {pieces}")
    points(target, notes)
    return document
