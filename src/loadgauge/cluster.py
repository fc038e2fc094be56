"""A cluster from a kind of GPU: what its file states of links and adapters, and what the user says instead."""

from __future__ import annotations

from loadgauge.errors import ConfigError, NotStated
from loadgauge.hardware import Cluster, Gpu, Link
from loadgauge.rates import rates

GPUS_PER_NODE = 8
"""Where neither the user nor the GPU's file says."""


def domain_of(gpu: Gpu, gpus_per_node: int | None) -> int:
    """GPUs that the fast link joins: a rack's (72) whatever the node, else at most those of one node.

    >>> from loadgauge.hardware import gpu
    >>> domain_of(gpu("gb200-nvl72"), 4), domain_of(gpu("h100-sxm5-80gb"), 4), domain_of(gpu("rtx4090"), None)
    (72, 4, 8)
    """
    stated = None if gpu.interconnect.domain is None else gpu.link_domain
    if gpus_per_node is None:
        return stated or GPUS_PER_NODE
    if stated is None:
        return gpus_per_node
    return stated if stated > GPUS_PER_NODE else min(stated, gpus_per_node)


def _even(gpus: int, domain: int) -> int:
    """GPUs taken of each rack: a job fills all its racks alike, 64 of 72 where it runs on 256."""
    racks = -(-gpus // domain)
    return gpus // racks if domain > GPUS_PER_NODE and gpus % racks == 0 else domain


def cluster(
    gpu: Gpu,
    gpus: int,
    gpus_per_node: int | None = None,
    link_bandwidth: float | None = None,
    nic_bandwidth: float | None = None,
    link_domain: int | None = None,
) -> Cluster:
    """`gpus` of one kind, with the links its file states; bandwidths in byte/s per GPU and direction.

    Latencies are those of the GPU's calibration. Raises `NotStated` where a link is needed that no source states and
    the user does not give.

    >>> from loadgauge.hardware import gpu
    >>> [link.domain for link in cluster(gpu("h100-sxm5-80gb"), 64).links]
    [8, 64]
    >>> [link.domain for link in cluster(gpu("gb200-nvl72"), 256, nic_bandwidth=50e9).links]  # 64 of each rack
    [64, 256]
    """
    domain = link_domain or _even(gpus, domain_of(gpu, gpus_per_node))
    known = rates(gpu.id)
    links = []
    if gpus > 1 and domain > 1:
        links.append(
            Link(bandwidth=link_bandwidth or gpu.link_bandwidth, latency=known.inner_latency, domain=min(domain, gpus))
        )
    if gpus > domain:
        if nic_bandwidth is None and gpu.nic.bandwidth is None:
            raise NotStated(
                f"{gpu.name}: no trusted source states the network adapter's bandwidth; give --nic-bandwidth"
            )
        links.append(Link(bandwidth=nic_bandwidth or gpu.nic_bandwidth, latency=known.outer_latency, domain=gpus))
    if not links:
        links.append(Link(bandwidth=gpu.memory_bandwidth, latency=0.0, domain=1))
    node = min(gpus_per_node or min(domain, GPUS_PER_NODE), gpus)
    if gpus % node:
        raise ConfigError(f"{gpus} GPUs are not whole nodes of {node}; give --gpus-per-node", key="gpus_per_node")
    return Cluster(gpu=gpu, gpus=gpus, gpus_per_node=node, links=tuple(links))
