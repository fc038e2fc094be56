"""Log-probabilities of the tokens of a sequence, from logits: what a loss over whole sequences is made of.

Legend: T tokens, v vocabulary on this rank. Every token has one float32 number; the way there decides the bytes (`Kernels.loss`).
"""

from __future__ import annotations

from loadgauge.algebra import Size
from loadgauge.layers.builder import Builder
from loadgauge.layers.operations import Collective, Operation, Tensor


def logprobs(build: Builder, logits: Tensor, upcast: bool, flops: Size) -> None:
    """Add the operations from logits to log-probabilities.

    chunked: a chunk's logits and their float32 copy, made again in backward, where the gradient is written over the copy
    fused, compiled: the gradient is written over the 16-bit logits; else a sequence at a time: of float32 logits the gathered ones
    less the logarithm of a sum, of 16-bit ones a log-softmax that is kept (source: trl, `trainer/utils.py`,
    `selective_log_softmax`). flops: of the product that makes the logits
    """
    view, loss = build.view, build.kernels.loss
    one = Collective("all_reduce", "tp", 4 * view.tokens, view.tp)
    reduced = (one, one, one)
    value = build.float32("head.logprobs", view.tokens)
    labels = Tensor("head.labels", view.tokens, build.dtypes.index, "index")
    if loss == "chunked":
        build.operations.append(
            Operation(
                "head.logprobs", "loss", (logits,), (value,), forward_comm=reduced, rerun_flops=flops,
                workspace=4 * logits.numel,
            )
        )  # fmt: skip
        return
    if loss in ("fused", "compiled", "inplace", "jit"):
        wide = 4 * logits.numel if loss in ("inplace", "jit") and logits.itemsize != 4 else 0
        build.operations.append(
            Operation(
                "head.logprobs", "loss", (logits,), (value,), keeps=(logits,), forward_comm=reduced, overwrites=True,
                workspace=wide,
            )
        )  # fmt: skip
        return
    source = logits
    if upcast and logits.itemsize != 4:
        source = build.float32("head.float32", logits.numel)
        build.elementwise("head.float32", (logits,), source, keeps=(logits,) if build.kernels.holds_logits else ())
    row = source.nbytes / view.sequences
    # Each slice has a gradient as large as the whole, and so has their sum (trl, `experimental/orpo`, `concatenated_forward`).
    again = source.nbytes - row if build.kernels.logprobs == "slices" else row
    if source.itemsize == 4:
        # The logarithm of a sum keeps the logits; its gradient is as large as they are, made a sequence at a time.
        build.operations.append(
            Operation(
                "head.logprobs", "loss", (source, labels), (value,), keeps=(source, labels), forward_comm=reduced,
                workspace=row, backward_workspace=again,
            )
        )  # fmt: skip
        return
    kept = Tensor("head.log_softmax", logits.numel, logits.itemsize)
    build.operations.append(
        Operation(
            "head.logprobs", "loss", (logits, labels), (value,), keeps=(kept, labels), forward_comm=reduced,
            workspace=row, backward_workspace=again,
        )
    )  # fmt: skip
