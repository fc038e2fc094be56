"""DeepSeek V2 and V3, Kimi K2, which is shaped like V3, and dots.llm1, which has V3's experts without its attention."""

from collections.abc import Callable
from functools import partial

import msgspec

from loadgauge.core.definitions.model.model import Block, Indexer, LatentAttention, ModelSpec, Moe
from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders import decoder
from loadgauge.core.families.decoders.decoder import Decoder, readers
from loadgauge.core.families.decoders.qwen import window_after_types
from loadgauge.core.families.mixtures import experts
from loadgauge.core.families.mixtures.experts import Experts
from loadgauge.core.families.reader import Reader


def latent_attention(reader: Reader) -> LatentAttention:
    """Read multi-head latent attention, by DeepSeek's keys. Raises as `hf.from_dict`."""
    count = reader.whole("num_attention_heads")
    if parts.key_value_heads(reader, count, None) != count:
        raise reader.wrong("num_key_value_heads", "must be num_attention_heads: latents are not shared by heads")
    return LatentAttention(
        num_attention_heads=count,
        q_lora_rank=reader.optional_whole("q_lora_rank"),
        kv_lora_rank=reader.whole("kv_lora_rank"),
        qk_nope_head_dim=reader.whole("qk_nope_head_dim"),
        qk_rope_head_dim=reader.whole("qk_rope_head_dim"),
        v_head_dim=reader.whole("v_head_dim"),
        bias=reader.flag("attention_bias"),
        dropout=reader.rate("attention_dropout"),
    )


def indexed(reader: Reader) -> LatentAttention:
    """Read multi-head latent attention with an indexer (DeepSeek-V3.2). Raises as `hf.from_dict`."""
    if reader.optional_whole("q_lora_rank") is None:
        raise reader.unmodelled("q_lora_rank", "an indexer without a latent of the queries is not modelled")
    return msgspec.structs.replace(
        latent_attention(reader),
        index_topk=reader.whole("index_topk"),
        indexer=Indexer(num_heads=reader.whole("index_n_heads"), head_dim=reader.whole("index_head_dim")),
    )


def sparse_attention(reader: Reader, family: Decoder) -> ModelSpec:
    """Read a config of DeepSeek-V3.2 or GLM-5: latent attention to tokens that an indexer chose, its own or an earlier
    layer's by `indexer_types`. Raises as `hf.from_dict`.
    """
    spec = decoder.read(reader, family)
    types = reader.texts("indexer_types")
    pattern = reader.raw("index_topk_pattern", default=None)
    if types is None and isinstance(pattern, str):
        types = tuple({"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern)
    elif types is None:
        every, offset = (
            reader.whole(f"index_{key}", default=usual, minimum=0)
            for key, usual in (("topk_freq", 1), ("skip_topk_offset", 2))
        )
        types = tuple(
            "shared" if max(i - offset + 1, 0) % max(every, 1) else "full" for i in range(spec.num_hidden_layers)
        )
    if len(types) != spec.num_hidden_layers or not set(types) <= {"full", "shared"}:
        raise reader.wrong("indexer_types", f"must be full or shared for each of {spec.num_hidden_layers} layers")

    def shared(index: int, block: Block) -> Block:
        if types[index] == "full":
            return block
        assert isinstance(block.attention, LatentAttention)
        return msgspec.structs.replace(block, attention=msgspec.structs.replace(block.attention, indexer=None))

    return parts.rebuilt(
        msgspec.structs.replace(
            spec,
            unused_keys=(
                *spec.unused_keys,
                "index_topk (what a sparse kernel saves is not counted: the others are masked)",
            ),
        ),
        shared,
    )


LONGCAT = Decoder(
    classes=parts.language("LongcatFlash"),
    latent=latent_attention,
    ignored=(
        "head_dim",
        "attention_method",
        "mla_scale_q_lora",
        "mla_scale_kv_lora",
        "zero_expert_type",
        "router_bias",
    ),
    mlp_bias=False,
    dense_size_key="ffn_hidden_size",
    next_tokens=True,
    experts=Experts(
        count=("n_routed_experts", "num_local_experts"),
        per_token=("moe_topk", "num_experts_per_tok"),
        width="expert_ffn_hidden_size",
        shared=experts.wide("ffn_hidden_size"),
        norm_topk_prob=False,
        router_float32=True,
        weights_float32=True,
        zero_key="zero_expert_num",
    ),
)


def longcat(reader: Reader) -> ModelSpec:
    """Read a config of LongCat-Flash, whose layers have two attentions and two MLPs: here two blocks.

    The experts of a layer read what its first MLP reads, and join after the second; here with the first, as shared experts
    do. Raises as `hf.from_dict`.
    """
    layers = parts.layers(reader, "num_layers")
    inner = reader.within({**reader.config, "num_hidden_layers": 2 * layers}, path=reader.path, task=reader.task)
    spec = decoder.read(inner, LONGCAT)
    reader.ignore(*reader.config.keys() - {key.rpartition(".")[2] for key in inner.unused()})

    def second(index: int, block: Block) -> Block:
        assert isinstance(block.mlp, Moe)
        return msgspec.structs.replace(block, mlp=block.mlp.shared) if index % 2 else block

    told = (*spec.unused_keys, "zero_expert_num (an even share of the choices, not counted)")
    return parts.rebuilt(msgspec.structs.replace(spec, unused_keys=told), second)


V3 = Decoder(
    classes=parts.decoder_classes("DeepseekV3"),
    latent=latent_attention,
    ignored=("head_dim", "ep_size"),
    next_tokens=True,
    experts=experts.DEEPSEEK_V3,
)

DSA = Decoder(
    classes=parts.language("DeepseekV32"),
    latent=indexed,
    ignored=(
        *("head_dim", "ep_size", "mlp_bias", "layer_types", "qk_head_dim", "indexer_rope_interleave", "moe_layer_freq"),
        *("moe_router_dtype", "index_share_for_mtp_iteration", "index_topk_freq", "index_skip_topk_offset"),
    ),
    mlp_bias=False,
    next_tokens=True,
    experts=msgspec.structs.replace(
        experts.DEEPSEEK_V3,
        count=("n_routed_experts", "num_local_experts", "num_experts"),
        sparse=experts.typed_or_first,
    ),
)
GLM_DSA = msgspec.structs.replace(DSA, classes=parts.language("GlmMoeDsa"))

READERS: dict[str, Callable[[Reader], ModelSpec]] = {
    "longcat_flash": longcat,
    "deepseek_v32": partial(sparse_attention, family=DSA),
    "glm_moe_dsa": partial(sparse_attention, family=GLM_DSA),
    **readers(
        {
            "mistral4": Decoder(
                classes=parts.decoder_classes("Mistral4"),
                latent=lambda reader: msgspec.structs.replace(latent_attention(reader), query_scale=True),
                ignored=("head_dim",),
                experts=msgspec.structs.replace(
                    experts.DEEPSEEK_V3, router_score="softmax", router_float32=False, scores_float32=False
                ),
            ),
            "deepseek_v2": Decoder(
                classes=parts.decoder_classes("DeepseekV2"),
                latent=latent_attention,
                ignored=("head_dim", "ep_size"),
                experts=Experts(
                    count=("n_routed_experts", "num_experts"),
                    sparse=experts.after_first,
                    shared=experts.counted("n_shared_experts"),
                    shared_bias=True,
                    norm_topk_prob=False,
                    router_float32=True,
                    weights_float32=True,
                ),
            ),
            "deepseek_v3": V3,
            "kimi_k2": V3,
            "youtu": Decoder(
                classes=parts.language("Youtu"),
                latent=latent_attention,
                ignored=("head_dim", "mlp_bias", "embedding_initializer_range"),
                mlp_bias=False,
            ),
            "dots1": Decoder(
                classes=parts.decoder_classes("Dots1"),
                qk_norm=parts.RMS_NORM,
                windows=window_after_types,
                experts=experts.DEEPSEEK_V3,
            ),
        }
    ),
}
