"""Qwen 1.5 to 3: with and without experts, and the text towers of the vision-language models."""

from __future__ import annotations

import msgspec

from loadgauge.families import common as parts
from loadgauge.families import experts
from loadgauge.families.common import ATTENTION_BIAS
from loadgauge.families.decoder import Decoder, Windows, readers
from loadgauge.families.experts import Experts
from loadgauge.families.reader import Reader


def window_after_some(reader: Reader, count: int) -> list[int | None]:
    """Full attention up to layer `max_window_layers`, and a window after it where `use_sliding_window` is set."""
    switched_on = reader.flag("use_sliding_window", default=False)
    window = reader.optional_whole("sliding_window", default=4096)
    first = reader.whole("max_window_layers", default=28, minimum=0)
    if not switched_on:
        window = None
    types = parts.layer_types(reader, count)
    if types is None:
        sliding = window is not None
        types = tuple("sliding_attention" if sliding and i >= first else "full_attention" for i in range(count))
    return parts.windows(reader, types, window)


def window_after_types(last: int) -> Windows:
    """`layer_types`; where it is missing, a window from layer `max_window_layers` on (dots.llm1)."""

    def read_windows(reader: Reader, count: int) -> list[int | None]:
        window = reader.optional_whole("sliding_window", default=4096)
        first = reader.whole("max_window_layers", default=last, minimum=0)
        types = parts.layer_types(reader, count)
        if types is None:
            sliding = window is not None
            types = tuple("sliding_attention" if sliding and i >= first else "full_attention" for i in range(count))
        return parts.windows(reader, types, window)

    return read_windows


def window_before_some(reader: Reader, count: int) -> list[int | None]:
    """With `use_sliding_window`, every second layer below `max_window_layers` has a window (as transformers has it)."""
    switched_on = reader.flag("use_sliding_window", default=False)
    window = reader.optional_whole("sliding_window", default=4096, minimum=0)
    last = reader.whole("max_window_layers", default=28, minimum=0)
    types = parts.layer_types(reader, count)
    if not switched_on or not window:
        return [None] * count
    if types is None:
        types = tuple("full_attention" if i % 2 or i >= last else "sliding_attention" for i in range(count))
    return parts.windows(reader, types, window)


def one_switched_window(reader: Reader, count: int) -> list[int | None]:
    """Every layer has the window where `use_sliding_window` is set."""
    reader.ignore("max_window_layers")
    switched_on = reader.flag("use_sliding_window", default=False)
    window = reader.optional_whole("sliding_window", default=4096)
    return [window if switched_on else None] * count


QWEN2 = Decoder(
    classes=parts.decoder_classes("Qwen2"),
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    qkv_bias=True,
    windows=window_after_some,
)
QWEN2_VL_TEXT = Decoder(
    classes={},
    vocab_size=152064,
    hidden_size=8192,
    intermediate_size=29568,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    qkv_bias=True,
    windows=window_after_some,
)
QWEN3 = Decoder(
    classes=parts.decoder_classes("Qwen3"),
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=32768,
    qkv_bias=ATTENTION_BIAS,
    output_bias=ATTENTION_BIAS,
    qk_norm=parts.RMS_NORM,
    windows=window_after_some,
)
QWEN3_MOE = Decoder(
    classes=parts.decoder_classes("Qwen3Moe"),
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=24,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=32768,
    qkv_bias=ATTENTION_BIAS,
    output_bias=ATTENTION_BIAS,
    qk_norm=parts.RMS_NORM,
    windows=one_switched_window,
    experts=Experts(
        count=(("num_experts", "num_local_experts"), 128),
        per_token=(("num_experts_per_tok",), 8),
        width=("moe_intermediate_size", 768),
        sparse=experts.stepped,
        norm_topk_prob=("norm_topk_prob", False),
    ),
)

READERS = readers(
    {
        "qwen2": QWEN2,
        "qwen2_moe": Decoder(
            classes=parts.decoder_classes("Qwen2Moe"),
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=32768,
            qkv_bias=("qkv_bias", True),
            windows=window_before_some,
            experts=Experts(
                count=(("num_experts",), 60),
                per_token=(("num_experts_per_tok",), 4),
                width=("moe_intermediate_size", 1408),
                sparse=experts.stepped,
                shared=experts.wide("shared_expert_intermediate_size", 5632),
                shared_gate=True,
                norm_topk_prob=("norm_topk_prob", False),
            ),
        ),
        "qwen3": QWEN3,
        "qwen3_moe": QWEN3_MOE,
        "qwen2_vl_text": QWEN2_VL_TEXT,
        "qwen2_5_vl_text": QWEN2_VL_TEXT,
        "qwen3_vl_text": msgspec.structs.replace(
            QWEN3, max_position_embeddings=128000, windows=one_switched_window, classes={}
        ),
        "qwen3_vl_moe_text": msgspec.structs.replace(
            QWEN3_MOE,
            classes={},
            intermediate_size=5632,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=128000,
            tie_word_embeddings=True,
            ignored=("norm_topk_prob",),  # always so
            experts=Experts(
                count=(("num_experts", "num_local_experts"), 60),
                per_token=(("num_experts_per_tok",), 4),
                width=("moe_intermediate_size", 1408),
                sparse=experts.stepped,
            ),
        ),
    }
)
