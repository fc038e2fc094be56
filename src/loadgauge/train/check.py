"""Prove that a model keeps the sequences of a flat batch apart: on the user's own model and batch.

Outputs, loss and gradients are compared with those of every sequence alone, run by the model as transformers made it;
and the gradient of any output of one sequence with respect to another's input embeddings must be exactly zero. It works
on any model, enabled or not: what it tests is the call `model(**batch)` as the user makes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from loadgauge.core.base.errors import ConfigError
from loadgauge.train import inspect_model as anatomy
from loadgauge.train.collator import IGNORED
from loadgauge.train.enable import paused
from loadgauge.train.layers import boundaries
from loadgauge.train.leak_probe import Leak, leak

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Relative error [of the largest value] accepted; even float64 models compute parts (softmax, norms) in float32."""


@dataclass(frozen=True)
class Check:
    """Errors relative to the largest value of their kind; None where there is nothing to compare."""

    sequences: int
    tokens: int
    output_error: float
    loss_error: float | None
    gradient_error: float | None
    leak: Leak
    tolerance: float
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Return whether no token sees another sequence and all outputs and gradients agree with sequences run alone."""
        errors = [e for e in (self.output_error, self.loss_error, self.gradient_error) if e is not None]
        return not self.reason and self.leak.worst == 0 and all(error <= self.tolerance for error in errors)

    def __str__(self) -> str:
        def shown(error: float | None) -> str:
            return "not compared" if error is None else f"{error:.1e}"

        leaks = (
            "exactly 0" if self.leak.worst == 0 else f"{self.leak.worst:.1e}, sequence {self.leak.pair} (sees, seen)"
        )
        return "\n".join(
            [
                f"{'ok' if self.ok else 'NOT padding-free'}: {self.sequences} sequences, {self.tokens} tokens",
                f"outputs against each sequence alone   {shown(self.output_error)}",
                f"loss                                  {shown(self.loss_error)}",
                f"gradients of all parameters           {shown(self.gradient_error)}",
                f"gradient from sequence to sequence    {leaks}",
                *([self.reason] if self.reason else []),
            ]
        )


def check(
    model: nn.Module, batch: Mapping[str, Any], lengths: Sequence[int] | None = None, *, gradients: bool = True
) -> Check:
    """Check `model(**batch)`, a flat batch of sequences of these `lengths` (by default read off `cu_seq_lens_q`, else
    `position_ids`). Parameters and their gradients are left as they were; `gradients=False` saves one copy of them.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] != 1:
        raise ConfigError("check takes a flat batch: input_ids of shape (1, tokens)", key="input_ids")
    lengths = list(_lengths(batch, ids.shape[1]) if lengths is None else lengths)
    if sum(lengths) != ids.shape[1]:
        raise ConfigError(f"sum to {sum(lengths)}, but the batch has {ids.shape[1]} tokens", key="lengths")
    reason, output_error, loss_error, gradient_error = "", float("nan"), None, None
    parameters = [p for p in model.parameters() if p.requires_grad] if gradients else []
    with anatomy.quiet(model), torch.set_grad_enabled(bool(parameters)):
        result = model(**batch)
        output = anatomy.first_tensor(result)
        by_token = output.shape[:2] == (1, sum(lengths))
        if not by_token and output.shape[0] != len(lengths):
            reason = (
                f"outputs of shape {tuple(output.shape)} fit neither {sum(lengths)} tokens nor {len(lengths)} sequences"
            )
            return Check(len(lengths), sum(lengths), output_error, None, None, Leak(0.0, None), 0.0, reason)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        actual = torch.autograd.grad((output * weights).sum(), parameters, allow_unused=True) if parameters else ()
        alone, expected = _alone(model, batch, lengths, weights, parameters, by_token)
        output_error = _relative(output.detach(), alone)
        if parameters:
            gradient_error = _gradient_error(actual, expected)
        loss_error = _loss_error(model, batch, result, alone, lengths) if by_token else None
    return Check(
        len(lengths),
        sum(lengths),
        output_error,
        loss_error,
        gradient_error,
        leak(model, dict(batch), lengths),
        TOLERANCE.get(output.dtype, 1e-4),
    )


def _lengths(batch: Mapping[str, Any], tokens: int) -> tuple[int, ...]:
    if batch.get("cu_seq_lens_q") is not None:
        return boundaries.from_cumulative(batch["cu_seq_lens_q"], tokens).lengths
    if batch.get("position_ids") is not None:
        return boundaries.from_positions(batch["position_ids"]).lengths
    raise ConfigError("the batch says nothing about its sequences: give lengths", key="lengths")


def _alone(
    model: nn.Module,
    batch: Mapping[str, Any],
    lengths: Sequence[int],
    weights: Tensor,
    parameters: list[nn.Parameter],
    by_token: bool,
) -> tuple[Tensor, list[Tensor | None]]:
    """Outputs of every sequence alone, end to end, and the gradients of the same weighted sum."""
    keep = [key for key in ("input_ids", "token_type_ids") if batch.get(key) is not None]
    outputs, totals, start = [], [None] * len(parameters), 0
    gradients: list[Tensor | None] = list(totals)
    with paused(model):
        for index, length in enumerate(lengths):
            span = slice(start, start + length)
            output = anatomy.first_tensor(model(**{key: batch[key][:, span] for key in keep}))
            outputs.append(output.detach())
            if parameters:
                by = weights[:, span] if by_token else weights[index : index + 1]
                parts = torch.autograd.grad((output * by).sum(), parameters, allow_unused=True)
                gradients = [_sum(total, part) for total, part in zip(gradients, parts, strict=True)]
            start += length
    return torch.cat(outputs, 1 if by_token else 0), gradients


def _sum(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    return part if total is None else total if part is None else total + part


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny))


def _gradient_error(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Largest difference of any gradient, relative to the largest gradient."""
    worst = largest = 0.0
    for own, other in zip(actual, expected, strict=True):
        if own is None and other is None:
            continue
        either = own if own is not None else other
        assert either is not None
        own, other = (torch.zeros_like(either) if tensor is None else tensor for tensor in (own, other))
        worst = max(worst, float((own - other).abs().max()))
        largest = max(largest, float(other.abs().max()))
    return worst / largest if largest else worst


def _loss_error(
    model: nn.Module, batch: Mapping[str, Any], result: Any, alone: Tensor, lengths: Sequence[int]
) -> float | None:
    """The loss against the mean over the targets of every sequence alone; an auxiliary loss is not compared."""
    labels, loss = batch.get("labels"), getattr(result, "loss", None)
    if labels is None or loss is None or getattr(result, "aux_loss", None) is not None:
        return None
    name = type(anatomy.whole(model)).__name__
    shifted = "CausalLM" in name or "LMHead" in name
    if not shifted and "MaskedLM" not in name and "TokenClassification" not in name:
        return None
    total, count = torch.zeros((), dtype=torch.float64), 0
    for logits, targets in zip(alone[0].split(list(lengths)), labels[0].split(list(lengths)), strict=True):
        logits, targets = (logits[:-1], targets[1:]) if shifted else (logits, targets)
        total += cross_entropy(logits.double(), targets, ignore_index=IGNORED, reduction="sum").cpu()
        count += int((targets != IGNORED).sum())
    expected = float(total) / count if count else float("nan")
    return abs(float(loss.detach()) - expected) / abs(expected)
