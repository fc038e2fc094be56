"""Files of its own that a program reads, its modules and data, by which its capture is kept.

A program that asks for variables of the environment may do something else each time: its capture is not kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from loadgauge.pytorch.capture.lists.store import PACKAGE

LARGE = 1 << 24
"""Bytes of a file from which on its size and time stand for its contents."""
MOST = 1000
"""Files of a program whose capture is kept."""
ASKS = re.compile(rb"\b(?:environ|getenv|argv)\b")
_OF_PYTHON = ("stdlib", "platstdlib", "purelib", "platlib")

_heard: set[str] | None = None
_hooked: list[bool] = []


def _hear(event: str, details: tuple[Any, ...]) -> None:
    if _heard is not None and event == "open" and isinstance(details[0], str):
        _heard.add(details[0])


@contextmanager
def reading() -> Iterator[set[str]]:
    """Collect the paths of the files that are opened in the body, and of the modules that it imports."""
    global _heard
    if not _hooked:
        sys.addaudithook(_hear)
        _hooked.append(True)
    _heard = found = set()
    before = set(sys.modules)
    try:
        yield found
    finally:
        _heard = None
        found |= {getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}


def seals(paths: Iterable[str]) -> dict[str, str]:
    """Return what stays the same of each of a program's own files as long as it does; none where that does not say what it does."""
    of_python = {path for name in _OF_PYTHON if (path := sysconfig.get_paths().get(name))}
    others = (*of_python, *site.getsitepackages(), site.getusersitepackages(), str(PACKAGE), "/proc", "/sys", "/dev")
    inside = tuple(os.path.join(os.path.abspath(other), "") for other in others)
    own = {os.path.abspath(path) for path in paths if not path.endswith(".pyc")}
    own = {path for path in own if not path.startswith(inside) and os.path.isfile(path)}
    if len(own) > MOST or any(path.endswith(".py") and _asks(path) for path in own):
        return {}
    return {path: _seal(path) for path in sorted(own)}


def _asks(path: str) -> bool:
    with open(path, "rb") as file:
        return ASKS.search(file.read()) is not None


def _seal(path: str) -> str:
    found = os.stat(path)
    if found.st_size >= LARGE:
        return f"{found.st_size} {found.st_mtime_ns}"
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def unchanged(files: Mapping[str, str]) -> bool:
    """Return whether files are as they were when they were sealed."""
    return all(os.path.isfile(path) and _seal(path) == seal for path, seal in files.items())
