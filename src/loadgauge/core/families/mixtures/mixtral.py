"""Decoders whose MLPs are experts and whose attention is the usual one: Mixtral, Phi-3.5-MoE, Granite MoE, GPT-OSS,
MiniMax-M2, ERNIE 4.5, Llama 4.
"""

import msgspec

from loadgauge.core.definitions.model.model import Norm
from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders.decoder import Decoder, one_window, readers, typed_windows
from loadgauge.core.families.decoders.llama import RMS_NORM_FLOAT32, rope_layers
from loadgauge.core.families.mixtures import experts
from loadgauge.core.families.mixtures.experts import Experts
from loadgauge.core.families.reader import Reader

LOCAL_EXPERTS = ("num_local_experts", "num_experts")


def chunks(reader: Reader, count: int) -> list[int | None]:
    """Return the chunk of each of `count` layers [tokens]; None: all keys (Llama 4).

    `attention_chunk_size` where `layer_types` says so, or else in layers that rotate.
    """
    size = reader.optional_whole("attention_chunk_size")
    types = parts.layer_types(reader, count, ("full_attention", "chunked_attention"))
    if types is None:
        types = tuple("chunked_attention" if rotates else "full_attention" for rotates in rope_layers(reader, count))
    return parts.windows(reader, types, size, "attention_chunk_size")


GRANITE_MOE = Decoder(
    classes=parts.decoder_classes("GraniteMoe"),
    experts=Experts(
        count=LOCAL_EXPERTS,
        width="intermediate_size",
        router_score="softmax_of_chosen",
    ),
)
assert GRANITE_MOE.experts is not None

READERS = readers(
    {
        "mixtral": Decoder(
            classes=parts.decoder_classes("Mixtral"),
            windows=one_window,
            experts=Experts(count=LOCAL_EXPERTS, width="intermediate_size", weights_float32=True),
        ),
        "phimoe": Decoder(
            classes=parts.decoder_classes("Phimoe"),
            norm=parts.LAYER_NORM,
            head_bias="lm_head_bias",
            windows=one_window,
            ignored=("hidden_dropout",),
            experts=Experts(count=LOCAL_EXPERTS, width="intermediate_size"),
        ),
        "granitemoe": GRANITE_MOE,
        "granitemoeshared": msgspec.structs.replace(
            GRANITE_MOE,
            classes=parts.decoder_classes("GraniteMoeShared"),
            experts=msgspec.structs.replace(GRANITE_MOE.experts, shared=experts.wide("shared_intermediate_size")),
        ),
        "gpt_oss": Decoder(
            classes=parts.decoder_classes("GptOss"),
            norm=RMS_NORM_FLOAT32,
            sinks=True,
            softmax_float32=False,
            ignored=("experts_per_token", "initial_context_length", "swiglu_alpha", "swiglu_limit"),
            windows=typed_windows(lambda reader: 2),
            experts=Experts(
                count=LOCAL_EXPERTS,
                width="intermediate_size",
                activation="clamped_swiglu",
                expert_bias=True,
                router_bias=True,
                router_score="softmax_of_chosen",
                scores_float32=False,
            ),
        ),
        "minimax_m2": Decoder(
            classes=parts.decoder_classes("MiniMaxM2"),
            qk_norm=parts.RMS_NORM,
            qk_norm_over="all",
            rotary_factor=1.0,
            ignored=(
                *("use_qk_norm", "qk_norm_type", "use_routing_bias", "shared_intermediate_size", "attn_type_list"),
                *("use_mtp", "mtp_transformer_layers"),
            ),
            experts=Experts(
                count=LOCAL_EXPERTS,
                width="intermediate_size",
                router_score="sigmoid",
                weights_float32=True,
            ),
        ),
        "ernie4_5_moe": Decoder(
            classes=parts.decoder_classes("Ernie4_5_Moe"),
            own_tables=2,
            tables_float32=True,
            qkv_bias="use_bias",
            output_bias="use_bias",
            mlp_bias="use_bias",
            head_bias="use_bias",
            experts=Experts(
                count=("moe_num_experts", "num_experts"),
                per_token=("moe_k", "num_experts_per_tok"),
                sparse=experts.between,
                shared=experts.counted("moe_num_shared_experts"),
                shared_bias=True,
                correction_bias=True,
                router_float32=True,
            ),
        ),
        "llama4_text": Decoder(
            classes={"Llama4ForCausalLM": parts.LANGUAGE, "Llama4TextModel": parts.BODY},
            softmax_float32=False,
            qk_norm=Norm("rmsnorm", weight=False),
            qk_normed="use_qk_norm",
            rotated_only=True,
            unrotated_query_scale="attn_temperature_tuning",
            windows=chunks,
            rotated=lambda reader, windows: rope_layers(reader, len(windows)),
            dense_size_key="intermediate_size_mlp",
            ignored=("for_llm_compressor", "floor_scale", "attn_scale"),
            experts=Experts(
                count=LOCAL_EXPERTS[:1],
                width="intermediate_size",
                sparse=experts.listed,
                shared=experts.one_more,
                router_score="sigmoid",
                norm_topk_prob=False,
                everywhere=True,
            ),
        ),
    }
)
