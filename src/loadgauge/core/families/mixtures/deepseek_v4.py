"""DeepSeek-V4: attention to a window and to compressed entries, several residual streams, experts in every layer."""

from collections.abc import Callable

import msgspec

from loadgauge.core.definitions.model.model import Block, CompressedAttention, HyperConnections, Indexer, Mlp, ModelSpec
from loadgauge.core.families import common as parts
from loadgauge.core.families.mixtures import experts
from loadgauge.core.families.reader import Reader, shown

NORM = msgspec.structs.replace(parts.RMS_NORM, gain_float32=True)
WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 128}
"""Tokens of an entry, where the config does not say."""
EXPERTS = msgspec.structs.replace(
    experts.DEEPSEEK_V3,
    count=("n_routed_experts", "num_local_experts"),
    sparse=experts.every_layer,
    shared=experts.one_more,
    activation="clamped_silu",
    norm_topk_prob=True,
    router_score="sqrtsoftplus",
    scores_float32=False,
    router_float32=False,
    weights_float32=False,
)


def attention_types(reader: Reader, count: int) -> tuple[str, ...]:
    """Return the kind of attention of each of `count` layers: from `layer_types`, or from `compress_ratios` (0: a window alone).

    Without either, two layers that compress strongly come first, then strong and sparse ones alternate.
    Raises `ConfigError` for another number of entries, `NotModelled` for an unknown kind or rate.
    """
    types = reader.texts("layer_types")
    ratios = reader.wholes("compress_ratios")
    if types is None and ratios is not None:
        named = {0: WINDOW, **{rate: kind for kind, rate in RATES.items()}}
        unknown = next((rate for rate in ratios if rate not in named), None)
        if unknown is not None:
            raise reader.unmodelled(
                "compress_ratios", f"{unknown} is not modelled (known: {', '.join(map(str, named))})"
            )
        types = tuple(named[rate] for rate in ratios)
    if types is None:
        types = (HEAVY, HEAVY, *(SPARSE if i % 2 else HEAVY for i in range(max(count - 2, 0))))
    types = types[:count]  # layers of multi-token prediction have entries too
    if len(types) != count:
        raise reader.wrong("layer_types", f"has {len(types)} entries for {count} layers")
    for kind in types:
        if kind not in (WINDOW, SPARSE, HEAVY):
            raise reader.unmodelled("layer_types", f"{shown(kind)} is not modelled for this family")
    return types


def deepseek_v4(reader: Reader) -> ModelSpec:
    """Read a config of DeepSeek-V4. Raises as `hf.from_dict`."""
    hidden = reader.whole("hidden_size")
    count = parts.layers(reader, "num_hidden_layers")
    if reader.flag("attention_bias") or reader.flag("mlp_bias"):
        raise reader.unmodelled("attention_bias", "biases are not modelled for this family")
    if reader.optional_whole("num_key_value_heads") not in (None, 1):
        raise reader.unmodelled("num_key_value_heads", "must be 1: all query heads share one")
    if (reader.optional_whole("n_shared_experts", minimum=0) or 0) != 1:
        raise reader.unmodelled("n_shared_experts", "must be 1")
    stated = reader.section("compress_rates", default={})
    legacy = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
    rates = {
        kind: stated.optional_whole(kind, default=None) or reader.optional_whole(legacy[kind], default=None) or rate
        for kind, rate in RATES.items()
    }
    heads, width = reader.whole("num_attention_heads"), reader.whole("head_dim")
    groups = reader.whole("o_groups")
    if heads * width % groups:
        raise reader.wrong("o_groups", f"{groups} does not divide {heads} heads of {width}")
    factor = reader.optional_real("partial_rotary_factor", default=None)
    turned = reader.whole("qk_rope_head_dim", default=width // 8) if factor is None else int(width * factor)
    indexer = Indexer(num_heads=reader.whole("index_n_heads"), head_dim=reader.whole("index_head_dim"))
    best = reader.whole("index_topk")
    usual = CompressedAttention(
        num_attention_heads=heads,
        head_dim=width,
        q_lora_rank=reader.whole("q_lora_rank"),
        o_groups=groups,
        o_lora_rank=reader.whole("o_lora_rank"),
        sliding_window=reader.whole("sliding_window"),
        rotary_dim=turned,
        norm=NORM,
        dropout=reader.rate("attention_dropout"),
    )
    mixers = {
        WINDOW: usual,
        SPARSE: msgspec.structs.replace(usual, compress_rate=rates[SPARSE], index_topk=best, indexer=indexer),
        HEAVY: msgspec.structs.replace(usual, compress_rate=rates[HEAVY]),
    }
    narrow = reader.whole("moe_intermediate_size", "intermediate_size")
    reader.text("hidden_act")
    dense = Mlp(intermediate_size=narrow, activation="clamped_silu")
    moes = experts.expert_layers(reader, EXPERTS, count, dense)
    streams = HyperConnections(count=reader.whole("hc_mult"), iterations=reader.whole("hc_sinkhorn_iters"))

    def block(kind: str, index: int) -> Block:
        return Block(attention=mixers[kind], mlp=moes[index], norm=NORM, streams=streams)

    # Which experts the first layers choose is a table of tokens, not a parameter.
    reader.ignore(
        "num_hash_layers", "mlp_layer_types", "swiglu_limit", "compress_rope_theta", "hc_eps", "norm_topk_prob"
    )
    following = parts.next_token_layers(reader)
    masked = "index_topk (what a sparse kernel saves is not counted but under --attention flash)"
    return parts.assembled(
        reader,
        hidden,
        [block(kind, index) for index, kind in enumerate(attention_types(reader, count))],
        max_position_embeddings=reader.whole("max_position_embeddings"),
        rotary_tables=2,
        final_norm=NORM,
        head=parts.decoder_head(reader, parts.language("DeepseekV4")),
        num_nextn_predict_layers=following,
        unused_keys=(masked, *(("num_nextn_predict_layers (not counted)",) if following else ())),
    )


READERS: dict[str, Callable[[Reader], ModelSpec]] = {"deepseek_v4": deepseek_v4}
