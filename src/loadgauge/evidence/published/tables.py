"""Files with measured runs: one's own table, one in the words of its sources, the JSON of `make gpu`, or rows in JSON."""

import csv
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.core.base import GIB, ConfigError, Error, parse as parse_size, read_text, refuse
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.resolve.rescale import FILE as ANCHOR, Anchor, read_anchor
from loadgauge.evidence.published import rows, source_rows
from loadgauge.evidence.validate.counters import Counter
from loadgauge.evidence.validate.overrides import Overrides
from loadgauge.evidence.validate.runs import LARGEST_FILE, Measured, Rejected, Run, Runs, of_lines, parse

SOURCE_COLUMNS = frozenset({"split", "task", "layers", "hidden", "other_flags", "arch_source", "moe_experts"})
"""Columns by which a table in the words of its sources is known."""


def read(path: str | Path) -> Runs:
    """Read the runs of a file: a CSV whose columns are fields of `Job` and what was measured, a CSV in the words of its
    sources (the columns of tools/published_runs/README.md), the JSON that `make gpu` writes, rows as `data/runs` has
    them (.jsonl), or an anchor file (.toml), or a folder of these.

    Raises `ConfigError` for a file that is none of them; a row that is wrong is in `rejected`.
    """
    if Path(path).is_dir() or str(path).endswith(ANCHOR):
        return _of_anchors(Path(path))
    text, file = read_text(path, LARGEST_FILE), str(path)
    if file.endswith(".jsonl"):
        return of_lines(text)
    if not text.lstrip().startswith("{"):
        return _of_source(text, file) if _in_source_words(text) else parse(text, file)
    try:
        runs = msgspec.json.decode(text, type=_Report).runs
    except msgspec.DecodeError as error:
        raise ConfigError(f"is no result of `make gpu`: {error}", file=file) from None
    refuse(not runs, "has no runs: none of its trainings was measured on a GPU of the catalogue", file=file)
    return Runs(runs)


def _of_anchors(path: Path) -> Runs:
    """The runs of anchor files: a row of step time, and one for each counter of memory."""
    runs: list[Run] = []
    rejected: list[Rejected] = []
    for file in sorted(path.glob(f"*{ANCHOR}")) if path.is_dir() else (path,):
        try:
            runs += _rows(file.stem, read_anchor(str(file)))
        except Error as error:
            rejected.append(Rejected(file.name, 1, str(error)))
    refuse(not runs and not rejected, f"has no file that ends in {ANCHOR}", file=str(path))
    return Runs(tuple(runs), tuple(rejected))


def _rows(name: str, anchor: Anchor) -> list[Run]:
    """The rows of an anchor; none where it tells of kernels alone."""
    if anchor.run is None:
        return []
    job, run = anchor.job(), anchor.run
    pattern = rows.run_lengths(find_model(job.model).pattern[: run.layers])
    changes = {"model": {"pattern": pattern}} if run.layers else {}
    same: dict[str, Any] = {
        "source": name,
        "quality": "A",
        "model": job.model,
        "hardware": anchor.gpu,
        "layout": job.flags(),
        "job": job,
        "overrides": Overrides(**changes),
    }
    counters = {"allocated": "allocated", "reserved": "reserved", "card": "device"}
    weighed = [
        Run(
            id=f"{name}-{kind}", counter=Counter.parse(counter),
            measured=Measured(peak_memory_gib=parse_size(text)[0] / GIB), **same,
        )
        for kind, counter in counters.items() if (text := getattr(run, kind))
    ]  # fmt: skip
    return [Run(id=name, measured=Measured(step_time_s=parse_size(run.step)[0]), **same), *weighed]


class _Report(msgspec.Struct):
    """What is read of the JSON of `make gpu`."""

    runs: tuple[Run, ...]


def _in_source_words(text: str) -> bool:
    """Return whether a CSV has columns that only tables in the words of their sources have."""
    header = text.partition("\n")[0].strip()
    return not SOURCE_COLUMNS.isdisjoint(name.strip().strip('"') for name in header.split(","))


def _of_source(text: str, file: str) -> Runs:
    """The runs of a table in the words of its sources, converted as the published ones are."""
    table = source_rows.parse(text, file)
    runs: list[Run] = []
    rejected = list(table.rejected)
    for row in table.rows:
        try:
            runs.append(rows.row_of(row))
        except Error as error:
            rejected.append(Rejected(row.id, _line_of(row.id, text), str(error)))
    return Runs(tuple(runs), tuple(rejected), table.ignored)


def _line_of(name: str, text: str) -> int:
    """The line of a CSV on which the row of an id ends."""
    lines = csv.reader(text.splitlines(keepends=True))
    column = [cell.strip() for cell in next(lines)].index("id")
    return next(lines.line_num for row in lines if name in (row[column].strip(), f"line {lines.line_num}"))
