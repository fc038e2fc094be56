"""Gemma 4's layers that read what others made: their own inputs, and keys and values of an earlier layer."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from loadgauge.core.families.hf import from_dict  # noqa: E402
from loadgauge.core.layers import block_layer, embedding_layer  # noqa: E402
from torch_models import SIZES, TOKENS, Built, block_kept  # noqa: E402

SEQ, BATCH, OWN, LAYERS, HEAD, WIDE, KEYS = 24, 2, 8, 4, 16, 32, 2
KEYS_OF_CONFIG: dict[str, Any] = {
    **SIZES, **TOKENS, "num_hidden_layers": LAYERS, "num_key_value_heads": KEYS, "head_dim": HEAD, "global_head_dim": WIDE,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 512, "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True, "hidden_size_per_layer_input": OWN, "vocab_size_per_layer_input": 96,
}  # fmt: skip


def build(attention: str, dtype: torch.dtype) -> Built:
    config = transformers.Gemma4TextConfig(**KEYS_OF_CONFIG)
    config._attn_implementation, config.use_cache = attention, False
    model = transformers.Gemma4ForCausalLM(config).to(dtype).train()
    return Built(model, config, from_dict(config.to_dict()), attention, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("position", range(LAYERS))
def test_kept_bytes(position: int, attention: str, dtype: torch.dtype) -> None:
    """PyTorch keeps all layers' inputs as one tensor, which the list has where it is made; and so the borrowed keys and values."""
    built = build(attention, dtype)
    view = built.view(SEQ, BATCH)
    layer = block_layer(built.spec.blocks[built.spec.pattern[position]], built.spec.hidden_size, view)
    inputs = next(one for one in embedding_layer(built.spec, view).kept() if one.name == "embedding.per_layer_inputs")
    assert inputs.nbytes == SEQ * BATCH * LAYERS * OWN * dtype.itemsize
    borrowed = 0
    if position >= LAYERS - 2 and attention == "sdpa":  # written out, they are repeated to all heads, which are new
        borrowed = 2 * SEQ * BATCH * KEYS * (WIDE if position % 2 else HEAD) * dtype.itemsize
    assert block_kept(built, position, SEQ, BATCH) == layer.saved() + inputs.nbytes + borrowed


def test_parameters() -> None:
    built = build("eager", torch.float32)
    for position, module in enumerate(built.layers):
        block = built.spec.blocks[built.spec.pattern[position]]
        layer = block_layer(block, built.spec.hidden_size, built.view(SEQ, BATCH))
        assert layer.params == sum(parameter.numel() for parameter in module.parameters())
