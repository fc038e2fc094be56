"""Rows with named columns, as CSV on stdout or as a file: CSV, JSON or Parquet by its ending."""

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.core.base.errors import ConfigError, refuse
from loadgauge.core.plan.space.grid import Kind

ENDINGS = (".csv", ".json", ".parquet")


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return rows as CSV with a header; numbers are whole and unrounded, what a row does not have is empty.

    >>> csv_text([{"a": 1, "b": None}, {"a": 0.5, "b": "x, y"}], ["a", "b"]).splitlines()
    ['a,b', '1,', '0.5,"x, y"']
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def print_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print rows as CSV."""
    sys.stdout.write(csv_text(rows, columns))


def ending(file: str) -> str:
    """The ending of a file that rows can be written to. Raises `ConfigError` for any other."""
    suffix = Path(file).suffix.lower()
    if suffix not in ENDINGS:
        raise ConfigError(f"must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, got {file!r}", key="output")
    return suffix


def write(file: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Kind]) -> None:
    """Write rows to a file of the kind that its name ends in. Raises `ConfigError` for another ending."""
    kind, path = ending(file), Path(file)
    if kind == ".csv":
        path.write_text(csv_text(rows, list(columns)), encoding="utf-8")
    elif kind == ".json":
        path.write_bytes(msgspec.json.format(msgspec.json.encode(list(rows)), indent=2) + b"\n")
    else:
        table = arrow_table(rows, columns, key="output")
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path)


def arrow_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Kind], key: str = "output") -> Any:
    """Return rows as a pyarrow table of these columns. Raises `ConfigError` without pyarrow. key: the flag that asks for it"""
    need_pyarrow(key)
    import pyarrow

    return pyarrow.table(
        {name: pyarrow.array([row.get(name) for row in rows], _type(pyarrow, kind)) for name, kind in columns.items()}
    )


def need_pyarrow(key: str) -> None:
    """Raise `ConfigError` without pyarrow."""
    refuse(
        find_spec("pyarrow") is None,
        "results are Parquet, which needs pyarrow: pip install 'loadgauge[sweep]'",
        key=key,
    )


def _type(pyarrow: Any, kind: Kind) -> Any:
    return {"text": pyarrow.string(), "whole": pyarrow.int64(), "number": pyarrow.float64(), "truth": pyarrow.bool_()}[
        kind
    ]
