"""From a Hugging Face `config.json` to a `ModelSpec`. A config is data: nothing in it is imported or run."""

from __future__ import annotations

import json
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.core.base import ConfigError, closest, read_start, refuse
from loadgauge.core.definitions.model.model import ModelSpec, Tower
from loadgauge.core.definitions.model.own_code import DROPS
from loadgauge.core.families.common import refuse_unusual
from loadgauge.core.families.reader import Reader, shown

if TYPE_CHECKING:
    from pathlib import Path

LARGEST_FILE = 10_000_000
"""Bytes. Published configs have some thousands."""

FILES = {
    "decoders.alibi": ("bloom", "falcon", "mpt"),
    "mixtures.dbrx": ("dbrx",),
    "mixtures.deepseek": (
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "glm_moe_dsa", "kimi_k2", "longcat_flash", "mistral4"),
        "youtu",
    ),
    "mixtures.deepseek_v4": ("deepseek_v4",),
    "encoders.encoder": ("bert", "modernbert", "roberta", "xlm-roberta", "xlm-roberta-xl"),
    "decoders.fairseq": ("biogpt", "xglm"),
    "decoders.gemma": ("gemma", "gemma2", "gemma3_text", "gemma4_text", "vaultgemma"),
    "decoders.gemma3n": ("gemma3n_text",),
    "decoders.glm": ("glm", "glm4", "glm4_moe", "glm4_moe_lite"),
    "decoders.gpt": ("gpt2", "gpt_bigcode", "gpt_neox", "opt"),
    "decoders.gptj": ("codegen", "gpt_neo", "gptj"),
    "hybrids.hybrid": ("bamba", "falcon_h1", "granitemoehybrid", "jamba"),
    "mixtures.hunyuan": ("hunyuan_v1_dense", "hunyuan_v1_moe"),
    "decoders.layer_norm": ("cohere", "cohere2", "jais2", "nemotron", "persimmon", "phi", "stablelm", "starcoder2"),
    "mixtures.ling": ("bailing_moe", "bailing_moe_v2"),
    "hybrids.linear_attention": (
        *("bailing_hybrid", "kimi_linear", "lfm2", "lfm2_moe", "minimax", "olmo_hybrid"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    ),
    "decoders.llama": (
        *("apertus", "arcee", "ernie4_5", "exaone4", "granite", "helium", "internlm3", "iquestcoder", "llama"),
        *("ministral", "ministral3", "mistral", "phi3", "phi4_multimodal", "seed_oss", "smollm3"),
    ),
    "mixtures.mixtral": (
        *("ernie4_5_moe", "gpt_oss", "granitemoe", "granitemoeshared", "llama4_text", "minimax_m2", "mixtral"),
        "phimoe",
    ),
    "encoders.multimodal": (
        *(
            "aya_vision",
            "deepseek_vl",
            "dots_ocr",
            "minicpmv",
            "paligemma",
            "qwen2_audio",
            "voxtral",
            "cohere2_vision",
            "exaone4_5",
            "gemma3",
            "gemma3n",
            "gemma4",
            "glm46v",
            "glm4v",
            "glm4v_moe",
            "idefics3",
        ),
        *("internvl", "kimi_k25", "kimi_k3", "lfm2_vl", "llama4", "llava", "llava_next", "llava_onevision"),
        *("mistral3", "muse_glimmer"),
        *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    ),
    "hybrids.nas": ("nemotron-nas",),
    "mixtures.newer": ("afmoe", "cwm", "exaone_moe", "hy_v3", "mellum", "mimo_v2_flash", "nanochat", "solar_open"),
    "decoders.olmo": ("flex_olmo", "olmo", "olmo2", "olmo3", "olmoe"),
    "encoders.small_encoders": ("albert", "distilbert", "electra"),
    "hybrids.state_space": ("falcon_mamba", "mamba", "mamba2", "nemotron_h"),
    "decoders.qwen": ("mimo", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
}
"""The files of this folder, and which model types the `READERS` of each has."""

WINDOW = ("sliding_window", "max_window_layers")
"""Endings of keys that are read before it is known whether the model has windows at all."""

FAMILIES = {model_type: file for file, types in FILES.items() for model_type in types}
"""Each model_type and the file that has its reader; the file is imported when it is needed."""


def model_types() -> tuple[str, ...]:
    """Every `model_type` that can be read."""
    return tuple(sorted(FAMILIES))


def from_dict(config: object, file: str = "", name: str = "", *, class_defaults: bool = False) -> ModelSpec:
    """The model that a decoded `config.json` describes; `file` is for error messages.

    A size that the config does not state is the default of transformers' configuration class, and is named in the
    model's `defaults`. Without a hidden size or a number of layers this raises `ConfigError`, unless `class_defaults`
    asks for those of the class too.

    >>> spec = from_dict({"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 1000})
    >>> spec.num_hidden_layers, spec.blocks[0].attention.head_dim
    (16, 64)
    >>> dict(spec.defaults)["intermediate_size"]
    11008
    >>> from_dict({"model_type": "llama", "num_hidden_layers": 16})
    Traceback (most recent call last):
    loadgauge...ConfigError: hidden_size: is missing; state it, as the size of a model is not guessed (llama's default is 4096)
    """
    reader = Reader(config, file, name=name)
    reader.class_defaults = class_defaults
    if isinstance(config, dict) and "_class_name" in config and "model_type" not in config:
        raise reader.unmodelled(
            "_class_name", f"{shown(config['_class_name'])} is a class of diffusers, whose own code is captured"
        )
    model_type = reader.model_type
    if model_type not in FAMILIES:
        raise reader.unmodelled(
            "model_type",
            f"{shown(model_type)} is not modelled"
            f" ({_near(model_type)}docs/models.md lists the {len(FAMILIES)} that are); where transformers has it,"
            " `loadgauge capture` runs its own code and answers",
        )
    reader.name = name or model_type
    refuse_unusual(reader)
    module = import_module(f"loadgauge.core.families.{FAMILIES[model_type]}")
    spec: ModelSpec = module.READERS[model_type](reader)
    if dropped := reader.rate(DROPS, default=0.0):
        blocks = tuple(msgspec.structs.replace(block, dropout=dropped) for block in spec.blocks)
        spec = msgspec.structs.replace(spec, blocks=blocks, embedding_dropout=dropped)
    windowed = any(getattr(block.attention, "sliding_window", None) for block in spec.blocks)
    defaults = tuple((key, size) for key, size in reader.defaults.items() if windowed or not key.endswith(WINDOW))
    return msgspec.structs.replace(
        spec,
        unused_keys=reader.unused(spec.unused_keys),
        towers=_towers(reader, module),
        defaults=defaults,
        dtype=_dtype(config),
        source=file,
    )


def _towers(reader: Reader, module: Any) -> tuple[Tower, ...]:
    """The towers beside a language model; most configs are of a language model alone, and load nothing for it."""
    beside = module.__name__.endswith(".multimodal") or reader.model_type == "phi4_multimodal"
    if not beside and not any(key.endswith("_config") for key in reader.config):
        return ()
    from loadgauge.core.families.encoders.towers import towers

    return towers(reader.config, reader.model_type, beside)


def _dtype(config: Any) -> str:
    """The dtype of the checkpoint that a config describes, "" where it does not say; what no weights have is ignored."""
    parts = [config, *(part for part in (config.get("text_config"),) if isinstance(part, dict))]
    stated = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    words = (word.removeprefix("torch.") for word in stated if isinstance(word, str))
    return next((word for word in words if word in ("float32", "bfloat16", "float16")), "")


def _near(model_type: str) -> str:
    close = closest(model_type.lower(), model_types(), 3)
    return f"close to it: {', '.join(close)}; " if close else ""


def from_hf(path: str | Path, name: str = "") -> ModelSpec:
    """The model that a `config.json`, or the folder that holds it, describes.

    name: the model's name; else that of the folder, or of a file that is not called config.json
    Raises ConfigError for what cannot be read, and NotModelled for what is valid but outside the model.
    """
    from pathlib import Path  # not for a catalogued model

    file = str(Path(path) / "config.json" if os.path.isdir(path) else path)
    config_file, content = Path(file), read_start(file, LARGEST_FILE)
    own = config_file.absolute().parent.name if config_file.name == "config.json" else config_file.stem
    return from_dict(decode(content, file), file, name or own)


def decode(content: bytes, file: str = "") -> Any:
    """JSON as Python objects; what is not strict JSON, or names a key twice, is a `ConfigError`.

    `Infinity` is read, as Python writes it: configurations of Mamba-2 have it as their longest step.

    >>> decode(b'{"n_layer": NaN}', "config.json")
    Traceback (most recent call last):
    loadgauge.core.base.errors.ConfigError: config.json: is not valid JSON: NaN is not a JSON number
    """
    if len(content) > LARGEST_FILE:
        raise ConfigError(f"is larger than {LARGEST_FILE // 10**6} MB; a config.json has some kB", file=file)
    refuse(not content.strip(), "is empty", file=file)

    def constant(text: str) -> float:
        if text.endswith("Infinity"):
            return float(text)
        raise ValueError(f"{text} is not a JSON number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise ConfigError(f"the key {shown(key)} appears twice", file=file)
            values[key] = value
        return values

    # Not msgspec: like most decoders it keeps the last of two equal keys and says nothing of the first.
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=once, parse_constant=constant)
    except RecursionError:
        raise ConfigError("is nested too deeply", file=file) from None
    except ConfigError:
        raise
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are kinds of it
        raise ConfigError(f"is not valid JSON: {error}", file=file) from None
