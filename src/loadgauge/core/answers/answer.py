"""The protocol of an answer, whatever the question was: a verdict, numbers with their units, reasons, and words for them.

What prints or draws an answer knows this alone (`core/text/show.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base import YES, ConfigError, load, need, read_data

UNITS = {
    "bytes": "byte", "signed_bytes": "byte", "seconds": "s", "signed_seconds": "s", "days": "days", "flop": "FLOP",
    "flop_rate": "FLOP/s", "byte_rate": "byte/s", "token_rate": "tokens/s", "tokens": "tokens", "share": "share",
    "factor": "factor", "money": "money", "signed_money": "money", "kwh": "kWh", "hours": "GPU-hours", "watts": "W",
}  # fmt: skip
"""Units by the shapes of `data/schema.json`; all others are counts."""
PREFIX = "#/$defs/"
Shapes = list[dict[str, Any]]


class Entry(NamedTuple):
    """A number of an answer with its unit. keys: what it is of, such as {"of": "memory.phases.total", "phase": "rollout"}"""

    value: float
    unit: str
    keys: Mapping[str, str]


class Pivot(NamedTuple):
    """A table of a ledger: entries of one path, in rows and columns by two of their keys."""

    title: str
    of: str
    rows: str
    columns: str

    def chosen(self, ledger: Iterable[Entry]) -> list[Entry]:
        """Return the entries of a ledger that are in the table."""
        return [
            entry for entry in ledger if entry.keys["of"] == self.of and {self.rows, self.columns} <= set(entry.keys)
        ]

    def table(self, ledger: Iterable[Entry]) -> dict[str, dict[str, float]]:
        """Return the sums of a ledger's entries by row and column.

        >>> parts = [Entry(1.0, "s", {"of": "t", "a": "x", "b": "y"}), Entry(2.0, "s", {"of": "t", "a": "x", "b": "y"})]
        >>> Pivot("", "t", "a", "b").table(parts)
        {'x': {'y': 3.0}}
        """
        table: dict[str, dict[str, float]] = {}
        for entry in self.chosen(ledger):
            row, column = table.setdefault(entry.keys[self.rows], {}), entry.keys[self.columns]
            row[column] = row.get(column, 0) + entry.value
        return table


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question. Kinds of answers that explain or compute more are subclasses.

    topics: what `why` explains by `explains`, beside every key of the document; pivots: tables of the ledger, which a figure
    draws as bars; tried: changes, as flags, with what each gives

    form: name of the document's shape (`loadgauge schema`); writer: address of the function that writes it on paper,
    `write(answer, paper, brief=...)`; shown: what that writes; document: that of `--json`; table: rows of an answer that is one
    verdict: in a word, empty where the question has none; code: exit code of the command; assumed: flags that were not given,
    with their values; unread: keys of a job file that are not counted; not_counted: lines on what the numbers leave out;
    command: the command line that reproduces it; failed: why there is no answer in what is printed
    """

    topics: tuple[str, ...] = ()
    explains: Callable[[str], Answer] | None = None
    pivots: tuple[Pivot, ...] = ()
    tried: Callable[[], Iterable[tuple[str, Any]]] = tuple
    form: str = ""
    writer: str = ""
    shown: Any = None
    document: dict[str, Any] | Callable[[], dict[str, Any]] = {}
    table: Sequence[Mapping[str, Any]] = ()
    verdict: str = ""
    code: int = YES
    assumed: Mapping[str, str] = {}
    unread: Sequence[Mapping[str, Any]] = ()
    not_counted: Sequence[str] = ()
    command: str = ""
    failed: str = ""

    def alternatives(self) -> Iterable[tuple[str, Any]]:
        """Return changes that were tried, as flags, with what each gives: the next steps."""
        return self.tried()

    def why(self, topic: str) -> Answer:
        """Explain a number: one of `topics`, or any by its key in the document. Raises `ConfigError` for another."""
        if self.explains is not None and (not self.topics or topic in self.topics):
            return self.explains(topic)
        behind: Answer = load("loadgauge.core.answers.why.of_key:key_reason")(self, topic)
        return behind

    def plot(self, file: Path, figure: str) -> None:
        """Draw the tables of the ledger to a file, as bars. Raises `ConfigError` where there is none."""
        tables = [pivot for pivot in self.pivots if pivot.chosen(self.ledger())]
        if figure != "all" or not tables:
            have = (
                f"the tables {', '.join(pivot.title for pivot in tables)} (all)"
                if tables
                else "--json, --csv and --markdown"
            )
            raise ConfigError(f"there is no such figure of this answer; it has {have}", key="plot")
        need("FIGURES").plot_tables(tables, self.ledger(), file)

    def headline(self) -> str:
        """Return the first line of the text.

        >>> from loadgauge.core.answers.why.reason import Reason
        >>> Reason(topic="tp", what="need", value=3.0, unit="s", basis="", rule="").headline()
        'tp: need: 3 s'
        """
        whole: str = load("loadgauge.core.text.table:plain")(functools.partial(self.text, brief=True), 10**6)
        return whole.strip().partition("\n")[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        return self.document() if callable(self.document) else self.document

    def text(self, paper: Any, *, brief: bool = False) -> None:
        """Write the answer on paper (`core.text.table`), whole or in ten lines."""
        load(self.writer)(self, paper, brief=brief)

    def follow(self) -> Answer | None:
        """Return what is shown after the text, such as the answer to a question that was asked on a terminal."""
        return None

    def ledger(self) -> tuple[Entry, ...]:
        """Return every number of the document with its unit, and the texts beside it as keys.

        >>> from loadgauge.core.answers.why.reason import Reason
        >>> Reason(topic="tp", what="", value=3.0, unit="s", basis="", rule="").ledger()[0].unit
        's'
        """
        plain = json.loads(msgspec.json.encode(self.to_dict(), enc_hook=float))
        return tuple(_entries(plain, [_definitions()[self.form]], "", {}))


def described(form: str, key: str) -> str:
    """Return what the schema says of a key of a form, such as "memory.total"; empty for one that it does not describe.

    >>> described("trace.steps", "peak.phase"), described("gpus.catalogue", "gpus.tdp")
    ('forward, backward, optimizer step; empty before', 'thermal design power')
    """
    shapes = [_definitions()[form]]
    for part in key.split("."):
        shapes = _within(shapes, part) or _within(_within(shapes, None), part)
    return next((str(shape["description"]) for shape in shapes if "description" in shape), "")


@functools.cache
def _definitions() -> dict[str, Any]:
    definitions: dict[str, Any] = json.loads(read_data("schema.json"))["$defs"]
    return definitions


def _named(shapes: Shapes) -> Iterator[tuple[str, dict[str, Any]]]:
    """The shapes, those that they refer to, and their alternatives, with their names."""
    for shape in shapes:
        name = shape.get("$ref", "").removeprefix(PREFIX)
        yield name, shape
        yield from _named([*([_definitions()[name]] if name else []), *shape.get("anyOf", [])])


def _within(shapes: Shapes, key: str | None) -> Shapes:
    """The shapes of what is under a key of a document; None: of what is in a list."""
    every = [shape for _, shape in _named(shapes)]
    inner = [
        shape.get("items") if key is None else shape.get("properties", {}).get(key) or shape.get("additionalProperties")
        for shape in every
    ]
    return [shape for shape in inner if isinstance(shape, dict)]


def _entries(value: Any, shapes: Shapes, path: str, keys: Mapping[str, str]) -> Iterator[Entry]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        unit = next((UNITS[name] for name, _ in _named(shapes) if name in UNITS), "")
        yield Entry(value, keys.get("unit", "") or unit or "count", {"of": path, **keys})
    elif isinstance(value, list):
        for number, item in enumerate(value):
            numbered = keys if isinstance(item, dict) and _texts(item) else {**keys, f"{path}#": str(number)}
            yield from _entries(item, _within(shapes, None), path, numbered)
    elif isinstance(value, dict):
        names = _texts(value)
        unit = names.pop("unit", "")
        keys = {**keys, **names} if path else keys
        mapped = any(isinstance(shape.get("additionalProperties"), dict) for _, shape in _named(shapes))
        for key, item in value.items():
            inner, name = _within(shapes, key), path.rpartition(".")[2]
            own = {**keys, "unit": unit} if unit and isinstance(item, int | float) else keys
            below, more = (path, {name: key}) if mapped else (f"{path}.{key}".lstrip("."), {})
            yield from _entries(item, inner, below, {**own, **more})


def _texts(value: Mapping[str, Any]) -> dict[str, str]:
    """The texts of a record that name it."""
    return {key: text for key, text in value.items() if isinstance(text, str) and text}
