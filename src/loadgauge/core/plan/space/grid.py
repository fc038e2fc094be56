"""Many plans in one go: the cells that a sweep's file spans, and the loop that has workers plan them.

A sweep's file is TOML. A key is a flag of `plan` without its dashes, a value what would be typed after it, and a list
sweeps. Tables `[[with]]` each span cells of their own, in addition to the keys above them:

    model = ["llama-3.1-8b", "llama-3.1-70b"]
    gpus = [64, 128]
    [[with]]
    gpu = "h100-sxm5-80gb"
    nic-bandwidth = ["25GB/s", "50GB/s"]
    [[with]]
    gpu = "a100-sxm4-80gb"
"""

import hashlib
import itertools
import json
import math
import re
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from loadgauge.core.base.errors import ConfigError, Error, closest

MOST_CELLS = 1_000_000
LONGEST_FILE = 1_000_000
"""Characters."""
DEATHS = 3
"""Workers that a cell may cost before it is given up."""
OFTEN = 1.0
"""Seconds between two writings of results, at least; and at least a hundredth of the time that the sweep has run."""
TABLES = "with"

Value = str | bool
Row = dict[str, Any]
"""A result: a value for each column."""
Kind = Literal["text", "whole", "number", "truth"]
KINDS: dict[str, Kind] = {"whole": "whole", "positive": "number", "price": "number", "switch": "truth"}
"""Type of a column by the kind of its field; all others are text."""
Check = Callable[[Any], Value]
"""Reads one value of a key as the command line would, and gives it back as it would be typed; or raises `ConfigError`."""


class Cell(msgspec.Struct, frozen=True):
    """One plan. key: a hash of all that its result rests on; words: its command line, after `loadgauge plan`."""

    key: str
    words: tuple[str, ...]


def key(*parts: Any) -> str:
    """Hash everything a result depends on; the same on every machine, whatever the order of a mapping.

    >>> key({"gpus": "8", "model": "gpt2"}) == key({"model": "gpt2", "gpus": "8"}) != key({"model": "gpt2"})
    True
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


# -- the file -----------------------------------------------------------------------------------------------------------


def read(text: str, flags: Mapping[str, Check], file: str = "") -> list[dict[str, Value]]:
    """Read the values of every cell by field name, each cell once, in the order of the file.

    flags: the keys that are known. Raises `ConfigError` with the key, the file and (where it can be told) the line.

    >>> read('model = "gpt2"\\ngpus = [8, 16]', {"model": str, "gpus": str})
    [{'model': 'gpt2', 'gpus': '8'}, {'model': 'gpt2', 'gpus': '16'}]
    """
    if len(text) > LONGEST_FILE:
        raise ConfigError(f"longer than {LONGEST_FILE:,} characters", file=file)
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"is no TOML: {error}", file=file) from None
    tables = document.pop(TABLES, [{}])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables) or not tables:
        raise ConfigError("must be tables, each headed [[with]]", key=TABLES, file=_where(file, text, TABLES, 0))
    common = _axes(document, flags, text, file, 0)
    spans = [{**common, **_axes(table, flags, text, file, number)} for number, table in enumerate(tables, 1)]
    count = sum(math.prod(map(len, span.values())) for span in spans)
    if count > MOST_CELLS:
        raise ConfigError(f"spans {count:,} cells; at most {MOST_CELLS:,} go into one sweep", file=file)
    cells: dict[tuple[tuple[str, Value], ...], dict[str, Value]] = {}
    for span in spans:
        for values in itertools.product(*span.values()):
            cell = dict(zip(span, values, strict=True))
            cells.setdefault(tuple(sorted(cell.items(), key=lambda pair: pair[0])), cell)
    return list(cells.values())


def _axes(
    table: dict[str, Any], flags: Mapping[str, Check], text: str, file: str, number: int
) -> dict[str, list[Value]]:
    """The values of each key of one table."""
    axes: dict[str, list[Value]] = {}
    for word, content in table.items():
        name, where = word.replace("-", "_"), _where(file, text, word, number)
        if name not in flags:
            raise ConfigError(f"unknown key{_hint(name, flags)}", key=word, file=where)
        if name in axes:
            raise ConfigError("is there twice", key=word, file=where)
        values = content if isinstance(content, list) else [content]
        if not values:
            raise ConfigError("is an empty list, and so leaves no cell", key=word, file=where)
        for value in values:
            if not isinstance(value, str | int | float):
                raise ConfigError(f"must be a value or a list of values, got {_kind(value)}", key=word, file=where)
        try:
            axes[name] = list(dict.fromkeys(flags[name](value) for value in values))
        except ConfigError as error:
            raise ConfigError(str(error), key=word, file=where) from None
    return axes


def _kind(value: Any) -> str:
    names: dict[type, str] = {dict: "a table", list: "a list in a list"}
    return names.get(type(value), f"a {type(value).__name__}")


def _hint(name: str, flags: Mapping[str, Any]) -> str:
    close = closest(name, flags)
    words = [word.replace("_", "-") for word in close or flags]
    return f"; did you mean {words[0]}?" if close else f" (known: {', '.join(words)})"


def _where(file: str, text: str, word: str, number: int) -> str:
    """The file, and the line with a key of the n-th table (0: above all tables), where it can be found."""
    table = 0
    for row, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[", line) and re.match(rf"\s*\[+\s*[\"']?{TABLES}\b", line):
            table += 1
            if word == TABLES:
                return f"{file}:{row}"
        elif table == number and re.match(rf"\s*[\"']?{re.escape(word)}[\"']?\s*[=.]", line):
            return f"{file}:{row}"
    return file


# -- the loop -----------------------------------------------------------------------------------------------------------


class Workers(Protocol):
    """Workers that plan cells: processes of this machine, or a Ray cluster."""

    @property
    def slots(self) -> int:
        """Number of cells to submit at a time."""
        ...

    def submit(self, number: int, cell: Cell) -> None:
        """Start a cell; `number` identifies it."""
        ...

    def finished(self, seconds: float) -> list[tuple[int, Row | None]]:
        """Wait up to `seconds` and return finished cells by number with their rows; None for a cell whose worker died."""
        ...

    def close(self) -> None:
        """Stop all workers at once, even while they plan."""
        ...


def run(
    cells: Sequence[Cell],
    workers: Workers,
    keep: Callable[[list[Row]], object],
    lost: Callable[[Cell], Row],
    version: str,
) -> Iterator[Row]:
    """Plan every cell and yield the results in the order in which they finish.

    keep: writes results; it is given each of them once, at the latest when this ends, however it ends
    lost: the row of a cell under which `DEATHS` workers died; that is no result, and is not kept: a sweep that goes on
    tries the cell again
    version: of loadgauge, which all results must be of; raises `Error` where a worker has another
    """
    waiting = deque(enumerate(cells))
    running: dict[int, Cell] = {}
    deaths: dict[int, int] = {}
    unwritten: list[Row] = []
    started = written = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < workers.slots:
                number, cell = waiting.popleft()
                workers.submit(number, cell)
                running[number] = cell
            for number, row in workers.finished(OFTEN / 4):
                cell = running.pop(number)
                if row is None:
                    deaths[number] = deaths.get(number, 0) + 1
                    if deaths[number] < DEATHS:
                        waiting.appendleft((number, cell))
                        continue
                    yield {**lost(cell), "deaths": deaths[number]}
                    continue
                if row["loadgauge"] != version:
                    other = row["loadgauge"]
                    raise Error(
                        f"a worker has loadgauge {other}, and this is {version}; install the same on every node"
                    )
                row = {**row, "deaths": deaths.get(number, 0)}
                unwritten.append(row)
                yield row
            now = time.monotonic()
            if unwritten and now - written >= max(OFTEN, (now - started) / 100):
                keep(unwritten)
                unwritten, written = [], now
    finally:
        try:
            if unwritten:
                keep(unwritten)
        finally:
            workers.close()
