"""Counters of memory: which of our figures a published peak is to be compared with.

Allocated, reserved and what the driver shows are three readings of one run; each is compared with its own.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgauge.estimate.result import Estimate
from loadgauge.validate.models import Inexpressible
from loadgauge.validate.runs import Run

RESERVE = (0.0, 0.047, 0.10)
"""What the caching allocator holds beyond the allocated peak, as a share of it: low, usual, high. Measured: the 19 runs
of SimuMax's B200 release that print both counters, whose median is 1.047 and whose extremes are 1.028 and 1.093."""

Kind = Literal["allocated", "reserved", "device", "unknown"]


class Counter(msgspec.Struct, frozen=True):
    """A counter, and whether it is of the last pipeline stage instead of the worst rank."""

    kind: Kind
    last_stage: bool = False


def counter(run: Run) -> Counter:
    """The counter of a row, by the words of its source.

    >>> counter(Run(id="x", memory_kind="allocated (torch max_memory_allocated; last rank = last pipeline stage)"))
    Counter(kind='allocated', last_stage=True)
    >>> counter(Run(id="x", memory_kind="nvidia-smi snapshot (integer GB)")).kind
    'device'
    """
    text = run.memory_kind.lower()
    if "not per gpu" in text:
        raise Inexpressible(f"memory_kind: {run.memory_kind!r} is not the memory of one GPU")
    last = "last rank" in text
    if text.startswith(("allocated", "active")):
        return Counter("allocated", last)  # active is allocated, in blocks of 512 bytes
    if text.startswith("reserved"):
        return Counter("reserved", last)
    if text.startswith("nvidia-smi"):
        return Counter("device", last)
    return Counter("unknown", last)


def reading(kind: Counter, estimate: Estimate) -> tuple[float, float, float]:
    """What the counter would show [bytes]: low, predicted, high. An unknown one lies between allocated and device."""
    memory = estimate.memory
    outside = memory.parts["outside"] - memory.workspaces
    allocated = (memory.stages[-1] if kind.last_stage else memory.total) - outside
    if kind.kind == "allocated":
        return allocated, allocated, allocated
    low, usual, high = (allocated * (1 + share) for share in RESERVE)
    if kind.kind == "reserved":
        return low, usual, high
    if kind.kind == "device":
        return low + memory.low - memory.allocated, usual + outside, high + outside
    return allocated, usual, high + outside
