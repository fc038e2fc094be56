"""The text of an out-of-memory error (CUDA, ROCm, MPS, or of the host), in the wordings of PyTorch 1.0 to 2.13, as numbers.

Source: c10/cuda/CUDACachingAllocator.cpp of each version; 2.1 and 2.2 spell "capacty". MPS: aten/src/ATen/mps/MPSAllocator.mm,
which wrote MB for 2^20 bytes at first; the host: c10/core/impl/alloc_cpu.cpp.
"""

import functools
import re
from collections.abc import Iterator

import msgspec

from loadgauge.core.base import GIB, KIB, MIB, TIB, ConfigError, gib
from loadgauge.core.definitions.training.memory_range import memory_range
from loadgauge.pytorch.why.causes import (
    BESIDE,
    ENGINE,
    HOST,
    LARGER,
    LIMIT,
    NEEDS,
    OTHERS as OTHERS_HOLD,
    PIECES,
    POOLS,
    ROOM,
    WAKING,
    bare,
    tool,
)

SIZES = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "KB": KIB, "MB": MIB, "GB": GIB,
         "TB": TIB, "B": 1}  # fmt: skip
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
CPU = "DefaultCPUAllocator"
MPS = "MPS backend out of memory"
LARGEST = 1 << 60
"""Bytes from which a figure is not believed."""
ROUNDING = 32 * MIB
"""By how much figures of two digits may contradict each other."""
MUCH = 0.1
"""Share of the GPU from which what lies elsewhere is the cause."""

START = re.compile(r"[Tt]ried to allocate")
BUFFER = re.compile(
    r"Buffer \d+:\s+Size: (?P<size>[0-9.]+) ?(?P<unit>[KMGT]?i?B)(?:\s+Operator: op_name=\"(?P<operator>[^\"\n]*)\"[^\n]*)?"
    r"(?:\s+(?:XLA Label: [^\n]*|Entry Parameter Subshape: (?P<parameter>[^\n]*)|Shape: (?P<shape>[^\n]*)))*"
)
"""Of the listing that XLA prints behind its error."""
MOST_BUFFERS = 5


class Buffer(msgspec.Struct, frozen=True):
    """A buffer that XLA lists: its size [bytes], the end of its operator's path or `parameter`, and its shape."""

    nbytes: int
    name: str
    shape: str


class OutOfMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of an out-of-memory error [bytes]; None where it has none. `idle` is reserved by PyTorch, not allocated; `others`
    is what other processes use, `beside` what this one uses beside PyTorch's allocator (context, NCCL); `pools` are
    allocated in private pools (CUDA graphs); `allowed` is the share that `set_per_process_memory_fraction` leaves.

    `own`: the number under which the error lists this very process. In a container a process does not know it, and so
    PyTorch lists it like any other. `contradictions`: figures that cannot be true beside the others, and are left out.
    `stated`: the cause, where the text itself says it; `engine`: what leaves the job's own engine less memory, where it has
    one; `buffers`: the largest that XLA lists.
    """

    tried: int | None = None
    capacity: int | None = None
    free: int | None = None
    allocated: int | None = None
    idle: int | None = None
    process: int | None = None
    others: int = 0
    beside: int | None = None
    pools: int | None = None
    allowed: int | None = None
    own: int | None = None
    contradictions: tuple[str, ...] = ()
    stated: str = ""
    engine: str = ""
    buffers: tuple[Buffer, ...] = ()

    @property
    def cause(self) -> str:
        """The most likely cause: a single tensor, a limit, fragmentation, the job's own engine, other processes, memory beside
        the allocator, CUDA graphs, or plain need."""
        capacity, tried = self.capacity or 0, self.tried or 0
        if self.stated:
            return self.stated
        if capacity and tried > capacity:
            return LARGER
        if self.free is not None and self.free >= tried:
            return ROOM if self.allowed is None else LIMIT
        if self.fragmented:
            return PIECES
        for name, nbytes in ((OTHERS_HOLD, self.others), (BESIDE, self.beside), (POOLS, self.pools)):
            if capacity and (nbytes or 0) > MUCH * capacity:
                return ENGINE if self.engine else name
        return NEEDS

    @property
    def fragmented(self) -> bool:
        """Return whether the request failed because idle memory lies in pieces: it would have fitted into what is free and what
        lies idle beyond `ordinary_idle` of the allocated bytes.

        So much an ordinary training leaves idle even on the smallest card that serves it (sizes are rounded up, blocks split), and
        no setting of the allocator is asked for on its account; a job that would have to use it up has no headroom, and is one
        whose tensors do not fit.
        """
        if self.idle is None or self.allocated is None or self.tried is None:
            return False
        beyond = self.idle - ordinary_idle() * self.allocated
        return beyond > 0 and beyond + (self.free or 0) >= self.tried

    @property
    def held(self) -> int | None:
        """Return what the cause holds [bytes]; None where the text has no figure of it."""
        if self.cause == ENGINE:
            return max(self.others, self.beside or 0, self.pools or 0)
        of = {
            NEEDS: self.allocated,
            PIECES: self.idle,
            OTHERS_HOLD: self.others,
            BESIDE: self.beside,
            POOLS: self.pools,
        }
        return of.get(self.cause)

    @property
    def headline(self) -> str:
        """The cause with what it holds, of what the GPU has.

        >>> OutOfMemory(tried=2**30, allocated=30 * 2**30, capacity=32 * 2**30).headline
        "the program's own tensors: 30.00 GiB of 32.00 GiB, and 1.00 GiB more asked for"
        """
        if self.held is None:
            return self.cause
        of = f" of {gib(self.capacity)}" if self.capacity else ""
        more = f", and {gib(self.tried)} more asked for" if self.cause == NEEDS and self.tried else ""
        idle = " reserved by PyTorch lie idle in pieces" if self.cause == PIECES else ""
        return f"{self.cause}: {gib(self.held)}{'' if idle else of}{idle}{more}"

    @property
    def elsewhere(self) -> int | None:
        """Return the bytes that are neither free nor held by PyTorch, and whose owner the text does not name."""
        if self.process is not None or self.others or None in (self.capacity, self.free, self.allocated, self.idle):
            return None
        return max(0, self.capacity - self.free - self.allocated - self.idle)  # type: ignore[operator]


@functools.cache
def ordinary_idle() -> float:
    """Return the share of the allocated bytes that lies idle in ordinary trainings, by `data/memory_range.toml`: of each kind of
    run the usual share on the smallest card that serves it, the largest of these.

    >>> 0.05 < ordinary_idle() < 0.1
    True
    """
    shares = memory_range()
    return max(kind.needed.usual for kind in (shares.static, shares.fixed, shares.dynamic, shares.sharded))


def tells_of_memory(text: str) -> bool:
    """Return whether a text reports an out-of-memory error, with figures or without.

    >>> tells_of_memory("CUDA error: out of memory"), tells_of_memory("loss 2.3")
    (True, False)
    """
    return bool(START.search(text)) or bare(text) is not None


def parse(text: str) -> OutOfMemory:
    """Reads the first out-of-memory error in a text. Raises ConfigError where there is none.

    >>> error = parse("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"
    ...     " of 79.15 GiB of which 1.15 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in"
    ...     " use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 7.50 GiB is reserved by PyTorch but"
    ...     " unallocated.")
    >>> error.tried / 2**30, error.beside / 2**30, error.cause
    (2.0, 0.5, 'fragmentation')
    """
    begun = START.search(text)
    if begun is None:
        return _stated(text)
    error = around(text, begun.start())
    window = error[0][-300:] + error[1]
    start = next(START.finditer(window, len(error[0][-300:])), None) or START.search(window)
    at = start.start() if start else 0
    # MPS names what is held before what was asked for.
    before = window.rfind(MPS, 0, at)
    passage = " ".join(window[at if before < 0 else before :].split())
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
        stated=HOST if CPU in window[:at] else "",
        engine=tool(text[max(0, begun.start() - REACH) : begun.start()]),
    )


def _stated(text: str) -> OutOfMemory:
    """The error of a text that has no figures of PyTorch's allocator. Raises ConfigError where there is none."""
    named = bare(text)
    if named is None:
        raise ConfigError(
            'there is no out-of-memory error (such as "Tried to allocate ...") in this text; give all of it, with its traceback'
        )
    error, at = named
    asked = re.search(r"(?:allocat(?:e|ing)|system memory) \(?([0-9.]+) ?(bytes|[KMGT]i?B)", text[at : at + 500])
    tried = _bytes(asked[1], asked[2]) if asked else None
    buffers = sorted(
        (
            Buffer(
                _bytes(match["size"], match["unit"]),
                "/".join((match["operator"] or "").split("/")[-2:])
                or ("parameter" if match["parameter"] else "no name"),
                (match["shape"] or match["parameter"] or "").strip(),
            )
            for match in BUFFER.finditer(plain(text[at : at + REACH]))
        ),
        key=lambda buffer: -buffer.nbytes,
    )
    return OutOfMemory(
        tried=None if (tried or 0) > LARGEST else tried,
        stated=error.cause,
        engine=tool(text[max(0, at - REACH) : at]) if error.cause == WAKING else "",
        buffers=tuple(buffers[:MOST_BUFFERS]),
    )


def _beyond(figures: dict[str, int | None], listed: dict[int, int]) -> Iterator[str]:
    """Yield what is larger than the GPU, or than any computer, and is taken out. (In WSL a process has 2^64 bytes.)"""
    if (figures["capacity"] or 0) > LARGEST:
        figures["capacity"] = None
    limit = figures["capacity"] or LARGEST
    words = {
        "free": "free",
        "process": "in use by this process",
        "allocated": "allocated by PyTorch",
        "idle": "reserved by PyTorch and not allocated",
        "reserved": "reserved by PyTorch",
        "pools": "in private pools",
        "allowed": "allowed",
    }
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


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
REPEATED = re.compile(r" ?\[repeated \d+x across cluster\].*")
MARK = re.compile(
    r"(?:(?:\([^()\n]{1,80}? pid=\d+[^()\n]{0,80}\)|\[[^\]\n]{1,60}\](?:<std\w+>)?:?| {0,3}\d{1,5}:(?= )) ?)+"
)
"""Of Ray `(WorkerDict pid=7, ip=10.0.0.1)`, PyTorch `[rank3]:`, torchrun `[default3]:`, srun `3:`, mpirun `[1,3]<stderr>:`."""
BORDER = re.compile(r"(?:(?:ERROR|WARNING|INFO) \d\d-\d\d [\d:]+ \[[^\]\n]{1,60}\] ?)?(?:[│|] ?)?")
"""Of vLLM's logger, and of rich."""
REACH = 1_000_000
"""Letters before an error in which its traceback is looked for."""
LENGTH = 2000
"""Letters of an error."""


def around(text: str, position: int) -> tuple[str, str]:
    """Return what the process that wrote at `place` wrote before that line, and from it on, without prefixes.

    Lines of other ranks between them are left out; lines without a prefix belong to all.

    >>> around("[rank0]: a\\n[rank1]: b\\n[rank1]: c", 25)
    ('b\\n', 'c')
    """
    begin = text.rfind("\n", 0, position) + 1
    mark = _split(text[begin : begin + LENGTH].partition("\n")[0])[0]
    before, after = text[max(0, begin - REACH) : begin], text[begin : position + LENGTH]
    return plain(before, mark), plain(after, mark)


def plain(text: str, mark: str = "") -> str:
    """Return a text without prefixes; of one process alone where its prefix (`mark`) is named.

    >>> plain("(WorkerDict pid=7) [rank3]:   loss.backward()")
    '  loss.backward()'
    """
    lines = (_split(line) for line in text.split("\n"))
    return "\n".join(rest for mark_of_line, rest in lines if not mark or mark_of_line in ("", mark))


def _split(line: str) -> tuple[str, str]:
    """Return what stands before a line, and the line."""
    line = REPEATED.sub("", COLOUR.sub("", line))
    match = MARK.match(line)
    mark, rest = (match[0].strip(), line[match.end() :]) if match else ("", line)
    return mark, rest[BORDER.match(rest).end() :]  # type: ignore[union-attr]
