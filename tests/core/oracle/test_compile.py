"""What torch.compile keeps of a layer: the list of operations against PyTorch's own partitioner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from loadgauge.core.definitions.training.training import training
from loadgauge.core.families.hf import from_dict
from loadgauge.core.layers import block_layer
from loadgauge.core.layers.operations.rank_view import View
from torch_autocast import cuda_autocast
from torch_partition import kept_by_compile

B, S, H = 2, 256, 256
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama.modeling_llama.LlamaDecoderLayer", "LlamaConfig", {"num_key_value_heads": 2}),
    "qwen2": ("qwen2.modeling_qwen2.Qwen2DecoderLayer", "Qwen2Config", {"num_key_value_heads": 4}),
    "gpt2": ("gpt2.modeling_gpt2.GPT2Block", "GPT2Config", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gpt_neox": ("gpt_neox.modeling_gpt_neox.GPTNeoXLayer", "GPTNeoXConfig", {"rotary_pct": 1.0}),
}
SIZES = {
    "hidden_size": H,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 512,
}


def layer_of(
    name: str, dtype: torch.dtype, device: str
) -> Callable[[], tuple[torch.nn.Module, torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Makes a layer of transformers, and what it is called with."""
    path, config, keys = FAMILIES[name]
    module, _, kind = path.rpartition(".")

    def make() -> tuple[torch.nn.Module, torch.Tensor, tuple[torch.Tensor, ...]]:
        made = getattr(transformers, config)(**SIZES, **keys)
        made._attn_implementation = "sdpa"
        code = __import__(f"transformers.models.{module}", fromlist=[kind])
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                layer = getattr(code, kind)(made, 0)
                x = torch.empty(B, S, H, requires_grad=True)
                tables = tuple(torch.empty(1, S, H // 4) for _ in range(2))
        finally:
            torch.set_default_dtype(default)
        return layer, x, () if name == "gpt2" else tables

    return make


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("recipe", ["bf16-pure", "bf16-autocast"])
def test_what_a_compiled_layer_keeps(name: str, recipe: str) -> None:
    cast = recipe == "bf16-autocast"
    make = layer_of(name, torch.float32 if cast else torch.bfloat16, "cpu" if cast else "meta")
    kept = kept_by_compile(make, cuda_autocast if cast else contextlib.nullcontext)
    _, config, keys = FAMILIES[name]
    spec = from_dict(getattr(transformers, config)(**SIZES, **keys).to_dict())
    how = training("huggingface", recipe, compiled=True)
    layer = block_layer(spec.blocks[0], H, View.of(S, B, kernels=how.kernels))
    assert layer.saved() == pytest.approx(kept, rel=0.002)
    plain = training("huggingface", recipe)
    assert layer.saved() < 0.9 * block_layer(spec.blocks[0], H, View.of(S, B, kernels=plain.kernels)).saved()
