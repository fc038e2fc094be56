"""The cache of generation: keys and values, latents, or the states of linear mixers.

Legend: k key-value heads and d their width, m the width of a latent and d_r of the rotated part beside it.
"""

from __future__ import annotations

import msgspec

from loadgauge.core.base.algebra import Size, maximum, minimum, spread
from loadgauge.core.definitions.model.model import (
    Attention,
    Block,
    CompressedAttention,
    GatedDeltaNet,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mixer,
    ShortConvolution,
)


class Kept(msgspec.Struct, frozen=True):
    """Elements that one rank keeps of a layer.

    token: for each token, `window` of them at most (None: all); state, convolution: for each sequence, whatever its length
    """

    token: Size = 0
    window: Size | None = None
    state: Size = 0
    convolution: Size = 0

    def elements(self, tokens: Size) -> Size:
        """Return the elements kept of a sequence of `tokens` tokens, without states."""
        return self.token * (tokens if self.window is None else minimum(tokens, self.window))

    def __add__(self, other: Kept) -> Kept:
        return Kept(
            self.token + other.token, self.window, self.state + other.state, self.convolution + other.convolution
        )


def kept_by(mixer: Mixer | None, hidden_size: Size, tp: Size = 1) -> Kept:
    """Return the state that a mixer keeps of a sequence on one of `tp` ranks; each has latents and heads that cannot be split.

    >>> kept_by(Attention(num_attention_heads=32, num_key_value_heads=8, head_dim=128), 4096).token == 2 * 8 * 128
    True
    >>> latent = LatentAttention(num_attention_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
    ...                          qk_rope_head_dim=64, v_head_dim=128)
    >>> kept_by(latent, 7168, tp=8).token == 512 + 64
    True
    """
    if isinstance(mixer, Attention):
        if mixer.borrowed:
            return Kept()
        values = mixer.head_dim if mixer.value_head_dim is None else mixer.value_head_dim
        each = mixer.head_dim + values
        return Kept(maximum(spread(mixer.num_key_value_heads, tp), 1) * each, mixer.sliding_window)
    if isinstance(mixer, LatentAttention):
        index = 0 if mixer.indexer is None else mixer.indexer.head_dim
        return Kept(mixer.kv_lora_rank + mixer.qk_rope_head_dim + index, mixer.sliding_window)
    if isinstance(mixer, CompressedAttention):
        index = 0 if mixer.indexer is None else mixer.indexer.head_dim
        entries = 0 if mixer.compress_rate is None else (mixer.head_dim + index) / mixer.compress_rate
        return Kept(entries, state=mixer.head_dim * mixer.sliding_window)
    if isinstance(mixer, Mamba2):
        heads = mixer.num_heads / tp
        channels = heads * mixer.head_dim + 2 * mixer.n_groups * mixer.state_size / tp
        return Kept(state=heads * mixer.head_dim * mixer.state_size, convolution=channels * mixer.conv_kernel)
    if isinstance(mixer, Mamba1):
        inner = mixer.intermediate_size / tp
        return Kept(state=inner * mixer.state_size, convolution=inner * mixer.conv_kernel)
    if isinstance(mixer, GatedDeltaNet):
        keys = mixer.linear_num_key_heads * mixer.linear_key_head_dim / tp
        values = mixer.linear_num_value_heads * mixer.linear_value_head_dim / tp
        return Kept(
            state=values * mixer.linear_key_head_dim, convolution=(2 * keys + values) * mixer.linear_conv_kernel_dim
        )
    if isinstance(mixer, KimiDelta):
        inner = mixer.linear_num_heads * mixer.linear_head_dim / tp
        return Kept(state=inner * mixer.linear_head_dim, convolution=3 * inner * mixer.linear_conv_kernel_dim)
    if isinstance(mixer, LightningAttention):
        return Kept(state=mixer.num_attention_heads * mixer.head_dim**2 / tp)
    if isinstance(mixer, ShortConvolution):
        return Kept(convolution=hidden_size * mixer.conv_L_cache / tp)
    return Kept()


def kept_by_block(block: Block, hidden_size: Size, tp: Size = 1) -> Kept:
    """Return the state that a block keeps of a sequence: its mixer, and the one beside it."""
    return kept_by(block.attention, hidden_size, tp) + kept_by(block.beside, hidden_size, tp)
