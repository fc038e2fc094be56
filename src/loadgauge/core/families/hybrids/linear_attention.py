"""Hybrids of attention and linear mixers: gated delta nets, short convolutions, lightning attention.

A family is a `Decoder`, which states its attention layers, and a function that puts the other mixers in their places.
"""

from collections.abc import Callable, Sequence

import msgspec

from loadgauge.core.definitions.model.model import (
    Attention,
    Block,
    GatedDeltaNet,
    HyperConnections,
    KimiDelta,
    LightningAttention,
    Mlp,
    ModelSpec,
    Moe,
    ShortConvolution,
)
from loadgauge.core.families import common as parts
from loadgauge.core.families.common import interleaved, language, rebuilt, types_of
from loadgauge.core.families.decoders import decoder
from loadgauge.core.families.decoders.decoder import Decoder, one_window
from loadgauge.core.families.decoders.olmo import RMS_NORM_FLOAT32
from loadgauge.core.families.mixtures import experts
from loadgauge.core.families.mixtures.deepseek import latent_attention
from loadgauge.core.families.mixtures.experts import Experts
from loadgauge.core.families.reader import Reader

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
    """Delta nets by `layer_types`, or but for each `full_attention_interval`-th layer; attention has a gate. With `hc_count`
    streams between them (Qwen4-exp)."""
    reader.ignore("mamba_ssm_dtype", "output_gate_type")
    if not reader.flag("attn_output_gate", default=True):
        raise reader.unmodelled("attn_output_gate", "false is not modelled for this family")
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

    streams = HyperConnections(count=many) if (many := reader.optional_whole("hc_count", default=None)) else None

    def gated(index: int, block: Block) -> Block:
        assert isinstance(block.attention, Attention)
        opened = msgspec.structs.replace(block.attention, output_gate=True)
        return msgspec.structs.replace(block, attention=opened, streams=streams)

    return interleaved(rebuilt(spec, gated), types, mixer)


def qwen3_next(reader: Reader) -> ModelSpec:
    """Read a config of Qwen3-Next, without the multi-token prediction layer, which transformers' class lacks.

    Raises as `hf.from_dict`.
    """
    experts = QWEN3_NEXT.experts if reader.whole("num_experts", minimum=0) else None
    return _delta_nets(reader, msgspec.structs.replace(QWEN3_NEXT, experts=experts), separate=False)


OLMO_HYBRID = Decoder(
    classes=language("OlmoHybrid"),
    norm=RMS_NORM_FLOAT32,
    placement="after",
    qk_norm=RMS_NORM_FLOAT32,
    qk_norm_over="all",
    rotated=lambda reader, windows: [bool(reader.raw("rope_parameters"))] * len(windows),
    ignored=(
        *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
        *("linear_allow_neg_eigval", "linear_use_gate"),
    ),
)


def olmo_hybrid(reader: Reader) -> ModelSpec:
    """Read a config of OLMo Hybrid: delta nets behind norms by `layer_types`, or but for each fourth layer, and attention as
    in OLMo 3, with norms after each half. Raises as `hf.from_dict`.
    """
    spec = decoder.read(reader, OLMO_HYBRID)
    count = spec.num_hidden_layers
    types = types_of(reader, count) or _attention_in_fourths(count)
    heads = reader.whole("num_attention_heads")
    keys, values = (
        reader.optional_whole(f"linear_num_{which}_heads", default=None) or heads for which in ("key", "value")
    )
    key = reader.optional_whole("linear_key_head_dim", default=None) or int(0.75 * spec.hidden_size / keys)
    mixer = GatedDeltaNet(
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_key_head_dim=key,
        linear_value_head_dim=reader.optional_whole("linear_value_head_dim", default=None) or 2 * key,
        linear_conv_kernel_dim=reader.whole("linear_conv_kernel_dim"),
        separate_projections=True,
        hidden_act=reader.text("hidden_act"),
    )

    def before(index: int, block: Block) -> Block:
        return block if types[index] == "full_attention" else msgspec.structs.replace(block, placement="pre")

    return interleaved(rebuilt(spec, before), types, mixer)


def _attention_in_fourths(count: int) -> tuple[str, ...]:
    types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)]
    if "full_attention" not in types:
        types[-1] = "full_attention"
    return tuple(types)


# Kimi delta attention, between layers of latent attention


KIMI_EXPERTS = msgspec.structs.replace(
    experts.DEEPSEEK_V3,
    count=("num_experts", "num_local_experts"),
    per_token=("num_experts_per_token", "num_experts_per_tok"),
    sparse=experts.typed_or_first,
    shared=experts.counted("num_shared_experts", "n_shared_experts"),
    norm_topk_prob=True,
)
KIMI_LINEAR = Decoder(
    classes=language("KimiLinear"),
    # Nothing rotates; Kimi K3's has a gate for each channel.
    latent=lambda reader: msgspec.structs.replace(
        latent_attention(reader), rotary=False, channel_gate=reader.flag("mla_use_output_gate", default=False)
    ),
    renamed_activations={"situ": "clamped_silu"},
    ignored=(
        *("activation_situ_beta", "activation_situ_linear_beta", "topk_method", "moe_layer_freq"),
        *("head_dim", "moe_router_activation_func", "use_grouped_topk", "mla_use_nope", "moe_renormalize"),
        *("num_expert_group", "v_head_dim", "norm_topk_prob"),
    ),
    positions=("model_max_length", "max_position_embeddings"),
    next_tokens=True,
    experts=KIMI_EXPERTS,
)
LING_HYBRID = Decoder(
    classes=language("BailingHybrid"),
    # A gate for each head.
    latent=lambda reader: msgspec.structs.replace(latent_attention(reader), q_lora_rank=None, head_gate=True),
    ignored=(
        "q_lora_rank",
        *("head_dim", "kda_safe_gate", "kda_lower_bound", "moe_renormalize", "num_expert_group", "norm_topk_prob"),
        "mtp_loss_scaling_factor",
    ),
    positions=("model_max_length", "max_position_embeddings"),
    next_tokens=True,
    experts=KIMI_EXPERTS,
)


LING_2_5 = msgspec.structs.replace(
    LING_HYBRID,
    classes=language("BailingMoeV2_5"),
    latent=latent_attention,
    ignored=(
        *LING_HYBRID.ignored,
        *("group_norm_size", "linear_silu", "use_qk_norm", "use_qkv_bias", "use_bias", "short_conv_kernel_size"),
        *("moe_router_enable_expert_bias", "score_function", "rope_interleave", "moe_shared_expert_intermediate_size"),
    ),
)


def kimi_linear(reader: Reader) -> ModelSpec:
    """Read a config of Kimi Linear: Kimi delta attention by `layer_types` or `linear_attn_config`, or but for each fourth
    layer after the first. With `hc_mult` streams between them (GLM-5.3-Flash). Raises as `hf.from_dict`.
    """
    spec = decoder.read(reader, KIMI_LINEAR)
    count = spec.num_hidden_layers
    nested = reader.section("linear_attn_config", default={})
    nested.ignore("gate_lower_bound", "kda_layers")
    whole = nested.wholes("full_attn_layers", minimum=1)  # counted from 1
    types = types_of(reader, count) or [
        "full_attention" if (i and not i % 4 if whole is None else i + 1 in whole) else "linear_attention"
        for i in range(count)
    ]

    def size(own: str, key: str) -> int:
        return nested.whole(own, default=0) if nested.has(own) else reader.whole(key)

    mixer = KimiDelta(
        linear_num_heads=size("num_heads", "linear_num_heads"),
        linear_head_dim=size("head_dim", "linear_head_dim"),
        linear_conv_kernel_dim=size("short_conv_kernel_size", "linear_conv_kernel_dim"),
        narrow=("decay",) if (third := nested.flag("use_full_rank_gate", default=False)) else ("decay", "gate"),
        hidden_act="silu" if third else reader.text("hidden_act"),
    )
    latent = {
        "latent_size": reader.optional_whole("routed_expert_hidden_size", default=None),
        "latent_norm": parts.RMS_NORM if reader.flag("latent_moe_use_norm", default=False) else None,
    }
    bank = -(-count // (reader.optional_whole("attn_res_block_size", default=None) or count)) if third else 0

    streams = HyperConnections(count=many) if (many := reader.optional_whole("hc_mult", default=None)) else None

    def more(index: int, block: Block) -> Block:
        mlp = msgspec.structs.replace(block.mlp, **latent) if isinstance(block.mlp, Moe) else block.mlp
        return msgspec.structs.replace(block, mlp=mlp, residual_bank=bank, streams=streams)

    return interleaved(rebuilt(spec, more), types, mixer)


def ling_hybrid(reader: Reader) -> ModelSpec:
    """Read a config of Ling 3: latent attention in the last layer of each `layer_group_size`; or of Ling 2.5, by its class, whose
    other layers have lightning attention. Raises as `hf.from_dict`.
    """
    older = (reader.texts("architectures") or ("",))[0].startswith("BailingMoeV2_5")
    spec = decoder.read(reader, LING_2_5 if older else LING_HYBRID)
    every = reader.whole("layer_group_size")
    types = types_of(reader, spec.num_hidden_layers) or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(spec.num_hidden_layers)
    ]
    heads = reader.whole("num_attention_heads")
    if older:
        return interleaved(
            spec, types, LightningAttention(num_attention_heads=heads, head_dim=reader.whole("head_dim"))
        )
    mixer = KimiDelta(
        linear_num_heads=heads,
        linear_head_dim=reader.optional_whole("linear_head_dim", default=None) or reader.whole("head_dim"),
        linear_conv_kernel_dim=reader.whole("short_conv_kernel_size"),
        narrow=(),
        hidden_act=reader.text("hidden_act"),
    )
    return interleaved(spec, types, mixer)


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


LFM2_MOE = msgspec.structs.replace(
    LFM2,
    classes=language("Lfm2Moe"),
    experts=Experts(
        count=("num_experts",),
        sparse=experts.after_dense,
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
        f"{part}_{factor}_factor" for part in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")
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
    "bailing_hybrid": ling_hybrid,
    "kimi_linear": kimi_linear,
    "olmo_hybrid": olmo_hybrid,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "minimax": minimax,
    "qwen3_5_moe_text": lambda reader: _delta_nets(reader, QWEN3_5_MOE, separate=True),
    "qwen3_5_text": lambda reader: _delta_nets(reader, QWEN3_5, separate=True),
    "qwen3_next": qwen3_next,
}
