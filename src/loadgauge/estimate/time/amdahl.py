"""Amdahl's law, and what communication that nothing hides costs, which is another matter.

The law splits the work of one processor. Communication is none of that work: it appears with the second processor, so
what it costs is its time beside compute's, whatever the number of GPUs (`efficiency`).
"""

from __future__ import annotations

from loadgauge.algebra import Size


def speedup(serial: Size, processors: Size) -> Size:
    """1 / (f + (1 - f)/n): how much faster n processors are where a share f of the work runs on one (source: amdahl1967).

    A share of 0.05 % leaves 512 processors 408 times as fast as one, and no number of them more than 2000 times.

    >>> round(speedup(0.0005, 512), 1), round(speedup(0.0005, 512) / 512, 3), round(speedup(0.0005, 1e12))
    (407.8, 0.796, 2000)
    """
    return 1 / (serial + (1 - serial) / processors)


def efficiency(share: Size) -> Size:
    """1 / (1 + r): the share of time that is compute, where exposed communication takes r of compute's time.

    >>> round(efficiency(0.05), 3)
    0.952
    """
    return 1 / (1 + share)
