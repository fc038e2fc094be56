"""Hybrids of attention and linear mixers: gated delta nets, short convolutions, lightning attention.

A family is a `Decoder`, which states its attention layers, and a function that puts the other mixers in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from loadgauge.families import common as parts
from loadgauge.families import decoder, experts
from loadgauge.families.common import interleaved, language, rebuilt, types_of
from loadgauge.families.decoder import Decoder, one_window
from loadgauge.families.experts import Experts
from loadgauge.families.reader import Reader
from loadgauge.spec.model import Attention, Block, GatedDeltaNet, LightningAttention, Mlp, ModelSpec, ShortConvolution

# Gated delta nets

QWEN3_NEXT = Decoder(
    classes=language("Qwen3Next", classifier=True),
    norm=parts.RMS_NORM_PLUS_ONE,
    qk_norm=parts.RMS_NORM_PLUS_ONE,
    rotary_factor=0.25,
    experts=Experts(
        count=("num_experts",),
        sparse=experts.stepped,
        shared=experts.wide("shared_expert_intermediate_size"),
        shared_gate=True,
        norm_topk_prob="norm_topk_prob",
    ),
)
QWEN3_5 = msgspec.structs.replace(
    QWEN3_NEXT,
    classes={
        "Qwen3_5ForCausalLM": parts.LANGUAGE,
        "Qwen3_5TextForSequenceClassification": parts.CLASSIFY,
        "Qwen3_5TextModel": parts.BODY,
    },
    experts=None,
)
QWEN3_5_MOE = msgspec.structs.replace(
    QWEN3_NEXT,
    classes={"Qwen3_5MoeForCausalLM": parts.LANGUAGE, "Qwen3_5MoeTextModel": parts.BODY},
    own={"intermediate_size": 5632},
    experts=Experts(
        count=("num_experts",),
        shared=experts.wide("shared_expert_intermediate_size"),
        shared_gate=True,
    ),
)


def _delta_nets(reader: Reader, family: Decoder, *, separate: bool) -> ModelSpec:
    """Delta nets by `layer_types`, or but for each `full_attention_interval`-th layer; attention has a gate."""
    spec = decoder.read(reader, family)
    every = reader.whole("full_attention_interval", default=4)
    types = types_of(reader, spec.num_hidden_layers) or tuple(
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(spec.num_hidden_layers)
    )
    key_heads = reader.whole("linear_num_key_heads")
    mixer = GatedDeltaNet(
        linear_num_key_heads=key_heads,
        linear_num_value_heads=reader.whole("linear_num_value_heads"),
        linear_key_head_dim=reader.whole("linear_key_head_dim"),
        linear_value_head_dim=reader.whole("linear_value_head_dim"),
        linear_conv_kernel_dim=reader.whole("linear_conv_kernel_dim"),
        separate_projections=separate,
        hidden_act=reader.text("hidden_act"),
    )
    if mixer.linear_num_value_heads % key_heads:
        many = mixer.linear_num_value_heads
        raise reader.wrong("linear_num_key_heads", f"{key_heads} does not divide {many} value heads")

    def gated(index: int, block: Block) -> Block:
        assert isinstance(block.attention, Attention)
        return msgspec.structs.replace(block, attention=msgspec.structs.replace(block.attention, output_gate=True))

    return interleaved(rebuilt(spec, gated), types, mixer)


def qwen3_next(reader: Reader) -> ModelSpec:
    """Read a config of Qwen3-Next, without the multi-token prediction layer, which transformers' class lacks.

    Raises as `hf.from_dict`.
    """
    dense = reader.whole("num_experts", minimum=0) == 0
    family = msgspec.structs.replace(QWEN3_NEXT, experts=None) if dense else QWEN3_NEXT
    return _delta_nets(reader, family, separate=False)


# Short convolutions, and lightning attention

LFM2 = Decoder(
    classes=language("Lfm2"),
    own={"hidden_act": "silu"},
    qk_norm=parts.RMS_NORM,
    ignored=(
        *("block_dim", "block_mlp_init_scale", "block_out_init_scale", "block_norm_eps", "block_use_swiglu"),
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta"),
        *("use_expert_bias", "routed_scaling_factor"),
    ),
)


def _after_dense(reader: Reader, count: int) -> list[bool]:
    dense = reader.whole("num_dense_layers", minimum=0)
    return [i >= dense for i in range(count)]


LFM2_MOE = msgspec.structs.replace(
    LFM2,
    classes=language("Lfm2Moe"),
    experts=Experts(
        count=("num_experts",),
        sparse=_after_dense,
        router_score="sigmoid",
        norm_topk_prob="norm_topk_prob",
    ),
)


def _convolutions(reader: Reader, spec: ModelSpec, types: Sequence[str]) -> ModelSpec:
    mixer = ShortConvolution(conv_L_cache=reader.whole("conv_L_cache"), conv_bias=reader.flag("conv_bias"))
    tied = reader.flag("tie_embedding", default=spec.tie_word_embeddings)
    return msgspec.structs.replace(interleaved(spec, types, mixer), tie_word_embeddings=tied)


def lfm2(reader: Reader) -> ModelSpec:
    """Reads LFM2: short convolutions by `layer_types`, or everywhere but in `full_attn_idxs`; with
    `block_auto_adjust_ff_dim` the MLP has two thirds of the stated width, rounded up.
    """
    key = "block_ff_dim" if reader.has("block_ff_dim") else "intermediate_size"
    spec = decoder.read(reader, msgspec.structs.replace(LFM2, dense_size_key=key))
    count = spec.num_hidden_layers
    chosen = reader.wholes("full_attn_idxs")
    types = types_of(reader, count, "conv") or [
        "full_attention" if chosen is None or i in chosen else "conv" for i in range(count)
    ]
    reader.ignore("block_multiple_of", "block_ffn_dim_multiplier")
    width = reader.whole(key)
    if reader.flag("block_auto_adjust_ff_dim"):
        width = 2 * width // 3
        factor = reader.optional_real("block_ffn_dim_multiplier")
        if factor is not None:
            step = reader.whole("block_multiple_of")
            width = step * -(-int(factor * width) // step)
    if width < 1:
        raise reader.wrong("intermediate_size", "leaves no channel in the MLP")

    def narrowed(index: int, block: Block) -> Block:
        assert isinstance(block.mlp, Mlp)
        return msgspec.structs.replace(block, mlp=msgspec.structs.replace(block.mlp, intermediate_size=width))

    return _convolutions(reader, rebuilt(spec, narrowed), types)


def lfm2_moe(reader: Reader) -> ModelSpec:
    """Read a config of LFM2-MoE: short convolutions by `layer_types`, experts in all but the first `num_dense_layers`.

    Raises as `hf.from_dict`.
    """
    spec = decoder.read(reader, LFM2_MOE)
    types = types_of(reader, spec.num_hidden_layers, "conv")
    if types is None:
        raise reader.wrong("layer_types", "is missing, and this family has no default for it")
    return _convolutions(reader, spec, types)


MINIMAX = Decoder(
    classes=language("MiniMax", classifier=True),
    windows=one_window,
    ignored=tuple(
        f"{what}_{factor}_factor" for what in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")
    ),
    experts=Experts(
        count=("num_local_experts", "num_experts"),
        width="intermediate_size",
        weights_float32=True,
    ),
)


def minimax(reader: Reader) -> ModelSpec:
    """Read a config of MiniMax: lightning attention by `layer_types`, or in every second layer.

    Its residuals are taken after the norms; what is kept for backward is the same. Raises as `hf.from_dict`.
    """
    spec = decoder.read(reader, MINIMAX)
    types = types_of(reader, spec.num_hidden_layers) or [
        "linear_attention" if i % 2 else "full_attention" for i in range(spec.num_hidden_layers)
    ]
    attention = spec.blocks[0].attention
    assert isinstance(attention, Attention)
    mixer = LightningAttention(
        num_attention_heads=attention.num_attention_heads,
        head_dim=attention.head_dim,
        block_size=reader.whole("block_size"),
        hidden_act=reader.text("hidden_act"),
    )
    return interleaved(spec, types, mixer)


READERS: dict[str, Callable[[Reader], ModelSpec]] = {
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "minimax": minimax,
    "qwen3_5_moe_text": lambda reader: _delta_nets(reader, QWEN3_5_MOE, separate=True),
    "qwen3_5_text": lambda reader: _delta_nets(reader, QWEN3_5, separate=True),
    "qwen3_next": qwen3_next,
}
