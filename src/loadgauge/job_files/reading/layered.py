"""Documents over others: a YAML file over those that it names as `defaults:`, one under other names, one without some of its keys.

Of the first, `${a.b}` stands in the place of other values.

The first of them is beneath, the file itself on top. A file that is not there is one of the tool's own; of another name it is
`absent`, and the tool's own that has most of the keys above takes its place, of several the one with most words of both names.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgauge.core.base.errors import refuse
from loadgauge.job_files.ideas.table import MISSING, Document
from loadgauge.job_files.reading.nested import Nested, resolved

DEEPEST = 10
"""Files over each other."""
REPLACES = "_override_"
"""A key of a section that takes the place of those beneath."""
Reader = Callable[[str], Nested]


class Outer:
    """A document in the place of another one (`within`), which has what is not said here."""

    within: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.within, name)


class Layered(Outer):
    """A file's own keys over those beneath it. Changes are made in the file itself.

    layers: flat keys and values, the lowest first; absent: files beneath that are not there, and what takes their place
    """

    syntax = "yaml"

    def __init__(self, own: Nested, layers: list[Mapping[str, Any]], key: str, absent: Mapping[str, str]) -> None:
        self.own = self.within = own
        self.layers, self.key, self.absent = layers, key, absent
        self.known: dict[str, Any] | None = None

    def _flat(self) -> dict[str, Any]:
        if self.known is None:
            flat: dict[str, Any] = {}
            for layer in [*self.layers, _flat(self.within)]:
                flat = _over(flat, layer)
            self.known = {name: value for name, value in flat.items() if name.split(".")[0] != self.key}
        return self.known

    def names(self) -> tuple[str, ...]:
        """Every key of any layer."""
        return tuple(self._flat())

    def get(self, key: str) -> Any:
        """The value of a key in the uppermost layer that has it, with what it refers to; a mapping for a section."""
        flat = self._flat()
        if key in flat:
            return resolved(key, flat[key], flat)
        inside = {name[len(key) + 1 :]: value for name, value in flat.items() if name.startswith(f"{key}.")}
        return inside or MISSING

    def put(self, key: str, value: Any) -> None:
        """Sets the value of a key in the file itself."""
        self.within.put(key, value)
        self.known = None

    def drop(self, key: str) -> None:
        """Removes a key; one of a layer beneath is set to nothing."""
        self.within.drop(key)
        self.known = None
        if self._flat().get(key) not in (None, ""):
            self.put(key, None)


def _over(beneath: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """One layer over others: a value hides the section beneath it, and a section the value."""
    whole = {name.rpartition(".")[0] for name in layer if name.rpartition(".")[2] == REPLACES}
    above = {part for name in layer for part in _sections(name)}
    kept = {
        name: value
        for name, value in beneath.items()
        if name not in above and not any(part in whole or part in layer for part in _sections(name))
    }
    return kept | {name: value for name, value in layer.items() if name.rpartition(".")[2] != REPLACES}


def _sections(name: str) -> list[str]:
    """The sections that a key is in.

    >>> _sections("a.b.c")
    ['a', 'a.b']
    """
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def layered(
    own: Nested, file: str, read: Reader, bundled: Mapping[str, Mapping[str, Any]], key: str = "defaults"
) -> Layered:
    """The document over the files that it names. Raises `ConfigError` where they are no names, or too many over each other.

    read: parses the file of a path; bundled: the tool's own files by name, as flat keys
    """
    absent: dict[str, str] = {}
    return Layered(own, _beneath(_flat(own), file, read, bundled, key, absent), key, absent)


def _all_keys(bundled: Mapping[str, Mapping[str, Any]], name: str) -> frozenset[str]:
    """Return the keys of one of the tool's own files and of those beneath it."""
    own = bundled.get(name, {})
    return (_all_keys(bundled, str(own["defaults"])) if "defaults" in own else frozenset[str]()) | own.keys()


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower())) - {"yaml"}


def _flat(document: Nested) -> dict[str, Any]:
    return {name: document.raw(name) for name in document.names()}


def _beneath(
    flat: Mapping[str, Any],
    file: str,
    read: Reader,
    bundled: Mapping[str, Mapping[str, Any]],
    key: str,
    absent: dict[str, str],
    depth: int = 0,
) -> list[Mapping[str, Any]]:
    """The layers beneath a file, the lowest first; adds to `absent` those that are not there."""
    named = flat.get(key)
    names = named if isinstance(named, list) else [] if named is None else [named]
    refuse(
        not all(isinstance(name, str) for name in names),
        "must name one file, or be a list of files",
        key=key,
        file=file,
    )
    refuse(depth > DEEPEST, f"more than {DEEPEST} files are over each other", key=key, file=file)
    layers: list[Mapping[str, Any]] = []
    for each in names:
        if each == "_self_":
            continue
        name = each.partition("@")[0]  # Hydra's package, and its names without an ending
        name = name if Path(name).suffix in (".yaml", ".yml") else f"{name}.yaml"
        path = Path(file).parent / name
        if file and os.path.isfile(path):
            where = str(path)
            inner: Mapping[str, Any] = _flat(read(where))
        elif Path(name).name in bundled:
            inner, where = bundled[Path(name).name], ""
        else:
            alike = {other: len(flat.keys() & _all_keys(bundled, other)) for other in bundled}
            told = _words(f"{Path(name).stem} {Path(file).stem}")
            nearest = max(alike, key=lambda other: (alike[other], len(told & _words(other)) / len(_words(other))))
            inner, where = (bundled[nearest], "") if alike[nearest] else ({}, "")
            absent[name] = nearest if alike[nearest] else ""
        layers += [*_beneath(inner, where, read, bundled, key, absent, depth + 1), inner]
    return layers


# -- other names ------------------------------------------------------------------------------------------------------

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


class Renamed(Outer):
    """A document under other names. What there is under both names keeps its own.

    choose: which variant of its tool a document is for, and its names
    """

    def __init__(self, own: Document, choose: Callable[[Document], tuple[str, Names]]) -> None:
        self.within, self.choose = own, choose
        self._find()

    def _find(self) -> None:
        self.variant, self.pairs = self.choose(self.within)
        self.theirs: dict[str, str] = {}
        for name in self.within.names():
            ours = renamed(name, self.pairs)
            self.theirs[name if ours in self.theirs else ours] = name

    def _own(self, key: str) -> str:
        return self.theirs.get(key) or renamed(key, [(ours, theirs) for theirs, ours in self.pairs])

    def names(self) -> tuple[str, ...]:
        """Every key, by the name that is read."""
        return tuple(self.theirs)

    def get(self, key: str) -> Any:
        """The value of a key, or `MISSING`."""
        return self.within.get(self._own(key))

    def put(self, key: str, value: Any) -> None:
        """Sets the value of a key under the file's own name."""
        self.within.put(self._own(key), value)
        self._find()

    def drop(self, key: str) -> None:
        """Removes a key if it is there."""
        self.within.drop(self._own(key))
        self._find()

    def shown(self, key: str) -> str:
        """The key as the file spells it."""
        return str(self.within.shown(self._own(key)))


class Without(Outer):
    """A document without some of its keys, as it spells them or with all keys of a section: `dropped` has those that it had.

    >>> from loadgauge.job_files.reading.nested import json_document
    >>> document = Without(json_document('{"a": 1, "b": {"c": 2}}'), ["b"])
    >>> document.names(), document.dropped
    (('a',), ('b.c',))
    """

    def __init__(self, own: Document, ignored: Iterable[str]) -> None:
        self.within = own
        wanted = {key.strip().lstrip("-").replace("-", "_") for key in ignored}
        shown = {name: own.shown(name).lstrip("-").replace("-", "_") for name in own.names()}
        self.dropped = tuple(
            name
            for name, spelled in shown.items()
            if any(key in (name, spelled) or name.startswith(f"{key}.") for key in wanted)
        )

    def names(self) -> tuple[str, ...]:
        """Every other key that has a value, in order."""
        return tuple(name for name in self.within.names() if name not in self.dropped)

    def get(self, key: str) -> Any:
        """The value of a key, or `MISSING`."""
        return MISSING if key in self.dropped else self.within.get(key)
