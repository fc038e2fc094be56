"""Collectives of a layer as operations of their own, which a recording shows by name.

They move nothing: on tensors without values only their sizes count. `<axis>_all_reduce` writes in place, as NCCL does.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

AXES = ("tp", "ep")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_NAME = re.compile(rf"loadgauge::({'|'.join(AXES)})_({'|'.join(KINDS)})(?:\.\w+)?")


def exchange_of(name: str) -> tuple[str, str] | None:
    """The (kind, axis) of a recorded operation; None for one that is no exchange.

    >>> exchange_of("loadgauge::tp_all_reduce"), exchange_of("aten::mm")
    (('all_reduce', 'tp'), None)
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (match[2], match[1])


def _define() -> None:
    shapes: dict[str, Callable[..., torch.Tensor]] = {
        "all_gather": lambda x, ranks: x.new_empty((*x.shape[:-1], x.shape[-1] * ranks)),
        "reduce_scatter": lambda x, ranks: x.new_empty((*x.shape[:-1], x.shape[-1] // ranks)),
        "all_to_all": lambda x, ranks: x.new_empty(x.shape),
    }
    for axis in AXES:
        torch.library.define(f"loadgauge::{axis}_all_reduce", "(Tensor(a!) x) -> ()")
        torch.library.register_fake(f"loadgauge::{axis}_all_reduce", lambda x: None)
        for kind, shape_rule in shapes.items():
            torch.library.define(f"loadgauge::{axis}_{kind}", "(Tensor x, int ranks) -> Tensor")
            torch.library.register_fake(f"loadgauge::{axis}_{kind}", shape_rule)


_define()


def _run(axis: str, kind: str) -> Any:
    return getattr(torch.ops.loadgauge, f"{axis}_{kind}")


def all_reduce(x: torch.Tensor, axis: str = "tp") -> None:
    """Sum a tensor over the ranks of an axis, in place; autograd does not see it."""
    _run(axis, "all_reduce")(x)


class Enter(torch.autograd.Function):
    """Into a region where each rank works on its columns: the gradient is summed on the way back (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()  # a view would hold x, which holds it (`sharding.entered`), and neither would go

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].contiguous()
        all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """Out of it: the ranks' results are summed (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Gather(torch.autograd.Function):
    """Every rank gets the columns of all; back, each takes its own part of the gradient, which is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.columns = x.shape[-1]
        return _run("tp", "all_gather")(x, ranks)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][..., : ctx.columns].contiguous(), None


class Part(torch.autograd.Function):
    """A rank's columns of a whole tensor; back, the columns of all are gathered."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return x[..., : x.shape[-1] // ranks].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _run("tp", "all_gather")(grads[0].contiguous(), ctx.ranks), None


class Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts, or back: as many come as go, where experts are equally busy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return _run("ep", "all_to_all")(x, ranks)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _run("ep", "all_to_all")(grads[0].contiguous(), ctx.ranks), None


class VocabularyLoss(torch.autograd.Function):
    """Cross-entropy of logits whose columns lie on several ranks: maximum, sum and the target's logit are exchanged, and both
    passes make what PyTorch's `loss_parallel` makes (pytorch, distributed/tensor/parallel/loss.py)."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        most = logits.amax(-1, keepdim=True)
        all_reduce(most)
        shifted = logits - most
        total = shifted.exp().sum(-1, keepdim=True)
        all_reduce(total)
        result = shifted - total.log()
        del shifted
        outside = (labels < 0) | (labels >= logits.shape[-1])
        own = labels.masked_fill(outside, 0)
        chosen = result.gather(-1, own.unsqueeze(-1)).squeeze(-1)
        chosen.masked_fill_(outside, 0)
        all_reduce(chosen)
        ctx.save_for_backward(result, own, outside)
        return -chosen.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        result, own, outside = ctx.saved_tensors
        gradient = torch.zeros_like(result)
        gradient.scatter_(-1, own.unsqueeze(-1), outside.to(result.dtype).sub_(1).unsqueeze(-1))
        gradient.mul_(grads[0])
        return gradient - result.exp() * gradient.sum(-1, keepdim=True), None


enter: Any = Enter.apply
leave: Any = Leave.apply
gather: Any = Gather.apply
part: Any = Part.apply
exchange: Any = Exchange.apply
vocabulary_loss: Any = VocabularyLoss.apply
