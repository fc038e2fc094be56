"""Megatron's form of a mixture of experts, in plain PyTorch.

Megatron-LM's own modules need a GPU. What follows does the same operations in the order of its source (router.py,
moe_utils.py, experts.py, fused_bias_swiglu.py), so that autograd says what they keep.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from loadgauge.core.definitions.model.kernels import Dtypes, Kernels  # noqa: E402
from loadgauge.core.definitions.model.model import Moe  # noqa: E402
from loadgauge.core.layers import View  # noqa: E402
from loadgauge.core.layers.feed_forward.moe import moe  # noqa: E402
from loadgauge.core.layers.operations.builder import Builder  # noqa: E402
from recorded import kept_bytes, stored  # noqa: E402

TOKENS, HIDDEN, EXPERTS, CHOSEN, WIDTH = 32, 64, 8, 3, 48


class Router(torch.autograd.Function):
    """The product in float32; what is saved stays in the dtype it came in."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return (gradient @ weight.float()).to(x.dtype), (gradient.T @ x.float()).to(weight.dtype)


class Grouped(torch.autograd.Function):
    """Transformer Engine's grouped linear: the counts of rows are on the host."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.cat([part @ one.T for part, one in zip(x.split(counts), weight, strict=True)])


class WeightedSwiglu(torch.autograd.Function):
    """silu(gate) * up * weight, which saves its input and the weights of the rows."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both, weights)
        gate, up = both.chunk(2, dim=-1)
        return (functional.silu(gate) * up * weights).to(both.dtype)


def chosen(logits: torch.Tensor, spec: Moe) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their probabilities."""
    if spec.router_score == "sigmoid":
        scores = torch.sigmoid(logits)
        _, ids = torch.topk(scores.detach(), CHOSEN, dim=1)
        best = torch.gather(scores, 1, ids)
        return best / (best.sum(dim=-1, keepdim=True) + 1e-20), ids
    if not spec.norm_topk_prob:
        return torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), CHOSEN, dim=1)
    best, ids = torch.topk(logits, CHOSEN, dim=1)
    return torch.softmax(best, dim=-1, dtype=torch.float32), ids


def forward(module: Any, x: torch.Tensor, spec: Moe, aux_loss: bool) -> torch.Tensor:
    logits = Router.apply(x, module.router)
    probabilities, ids = chosen(logits, spec)
    dense = torch.zeros_like(logits).scatter(1, ids, probabilities)
    routed = torch.zeros_like(logits).int().scatter(1, ids, 1).bool()
    flat = routed.T.contiguous().reshape(-1).argsort(descending=True, stable=True)[: TOKENS * CHOSEN]
    order = flat % TOKENS
    weights = dense.T.contiguous().reshape(-1)[flat]
    rows = x.index_select(0, order)
    counts = routed.sum(dim=0).tolist()
    inner = WeightedSwiglu.apply(Grouped.apply(rows, module.first, counts), weights.unsqueeze(-1))
    output = Grouped.apply(inner, module.second, counts)
    result = torch.zeros_like(x).scatter_add(0, order.unsqueeze(1).expand(-1, HIDDEN), output)
    if aux_loss:
        # The sum over tokens keeps nothing; the product with the counts is one number an expert.
        result = result + torch.softmax(logits, dim=-1, dtype=torch.float32).sum().to(result.dtype)
    return result


@pytest.mark.parametrize("aux_loss", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("score", "normalised"), [("softmax", True), ("softmax", False), ("sigmoid", True)], ids=str)
def test_kept_bytes(score: str, normalised: bool, dtype: torch.dtype, aux_loss: bool) -> None:
    spec = Moe(
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH,
        router_score=score, router_float32=score == "sigmoid", norm_topk_prob=normalised,
    )  # fmt: skip
    module = torch.nn.Module()
    for name, shape in (
        ("router", (EXPERTS, HIDDEN)),
        ("first", (EXPERTS, 2 * WIDTH, HIDDEN)),
        ("second", (EXPERTS, HIDDEN, WIDTH)),
    ):
        module.register_parameter(name, torch.nn.Parameter(torch.randn(shape, dtype=dtype)))
    kernels = Kernels(experts="fused", router_aux_loss=aux_loss, dtypes=Dtypes(activation=dtype.itemsize))
    build = Builder(View.of(TOKENS, 1, kernels=kernels))
    moe(build, build.residual("input", HIDDEN), spec, HIDDEN)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    assert stored(build.layer("moe")) == kept_bytes(module, lambda: forward(module, x, spec, aux_loss))
