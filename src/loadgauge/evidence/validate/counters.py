"""Counters of memory: which predicted figure a measured peak is compared with.

Allocated, reserved and what the driver shows are three readings of one run; each is compared with its own.
"""

from typing import Literal, Self, get_args

import msgspec

from loadgauge.core.base.errors import refuse
from loadgauge.core.estimate.memory.counters import Reading
from loadgauge.core.estimate.result import Estimate

Kind = Literal["allocated", "active", "reserved", "device", "nvidia-smi", "unknown"]
"""`device` is what the driver shows, as `nvidia-smi` does."""


class Counter(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A counter, and whether it is of the last pipeline stage instead of the worst rank."""

    kind: Kind = "unknown"
    last_stage: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a counter from text: a kind, perhaps followed by `last stage`. Raises `ConfigError` for any other word.

        >>> Counter.parse("allocated, last stage"), Counter.parse("")
        (Counter(kind='allocated', last_stage=True), Counter(kind='unknown', last_stage=False))
        """
        kind, _, stage = (part.strip() for part in text.partition(","))
        refuse(
            (kind or "unknown") not in get_args(Kind) or stage not in ("", "last stage"),
            f"must be one of {', '.join(get_args(Kind))}, got {text[:40]!r}",
            key="memory_kind",
        )
        return cls(kind or "unknown", bool(stage))  # type: ignore[arg-type]


UNKNOWN = Counter()


def reading(counter: Counter, estimate: Estimate, *, calibrated: bool = True) -> Reading:
    """Return what the counter would show [bytes]. An unknown one is between allocated and what the driver shows.

    calibrated: whether the range includes the spread of published runs, or only what is known to differ
    """
    memory, margins = estimate.memory, estimate.memory.margins
    if not calibrated:
        exact = {"low": 1.0, "high": 1.0, "floor": 1.0}
        margins = msgspec.structs.replace(
            margins,
            spread=msgspec.structs.replace(margins.spread, **exact),
            inside=msgspec.structs.replace(margins.inside, **exact),
        )
    outside = memory.parts["outside"] - memory.workspaces
    allocated = (memory.stages[-1] if counter.last_stage else memory.total) - outside
    if counter.kind != "unknown":
        kind = "nvidia-smi" if counter.kind == "device" else counter.kind
        return margins.reading(kind, allocated, memory.capacity)
    least, most = (margins.reading(kind, allocated) for kind in ("allocated", "nvidia-smi"))
    return Reading(least.low, margins.reading("reserved", allocated).value, most.high)
