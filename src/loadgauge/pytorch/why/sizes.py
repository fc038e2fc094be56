"""Tensors of a model that have the size in an out-of-memory error.

PyTorch's engine runs the backward without Python, so that a traceback ends at `loss.backward()`; the size remains. The
allocator's error names what it asked the driver for, a multiple of 2 MiB, with two decimals (source: PyTorch 2.13,
c10/cuda/CUDACachingAllocator.cpp, `get_allocation_size` and `format_size`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from loadgauge.core.base.units import GIB, MIB

if TYPE_CHECKING:
    from loadgauge.core.estimate.result import Estimate
    from loadgauge.core.layers.operations.operations import Layer

SEGMENT = 2 * MIB
TELLING = 20 * MIB
"""Bytes up to which the allocator asks for a whole segment, whatever the tensor's size."""
SHOWN = 3
FLOAT32 = 4


def by_size(tried: int, result: Estimate, backward: bool) -> str:
    """Return the tensors of an estimate's model that ask for as much memory as an error names, at most three; "" for none.

    tried: bytes that the error names; backward: the gradients of activations are meant, and those of weights
    """
    if tried <= TELLING:
        return ""
    names = dict.fromkeys(words for words, nbytes in _sizes(result, backward) if _asked(nbytes, tried))
    return "the size of " + ", or of ".join(list(names)[:SHOWN]) if names else ""


def _asked(nbytes: float, tried: int) -> bool:
    """Return whether the allocator asks for `tried` bytes for a tensor, as far as two decimals say."""
    rounding = 0.006 * (GIB if tried > GIB else MIB)
    return abs(-(-int(nbytes) // SEGMENT) * SEGMENT - tried) <= rounding


def _sizes(result: Estimate, backward: bool) -> Iterator[tuple[str, float]]:
    """Tensors with their bytes, the head's first: of all, the largest are there."""
    of = "the gradient of " if backward else ""
    for layer in _layers(result):
        for operation in layer:
            for tensor in (*operation.outputs, *operation.keeps):
                if tensor.dtype != "index":
                    for itemsize in dict.fromkeys((int(tensor.itemsize), FLOAT32)):
                        yield (
                            f"{of}{tensor.name} ({_count(tensor.numel)} x {itemsize} B)",
                            float(tensor.numel) * itemsize,
                        )
            for weight in (*operation.weights, *operation.borrows):
                for itemsize in (2, FLOAT32):
                    if weight.trainable or not backward:
                        yield (
                            f"{of}{weight.name} ({_count(weight.numel)} x {itemsize} B)",
                            float(weight.numel) * itemsize,
                        )


def _layers(result: Estimate) -> Iterable[Layer]:
    memory = result.workings.memory
    return (memory.head, memory.embedding, *(facts.layer for facts in memory.facts.values()))


def _count(numel: float) -> str:
    return f"{int(numel):,}"
