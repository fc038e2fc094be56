"""The events of PyTorch's CPU allocator, as its profiler sees them: every byte asked for, scratch of kernels included.

Scratch is what a kernel allocates and releases inside one operation. It belongs to the library that computes, not to the
model: oneDNN, for one, multiplies bfloat16 matrices on a CPU without bfloat16 instructions by converting them to float32,
and takes up to four times the memory of the result for it. `tensors` leaves it out; what remains does not depend on the
CPU, and is what `loadgauge trace` sees too.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from loadgauge.core.base.by_key import largest_first

MODULE, PHASE = "loadgauge module ", "loadgauge phase "
"""Begin the names of ranges that stand for a module, and for a phase of the step."""


class Range(NamedTuple):
    """A stretch of time with a name [ns]."""

    name: str
    begin: int
    end: int


class Event(NamedTuple):
    """One allocation (positive) or release (negative) [bytes], where it happened, and in what.

    `until`: the end of the kernel that it happened in [ns], 0 outside any kernel. `scratch`: the kernel that allocated
    it released it before its own end.
    """

    time: int
    address: int
    change: int
    op: str
    module: str
    until: int = 0
    scratch: bool = False


def profiler() -> profile:
    """A profiler of the CPU allocator; it must be read by `events` after it has stopped."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def events(stopped: profile) -> list[Event]:
    """The allocations and releases that a stopped profiler recorded, in order of time; scratch is marked."""
    kind = torch._C._profiler._EventType.Allocation
    results: Any = stopped.profiler
    waiting: list[tuple[Any, str, str, int]] = [
        (event, "", "", 0) for event in results.kineto_results.experimental_event_tree()
    ]
    result = []
    while waiting:
        event, op, module, until = waiting.pop()
        event_kind, fields = event.typed
        if event_kind == kind:
            result.append(Event(event.start_time_ns, fields.ptr or 0, fields.alloc_size, op, module, until))
            continue
        name = event.name
        if name.startswith(MODULE):
            module = name.removeprefix(MODULE)
        elif "::" in name and not name.startswith("autograd::"):
            op = op or name
            until = until or (event.end_time_ns if is_kernel(name) else 0)
        waiting.extend((child, op, module, until) for child in event.children)
    result.sort(key=lambda event: event.time)
    return mark_scratch(result)


@functools.cache
def is_kernel(name: str) -> bool:
    """Return whether an operation is carried out by a kernel, which a dispatch mode sees as a whole. An operation that is only
    composed of others (`CompositeImplicitAutograd`) is not, nor is a name that no operation has.

    >>> is_kernel("aten::mm"), is_kernel("aten::linear"), is_kernel("MmBackward0")
    (True, False, False)
    """
    if "::" not in name:
        return False
    overloads = [schema.overload_name for schema in torch._C._jit_get_schemas_for_operator(name)]
    names = [f"{name}.{overload}" if overload else name for overload in overloads if not overload.endswith("out")]
    dispatched = [overload for overload in names if torch._C._dispatch_has_kernel(overload)]  # others are TorchScript's
    composite = "CompositeImplicitAutograd"
    return any(not torch._C._dispatch_has_kernel_for_dispatch_key(overload, composite) for overload in dispatched)


def mark_scratch(stream: Sequence[Event]) -> list[Event]:
    """The same events, with `scratch` set where memory was allocated in a kernel and released before its end."""
    result = list(stream)
    owners: dict[int, int] = {}
    for number, event in enumerate(result):
        if event.change > 0:
            owners[event.address] = number
        elif (owner := owners.pop(event.address, None)) is not None and event.time <= result[owner].until:
            result[owner] = result[owner]._replace(scratch=True)
            result[number] = event._replace(scratch=True)
    return result


def tensors(stream: Sequence[Event]) -> list[Event]:
    """The events without scratch: those of the program's own tensors.

    >>> tensors(mark_scratch([Event(1, 10, 8, "aten::mm", "", 5), Event(2, 20, 64, "aten::mm", "", 5),
    ...                 Event(3, 20, -64, "aten::mm", "", 5), Event(9, 10, -8, "", "")]))[0].change
    8
    """
    return [event for event in stream if not event.scratch]


def ranges(stopped: profile) -> list[Range]:
    """The modules and phases that a profiler saw, in order of their beginnings."""
    results: Any = stopped.profiler
    waiting = list(results.kineto_results.experimental_event_tree())
    result = []
    while waiting:
        event = waiting.pop()
        if event.name.startswith((MODULE, PHASE)):
            result.append(Range(event.name, event.start_time_ns, event.end_time_ns))
        waiting.extend(event.children)
    return sorted(result, key=lambda stretch: stretch.begin)


class Live(NamedTuple):
    """The allocations at the peak: `peak` and `end` are bytes above the start, `held` the allocations at the peak."""

    peak: int
    end: int
    held: tuple[Event, ...]

    def by_op(self) -> dict[str, int]:
        """Bytes at the peak by the outermost operation that asked for them, largest first."""
        return largest_first((event.op or "outside any operation", event.change) for event in self.held)

    def by_module(self) -> dict[str, int]:
        """Bytes at the peak by the innermost module, largest first."""
        return largest_first((event.module, event.change) for event in self.held)


def live(stream: Sequence[Event], since: int = 0, until: int = 1 << 63) -> Live:
    """The highest sum of changes between two times [ns], and the allocations that make it up.

    The release of memory that is older than the stream does not count: the profiler reports it only by chance.
    """
    now = peak = 0
    at = -1
    allocated: dict[int, Event] = {}
    begun = False
    for number, event in enumerate(stream):
        if not begun and event.time >= since:
            begun, peak, at = True, now, number - 1  # what is there at the beginning
        now += _counted(event, allocated)
        if now > peak and since <= event.time <= until:
            peak, at = now, number
    allocated.clear()
    for event in stream[: at + 1]:
        _counted(event, allocated)
    return Live(peak, now, tuple(allocated.values()))


def _counted(event: Event, allocated: dict[int, Event]) -> int:
    """Bytes that an event changes; `allocated` follows it."""
    if event.change > 0:
        allocated[event.address] = event
        return event.change
    released = allocated.pop(event.address, None)
    return 0 if released is None else -released.change


class ModuleUse(msgspec.Struct, frozen=True):
    """Memory of a module's forward above what was allocated before it [bytes]: the maximum, and what remains at its end."""

    peak: int
    persistent: int

    def widest(self, other: ModuleUse | None) -> ModuleUse:
        """Return the larger figures of two forwards of it; None: there was no other."""
        before = other or self
        return ModuleUse(max(self.peak, before.peak), max(self.persistent, before.persistent))


def uses(stream: Sequence[Event], stretches: Sequence[Range]) -> dict[str, ModuleUse]:
    """Return, for each name of a stretch, its largest peak and what it left allocated at most [bytes].

    stream, stretches: in order of time, from `events` and `ranges`
    """
    times = [event.time for event in stream]
    allocated: dict[int, Event] = {}
    levels = list(itertools.accumulate((_counted(event, allocated) for event in stream), initial=0))
    result: dict[str, ModuleUse] = {}
    for stretch in stretches:
        first, last = bisect.bisect_left(times, stretch.begin), bisect.bisect_right(times, stretch.end)
        use = ModuleUse(max(levels[first : last + 1]) - levels[first], levels[last] - levels[first])
        result[stretch.name] = use.widest(result.get(stretch.name))
    return result
