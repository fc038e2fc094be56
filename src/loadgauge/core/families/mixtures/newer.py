"""Decoders of 2025 and 2026 that are Llama or a mixture of experts with something of their own: a gate on the heads' output,
norms without a gain, values of another width, a window in some layers.
"""

from collections.abc import Callable, Sequence

import msgspec

from loadgauge.core.definitions.model.model import Attention, Block, ModelSpec
from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders import decoder
from loadgauge.core.families.decoders.decoder import Decoder, readers, typed_windows
from loadgauge.core.families.decoders.layer_norm import local_rotate
from loadgauge.core.families.decoders.llama import RMS_NORM_FLOAT32, exaone_rotated, exaone_windows
from loadgauge.core.families.mixtures import experts
from loadgauge.core.families.reader import Reader


def mimo_windows(reader: Reader, count: int) -> list[int | None]:
    """Return the window of each of `count` layers [tokens]; None: all keys. By `layer_types`, or `hybrid_layer_pattern`, 1
    where there is one; without both, all but the first and each sixth layer have one (MiMo-V2).
    """
    window = reader.optional_whole("sliding_window")
    pattern = reader.wholes("hybrid_layer_pattern")
    if pattern is not None and len(pattern) != count:
        raise reader.wrong("hybrid_layer_pattern", f"has {len(pattern)} entries for {count} layers")
    chosen = pattern or [int(bool(i and (i + 1) % 6)) for i in range(count)]
    return parts.windows_where(reader, count, window, lambda i: bool(chosen[i]))


def mimo_sparse(reader: Reader, count: int) -> Sequence[bool]:
    """Return for each layer whether it has experts: by `mlp_layer_types` or `moe_layer_freq`, or all but the first (MiMo-V2)."""
    flags = reader.raw("moe_layer_freq", default=None)
    if isinstance(flags, list):
        if len(flags) != count:
            raise reader.wrong("moe_layer_freq", f"has {len(flags)} entries for {count} layers")
        return [bool(flag) for flag in flags]
    return experts.typed(reader, count)


NO_GAIN = msgspec.structs.replace(parts.RMS_NORM, weight=False)
V3 = experts.DEEPSEEK_V3


MIMO = Decoder(
    classes=parts.language("MiMoV2Flash"),
    output_bias=False,
    rotary_factor=0.334,
    softmax_float32=False,
    scores_shifted=True,
    value_head_dim="v_head_dim",
    next_tokens=True,
    ignored=(
        *(
            "attention_value_scale",
            "add_full_attention_sink_bias",
            "add_swa_attention_sink_bias",
            "sliding_window_size",
        ),
        *("swa_head_dim", "swa_v_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads", "swa_rope_theta"),
        *("hybrid_block_size", "attention_chunk_size", "n_shared_experts", "layernorm_epsilon", "moe_layer_freq"),
    ),
    windows=mimo_windows,
    experts=msgspec.structs.replace(V3, sparse=mimo_sparse, shared=experts.no_shared),
)


def mimo(reader: Reader) -> ModelSpec:
    """Read a config of MiMo-V2: layers with a window have twice the key-value heads, and a sink for each head.

    Raises as `hf.from_dict`, and `NotModelled` for layers with a window whose heads differ in more.
    """
    spec = decoder.read(reader, MIMO)
    usual = spec.blocks[0].attention
    assert isinstance(usual, Attention)
    heads, keys, width, values = (
        usual.num_attention_heads,
        usual.num_key_value_heads,
        usual.head_dim,
        usual.value_head_dim,
    )
    expected = {"num_attention_heads": heads, "num_key_value_heads": 2 * keys, "head_dim": width, "v_head_dim": values}
    if heads % (2 * keys):
        raise reader.wrong("num_key_value_heads", f"{2 * keys} does not divide {heads} heads")
    for key, size in expected.items():
        if reader.raw(f"swa_{key}", default=size) != size:
            raise reader.unmodelled(f"swa_{key}", f"other than {size} is not modelled")

    def local(index: int, block: Block) -> Block:
        attention = block.attention
        assert isinstance(attention, Attention)
        if attention.sliding_window is None:
            return block
        wider = msgspec.structs.replace(attention, num_key_value_heads=2 * keys, sinks=True)
        return msgspec.structs.replace(block, attention=wider)

    return parts.rebuilt(spec, local)


READERS: dict[str, Callable[[Reader], ModelSpec]] = {
    "mimo_v2_flash": mimo,
    **readers(
        {
            "afmoe": Decoder(
                classes=parts.language("Afmoe"),
                norm=RMS_NORM_FLOAT32,
                placement="sandwich",
                qk_norm=RMS_NORM_FLOAT32,
                output_gate=True,
                gate_matrix=True,
                windows=typed_windows(lambda reader: reader.whole("global_attn_every_n_layers")),
                rotated=local_rotate,
                ignored=(
                    "mup_enabled",
                    "route_scale",
                    "route_norm",
                    "score_func",
                    "load_balance_coeff",
                    "use_grouped_mm",
                    "num_expert_groups",
                    "num_limited_groups",
                ),
                experts=experts.Experts(
                    count=("num_experts", "num_local_experts"),
                    sparse=experts.after_dense,
                    shared=experts.counted("num_shared_experts"),
                    correction_bias=True,
                    router_score="sigmoid",
                    weights_float32=True,
                ),
            ),
            "cwm": Decoder(
                classes=parts.language("Cwm"),
                # Three of four layers have a window, of which the first has none.
                windows=lambda reader, count: parts.windows_where(
                    reader, count, reader.optional_whole("sliding_window"), lambda i: bool(i % 4)
                ),
            ),
            "exaone_moe": Decoder(
                classes=parts.language("ExaoneMoe"),
                qk_norm=parts.RMS_NORM,
                windows=exaone_windows,
                rotated=exaone_rotated,
                next_tokens=True,
                experts=msgspec.structs.replace(
                    V3,
                    count=("num_experts", "num_local_experts"),
                    sparse=experts.typed_or_first,
                    shared=experts.counted("num_shared_experts"),
                ),
            ),
            "hy_v3": Decoder(
                classes=parts.language("HYV3"),
                qk_norm=parts.RMS_NORM,
                next_tokens=True,
                ignored=(
                    *("router_scaling_factor", "enable_moe_fp32_combine", "route_norm", "moe_router_use_sigmoid"),
                    *(
                        "enable_attention_fp32_softmax",
                        "enable_lm_head_fp32",
                        "moe_router_enable_expert_bias",
                        "qk_norm",
                    ),
                ),
                experts=msgspec.structs.replace(
                    V3,
                    count=("num_experts", "num_local_experts"),
                    sparse=experts.typed,
                    shared=experts.counted("num_shared_experts"),
                    norm_topk_prob=True,
                ),
            ),
            "mellum": Decoder(
                classes=parts.language("Mellum"),
                qk_norm=parts.RMS_NORM,
                windows=typed_windows(lambda reader: 1),
                own_angles=True,
                ignored=("use_sliding_window", "max_window_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
                next_tokens=True,
                experts=experts.Experts(
                    count=("num_local_experts", "num_experts"),
                    sparse=lambda reader, count: (
                        experts.typed if reader.texts("mlp_layer_types") else experts.every_layer
                    )(reader, count),
                    norm_topk_prob="norm_topk_prob",
                ),
            ),
            "muse_glimmer_text": Decoder(
                classes=parts.language("MuseGlimmer"),
                norm=parts.RMS_NORM_PLUS_ONE,
                placement="sandwich",
                activation_key="hidden_activation",
                qk_norm=NO_GAIN,
                output_gate=True,
                gate_matrix=True,
                embedding_norm=NO_GAIN,
                softcaps=True,
                windows=typed_windows(lambda reader: 4),
                rotated=local_rotate,
                ignored=("qk_scale_factor", "output_multiplier", "post_norm_eps", "layer_rope_theta"),
            ),
            "nanochat": Decoder(
                classes=parts.language("NanoChat"),
                norm=NO_GAIN,
                qk_norm=NO_GAIN,
                embedding_norm=NO_GAIN,
                gated=False,
                softcaps=True,
                output_bias="attention_bias",
            ),
            "solar_open": Decoder(
                classes=parts.language("SolarOpen"),
                output_bias=False,
                ignored=("use_qk_norm", "first_k_dense_replace", "intermediate_size"),
                dense_size_key="moe_intermediate_size",
                experts=msgspec.structs.replace(V3, sparse=experts.every_layer),
            ),
        }
    ),
}
