"""Memory off the card: what a job keeps in host memory or on NVMe, and how fast it comes and goes."""

import msgspec

from loadgauge.core.definitions.hardware.hardware import Gpu

PCIE_4 = 31.5e9
"""Bytes a second and direction of a PCIe 4 link of 16 lanes (source: pci-sig)."""
HOST_LINK = 25e9
"""Bytes a second and direction between a GPU and its host over it; assumed."""
HOST_UPDATES = 4e9
"""Parameters that the cores of one host update in a second (source: ren2021, table 4)."""


def host_link(own: float | None, card: Gpu | None) -> float:
    """Return the bandwidth between a GPU and its host [bytes/s]: the one that is given, or that of the card's PCIe."""
    stated = None if card is None or card.interconnect.topology != "PCIe" else card.interconnect.bandwidth
    usual = HOST_LINK if stated is None else HOST_LINK / PCIE_4 * stated.value
    return usual if own is None else own


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Storage of tensors that are off the card, and the figures of the machine.

    pinned: page-locked, which copies beside the computing need; nvme: optimizer states (and weights that are offloaded) are
        on NVMe, and in host memory only as they pass through (ZeRO-Infinity)
    activations: what of them is on the host between forward and backward: `none`; the inputs of recomputed layers
        (`checkpoints`); `all` that is kept; what modules or operations keep (`estimate.memory.recompute.MODULES`); with commas
    link: bytes a second and direction between a GPU and its host
    bandwidth, nvme_bandwidth: of a node's host memory, and of its NVMe [bytes/s]; None: not stated
    """

    pinned: bool = True
    nvme: bool = False
    activations: str = "none"
    link: float = HOST_LINK
    bandwidth: float | None = None
    nvme_bandwidth: float | None = None


class HostBuffers(msgspec.Struct, frozen=True):
    """Host memory of a framework beside the states that it offloads.

    gradients: the words of `--offload` with which gradients leave the card too, once they are reduced
    gradients_from: the ZeRO stage from which on they do
    copies: bytes per trained parameter of page-locked copies beside the states; None: one of the weight and of its gradient
    pinned: which of the states are page-locked
    pinned_below: the ZeRO stage below which master weights are page-locked
    largest: below that stage, a gradient of the largest tensor stands on the card and on the host, to copy through
    accumulates: below that stage, bytes per trained parameter of gradients that are accumulated on the host
    parts: it offloads the optimizer states of a part of the parameters, too
    """

    gradients: tuple[str, ...] = ()
    gradients_from: int = 0
    copies: float | None = 0
    pinned: tuple[str, ...] = ("weights", "gradients")
    pinned_below: int = 0
    largest: bool = False
    accumulates: float = 0
    parts: bool = False


class OffCard(msgspec.Struct, frozen=True):
    """Bytes of one rank that are not on its card: in host memory, of it page-locked, and on NVMe."""

    host: float = 0
    pinned: float = 0
    nvme: float = 0
