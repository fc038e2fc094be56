"""The text of a CUDA out-of-memory error, in the wordings of PyTorch 1.x and 2.x, as numbers."""

from __future__ import annotations

import re

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.units import GIB, KIB, MIB, TIB

SIZES = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
SIZE = r"([0-9.]+) (bytes|[KMGT]iB)"
PATTERNS = {
    "tried": (rf"[Tt]ried to allocate {SIZE}",),
    "capacity": (rf"total capacity of {SIZE}", rf"{SIZE} total capacity"),
    "free": (rf"of which {SIZE} is free", rf"; {SIZE} free"),
    "process": (rf"this process has {SIZE} memory in use",),
    "allocated": (rf"[Oo]f the allocated memory {SIZE} is allocated by PyTorch", rf"{SIZE} already allocated"),
    "idle": (rf"{SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{SIZE} reserved in total by PyTorch",),
}
OTHERS = rf"Process \d+ has {SIZE} memory in use"


class OutOfMemory(msgspec.Struct, frozen=True):
    """What the error says [bytes]; None where it does not. `idle` is reserved by PyTorch, but not allocated; `others`
    is what other processes use, `beside` what this one uses beside PyTorch's allocator (context, NCCL)."""

    tried: int
    capacity: int | None
    free: int | None
    allocated: int | None
    idle: int | None
    process: int | None
    others: int
    beside: int | None

    @property
    def cause(self) -> str:
        """What stands out: fragmentation, other processes, memory beside the allocator, or plain need."""
        capacity = self.capacity or 0
        if self.idle is not None and self.idle + (self.free or 0) >= self.tried:
            return "fragmentation"
        if capacity and self.others > 0.1 * capacity:
            return "other processes"
        if capacity and self.beside is not None and self.beside > 0.1 * capacity:
            return "memory beside the allocator"
        return "the program needs more than there is"


def parse(text: str) -> OutOfMemory:
    """The first out-of-memory error in a text. Raises ConfigError where there is none.

    >>> found = parse("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"
    ...     " of 79.15 GiB of which 1.15 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in"
    ...     " use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 7.50 GiB is reserved by PyTorch but"
    ...     " unallocated.")
    >>> found.tried / 2**30, found.beside / 2**30, found.cause
    (2.0, 0.5, 'fragmentation')
    """
    begun = re.search(r"[Tt]ried to allocate", text)
    if begun is None:
        raise ConfigError('there is no CUDA out-of-memory error in it ("Tried to allocate ...")')
    passage = " ".join(text[begun.start() : begun.start() + 2000].split())
    # A second error, of another rank, would mix its figures in.
    passage = re.split(r"(?<=.)[Tt]ried to allocate", passage)[0]
    found = {name: _first(patterns, passage) for name, patterns in PATTERNS.items()}
    if found["tried"] is None:
        raise ConfigError("the size that it tried to allocate cannot be read")
    allocated, idle = found["allocated"], found["idle"]
    if idle is None and allocated is not None and found["reserved"] is not None:
        idle = found["reserved"] - allocated
    process = found["process"]
    beside = process - allocated - idle if None not in (process, allocated, idle) else None  # type: ignore[operator]
    return OutOfMemory(
        tried=found["tried"],
        capacity=found["capacity"],
        free=found["free"],
        allocated=allocated,
        idle=idle,
        process=process,
        others=sum(_bytes(*pair) for pair in re.findall(OTHERS, passage)),
        beside=beside,
    )


def _first(patterns: tuple[str, ...], text: str) -> int | None:
    for pattern in patterns:
        match = re.search(pattern, text)
        if match:
            return _bytes(match[1], match[2])
    return None


def _bytes(number: str, unit: str) -> int:
    try:
        return round(float(number) * SIZES[unit])
    except ValueError:
        raise ConfigError(f"{number!r} is no number") from None
