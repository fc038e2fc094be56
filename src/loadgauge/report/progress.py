"""Progress of long work, on a terminal only."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """What is being looked at, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()


def progress(done: int, whole: int) -> None:
    """How far the search is, on a terminal only."""
    if sys.stderr.isatty():
        width = 30
        full = done * width // max(whole, 1)
        sys.stderr.write(f"\r{'#' * full}{'.' * (width - full)} {done:,} of {whole:,} structures\x1b[K")
        sys.stderr.flush()


def clear() -> None:
    """Takes the progress away again."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
