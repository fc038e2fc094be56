"""FLOPs of the list against PyTorch's own counter: matrix products and attention, forward and backward, exactly."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torch_lora as lora
from loadgauge.core.definitions.layout.layout import RecomputePolicy
from loadgauge.core.definitions.model.lora import ALL_TARGETS
from loadgauge.core.estimate.time.flops import microbatch_flops
from loadgauge.core.layers import block_layer
from loadgauge.core.layers.operations.operations import Recompute
from torch_lora import frozen
from torch_models import CASES, NO_SDPA, Built, build

S, B = 24, 2
attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def products(query: torch.Size, key: torch.Size, count: int) -> int:
    """`count` products of queries and keys; grouped keys are as good as repeated."""
    b, a, s, d = query
    return count * 2 * b * a * s * key[2] * d


KERNELS = {
    # Not in PyTorch's registry. As of CUDA's kernel: two products forward, five backward, one of them the scores again.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, *rest, **named: products(
        query, key, 2
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda gradient, query, key, *rest, **named: products(query, key, 5)
    ),
}


def counted(built: Built, s: int, b: int) -> tuple[int, int]:
    """(forward, backward) of a whole model with its loss."""
    ids = built.ids(s, b)
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as forward:
        loss = built.model(ids, labels=ids).loss
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@attentions
@pytest.mark.parametrize("name", CASES)
def test_whole_model(name: str, attention: str) -> None:
    if attention == "sdpa" and name in NO_SDPA:
        pytest.skip("transformers has no fused attention for it")
    built = build(name, attention, torch.float32)
    flops = microbatch_flops(built.spec, built.view(S, B))
    assert counted(built, S, B) == (flops.forward, flops.backward + flops.recompute)
    if attention == "eager":
        assert flops.recompute == 0


@attentions
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "bert"])
def test_depth(name: str, attention: str) -> None:
    """One more layer costs what its list says."""
    found = [counted(build(name, attention, torch.float32, num_hidden_layers=layers), 40, 1) for layers in (2, 3)]
    built = build(name, attention, torch.float32)
    layer = block_layer(built.spec.blocks[0], built.spec.hidden_size, built.view(40, 1))
    gradients = sum(op.input_gradient_flops + op.weight_gradient_flops + op.rerun_flops for op in layer)
    assert (found[1][0] - found[0][0], found[1][1] - found[0][1]) == (layer.forward_flops, gradients)


@attentions
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "qwen3", "bert"])
def test_recomputed(name: str, attention: str) -> None:
    """PyTorch's checkpoint stops early: it makes nothing again that is not kept, so not the last matrix product."""
    built = build(name, attention, torch.float32)
    built.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    view, layers = built.view(S, B), built.spec.num_hidden_layers
    flops = microbatch_flops(built.spec, view, RecomputePolicy(mode="full"))
    layer = block_layer(built.spec.blocks[0], built.spec.hidden_size, view)
    last = next(op.forward_flops for op in reversed(layer.operations) if op.gemms)
    stopped = layers * last
    if built.spec.blocks[0].placement == "post":
        stopped = 0  # a norm follows the last matrix, and keeps its sum with the input
    forward, backward = counted(built, S, B)
    assert forward == flops.forward
    assert backward == flops.backward + flops.recompute - stopped
    assert flops.recompute >= layers * layer.recompute_flops(Recompute(checkpointed=layer.names))


@attentions
@pytest.mark.parametrize("targets", [ALL_TARGETS, frozenset({"query", "value"})], ids=["all", "query and value"])
def test_adapters(attention: str, targets: frozenset[str]) -> None:
    """A frozen matrix has a gradient of its input, and none of its own."""
    block = frozen("llama-gqa", attention, torch.float32, targets, 0.0)
    x = torch.randn(lora.B, lora.S, 64, requires_grad=True)
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as forward:
        y = block.run(x)
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as backward:
        y.backward(torch.ones_like(y))
    assert forward.get_total_flops() == block.layer.forward_flops
    assert backward.get_total_flops() == block.layer.backward_flops + block.layer.recompute_flops()
