"""Where a program reads values of tensors: the line, what it got, and where it went on."""

import ast
import functools
import linecache
import os
import sys
from pathlib import Path
from typing import Any

import torch

from loadgauge.pytorch.device.facts.facts import UNKNOWN, Facts


class Read:
    """Reads of values of fake tensors by a program.

    values: lines that got a made-up value, 1 or True, since nobody knows it; branches: by such a line with a condition, the next
        one that ran
    """

    def __init__(self) -> None:
        self.values: list[str] = []
        self.branches: dict[str, int] = {}

    def item(self, tensor: Any, facts: Facts) -> Any:
        """The value of a tensor with one element: what is known of it, else a number made up."""
        fact = facts.item(tensor, asking)
        if fact is not UNKNOWN:
            return fact
        frame = program()
        line = place(frame)
        if line and tensor.dtype is torch.bool:
            goes_on = passing(frame.f_code.co_filename, frame.f_lineno)
            if goes_on is not None:
                facts.assumed[line] = PASSED
                return goes_on
        if tensor.dtype is not torch.bool and (stated := facts.stated.count(line)) is not None:
            return stated
        if line and line not in self.values:
            self.values.append(line)
            if _decides(frame):
                _follow(frame, line, self.branches)
        return True if tensor.dtype is torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

    def array(self, tensor: Any, **_: Any) -> Any:
        """A NumPy array of a tensor's shape, of ones made up."""
        import numpy

        line = place(program())
        if line and line not in self.values:
            self.values.append(line)
        kind = str(tensor.dtype).removeprefix("torch.")
        return numpy.ones([int(size) for size in tensor.shape], dtype="float32" if kind == "bfloat16" else kind)


RUNS_BACKWARD = "_engine_run_backward"
"""The function of PyTorch that runs backward."""


def program() -> Any:
    """The innermost frame that is neither PyTorch's nor this package's; None where an optimizer asks, or backward itself.

    What is computed again in backward is the program's own.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OPTIMIZERS) or frame.f_code.co_name == RUNS_BACKWARD:
            return None
        if of_program(name):
            return frame
        frame = frame.f_back
    return None


def place(frame: Any) -> str:
    """The line that a frame runs: file:line; "" without one."""
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def asking() -> str:
    """The innermost line being run that is neither PyTorch's nor this package's: file:line; "" where an optimizer asks."""
    return place(program())


def of_program(filename: str) -> bool:
    """Return whether a file is neither PyTorch's nor this package's."""
    return not filename.startswith((_TORCH, _OWN))


def _decides(frame: Any) -> bool:
    """Return whether the line that a frame runs has a condition."""
    words = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split()
    return bool(words) and (words[0] in ("if", "elif", "while", "assert") or "if" in words)


def _follow(frame: Any, line: str, jumps: dict[str, int]) -> None:
    """Note the next line that a frame runs, which tells what side of a branch was taken."""
    if sys.gettrace() is not None or frame.f_trace is not None:  # a debugger's
        return
    first = frame.f_lineno

    def step(at: Any, event: str, _: Any) -> Any:
        if event == "line" and at.f_lineno != first:
            jumps[line] = at.f_lineno
        if event != "line" or at.f_lineno != first:
            at.f_trace = None
            sys.settrace(None)
            return None
        return step

    frame.f_trace = step
    sys.settrace(_nothing)


def _nothing(*_: Any) -> None:
    """Traces no function: only the frame that is followed is."""


_TORCH = str(Path(torch.__file__).parent) + os.sep  # without it, torchvision's too
_OPTIMIZERS = str(Path(_TORCH) / "optim") + os.sep
_OWN = str(Path(__file__).parents[2]) + os.sep


def branches(jumps: dict[str, int]) -> tuple[str, ...]:
    """Lines that decided by a value, and where they went on.

    >>> branches({"model.py:12": 13})
    ('model.py:12 went on at line 13',)
    """
    return tuple(f"{line} went on at line {to}" for line, to in jumps.items())


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
    lines: dict[int, bool | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            _wanted(node.test, True, lines)
        elif isinstance(node, ast.If):
            first, second = _stops(node.body), _stops(node.orelse)
            if first != second:
                _wanted(node.test, second, lines)
        elif isinstance(node, ast.Call) and _is_assert(node) and node.args:
            _wanted(node.args[0], True, lines)
    return lines


def _wanted(test: ast.expr, value: bool, lines: dict[int, bool | None]) -> None:
    """Note what the parts of a condition must be for all of it to be a value."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        _wanted(test.operand, not value, lines)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            _wanted(part, value, lines)
    elif not (isinstance(test, ast.Constant)):
        for line in range(test.lineno, (test.end_lineno or test.lineno) + 1):
            lines[line] = value if lines.get(line, value) == value else None


def _stops(body: list[ast.stmt]) -> bool:
    """Return whether statements end by raising, and leave in no other way before."""
    if not body or any(isinstance(node, _LEAVES) for statement in body[:-1] for node in ast.walk(statement)):
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
