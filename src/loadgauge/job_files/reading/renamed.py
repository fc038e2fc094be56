"""A document whose keys a tool has under several names, such as one section for each engine, under the names of one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loadgauge.job_files.ideas.table import MISSING, Document

Names = Sequence[tuple[str, str]]
"""Pairs of a file's name and of the one that is read; those that end with a dot are sections, and an empty
one stands before every key. The first that matches counts."""


def renamed(key: str, names: Names) -> str:
    """The name that is read for a key of a file.

    >>> renamed("engine.tp_size", [("engine.tp_size", "mesh.tp"), ("engine.", "mesh.")]), renamed("lr", [])
    ('mesh.tp', 'lr')
    """
    for theirs, ours in names:
        if key == theirs or (theirs[-1:] in ("", ".") and key.startswith(theirs)):
            return ours + key[len(theirs) :]
    return key


class Renamed:
    """A document under other names. What there is under both names keeps its own.

    choose: which variant of its tool a document is for, and its names
    """

    def __init__(self, document: Document, choose: Callable[[Document], tuple[str, Names]]) -> None:
        self.document, self.choose = document, choose
        self._find()

    def _find(self) -> None:
        self.variant, self.pairs = self.choose(self.document)
        self.theirs: dict[str, str] = {}
        for name in self.document.names():
            ours = renamed(name, self.pairs)
            self.theirs[name if ours in self.theirs else ours] = name

    def _own(self, key: str) -> str:
        return self.theirs.get(key) or renamed(key, [(ours, theirs) for theirs, ours in self.pairs])

    def names(self) -> tuple[str, ...]:
        """Every key, by the name that is read."""
        return tuple(self.theirs)

    def get(self, key: str) -> Any:
        """The value of a key, or `MISSING`."""
        return self.document.get(self._own(key))

    def put(self, key: str, value: Any) -> None:
        """Sets the value of a key under the file's own name."""
        self.document.put(self._own(key), value)
        self._find()

    def drop(self, key: str) -> None:
        """Removes a key if it is there."""
        self.document.drop(self._own(key))
        self._find()

    def shown(self, key: str) -> str:
        """The key as the file spells it."""
        return self.document.shown(self._own(key))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.document, name)


class Without:
    """A document without some of its keys, as it spells them or with all keys of a section: `dropped` has those that it had.

    >>> from loadgauge.job_files.reading.nested import json_document
    >>> document = Without(json_document('{"a": 1, "b": {"c": 2}}'), ["b"])
    >>> document.names(), document.dropped
    (('a',), ('b.c',))
    """

    def __init__(self, whole: Document, ignored: Iterable[str]) -> None:
        self.whole = whole
        wanted = {key.strip().lstrip("-").replace("-", "_") for key in ignored}
        shown = {name: whole.shown(name).lstrip("-").replace("-", "_") for name in whole.names()}
        self.dropped = tuple(
            name
            for name, spelled in shown.items()
            if any(key in (name, spelled) or name.startswith(f"{key}.") for key in wanted)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def names(self) -> tuple[str, ...]:
        """Every other key that has a value, in order."""
        return tuple(name for name in self.whole.names() if name not in self.dropped)

    def get(self, key: str) -> Any:
        """The value of a key, or `MISSING`."""
        return MISSING if key in self.dropped else self.whole.get(key)
