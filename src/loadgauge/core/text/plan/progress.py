"""Progress of long searches on stderr, shown only on a terminal."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Show what is being searched, on one line that the next call replaces."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()


def progress(done: int, whole: int) -> None:
    """Show a bar of `done` out of `whole` structures."""
    if sys.stderr.isatty():
        width = 30
        full = done * width // max(whole, 1)
        sys.stderr.write(f"\r{'#' * full}{'.' * (width - full)} {done:,} of {whole:,} structures\x1b[K")
        sys.stderr.flush()


def clear() -> None:
    """Erase the line of progress."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
