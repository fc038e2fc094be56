"""Log-probabilities of the tokens of a sequence, from logits: what a loss over whole sequences is made of.

Legend: T tokens, v vocabulary on this rank. Every token has one float32 number; the way there decides the bytes (`Kernels.loss`).
"""

from __future__ import annotations

from loadgauge.core.base.algebra import Size, maximum, minimum
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Collective, Operation, Tensor


def logprobs(build: Builder, logits: Tensor, upcast: bool, flops: Size) -> None:
    """Add the operations from logits to log-probabilities.

    chunked: a chunk's logits and their float32 copy, made again in backward, where the gradient is written over the copy
    fused, compiled: the gradient is written over the 16-bit logits; else a sequence at a time: of float32 logits the gathered ones
    less the logarithm of a sum, of 16-bit ones a log-softmax that is kept (source: trl, `trainer/utils.py`,
    `selective_log_softmax`). flops: of the product that makes the logits
    """
    view, loss = build.view, build.kernels.loss
    reduction = Collective("all_reduce", "tp", 4 * view.tokens, view.tp)
    reduced = (reduction, reduction, reduction)
    value = build.float32("head.logprobs", view.tokens)
    labels = Tensor("head.labels", view.tokens, build.dtypes.index, "index")
    if loss == "chunked":
        build.operations.append(
            Operation(
                "head.logprobs",
                "loss",
                (logits,),
                (value,),
                forward_comm=reduced,
                rerun_flops=flops,
                workspace=4 * logits.numel,
            )
        )
        return
    if loss in ("fused", "compiled", "inplace", "jit"):
        wide = 4 * logits.numel if loss in ("inplace", "jit") and logits.itemsize != 4 else 0
        build.operations.append(
            Operation(
                "head.logprobs",
                "loss",
                (logits,),
                (value,),
                keeps=(logits,),
                forward_comm=reduced,
                overwrites=True,
                workspace=wide,
            )
        )
        return
    source, unit = logits, build.kernels.logprobs
    if (upcast or unit == "softmax") and logits.itemsize != 4:
        source = build.float32("head.float32", logits.numel)
        build.elementwise("head.float32", (logits,), source, keeps=(logits,) if build.kernels.holds_logits else ())
    row = source.nbytes / view.sequences
    if unit in ("slices", "whole", "softmax"):
        # One kernel keeps the logits (trl, `kernels/logprob_entropy.py`) or their log-softmax (LLaMA-Factory,
        # `train/trainer_utils.py`, `get_batch_logps`). Beside the gradient of the whole there is that of a slice of them,
        # the chosen answers' (trl, `experimental/orpo`, `concatenated_forward`), or that of the log-softmax.
        held = source if unit != "softmax" else build.float32("head.log_softmax", source.numel)
        build.operations.append(
            Operation(
                "head.logprobs",
                "loss",
                (source, labels),
                (value,),
                keeps=(held, labels),
                forward_comm=reduced,
                backward_workspace=source.nbytes * {"whole": 0, "slices": 1, "softmax": 2}[unit] / 2,
            )
        )
        return
    again = row
    if source.itemsize == 4:
        # The logarithm of a sum keeps the logits; its gradient is as large as they are, made a sequence at a time.
        build.operations.append(
            Operation(
                "head.logprobs",
                "loss",
                (source, labels),
                (value,),
                keeps=(source, labels),
                forward_comm=reduced,
                workspace=row,
                backward_workspace=again,
            )
        )
        return
    kept = Tensor("head.log_softmax", logits.numel, logits.itemsize)
    build.operations.append(
        Operation(
            "head.logprobs",
            "loss",
            (logits, labels),
            (value,),
            keeps=(kept, labels),
            forward_comm=reduced,
            workspace=row,
            backward_workspace=again,
        )
    )


DISTANCES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "jsd": ((4, 2), (13, 5)), "forward-kl": ((3, 1), (6, 1)), "reverse-kl": ((4, 2), (6, 1)),
}  # fmt: skip
"""Tensors as large as the logits, of the student alone, and with a teacher's: at the fullest moment, and kept for backward."""


def divergence(build: Builder, logits: Tensor, upcast: bool) -> None:
    """Add the operations from logits to a generalised Jensen-Shannon divergence from a teacher's distributions.

    The student's own are its logits, those over the temperature, its log-probabilities and their exponential. As wide as the
    teacher's, which accelerate widens under autocast even where it does not widen the student's, are the teacher's four, the two
    that the mixture is summed from (one tensor of two) and it, the student's difference, both terms, both weighted, and their sum.
    With one divergence there are the teacher's logits, those over the temperature and log-probabilities, the difference, its
    product with an exponential, and what the mask leaves of it; the exponential is the student's of the reverse one (which keeps
    it and the difference), and the teacher's of the forward one (which keeps that).
    Source: trl 1.16, `experimental/gkd`, `generalized_jsd_loss` (`beta` 0: forward, 1: reverse).
    """
    source = logits
    if upcast and logits.itemsize != 4:
        source = build.float32("head.float32", logits.numel)
        build.elementwise("head.float32", (logits,), source, keeps=())
    wide = 4 if build.autocast else source.itemsize
    students, together = DISTANCES[build.kernels.logprobs]
    most, kept = (
        own * source.nbytes + both * wide * source.numel for own, both in zip(students, together, strict=True)
    )
    build.operations.append(
        Operation(
            "head.divergence",
            "loss",
            (source,),
            (build.float32("head.divergence", 1),),
            keeps=(Tensor("head.distributions", kept, 1),),
            workspace=most - kept - source.nbytes,
        )
    )


STREAMED_ROWS, STREAMED_COLUMNS = 2048, 4096
"""Tokens and columns of a tile of Liger's losses of policies (source: liger, `chunked_loss/fused_linear_ppo.py`, 0.8)."""


def liger_logits(build: Builder, columns: Size) -> Size:
    """Return the elements of logits that a loss of Liger over sequences has at a time: a pair's, a sequence's, or a tile's."""
    view, kind = build.view, build.kernels.logprobs
    alone = view.tokens / view.sequences
    if kind == "policy":
        return minimum(alone, STREAMED_ROWS) * minimum(columns, STREAMED_COLUMNS)
    return (1 if kind == "rows" else 2) * alone * columns


def liger_logprobs(build: Builder, logits: Tensor, x: Tensor, width: Size, trained: Size) -> None:
    """Add Liger's fused head and loss over sequences, which makes all gradients in forward, one pair or sequence after another.

    Of preferences, compiled, logits are there with what is scattered into in float32 and the gradient of both in 16 bits; then
    the gradient of the chunk's head beside the sum of those before it. Policies stream through tiles of three float32 copies,
    sum a sequence's gradients in float32, and cast them. (Sources: liger, `chunked_loss/fused_linear_preference.py`,
    `fused_linear_unpaired_preference.py`, `fused_linear_ppo.py`; the buffers are those of the code that inductor writes.)
    trained: elements of the head's matrix where it is trained
    """
    view, act = build.view, build.dtypes.activation
    summed = (4 if build.wide_weights else act) * trained
    if build.kernels.logprobs == "policy":
        rows = view.tokens / view.sequences
        own = 4 * (trained + rows * width)
        workspace = summed + own + maximum(3 * 4 * logits.numel, act * (trained + rows * width))
    else:
        workspace = maximum(summed + (4 + act) * logits.numel, 2 * summed)
    reduction = Collective("all_reduce", "tp", 4 * view.tokens, view.tp)
    build.operations.append(
        Operation(
            "head.logprobs",
            "loss",
            (logits,),
            (build.float32("head.logprobs", view.tokens),),
            keeps=(Tensor("head.input_gradient", view.tokens * width, x.itemsize),),
            holds=(x,),
            forward_comm=(reduction, reduction, reduction),
            overwrites=True,
            workspace=workspace,
        )
    )
