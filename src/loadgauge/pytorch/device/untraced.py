"""CUDA memory that no tracer of operations sees: not allocated by a tensor. Each figure has its basis."""

from collections.abc import Iterable

import msgspec

from loadgauge.core.estimate.states.overhead import COMMUNICATOR, CUBLAS, HANDLES, context
from loadgauge.pytorch.record.allocations import Record, op_name

NOT_COUNTED = (
    "what cuDNN's RNN keeps beside gates, cell states and the outputs of lower layers (its size is not documented), and its"
    " workspace"
)


class Hidden(msgspec.Struct, frozen=True):
    """A line of the table [bytes]. `where`: in the allocator (counts as allocated) or beside it."""

    name: str
    nbytes: int
    low: int
    high: int
    where: str
    basis: str


def hidden(records: Iterable[Record], groups: int = 0) -> tuple[Hidden, ...]:
    """Return the memory to add to a traced peak on a real GPU, a row for each cause [bytes].

    records: the allocations of the trace; groups: number of process groups that communicate
    """
    own = context(None)
    lines = [
        Hidden("CUDA context and kernels", int(own.value), int(own.low), int(own.high), "beside", "assumed"),
        Hidden(
            "cuBLAS workspaces of two threads",
            HANDLES * CUBLAS[True],
            HANDLES * CUBLAS[False],
            HANDLES * CUBLAS[True],
            "allocated",
            "stated in PyTorch's CUDABlas.cpp: from Hopper on, and before",
        ),
    ]
    if groups:
        value, low, high = (int(part * groups) for part in (COMMUNICATOR.value, COMMUNICATOR.low, COMMUNICATOR.high))
        lines.append(Hidden(f"NCCL buffers of {groups} groups", value, low, high, "beside", "assumed"))
    if flash := _flash_backward(records):
        lines.append(
            Hidden(
                "FlashAttention backward: float32 gradient of the queries, row sums, unshared keys and values",
                flash,
                0,
                2 * flash,
                "allocated",
                "derived from the sources of FlashAttention-2, not measured",
            )
        )
    return tuple(lines)


def _flash_backward(records: Iterable[Record]) -> int:
    """Its largest workspace, by the rules of mha_bwd in flash_api.cpp: an accumulator of four bytes for each element of
    the queries, rows rounded up to 128 and head widths to 32, with one number a row; and where several query heads share
    a key head, a gradient of keys and values for each query head. Its own results are in the trace."""
    gradients = [
        record for record in records if len(record.shape) == 4 and "flash_attention_backward" in op_name(record.op)
    ]
    largest = 0
    for of_q, of_k, _ in zip(*[iter(gradients)] * 3, strict=False):  # a call's results, in this order
        batch, heads, rows, width = (int(size) for size in of_q.shape)
        accumulated = 4 * batch * heads * (-(-rows // 128) * 128) * (-(-width // 32) * 32 + 1)
        shared = heads // int(of_k.shape[1])
        largest = max(largest, accumulated + (2 * of_k.nbytes * shared if shared > 1 else 0))
    return largest
