"""GPU memory besides the tensors of a step: the CUDA context, buffers of NCCL and of cuBLAS, fragmentation.

Memory outside PyTorch's allocator is assumed, and labelled as such. The workspaces of matrix products come from
the allocator, permanently: cuBLAS asks for 32 MiB from Hopper on, PyTorch gives 8 MiB and 128 KiB before (sources:
cublas; pytorch, CUDABlas.cpp), for each thread that multiplies: the main one and autograd's. Transformer Engine has one of
its own, of 32 or 4 MiB, and four more for the streams of grouped products (source: transformer-engine).
"""

from __future__ import annotations

import msgspec

from loadgauge.spec.hardware import Gpu
from loadgauge.spec.layout import Layout
from loadgauge.spec.training import Training
from loadgauge.units import GIB, KIB, MIB


class Assumed(msgspec.Struct, frozen=True):
    """An assumed figure with its range [bytes]."""

    value: float
    low: float
    high: float


CONTEXT = Assumed(0.55 * GIB, 0.30 * GIB, 0.80 * GIB)
"""CUDA context and loaded kernels of one process."""
COMMUNICATOR = Assumed(0.25 * GIB, 0.05 * GIB, 0.60 * GIB)
"""Buffers of one NCCL communicator."""
CUBLAS = {True: 32 * MIB, False: 8 * MIB + 128 * KIB}
"""Workspace of one cuBLAS handle, from Hopper on and before."""
TRANSFORMER_ENGINE = {True: 32 * MIB, False: 4 * MIB}
HANDLES = 2
"""The main thread's and autograd's."""
GROUPED_STREAMS = 4
FRAGMENTATION = Assumed(0.0, 0.0, 0.08)
"""Share of the allocated bytes that the caching allocator may hold beyond them; not part of the value, only of the range."""


def workspaces(gpu: Gpu | None, training: Training, *, grouped: bool) -> float:
    """Return the bytes that the allocator reserves permanently for matrix-product libraries; 0 where no GPU is given.

    grouped: whether the model has experts, whose products are grouped

    >>> from loadgauge.spec.hardware import gpu
    >>> from loadgauge.spec.training import training
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


def communicators(layout: Layout) -> int:
    """Return the number of NCCL communicators a rank is in: one for each axis with several ranks."""
    return sum(1 for degree in (layout.dp, layout.tp, layout.pp, layout.cp, layout.ep) if degree > 1)


def non_pytorch_memory(layout: Layout) -> Assumed:
    """Return the assumed bytes outside PyTorch's allocator on one rank.

    A CUDA context, and buffers for each NCCL communicator; the constants of this file name their sources.
    """
    groups = communicators(layout)
    return Assumed(
        CONTEXT.value + groups * COMMUNICATOR.value,
        CONTEXT.low + groups * COMMUNICATOR.low,
        CONTEXT.high + groups * COMMUNICATOR.high,
    )
