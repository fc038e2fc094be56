"""Files with measured runs: one's own table, one in the words of its sources, the JSON of `make gpu`, or rows in JSON."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec

from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.base.files import read_text
from loadgauge.evidence.published import rows, source_rows
from loadgauge.evidence.validate.runs import LARGEST_FILE, Rejected, Run, Runs, of_lines, parse

SOURCE_COLUMNS = frozenset({"split", "task", "layers", "hidden", "other_flags", "arch_source", "moe_experts"})
"""Columns by which a table in the words of its sources is known."""


def read(path: str | Path) -> Runs:
    """Read the runs of a file: a CSV whose columns are fields of `Job` and what was measured, a CSV in the words of its
    sources (the columns of tools/published_runs/README.md), the JSON that `make gpu` writes, or rows as `data/runs` has
    them (.jsonl).

    Raises `ConfigError` for a file that is none of them; a row that is wrong is in `rejected`.
    """
    text, file = read_text(path, LARGEST_FILE), str(path)
    if file.endswith(".jsonl"):
        return of_lines(text)
    if not text.lstrip().startswith("{"):
        return _of_source(text, file) if _in_source_words(text) else parse(text, file)
    try:
        runs = msgspec.json.decode(text, type=_Report).runs
    except msgspec.DecodeError as error:
        raise ConfigError(f"is no result of `make gpu`: {error}", file=file) from None
    if not runs:
        raise ConfigError("has no runs: none of its trainings was measured on a GPU of the catalogue", file=file)
    return Runs(runs)


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
    place = [cell.strip() for cell in next(lines)].index("id")
    return next(lines.line_num for row in lines if name in (row[place].strip(), f"line {lines.line_num}"))
