"""Checks of values that only stop a program: what a condition must be for it to go on."""

from __future__ import annotations

import ast
import functools
import linecache
from typing import Any

PASSED = "what is checked here is taken to be right: the line only stops the program"


def passing(filename: str, line: int) -> bool | None:
    """The value of a condition read at a line with which the program goes on; None where the line does not only stop it.

    A line only stops the program where it is an `assert`, a call of `_assert`, or an `if` of which one side ends by raising.
    Conditions may be negated and joined; a comparison of plain numbers is left alone, as no one value passes it.
    """
    return _checks(filename).get(line)


@functools.lru_cache(256)
def _checks(filename: str) -> dict[int, bool | None]:
    """By line, what each condition on it must be; None where two on one line differ."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, bool | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            _wanted(node.test, True, found)
        elif isinstance(node, ast.If):
            first, second = _stops(node.body), _stops(node.orelse)
            if first != second:
                _wanted(node.test, second, found)
        elif isinstance(node, ast.Call) and _is_assert(node) and node.args:
            _wanted(node.args[0], True, found)
    return found


def _wanted(test: ast.expr, value: bool, found: dict[int, bool | None]) -> None:
    """Note what the parts of a condition must be for all of it to be a value."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        _wanted(test.operand, not value, found)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            _wanted(part, value, found)
    elif not (isinstance(test, ast.Constant)):
        for line in range(test.lineno, (test.end_lineno or test.lineno) + 1):
            found[line] = value if found.get(line, value) == value else None


def _stops(body: list[ast.stmt]) -> bool:
    """Return whether statements end by raising, and leave in no other way before."""
    if not body or any(isinstance(one, _LEAVES) for statement in body[:-1] for one in ast.walk(statement)):
        return False
    last = body[-1]
    if isinstance(last, ast.Raise):
        return True
    if isinstance(last, ast.Assert):
        return _false(last.test)
    return (
        isinstance(last, ast.Expr)
        and isinstance(last.value, ast.Call)
        and _is_assert(last.value)
        and bool(last.value.args)
        and _false(last.value.args[0])
    )


def _is_assert(call: ast.Call) -> bool:
    """Return whether it is `torch._assert(...)`."""
    return (call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")) == "_assert"


def _false(test: Any) -> bool:
    return isinstance(test, ast.Constant) and not test.value


_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom)
