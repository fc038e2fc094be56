"""Megatron's form of a mixture of experts, in plain PyTorch.

Megatron-LM's own modules need a GPU. What follows does the same operations in the order of its source (router.py,
moe_utils.py, experts.py, fused_bias_swiglu.py), so that autograd says what they keep.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

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


def biased(output: torch.Tensor, bias: torch.Tensor, weights: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """`TEGroupedMLP._apply_bias` of experts.py."""
    parts = zip(output.split(counts), bias, weights.unsqueeze(-1).split(counts), strict=True)
    return torch.cat([part + own * weight for part, own, weight in parts]).to(output.dtype)


class Moved(TorchDispatchMode):
    """Counts the bytes that kernels read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view and function.name() != "aten::detach":
            tensors = (one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor))
            self.nbytes += sum(one.nbytes for one in tensors)
        return result


def test_bytes_of_the_bias() -> None:
    rows, width = 512, 512
    output = torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True)
    bias, weights = (
        torch.randn(2, width, dtype=torch.bfloat16, requires_grad=True),
        torch.rand(rows, requires_grad=True),
    )
    with Moved() as ahead:
        result = biased(output, bias, weights, [200, 312])
    gradient = torch.ones_like(result)
    with Moved() as back:
        result.backward(gradient)
    build = Builder(View.of(rows, 1, kernels=Kernels(experts="fused")))
    spec = Moe(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, expert_bias=True)
    moe(build, build.residual("input", width), spec, width)
    (operation,) = (one for one in build.operations if one.name == "mlp.expert_bias")
    assert operation.moves == pytest.approx((ahead.nbytes, back.nbytes), rel=0.01)


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
    first = Grouped.apply(rows, module.first, counts)
    if spec.activation == "clamped_swiglu":  # fused_bias_geglu.py: weighted_bias_quick_geglu_impl
        gate, up = first.chunk(2, -1)
        first = torch.cat((gate.clamp(min=None, max=7), up.clamp(min=-7, max=7)), -1)
    inner = WeightedSwiglu.apply(first, weights.unsqueeze(-1))
    output = Grouped.apply(inner, module.second, counts)
    if spec.expert_bias:
        output = biased(output, module.bias, weights, counts)
    result = torch.zeros_like(x).scatter_add(0, order.unsqueeze(1).expand(-1, HIDDEN), output)
    if aux_loss:
        # The sum over tokens keeps nothing; the product with the counts is one number an expert.
        result = result + torch.softmax(logits, dim=-1, dtype=torch.float32).sum().to(result.dtype)
    return result


@pytest.mark.parametrize("aux_loss", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("score", "normalised", "activation"),
    [
        ("softmax", True, "silu"),
        ("softmax", False, "silu"),
        ("sigmoid", True, "silu"),
        ("softmax", True, "clamped_swiglu"),
    ],
    ids=str,
)
def test_kept_bytes(score: str, normalised: bool, activation: str, dtype: torch.dtype, aux_loss: bool) -> None:
    spec = Moe(
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH,
        router_score=score, router_float32=score == "sigmoid", norm_topk_prob=normalised,
        activation=activation, expert_bias=activation != "silu",
    )  # fmt: skip
    module = torch.nn.Module()
    for name, shape in (
        ("router", (EXPERTS, HIDDEN)),
        ("first", (EXPERTS, 2 * WIDTH, HIDDEN)),
        ("second", (EXPERTS, HIDDEN, WIDTH)),
        ("bias", (EXPERTS, HIDDEN)),
    ):
        module.register_parameter(name, torch.nn.Parameter(torch.randn(shape, dtype=dtype)))
    kernels = Kernels(experts="fused", router_aux_loss=aux_loss, dtypes=Dtypes(activation=dtype.itemsize))
    build = Builder(View.of(TOKENS, 1, kernels=kernels))
    moe(build, build.residual("input", HIDDEN), spec, HIDDEN)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    assert stored(build.layer("moe")) == kept_bytes(module, lambda: forward(module, x, spec, aux_loss))
