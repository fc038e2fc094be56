"""CTC's loss as CUDA's own kernel runs it: one row of `2 n + 1` numbers for each position and sequence, forward and backward.

n is the longest transcript of the batch, which only the lengths' values tell: where they are not known, transcripts are taken to
fill their tensor, or to be equally long where they lie behind one another. cuDNN's kernel, which takes targets on the host alone,
is not modelled.
Sources: ATen/native/LossCTC.cpp, ATen/native/cuda/LossCTC.cu.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from loadgauge.pytorch.device.kernels.cuda_packed import known_value, running_facts
from loadgauge.pytorch.device.read import asking

ASSUMED = "transcripts of a batch are equally long, as long as they can be"
MEAN, SUM = 1, 2
"""PyTorch's numbers of a reduction."""


def register_cuda_ctc(library: torch.library.Library) -> None:
    """Give the simulated device CUDA's CTC loss, written out so that what it allocates is seen."""
    for overload in ("IntList", "Tensor"):
        library.impl(f"ctc_loss.{overload}", ctc_loss, "AutogradPrivateUse1")


class Ctc(torch.autograd.Function):
    """The loss of each sequence: keeps its inputs, and the likelihood of every prefix of a transcript at every position."""

    @staticmethod
    def forward(ctx: Any, log_probs: Any, targets: Any, longest: Any) -> Any:
        """Return (sequences,) of log_probs: (positions, sequences, classes). longest: tokens of the longest transcript"""
        positions, sequences, _ = log_probs.shape
        lengths = [targets.new_empty(sequences) for _ in range(3)]  # of both, and where each transcript begins
        alpha = log_probs.new_empty((sequences, positions, 2 * longest + 1))
        loss = log_probs.new_empty(sequences)
        del lengths
        ctx.save_for_backward(log_probs, targets, loss, alpha)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Return the gradient of log_probs, made beside as many numbers as forward kept."""
        log_probs, targets, _, alpha = ctx.saved_tensors
        beta = torch.empty_like(alpha)
        gradient = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
        lengths = [targets.new_empty(log_probs.shape[1]) for _ in range(3)]
        del beta, lengths
        return gradient, None, None


def ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Any:
    """Compute `torch.nn.functional.ctc_loss`; arguments and result are PyTorch's."""
    if log_probs.dim() == 2:
        log_probs = log_probs.unsqueeze(1)
    if targets.device != log_probs.device or targets.dtype is not torch.int64:
        targets = targets.to(log_probs.device, torch.int64)
    sequences = log_probs.shape[1]
    result = Ctc.apply(log_probs, targets, _longest(targets, target_lengths, sequences))
    if zero_infinity:
        result = torch.where(result == float("inf"), result.new_zeros(()), result)
    if reduction == MEAN:
        return (result / result.new_empty(sequences).clamp_min(1)).mean()
    return result.sum() if reduction == SUM else result


def _longest(targets: Any, lengths: Any, sequences: Any) -> Any:
    """Tokens of the longest transcript."""
    if isinstance(lengths, list | tuple):
        return max(lengths, default=0)
    if (value := known_value(lengths)) is not None:
        with _disable_current_modes():
            return int(value.max())
    if (facts := running_facts()) is not None:
        facts.assumed[asking() or "the loss"] = ASSUMED
    return targets.shape[-1] if targets.dim() == 2 else targets.shape[0] // sequences
