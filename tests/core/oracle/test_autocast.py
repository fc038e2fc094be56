"""float32 weights under autocast to bfloat16: blocks keep what their list says, beside 16-bit copies of matrices.

A CPU's autocast does less than CUDA's; most tests here give it CUDA's lists of operations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loadgauge import Layout, estimate
from loadgauge.core.layers import block_layer, embedding_layer, head_layer, rotary_layer
from loadgauge.core.layers.operations.operations import Layer
from torch_autocast import cuda_autocast
from torch_kept import cuda_dropout, keeping, owned, total  # noqa: F401
from torch_models import CASES, NO_SDPA, Built, block_kept, build

S, B = 24, 2
PRECISION = "bf16-autocast"


def listed(built: Built) -> Layer:
    spec = built.spec
    return block_layer(spec.blocks[spec.pattern[1]], spec.hidden_size, built.view(S, B, PRECISION))


def copies(layer: Layer) -> int:
    """Autocast's cached copies of matrices, which the products keep; loadgauge counts them once for the model."""
    return int(2 * sum(weight.numel for weight in layer.weights if weight.kind == "matrix"))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_blocks(name: str, attention: str) -> None:
    if attention == "sdpa" and name in NO_SDPA:
        pytest.skip("transformers has no fused attention for it")
    built = build(name, attention, torch.float32)
    layer = listed(built)
    assert block_kept(built, 1, S, B, cuda_autocast()) == layer.saved() + copies(layer)


@pytest.mark.usefixtures("cuda_dropout")
@pytest.mark.parametrize("name", ["gpt2", "bert", "opt", "llama-gqa", "gemma3", "modernbert"])
def test_blocks_with_dropout(name: str) -> None:
    built = build(name, "eager", torch.float32, dropout=0.1)
    layer = listed(built)
    assert block_kept(built, 1, S, B, cuda_autocast()) == layer.saved() + copies(layer)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gemma3", "phi3"])
def test_with_the_lists_of_a_cpu(name: str, attention: str) -> None:
    """These modules leave nothing for autocast to upcast: they ask for float32 where they want it."""
    built = build(name, attention, torch.float32)
    layer = listed(built)
    assert block_kept(built, 1, S, B, torch.autocast("cpu", torch.bfloat16)) == layer.saved() + copies(layer)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_what_a_cpu_leaves_in_16_bit(name: str, attention: str) -> None:
    """Powers, as in GPT-2's activation, and a softmax (GPT-2's scores are float32 anyway, from its float32 mask)."""
    built = build(name, attention, torch.float32)
    layer = listed(built)
    activation = 3 * 2 * S * B * 4 * 64 if name == "gpt2" else 0  # its input, tanh and sum
    # No float32 probabilities beside the 16-bit ones.
    softmax = 4 * 4 * S * S * B if name == "bert" and attention == "eager" else 0
    want = layer.saved() + copies(layer) - activation - softmax
    assert block_kept(built, 1, S, B, torch.autocast("cpu", torch.bfloat16)) == want


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gemma3"])
def test_whole_model(name: str, tied: bool) -> None:
    built = build(name, "eager", torch.float32, tie_word_embeddings=tied)
    spec, view = built.spec, built.view(S, B, PRECISION)
    ids = built.ids(S, B)
    with keeping(owned(built.model)) as seen, cuda_autocast():
        result: Any = built.model(ids, labels=ids.clone())
        kept = total(seen)
    del result
    blocks = sum(block_layer(spec.blocks[kind], spec.hidden_size, view).saved() for kind in spec.pattern)
    ends = sum(
        layer.saved() for layer in (embedding_layer(spec, view), rotary_layer(spec, view), head_layer(spec, view))
    )
    layout = Layout(micro_batch=B, global_batch=B, seq_len=S)
    moments = estimate(spec, layout, built.training(PRECISION)).memory.moments
    at_loss = next(moment for moment in moments if moment.phase == "loss")
    scalar = 4  # nll_loss keeps the sum of the weights of the classes
    assert kept == blocks + ends + at_loss.parts["gathered"] + scalar
