"""The effect of a remedy: the same events, or the same training, with it.

The events of a snapshot are replayed through a simulated allocator, what a remedy shrinks made smaller; a model that was
traced is traced again, with other flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.core.base.errors import NothingFits
from loadgauge.pytorch.record.caching_allocator import Allocator
from loadgauge.pytorch.why.snapshot import Block, beginning, summary

if TYPE_CHECKING:
    from loadgauge.core.definitions.job.job import Job
    from loadgauge.pytorch.trace.result import Trace

TOGETHER = 2
"""Traces that run at a time."""


# -- snapshots ---------------------------------------------------------------------------------------------------------


class Replay:
    """The events of a snapshot up to its last failure, and what each asked for memory for.

    `kind`: the purpose of a block, any names; `held`: purposes that are known better, by event.
    """

    def __init__(
        self, content: Mapping[str, Any], device: int, kind: Callable[[Block], str], held: Mapping[int, str]
    ) -> None:
        events, self.before = beginning(content, device)
        failures = [number for number, event in enumerate(events) if event["action"] == "oom"]
        totals = summary(content, device)
        self.failed = bool(failures)
        self.limit = totals.reserved + totals.free if failures else 0
        self.events = events[: failures[-1] + 1] if failures else events
        self.kinds: dict[int, str] = {}
        kinds_of_frames: dict[int, str] = {}  # alike events often have one list of frames
        for number, event in enumerate(self.events):
            if event["action"] in ("alloc", "oom"):
                frames = event.get("frames") or []
                if id(frames) not in kinds_of_frames or not frames:
                    kinds_of_frames[id(frames)] = kind(Block(event["size"], frames, number))
                self.kinds[number] = held.get(number) or kinds_of_frames[id(frames)]

    def peak(self, scale: Mapping[str, float], expandable: bool = False) -> tuple[int, bool | None]:
        """The highest allocation [bytes] where each purpose takes this share of what it took, and whether the simulated
        allocator served all of it; None where nothing had failed."""
        allocator = Allocator(self.limit, expandable)
        served = _served(allocator, self.before.items(), self.events, self.kinds, scale)
        return allocator.result().allocated, served if self.failed else None


def _served(
    allocator: Allocator,
    before: Iterable[tuple[int, Block]],
    events: Sequence[Any],
    kinds_of_blocks: Mapping[int, str],
    scale: Mapping[str, float],
) -> bool:
    """Return whether an allocator serves all that is asked for, the failing request too; each by the share of its purpose."""
    live: dict[int, int] = {}
    try:
        for index, (address, block) in enumerate(before):
            allocator.allocate(-2 - index, round(block.nbytes * scale.get("weights", 1.0)))
            live[address] = -2 - index
        for number, event in enumerate(events):
            if event["action"] == "alloc" or (event["action"] == "oom" and number == len(events) - 1):
                allocator.allocate(number, round(event["size"] * scale.get(kinds_of_blocks[number], 1.0)))
                live[event.get("addr", -1)] = number
            elif event["action"] == "free_completed" and event["addr"] in live:
                allocator.release(live.pop(event["addr"]))
    except NothingFits:
        return False
    return True


# -- traces ------------------------------------------------------------------------------------------------------------


class Retraced(msgspec.Struct, frozen=True):
    """Other flags of a trace, and its peak with them [bytes]. `why`: what they change."""

    flags: str
    why: str
    peak: int


def retrace(trace: Trace) -> tuple[Retraced, ...]:
    """Return the changes that lower the peak of a trace of a MODEL, each traced again [bytes], the mildest first.

    Empty for the trace of a script.
    """
    from loadgauge.core.base.errors import Error
    from loadgauge.core.base.files import is_script
    from loadgauge.pytorch.trace.child import trace_request
    from loadgauge.pytorch.trace.subprocess import Request, in_child
    from loadgauge.pytorch.trace.torch_run import parse_flags

    if "settings" not in trace.assumed or is_script(trace.target):  # a document does not decide what runs
        return ()
    job, keep, layers = parse_flags(trace.assumed["settings"])
    changes = list(_changes(job))

    def peak(change: dict[str, Any]) -> int | None:
        changed = job.replace(model=trace.target, **change)
        try:
            request = Request(changed, trace.device, layers, keep=keep if changed.recompute == job.recompute else ())
            return in_child(trace_request, request).allocated
        except Error:
            return None

    with ThreadPoolExecutor(TOGETHER) as pool:
        peaks = list(pool.map(peak, [change for change, _ in changes]))
    return tuple(
        Retraced(" ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items()), why, taken)
        for (change, why), taken in zip(changes, peaks, strict=True)
        if taken is not None and taken < trace.allocated
    )


def _changes(job: Job) -> Iterable[tuple[dict[str, Any], str]]:
    """One change at a time, and at last those together that change no result."""
    harmless: dict[str, Any] = {}
    optimizer, micro_batch, seq_len = job.optimizer or "adamw", job.micro_batch or 1, job.seq_len or 4096
    for helps, name, value, why in (
        (job.recompute in (None, "none"), "recompute", "full", "layers run again in backward"),
        (job.attention == "eager", "attention", "flash", "never keeps the scores"),
        (optimizer == "adamw", "optimizer", "adamw-fused", "no temporaries in the step"),
    ):
        if helps:
            harmless[name] = value
            yield {name: value}, why
    if len(harmless) > 1:
        yield dict(harmless), "all of these together"
    if optimizer.startswith("adamw"):
        yield {"optimizer": "adafactor"}, "second moments in rows and columns; another optimizer"
    if micro_batch > 1:
        halved = micro_batch // 2
        accumulate = (job.global_batch or micro_batch) // micro_batch
        yield {"micro_batch": halved, "global_batch": halved * accumulate}, "half as many sequences at once"
    elif seq_len > 1:
        yield {"seq_len": seq_len // 2}, "half as long"
