"""Reads files that a user names: only regular ones, up to a size limit."""

import os
import stat
import sys
from pathlib import Path

from loadgauge.core.base.errors import refuse

LARGEST_TEXT = 256 * 10**6
"""Bytes of a log, or of what `loadgauge trace --json` says."""
LARGEST_SNAPSHOT = 4 * 10**9
PICKLE = b"\x80"
"""The byte that a snapshot begins with."""
UNSTATED = 1 << 16
"""Bytes that are read of a file whose size is not stated (those of /proc)."""


def content_of(path: Path, largest: int) -> bytes:
    """Reads a regular file. Raises ConfigError for anything else (a folder, a device, a pipe), which is not opened,
    and for more than `largest` bytes; OSError where it cannot be read.

    >>> content_of(Path("/dev/zero"), 10)
    Traceback (most recent call last):
    loadgauge.core.base.errors.ConfigError: /dev/zero: is not a regular file
    """
    refuse(not stat.S_ISREG(os.stat(path).st_mode), "is not a regular file", file=str(path))
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(max(size, UNSTATED) + 1) if size <= largest else b""
    refuse(max(size, len(content)) > largest, f"is larger than {largest / 1e6:,.0f} MB", file=str(path))
    return content


def is_pickle(path: Path) -> bool:
    """Return whether a regular file begins as a snapshot does. Raises ConfigError for a pipe or a device, which is not opened."""
    if not path.is_file():
        content_of(path, 0)  # says what it is instead
    with path.open("rb") as file:
        return file.read(1) == PICKLE


def read_stdin() -> str:
    """The text of standard input, which a terminal is asked for. Raises ConfigError for more than `LARGEST_TEXT`."""
    if sys.stdin.isatty():
        print("Paste the error, then press Enter and Ctrl-D.", file=sys.stderr)
    text = sys.stdin.read(LARGEST_TEXT + 1)
    refuse(len(text) > LARGEST_TEXT, f"is larger than {LARGEST_TEXT / 1e6:,.0f} MB", file="-")
    return text
