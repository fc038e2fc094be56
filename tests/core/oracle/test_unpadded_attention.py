"""A padded block whose attention alone runs without padding: the bytes its list keeps, against PyTorch's saved tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.families.reference import gpt_block, llama_block
from loadgauge.core.layers import View, block_layer
from loadgauge.train.layers.cpu_varlen import varlen_attention
from torch_kept import kept_by, native_dropout
from torch_plain import Core, gpt, llama

FLASH = Kernels(attention="flash", dtypes=Dtypes(activation=4))


def unpadding(lengths: list[int], marks: Tensor) -> Core:
    """What flash_attention_2 does with a mask: real tokens are taken out of queries, keys and values, one kernel attends
    within each sequence, and its output is put back into a padded one."""
    longest = max(lengths)
    index = torch.cat([torch.arange(length) + i * longest for i, length in enumerate(lengths)])

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, heads, s, width = q.shape
        taken = (x.transpose(1, 2).flatten(0, 1)[index].transpose(0, 1)[None] for x in (q, k, v))
        out, _ = varlen_attention(*taken, marks, None, -1, 0, 0, width**-0.5)
        padded = out.new_zeros(b * s, heads, width).index_copy(0, index, out[0])
        return padded.view(b, s, heads, width).transpose(1, 2)

    return core


@pytest.mark.parametrize("family", ["gpt", "gpt without dropout", "llama"])
@pytest.mark.parametrize("lengths", [[32, 5, 17], [8, 8], [40, 1, 1, 1]])
def test_attention_alone_without_padding(family: str, lengths: list[int]) -> None:
    h, a, b, s, tokens = 64, 4, len(lengths), max(lengths), sum(lengths)
    marks = torch.zeros(1, 1, 1, tokens, dtype=torch.bool)
    marks[..., torch.tensor(lengths).cumsum(0) - 1] = True
    if family == "llama":
        run, own = llama(h, a, 2, 16, 96, torch.float32, unpadding(lengths, marks))
        block = llama_block(h, a, 2, 16, 96)
    else:
        drop = native_dropout if family == "gpt" else None
        run, own = gpt(h, a, torch.float32, unpadding(lengths, marks), drop)
        block = gpt_block(h, a, dropout=0.1 if drop else 0.0)
    pairs = sum(length * length for length in lengths)
    layer = block_layer(block, h, View(tokens=b * s, pairs=pairs, kernel_tokens=tokens, sequences=b, kernels=FLASH))
    kept = (
        kept_by(run, own, b, s, h) - 8 * tokens - marks.nbytes
    )  # the index and the boundaries, of all layers together
    assert layer.saved() == kept
    assert layer.saved() != block_layer(block, h, View(tokens=b * s, pairs=pairs, sequences=b, kernels=FLASH)).saved()
    # It computes the pairs of the real tokens, and everything else on the padded ones.
    whole = block_layer(block, h, View(tokens=b * s, pairs=0, sequences=b, kernels=FLASH))
    assert layer.forward_flops - whole.forward_flops == 4 * pairs * h
