"""Kimi delta attention against transformers' module, up to the rule, and the rule against the gated delta net's."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as ling  # noqa: E402
from transformers.models.kimi_linear import modeling_kimi_linear as kimi  # noqa: E402

from loadgauge.core.definitions.model.model import GatedDeltaNet, KimiDelta  # noqa: E402
from loadgauge.core.layers import View  # noqa: E402
from loadgauge.core.layers.mixers.gated_delta_net import gated_delta_net  # noqa: E402
from loadgauge.core.layers.mixers.kimi_delta import kimi_delta  # noqa: E402
from loadgauge.core.layers.operations.builder import Builder  # noqa: E402
from loadgauge.core.layers.operations.operations import Layer  # noqa: E402

SEQ, BATCH, HIDDEN, HEADS, WIDTH = 128, 2, 64, 4, 16
MODULES = {
    "kimi_linear": (kimi, kimi.KimiLinearDeltaAttention, True),
    "bailing_hybrid": (ling, ling.BailingHybridDeltaAttention, False),
}


def listed(narrow: bool) -> Layer:
    build = Builder(View.of(SEQ, BATCH))
    spec = KimiDelta(linear_num_heads=HEADS, linear_head_dim=WIDTH, narrow=("decay", "gate") if narrow else ())
    kimi_delta(build, build.residual("input", HIDDEN), spec, HIDDEN)
    return build.layer("kda")


@pytest.mark.parametrize("model_type", MODULES)
def test_all_but_the_rule(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, and the products of the projections, forward and backward, with the values in place of the rule's output."""
    home, kind, narrow = MODULES[model_type]

    def values(query: Any, key: Any, value: Any, g: Any, beta: Any, **more: Any) -> tuple[Any, None]:
        return value + query + key + g.to(value.dtype) + beta.unsqueeze(-1), None

    monkeypatch.setattr(home, "chunk_kimi_delta_attention", values)
    config = transformers.AutoConfig.for_model(
        model_type, hidden_size=HIDDEN, num_attention_heads=HEADS, linear_num_heads=HEADS, head_dim=WIDTH,
        linear_head_dim=WIDTH, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "dense"],
    )  # fmt: skip
    module = kind(config, 0).float()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    layer = listed(narrow)
    assert layer.params == sum(parameter.numel() for parameter in module.parameters())
    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        output = module(x)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    products = [operation for operation in layer if operation.kind == "gemm"]
    counted = forward.get_flop_counts()["Global"]
    convolution = sum(flops for name, flops in counted.items() if "convolution" in str(name))
    assert forward.get_total_flops() - convolution == sum(one.forward_flops for one in products)
    again = backward.get_flop_counts()["Global"]
    convolution = sum(flops for name, flops in again.items() if "convolution" in str(name))
    expected = sum(one.input_gradient_flops + one.weight_gradient_flops for one in products)
    assert backward.get_total_flops() - convolution == expected


def test_the_rule_is_the_gated_delta_net_s() -> None:
    """A decay of each channel changes what is multiplied, not how much (source: kimi2025linear, section 3)."""
    build = Builder(View.of(SEQ, BATCH))
    spec = GatedDeltaNet(
        linear_num_key_heads=HEADS, linear_num_value_heads=HEADS, linear_key_head_dim=WIDTH, linear_value_head_dim=WIDTH
    )
    gated_delta_net(build, build.residual("input", HIDDEN), spec, HIDDEN)
    theirs = next(operation for operation in build.layer("delta") if operation.name == "delta.rule")
    ours = next(operation for operation in listed(True) if operation.name == "kda.rule")
    assert ours.forward_flops == theirs.forward_flops
    assert ours.input_gradient_flops == theirs.input_gradient_flops
