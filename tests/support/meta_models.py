"""transformers' own classes, built on the meta device without memory: what the tests of configs compare with."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from transformers.initialization import no_init_weights  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

from loadgauge.core.families import model_types  # noqa: E402

NOT_COUNTED = (
    "vision_tower", "multi_modal_projector", "vision_model", "visual.", "mm_projector", "connector", "aligner",
    "image_newline", "audio_tower", "talker.", "code2wav.", "embed_vision", "embed_audio",
    "embed_tokens_extend", "vision_adapter", "vision_projection",
)  # fmt: skip
"""Parts of names of parameters that make features of images and sounds, or speak."""

CALLED_OTHERWISE = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Published under a name that transformers has no class for, but with the keys and the weights of another's."""

NEEDED: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
"""What the defaults of a configuration class lack to make a model that can run."""


HEARING = {"qwen2_audio": "Qwen2AudioForConditionalGeneration", "voxtral": "VoxtralForConditionalGeneration"}
"""Families whose class is in none of the mappings below."""

NO_CLASS = frozenset({"bailing_moe", "bailing_moe_v2", "dots_ocr", "kimi_k3", "minicpmv", "nemotron-nas"})
"""Families whose class is not in transformers."""


def classed() -> tuple[str, ...]:
    """The families that transformers has a class for."""
    return tuple(kind for kind in model_types() if kind not in NO_CLASS)


ELSEWHERE: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"model_type": "siglip_vision_model"}},
    "longcat_flash": {"zero_expert_num": 0},
    "qwen3_omni_moe": {"thinker_config": {"text_config": {"head_dim": 128}}},
}
"""What makes the defaults of transformers' class build, or of one shape, in parts that are not read here."""


def bare(model_type: str) -> dict[str, Any]:
    """The smallest config of a family."""
    return {"model_type": model_type, **NEEDED.get(model_type, {}), **ELSEWHERE.get(model_type, {})}


def text_alone(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text tower where the whole needs a library more: Gemma 3n's eyes are timm's."""
    if config["model_type"] != "gemma3n":
        return config
    return {**config.get("text_config", {}), "model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"]}


def usual_class(model_type: str) -> str:
    """The class that a config of a family means when it names none."""
    known = CALLED_OTHERWISE.get(model_type, model_type)
    if known == "qwen3_omni_moe":
        return "Qwen3OmniMoeThinkerForConditionalGeneration"  # the rest of it speaks
    if known in HEARING:
        return HEARING[known]
    for mapping in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ):
        if known in mapping:
            name = mapping[known]
            return str(name if isinstance(name, str) else name[0])
    raise LookupError(model_type)


def transformers_config(config: dict[str, Any]) -> Any:
    """transformers' own reading of a config."""
    # A copy of a copy: transformers writes into nested objects.
    rest = {key: value for key, value in json.loads(json.dumps(config)).items() if key != "model_type"}
    model_type = config["model_type"]
    if model_type == "qwen3_omni_moe":
        model_type, rest = "qwen3_omni_moe_thinker", rest["thinker_config"]
    return transformers.AutoConfig.for_model(CALLED_OTHERWISE.get(model_type, model_type), **rest)


@functools.cache
def _names() -> dict[str, str]:
    return {name.lower(): name for name in dir(transformers)}


def has_class(name: str) -> bool:
    """Whether transformers has such a class."""
    return name.lower() in _names()


def parameter_sizes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of the class in `architectures`, each once, without what makes features of images."""
    config = text_alone(config)
    name = (config.get("architectures") or [usual_class(config["model_type"])])[0]
    if not has_class(name):  # published under the name of its owner's code
        name = usual_class(config["model_type"])
    rest = {key: value for key, value in config.items() if key != "architectures"}
    return _sizes(name.lower(), json.dumps(rest, sort_keys=True))


def everything(config: dict[str, Any]) -> dict[str, int]:
    """Parameters of every tensor of a family's usual class, also of those that make features of images."""
    rest = {key: value for key, value in config.items() if key != "architectures"}
    built = _built(usual_class(config["model_type"]).lower(), json.dumps(rest, sort_keys=True))
    return {name: parameter.numel() for name, parameter in built.named_parameters()}


@functools.cache
def _sizes(name: str, config: str) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(parameter.shape)
        for name, parameter in _built(name, config).named_parameters()
        if not any(part in name for part in NOT_COUNTED)
    }


def _built(name: str, config: str) -> Any:
    kind = getattr(transformers, _names()[name])  # MPT's and Phi's files spell theirs in other cases
    with torch.device("meta"), no_init_weights():
        built = kind(transformers_config(json.loads(config)))
    built.tie_weights()
    return built


def total_size(config: dict[str, Any]) -> int:
    """Parameters of the class in `architectures`."""
    return sum(map(math.prod, parameter_sizes(config).values()))


def active_size(config: dict[str, Any]) -> int:
    """Parameters that one token passes through: those of experts by the share of them that it goes to."""
    theirs = transformers_config(text_alone(config)).get_text_config()
    if config["model_type"] == "dbrx":
        theirs = theirs.ffn_config
    keys = ("moe_top_k", "num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
    chosen = next((getattr(theirs, key) for key in keys if getattr(theirs, key, None) is not None), 0)
    active = 0
    for name, shape in parameter_sizes(config).items():
        size = math.prod(shape)
        if ".experts." in name:
            # DBRX joins the experts' matrices to one, and does not say in its shape how many there are.
            experts = shape[0] if config["model_type"] != "dbrx" else theirs.moe_num_experts
            layer = int(name.split("layers.")[1].partition(".")[0]) if isinstance(chosen, list) else 0
            size, rest = divmod(size * (chosen[layer] if isinstance(chosen, list) else chosen), experts)
            assert not rest
        active += size
    return active
