"""The text of an out-of-memory error (CUDA, ROCm, MPS, or of the host), in the wordings of PyTorch 1.0 to 2.13, as numbers.

Source: c10/cuda/CUDACachingAllocator.cpp of each version; 2.1 and 2.2 spell "capacty". MPS: aten/src/ATen/mps/MPSAllocator.mm,
which wrote MB for 2^20 bytes at first; the host: c10/core/impl/alloc_cpu.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.units import GIB, KIB, MIB, TIB, gib

SIZES = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "KB": KIB, "MB": MIB, "GB": GIB}
SIZE = r"([0-9.]+) (bytes|[KMGT]iB|[KMG]B)"
PATTERNS = {
    "tried": (rf"[Tt]ried to allocate {SIZE}",),
    "capacity": (
        rf"total capaci?ty of {SIZE}",
        rf"{SIZE} total capacity",
        rf"max allowed: {SIZE}",
    ),  # 2.1 and 2.2 wrote "capacty"
    "free": (rf"of which {SIZE} is free", rf"; {SIZE} free"),
    "allowed": (rf"{SIZE} allowed;",),
    "process": (rf"this process has {SIZE} memory in use",),
    "allocated": (
        rf"[Oo]f the allocated memory {SIZE} is allocated by PyTorch",
        rf"{SIZE} already allocated",
        rf"MPS allocated: {SIZE}",
    ),
    "pools": (rf"with {SIZE} allocated in private pools",),
    "idle": (rf"{SIZE} is reserved by PyTorch but unallocated", rf"{SIZE} cached"),
    "reserved": (rf"{SIZE} reserved in total by PyTorch",),
}
OTHERS = rf"Process (\d+) has {SIZE} memory in use"
BESIDE = (
    "the driver refused memory beside PyTorch's allocator (a context, cuBLAS, NCCL); `nvidia-smi` says who holds it"
)
ENGINE = (
    "vLLM asks for its share of the card before it begins: raise --gpu-memory-utilization where the card is its own, lower it"
    " where others hold memory, or shorten --max-model-len"
)
WITHOUT_SIZES = {
    "CUDA error: out of memory": BESIDE,
    "HIP error: out of memory": BESIDE,
    "CUBLAS_STATUS_ALLOC_FAILED": BESIDE,
    "CUDNN_STATUS_ALLOC_FAILED": BESIDE,
    "HIPBLAS_STATUS_ALLOC_FAILED": BESIDE,
    "Error out of memory at line": (
        "bitsandbytes' own call of the driver failed (csrc/ops.cu): PyTorch had the rest of the card; fewer tokens, or a cap on"
        " PyTorch's share (torch.cuda.set_per_process_memory_fraction), leave room for it"
    ),
    "No available memory for the cache blocks": ENGINE,
    "is less than desired GPU memory utilization": ENGINE,
}
"""Errors that name no size, and what they say."""
HOST = "DefaultCPUAllocator"
MPS = "MPS backend out of memory"
LARGEST = 1 << 60
"""Bytes from which a figure is not believed."""
ROUNDING = 32 * MIB
"""By how much figures of two digits may contradict each other."""
MUCH = 0.1
"""Share of the GPU from which what lies elsewhere is the cause."""

REMEDIES = {
    "the host's memory": (
        "not the GPU's: what is offloaded lies there, and weights on their way; fewer ranks a node, NVMe instead of the host, or"
        " weights loaded shard by shard; `loadgauge estimate` says what the host must hold"
    ),
    "one tensor is larger than the GPU": (
        "no other change helps: the last line of the traceback that is your own asks for it; such sizes are attention"
        " scores (fused attention), logits (a loss in chunks), or a batch that was never cut"
    ),
    "the limit that the program has set itself": "there is room: raise torch.cuda.set_per_process_memory_fraction",
    "private pools of CUDA graphs": "CUDA graphs keep pools of their own: capture fewer, or share a pool between them",
    "fragmentation": "PyTorch holds enough memory, but in pieces: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "other processes": "other processes hold memory on this GPU: end them, or use another GPU",
    "memory beside the allocator": "much lies beside PyTorch's allocator: NCCL buffers, another library, a second context",
    "the program needs more than there is": (
        "the tensors themselves do not fit: `loadgauge trace` shows which ones, and what would shrink them; a snapshot"
        " (torch.cuda.memory._record_memory_history, _dump_snapshot) names the lines that hold them"
    ),
}
"""What to do about each cause."""


class OutOfMemory(msgspec.Struct, frozen=True):
    """The figures of an out-of-memory error [bytes]; None where it has none. `idle` is reserved by PyTorch, not allocated; `others`
    is what other processes use, `beside` what this one uses beside PyTorch's allocator (context, NCCL); `pools` are
    allocated in private pools (CUDA graphs); `allowed` is the share that `set_per_process_memory_fraction` leaves.

    `own`: the number under which the error lists this very process. In a container a process does not know it, and so
    PyTorch lists it like any other. `contradictions`: figures that cannot be true beside the others, and are left out.
    `host`: the memory of the host ran out, not that of a GPU.
    """

    tried: int
    capacity: int | None
    free: int | None
    allocated: int | None
    idle: int | None
    process: int | None
    others: int
    beside: int | None
    pools: int | None = None
    allowed: int | None = None
    own: int | None = None
    contradictions: tuple[str, ...] = ()
    host: bool = False

    @property
    def cause(self) -> str:
        """The most likely cause: a single tensor, a limit, fragmentation, other processes, memory beside the allocator, CUDA
        graphs, or plain need."""
        capacity = self.capacity or 0
        if self.host:
            return "the host's memory"
        if capacity and self.tried > capacity:
            return "one tensor is larger than the GPU"
        if self.allowed is not None and (self.free or 0) >= self.tried:
            return "the limit that the program has set itself"
        if self.idle is not None and self.idle + (self.free or 0) >= self.tried:
            return "fragmentation"
        if capacity and self.others > MUCH * capacity:
            return "other processes"
        if capacity and self.beside is not None and self.beside > MUCH * capacity:
            return "memory beside the allocator"
        if capacity and self.pools is not None and self.pools > MUCH * capacity:
            return "private pools of CUDA graphs"
        return "the program needs more than there is"


def parse(text: str) -> OutOfMemory:
    """Reads the first out-of-memory error in a text. Raises ConfigError where there is none.

    >>> error = parse("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"
    ...     " of 79.15 GiB of which 1.15 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in"
    ...     " use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 7.50 GiB is reserved by PyTorch but"
    ...     " unallocated.")
    >>> error.tried / 2**30, error.beside / 2**30, error.cause
    (2.0, 0.5, 'fragmentation')
    """
    begun = re.search(r"[Tt]ried to allocate", text)
    if begun is None:
        for words, why in WITHOUT_SIZES.items():
            if words in text:
                raise ConfigError(f'"{words}" has no sizes: {why}')
        raise ConfigError('there is no CUDA out-of-memory error in it ("Tried to allocate ...")')
    # MPS names what is held before what was asked for.
    before = text.rfind(MPS, max(0, begun.start() - 300), begun.start())
    passage = " ".join(text[begun.start() if before < 0 else before : begun.start() + 2000].split())
    # A second error, of another rank, would mix its figures in.
    first, *rest = re.split(r"(?=[Tt]ried to allocate)", passage)
    passage = "".join((first, *rest[: 1 if before >= 0 else 0])) if first else rest[0]
    figures = {name: _first(patterns, passage) for name, patterns in PATTERNS.items()}
    if figures["tried"] is None:
        raise ConfigError("the size that it tried to allocate cannot be read")
    if figures["tried"] > LARGEST:
        raise ConfigError("the size that it tried to allocate is more than any computer has")
    listed = {int(number): _bytes(*size) for number, *size in re.findall(OTHERS, passage)}
    wrong = [*_beyond(figures, listed)]
    capacity = figures["capacity"]
    allocated, idle = figures["allocated"], figures["idle"]
    if idle is None and allocated is not None and figures["reserved"] is not None:
        idle = figures["reserved"] - allocated
        if -ROUNDING < idle < 0:
            idle = 0
        elif idle < 0:
            wrong.append(f"{gib(figures['reserved'])} are reserved by PyTorch, and {gib(allocated)} of them allocated")
            idle = None
    process, own = figures["process"], None
    if process is None and allocated is not None:
        own = _own(listed, allocated + (idle or 0), capacity, figures["free"])
        process = listed.pop(own) if own is not None else None
    beside = process - allocated - idle if None not in (process, allocated, idle) else None  # type: ignore[operator]
    if beside is not None and beside < 0:
        if beside < -ROUNDING:
            wrong.append(
                f"this process has {gib(process or 0)} in use, and PyTorch in it {gib((process or 0) - beside)}"
            )
            beside = None
        else:
            beside = 0
    return OutOfMemory(
        tried=figures["tried"],
        capacity=figures["capacity"],
        free=figures["free"],
        allocated=allocated,
        idle=idle,
        process=process,
        others=sum(listed.values()),
        beside=beside,
        pools=figures["pools"],
        allowed=figures["allowed"],
        own=own,
        contradictions=tuple(wrong),
        host=HOST in text[max(0, begun.start() - 300) : begun.start()],
    )


def _beyond(figures: dict[str, int | None], listed: dict[int, int]) -> Iterator[str]:
    """What is larger than the GPU, or than any computer, and is taken out. (In WSL a process has 2^64 bytes.)"""
    if (figures["capacity"] or 0) > LARGEST:
        figures["capacity"] = None
    limit = figures["capacity"] or LARGEST
    words = {"free": "free", "process": "in use by this process", "allocated": "allocated by PyTorch",
             "idle": "reserved by PyTorch and not allocated", "reserved": "reserved by PyTorch",
             "pools": "in private pools", "allowed": "allowed"}  # fmt: skip
    for name, label in words.items():
        value = figures[name]
        if value is not None and value > limit + ROUNDING:
            figures[name] = None
            yield f"{gib(value)} {label}, on a GPU of {gib(limit)}" if figures["capacity"] else f"{gib(value)} {label}"
    for number in [number for number, value in listed.items() if value > limit + ROUNDING]:
        yield f"process {number} with {gib(listed.pop(number))}"


def _own(listed: dict[int, int], reserved: int, capacity: int | None, free: int | None) -> int | None:
    """The process that this one must be: beside all that are listed, there is no room for what PyTorch has reserved."""
    if capacity is None or capacity - (free or 0) - sum(listed.values()) >= reserved:
        return None
    large = [number for number, nbytes in listed.items() if nbytes >= reserved]
    return min(large, key=lambda number: listed[number], default=None)


def _first(patterns: tuple[str, ...], text: str) -> int | None:
    for pattern in patterns:
        match = re.search(pattern, text)
        if match:
            return _bytes(match[1], match[2])
    return None


def _bytes(number: str, unit: str) -> int:
    try:
        return round(float(number) * SIZES[unit])
    except (ValueError, OverflowError):
        raise ConfigError(f"{number[:40]!r} is no number of {unit}") from None
