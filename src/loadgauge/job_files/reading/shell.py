"""Words and variables of a shell script. Nothing is run; a value that is only known at run time keeps its dollar sign."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from loadgauge.core.base.errors import ConfigError

MOST_WORDS = 15_000
ASSIGNED = re.compile(
    r"(?:^|(?<=[\s;]))(?:export\s+|local\s+)?([A-Za-z_]\w*)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s;()#]*)", re.MULTILINE
)
LETTERS = re.compile(
    r"""(?P<skip>\s+|\\\r?\n|[;()&|{}<>`]|(?:(?<=\s)|(?<=^))\#[^\n]*)"""
    r"""|(?P<word>(?:"(?:[^"\\]|\\.)*"|'[^']*'|\$\(\(.*?\)\)|\$\([^)]*\)|\$\{[^}]*\}|\\[^\n]|[^\s;()&|{}<>"'\\`])+)""",
    re.DOTALL | re.MULTILINE,
)


class Word(NamedTuple):
    """A word of a script: its `text`, and `raw` as spelled from `start` to `end`; `first`: of a line or of a command."""

    start: int
    end: int
    text: str
    first: bool = False
    raw: str = ""


def words_of(source: str, variables: dict[str, str]) -> Iterator[Word]:
    """Yields the words of a script without its comments; a quoted "--flag value" yields the words inside.

    Raises `ConfigError` for a script of more than `MOST_WORDS` words.
    """
    place, count, first = 0, 0, True
    while place < len(source):
        match = LETTERS.match(source, place)
        if match is None:
            place += 1
            continue
        if match["word"] is None:
            # A backslash before the end of a line joins it to the next.
            first |= match["skip"][0] != "\\" and any(letter in match["skip"] for letter in "\n;()&|{}")
        else:
            count += 1
            if count > MOST_WORDS:
                raise ConfigError(f"has more than {MOST_WORDS} words")
            yield from _parts(match.start(), match["word"], first, variables)
            first = False
        place = match.end()


def _parts(start: int, text: str, first: bool, variables: dict[str, str]) -> Iterator[Word]:
    inner = text[1:-1]
    if text[0] in "\"'" and text[-1] == text[0] and inner.startswith("--") and " " in inner:
        # A quoted "--flag value" of an array: its words, each at its place.
        for part in re.finditer(r"\S+", inner):
            place = start + 1 + part.start()
            yield Word(place, place + len(part[0]), _value(part[0], variables), not part.start(), part[0])
    else:
        yield Word(start, start + len(text), _value(text, variables), first, text)


def _value(text: str, variables: dict[str, str]) -> str:
    single = text.startswith("'") and text.endswith("'")
    plain = re.sub(r"\\(.)", r"\1", re.sub(r"(?<!\\)[\"']", "", text)) if not single else text[1:-1]
    return plain if single else _expanded(plain, variables)


def variables_of(source: str) -> dict[str, str]:
    """The variables of a script, by name, that are set to one plain value; one set to different values is left out."""
    variables: dict[str, str] = {}
    unknown: set[str] = set()
    for match in ASSIGNED.finditer(source):
        line = source.rfind("\n", 0, match.start()) + 1
        before = source[line : match.start()].strip()
        if before.startswith("#") or (
            before not in ("", "export", "local") and not re.fullmatch(r"(?:\w+=\S*\s*;?\s*)+", before)
        ):
            continue
        name, value = match[1], match[2].strip("\"'")
        start = match.start(2)
        if source.startswith("$((", start):
            stop = source.find("))", start)
            value = source[start : stop + 2] if 0 < stop - start < 200 else value
        value = _expanded(value, variables)
        if variables.get(name, value) != value:
            unknown.add(name)
        variables[name] = value
    return {name: value for name, value in variables.items() if name not in unknown and "$" not in value}


def _expanded(text: str, variables: dict[str, str]) -> str:
    """`$NAME`, `${NAME}`, `${NAME:-default}`, `$((A * B))` and `$(expr A / B)`, as far as they are known."""
    if "$" not in text or len(text) > 500:
        return text

    def known(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in variables:
            return variables[name]
        return match[0] if default is None or "$" in default else default.strip("\"'")

    plain = re.sub(r"\$\{(\w+)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)", known, text)

    def product(match: re.Match[str]) -> str:
        words = [variables.get(word, word) for word in re.split(r"\s*\*\s*", match[1].strip())]
        if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
            return match[0]
        result = 1
        for word in words:
            result *= int(word)
        return str(result)

    plain = re.sub(r"\$\(\(([\w\s*]{1,100})\)\)", product, plain)
    return re.sub(r"\$\(expr\s+([\d\s*/\\]{1,100})\)", _quotient, plain)


def _quotient(match: re.Match[str]) -> str:
    """`$(expr 32 / 4 / 2)` as a number, where it is one of whole numbers, times and divided by."""
    first, *rest = re.sub(r"\\", "", match[1]).split()
    if not first.isdecimal() or len(match[1]) > 60 or len(rest) % 2:
        return match[0]
    result = int(first)
    for sign, word in zip(rest[::2], rest[1::2], strict=True):
        if sign not in ("*", "/") or not word.isdecimal() or (sign == "/" and int(word) == 0):
            return match[0]
        result = result * int(word) if sign == "*" else result // int(word)
    return str(result)
