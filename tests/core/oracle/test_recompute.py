"""Recomputation: what `torch.utils.checkpoint` keeps of a block, against `Layer.kept(Recompute(...))`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.families.reference import gpt_block, llama_block
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.attention.attention import CORE
from loadgauge.core.layers.embedding_head import mask_bytes
from loadgauge.core.layers.operations.operations import Layer, Recompute
from torch_kept import kept_by, native_dropout
from torch_models import block_kept, build
from torch_plain import Core, eager_core, flash_core, gpt, llama

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


def again(core: Core) -> Core:
    """The core of attention under a checkpoint."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(core, q, k, v, use_reentrant=False)  # type: ignore[no-any-return]

    return run


def listed_llama(s: int, b: int, h: int, k: int, dtype: torch.dtype, attention: str) -> Layer:
    how = Kernels(attention=attention, repeat_kv=True, dtypes=Dtypes(activation=dtype.itemsize))  # type: ignore[arg-type]
    return block_layer(llama_block(h, 8, k, 16, 176), h, View.of(s, b, kernels=how))


@dtypes
@pytest.mark.parametrize("k", [8, 2])
@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_core_of_attention(k: int, attention: str, dtype: torch.dtype) -> None:
    s, b, h = 24, 2, 64
    core = flash_core if attention == "flash" else eager_core(F.dropout, 0.0)
    run, own = llama(h, 8, k, 16, 176, dtype, again(core))
    layer = listed_llama(s, b, h, k, dtype, attention)
    selective = layer.saved(Recompute(checkpointed=CORE))
    assert kept_by(run, own, b, s, h) == selective
    # Dropped: the fused kernel's log-sum-exp, or the probabilities and repeated keys and values, kept as they came.
    repeated = 2 * s * b * 16 * (8 - k)
    dropped = dtype.itemsize * (8 * s * s * b + repeated) if attention == "eager" else 4 * 8 * s * b
    assert layer.saved() - selective == dropped


def test_core_of_attention_with_dropout() -> None:
    """Selective recomputation drops the 5 a s^2 b of Korthikanti et al.: probabilities, mask, dropped probabilities."""
    s, b, h, a = 24, 2, 64, 4
    run, own = gpt(h, a, torch.bfloat16, again(eager_core(native_dropout, 0.1)), native_dropout)
    how = Kernels(attention="eager", dtypes=Dtypes())
    layer = block_layer(gpt_block(h, a), h, View.of(s, b, kernels=how))
    selective = layer.saved(Recompute(checkpointed=CORE))
    assert layer.saved() - selective == 5 * a * s * s * b
    statistics = 2 * 2 * s * b * (2 - 4)  # LayerNorm on a CPU keeps them in bfloat16
    assert kept_by(run, own, b, s, h) == selective + statistics


@dtypes
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gemma3", "gpt-neox", "bert"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_whole_blocks(name: str, attention: str, dtype: torch.dtype) -> None:
    """Gradient checkpointing as transformers does it keeps the input of each block and nothing else."""
    s, b = 24, 2
    built = build(name, attention, dtype)
    built.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    spec = built.spec
    layer = block_layer(spec.blocks[spec.pattern[1]], spec.hidden_size, built.view(s, b))
    kept = layer.kept(Recompute(checkpointed=layer.names))
    assert [tensor.name for tensor in kept] == ["input"]
    # The mask of eager attention is held, not kept: by a closure, but GPT-2's by the checkpoint, with the input.
    mask = mask_bytes(spec, built.view(s, b)) if name == "gpt2" else 0
    assert mask == (b * s * s * dtype.itemsize if (name, attention) == ("gpt2", "eager") else 0)
    assert block_kept(built, 1, s, b) == kept[0].nbytes + mask == s * b * 64 * dtype.itemsize + mask
