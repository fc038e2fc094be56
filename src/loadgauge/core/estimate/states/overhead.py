"""GPU memory besides the tensors of a step: the CUDA context, buffers of NCCL and of cuBLAS.

Memory outside PyTorch's allocator is assumed, and labelled as such. Of the CUDA context the driver's share follows from the
GPU: it reserves the stack of every thread that may be resident, 1 KiB each (source: cuda-guide, `cudaLimitStackSize`); what
kernels and libraries take depends on the versions of CUDA and PyTorch, which load them lazily since CUDA 11.7.

NCCL's buffers follow from its source (nccl, `init.cc`, `transport/p2p.cc`, `transport/nvls.cc`, `graph/paths.cc`). A peer that a
rank receives from has in each channel a buffer for each protocol, 0.5 + 4.69 + 4 MiB, in pages of 2 MiB: 10 MiB. A ring has one
such peer, a tree one towards the root and one away from it (two ranks: one of both), and all-to-all every other rank of the
node. NVSwitch has 24 channels; where the switch reduces (Hopper and later, three ranks and more), each of 16 channels has two
buffers of 1 MiB for each of 8 heads, before version 2.20 of 4 MiB. Since 2.22 what no collective used is not connected.

The workspaces of matrix products come from the allocator, permanently: cuBLAS asks for 32 MiB from Hopper on, PyTorch
gives 8 MiB and 128 KiB before (sources: cublas; pytorch, CUDABlas.cpp), for each thread that multiplies: the main one and
autograd's. Transformer Engine has one of its own, of 32 or 4 MiB, and four more for the streams of grouped products (source:
transformer-engine).
"""

from typing import Any

import msgspec

from loadgauge.core.base import GIB, KIB, MIB, minimum
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.layout.axes import RANK_AXES
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.training import Training


class Assumed(msgspec.Struct, frozen=True):
    """An assumed figure with its range [bytes]."""

    value: float
    low: float
    high: float


KERNELS = Assumed(0.28 * GIB, 0.10 * GIB, 0.55 * GIB)
"""Kernels and library state that one process has loaded: less with lazy loading, more without. Of a card with the multiprocessors
of an A100 or more; of a smaller one less in proportion: whole contexts of 501 MiB on an A100 and 226 on an L4 (source: agilerl,
`agilerl/memory/formulas.py`)."""
MANY = 108
"""Multiprocessors from which on a context has all of `KERNELS`."""
LARGEST = {
    "6.0": (56, 2048), "6.1": (30, 2048), "7.0": (80, 2048), "7.5": (72, 1024), "8.0": (108, 2048), "8.6": (84, 1536),
    "8.7": (16, 1536), "8.9": (142, 1536), "9.0": (132, 2048), "10.0": (148, 2048), "10.3": (160, 2048), "11.0": (20, 1536),
    "12.0": (188, 1536), "12.1": (48, 1536),
}  # fmt: skip
"""Multiprocessors of the largest chip of a compute capability, and the threads that may be resident on each."""
STACK = KIB
"""Bytes of stack of a thread, unless a kernel asks for more."""
CONNECTION = 10 * MIB
"""Buffers of one channel for the peer that a rank receives from, of all protocols."""
CHANNELS = {"NVSwitch": 24, "NVLink": 12, "": 4}
"""Channels of a communicator by what links the ranks of a node; the last is of PCIe."""
PEER_CHANNELS = 32
"""Channels between two ranks that send to each other over NVLink."""
PEERS = 8
"""Ranks up to which each peer has all of them; beyond, peers share them."""
SWITCHED = Assumed(256 * MIB, 0.0, 1024 * MIB)
"""Buffers of one communicator that a switch reduces in."""
COMMUNICATOR = Assumed(0.25 * GIB, 0.05 * GIB, 0.60 * GIB)
"""Buffers of one NCCL communicator on links that are not known."""
CUBLAS = {True: 32 * MIB, False: 8 * MIB + 128 * KIB}
"""Workspace of one cuBLAS handle, from Hopper on and before."""
TRANSFORMER_ENGINE = {True: 32 * MIB, False: 4 * MIB}
HANDLES = 2
"""The main thread's and autograd's."""
GROUPED_STREAMS = 4


def workspaces(gpu: Gpu | None, training: Training, *, grouped: bool) -> float:
    """Return the bytes that the allocator reserves permanently for matrix-product libraries; 0 where no GPU is given.

    grouped: whether the model has experts, whose products are grouped

    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> from loadgauge.core.definitions.training.training import training
    >>> workspaces(gpu("h100-sxm5-80gb"), training("megatron"), grouped=True) / 2**20
    224.0
    """
    if gpu is None or gpu.vendor != "nvidia":
        return 0.0
    recent = gpu.data_center_hopper_or_later
    total = HANDLES * CUBLAS[recent]
    if training.framework.transformer_engine:
        total += TRANSFORMER_ENGINE[recent] * (1 + (GROUPED_STREAMS if grouped else 0))
    return float(total)


def communicators(layout: Layout) -> Any:
    """Return the number of NCCL communicators a rank is in: one for each axis with several ranks, and one of all ranks.

    >>> communicators(Layout(dp=8, seq_len=1)), communicators(Layout(dp=4, tp=2, seq_len=1))
    (1, 3)
    """
    axes = sum((getattr(layout, axis) > 1) * 1 for axis in RANK_AXES)
    return axes + (axes > 1)


def communication(layout: Layout, gpu: Gpu | None = None) -> Assumed:
    """Return the bytes of NCCL's buffers on one rank; arrays where the layout's degrees are.

    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> [communication(Layout(dp=8, seq_len=1), gpu(name)).value / 2**20 for name in ("a100-sxm4-80gb", "h100-sxm5-80gb", "l4")]
    [720.0, 976.0, 120.0]
    """
    groups = communicators(layout)
    if gpu is None or gpu.vendor != "nvidia":
        return Assumed(*(groups * part for part in (COMMUNICATOR.value, COMMUNICATOR.low, COMMUNICATOR.high)))
    words = (gpu.interconnect.topology or "", gpu.interconnect.kind or "")
    linked = next(name for name in CHANNELS if any(word.startswith(name) for word in words))
    ring = CONNECTION * CHANNELS[linked]
    larger = sum((getattr(layout, axis) > 2) * 1 for axis in RANK_AXES) + (groups > 1)
    reduces = linked == "NVSwitch" and gpu.data_center_hopper_or_later
    peers = minimum(layout.ep, PEERS) - 1 if linked else 0
    exchanged = CONNECTION * PEER_CHANNELS * peers
    value = 2 * ring * groups + ring * larger + exchanged
    return Assumed(
        value + reduces * larger * SWITCHED.value, ring * groups, value + exchanged + reduces * larger * SWITCHED.high
    )


def context(gpu: Gpu | None) -> Assumed:
    """Return the bytes of the CUDA context of one process; without a GPU, or with an unknown one, those of an H100.

    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> [round(context(gpu(name)).value / 2**30, 2) for name in ("a100-sxm4-80gb", "h100-sxm5-80gb", "l4")]
    [0.49, 0.54, 0.24]
    """
    multiprocessors, threads = LARGEST.get("" if gpu is None else gpu.compute_capability, LARGEST["9.0"])
    if gpu is not None and gpu.multiprocessors:
        multiprocessors = gpu.multiprocessors
    stacks = STACK * multiprocessors * threads
    own = KERNELS.value * min(1.0, multiprocessors / MANY)
    return Assumed(own + stacks, min(KERNELS.low, own) + stacks, KERNELS.high + stacks)


def non_pytorch_memory(layout: Layout, gpu: Gpu | None = None) -> Assumed:
    """Return the assumed bytes outside PyTorch's allocator on one rank: a CUDA context, and NCCL's buffers.

    Arrays where the layout's degrees are.
    """
    own, sent = context(gpu), communication(layout, gpu)
    return Assumed(own.value + sent.value, own.low + sent.low, own.high + sent.high)
