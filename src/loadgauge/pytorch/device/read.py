"""Where a program reads values of tensors: the line, what it got, and where it went on."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from typing import Any

import torch

from loadgauge.pytorch.device.facts.facts import UNKNOWN, Facts
from loadgauge.pytorch.device.raising import PASSED, passing


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
        known = facts.item(tensor, asking)
        if known is not UNKNOWN:
            return known
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


def _follow(frame: Any, line: str, found: dict[str, int]) -> None:
    """Note the next line that a frame runs, which tells what side of a branch was taken."""
    if sys.gettrace() is not None or frame.f_trace is not None:  # a debugger's
        return
    first = frame.f_lineno

    def step(at: Any, event: str, _: Any) -> Any:
        if event == "line" and at.f_lineno != first:
            found[line] = at.f_lineno
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


def branches(found: dict[str, int]) -> tuple[str, ...]:
    """Lines that decided by a value, and where they went on.

    >>> branches({"model.py:12": 13})
    ('model.py:12 went on at line 13',)
    """
    return tuple(f"{line} went on at line {to}" for line, to in found.items())
