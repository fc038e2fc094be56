"""Collectives: bytes on the wire and seconds, on the link that a group of ranks really spans.

Ranks are numbered by the order of the axes, the fastest first (tp, cp, ep, dp, pp in Megatron-LM), and fill domain after
domain (a domain: the GPUs that NVLink or its like joins, a node of 8 or a rack of 72). From that follows how many members
of a group share a domain, also where its ranks straddle one: 4 ranks of 8 on nodes of 6, say.

Legend: n ranks of a group, m of them in the domain that holds fewest, d domains, S bytes of the full tensor.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import msgspec

from loadgauge.core.base import (
    MIB,
    ConfigError,
    Size,
    ceil_div,
    common_divisor,
    maximum,
    minimum,
    remembered,
    same,
    spread,
    square_root,
    where,
)
from loadgauge.core.definitions.hardware.calibration import Efficiencies, Wire
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.hardware.topology import Tier
from loadgauge.core.definitions.layout.axes import RANK_ORDER
from loadgauge.core.estimate.time import tiers as network

Kind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "send_recv"
]
Algorithm = Literal["auto", "ring", "tree", "hierarchical"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
TREE_EFFICIENCY = 0.92
"""Of a double binary tree's bandwidth, what NCCL counts on (source: nccl, tuning.cc)."""


def bus_factor(kind: str, ranks: Size) -> Size:
    """Return bus bandwidth over algorithm bandwidth: how much of the tensor crosses each link (source: nccl-tests).

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1)
    """
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    if kind in ("broadcast", "reduce", "send_recv"):
        return 1
    raise ConfigError(f"unknown collective {kind!r} (known: {', '.join(get_args(Kind))})")


def wire_bytes(kind: str, nbytes: Size, ranks: Size) -> Size:
    """Return the bytes that the busiest rank sends, or receives if that is more (gather, reduce).

    nbytes: of the full tensor. A ring cuts it into n equal chunks; a message between two ranks is sent whole; a group of one
    sends nothing. Trees and hierarchies send as much on average (source: nccl-tests).

    >>> wire_bytes("all_reduce", 1024, 8), wire_bytes("send_recv", 1024, 2), wire_bytes("broadcast", 1024, 1)
    (1792, 1024, 0)
    """
    if kind in ("broadcast", "reduce", "send_recv"):
        return nbytes * where(ranks > 1, 1, 0)
    bus_factor(kind, 1)
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) * spread(nbytes, ranks)


class Group(msgspec.Struct, frozen=True):
    """The ranks of one axis that communicate: `ranks` of them, each `stride` ranks from the next.

    further: (ranks, stride) of slower axes that belong to the group too, where other axes lie between them
    part_of: the larger group that these ranks belong to, such as the first and the last stage of a pipeline
    """

    axis: str
    ranks: Size
    stride: Size
    further: tuple[tuple[Size, Size], ...] = ()
    part_of: Group | None = None

    @property
    def levels(self) -> tuple[tuple[Size, Size], ...]:
        """(ranks, stride) of each axis of the group, the fastest first."""
        if not self.further:
            return ((self.ranks, self.stride),)
        beyond = math.prod(ranks for ranks, _ in self.further)
        return ((self.ranks if same(beyond, 1) else self.ranks / beyond, self.stride), *self.further)

    def members(self, domain: int) -> Size:
        """Return the number of members in the domain that holds fewest, over all groups of this axis.

        domain: GPUs joined by the inner link. A group starts at any multiple of its length n x stride, so at any multiple of
        their common divisor from a border.

        >>> Group("tp", 8, 1).members(8), Group("tp", 6, 1).members(8), Group("dp", 8, 4).members(8)
        (8, 2, 2)
        """
        if self.part_of is not None:
            return where(self.domains(domain) > 1, 1, self.ranks)
        members: Size = 1
        for ranks, stride in self.levels:
            members = members * maximum(-ceil_div(-common_divisor(ranks * stride, domain), stride), 1)
        return minimum(members, self.ranks)

    def domains(self, domain: int) -> Size:
        """Return the number of domains of `domain` GPUs that the widest-spread group spans.

        >>> Group("tp", 8, 1).domains(8), Group("tp", 6, 1).domains(8), Group("dp", 8, 4).domains(8)
        (1, 2, 4)
        """
        if self.part_of is not None:
            return minimum(self.ranks, self.part_of.domains(domain))
        spanned: Size = 1
        for ranks, stride in self.levels:
            length = ranks * stride
            spanned = spanned * minimum(ranks, 1 + ceil_div(length - common_divisor(length, domain), domain))
        return spanned

    def aligned(self, domain: int) -> Any:
        """Return whether the members have the same places in each domain, so that each rail joins members alone."""
        if self.part_of is not None:
            return self.part_of.aligned(domain)
        aligned: Any = True
        for ranks, stride in self.levels:
            length = ranks * stride
            whole = common_divisor(stride, domain)
            ends = common_divisor(length, domain)
            fits = (ends >= domain) | (ends >= length)
            aligned = aligned & (((whole >= stride) & fits) | (whole >= domain))
        return aligned

    def link(self, domain: int) -> str:
        """Return the slowest link the group spans: `none` (one rank), `inner` (a domain) or `outer` (the network)."""
        if same(self.ranks, 1):
            return "none"
        return "inner" if same(self.domains(domain), 1) else "outer"


class Fabric(msgspec.Struct, frozen=True, kw_only=True, eq=False):  # each is itself: its times are kept by it
    """The levels of a cluster as collectives see them [byte/s per GPU and direction, s, GPUs].

    inner: the NVLink (or Infinity Fabric, ICI) domain of `domain` GPUs; outer: the network between domains, at
    `outer_bandwidth` for each GPU (where GPUs share an adapter, its share).
    inner_efficiency, outer_efficiency: the achieved share of a link, from calibration.
    wires: of collectives that were measured inside a domain, their times; others take the latency of each step and their bytes
    nvls: share of the inner link that an all-reduce in the switch reaches, counted once over the tensor, in groups of at least
        `nvls_ranks`; 0: none
    outer_start, outer_root, dispatch_link: as in `Efficiencies`
    oversubscription: how much less the network gives beyond a pod when everybody sends
    pod: GPUs that reach one another at full speed (None: with rails all of them, without rails one domain)
    rails: whether adapter i of every domain of a pod hangs on the same leaf switch: traffic between GPUs of the same place
        stays on it, other traffic passes the oversubscribed part
    tiers: of a topology, beyond the domain; they take the place of `outer_bandwidth` and of the three above
    slower: factors on the seconds of what stays inside a domain, and of what leaves it (`Efficiencies.slower`)
    """

    domain: int
    inner_bandwidth: float
    outer_bandwidth: float
    inner_latency: float
    outer_latency: float
    inner_efficiency: float = 1.0
    outer_efficiency: float = 1.0
    oversubscription: float = 1.0
    rails: bool = False
    pod: int | None = None
    wires: dict[str, Wire] = {}
    nvls: float = 0.0
    nvls_ranks: int = 5
    outer_start: float = 0.0
    outer_root: float = 0.0
    dispatch_link: float = 0.0
    tiers: tuple[Tier, ...] = ()
    slower: tuple[float, float] = (1.0, 1.0)

    @classmethod
    @remembered(64)
    def of(cls, cluster: Cluster, efficiencies: Efficiencies, *, rails: bool = False) -> Fabric:
        """Build the fabric of a cluster: its innermost link, its network and, from a third link, what lies beyond a pod.

        >>> from loadgauge.core.definitions.hardware.hardware import Link, gpu
        >>> from loadgauge.core.definitions.hardware.calibration import efficiencies
        >>> links = [Link(bandwidth=b, latency=5e-6, domain=d) for b, d in ((450e9, 8), (50e9, 64), (25e9, 512))]
        >>> known = Cluster(gpu=gpu("h100-sxm5-80gb"), gpus=512, gpus_per_node=8, links=tuple(links))
        >>> fabric = Fabric.of(known, efficiencies(""))
        >>> fabric.domain, fabric.pod, fabric.oversubscription
        (8, 64, 2.0)
        """
        inner, network = cluster.links[0], cluster.links[min(1, len(cluster.links) - 1)]
        beyond = cluster.links[-1]
        torus = cluster.topology is not None and cluster.topology.domain == 1
        # Of a cluster with latencies of its own, measured times change with them.
        slower = inner.latency / efficiencies.inner_latency if inner.domain > 1 else 1.0
        return cls(
            domain=inner.domain,
            inner_bandwidth=inner.bandwidth,
            outer_bandwidth=network.bandwidth,
            inner_latency=inner.latency,
            outer_latency=network.latency,
            inner_efficiency=efficiencies.inner_link,
            outer_efficiency=efficiencies.outer_link if network is not inner else efficiencies.inner_link,
            oversubscription=network.bandwidth / beyond.bandwidth,
            rails=rails,
            pod=network.domain if beyond is not network else None,
            wires={
                kind: Wire(wire.start * slower, wire.step * slower, wire.share, wire.root)
                for kind, wire in efficiencies.wires.items()
            },
            nvls=efficiencies.nvls if inner.domain >= efficiencies.nvls_ranks else 0.0,
            nvls_ranks=efficiencies.nvls_ranks,
            # Chips of a torus send to one another without adapters and hosts.
            outer_start=0.0 if torus else efficiencies.outer_start,
            outer_root=0.0 if torus else efficiencies.outer_root,
            dispatch_link=efficiencies.dispatch_link,
            tiers=() if cluster.topology is None else cluster.topology.cut(cluster.gpus, inner.domain).beyond,
            slower=efficiencies.slower[1:],
        )

    @property
    def inner(self) -> float:
        """Achieved bandwidth inside a domain [byte/s]."""
        return self.inner_bandwidth * self.inner_efficiency

    @property
    def outer(self) -> float:
        """Achieved bandwidth of one GPU's share of the network, beyond a pod [byte/s]."""
        return self.outer_bandwidth * self.outer_efficiency / self.oversubscription

    def outer_for(self, group: Group, way: network.Way = "ring", *, sums: bool = False) -> Size:
        """Return the achieved bandwidth of one GPU's share of the network on a group's path [byte/s].

        way, sums: as in `tiers.path`
        """
        if self.tiers:
            slowest = network.path(self.tiers, self.domain, self.inner_bandwidth, group, way, sums=sums)
            return slowest * (self.outer_bandwidth / self.tiers[0].bandwidth) * self.outer_efficiency
        if self.oversubscription == 1:
            return self.outer
        full: Any = True if self.pod is None and self.rails else group.domains(self.pod or self.domain) == 1
        if self.rails:
            full = full & group.aligned(self.domain)
        return where(full, self.outer * self.oversubscription, self.outer)

    def between(self, group: Group, steps: Literal["ring", "tree", "one"]) -> Size:
        """Return the seconds of the messages between domains that one pass waits for, one after the other."""
        if self.tiers:
            return network.latency(self.tiers, self.domain, self.outer_latency, group, steps)
        domains = group.domains(self.domain)
        if steps == "one":
            return self.outer_latency
        return ((domains - 1) if steps == "ring" else network.log2(domains)) * self.outer_latency


def groups(degrees: dict[str, Size], order: tuple[str, ...] = RANK_ORDER) -> dict[str, Group]:
    """Return the group of each axis, from the degrees of all axes and the order in which ranks are numbered.

    >>> groups({"tp": 8, "cp": 1, "dp": 4, "pp": 2})["dp"]
    Group(axis='dp', ranks=4, stride=8, further=(), part_of=None)
    """
    stride: Size = 1
    by_axis = {}
    for axis in order:
        if axis in degrees:
            by_axis[axis] = Group(axis, degrees[axis], stride)
            stride = stride * degrees[axis]
    return by_axis


def joined(axis: str, first: Group, second: Group) -> Group:
    """Return one group of two axes' ranks together.

    >>> made = groups({"tp": 2, "cp": 4, "pp": 2, "dp": 8}, ("tp", "cp", "pp", "dp"))
    >>> joined("dp", made["cp"], made["dp"])
    Group(axis='dp', ranks=32, stride=2, further=((8, 16),), part_of=None)
    """
    if same(first.ranks, 1):
        return Group(axis, second.ranks, second.stride)
    if same(second.ranks, 1) or same(first.stride * first.ranks, second.stride):
        return Group(axis, first.ranks * second.ranks, first.stride)
    return Group(axis, first.ranks * second.ranks, first.stride, ((second.ranks, second.stride),))


def single_copies(copies: Size, domains: Size, groups: tuple[int, int] = (1, 1)) -> Size:
    """Return the share of an all-to-all's rows that leave their domain, with at most one copy of a token sent to each domain.

    Of k copies routed at random among d domains, d (1 - (1 - 1/d)^k) domains get one or more. Where a token may go to some
    groups of experts only, d is the number of domains with one of these.

    groups: how many there are, in a row over the domains, and to how many a token may go

    >>> single_copies(1, 4), single_copies(8, 1), round(single_copies(8, 4), 3), round(single_copies(8, 8, (8, 4)), 3)
    (1.0, 0.125, 0.45, 0.45)
    """
    count, chosen = groups
    missed: Size = 1
    for taken in range(chosen):
        missed = missed * maximum(count - maximum(count / domains, 1) - taken, 0) / (count - taken)
    reached = domains * (1 - missed)
    return reached * (1 - (1 - 1 / reached) ** copies) / copies


def adapter_bytes(
    kind: str, nbytes: Size, group: Group, fabric: Fabric, copies: Size = 1, groups: tuple[int, int] = (1, 1)
) -> Size:
    """Return the bytes that one GPU's share of the network carries in each direction.

    A ring over several domains crosses each border once, over the adapters of all m members there. All-to-all sends n - m
    of the n parts over the GPU's own adapter, or fewer where a domain is sent one of several `copies` of a token.

    >>> fabric = Fabric(domain=8, inner_bandwidth=450e9, outer_bandwidth=50e9, inner_latency=0, outer_latency=0)
    >>> adapter_bytes("all_reduce", 1600, Group("dp", 16, 1), fabric)  # 3000 over 8 adapters
    375.0
    """
    n, m = group.ranks, group.members(fabric.domain)
    crossing = where(group.domains(fabric.domain) > 1, 1, 0)
    if kind == "send_recv":
        return crossing * wire_bytes(kind, nbytes, n)
    if kind in ("all_to_all", "gather", "scatter"):
        sent = crossing * (n - m) * spread(nbytes, n)
        return sent if same(copies, 1) else sent * single_copies(copies, group.domains(fabric.domain), groups)
    return crossing * wire_bytes(kind, nbytes, n) / m


@remembered(4096)
def seconds(
    kind: str,
    nbytes: Size,
    group: Group,
    fabric: Fabric,
    algorithm: str = "auto",
    copies: Size = 1,
    rows: Size = 0,
    groups: tuple[int, int] = (1, 1),
) -> Size:
    """Return the seconds of one collective over `nbytes` (the full tensor); 0 in a group of one.

    A ring runs at the inner link, or over several domains at m times the outer one if that is slower. Double binary trees
    and hierarchies are for all-reduce; `auto` is the faster one of ring and tree, as NCCL chooses (source: nccl,
    tuning.cc, whose latency terms these are: a ring of n ranks over d domains takes n - d inner steps and d - 1 outer
    ones in each direction, a tree n/d - 1 inner ones and log2 d outer ones). `copies`, `rows`, `groups`: as in
    `ops.Collective`.

    >>> fabric = Fabric(domain=8, inner_bandwidth=450e9, outer_bandwidth=50e9, inner_latency=0, outer_latency=0)
    >>> seconds("all_gather", 450e9, Group("dp", 8, 1), fabric), seconds("all_reduce", 50e9, Group("dp", 8, 8), fabric)
    (0.875, 1.75)
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {algorithm!r} (known: {', '.join(ALGORITHMS)})")
    n, m, d = group.ranks, group.members(fabric.domain), group.domains(fabric.domain)
    outer = fabric.outer_for(group)
    alone = where(n > 1, where(d > 1, fabric.slower[1], fabric.slower[0]), 0)
    if kind == "send_recv":
        return alone * where(
            d > 1, fabric.between(group, "one") + nbytes / outer, fabric.inner_latency + nbytes / fabric.inner
        )
    wire = fabric.wires.get(kind) or Wire(0.0, fabric.inner_latency, fabric.inner_efficiency, 0.0)
    inner = fabric.inner_bandwidth * wire.share
    if kind in ("all_to_all", "gather", "scatter"):
        # Parts for other domains go over the GPU's own adapter, the rest inside the domain, at the same time.
        outer = fabric.outer_for(group, "pairs")
        inside, outside = nbytes * (m - 1) / n / inner, nbytes * (n - m) / n / outer
        if not same(copies, 1):
            return alone * _dispatch(nbytes, group, fabric, copies, rows, groups)
        whole = nbytes * (n - 1) / n / inner
        start = wire.start or fabric.inner_latency
        alone_here = start + (wire.step * (n - 1) if wire.start else 0) + whole + wire.root * square_root(whole)
        # Pairs send at once: there is no ring whose pieces get small.
        across = fabric.between(group, "one") + fabric.outer_start + wire.start + maximum(inside, outside)
        return alone * where(d > 1, across, alone_here)
    passes = 2 if kind == "all_reduce" else 1
    steps = (n - d) * fabric.inner_latency + fabric.between(group, "ring")
    bus = where(d > 1, minimum(inner, m * outer), inner)
    carried = nbytes * bus_factor(kind, n) / bus
    ring = carried + passes * steps
    if wire.start:
        here = wire.start + wire.step * (n - 1) + carried + wire.root * square_root(carried)
        ring = where(d > 1, ring + wire.start + _beyond(fabric, carried), here)
    if kind != "all_reduce" or algorithm == "ring":
        return alone * ring
    if fabric.tiers:
        outer = fabric.outer_for(group, "tree", sums=True)
    if algorithm == "hierarchical":
        return alone * _hierarchical(nbytes, group, outer, fabric)
    if wire.start and algorithm == "auto":
        return alone * minimum(ring, _in_domains(nbytes, group, outer, fabric, wire))
    levels = (n / d - 1) * fabric.inner_latency + fabric.between(group, "tree")
    tree = 2 * nbytes / (TREE_EFFICIENCY * bus) + 2 * levels
    return alone * (tree if algorithm == "tree" else minimum(ring, tree))


def algorithm(kind: str, nbytes: float, group: Group, fabric: Fabric) -> str:
    """Return which algorithm a collective takes, and for an all-reduce up to which size of the tensor, or from which on.

    >>> fabric = Fabric(domain=8, inner_bandwidth=450e9, outer_bandwidth=50e9, inner_latency=2e-6, outer_latency=5e-6)
    >>> algorithm("all_reduce", 1e9, Group("dp", 256, 1), fabric), algorithm("all_gather", 1e9, Group("dp", 8, 8), fabric)
    ('a tree, up to 2,048 MiB', 'ring')
    """
    if kind in ("all_to_all", "gather", "scatter", "send_recv"):
        return "pairs"
    if kind != "all_reduce" or group.ranks == 2:
        return "ring"

    def ring(size: float) -> bool:
        return bool(seconds(kind, size, group, fabric, "ring") <= seconds(kind, size, group, fabric))

    inside = "sums inside domains, a tree between" if fabric.wires else "a tree"
    if fabric.nvls and group.members(fabric.domain) >= fabric.nvls_ranks:
        inside = "sums in the switch (NVLS)"
    taken = ring(nbytes)
    sizes = [2.0**power for power in range(10, 41)]
    below = [size for size in sizes if size < nbytes and ring(size) != taken]
    above = [size for size in sizes if size > nbytes and ring(size) != taken]
    ends = [
        f"from {2 * below[-1] / MIB:,g} MiB" if below else "",
        f"up to {above[0] / 2 / MIB:,g} MiB" if above else "",
    ]
    return ", ".join(filter(None, ("ring" if taken else inside, *ends)))


def _dispatch(nbytes: Size, group: Group, fabric: Fabric, copies: Size, rows: Size, groups: tuple[int, int]) -> Size:
    """All-to-all of `copies` of each token: one goes to each domain, and there one to each rank with an expert for it."""
    n, m, d = group.ranks, group.members(fabric.domain), group.domains(fabric.domain)
    wire = fabric.wires.get("dispatch") or Wire(fabric.inner_latency, 0.0, fabric.inner_efficiency, 0.0)
    sent = single_copies(copies, n, groups)
    inside = nbytes * sent * (m - 1) / m / (fabric.inner_bandwidth * wire.share)
    # Each token is looked up, and each copy of it written, one by one.
    inside = inside + rows * (wire.step / copies + wire.root * sent)
    reached = (
        fabric.outer_for(group, "pairs") / fabric.outer_efficiency * (fabric.dispatch_link or fabric.outer_efficiency)
    )
    outside = nbytes * (n - m) / n * single_copies(copies, d, groups) / reached
    return wire.start + where(d > 1, fabric.outer_start + maximum(inside, outside), inside)


def _in_domains(nbytes: Size, group: Group, outer: Size, fabric: Fabric, wire: Wire) -> Size:
    """All-reduce of which each domain sends 2 (d-1)/d of the tensor over its adapters, summed inside it before and after.

    Inside, a ring over its members, or the switch itself where it can sum (NVLS): the tensor once over each GPU's link.
    """
    m, d = group.members(fabric.domain), group.domains(fabric.domain)
    inside = nbytes * bus_factor("all_reduce", m) / (fabric.inner_bandwidth * wire.share)
    if fabric.nvls:
        switched = nbytes / (fabric.inner_bandwidth * fabric.nvls)
        inside = where(m >= fabric.nvls_ranks, minimum(inside, switched), inside)
    between = where(d > 1, nbytes * 2 * (d - 1) / d / (m * outer), 0)
    carried = maximum(inside, between)
    levels = wire.start + wire.step * (m - 1) + 2 * fabric.between(group, "tree")
    ramp = where(d > 1, _beyond(fabric, carried), wire.root * square_root(carried))
    return levels + carried + ramp


def _beyond(fabric: Fabric, carried: Size) -> Size:
    """Return what the network adds to a collective that it carries for so many seconds."""
    return fabric.outer_start + fabric.outer_root * square_root(carried)


def _hierarchical(nbytes: Size, group: Group, outer: Size, fabric: Fabric) -> Size:
    """Reduce-scatter inside each domain, all-reduce between them, each member its m-th, all-gather inside."""
    n, m, d = group.ranks, group.members(fabric.domain), group.domains(fabric.domain)
    inside = nbytes * bus_factor("all_gather", m) / fabric.inner + (m - 1) * fabric.inner_latency
    between = nbytes / m * bus_factor("all_reduce", d) / outer + 2 * fabric.between(group, "ring")
    return 2 * inside + where(n > m, between, 0)
