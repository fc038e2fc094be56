"""Published runs, read from a CSV: one measured run a row, each cell checked, nothing filled in."""

from __future__ import annotations

import csv
import io
import math
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import msgspec

from loadgauge.errors import ConfigError

LARGEST_FILE = 100_000_000
"""Bytes. The published runs that come with loadgauge have one million."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run, as its source states it; the columns are explained in `data/runs/README.md`.

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

    @property
    def series(self) -> str:
        """The prefix of the source: the second part of the id, or the id itself where it has no parts."""
        parts = self.id.split("-")
        return parts[1] if len(parts) > 2 else self.id

    @property
    def configuration(self) -> tuple[object, ...]:
        """What makes two rows measurements of one thing: source, model, hardware, number of GPUs and layout.

        Precision, sequence length and batch are not part of it, so a sweep over them weighs as much as one run.
        """
        schedule = next((part.strip() for part in self.other_flags.split(";") if "schedule " in part), "")
        layout = (self.tp, self.pp, self.vpp, self.cp, self.ep, self.sharding, self.recompute, schedule)
        return (self.series, self.model, self.hardware, self.gpus, *layout)


MEASURED = (
    *("step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "hw_tflops_per_gpu", "mfu", "hfu"),
    "peak_memory_gib",
)
"""What was measured. None of it may decide how a row is expressed."""
CARRIED = frozenset(
    {"split", "arch_source", "throughput_reported", "memory_reported", "derived_fields"}
)  # known columns that are for people to read
MOST = {"layers": 10_000, "vpp": 1_000}
"""The largest numbers that are believed of what an estimate goes through one by one."""
KINDS: dict[str, Any] = get_type_hints(Run)


class Rejected(msgspec.Struct, frozen=True):
    """A row that could not be read: where it stands, and why."""

    id: str
    line: int
    reason: str


class Runs(msgspec.Struct, frozen=True):
    """The rows of one or several files. `ignored`: columns that no one reads."""

    runs: tuple[Run, ...]
    rejected: tuple[Rejected, ...] = ()
    ignored: tuple[str, ...] = ()

    def __add__(self, other: Runs) -> Runs:
        return Runs(
            self.runs + other.runs,
            self.rejected + other.rejected,
            tuple(dict.fromkeys(self.ignored + other.ignored)),
        )


def published() -> Runs:
    """The runs that come with loadgauge.

    >>> len(published().runs) > 1500
    True
    """
    timed, weighed = _read(_folder().joinpath("throughput.csv")), _read(_folder().joinpath("memory.csv"))
    # A run that reports both is in both files; its speed counts once.
    untimed = dict.fromkeys(name for name in MEASURED if name != "peak_memory_gib")
    runs = tuple(msgspec.structs.replace(run, **untimed) for run in weighed.runs)
    return timed + msgspec.structs.replace(weighed, runs=runs)


def _folder() -> Traversable:
    return resources.files("loadgauge").joinpath("data/runs")


def read(path: str | Path) -> Runs:
    """The runs of a CSV, or of the JSON that `make gpu` writes. A file that is neither raises `ConfigError`; a row that is
    wrong is in `rejected`."""
    return _read(Path(path))


class _Report(msgspec.Struct):
    """What is read of the JSON of `make gpu`."""

    runs: list[dict[str, str]]


def _of_report(text: str, file: str) -> Runs:
    """The runs in the JSON of `make gpu`: rows with the columns of the CSV."""
    try:
        rows = msgspec.json.decode(text, type=_Report).runs
    except msgspec.DecodeError as error:
        raise ConfigError(f"is no result of `make gpu`: {error}", file=file) from None
    if not rows:
        raise ConfigError("has no runs: none of its trainings was measured on a GPU of the catalogue", file=file)
    lines = io.StringIO()
    table = csv.DictWriter(lines, list(dict.fromkeys(name for row in rows for name in row)))
    table.writeheader()
    table.writerows(rows)
    return parse(lines.getvalue(), file)


def _read(place: Path | Traversable) -> Runs:
    file = str(place)

    def refuse(message: str) -> NoReturn:
        raise ConfigError(message, file=file) from None

    try:
        if isinstance(place, Path):
            if not place.exists():
                refuse("no such file")
            if not place.is_file():
                refuse("is not a file")
            if place.stat().st_size > LARGEST_FILE:
                refuse(f"is larger than {LARGEST_FILE // 10**6} MB")
        text = place.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        refuse("is not text in UTF-8")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        if isinstance(error, ConfigError):
            raise
        refuse(f"cannot be read: {getattr(error, 'strerror', None) or error}")
    return _of_report(text, file) if text.lstrip().startswith("{") else parse(text, file)


def parse(text: str, file: str = "") -> Runs:
    r"""The runs in the text of a CSV.

    >>> found = parse("id,model,layers,colour\nT-X-1,gpt,12,red\nT-X-2,gpt,many,blue\n")
    >>> found.runs[0].layers, found.rejected[0].reason, found.ignored
    (12, "layers: must be a whole number, got 'many'", ('colour',))
    """
    if "\0" in text:
        raise ConfigError("has a zero byte in it, so it is no CSV", file=file)
    try:
        lines = csv.DictReader(text.splitlines(keepends=True), strict=True)
        header = [name.strip() for name in lines.fieldnames or ()]
        lines.fieldnames = header
        if "id" not in header:
            raise ConfigError("its first line must name the columns, and one of them must be id", file=file)
        twice = [name for name in dict.fromkeys(header) if header.count(name) > 1]
        if twice:
            raise ConfigError(f"the column {twice[0]} appears twice", file=file)
        runs: list[Run] = []
        rejected: list[Rejected] = []
        seen: set[str] = set()
        for row in lines:
            name = (row.get("id") or "").strip() or f"line {lines.line_num}"
            try:
                if name in seen:
                    raise ConfigError("the id appears twice", key="id")
                seen.add(name)
                runs.append(_run(name, row))
            except ConfigError as error:
                rejected.append(Rejected(name, lines.line_num, str(error)))
    except csv.Error as error:
        raise ConfigError(f"is not a valid CSV: {error}", file=file) from None
    known = KINDS.keys() | CARRIED
    return Runs(tuple(runs), tuple(rejected), tuple(name for name in header if name not in known))


def _run(name: str, row: dict[str, Any]) -> Run:
    if row.get(None):  # type: ignore[call-overload]
        raise ConfigError("has more cells than there are columns")
    values: dict[str, Any] = {"id": name}
    for key, kind in KINDS.items():
        cell = row.get(key)
        if key == "id" or cell is None:
            continue
        text = cell.strip()
        if kind is str:
            values[key] = text
        elif text:
            values[key] = _number(key, text, whole=kind == int | None)
    return Run(**values)


def _number(key: str, text: str, *, whole: bool) -> float | int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (whole and value != int(value)):
        raise ConfigError(f"must be a {'whole ' if whole else ''}number, got {text[:40]!r}", key=key)
    least = 0 if key in ("moe_shared", "moe_first_dense_layers", "lora_rank") else None
    if value < 0 or (value == 0 and least is None):
        raise ConfigError(f"must be above 0, got {text[:40]!r}", key=key)
    if value > MOST.get(key, math.inf):
        raise ConfigError(f"must be at most {MOST[key]:,}, got {text[:40]!r}", key=key)
    if value > 1e15:
        raise ConfigError(f"is too large: {text[:40]!r}", key=key)
    return int(value) if whole else value
