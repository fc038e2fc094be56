"""Decoders whose MLPs are experts and whose attention is the usual one: Mixtral, Phi-3.5-MoE, Granite MoE, GPT-OSS,
MiniMax-M2, ERNIE 4.5, Llama 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgauge.families import common as parts
from loadgauge.families import experts
from loadgauge.families.common import ATTENTION_BIAS
from loadgauge.families.decoder import Decoder, one_window, readers, typed_windows
from loadgauge.families.experts import Experts
from loadgauge.families.llama import RMS_NORM_FLOAT32, rope_layers
from loadgauge.families.reader import Reader
from loadgauge.spec.model import Norm

LOCAL_EXPERTS = ("num_local_experts", "num_experts")


def chunks(reader: Reader, count: int) -> list[int | None]:
    """Llama 4: chunks of `attention_chunk_size` tokens where `layer_types` says so, or else in layers that rotate."""
    size = reader.optional_whole("attention_chunk_size", default=8192)
    types = parts.layer_types(reader, count, ("full_attention", "chunked_attention"))
    if types is None:
        types = tuple("chunked_attention" if one else "full_attention" for one in rope_layers(reader, count))
    return parts.windows(reader, types, size, "attention_chunk_size")


def some_rotate(reader: Reader, windows: Sequence[int | None]) -> Sequence[bool]:
    """Llama 4: `no_rope_layers`."""
    return rope_layers(reader, len(windows))


GRANITE_MOE = Decoder(
    classes=parts.decoder_classes("GraniteMoe"),
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    max_position_embeddings=2048,
    qkv_bias=ATTENTION_BIAS,
    output_bias=ATTENTION_BIAS,
    experts=Experts(
        count=(LOCAL_EXPERTS, 8),
        per_token=(("num_experts_per_tok",), 2),
        width=("intermediate_size", 11008),
        router_score="softmax_of_chosen",
    ),
)
assert GRANITE_MOE.experts is not None

READERS = readers(
    {
        "mixtral": Decoder(
            classes=parts.decoder_classes("Mixtral"),
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            windows=one_window(None),
            experts=Experts(
                count=(LOCAL_EXPERTS, 8),
                per_token=(("num_experts_per_tok",), 2),
                width=("intermediate_size", 14336),
                weights_float32=True,
            ),
        ),
        "phimoe": Decoder(
            classes=parts.decoder_classes("Phimoe"),
            vocab_size=32064,
            hidden_size=4096,
            intermediate_size=6400,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            norm=parts.LAYER_NORM,
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
            head_bias=("lm_head_bias", False),
            windows=one_window(None),
            ignored=("hidden_dropout",),
            experts=Experts(
                count=(LOCAL_EXPERTS, 16),
                per_token=(("num_experts_per_tok",), 2),
                width=("intermediate_size", 6400),
            ),
        ),
        "granitemoe": GRANITE_MOE,
        "granitemoeshared": msgspec.structs.replace(
            GRANITE_MOE,
            classes=parts.decoder_classes("GraniteMoeShared"),
            experts=msgspec.structs.replace(GRANITE_MOE.experts, shared=experts.wide("shared_intermediate_size", 0)),
        ),
        "gpt_oss": Decoder(
            classes=parts.decoder_classes("GptOss"),
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            norm=RMS_NORM_FLOAT32,
            qkv_bias=("attention_bias", True),
            output_bias=("attention_bias", True),
            sinks=True,
            softmax_float32=False,
            ignored=("experts_per_token", "initial_context_length", "swiglu_alpha", "swiglu_limit"),
            windows=typed_windows(128, lambda reader: 2),
            experts=Experts(
                count=(LOCAL_EXPERTS, 128),
                per_token=(("num_experts_per_tok",), 4),
                width=("intermediate_size", 2880),
                activation="clamped_swiglu",
                expert_bias=True,
                router_bias=True,
                router_score="softmax_of_chosen",
                scores_float32=False,
            ),
        ),
        "minimax_m2": Decoder(
            classes=parts.decoder_classes("MiniMaxM2"),
            vocab_size=200064,
            hidden_size=3072,
            intermediate_size=1536,
            num_hidden_layers=62,
            num_attention_heads=48,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=196608,
            qk_norm=parts.RMS_NORM,
            qk_norm_over="all",
            rotary_factor=1.0,
            ignored=(
                *("use_qk_norm", "qk_norm_type", "use_routing_bias", "shared_intermediate_size", "attn_type_list"),
                *("use_mtp", "mtp_transformer_layers"),
            ),
            experts=Experts(
                count=(LOCAL_EXPERTS, 256),
                per_token=(("num_experts_per_tok",), 8),
                width=("intermediate_size", 1536),
                router_score="sigmoid",
                weights_float32=True,
            ),
        ),
        "ernie4_5_moe": Decoder(
            classes=parts.decoder_classes("Ernie4_5_Moe"),
            vocab_size=103424,
            hidden_size=2560,
            intermediate_size=12288,
            num_hidden_layers=28,
            num_attention_heads=20,
            num_key_value_heads=4,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
            own_tables=2,
            tables_float32=True,
            qkv_bias=("use_bias", False),
            output_bias=("use_bias", False),
            mlp_bias=("use_bias", False),
            head_bias=("use_bias", False),
            experts=Experts(
                count=(("moe_num_experts", "num_experts"), 64),
                per_token=(("moe_k", "num_experts_per_tok"), 6),
                width=("moe_intermediate_size", 1536),
                sparse=experts.between,
                shared=experts.counted("moe_num_shared_experts", 2),
                shared_bias=True,
                correction_bias=True,
                router_float32=True,
            ),
        ),
        "llama4_text": Decoder(
            classes={"Llama4ForCausalLM": parts.LANGUAGE, "Llama4TextModel": parts.BODY},
            vocab_size=202048,
            hidden_size=5120,
            intermediate_size=16384,
            num_hidden_layers=48,
            num_attention_heads=40,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=131072,
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
            qk_norm=Norm("rmsnorm", weight=False),
            qk_normed=("use_qk_norm", True),
            rotated_only=True,
            unrotated_query_scale=("attn_temperature_tuning", True),
            windows=chunks,
            rotated=some_rotate,
            dense_size_key="intermediate_size_mlp",
            ignored=("for_llm_compressor", "floor_scale", "attn_scale"),
            experts=Experts(
                count=(LOCAL_EXPERTS[:1], 16),
                per_token=(("num_experts_per_tok",), 1),
                width=("intermediate_size", 8192),
                sparse=experts.listed,
                shared=experts.one_more,
                router_score="sigmoid",
                norm_topk_prob=False,
            ),
        ),
    }
)
