"""Models of text and images: the text tower is read from `text_config`; what turns images into features is not."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders import gemma, gemma3n, glm, layer_norm, llama, qwen
from loadgauge.core.families.encoders.towers import LISTENING
from loadgauge.core.families.hybrids import linear_attention as linear
from loadgauge.core.families.mixtures import deepseek, mixtral, newer
from loadgauge.core.families.reader import Reader, shown

TEXT_READERS: dict[str, Callable[[Reader], ModelSpec]] = {
    **deepseek.READERS,
    **glm.READERS,
    **layer_norm.READERS,
    **llama.READERS,
    **gemma.READERS,
    **gemma3n.READERS,
    **qwen.READERS,
    **mixtral.READERS,
    **newer.READERS,
    **linear.READERS,
}


class Wrapper(msgspec.Struct, frozen=True, kw_only=True):
    """A config around a text tower's."""

    prefix: str
    published: str = ""
    """Spellings of published configs, where they differ."""
    text: str
    """The text tower's model_type where its config does not say."""
    text_may_tie: bool = False
    """The text tower's `tie_word_embeddings` counts as well (LLaVA)."""
    text_ties: bool = False
    """Only the text tower's counts (Llama 4)."""
    flat: bool = False
    """Where `text_config` is missing, its keys stand beside the vision tower's (Qwen2-VL)."""
    outer: str = ""
    """The key of a config around `text_config`, beside which others speak (Qwen3-Omni)."""
    missing: Mapping[str, Any] = {}
    """The text tower where `text_config` is missing."""


WRAPPERS = {
    "qwen2_audio": Wrapper(prefix="Qwen2Audio", text="qwen2"),
    "voxtral": Wrapper(
        prefix="Voxtral",
        text="llama",
        missing={
            "head_dim": 128,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "vocab_size": 131072,
        },
    ),
    "aya_vision": Wrapper(prefix="AyaVision", text="cohere2"),
    "paligemma": Wrapper(
        prefix="PaliGemma",
        text="gemma",
        missing={
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "vocab_size": 257152,
        },
    ),
    "deepseek_vl": Wrapper(prefix="DeepseekVL", text="llama"),
    "minicpmv": Wrapper(prefix="MiniCPMV", text="qwen2"),
    "dots_ocr": Wrapper(prefix="DotsOCR", text="qwen2", flat=True),
    "cohere2_vision": Wrapper(prefix="Cohere2Vision", text="cohere2"),
    "exaone4_5": Wrapper(prefix="Exaone4_5_", text="exaone4"),
    "glm46v": Wrapper(prefix="Glm46V", text="glm4v_text"),
    "glm4v": Wrapper(prefix="Glm4v", text="glm4v_text"),
    "glm4v_moe": Wrapper(prefix="Glm4vMoe", text="glm4v_moe_text"),
    "idefics3": Wrapper(prefix="Idefics3", text="llama"),
    "internvl": Wrapper(prefix="InternVL", text="qwen2"),
    "kimi_k25": Wrapper(prefix="Kimi_K25", published="KimiK25", text="deepseek_v3"),
    "kimi_k3": Wrapper(prefix="KimiK3", text="kimi_linear"),
    "lfm2_vl": Wrapper(prefix="Lfm2Vl", text="lfm2"),
    "llava_next": Wrapper(prefix="LlavaNext", text="llama"),
    "llava_onevision": Wrapper(prefix="LlavaOnevision", text="qwen2"),
    "qwen3_omni_moe": Wrapper(
        prefix="Qwen3OmniMoe", published="Qwen3OmniMoeThinker", text="qwen3_omni_moe_text", outer="thinker_config"
    ),
    "smolvlm": Wrapper(prefix="SmolVLM", text="llama"),
    "gemma3": Wrapper(prefix="Gemma3", text="gemma3_text"),
    "gemma3n": Wrapper(prefix="Gemma3n", text="gemma3n_text"),
    "gemma4": Wrapper(prefix="Gemma4", text="gemma4_text"),
    "llama4": Wrapper(prefix="Llama4", text="llama4_text", text_ties=True),
    "llava": Wrapper(prefix="Llava", text="llama", text_may_tie=True),
    "mistral3": Wrapper(
        prefix="Mistral3",
        text="mistral",
        missing={
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "sliding_window": None,
            "vocab_size": 131072,
        },
    ),
    "muse_glimmer": Wrapper(prefix="MuseGlimmer", text="muse_glimmer_text"),
    "qwen2_vl": Wrapper(prefix="Qwen2VL", text="qwen2_vl_text", text_may_tie=True, flat=True),
    "qwen2_5_vl": Wrapper(prefix="Qwen2_5_VL", text="qwen2_5_vl_text", text_may_tie=True, flat=True),
    "qwen3_5": Wrapper(prefix="Qwen3_5", text="qwen3_5_text"),
    "qwen3_5_moe": Wrapper(prefix="Qwen3_5Moe", text="qwen3_5_moe_text"),
    "qwen3_vl": Wrapper(prefix="Qwen3VL", text="qwen3_vl_text"),
    "qwen3_vl_moe": Wrapper(prefix="Qwen3VLMoe", text="qwen3_vl_moe_text"),
}


OTHERS = ("talker_config", "code2wav_config")


def _inside(reader: Reader, wrapper: Wrapper, task: str) -> Reader:
    """A reader of the config around the text tower's, where that is not the outermost."""
    inner = reader.section(wrapper.outer, default={}, task=task)
    inner.config = {"model_type": reader.model_type, **inner.config}
    return inner


def read(reader: Reader, wrapper: Wrapper) -> ModelSpec:
    """Read the text tower of a multimodal config, with its head; the vision tower is left out.

    wrapper: where the tower is in the config. Raises as `hf.from_dict`.
    """
    classes = {
        f"{prefix}{end}": use
        for prefix in (wrapper.prefix, wrapper.published or wrapper.prefix)
        for end, use in (("ForConditionalGeneration", parts.LANGUAGE), ("Model", parts.BODY))
    }
    wanted = parts.task(reader, classes)
    if wrapper.outer and reader.raw(wrapper.outer) is not None:
        spec = read(_inside(reader, wrapper, wanted), msgspec.structs.replace(wrapper, outer=""))
        left = [f"{key} (not counted)" for key in OTHERS if reader.raw(key)]
        return msgspec.structs.replace(
            spec, model_type=reader.model_type, unused_keys=reader.unused([*spec.unused_keys, *left])
        )
    if wrapper.flat and reader.raw("text_config") is None:
        inner = reader.within({**reader.config, "model_type": wrapper.text}, task=wanted)
        inner.ignore("text_config", "vision_config")
        reader.ignore(*inner.config)
    else:
        if wrapper.missing and not reader.class_defaults and reader.raw("text_config") is None:
            raise reader.wrong("text_config", "is missing; state it, as the size of a model is not guessed")
        inner = reader.section("text_config", default=dict(wrapper.missing), task=wanted)
        inner.config = {"model_type": wrapper.text, **inner.config}
    text_type = inner.model_type
    if text_type not in TEXT_READERS:
        raise inner.unmodelled("model_type", f"a text tower {shown(text_type)} is not modelled")
    parts.refuse_unusual(inner)
    spec = TEXT_READERS[text_type](inner)
    tied = reader.flag("tie_word_embeddings", nullable=True)
    # What joins the two towers is made of the vision tower's features, and left out with it.
    reader.ignore("vision_config", "mm_tokens_per_image", "projector_hidden_act", "multimodal_projector_bias")
    reader.ignore("vision_feature_layer", "vision_feature_select_strategy", "image_seq_length", "spatial_merge_size")
    reader.ignore("vision_soft_tokens_per_image", "video_token_id", "media_placeholder_token_id", "ignore_index")
    reader.ignore("audio_soft_tokens_per_image")
    return msgspec.structs.replace(
        spec,
        model_type=reader.model_type,
        tie_word_embeddings=spec.tie_word_embeddings
        if wrapper.text_ties
        else tied or (wrapper.text_may_tie and spec.tie_word_embeddings),
        unused_keys=inner.unused(
            [*spec.unused_keys, f"{'audio' if reader.model_type in LISTENING else 'vision'}_config (not counted)"]
        ),
    )


READERS = {model_type: partial(read, wrapper=wrapper) for model_type, wrapper in WRAPPERS.items()}
