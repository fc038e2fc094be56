"""Counters of memory: what each would show of one peak, and the range in which 80 % of measured runs lie.

One run has four readings. What PyTorch has handed out is `allocated`; blocks that wait for another stream are still
`active`; what its allocator holds, idle blocks too, is `reserved`; the driver, and `nvidia-smi` with it, adds the CUDA context
and the buffers of NCCL. What a card must have is less than the last one: before an allocation fails, PyTorch gives idle
segments back (source: pytorch, CUDACachingAllocator.cpp).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from loadgauge.core.base.algebra import maximum, minimum, where
from loadgauge.core.definitions.training.frameworks import Framework
from loadgauge.core.definitions.training.memory_range import Counter, Fragmentation, Share, Spread, memory_range, spread
from loadgauge.core.estimate.states.overhead import Assumed

NONE = Share(0.0, 0.0, 0.0)


class Pools(msgspec.Struct, frozen=True):
    """Pools of the allocator beside the main stream's.

    beside: of the allocated peak, bytes that the main pool does not hold at its own peak; negative where it holds more, for what
    no request fits; most: bytes that the other pools hold at most, each at its own moment; idle: what lies idle in them, as
    shares; further: bytes by which the main pool and `most` are above the peak, where the total counts them
    """

    beside: float = 0.0
    most: float = 0.0
    idle: Share = NONE
    further: float = 0.0


MAIN_ONLY = Pools()
"""All is in the main stream's."""


class Reading(msgspec.Struct, frozen=True):
    """Reading of a memory counter [bytes]: the prediction, and the ends of its range."""

    low: float
    value: float
    high: float


class Margins(msgspec.Struct, frozen=True, kw_only=True):
    """All that lies between the bytes of a step's tensors and what a card must hold.

    outside: memory beside PyTorch's allocator [bytes]; fragmentation: what the allocator holds idle, as shares of what it has
    handed out; spread, inside: factors between prediction and measured runs of this class, of what a card and what PyTorch's
    allocator holds
    fewer, more: bytes by which the peak may differ for what the job does not say
    pools: what other streams hold; no block of one pool serves another (source: pytorch, CUDACachingAllocator.cpp)
    held: share of what is handed out by which a card with room usually shows more: what the allocator holds idle, times what
        measured cards of this class show beyond (`Spread.middle`)
    """

    outside: Assumed
    fragmentation: Fragmentation
    spread: Spread
    inside: Spread
    fewer: float = 0.0
    more: float = 0.0
    pools: Pools = MAIN_ONLY
    held: float = 0.0

    @classmethod
    def of(
        cls,
        outside: Assumed,
        framework: Framework,
        ragged: bool,
        *,
        adapters: bool = False,
        split: Any = False,
        expandable: bool = False,
        pools: Pools = MAIN_ONLY,
    ) -> Margins:
        """Return the margins of a run.

        ragged: whether its micro-batches differ in length; adapters: whether it trains nothing else
        split: whether it is tensor-parallel, an array where the degree is one
        expandable: segments of the allocator grow (`expandable_segments`); pools: what other streams hold
        """
        measured = memory_range()
        whole, parts = (
            spread(framework.stack, adapters=adapters, card=True, split=tensors) for tensors in (False, True)
        )
        factors = {
            name: where(split, getattr(parts, name), getattr(whole, name))
            for name in ("middle", "low", "high", "floor")
        }
        # DeepSpeed's gradients are tensors until shared out.
        fragmentation = measured.static if framework.gradients_persist and framework.engine is None else measured.fixed
        idle = fragmentation.reserved.usual
        fragmentation = measured.dynamic if ragged else fragmentation
        streams = measured.expandable if expandable else measured.sharded
        reserved = (streams if pools.most and framework.engine is None else fragmentation).reserved
        if not ragged and framework.stack == "fine-tuning":
            # Data are padded to the longest of each batch unless something packs them; what is left idle then is reserved.
            most = max(measured.fixed.reserved.high, measured.dynamic.reserved.high)
            reserved = msgspec.structs.replace(reserved, high=most)
        return cls(
            outside=outside,
            fragmentation=msgspec.structs.replace(fragmentation, reserved=reserved),
            spread=msgspec.structs.replace(whole, **factors),
            inside=spread(framework.stack, adapters=adapters),
            pools=pools,
            held=(1 + idle) * factors["middle"] - 1,
        )

    def widened(self, fewer: float, more: float) -> Margins:
        """Return the margins of a run of whose peak more is not known [bytes]."""
        return msgspec.structs.replace(self, fewer=self.fewer + fewer, more=self.more + more)

    def reading(self, counter: Counter, allocated: float, card: float | None = None) -> Reading:
        """Return the reading of a counter where PyTorch has handed out `allocated` bytes at the peak.

        `nvidia-smi` shows what is needed (see there, for `card` too): the total of an answer.

        >>> from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
        >>> own = Margins.of(Assumed(5e8, 3e8, 8e8), FRAMEWORKS["megatron"], ragged=False)
        >>> shown = [own.reading(counter, 1e10).value for counter in ("allocated", "active", "reserved", "nvidia-smi")]
        >>> shown == sorted(shown) and shown[0] == shown[1] == 1e10
        True
        """
        own, inside = self.pools, self.inside
        if counter == "nvidia-smi":
            return self.needed(allocated, card)
        if counter != "reserved":
            return self._range(allocated, NONE, Assumed(0.0, 0.0, 0.0))
        ends = ((own.idle.usual, 1.0), (own.idle.low, inside.low), (own.idle.high, inside.high))
        others = Assumed(*(own.most * (1 + share) * factor for share, factor in ends))
        return self._range(allocated - own.beside, self.fragmentation.reserved, others)

    def needed(self, allocated: float, card: float | None = 0.0) -> Reading:
        """Return the memory of a run [bytes]; the value is what the card usually shows.

        The upper end is above what one with room shows, by what cards of other runs show more. Idle blocks are given back where a
        card is full, and on no other: the low end is what a card with room shows at least or, where that is beyond the card, what
        the run must have. That is what the tensors need with the least of what lies beside them (blocks that no request fits, the
        context, NCCL's buffers), and less by as much as tensors of other runs are below what is predicted. How far cards of other
        runs lie, and what lies beside the allocator, are unknown apart from each other: their widths add up as squares.
        card: its capacity [bytes], by default that of one that is full in any case; None where no card is given

        >>> from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
        >>> own = Margins.of(Assumed(5e8, 3e8, 8e8), FRAMEWORKS["megatron"], ragged=False)
        >>> own.needed(1e10, 8e10).low > own.needed(1e10, 9e9).low == own.needed(1e10).low
        True
        >>> [own.needed(1e10, card).value / 1e9 for card in (8e10, 1.09e10)] == [own.shown(1e10) / 1e9 + 0.5, 10.9]
        True
        """
        spread, tensors, outside = self.spread, max(0.0, allocated - self.fewer), self.outside
        least = tensors * (1 + self.fragmentation.needed.low) * spread.floor + outside.low
        below, shown, above = map(self.shown, (tensors, allocated, allocated + self.more))
        low = below + outside.value - math.hypot(below * (1 - spread.low), outside.value - outside.low)
        high = above + outside.value + math.hypot(above * (spread.high - 1), outside.high - outside.value)
        roomy = max(least, low)
        value = self.filled(shown + outside.value, shown * self.returned + outside.value, card)
        least = least if card is not None and roomy > card else roomy
        return Reading(min(least, value), value, high)

    @staticmethod
    def filled(shown: Any, needed: Any, card: float | None) -> Any:
        """Return the bytes that a card of a capacity shows (numbers or arrays), or one with room where none is given.

        No card shows more than it has: where what is `needed` with idle blocks given back fits, it is full, and the rest runs.

        >>> [Margins.filled(shown, 0.9 * shown, 80) for shown in (70, 85, 100)], Margins.filled(100, 90, None)
        ([70, 80, 90.0], 100)
        """
        return shown if card is None else minimum(shown, maximum(needed, card))

    @property
    def returned(self) -> Any:
        """Share of what the allocator usually holds that is left where idle blocks have been given back."""
        return (1 + self.fragmentation.needed.usual) / self.usual

    @property
    def usual(self) -> Any:
        """Factor by which a card usually shows more than its pools have handed out at most."""
        return 1 + self.held

    def shown(self, allocated: Any) -> Any:
        """Return the bytes that the allocator usually holds where it has handed out so many (a number or an array)."""
        return (allocated + self.pools.further) * self.usual

    def _range(self, allocated: float, idle: Share, beside: Assumed) -> Reading:
        return Reading(
            max(0.0, allocated - self.fewer) * (1 + idle.low) * self.inside.low + beside.low,
            allocated * (1 + idle.usual) + beside.value,
            (allocated + self.more) * (1 + idle.high) * self.inside.high + beside.high,
        )
