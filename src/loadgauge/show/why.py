"""`loadgauge why`: what held the memory when it ran out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loadgauge.units import GIB, gib

if TYPE_CHECKING:
    from loadgauge.measure.oom import OutOfMemory
    from loadgauge.measure.snapshot import Snapshot

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
@click.option("--json", "as_json", is_flag=True, help="One JSON document, in bytes.")
def command(file: str, gpu_index: int, as_json: bool) -> None:
    """What held the memory? FILE is the text of a CUDA out-of-memory error ("-": from standard input), or a snapshot
    that `torch.cuda.memory._dump_snapshot` has written.

    A snapshot is a pickle; it is read without running anything in it.

    \b
    loadgauge why error.txt
    loadgauge why snapshot.pickle
    """
    if file == "-":
        _text(sys.stdin.read(), as_json)
        return
    path = Path(file)
    with path.open("rb") as opened:
        is_pickle = opened.read(1) == b"\x80"
    if is_pickle:
        from loadgauge.measure.snapshot import read

        _snapshot(read(path, gpu_index), as_json)
    else:
        _text(path.read_text(encoding="utf-8", errors="replace"), as_json)


def _text(text: str, as_json: bool) -> None:
    from loadgauge.measure.oom import parse
    from loadgauge.show.table import Column, console, document, draw, points

    found: OutOfMemory = parse(text)
    if as_json:
        import msgspec

        document({**msgspec.structs.asdict(found), "cause": found.cause})
        return
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


def _snapshot(found: Snapshot, as_json: bool) -> None:
    from loadgauge.show.table import Column, console, document, draw, points

    if as_json:
        document(found)
        return
    target = console()
    target.print(f"PEAK  {gib(found.peak)} allocated at once, over {found.events:,} events")
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
