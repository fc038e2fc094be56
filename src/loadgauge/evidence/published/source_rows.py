"""Published runs as their sources state them, read from a CSV: one measured run a row, each cell checked, nothing filled in."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from loadgauge.core.base import read_text, refuse
from loadgauge.evidence.validate.runs import LARGEST_FILE, Rejected, read_rows


class SourceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run, as its source states it; the columns are explained in README.md.

    A text that the source does not state is empty, a number None. `step_time_s` in seconds, `peak_memory_gib` in GiB,
    `*_tflops_per_gpu` in 10^12 FLOP/s, `mfu` and `hfu` as shares of the peak.
    """

    id: str
    quality: str = ""
    task: str = "pretrain"
    source: str = ""
    year: int | None = None
    framework: str = ""
    model: str = ""
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    gated: str = ""
    vocab: int | None = None
    tied_embeddings: str = ""
    attention: str = ""
    moe_experts: int | None = None
    moe_topk: int | None = None
    moe_shared: int | None = None
    moe_expert_ffn: int | None = None
    moe_first_dense_layers: int | None = None
    hardware: str = ""
    gpus: int | None = None
    gpus_per_node: int | None = None
    seq_len: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    precision: str = ""
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    sharding: str = ""
    sequence_parallel: str = ""
    recompute: str = ""
    optimizer: str = ""
    lora_rank: int | None = None
    other_flags: str = ""
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    model_tflops_per_gpu: float | None = None
    hw_tflops_per_gpu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    peak_memory_gib: float | None = None
    memory_kind: str = ""
    notes: str = ""


CARRIED = frozenset({"split", "arch_source", "throughput_reported", "memory_reported", "derived_fields"})
"""Columns for people to read."""
MOST = {"layers": 10_000, "vpp": 1_000}
"""The largest numbers that are believed of what an estimate goes through one by one."""
ZERO = ("moe_shared", "moe_first_dense_layers", "lora_rank")
"""Columns that may be 0."""
KINDS: dict[str, Any] = get_type_hints(SourceRow)


class SourceRows(msgspec.Struct, frozen=True):
    """The rows of a file. `ignored`: columns that have no meaning here."""

    rows: tuple[SourceRow, ...]
    rejected: tuple[Rejected, ...] = ()
    ignored: tuple[str, ...] = ()


def read(path: Path) -> SourceRows:
    """The rows of a CSV. A file that is none raises `ConfigError`; a row that is wrong is in `rejected`."""
    return parse(read_text(path, LARGEST_FILE), str(path))


def parse(text: str, file: str = "") -> SourceRows:
    r"""The rows in the text of a CSV.

    >>> table = parse("id,model,layers,colour\nT-X-1,gpt,12,red\nT-X-2,gpt,many,blue\n")
    >>> table.rows[0].layers, table.rejected[0].reason, table.ignored
    (12, "layers: must be a whole number, got 'many'", ('colour',))
    """
    header, rows, rejected = read_rows(text, file, _row)
    fields = KINDS.keys() | CARRIED
    return SourceRows(with_recipes(rows), rejected, tuple(name for name in header if name not in fields))


def _row(name: str, cells: dict[str, str]) -> SourceRow:
    values: dict[str, Any] = {"id": name}
    for key, kind in KINDS.items():
        cell = cells.get(key)
        if key != "id" and cell:
            values[key] = cell if kind is str else _number(key, cell, whole=kind == int | None)
    return SourceRow(**values)


def _number(key: str, text: str, *, whole: bool) -> float | int:
    """The number in a cell: above 0, or 0 where its column may be."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    refuse(
        not math.isfinite(value) or (whole and value != int(value)),
        f"must be a {'whole ' if whole else ''}number, got {text[:40]!r}",
        key=key,
    )
    refuse(value < 0 or (value == 0 and key not in ZERO), f"must be above 0, got {text[:40]!r}", key=key)
    largest = MOST.get(key, 10**15)
    refuse(value > largest, f"must be at most {largest:,}, got {text[:40]!r}", key=key)
    return int(value) if whole else value


# -- tables that are published anew with every release -----------------------------------------------------------------

RECIPE = ("sharding", "sequence_parallel", "recompute", "optimizer", "other_flags")
"""Columns that a recipe fills."""
TABLE = re.compile(r"performance-summary\S* ## (\d\d)\.(\d\d)(?:\.(\d\d))?")
"""NVIDIA's tables of performance, and the release each is of."""
TAKEN = "recipe of the release"
"""Words of the notes of a row that took a recipe over."""


def release(row: SourceRow) -> tuple[int, ...] | None:
    """Return the release whose table a row is from, or None where it is from no such table.

    >>> release(SourceRow(id="x", source="a@1:docs/performance-summary-archive.md ## 26.06.01 / Pre-Training"))
    (26, 6, 1)
    """
    table = TABLE.search(row.source)
    return None if table is None else tuple(int(part or 0) for part in table.groups())


def _alike(row: SourceRow) -> tuple[object, ...]:
    degrees = (row.tp, row.pp, row.vpp or 1, row.cp or 1, row.ep or 1)
    return (row.task, row.model, row.hardware, row.gpus, row.precision, *degrees, row.micro_batch, row.seq_len)


def with_recipes(rows: Iterable[SourceRow]) -> tuple[SourceRow, ...]:
    """Return the rows, each without a recipe with that of the same model, hardware and layout in the nearest release before it,
    else after it, of the same publication. Only what was chosen is taken over; nothing that was measured is read.

    >>> table = "a@1:docs/performance-summary.md ## "
    >>> old = SourceRow(id="a", source=table + "26.06", model="m", tp=2, sharding="zero1", other_flags="dropless; graphs")
    >>> new = SourceRow(id="b", source=table + "26.08", model="m", tp=2, other_flags="dropless")
    >>> _, made = with_recipes((old, new, ))
    >>> made.sharding, made.other_flags, made.notes
    ('zero1', 'dropless; graphs', 'recipe of the release 26.6')
    """
    listed = tuple(rows)
    recipes: dict[tuple[object, ...], dict[tuple[int, ...], SourceRow]] = {}
    for row in listed:
        if (of := release(row)) is not None and row.sharding:
            recipes.setdefault(_alike(row), {})[of] = row
    return tuple(_with(row, recipes.get(_alike(row), {})) for row in listed)


def _with(row: SourceRow, recipes: dict[tuple[int, ...], SourceRow]) -> SourceRow:
    of = release(row)
    if of is None or row.sharding or not recipes:
        return row
    before = [other for other in recipes if other <= of]
    nearest = max(before) if before else min(recipes)
    words = f"{TAKEN} {'.'.join(map(str, nearest)).removesuffix('.0')}"
    taken = {name: getattr(recipes[nearest], name) for name in RECIPE}
    return msgspec.structs.replace(row, **taken, notes="; ".join(filter(None, (row.notes, words))))
