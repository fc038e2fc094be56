"""Counters of memory: which predicted figure a measured peak is compared with.

Allocated, reserved and what the driver shows are three readings of one run; each is compared with its own.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.estimate.result import Estimate

RESERVE = (0.0, 0.047, 0.10)
"""What the caching allocator holds beyond the allocated peak, as a share of it: low, usual, high. Measured: the 19 runs
of SimuMax's B200 release that print both counters, whose median is 1.047 and whose extremes are 1.028 and 1.093."""

Kind = Literal["allocated", "reserved", "device", "unknown"]


class Counter(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A counter, and whether it is of the last pipeline stage instead of the worst rank."""

    kind: Kind = "unknown"
    last_stage: bool = False

    @classmethod
    def parse(cls, text: str) -> Counter:
        """Read a counter from text: a kind, perhaps followed by `last stage`. Raises `ConfigError` for any other word.

        >>> Counter.parse("allocated, last stage"), Counter.parse("")
        (Counter(kind='allocated', last_stage=True), Counter(kind='unknown', last_stage=False))
        """
        kind, _, stage = (part.strip() for part in text.partition(","))
        if (kind or "unknown") not in get_args(Kind) or stage not in ("", "last stage"):
            raise ConfigError(f"must be one of {', '.join(get_args(Kind))}, got {text[:40]!r}", key="memory_kind")
        return cls(kind or "unknown", bool(stage))  # type: ignore[arg-type]


UNKNOWN = Counter()


def reading(counter: Counter, estimate: Estimate) -> tuple[float, float, float]:
    """Return what the counter would show [bytes]: low, predicted, high. An unknown one is between allocated and device."""
    memory = estimate.memory
    outside = memory.parts["outside"] - memory.workspaces
    allocated = (memory.stages[-1] if counter.last_stage else memory.total) - outside
    if counter.kind == "allocated":
        return allocated, allocated, allocated
    low, usual, high = (allocated * (1 + share) for share in RESERVE)
    if counter.kind == "reserved":
        return low, usual, high
    if counter.kind == "device":
        return low + memory.low - memory.allocated, usual + outside, high + outside
    return allocated, usual, high + outside
