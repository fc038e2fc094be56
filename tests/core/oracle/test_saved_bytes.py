"""The bytes that a block's list says it keeps for backward, against PyTorch's saved tensors: equal to the byte.

The list says what CUDA keeps. Where PyTorch on a CPU does otherwise, the difference has a name and a formula here.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.families.reference import gpt_block, llama_block
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.operations.operations import Layer
from torch_kept import cuda_dropout, kept_by, native_dropout  # noqa: F401
from torch_models import CASES, NO_SDPA, Built, block_kept, build
from torch_plain import eager_core, flash_core, gpt, llama

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])
families = pytest.mark.parametrize("name", CASES)


def cpu_statistics(norms: int, tokens: int, dtype: torch.dtype) -> int:
    """LayerNorm on a CPU keeps mean and deviation in the dtype of its input, on CUDA in float32."""
    return norms * 2 * tokens * (dtype.itemsize - 4)


def cpu_masks(layer: Layer, dtype: torch.dtype) -> int:
    """A dropout mask on a CPU has the dtype of its input, on CUDA one byte an element."""
    masks = sum(tensor.numel for tensor in layer.kept() if tensor.dtype == "mask")
    return int(masks * (dtype.itemsize - 1))


def plain_view(s: int, b: int, dtype: torch.dtype, attention: str) -> View:
    how = {"sdpa": "flash"}.get(attention, attention)
    dtypes = Dtypes(activation=dtype.itemsize)
    return View.of(s, b, kernels=Kernels(attention=how, repeat_kv=True, dtypes=dtypes))  # type: ignore[arg-type]


# -- blocks in plain PyTorch ------------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(("s", "b", "h", "a"), [(32, 2, 64, 4), (24, 3, 96, 2), (128, 2, 32, 8)])
@pytest.mark.parametrize("case", ["dropout", "dropout on a CPU", "no dropout", "sdpa"])
def test_plain_gpt(s: int, b: int, h: int, a: int, case: str, dtype: torch.dtype) -> None:
    drop = {"dropout": native_dropout, "dropout on a CPU": F.dropout}.get(case)
    core = flash_core if case == "sdpa" else eager_core(native_dropout if drop is None else drop, 0.1 if drop else 0.0)
    run, own = gpt(h, a, dtype, core, drop)
    block = gpt_block(h, a, dropout=0.1 if drop else 0.0)
    layer = block_layer(block, h, plain_view(s, b, dtype, "sdpa" if case == "sdpa" else "eager"))
    wider = cpu_masks(layer, dtype) if case == "dropout on a CPU" else 0
    if case == "dropout on a CPU":
        assert wider == (a * s * s * b + 2 * s * b * h) * (dtype.itemsize - 1)
    assert kept_by(run, own, b, s, h) == layer.saved() + wider + cpu_statistics(2, s * b, dtype)


@dtypes
@attentions
@pytest.mark.parametrize("k", [8, 4, 2, 1])
@pytest.mark.parametrize(("s", "b", "h", "d", "f"), [(32, 2, 64, 8, 176), (128, 1, 96, 16, 64)])
def test_plain_llama(s: int, b: int, h: int, k: int, d: int, f: int, attention: str, dtype: torch.dtype) -> None:
    run, own = llama(h, 8, k, d, f, dtype, flash_core if attention == "sdpa" else eager_core(F.dropout, 0.0))
    layer = block_layer(llama_block(h, 8, k, d, f), h, plain_view(s, b, dtype, attention))
    assert kept_by(run, own, b, s, h) == layer.saved()


# -- the blocks of transformers ---------------------------------------------------------------------------------------


def listed(built: Built, position: int, s: int, b: int) -> Layer:
    spec = built.spec
    return block_layer(spec.blocks[spec.pattern[position]], spec.hidden_size, built.view(s, b))


def statistics(built: Built, position: int, tokens: int) -> int:
    norms = sum(isinstance(module, nn.LayerNorm) for module in built.layers[position].modules())
    return cpu_statistics(norms, tokens, built.dtype)


@dtypes
@attentions
@families
def test_blocks(name: str, attention: str, dtype: torch.dtype) -> None:
    if attention == "sdpa" and name in NO_SDPA:
        pytest.skip("transformers has no fused attention for it")
    built = build(name, attention, dtype)
    for position, s, b in ((1, 24, 2), (0, 40, 2)):
        want = listed(built, position, s, b).saved() + statistics(built, position, s * b)
        assert block_kept(built, position, s, b) == want


@pytest.mark.usefixtures("cuda_dropout")
@dtypes
@families
def test_blocks_with_dropout(name: str, dtype: torch.dtype) -> None:
    built = build(name, "eager", dtype, dropout=0.1)
    want = listed(built, 1, 24, 2).saved() + statistics(built, 1, 24 * 2)
    assert block_kept(built, 1, 24, 2) == want


@dtypes
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama-gqa"])
def test_dropout_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    built = build(name, "eager", dtype, dropout=0.1)
    layer = listed(built, 1, 24, 2)
    assert block_kept(built, 1, 24, 2) == layer.saved() + cpu_masks(layer, dtype) + statistics(built, 1, 24 * 2)


@dtypes
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_fused_attention_with_dropout_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    """The CPU's fused kernel cannot drop: attention is written out, in float32, the mask too; CUDA's drops inside."""
    s, b = 24, 2
    built = build(name, "sdpa", dtype, dropout=0.1)
    layer, a, h = listed(built, 1, s, b), 4, 64
    written_out = 3 * 4 * a * s * s * b  # probabilities, mask and dropped probabilities
    wider = 3 * s * b * h * (4 - dtype.itemsize)  # queries, keys and values
    fused = 4 * a * s * b  # the kernel's log-sum-exp; its output is what the last matrix keeps either way
    residual_masks = 2 * s * b * h * (dtype.itemsize - 1)
    want = layer.saved() + written_out + wider - fused + residual_masks + statistics(built, 1, s * b)
    assert block_kept(built, 1, s, b) == want


WINDOWED = {
    "mistral": ({"sliding_window": 8}, 1),
    "qwen2": ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, 2),
    "gemma3": ({"sliding_window": 8}, 0),
    "modernbert": ({"local_attention": 16}, 1),
}


@dtypes
@attentions
@pytest.mark.parametrize("name", WINDOWED)
def test_windows(name: str, attention: str, dtype: torch.dtype) -> None:
    """The list knows the window of FlashAttention. PyTorch's own fused kernel knows none: transformers hands it a mask,
    which each layer keeps as numbers, and repeats keys and values, since no kernel takes a mask and grouped heads."""
    keys, position = WINDOWED[name]
    s, b = 24, 2
    built = build(name, attention, dtype, **keys)
    spec = built.spec.blocks[built.spec.pattern[position]].attention
    assert spec.sliding_window is not None
    mask = repeated = 0
    if attention == "sdpa":
        mask = b * s * s * dtype.itemsize
        heads = spec.num_attention_heads - spec.num_key_value_heads
        repeated = 2 * s * b * heads * spec.head_dim * dtype.itemsize
    want = listed(built, position, s, b).saved() + mask + repeated + statistics(built, position, s * b)
    assert block_kept(built, position, s, b) == want
