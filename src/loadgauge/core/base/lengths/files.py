"""Reads the lengths of sequences from files: text, CSV, JSON, JSON lines, Parquet and Arrow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from loadgauge.core.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

LONGEST = 10_000_000
"""Tokens of the longest sequence accepted; anything longer is taken for a slip."""
FILE_BYTES = 64 * 2**20
"""Bytes of the largest text, CSV or JSON file read."""
LINES_BYTES = 4 * 2**30
"""Bytes of the largest data set in JSON lines read."""
COLUMNS = ("length", "lengths")
IDS = "input_ids"
"""A data set's column of token ids, which are counted."""
COUNTS = ("count", "counts")
"""The other column of a histogram of two: how many sequences are so long."""
TABLES = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
"""First bytes of Parquet files, Arrow files and Arrow streams."""

Counted = Iterator[tuple[int, int]]


def whole(value: object, key: str = "lengths", file: str = "") -> int:
    """Read a length [tokens]. Raises `ConfigError`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LONGEST:
        shown = repr(value)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        raise ConfigError(f"must be whole numbers from 1 to {LONGEST}, got {shown}", key=key, file=file)
    return value


def read(path: Path, name: str, column: str | None) -> Counted:
    """Yield the lengths of a file and how often each occurs, in any order, with repetitions. `name` is for messages."""
    files = sorted([*path.glob("*.arrow"), *path.glob("*.parquet")]) if path.is_dir() else []
    if files:
        for file in files:
            yield from _from_table(file, str(file), column)
        return
    if path.exists() and not path.is_file():
        raise ConfigError("is not a file", file=name)
    size = path.stat().st_size
    with path.open("rb") as raw:
        if raw.read(8).startswith(TABLES):
            yield from _from_table(path, name, column)
            return
    with path.open(encoding="utf-8-sig", newline="") as lines:
        first = next((line for line in lines if line.strip()), "")
        lines.seek(0)
        by_line = first.lstrip().startswith("{") and isinstance(_row(first), dict) and not _histogram(_row(first))
        if size > (most := LINES_BYTES if by_line else FILE_BYTES):
            raise ConfigError(f"has {size:,} bytes, more than the {most:,} that are read", file=name)
        if by_line:
            yield from _from_rows(lines, name, column)
        elif first.lstrip().startswith(("[", "{")):
            yield from _from_json(lines.read(), name, column)
        elif column is None and all(digits(cell) for cell in _cells(first)):
            for number, line in enumerate(lines, 1):
                yield from ((_number(cell, f"line {number}", name), 1) for cell in _cells(line))
        else:
            yield from _from_csv(lines, name, column)


# -- JSON -------------------------------------------------------------------------------------------------------------


def _row(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _histogram(value: Any) -> bool:
    """Return whether a JSON object maps lengths to counts."""
    return isinstance(value, dict) and bool(value) and all(digits(key) for key in value)


def _from_json(text: str, name: str, column: str | None) -> Counted:
    values = _row(text)
    if _histogram(values):
        for key, count in values.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ConfigError(f"the count of length {key} must be a whole number, got {count!r:.40}", file=name)
            yield _number(key, "lengths", name), count
    elif isinstance(values, list):
        if column is not None:
            raise ConfigError("is a JSON list of lengths, which has no columns", key=column, file=name)
        yield from ((whole(value, file=name), 1) for value in values)
    elif text.lstrip().startswith("["):
        raise ConfigError("starts like a JSON list but is not one", file=name)
    else:
        raise ConfigError("must be JSON lines (one object a line) or an object of counts by length", file=name)


def _from_rows(lines: Iterable[str], name: str, column: str | None) -> Counted:
    chosen = column
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _row(line)
        if not isinstance(row, dict):
            raise ConfigError("is not a JSON object", key=f"line {number}", file=name)
        if chosen is None or number == 1:
            chosen = _column(list(row), column, name)
        if chosen not in row:
            raise ConfigError(f"has no column {chosen}", key=f"line {number}", file=name)
        value = row[chosen]
        if isinstance(value, str):
            raise _text(chosen, name)
        if isinstance(value, list) and chosen not in COLUMNS:
            value = len(value)
        yield whole(value, f"line {number}", name), 1


def _column(names: list[str], column: str | None, name: str) -> str:
    """The column that holds the lengths, of those there are."""
    wanted = (*COLUMNS, IDS) if column is None else (column,)
    for candidate in wanted:
        if candidate in names:
            return candidate
    if column is not None:
        raise ConfigError(f"has no such column (it has: {', '.join(names)[:80]})", key=column, file=name)
    raise ConfigError(
        f"has no column named {', '.join(COLUMNS)} or {IDS}; name one as FILE:COLUMN (it has: {', '.join(names)[:60]})",
        file=name,
    )


def _text(column: str, name: str) -> ConfigError:
    return ConfigError(
        "holds text, whose length in tokens depends on the tokenizer; name a column of token counts or token ids",
        key=column,
        file=name,
    )


# -- CSV --------------------------------------------------------------------------------------------------------------


def _from_csv(lines: Iterable[str], name: str, column: str | None) -> Counted:
    import csv

    rows = csv.reader(lines)
    header = [cell.strip() for cell in next((row for row in rows if row), [])]
    lower = [cell.lower() for cell in header]
    if column is not None:
        index = header.index(_column(header, column, name))
    elif (column_index := next((lower.index(usual) for usual in COLUMNS if usual in lower), None)) is not None:
        index = column_index
    else:
        raise ConfigError(
            "must hold whole numbers, a JSON list or object, JSON lines, or a CSV column named"
            f" {' or '.join(COLUMNS)} (another: FILE:COLUMN)",
            file=name,
        )
    counts = 1 - index if len(lower) == 2 and lower[1 - index] in COUNTS else None
    for row in rows:
        if row:
            cell, line = row[index] if index < len(row) else "", f"line {rows.line_num}"
            if column is not None and any(letter.isalpha() for letter in cell):
                raise _text(column, name)
            times = 1
            if counts is not None:
                many = row[counts].strip() if counts < len(row) else ""
                if not digits(many) or len(many) > 20:
                    raise ConfigError(f"the count must be a whole number, got {many!r:.40}", key=line, file=name)
                times = int(many)
            yield _number(cell, line, name), times


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",") if cell.strip()]


def digits(cell: str) -> bool:
    """Return whether a text consists of the digits 0 to 9 alone."""
    return cell.isascii() and cell.isdecimal()


def _number(cell: str, key: str, name: str) -> int:
    cell = cell.strip()
    # A number too long to be a length is not worth converting.
    return whole(int(cell) if digits(cell) and len(cell) <= 20 else cell, key=key, file=name)


# -- Parquet and Arrow ------------------------------------------------------------------------------------------------


def _from_table(path: Path, name: str, column: str | None) -> Counted:
    """Lengths of a column of whole numbers, or of one of lists, such as token ids."""
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError:
        raise ConfigError("needs pyarrow to be read (pip install pyarrow)", file=name) from None
    try:
        for chosen, values in _chunks(path, name, column):
            kind = values.type
            if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
                raise _text(chosen, name)
            if chosen not in COLUMNS and (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
                values = pyarrow.compute.list_value_length(values)
            elif not pyarrow.types.is_integer(kind):
                raise ConfigError(f"must hold whole numbers or token ids, not {kind!s:.60}", key=chosen, file=name)
            for row in pyarrow.compute.value_counts(values).to_pylist():
                yield whole(row["values"], chosen, name), row["counts"]
    except pyarrow.ArrowException as error:
        raise ConfigError(f"cannot be read ({str(error).splitlines()[0]:.100})", file=name) from None


def _chunks(path: Path, name: str, column: str | None) -> Iterator[tuple[str, Any]]:
    """The name of the column, and its values a part at a time."""
    import pyarrow

    with path.open("rb") as raw:
        start = raw.read(8)
        raw.seek(0)
        if start.startswith(b"PAR1"):
            from pyarrow import parquet

            table = parquet.ParquetFile(raw)
            chosen = _column(table.schema_arrow.names, column, name)
            for batch in table.iter_batches(columns=[chosen]):
                yield chosen, batch.column(0)
            return
        opened = pyarrow.ipc.open_file if start.startswith(b"ARROW1") else pyarrow.ipc.open_stream
        with opened(raw) as table:
            chosen = _column(table.schema.names, column, name)
            parts = (table.get_batch(i) for i in range(table.num_record_batches)) if start[:5] == b"ARROW" else table
            for batch in parts:
                yield chosen, batch.column(chosen)
