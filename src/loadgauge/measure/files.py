"""Files that a person names: only ordinary ones, and not larger than what they should be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from loadgauge.errors import ConfigError

LARGEST_TEXT = 256 * 10**6
"""Bytes of a log, or of what `loadgauge trace --json` says."""
LARGEST_SNAPSHOT = 4 * 10**9


def content_of(path: Path, largest: int) -> bytes:
    """What is in a regular file. Raises ConfigError for anything else (a folder, a device, a pipe), which is not opened,
    and for more than `largest` bytes; OSError where it cannot be read.

    >>> content_of(Path("/dev/zero"), 10)
    Traceback (most recent call last):
    loadgauge.errors.ConfigError: /dev/zero: is not a regular file
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ConfigError("is not a regular file", file=str(path))
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ConfigError(f"is larger than {largest / 1e6:,.0f} MB", file=str(path))
    return content
