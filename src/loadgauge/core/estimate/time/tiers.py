"""Bandwidth of a group of ranks on the network tiers that it crosses.

Ranks fill units of every tier in their order, so that the same counts say how many units a group spans and how many of its members
share one. From a unit with m members, spread over d of them, go the bytes of a ring once, or of a hierarchy or tree (d-1)/d of
them each way, over the shares of m GPUs; where switches sum (SHARP) half of what a ring takes. The slowest tier decides.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from loadgauge.core.base.algebra import Size, maximum, minimum, same, where
from loadgauge.core.definitions.hardware.topology import Tier

Way = Literal["ring", "tree", "pairs"]
"""Algorithm of a collective: along a ring, summed tier by tier, or between all pairs at once."""


class Spread(Protocol):
    """A group of ranks, as `collectives.Group` has it."""

    @property
    def ranks(self) -> Size:
        """Return the number of ranks."""

    @property
    def levels(self) -> tuple[tuple[Size, Size], ...]:
        """Return (ranks, stride) of each axis."""

    def members(self, domain: int) -> Size:
        """Return the number of ranks that share a unit of `domain` GPUs."""

    def domains(self, domain: int) -> Size:
        """Return the number of units of `domain` GPUs that the ranks span."""

    def aligned(self, domain: int) -> Any:
        """Return whether the ranks have the same positions in each unit of `domain` GPUs."""


def reached(tier: Tier, above: Tier | None, group: Spread, way: Way, node: int, inner: float) -> Size:
    """Return the bandwidth of each GPU's share of a tier, as a group uses it [byte/s].

    node: GPUs of a node; inner: bandwidth inside it. Rails carry traffic between the same places of nodes; other traffic goes
    over the tier above, or through the node to the right rail first: inner b / (inner + b), of which wang2023 measured 8 to
    11 % for all-to-all. Neighbouring groups of a dragonfly share the links of their pair, or all links after a detour
    of two hops (source: kim2008). A ring uses the links of the dimensions that its group spans; all pairs of a ring of k
    send over k/8 of their bytes' links.

    >>> from loadgauge.core.estimate.time.collectives import Group
    >>> from loadgauge.core.definitions.hardware.topology import topology
    >>> leaf = topology("rail-only").tiers[1]
    >>> [round(float(reached(leaf, None, Group("dp", 64, n), "pairs", 8, 450e9))) for n in (8, 1)]
    [50000000000, 45000000000]
    """
    full = tier.reached
    if tier.kind == "rail":
        through = inner * full / (inner + full)
        if above is not None:
            through = max(through, min(full, above.reached))
        straight = group.aligned(node) if way != "pairs" else group.aligned(node) & (group.members(node) == 1)
        return where(straight, full, through)
    if tier.kind == "dragonfly" and way != "pairs" and tier.units > 2:
        return full * max(1 / (tier.units - 1), 0.5)
    if tier.kind in ("torus", "ocs"):
        return _torus(tier, group, way)
    return full


def _spanned(tier: Tier, group: Spread) -> Iterator[tuple[int, Any]]:
    """The size of each dimension of a torus, and whether a group spans it."""
    passed = 1
    for size in tier.dims:
        spanned: Any = False
        for ranks, stride in group.levels:
            low, high = stride / tier.below, stride * ranks / tier.below
            spanned = spanned | ((low < passed * size) & (high > passed))
        yield size, spanned
        passed *= size


def _torus(tier: Tier, group: Spread, way: Way) -> Size:
    used: Size = 0
    longest: Size = 1
    for size, spanned in _spanned(tier, group):
        used = used + where(spanned, 1, 0)
        longest = maximum(longest, where(spanned, size, 1))
    share = tier.reached * maximum(used, 1) / len(tier.dims)
    return share if way != "pairs" else minimum(share, 4 * tier.reached / (len(tier.dims) * longest))


def path(tiers: Sequence[Tier], node: int, inner: float, group: Spread, way: Way, *, sums: bool = False) -> Size:
    """Return the bandwidth of a GPU's share of the network on the path of a group [byte/s], as the two-tier formulas take it.

    tiers: those beyond the node; sums: whether it is an all-reduce, which switches can do. Infinite for a group in one node.

    >>> from loadgauge.core.estimate.time.collectives import Group
    >>> from loadgauge.core.definitions.hardware.topology import topology
    >>> fat = topology("fat-tree-4to1").tiers[1:]
    >>> [round(path(fat, 8, 450e9, Group("ep", ranks, 8), "pairs") / 1e9) for ranks in (32, 512, 4096)]
    [50, 27, 14]
    >>> path(fat, 8, 450e9, Group("dp", 4096, 8), "ring") / 1e9  # it leaves each unit once
    50.0
    """
    slowest: Size = math.inf
    near, apart = group.members(node), group.domains(node)
    below = node
    for number, tier in enumerate(tiers):
        members, units = group.members(below), group.domains(below)
        share = reached(tier, next(iter(tiers[number + 1 :]), None), group, way, node, inner)
        if way == "pairs":
            here = share * (group.ranks - near) / maximum(group.ranks - members, 1)
        else:
            here = share * members / near
            if way == "tree":
                here = here * _crossing(apart) / (0.5 if sums and tier.reduces else _crossing(units))
        # A tree's share is relative to the bytes between nodes, by which the formulas count.
        slowest = minimum(slowest, where(units > 1, here, math.inf))
        below = tier.span
    return slowest


def _crossing(units: Size) -> Size:
    """The share of a tensor that leaves each of some units in one direction."""
    return maximum(units - 1, 1) / maximum(units, 2)


def latency(
    tiers: Sequence[Tier], node: int, usual: float, group: Spread, steps: Literal["ring", "tree", "one"]
) -> Size:
    """Return the seconds of the messages between nodes that one pass of a collective waits for, one after the other.

    usual: of one, where a tier states no other. A ring crosses every border of a unit once, on a torus along one dimension after
    the other; a tree halves its units at each step.
    """
    total: Size = 0
    below = node
    for number, tier in enumerate(tiers):
        each = (usual if tier.latency is None else tier.latency) + tier.light
        here = group.domains(below)
        beyond: Size = group.domains(tier.span) if number + 1 < len(tiers) else 1
        if steps == "one":
            total = maximum(total, where(here > 1, each, 0))
        elif steps == "ring" and tier.dims:
            for size, spanned in _spanned(tier, group):
                total = total + where(spanned, size - 1, 0) * each
        elif steps == "ring":
            total = total + (here - beyond) * each
        else:
            total = total + log2(here / beyond) * each
        below = tier.span
    return total


def log2(value: Size) -> Size:
    """Return the logarithm to the base of 2."""
    if isinstance(value, (int, float)):
        return math.log2(value)
    import numpy

    return numpy.log2(value)


def spans(tiers: Sequence[Tier], node: int, group: Spread) -> tuple[str, ...]:
    """Return the names of the tiers that a group crosses, the innermost first; `node` for one that stays inside.

    >>> from loadgauge.core.estimate.time.collectives import Group
    >>> from loadgauge.core.definitions.hardware.topology import topology
    >>> spans(topology("rail").tiers[1:], 8, Group("dp", 64, 8))
    ('leaf', 'spine')
    """
    below, crossed = node, []
    for tier in tiers:
        if not same(group.domains(below), 1):
            crossed.append(tier.name)
        below = tier.span
    return tuple(crossed) or ("node",)
