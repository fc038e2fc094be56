"""Words and variables of a shell script. Nothing is run; a value that is only known at run time keeps its dollar sign."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from loadgauge.core.base.errors import ConfigError

MOST_WORDS = 15_000
LONGEST, DEEPEST = 500, 20
"""Letters of a word that is expanded, and levels of an expression."""
_BRACES = r"\$\{[^{}]*\}"
for _ in range(3):
    _BRACES = rf"\$\{{(?:[^{{}}]|{_BRACES})*\}}"
WORD = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|\$\(\(.*?\)\)|\$\([^)]*\)|""" + _BRACES + r"""|\\[^\n]|[^\s;()&|{}<>"'\\`])+"""
"""A word with its quotes and expansions, which may stand in each other: `${A:-"${B}/c"}`."""
ASSIGNED = re.compile(rf"(?:^|(?<=[\s;]))(?:export\s+|local\s+)?([A-Za-z_]\w*)=({WORD}|)", re.MULTILINE | re.DOTALL)
LETTERS = re.compile(
    rf"""(?P<skip>\s+|\\\r?\n|[;()&|{{}}<>`]|(?:(?<=\s)|(?<=^))\#[^\n]*)|(?P<word>{WORD})""", re.DOTALL | re.MULTILINE
)
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
"""Operators of `$((...))`, which divides as whole numbers."""
LARGEST = 10**12


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
        name = match[1]
        value = _value(match[2], variables) if match[2] else ""
        if variables.get(name, value) != value:
            unknown.add(name)
        variables[name] = value
    return {name: value for name, value in variables.items() if name not in unknown and "$" not in value}


def _expanded(text: str, variables: dict[str, str]) -> str:
    """`$NAME`, `${NAME}`, `${NAME:-default}`, `$((A * B + C))` and `$(expr A / B)`, as far as they are known.

    >>> _expanded("${DIR:-${HOME:-/home}/x}-$((2 * (N + 1)))-$N", {"N": "3"})
    '/home/x-8-3'
    >>> _expanded("$((N / 0)) ${M}", {"N": "3"})
    '$((N / 0)) ${M}'
    """
    if "$" not in text or len(text) > LONGEST:
        return text
    parts: list[str] = []
    start = 0
    while start < len(text):
        end = _expansion_end(text, start)
        raw = text[start:end]
        parts.append(_expand_one(raw, variables) if raw[0] == "$" else raw)
        start = end
    return "".join(parts)


def _expansion_end(text: str, start: int) -> int:
    """Where an expansion that begins at a dollar sign ends, else where the next one begins."""
    if text[start] != "$":
        following = text.find("$", start)
        return len(text) if following < 0 else following
    bracket = text[start + 1 : start + 2]
    if bracket not in ("{", "("):
        name = re.compile(r"[A-Za-z_]\w*").match(text, start + 1)
        return start + 1 if name is None else name.end()
    depth, closing = 0, {"{": "}", "(": ")"}[bracket]
    for index in range(start + 1, len(text)):
        depth += (text[index] == bracket) - (text[index] == closing)
        if depth == 0:
            return index + 1
    return len(text)


def _expand_one(raw: str, variables: dict[str, str]) -> str:
    """One expansion; as it is spelled where its value is not known."""
    if raw.startswith("$(("):
        value = _arithmetic(_expanded(raw[3:-2], variables), variables)
        return raw if value is None else str(value)
    if raw.startswith("$("):
        return re.sub(r"\$\(expr\s+([\d\s*/\\]{1,100})\)$", _quotient, "$(" + _expanded(raw[2:], variables))
    match = re.fullmatch(r"\$\{?([A-Za-z_]\w*)(?::?[-=](.*?))?\}?", raw, re.DOTALL)
    if match is None:
        return raw
    if match[1] in variables:
        return variables[match[1]]
    default = None if match[2] is None else _expanded(match[2], variables).strip("\"'")
    return raw if default is None or "$" in default else default


def _arithmetic(text: str, variables: dict[str, str]) -> int | None:
    """The value of an expression of whole numbers and names; None where it has anything else."""
    try:
        return _worked_out(ast.parse(text.strip(), mode="eval").body, variables, 0)
    except (ValueError, SyntaxError, ZeroDivisionError, KeyError, TypeError, RecursionError, MemoryError):
        return None


def _worked_out(node: ast.expr, variables: dict[str, str], depth: int) -> int:
    if depth > DEEPEST:
        raise ValueError
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.Name):
        value = int(variables[node.id])
    elif isinstance(node, ast.BinOp):
        left, right = (_worked_out(side, variables, depth + 1) for side in (node.left, node.right))
        value = OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_worked_out(node.operand, variables, depth + 1)
    else:
        raise ValueError
    if abs(value) > LARGEST:
        raise ValueError
    return value


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
