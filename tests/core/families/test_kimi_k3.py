"""Kimi K3 against the shapes of its published tensors, and what it has beside Kimi Linear's blocks."""

from __future__ import annotations

import msgspec
import pytest

from loadgauge.core.definitions.model.model import KimiDelta, LatentAttention, Moe
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families import common as parts
from loadgauge.core.families.catalogue import model
from loadgauge.core.layers import View, block_layer

H, EXPERTS, HEADS = 7168, 896, 96
K3 = model("moonshotai/Kimi-K3")


def test_parameters_are_those_of_its_tensors() -> None:
    """A rate a head is stored for 128 heads, of which 96 are used; the bias of the router's choice is no parameter."""
    inner = 128 * HEADS
    delta = 4 * H * inner + H * 128 + 128 * inner + H * HEADS + 3 * inner * 4 + inner + HEADS + 128 + inner * H
    latent = H * 1536 + 1536 + 1536 * 192 * HEADS + H * 576 + 512 + 512 * 256 * HEADS + 2 * H * inner
    experts = EXPERTS * 3 * 3072 * 3584 + EXPERTS * H + 2 * 3584 * H + 3584 + 3 * 6144 * H
    every = 69 * delta + 24 * latent + 93 * 6 * H + 3 * 33792 * H + 92 * experts
    assert parameters(K3).total == every + 2 * 163_840 * H + 3 * H
    assert parameters(K3).active / 1e9 == pytest.approx(104, rel=0.015)
    tower = 27 * (2 * 4096 * H // 7 + 2 * 1024 + 1024 * 1536 + 4608 * 1024) + 1024 + 64 * 64 * 1024 + 1024 * 3 * 14**2
    assert [part.parameters for part in K3.towers] == [tower + H + 4096 * 4096 + H * 4096]


def layers() -> tuple[int, int]:
    """The first kinds of block with experts: with Kimi delta attention, and with latent attention."""
    found = [i for i, block in enumerate(K3.blocks) if isinstance(block.mlp, Moe)]
    delta = next(i for i in found if isinstance(K3.blocks[i].attention, KimiDelta))
    return delta, next(i for i in found if isinstance(K3.blocks[i].attention, LatentAttention))


@pytest.mark.parametrize("which", [0, 1])
def test_a_half_that_reads_earlier_values_keeps_the_stream_and_two_numbers_of_each(which: int) -> None:
    """Of eight earlier values and the stream itself a root and a weight, in float32; two vectors for each half."""
    block, tokens = K3.blocks[layers()[which]], 64
    assert block.residual_bank == 8
    plain = msgspec.structs.replace(block, residual_bank=0)
    with_bank, without = (block_layer(one, H, View.of(tokens, 1)) for one in (block, plain))
    assert with_bank.params - without.params == 4 * H
    assert with_bank.saved() - without.saved() == 2 * tokens * (2 * H + 9 * 2 * 4)


def test_gates_of_channels_and_the_norm_of_the_latent() -> None:
    tokens, block = 64, K3.blocks[layers()[1]]
    mla, moe = block.attention, block.mlp
    assert isinstance(mla, LatentAttention)
    assert isinstance(moe, Moe)
    gated = block_layer(block, H, View.of(tokens, 1))
    plain = block_layer(
        msgspec.structs.replace(block, attention=msgspec.structs.replace(mla, channel_gate=False)),
        H,
        View.of(tokens, 1),
    )
    inner = 128 * HEADS
    assert gated.params - plain.params == H * inner
    assert gated.forward_flops - plain.forward_flops == 2 * tokens * H * inner
    # What multiplies each channel, and the product; the output of the core is kept already.
    assert gated.saved() - plain.saved() == 2 * tokens * 2 * inner
    assert moe.latent_norm == parts.RMS_NORM
    bare = block_layer(
        msgspec.structs.replace(block, mlp=msgspec.structs.replace(moe, latent_norm=None)), H, View.of(tokens, 1)
    )
    assert gated.params - bare.params == 3584
