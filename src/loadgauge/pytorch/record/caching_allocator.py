"""The CUDA caching allocator, simulated: what it reserves for a stream of allocations, and what lies idle in it.

Rules of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (PyTorch 2.13): sizes are multiples of 512 bytes;
up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, more from a segment of its own, a multiple
of 2 MiB; the smallest fitting free block serves, and is split where the rest is worth it. A block belongs to the stream that
it was allocated on, and serves no other one.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from typing import NamedTuple

import msgspec

from loadgauge.core.base import MIB, NothingFits
from loadgauge.pytorch.record.allocations import Stream

SMALLEST = 512
SMALL = MIB
"""Largest request that small segments serve."""
SMALL_SEGMENT, LARGE_SEGMENT, ROUND_LARGE = 2 * MIB, 20 * MIB, 2 * MIB
OWN_SEGMENT = 10 * MIB
"""Smallest request that gets a segment of its own."""
SPAN = 1 << 44
"""Address space of an expandable segment."""


class Pool(NamedTuple):
    """Whose free blocks serve a request: those of one stream, of small or of large segments."""

    stream: int
    small: bool


class Event(NamedTuple):
    """An action of the allocator; `storage` is -1 for segments."""

    action: str
    address: int
    size: int
    storage: int


class Block:
    """A piece of a segment, free or in use, linked to its neighbours. `unmapped`: its pages are returned to the driver."""

    __slots__ = ("address", "free", "next", "previous", "requested", "segment", "size", "storage", "unmapped")

    def __init__(self, address: int, size: int, segment: Segment) -> None:
        self.address, self.size, self.segment = address, size, segment
        self.previous: Block | None = None
        self.next: Block | None = None
        self.free, self.requested, self.storage, self.unmapped = True, 0, -1, False


class Segment:
    """A piece of GPU memory that the allocator got from the driver."""

    __slots__ = ("address", "expandable", "first", "last", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool, expandable: bool = False) -> None:
        self.address, self.size, self.pool, self.expandable = address, size, pool, expandable
        self.first: Block | None = None
        self.last: Block | None = None


class Reserved(msgspec.Struct, frozen=True):
    """Peaks of a run [bytes]: asked for, allocated (rounded up), and reserved from the driver."""

    requested: int
    allocated: int
    reserved: int
    segments: int
    retries: int

    @property
    def idle(self) -> float:
        """Share of the reserved peak that the allocated peak does not fill, from 0 to 1."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0


class Allocator:
    """`limit`: bytes of the GPU; `expandable`: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; `max_split`: its
    max_split_size_mb in bytes; `roundup`: its roundup_power2_divisions."""

    def __init__(self, limit: int = 0, expandable: bool = False, max_split: int = 0, roundup: int = 0) -> None:
        self.limit, self.expandable, self.roundup = limit, expandable, roundup
        self.max_split = max_split or 1 << 62
        self.pools: defaultdict[Pool, list[tuple[int, int, Block]]] = defaultdict(list)
        self.live: dict[int, Block | None] = {}
        self.segments: dict[int, Segment] = {}
        self.trace: list[Event] = []
        self.requested = self.allocated = self.reserved = 0
        self.peaks = [0, 0, 0]
        self.retries = self.made = 0
        self._next = 1 << 40
        self._asking = -1
        self._grown: dict[Pool, Segment] = {}

    def result(self) -> Reserved:
        """Return the peaks so far: allocated and reserved [bytes]."""
        requested, allocated, reserved = self.peaks
        return Reserved(requested, allocated, reserved, self.made, self.retries)

    def rounded(self, nbytes: int) -> int:
        """The size of the block that serves a request [bytes].

        >>> Allocator().rounded(1), Allocator().rounded(513), Allocator(roundup=4).rounded(1200 * 2**20) // 2**20
        (512, 1024, 1280)
        """
        if nbytes < SMALLEST:
            return SMALLEST
        if self.roundup > 1 and nbytes > SMALLEST * self.roundup:
            power = 1 << (nbytes.bit_length() - 1)
            return nbytes if power == nbytes else -(-nbytes // (power // self.roundup)) * (power // self.roundup)
        return -(-nbytes // SMALLEST) * SMALLEST

    def allocate(self, storage: int, nbytes: int, stream: int = 0) -> None:
        """Serve the request of a storage, by its number, for `nbytes` on a stream, from a cached block or a new segment.

        Raises NothingFits beyond the limit, after the cached segments were released. Source: CUDACachingAllocator.cpp of PyTorch.
        """
        if not nbytes:
            self.live[storage] = None
            return
        size, self._asking = self.rounded(nbytes), storage
        small = size <= SMALL
        pool = Pool(stream, small)
        block = self._fitting(size, pool) or self._from_driver(size, pool)
        rest = block.size - size
        if rest >= SMALLEST if small or self.expandable else size < self.max_split and rest > SMALL:
            self._split(block, size)
        block.free, block.requested, block.storage = False, nbytes, storage
        self.live[storage] = block
        self.requested += nbytes
        self.allocated += block.size
        self._note()
        self.trace.append(Event("alloc", block.address, block.size, storage))

    def release(self, storage: int) -> None:
        """Free the block of a storage, by its number, and merge it with free neighbours."""
        block = self.live.pop(storage)
        if block is None:
            return
        self.requested -= block.requested
        self.allocated -= block.size
        self.trace.append(Event("free_completed", block.address, block.size, storage))
        block.free, block.requested, block.storage = True, 0, -1
        before, after = block.previous, block.next
        if after is not None and after.free:
            self._take(after)
            self._join(block, after)
        if before is not None and before.free:
            self._take(before)
            self._join(before, block)
            block = before
        self._put(block)

    def change(self, storage: int, nbytes: int, stream: int = 0) -> None:
        """Free a storage, by its number, and allocate it again on a stream with `nbytes` more (negative: fewer).

        Raises NothingFits.
        """
        block = self.live.get(storage)
        if block is not None:
            nbytes += block.requested
            self.release(storage)
        if nbytes:
            self.allocate(storage, nbytes, stream)

    def _fitting(self, size: int, of: Pool) -> Block | None:
        pool = self.pools[of]
        index = bisect.bisect_left(pool, (size, 0), key=lambda entry: entry[:2])
        if index == len(pool):
            return None
        block = pool[index][2]
        most = self.max_split if size < self.max_split else size + LARGE_SEGMENT
        if not self.expandable and block.size >= most:
            return None
        del pool[index]
        return block

    def _from_driver(self, size: int, pool: Pool) -> Block:
        if self.expandable:
            return self._grow(size, pool)
        wanted = (
            SMALL_SEGMENT
            if pool.small
            else LARGE_SEGMENT
            if size < OWN_SEGMENT
            else -(-size // ROUND_LARGE) * ROUND_LARGE
        )
        self._make_room(wanted)
        segment = Segment(self._next, wanted, pool)
        self._next += -(-wanted // ROUND_LARGE) * ROUND_LARGE + ROUND_LARGE
        block = Block(segment.address, wanted, segment)
        segment.first = segment.last = block
        self.segments[segment.address] = segment
        self._reserve("segment_alloc", segment.address, wanted)
        return block

    def _grow(self, size: int, pool: Pool) -> Block:
        segment = self._grown.get(pool)
        if segment is None:
            segment = self._grown[pool] = Segment(self._next, 0, pool, expandable=True)
            self.segments[segment.address] = segment
            self._next += SPAN
        tail = _tail(segment)
        more = _missing(size, tail, pool.small)
        self._make_room(more)
        if _tail(segment) is not tail:  # its pages went back to make room
            tail = _tail(segment)
            more = _missing(size, tail, pool.small)
            self._make_room(more)
        end = segment.address + segment.size
        segment.size += more
        self._reserve("segment_map", end, more)
        if tail is not None:
            self._take(tail)
            tail.size += more
            return tail
        block = Block(end, more, segment)
        block.previous = segment.last
        if segment.last is not None:
            segment.last.next = block
        segment.first = segment.first or block
        segment.last = block
        return block

    def _make_room(self, wanted: int) -> None:
        if not self.limit or self.reserved + wanted <= self.limit:
            return
        self.retries += 1
        self.empty_cache()
        if self.reserved + wanted > self.limit:
            missing = self.reserved + wanted - self.limit
            self.trace.append(Event("oom", 0, wanted, self._asking))
            raise NothingFits(
                f"{wanted:,} bytes do not fit: {self.reserved:,} of {self.limit:,} are reserved, {self.allocated:,} of"
                " them allocated",
                missing=missing,
            )

    def empty_cache(self) -> None:
        """Gives segments in which nothing is allocated back to the driver, as `torch.cuda.empty_cache`.

        >>> allocator = Allocator()
        >>> allocator.allocate(0, 2**25); allocator.release(0); allocator.empty_cache(); allocator.reserved
        0
        """
        for pool in self.pools.values():
            for entry in list(pool):
                block = entry[2]
                if block.segment.expandable:
                    self._unmap(block)
                elif block.size == block.segment.size:
                    pool.remove(entry)
                    del self.segments[block.segment.address]
                    self.reserved -= block.size
                    self.trace.append(Event("segment_free", block.address, block.size, -1))

    def _unmap(self, block: Block) -> None:
        """Gives the whole pages of a free block of an expandable segment back to the driver."""
        page = _page(block.segment.pool.small)
        first = block.segment.address + -(-(block.address - block.segment.address) // page) * page
        size = (block.address + block.size - first) // page * page
        if size <= 0:
            return
        self._take(block)
        if first > block.address:
            self._split(block, first - block.address)
            self._put(block)
            assert block.next is not None
            block = block.next
            self._take(block)
        if block.size > size:
            self._split(block, size)
        block.free, block.unmapped = False, True
        self.reserved -= size
        self.trace.append(Event("segment_unmap", block.address, size, -1))

    def _reserve(self, action: str, address: int, size: int) -> None:
        self.reserved += size
        self.made += 1
        self.trace.append(Event(action, address, size, -1))
        self._note()

    def _note(self) -> None:
        now = (self.requested, self.allocated, self.reserved)
        self.peaks = [max(pair) for pair in zip(self.peaks, now, strict=True)]

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.segment)
        block.size = size
        rest.previous, rest.next, block.next = block, block.next, rest
        if rest.next is not None:
            rest.next.previous = rest
        else:
            block.segment.last = rest
        self._put(rest)

    def _join(self, first: Block, second: Block) -> None:
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.previous = first
        else:
            first.segment.last = first

    def _put(self, block: Block) -> None:
        bisect.insort(self.pools[block.segment.pool], (block.size, block.address, block), key=lambda entry: entry[:2])

    def _take(self, block: Block) -> None:
        pool = self.pools[block.segment.pool]
        del pool[bisect.bisect_left(pool, (block.size, block.address), key=lambda entry: entry[:2])]


def _page(small: bool) -> int:
    """Return what an expandable segment grows by."""
    return SMALL_SEGMENT if small else LARGE_SEGMENT


def _tail(segment: Segment) -> Block | None:
    """The free block at the end of an expandable segment, if there is one."""
    return segment.last if segment.last is not None and segment.last.free else None


def _missing(size: int, tail: Block | None, small: bool) -> int:
    """By how much a segment must grow, in whole pages, for its free end to hold so much."""
    page = _page(small)
    return -(-(size - (tail.size if tail else 0)) // page) * page


def replay(stream: Stream, allocator: Allocator | None = None) -> Allocator:
    """Serves a traced stream. A storage that changes its size is released and allocated again.

    Raises NothingFits where the allocator's limit leaves no room; the allocator is then as it was at that moment.
    """
    allocator = allocator or Allocator()
    for number, change in zip(stream.ids, stream.changes, strict=True):
        allocator.change(number, change, stream.records[number].stream)
    return allocator
