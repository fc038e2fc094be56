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
from functools import cache
from pathlib import Path
from typing import Any

from loadgauge.pytorch.capture.lists.store import PACKAGE

LARGE = 1 << 24
"""Bytes of a file from which on its size and time stand for its contents."""
MOST = 1000
"""Files of a program whose capture is kept."""
ASKS = re.compile(rb"\b(?:environ|getenv|argv)\b")
_OF_PYTHON = ("stdlib", "platstdlib", "purelib", "platlib")

_heard: list[set[str]] = []


@cache
def _listen() -> None:
    """Tell the innermost `reading` of every file that is opened, from now on."""

    def hear(event: str, details: tuple[Any, ...]) -> None:
        if _heard and event == "open":
            _heard[-1].add(str(details[0]))

    sys.addaudithook(hear)


@contextmanager
def reading() -> Iterator[set[str]]:
    """Collect the paths of the files that are opened in the body, and of the modules that it imports."""
    _listen()
    before, paths = set(sys.modules), set[str]()
    _heard.append(paths)
    try:
        yield paths
    finally:
        _heard.pop()
        paths.update(getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before)


def seals(paths: Iterable[str]) -> dict[str, str]:
    """Return what stays the same of each of a program's own files as long as it does; none where that does not say what it does."""
    of_python = {path for name in _OF_PYTHON if (path := sysconfig.get_paths().get(name))}
    others = (*of_python, *site.getsitepackages(), site.getusersitepackages(), str(PACKAGE), "/proc", "/sys", "/dev")
    inside = tuple(os.path.join(os.path.abspath(other), "") for other in others)
    own = {os.path.abspath(path) for path in paths if not path.endswith(".pyc")}
    own = {path for path in own if not path.startswith(inside) and os.path.isfile(path)}
    asks = any(path.endswith(".py") and ASKS.search(Path(path).read_bytes()) for path in own)
    return {} if asks or len(own) > MOST else {path: _seal(path) for path in sorted(own)}


def _seal(path: str) -> str:
    status = os.stat(path)
    large = status.st_size >= LARGE
    return f"{status.st_size} {status.st_mtime_ns}" if large else hashlib.sha256(Path(path).read_bytes()).hexdigest()


def unchanged(files: Mapping[str, str]) -> bool:
    """Return whether files are as they were when they were sealed."""
    return all(os.path.isfile(path) and _seal(path) == seal for path, seal in files.items())
