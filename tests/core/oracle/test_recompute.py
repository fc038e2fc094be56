"""Recomputation: what `torch.utils.checkpoint` keeps of a block, against `Layer.kept(Recompute(...))`."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.families.reference import gpt_block, llama_block, llama_model
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.attention.attention import CORE
from loadgauge.core.layers.embedding_head import mask_bytes
from loadgauge.core.layers.operations.operations import Layer, Recompute
from loadgauge.core.resolve.recompute_words import recompute_policy
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


@pytest.mark.parametrize("k", [8, 2])
def test_selective_of_torchtitan(k: int) -> None:
    """PyTorch's selective checkpoint with torchtitan's rule (attention and every second product are kept), against the
    operations that `--framework torchtitan --recompute selective` runs again."""
    s, b, h, dtype = 24, 2, 64, torch.bfloat16
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    products: list[object] = []

    def rule(
        context: SelectiveCheckpointContext, function: object, *args: object, **options: object
    ) -> CheckpointPolicy:
        if function is torch.ops.aten.mm.default and not context.is_recompute:
            products.append(function)
        saves = function is attention or (function is torch.ops.aten.mm.default and len(products) % 2)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    run, own = llama(h, 8, k, 16, 176, dtype, flash_core)
    caching, _ = contexts = create_selective_checkpoint_contexts(rule)
    x = torch.randn(b, s, h, dtype=dtype, requires_grad=True)
    result = checkpoint(run, x, use_reentrant=False, context_fn=lambda: contexts)
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}
    for leaf in tree_leaves(caching.storage):
        tensor = getattr(leaf, "val", leaf)
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert len(products) == 7
    assert result.requires_grad
    assert own
    model = msgspec.structs.replace(llama_model(1, h, 8, 32), blocks=(llama_block(h, 8, k, 16, 176),))
    layer = listed_llama(s, b, h, k, dtype, "flash")
    policy = recompute_policy("selective", model, training("torchtitan"))
    assert str(policy) == "per-op"
    assert sum(kept.values()) == layer.saved(applied(policy, layer))
