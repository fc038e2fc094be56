"""Collectives: bytes on the wire and seconds, on the link that a group of ranks really spans.

Ranks are numbered by the order of the axes, the fastest first (tp, cp, ep, dp, pp in Megatron-LM), and fill node after
node. A group of an axis whose faster axes have `stride` ranks together therefore has min(ranks, domain / stride) members
in one NVLink domain, and the rest of it lies across the network.

Legend: n ranks of the group, m of them in one domain, S bytes of the full tensor.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from loadgauge.algebra import Size, maximum, minimum, spread, where
from loadgauge.errors import ConfigError
from loadgauge.hardware import Cluster
from loadgauge.rates import Rates

AXES = ("tp", "cp", "ep", "dp", "pp")
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv"]


def bus_factor(kind: str, ranks: Size) -> Size:
    """Bus bandwidth over algorithm bandwidth: how much of the tensor crosses each link (source: nccl-tests).

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1)
    """
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    if kind in ("broadcast", "reduce", "send_recv"):
        return 1
    raise ConfigError(f"unknown collective {kind!r}")


def wire_bytes(kind: str, nbytes: Size, ranks: Size) -> Size:
    """Bytes one rank sends, `nbytes` being the full (gathered) tensor; a ring cuts it into n chunks of equal size.

    A message between two ranks is sent whole; nobody sends anything in a group of one.

    >>> wire_bytes("all_reduce", 1024, 8), wire_bytes("send_recv", 1024, 2), wire_bytes("broadcast", 1024, 1)
    (1792, 1024, 0)
    """
    if kind in ("broadcast", "reduce", "send_recv"):
        return nbytes * where(ranks > 1, 1, 0)
    return {"all_reduce": 2}.get(kind, 1) * (ranks - 1) * spread(nbytes, ranks)


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """The two levels of a cluster as collectives see them [byte/s per GPU and direction, s, GPUs].

    inner: the NVLink (or Infinity Fabric, ICI) domain of `domain` GPUs; outer: the network between domains, at
    `outer_bandwidth` per GPU; `oversubscription`: how much less the network gives when everybody sends.
    inner_efficiency, outer_efficiency: the achieved share of a link, from calibration.
    rails: whether adapter i of every node of a pod hangs on the same leaf switch; pod: GPUs that reach one another
    without passing the oversubscribed part (None: with rails all of them, without rails one domain).
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

    @classmethod
    def of(cls, cluster: Cluster, rates: Rates, *, rails: bool = False) -> Fabric:
        """Of a cluster: its innermost link, its network, and where it has a third link, that beyond a pod.

        >>> from loadgauge.hardware import Link, gpu
        >>> from loadgauge.rates import DEFAULT
        >>> links = [Link(bandwidth=b, latency=5e-6, domain=d) for b, d in ((450e9, 8), (50e9, 64), (25e9, 512))]
        >>> known = Cluster(gpu=gpu("h100-sxm5-80gb"), gpus=512, gpus_per_node=8, links=tuple(links))
        >>> fabric = Fabric.of(known, DEFAULT)
        >>> fabric.domain, fabric.pod, fabric.oversubscription
        (8, 64, 2.0)
        """
        inner, network = cluster.links[0], cluster.links[min(1, len(cluster.links) - 1)]
        beyond = cluster.links[-1]
        return cls(
            domain=inner.domain,
            inner_bandwidth=inner.bandwidth,
            outer_bandwidth=network.bandwidth,
            inner_latency=inner.latency,
            outer_latency=network.latency,
            inner_efficiency=rates.inner_link,
            outer_efficiency=rates.outer_link if network is not inner else rates.inner_link,
            oversubscription=network.bandwidth / beyond.bandwidth,
            rails=rails,
            pod=network.domain if beyond is not network else None,
        )

    @property
    def inner(self) -> float:
        """Achieved bandwidth inside a domain [byte/s]."""
        return self.inner_bandwidth * self.inner_efficiency

    @property
    def outer(self) -> float:
        """Achieved bandwidth of one GPU's share of the network [byte/s]."""
        return self.outer_bandwidth * self.outer_efficiency / self.oversubscription


class Group(msgspec.Struct, frozen=True):
    """The ranks of one axis that communicate: `ranks` of them, each `stride` ranks from the next."""

    axis: str
    ranks: Size
    stride: Size

    def members(self, domain: int) -> Size:
        """How many of them lie in one domain."""
        return minimum(self.ranks, maximum(domain / self.stride, 1))

    def link(self, domain: int) -> str:
        """The slowest link the group spans, in words."""
        if self.ranks == 1:
            return "none"
        return "inner" if self.members(domain) >= self.ranks else "outer"


def groups(degrees: dict[str, Size], order: tuple[str, ...] = AXES) -> dict[str, Group]:
    """The group of each axis, from the degrees of all axes and the order in which ranks are numbered.

    >>> groups({"tp": 8, "cp": 1, "dp": 4, "pp": 2})["dp"]
    Group(axis='dp', ranks=4, stride=8)
    """
    stride: Size = 1
    made = {}
    for axis in order:
        if axis in degrees:
            made[axis] = Group(axis, degrees[axis], stride)
            stride = stride * degrees[axis]
    return made


def seconds(kind: str, nbytes: Size, group: Group, fabric: Fabric) -> Size:
    """Seconds of one collective over `nbytes` (the full tensor), by ring or, where it is faster, by tree.

    A ring inside a domain runs at the inner link. A ring over several domains crosses each border once, over the
    network adapters of all members there: m times the outer link, but not faster than the inner one. All-to-all sends
    every rank its own part: (n - m)/n of the buffer over the adapter and (m - 1)/n inside, at the same time.
    """
    n = group.ranks
    m = group.members(fabric.domain)
    domains = n / m
    alone = where(n > 1, 1, 0)
    crossing = where(domains > 1, 1, 0)
    latency = where(domains > 1, fabric.outer_latency, fabric.inner_latency)
    if kind == "send_recv":
        return latency + nbytes / where(n * group.stride > fabric.domain, fabric.outer, fabric.inner)
    if kind == "all_to_all":
        inside = nbytes * (m - 1) / n / fabric.inner
        outside = nbytes * (n - m) / n / fabric.outer
        return alone * (latency + maximum(inside, outside))
    bus = where(domains > 1, minimum(fabric.inner, m * fabric.outer), fabric.inner)
    carried = nbytes * bus_factor(kind, n) / bus
    passes = 2 if kind == "all_reduce" else 1
    ring = passes * ((n - domains) * fabric.inner_latency + crossing * domains * fabric.outer_latency)
    tree = passes * (_log2(m) * fabric.inner_latency + _log2(domains) * fabric.outer_latency)
    return alone * (carried + minimum(ring, tree))


def _log2(value: Size) -> Size:
    if isinstance(value, (int, float)):
        return math.log2(value)
    import numpy

    return numpy.log2(value)
