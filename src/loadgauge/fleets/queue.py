"""Several runs on one fleet: which runs when, and what more GPUs would bring.

The policy is simple and stated: runs are taken by priority (a lower number first), of equal ones as they came. One starts when as
many GPUs as it asks for are free; a later one may start before it on GPUs that it cannot use yet, if it ends before they are
enough for it (backfilling, source: lifka1995). A run keeps its GPUs until it ends, and is never stopped for another.
"""

import heapq
import tomllib
from collections.abc import Sequence
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, read_text, refuse


class Want(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run that waits: its GPUs and days, its priority, and the day on which it comes."""

    name: str
    gpus: int
    days: float
    priority: int = 1
    comes: float = 0.0


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """When a run has its GPUs [days]."""

    name: str
    gpus: int
    start: float
    end: float
    waited: float


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """All runs on a fleet. days: until the last ends; used: share of the GPU-days until then that a run has"""

    gpus: int
    slots: tuple[Slot, ...]
    days: float
    used: float
    waited: float


def pack(wants: Sequence[Want], gpus: int) -> Packed:
    """Return when each run has its GPUs. Raises `ConfigError` for one that asks for more than there are.

    >>> runs = [Want(name="a", gpus=6, days=2), Want(name="b", gpus=6, days=1), Want(name="c", gpus=4, days=1)]
    >>> [(slot.name, slot.start) for slot in pack(runs, 10).slots]
    [('a', 0.0), ('c', 0.0), ('b', 2.0)]
    """
    for want in wants:
        refuse(want.gpus > gpus, f"{want.name} asks for {want.gpus:,} GPUs, and the fleet has {gpus:,}", key="jobs")
        refuse(
            want.gpus < 1 or want.days <= 0 or want.comes < 0, f"{want.name} needs GPUs and days above 0", key="jobs"
        )
    waiting = sorted(enumerate(wants), key=lambda pair: (pair[1].priority, pair[1].comes, pair[0]))
    running: list[tuple[float, int]] = []
    slots: list[Slot] = []
    now, free = 0.0, gpus
    left = [want for _, want in waiting]
    while left:
        held_until: float | None = None
        spare = 0
        started = []
        for want in left:
            if want.comes > now:
                continue
            fits = want.gpus <= free
            behind = held_until is None or now + want.days <= held_until or want.gpus <= spare
            if fits and behind:
                if held_until is not None and now + want.days > held_until:
                    spare -= want.gpus
                free -= want.gpus
                heapq.heappush(running, (now + want.days, want.gpus))
                slots.append(
                    Slot(name=want.name, gpus=want.gpus, start=now, end=now + want.days, waited=now - want.comes)
                )
                started.append(want)
            elif held_until is None:
                held_until, spare = _enough(running, free, want.gpus)
        left = [want for want in left if not any(want is other for other in started)]
        if not left:
            break
        ends = [running[0][0]] if running else []
        comes = [want.comes for want in left if want.comes > now]
        now = min(ends + comes)
        while running and running[0][0] <= now:
            free += heapq.heappop(running)[1]
    days = max(slot.end for slot in slots) if slots else 0.0
    worked = sum(slot.gpus * (slot.end - slot.start) for slot in slots)
    return Packed(
        gpus=gpus,
        slots=tuple(slots),
        days=days,
        used=worked / (gpus * days) if days else 0.0,
        waited=sum(slot.waited for slot in slots) / len(slots) if slots else 0.0,
    )


def _enough(running: list[tuple[float, int]], free: int, gpus: int) -> tuple[float, int]:
    """When so many GPUs are free, and how many beside them then are."""
    for end, held in sorted(running):
        free += held
        if free >= gpus:
            return end, free - gpus
    raise AssertionError("a run that fits gets its GPUs")


def read_jobs(file: str) -> tuple[int | None, list[dict[str, Any]]]:
    """Read the runs of a file: the GPUs of the fleet, and for each `[[jobs]]` its fields. Raises `ConfigError`."""
    try:
        content = tomllib.loads(read_text(file, 10**6))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(error), file=file) from None
    jobs = content.pop("jobs", None)
    gpus = content.pop("gpus", None)
    refuse(
        not isinstance(jobs, list) or not jobs or not all(isinstance(job, dict) for job in jobs),
        "needs [[jobs]], each with a model, gpus and tokens, or with gpus and days",
        file=file,
    )
    if content:
        raise ConfigError("is no key of a queue (gpus, jobs)", key=next(iter(content)), file=file)
    refuse(
        gpus is not None and (not isinstance(gpus, int) or gpus < 1), "must be a whole number", key="gpus", file=file
    )
    return gpus, jobs
