"""What a dialect's table is made of: ideas, each with the keys that say it and both ways between keys and facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.formats.run import Said

LARGEST = 10**9
TRUE, FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")


class Missing:
    """What a document answers for a key that it does not have."""


MISSING = Missing()


class Document(Protocol):
    """A file's text as keys and values, to be patched in place."""

    syntax: str

    def names(self) -> tuple[str, ...]:
        """Every key that has a value, in order."""

    def get(self, key: str) -> Any:
        """The value of a key, or `MISSING`."""

    def put(self, key: str, value: Any) -> None:
        """Sets a key where it stands, or adds it."""

    def drop(self, key: str) -> None:
        """Takes a key out, if it is there."""

    def shown(self, key: str) -> str:
        """The key as the file writes it."""

    def text(self) -> str:
        """The file."""


class Unknown(ConfigError):
    """A value that only whoever starts the job knows, such as `$TP`."""


class Keys:
    """Typed look-ups in a document. None where a key is absent, empty, or left to another file (`auto`)."""

    def __init__(
        self, document: Document, file: str = "", auto: bool = False, version: tuple[int, ...] | None = None
    ) -> None:
        self.document, self.file, self.auto, self.version = document, file, auto, version
        self.left: list[str] = []
        """Keys left to another file."""

    def wrong(self, key: str, message: str) -> ConfigError:
        """The error to raise about a key."""
        return ConfigError(message, key=self.document.shown(key), file=self.file)

    def since(self, *version: int) -> bool:
        """Whether the file is for this version of the tool, or a later one; the newest unless said otherwise."""
        return self.version is None or self.version >= version

    def has(self, *keys: str) -> bool:
        """Whether any of the keys has a value of its own."""
        return any(self.raw(key) is not None for key in keys)

    def raw(self, key: str) -> Any:
        """The value as it stands."""
        value = self.document.get(key)
        if value is MISSING or value is None or value == "":
            return None
        if self.auto and isinstance(value, str) and value.lower() == "auto":
            if key not in self.left:
                self.left.append(key)
            return None
        return value

    def _one(self, key: str) -> Any:
        value = self.raw(key)
        if isinstance(value, list) and self.document.syntax == "argv":
            value = value[0] if value else True
        if isinstance(value, str) and "$" in value:
            raise Unknown(f"{_short(value)} comes from outside the file", key=self.document.shown(key), file=self.file)
        return value

    def whole(self, key: str, minimum: int = 1) -> int | None:
        """A whole number."""
        value = self._one(key)
        if value is None:
            return None
        if isinstance(value, str):
            text = value.strip().replace("_", "")
            sign = text[:1] == "-"
            if text[sign:].isascii() and text[sign:].isdecimal() and len(text) < 12:
                value = int(text)
        if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST:
            raise self.wrong(key, f"must be a whole number of at least {minimum}, got {_short(value)}")
        return int(value)

    def real(self, key: str) -> float | None:
        """A number."""
        value = self._one(key)
        if value is None:
            return None
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise self.wrong(key, f"must be a number, got {_short(value)}") from None

    def flag(self, key: str) -> bool | None:
        """True or false; on a command line `--key` and `--no-key` too."""
        value = self._one(key)
        if value is None:
            return None
        if isinstance(value, str) and value.lower() in TRUE + FALSE:
            return value.lower() in TRUE
        if self.document.syntax == "argv" and isinstance(value, str):
            return True  # a switch, and the word after it is something else
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, got {_short(value)}")
        return bool(value)

    def word(self, key: str) -> str | None:
        """Text."""
        value = self._one(key)
        if value is None:
            return None
        if isinstance(value, dict | list):
            raise self.wrong(key, f"must be a word, got {_short(value)}")
        return str(value)

    def words(self, key: str) -> list[str] | None:
        """A list of texts; one text is split at its commas."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list):
            value = [value]
        if not all(isinstance(word, str) for word in value):
            raise self.wrong(key, f"must be a list of words, got {_short(value)}")
        if any("$" in word for word in value):
            raise Unknown(f"{_short(value)} comes from outside the file", key=self.document.shown(key), file=self.file)
        return [part for word in value for part in word.replace(",", " ").split()]

    def choice(self, key: str, among: Mapping[str, Any]) -> Any:
        """What a word means; an unknown one is an error that says which there are."""
        value = self._one(key)
        if value is None:
            return None
        name = str(value).lower() if isinstance(value, bool) else str(value)
        if name in among:
            return among[name]
        folded = {word.lower(): meaning for word, meaning in among.items()}
        if name.lower() in folded:
            return folded[name.lower()]
        raise self.wrong(key, f"{_short(value)} is not one that is read (read: {', '.join(among)})")


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits
        return "a value too long to show"
    return text if len(text) <= 40 else f"{text[:37]}..."


Facts = dict[str, Any]
Read = Callable[[Keys], Facts]
Write = Callable[[Facts, Keys], dict[str, Any]]


class Idea(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a file says. `read`: facts from keys, the tool's defaults included; `write`: keys from facts, None
    to take a key out."""

    keys: tuple[str, ...]
    facts: tuple[str, ...]
    read: Read
    write: Write


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's way to say a run.

    versions: which its table was checked against
    syntaxes: of its files, the one that is written first
    marks: keys that no other tool has
    blank: what an export begins from, by syntax
    framework: whose habits a run of it has, where the file does not say
    sections: of files with sections, where keys without dots belong
    style, objects: of options on its command line (`Argv`)
    """

    name: str
    title: str
    versions: str
    syntaxes: tuple[str, ...]
    ideas: tuple[Idea, ...]
    marks: frozenset[str] = frozenset()
    blank: Mapping[str, str] = {}
    auto: bool = False
    framework: str = "huggingface"
    sections: Mapping[str, str] = {}
    style: str = "value"
    objects: frozenset[str] = frozenset()

    @property
    def known(self) -> frozenset[str]:
        """Every key that some idea reads."""
        return frozenset(key for idea in self.ideas for key in idea.keys)

    def read(self, keys: Keys, given: frozenset[str] = frozenset()) -> dict[str, Said]:
        """The facts of a document. `given`: facts known from elsewhere, whose keys need not be readable."""
        found: dict[str, Said] = {}
        for idea in self.ideas:
            try:
                values = idea.read(keys)
            except Unknown as error:
                if given & set(idea.facts):
                    continue
                flags = ", ".join(f"--{fact.replace('_', '-')}" for fact in idea.facts if fact not in ("nodes", "dp"))
                message = f"{str(error).rpartition(': ')[2]}; give {flags}"
                raise ConfigError(message, key=error.key, file=error.file) from None
            present = [key for key in idea.keys if keys.has(key)]
            for fact, value in values.items():
                if value is not None:
                    found[fact] = Said(value, _shown(keys, idea, present, value), default=not present)
        return found

    def unread(self, document: Document) -> tuple[str, ...]:
        """Keys of a document that no idea reads, as the file writes them."""
        known = self.known
        return tuple(document.shown(key) for key in document.names() if key not in known)


def _shown(keys: Keys, idea: Idea, present: list[str], value: Any) -> str:
    """The key that says a value: the one that has it, or else the first two of the idea."""
    own = [key for key in present if str(keys.raw(key)) == str(value)]
    return " and ".join(keys.document.shown(key) for key in (own[:1] or present[:2] or idea.keys[:1]))


def row(
    fact: str,
    *keys: str,
    words: Mapping[str, Any] | None = None,
    default: Any = None,
    kind: str = "whole",
    minimum: int = 1,
    off: Any = None,
) -> Idea:
    """A key that says one fact. Of several keys the first is written, unless the file has one of the others.

    words: the tool's words and ours, the one to write first; `off`: the value of ours at which the key is taken out
    """
    backward: dict[Any, str] = {}
    for theirs, ours in (words or {}).items():
        backward.setdefault(ours, theirs)

    def read(found: Keys) -> Facts:
        said = {}
        for key in keys:
            value = (
                found.choice(key, words) if words is not None else getattr(found, kind)(key, **_limits(kind, minimum))
            )
            if value is not None:
                said[key] = value
        if len(set(said.values())) > 1:
            first, second = list(said)[:2]
            raise found.wrong(second, f"{said[second]} contradicts {found.document.shown(first)} = {said[first]}")
        return {fact: next(iter(said.values()), default)}

    def write(facts: Facts, found: Keys) -> dict[str, Any]:
        value = facts.get(fact)
        present = [key for key in keys if found.document.get(key) is not MISSING]
        target = present[0] if present else keys[0]
        if value is None or value == off:
            return dict.fromkeys(keys)
        if words is None:
            return {target: value} | dict.fromkeys(present[1:])
        if value not in backward:
            return {}
        theirs = {"true": True, "false": False}.get(backward[value], backward[value])
        return {target: theirs} | dict.fromkeys(present[1:])

    return Idea(keys=keys, facts=(fact,), read=read, write=write)


def _limits(kind: str, minimum: int) -> dict[str, int]:
    return {"minimum": minimum} if kind == "whole" else {}
