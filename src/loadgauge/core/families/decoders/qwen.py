"""Qwen 1.5 to 3: with and without experts, and the text towers of the vision-language models."""

import msgspec

from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders.decoder import Decoder, readers
from loadgauge.core.families.mixtures import experts
from loadgauge.core.families.mixtures.experts import Experts
from loadgauge.core.families.reader import Reader


def window_after_some(reader: Reader, count: int) -> list[int | None]:
    """Return the window of each of `count` layers [tokens]; None: all keys.

    With `use_sliding_window`, by `layer_types`; without it, from layer `max_window_layers` on.
    """
    switched_on = reader.flag("use_sliding_window")
    window = reader.optional_whole("sliding_window")
    first = reader.whole("max_window_layers", default=28, minimum=0)
    if not switched_on:
        window = None
    return parts.windows_where(reader, count, window, lambda i: window is not None and i >= first)


def window_after_types(reader: Reader, count: int) -> list[int | None]:
    """Return the window of each of `count` layers [tokens]; None: all keys (dots.llm1).

    By `layer_types`; without it, from layer `max_window_layers` on.
    """
    window = reader.optional_whole("sliding_window")
    first = reader.whole("max_window_layers", minimum=0)
    return parts.windows_where(reader, count, window, lambda i: window is not None and i >= first)


def window_before_some(reader: Reader, count: int) -> list[int | None]:
    """Return the window of each of `count` layers [tokens]; None: all keys.

    With `use_sliding_window`, every second layer below `max_window_layers` has one (as transformers has it).
    """
    switched_on = reader.flag("use_sliding_window")
    window = reader.optional_whole("sliding_window", minimum=0)
    last = reader.whole("max_window_layers", minimum=0)
    types = parts.layer_types(reader, count)
    if not switched_on or not window:
        return [None] * count
    if types is None:
        types = tuple("full_attention" if i % 2 or i >= last else "sliding_attention" for i in range(count))
    return parts.windows(reader, types, window)


def one_switched_window(reader: Reader, count: int) -> list[int | None]:
    """The windows of `count` layers: `sliding_window` for each where `use_sliding_window` is set, else None."""
    reader.ignore("max_window_layers")
    switched_on = reader.flag("use_sliding_window")
    window = reader.optional_whole("sliding_window", default=4096)
    return [window if switched_on else None] * count


QWEN2 = Decoder(classes=parts.decoder_classes("Qwen2"), qkv_bias=True, windows=window_after_some)
QWEN2_VL_TEXT = Decoder(classes={}, qkv_bias=True, windows=window_after_some)
QWEN3 = Decoder(classes=parts.decoder_classes("Qwen3"), qk_norm=parts.RMS_NORM, windows=window_after_some)
QWEN3_MOE = Decoder(
    classes=parts.decoder_classes("Qwen3Moe"),
    qk_norm=parts.RMS_NORM,
    windows=one_switched_window,
    experts=Experts(
        count=("num_experts", "num_local_experts"),
        sparse=experts.stepped,
        norm_topk_prob="norm_topk_prob",
    ),
)

READERS = readers(
    {
        "qwen2": QWEN2,
        "qwen2_moe": Decoder(
            classes=parts.decoder_classes("Qwen2Moe"),
            qkv_bias="qkv_bias",
            windows=window_before_some,
            experts=Experts(
                count=("num_experts",),
                sparse=experts.stepped,
                shared=experts.wide("shared_expert_intermediate_size"),
                shared_gate=True,
                norm_topk_prob="norm_topk_prob",
            ),
        ),
        "qwen3": QWEN3,
        "qwen3_moe": QWEN3_MOE,
        "mimo": msgspec.structs.replace(
            QWEN2,
            classes={"MiMoForCausalLM": parts.LANGUAGE, **parts.decoder_classes("Qwen2")},  # which loads it
            next_tokens=True,
            ignored=("use_mrope", "attention_bias"),
        ),
        "qwen2_vl_text": QWEN2_VL_TEXT,
        "qwen2_5_vl_text": QWEN2_VL_TEXT,
        "qwen3_omni_moe_text": msgspec.structs.replace(QWEN3_MOE, classes={}),
        "qwen3_vl_text": msgspec.structs.replace(QWEN3, windows=one_switched_window, classes={}),
        "qwen3_vl_moe_text": msgspec.structs.replace(
            QWEN3_MOE,
            classes={},
            ignored=("norm_topk_prob",),  # always so
            experts=Experts(
                count=("num_experts", "num_local_experts"),
                sparse=experts.stepped,
            ),
        ),
    }
)
