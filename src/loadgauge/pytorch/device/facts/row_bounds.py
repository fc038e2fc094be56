"""How many rows data can choose at most, where a library's own code says so (`data/capture/bounds.toml`)."""

from __future__ import annotations

import functools
import linecache
import sys
import tomllib
from pathlib import PurePath
from typing import Any

from loadgauge.core.base.package_data import read_data


def bound(line: str) -> tuple[int, str] | None:
    """The most rows there can be at a line that is running now, and of what that is the product; None where nothing says it.

    line: such as "ops/boxes.py:41"
    """
    file, _, number = line.rpartition(":")
    text = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    for one in _table():
        if one["line"] == text and PurePath(file).as_posix().endswith(one["file"]):
            return _product(one["rows"], _running(file, int(number)))
    return None


def _product(names: list[str], frame: Any) -> tuple[int, str] | None:
    """A product of attributes of what a frame has at hand; None where one of them is no number."""
    found = 1.0
    for name in names:
        first, *path = name.split(".")
        value = None if frame is None else frame.f_locals.get(first)
        for part in path:
            value = getattr(value, part, None)
        if not isinstance(value, int | float):
            return None
        found *= value
    return int(found), " x ".join(name.removeprefix("self.") for name in names)


def _running(file: str, number: int) -> Any:
    """The innermost frame that runs a line."""
    frame: Any = sys._getframe(1)
    while frame is not None and (frame.f_lineno != number or frame.f_code.co_filename != file):
        frame = frame.f_back
    return frame


@functools.cache
def _table() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(read_data("capture/bounds.toml"))["bound"]
    return found
