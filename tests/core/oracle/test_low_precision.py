"""What blocks in 8 and 4 bits keep for backward, against PyTorch's saved tensors: equal to the byte.

The one float32 scale of a whole tensor, which the recipes with such scales neglect, is counted by name.
"""

from __future__ import annotations

import msgspec
import pytest
import test_fused_experts as experts
import torch
from torch import Tensor

from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.definitions.model.model import Mlp, Moe
from loadgauge.core.definitions.training.frameworks import LOW_PRECISIONS, TRANSFORMERS
from loadgauge.core.definitions.training.training import training
from loadgauge.core.families.reference import llama_block
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.feed_forward.moe import moe
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Layer
from recorded import kept_bytes
from torch_autocast import cuda_autocast
from torch_kept import kept_by
from torch_plain import FusedRMSNorm, Weights, flash_core
from torch_quantised import BLOCKS, Original, Quantised, Swiglu, quantise

MEGATRON = LOW_PRECISIONS["megatron"]
recipes = pytest.mark.parametrize("recipe", BLOCKS)
S, B, H, A, K, D, F = 64, 4, 128, 4, 2, 32, 192


def scales_of_tensors(layer: Layer, recipe: str) -> int:
    """One float32 a quantised tensor."""
    return 4 * sum(tensor.dtype == "quantised" for tensor in layer.kept()) if BLOCKS[recipe] is None else 0


def megatron(recipe: str) -> tuple[object, list[Tensor]]:
    """A Llama block of Transformer Engine's layers, norms and activation fused."""
    make = Weights(torch.bfloat16)
    wq, wk, wv, wo = make(A * D, H), make(K * D, H), make(K * D, H), make(H, A * D)
    wg, wu, wd, g1, g2 = make(F, H), make(F, H), make(H, F), make(H), make(H)

    def heads(y: Tensor, count: int) -> Tensor:
        return y.view(B, S, count, D).transpose(1, 2)

    def run(x: Tensor) -> Tensor:
        n = FusedRMSNorm.apply(x, g1)
        low = quantise(n, recipe)
        q, k, v = (Quantised.apply(n, *low, weight) for weight in (wq, wk, wv))
        context = flash_core(heads(q, A), heads(k, K), heads(v, K)).transpose(1, 2).reshape(B, S, A * D)
        # Only delayed scaling cannot quantise the context, which attention holds, again in backward.
        delayed = recipe == "fp8-delayed"
        mixed = Quantised.apply(context, *quantise(context, recipe), wo) if delayed else Original.apply(context, wo)
        y = x + mixed
        n = FusedRMSNorm.apply(y, g2)
        low = quantise(n, recipe)
        inner = Swiglu.apply(Quantised.apply(n, *low, wg), Quantised.apply(n, *low, wu))
        return y + Quantised.apply(inner, *quantise(inner, recipe), wd)

    return run, make.made


def layer_of(framework: str, recipe: str) -> Layer:
    kernels = training(framework, recipe).kernels
    return block_layer(llama_block(H, A, K, D, F), H, View.of(S, B, kernels=kernels))


@recipes
def test_a_block_of_transformer_engine(recipe: str) -> None:
    run, own = megatron(recipe)
    layer = layer_of("megatron", recipe)
    assert kept_by(run, own, B, S, H) == layer.saved() + scales_of_tensors(layer, recipe)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "recipe", [name for name, low in LOW_PRECISIONS["torchtitan"].items() if low.source == "torchao"]
)
def test_a_block_of_torchao(recipe: str) -> None:
    """Every product holds the 16-bit input: what it keeps is what the bf16 recipe keeps."""
    make = Weights(torch.bfloat16)
    wq, wk, wv, wo = make(A * D, H), make(K * D, H), make(K * D, H), make(H, A * D)
    wg, wu, wd, g1, g2 = make(F, H), make(F, H), make(H, F), make(H), make(H)

    def heads(y: Tensor, count: int) -> Tensor:
        return y.view(B, S, count, D).transpose(1, 2)

    def run(x: Tensor) -> Tensor:
        n = FusedRMSNorm.apply(x, g1)
        q, k, v = (Original.apply(n, weight) for weight in (wq, wk, wv))
        context = flash_core(heads(q, A), heads(k, K), heads(v, K)).transpose(1, 2).reshape(B, S, A * D)
        y = x + Original.apply(context, wo)
        n = FusedRMSNorm.apply(y, g2)
        inner = torch.nn.functional.silu(Original.apply(n, wg)) * Original.apply(n, wu)
        return y + Original.apply(inner, wd)

    assert kept_by(run, make.made, B, S, H) == layer_of("torchtitan", recipe).saved()


@recipes
@pytest.mark.parametrize("shared", [False, True])
def test_experts(recipe: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router keeps the 16-bit tokens, which the shared expert's first matrices share; rows are quantised."""

    class Grouped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
            ctx.save_for_backward(*quantise(x, recipe), weight)  # type: ignore[attr-defined]
            return torch.cat([part @ one.T for part, one in zip(x.split(counts), weight, strict=True)])

    monkeypatch.setattr(experts, "Grouped", Grouped)
    # Tokens and copies of them in whole blocks of 128.
    tokens, hidden, count, chosen, width = 128, 64, 8, 3, 48
    for name, value in (("TOKENS", tokens), ("HIDDEN", hidden), ("EXPERTS", count), ("CHOSEN", chosen)):
        monkeypatch.setattr(experts, name, value)
    shapes = {
        "router": (count, hidden), "first": (count, 2 * width, hidden), "second": (count, hidden, width),
        "gate": (width, hidden), "up": (width, hidden), "down": (hidden, width),
    }  # fmt: skip
    module = torch.nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)))
    spec = Moe(
        num_experts=count, num_experts_per_tok=chosen, moe_intermediate_size=width,
        shared=Mlp(intermediate_size=width) if shared else None,
    )  # fmt: skip
    kernels = Kernels(experts="fused", activation="fused", products=MEGATRON[recipe], dtypes=Dtypes(2))
    build = Builder(View.of(tokens, 1, kernels=kernels), low=MEGATRON[recipe])
    moe(build, build.residual("input", hidden), spec, hidden)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)

    def call() -> Tensor:
        routed = experts.forward(module, x, spec, False)
        if not shared:
            return routed
        if recipe == "fp8-delayed":
            low = quantise(x, recipe)
            gate, up = (Quantised.apply(x, *low, weight) for weight in (module.gate, module.up))
        else:
            gate, up = (Original.apply(x, weight) for weight in (module.gate, module.up))
        inner = Swiglu.apply(gate, up)
        return routed + Quantised.apply(inner, *quantise(inner, recipe), module.down)

    layer = build.layer("moe")
    assert sum(kept_bytes(module, call)) == layer.saved() + scales_of_tensors(layer, recipe)


@recipes
def test_bytes_of_an_element(recipe: str) -> None:
    """The same of one tensor, by the formats' definitions and PyTorch's own 8-bit types."""
    x = torch.randn(256, 384, dtype=torch.bfloat16)
    values, scales = quantise(x, recipe)
    apart = scales.nbytes if BLOCKS[recipe] is None else 0
    assert values.nbytes + scales.nbytes - apart == MEGATRON[recipe].element * x.numel()


@pytest.mark.parametrize("recipe", [name for name in MEGATRON if name.endswith("-primary")])
def test_where_the_weights_are_does_not_change_what_is_kept(recipe: str) -> None:
    assert layer_of("megatron", recipe).saved() == layer_of("megatron", recipe.removesuffix("-primary")).saved()


def test_autocast_casts_the_weights_of_linears_and_not_of_experts() -> None:
    """The 16-bit copies that autocast makes are those that `Weight.cast` says it makes."""
    tokens, hidden, count, width = 16, 32, 4, 16
    x = torch.randn(tokens, hidden)
    linear = torch.randn(width, hidden, requires_grad=True)
    grouped = torch.randn(count, hidden, width, requires_grad=True)
    ends = torch.arange(1, count + 1, dtype=torch.int32) * (tokens // count)
    copies: dict[str, bool] = {}
    with cuda_autocast():
        for name, weight, call in (
            ("mlp.router.weight", linear, lambda: torch.nn.functional.linear(x, linear)),
            ("mlp.gate_up.weight", grouped, lambda: torch._grouped_mm(x, grouped, offs=ends)),
        ):
            copies[name] = weight.dtype != call().dtype
    kernels = msgspec.structs.replace(TRANSFORMERS, dtypes=Dtypes(2, residual=4))
    spec = Moe(num_experts=count, num_experts_per_tok=2, moe_intermediate_size=width)
    build = Builder(View.of(tokens, 1, kernels=kernels))
    moe(build, build.residual("input", hidden), spec, hidden)
    cast = {weight.name: weight.cast for weight in build.layer("moe").weights}
    assert copies == {name: cast[name] for name in copies} == {"mlp.router.weight": True, "mlp.gate_up.weight": False}
