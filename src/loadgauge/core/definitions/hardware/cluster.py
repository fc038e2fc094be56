"""Clusters: a number of GPUs with the links that their file states, unless the user gives others."""

from loadgauge.core.base.errors import ConfigError, NotStated
from loadgauge.core.definitions.hardware.calibration import efficiencies
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu, Link
from loadgauge.core.definitions.hardware.topology import Topology

GPUS_PER_NODE = 8
"""Where neither the user nor the GPU's file states it."""
ALONE = ("unified", "laptop")
"""Segments whose machines have one GPU."""


def domain_of(gpu: Gpu, gpus_per_node: int | None) -> int:
    """Return the number of GPUs that the fast link joins: those of a rack (72) whatever the node, else at most those of one node.

    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> domain_of(gpu("gb200-nvl72"), 4), domain_of(gpu("h100-sxm5-80gb"), 4), domain_of(gpu("rtx4090"), None)
    (72, 4, 8)
    """
    stated = None if gpu.interconnect.domain is None else gpu.link_domain
    if stated is None and (gpu.segment in ALONE or gpu.form == "superchip"):
        stated = 1
    if gpus_per_node is None:
        return stated or GPUS_PER_NODE
    if stated is None:
        return gpus_per_node
    return stated if stated > GPUS_PER_NODE else min(stated, gpus_per_node)


def evenly(gpus: int, domain: int) -> int:
    """Return the number of GPUs of each domain a job uses: it fills all its racks equally, 64 of 72 for 256 GPUs.

    >>> evenly(256, 72), evenly(2048, 72), evenly(16, 72), evenly(73, 72)
    (64, 64, 16, 72)
    """
    least = -(-gpus // domain)
    return next((gpus // racks for racks in range(least, 2 * least + 1) if gpus % racks == 0), domain)


def cluster(
    gpu: Gpu,
    gpus: int,
    gpus_per_node: int | None = None,
    link_bandwidth: float | None = None,
    nic_bandwidth: float | None = None,
    link_domain: int | None = None,
    topology: Topology | None = None,
) -> Cluster:
    """Return a cluster of `gpus` GPUs with the links that their file states; bandwidths in byte/s per GPU and direction.

    topology: states all links in place of that file

    Latencies are those of the GPU's calibration. Raises `NotStated` where a bandwidth is needed that no source states and
    the user does not give, `ConfigError` where the GPUs are not whole nodes.

    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> [link.domain for link in cluster(gpu("h100-sxm5-80gb"), 64).links]
    [8, 64]
    >>> [link.domain for link in cluster(gpu("gb200-nvl72"), 256, nic_bandwidth=50e9).links]  # 64 of each rack
    [64, 256]
    >>> [link.domain for link in cluster(gpu("h100-sxm5-80gb"), 16, gpus_per_node=1).links]
    [1, 16]
    """
    if topology is not None:
        return _on(topology, gpu, gpus)
    domain = link_domain or domain_of(gpu, gpus_per_node)
    if link_domain is None and domain > GPUS_PER_NODE:
        domain = evenly(gpus, domain)
    measured = efficiencies(gpu.id)
    size = min(domain, gpus)
    # A GPU that no fast link joins to others is a domain of its own, as fast inside as its memory.
    links = [Link(bandwidth=gpu.memory_bandwidth, latency=0.0, domain=1)]
    if size > 1:
        links = [Link(bandwidth=link_bandwidth or gpu.link_bandwidth, latency=measured.inner_latency, domain=size)]
    if gpus > domain:
        if nic_bandwidth is None and gpu.nic.bandwidth is None:
            raise NotStated(
                f"{gpu.name}: no trusted source states the network adapter's bandwidth; give --nic-bandwidth"
            )
        links.append(Link(bandwidth=nic_bandwidth or gpu.nic_bandwidth, latency=measured.outer_latency, domain=gpus))
    node = min(gpus_per_node or min(domain, GPUS_PER_NODE), gpus)
    if gpus % node:
        raise ConfigError(f"{gpus} GPUs are not whole nodes of {node}; give --gpus-per-node", key="gpus_per_node")
    return Cluster(gpu=gpu, gpus=gpus, gpus_per_node=node, links=tuple(links))


def _on(topology: Topology, gpu: Gpu, gpus: int) -> Cluster:
    """The cluster that a topology describes."""
    domain = topology.domain
    if domain > GPUS_PER_NODE and gpus > domain:
        domain = evenly(gpus, domain)
    cut = topology.cut(gpus, domain)
    measured = efficiencies(gpu.id)
    links = [Link(bandwidth=gpu.memory_bandwidth, latency=0.0, domain=1)]
    if domain > 1:
        inner = Link(bandwidth=topology.tiers[0].bandwidth, latency=measured.inner_latency, domain=min(domain, gpus))
        links = [inner]
    if gpus > domain:
        links.append(Link(bandwidth=cut.beyond[0].bandwidth, latency=measured.outer_latency, domain=gpus))
    node = min(domain, GPUS_PER_NODE, gpus)
    if gpus % node:
        raise ConfigError(f"{gpus:,} GPUs are not whole nodes of {node}, which {topology.name} has", key="gpus")
    return Cluster(gpu=gpu, gpus=gpus, gpus_per_node=node, links=tuple(links), topology=topology)
