"""How many rows a program's own data chooses, at lines where nobody but the user can know: `nonzero`, `where` and masks."""

import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from loadgauge.core.base import ConfigError, NotModelled, read_table
from loadgauge.pytorch.device.facts.fact_kinds import Known, Rows, Same

MOST = "most"
"""In place of a number: all rows that a mask has, or as many as the code takes at most (`most_at`)."""


class StatedRows:
    """Rows that data chooses, as the user states them by line.

    stated: by line, such as "boxes.py:41" or "ops/boxes.py:41", the rows each time it is reached in a step, one after another and
        then from the first again, or `MOST`; the key "" is for every other line
    taken: by line, what was taken for granted
    """

    def __init__(self, stated: Mapping[str, Sequence[int] | str], taken: dict[str, str]) -> None:
        self.given, self.taken = stated, taken
        self._reached: dict[str, int] = {}
        self._used: set[str] = set()

    def begin(self) -> None:
        """A step begins: lines are reached for the first time again."""
        self._reached.clear()

    def rows(self, elements: Any, line: Callable[[], str], bound: Any = None) -> Any:
        """How many of so many elements are chosen; None where nobody says.

        bound: as many as the program itself can have marked; line: that asks, "" in backward

        Raises NotModelled for a line with several numbers that recomputation reaches again.
        """
        if not self.given and bound is None:
            return None
        at = line()
        again = torch._C._current_autograd_node() is not None
        if again and not at:  # backward itself: it asks for what forward was told
            return None
        key = self._key(at)
        stated = self.given.get(key, MOST if bound is not None else None)
        if stated is None:
            return None
        self._used.add(key)
        if stated == MOST:
            if bound is None and (most := most_at(at)) is not None:
                self.taken[at] = f"as many rows as the code takes at most: {most[0]} ({most[1]})"
                return most[0] if most[0] < elements else elements
            if bound is None:
                self.taken[at] = "which rows are chosen is data: as many as there are, the most that can be"
                return elements
            self.taken[at] = "as many rows as the program marked, none of them twice"
            return bound if bound < elements else elements  # of a symbol, this is a guard
        if again and len(set(stated)) > 1:
            raise NotModelled(
                f"{at} selects other rows each time it runs, and backward runs it again: which rows backward sees is not known"
            )
        reached = self._reached.get(at, 0)
        self._reached[at] = reached + (not again)
        number = int(stated[reached % len(stated)])
        self.taken[at] = f"{', '.join(map(str, stated))} rows are chosen, or as many as there are (--rows)"
        return number if number < elements else elements

    def count(self, line: str) -> int | None:
        """The number that a program reads at a line, such as how many rows its longest sequence has; None where none is stated.

        It is the first of several.
        """
        stated = self.given.get(self._key(line) or line, MOST)
        if stated == MOST or not line:
            return None
        self._used.add(self._key(line))
        self.taken[line] = f"{stated[0]} is what the program reads there (--rows)"
        return int(stated[0])

    def _key(self, line: str) -> str:
        return next((key for key in self.given if key and (line == key or line.endswith(f"/{key}"))), "")

    def check(self) -> None:
        """Raise ConfigError for a line at which no rows were asked for."""
        unused = [key for key in self.given if key and key not in self._used]
        if unused:
            raise ConfigError(f"no rows are chosen by data at {', '.join(unused)}", key="rows")


def marks(mask: Any, indices: Any, values: Any, before: Any, mark: Any) -> Rows | None:
    """What is known of a mask of zeros in which places are marked: at most so many elements are not 0; None of anything else.

    before, mark: what is known of the mask and of the values
    """
    of_list = getattr(values, "constant", None)  # a number of the program's, as PyTorch itself keeps it
    mark = Known(of_list) if mark is None and of_list is not None else mark
    if not isinstance(before, Same) or not isinstance(mark, Same | Known) or mask.dim() != 1 or len(indices) != 1:
        return None
    if values.numel() != 1 or indices[0] is None or indices[0].dtype in (torch.bool, torch.uint8):
        return None
    with _disable_current_modes():
        zeros = bool(before.value == 0) and bool((mark.value != 0).all())
    return Rows(indices[0].numel(), True) if zeros else None


def fills(args: Any, value: Any) -> bool:
    """Return whether `index_put` writes one number of the program's where a mask is true, which takes no places: CUDA fills a mask.

    value: what is known of the values. Source: ATen/native/TensorAdvancedIndexing.h (canDispatchToMaskedFill).
    """
    indices, values = args[1:3]
    masks_named = [mask for mask in indices if mask is not None]
    number = (
        isinstance(value, Same | Known) or values.device.type == "cpu" or getattr(values, "constant", None) is not None
    )
    masks = len(masks_named) == 1 and masks_named[0].dtype in (torch.bool, torch.uint8)
    return bool(masks and values.dim() == 0 and number and not (len(args) > 3 and args[3]))


def most_at(line: str) -> tuple[int, str] | None:
    """The most rows there can be at a line that is running now, and of what that is the product; None where nothing says it.

    line: such as "ops/boxes.py:41"
    """
    file, _, number = line.rpartition(":")
    text = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    path, bounds = PurePath(file).as_posix(), read_table("capture/bounds.toml")["bound"]
    rows = next((one["rows"] for one in bounds if one["line"] == text and path.endswith(one["file"])), None)
    return None if rows is None else _product(rows, _running(file, int(number)))


def _product(names: list[str], frame: Any) -> tuple[int, str] | None:
    """A product of attributes of what a frame has at hand; None where one of them is no number."""
    rows = 1.0
    for name in names:
        first, *path = name.split(".")
        value = None if frame is None else frame.f_locals.get(first)
        for part in path:
            value = getattr(value, part, None)
        if not isinstance(value, int | float):
            return None
        rows *= value
    return int(rows), " x ".join(name.removeprefix("self.") for name in names)


def _running(file: str, number: int) -> Any:
    """The innermost frame that runs a line."""
    frame: Any = sys._getframe(1)
    while frame is not None and (frame.f_lineno != number or frame.f_code.co_filename != file):
        frame = frame.f_back
    return frame
