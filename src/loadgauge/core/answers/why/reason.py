"""A reason: formulas with letters, with a run's numbers in their place, and their values."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.algebra import Size


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A formula with letters, with the run's numbers in their place, and its value. `letters` is empty where only the value holds.

    legend: of each letter, what it is and its number
    """

    what: str
    letters: str
    numbers: str
    value: float
    unit: str
    legend: dict[str, tuple[str, float]] = {}


class Rows(msgspec.Struct, frozen=True):
    """A table of a reason, in words and numbers: its title, its heads, its rows; the last one is their sum where `summed`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    summed: bool = False


PLAIN = (
    "topic", "what", "value", "unit", "basis", "rule", "lines", "columns", "rows", "notes", "see", "sources",
)  # fmt: skip
"""Fields of a reason that its document has."""


class Reason(Answer, frozen=True, kw_only=True):
    """Why a total is what it is. columns, rows: what it is summed from, in words and numbers; tables: more of these"""

    form: str = "network.explain"
    writer: str = "loadgauge.core.text.estimate.reason:write"
    topic: str
    what: str
    value: float | None
    unit: str
    basis: str
    rule: str
    lines: tuple[Line, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str | float, ...], ...] = ()
    notes: tuple[str, ...] = ()
    see: tuple[str, ...] = ()
    """Commands and flags that show more."""
    sources: tuple[str, ...] = ()
    where: str = ""
    """A sentence on the place and the moment of the value."""
    tables: tuple[Rows, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the reason as plain values for JSON."""
        return super().to_dict() or {name: msgspec.to_builtins(getattr(self, name)) for name in PLAIN}


_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow,
}  # fmt: skip


def arithmetic(text: str) -> float:
    """Return the value of a sum written with numbers, brackets and + - * / **. Raises `ValueError` for anything else.

    >>> arithmetic("2*(8 - 1)/8 * 1e6")
    1750000.0
    """

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(f"no arithmetic: {text}")

    return value(ast.parse(text, mode="eval"))


def line(meaning: str, letters: str, value: Size, unit: str, legend: Mapping[str, tuple[str, Size]]) -> Line:
    """Put numbers in a formula. Its letters are left out where the result is not `value`, to a millionth.

    >>> line("tokens/s of a GPU", "T/(t*n)", 500.0, "tokens/s", {"T": ("", 8000), "t": ("", 2.0), "n": ("", 8)}).numbers
    '8000/(2*8)'
    """
    numbers = {name: (meaning, float(number)) for name, (meaning, number) in legend.items()}
    used = {name: numbers[name] for name in numbers if re.search(rf"\b{name}\b", letters)}
    filled = re.sub(r"[A-Za-z_]+\w*", lambda match: _number(used[match[0]][1]), letters)
    holds = abs(arithmetic(filled) - value) <= 1e-6 * abs(value)
    return Line(
        what=meaning,
        letters=letters if holds else "",
        numbers=filled if holds else "",
        value=float(value),
        unit=unit,
        legend=used if holds else {},
    )


def _number(value: float) -> str:
    return str(round(value)) if value == round(value) and abs(value) < 1e15 else f"{value:.9g}"


def summed(meaning: str, parts: Mapping[str, Size], value: Size, unit: str) -> Line:
    """Return a line that adds up named parts."""
    left = {name: float(part) for name, part in parts.items() if part}
    letters = " + ".join(left) or "0"
    numbers = " + ".join(_number(part) for part in left.values()) or "0"
    holds = abs(arithmetic(numbers) - value) <= 1e-6 * abs(value)
    return Line(
        what=meaning, letters=letters if holds else "", numbers=numbers if holds else "", value=float(value), unit=unit
    )
