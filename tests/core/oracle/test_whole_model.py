"""A whole model with its loss: embedding, rotary tables, blocks and head together keep what the hooks see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer, rotary_layer
from torch_kept import cuda_dropout, keeping, owned, total  # noqa: F401
from torch_models import CASES, NO_SDPA, Built, build

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
S, B = 24, 2


def listed(spec: ModelSpec, view: View) -> int:
    """Bytes that the lists of the whole model keep."""
    blocks = sum(block_layer(spec.blocks[kind], spec.hidden_size, view).saved() for kind in spec.pattern)
    ends = embedding_layer(spec, view), rotary_layer(spec, view), head_layer(spec, view)
    return int(blocks + sum(layer.saved() for layer in ends))


def measured(built: Built) -> int:
    """Bytes that autograd keeps, ids and labels included."""
    ids = built.ids(S, B)
    with keeping(owned(built.model)) as seen:
        result = built.model(ids, labels=ids.clone())
        count = total(seen)
    del result
    return count


def named_differences(name: str, built: Built) -> int:
    """What a CPU, or this family, does otherwise than the list says; each with its own formula."""
    spec, dtype = built.spec, built.dtype
    # nll_loss keeps the sum of the weights of the classes: one scalar of its dtype.
    scalar = dtype.itemsize if not spec.head.loss_float32 else 4
    norms = sum(isinstance(module, nn.LayerNorm) for module in built.model.modules())
    statistics = norms * 2 * S * B * (dtype.itemsize - 4)
    # The list counts one row of position ids, and for each token the id of its type.
    ids = 0
    if name.startswith(("opt", "roberta", "xlm-roberta")):
        ids = 8 * (S * B - S)  # positions are counted for each sequence
    elif name == "bert":
        ids = -8 * S - 8 * (S * B - S)  # positions are a buffer of the model; types not given are one row, expanded
    return int(scalar + statistics + ids)


@dtypes
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_whole_model(name: str, attention: str, dtype: torch.dtype) -> None:
    if attention == "sdpa" and name in NO_SDPA:
        pytest.skip("transformers has no fused attention for it")
    built = build(name, attention, dtype)
    assert measured(built) == listed(built.spec, built.view(S, B)) + named_differences(name, built)


@pytest.mark.usefixtures("cuda_dropout")
@dtypes
@pytest.mark.parametrize("name", ["gpt2", "bert", "opt"])
def test_with_dropout(name: str, dtype: torch.dtype) -> None:
    built = build(name, "eager", dtype, dropout=0.1)
    assert measured(built) == listed(built.spec, built.view(S, B)) + named_differences(name, built)


@dtypes
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
@pytest.mark.parametrize("layers", [2, 3])
def test_depth_and_tied_tables(name: str, layers: int, tied: bool, dtype: torch.dtype) -> None:
    built = build(name, "sdpa", dtype, num_hidden_layers=layers, tie_word_embeddings=tied, vocab_size=500)
    assert measured(built) == listed(built.spec, built.view(S, B)) + named_differences(name, built)
