"""musubi-tuner's command lines with their file of data, and SimpleTuner's configurations (JSON, TOML or a file of variables)."""

import json
import math
import re
import tomllib
from typing import Any

from loadgauge.job_files.hugging_face.diffusers import (
    ACCUMULATION,
    CHECKPOINTS,
    HALVES,
    NAME,
    PRECISIONS,
    STAYING,
    named,
    of_data,
    optimizer,
    sized,
    stated,
    table,
)
from loadgauge.job_files.hugging_face.huggingface import dropout, processes
from loadgauge.job_files.ideas import Dialect, Document, Facts, Idea, Keys, dora, fixed, names_in, reads, row
from loadgauge.job_files.pre_training.megatron import launched

STARTED = re.compile(r"\b(\w+?)_train(_network)?(?:_self_flow)?\.py\b")
ALIGNED = 64
"""Pixels of which SimpleTuner makes sides whole multiples."""


def _program(keys: Keys) -> tuple[dict[str, Any], bool]:
    """The row of the program, and whether it trains adapters."""
    name, network = next(iter(STARTED.findall(keys.program)), ("", "_network"))
    return table("musubi").get(name, {}), bool(network)


def _variant(keys: Keys) -> str | None:
    variant = stated(keys, "task") or stated(keys, "model_version")
    return table("musubi_models").get(variant) or _program(keys)[0].get("model")


def _number(value: Any, usual: int) -> int:
    return value if isinstance(value, int) and 0 < value < 100_000 else usual


def _sized(data: dict[str, Any], doubled: bool) -> tuple[int, int, int, int]:
    """Frames, height, width and batch of a set of data: of several lengths the longest."""
    side = data.get("resolution", (960, 544))
    width, height = (_number(each, 960) for each in (side if isinstance(side, list | tuple) else (side, side)))
    video = any(key.startswith("video_") for key in data)
    frames = max((_number(each, 1) for each in data.get("target_frames", [1]) if video), default=1)
    if video and data.get("frame_extraction") == "full":
        frames = _number(data.get("max_frames"), 129)
    twice = doubled and any("control" in key for key in data)
    return frames, height * (2 if twice else 1), width, _number(data.get("batch_size"), 1)


@reads("dataset_config", facts="micro_batch pictures video")
def _data(keys: Keys) -> Facts:
    """The micro-batch and the sizes of the set of data that has most pixels, each over what the file says of all."""

    def read(text: str) -> Facts:
        whole = tomllib.loads(text)
        sets = [{**whole.get("general", {}), **data} for data in whole["datasets"]]
        sizes = (_sized(data, "doubled" in _program(keys)[0]) for data in sets)
        frames, height, width, batch = max(sizes, key=math.prod)
        return {"micro_batch": batch} | sized(frames, height, width)

    return {"micro_batch": 1} | of_data(keys, "dataset_config", read)


def _method(keys: Keys) -> Facts:
    """Adapters in float32 beside 16 bits; what is trained whole is float32 unless it is told otherwise."""
    own, adapts = _program(keys)
    half = next((word for word in ("bf16", "fp16") if keys.flag(f"full_{word}")), "")
    swapped = keys.whole("blocks_to_swap", minimum=0) or 0
    keys.note(
        "blocks_to_swap",
        f"keeps {swapped} blocks on the host, each of which is fetched when it runs",
        "saves",
        "weights",
        min(0.95, swapped / own.get("blocks", 40)),
        when=swapped,
    )
    if not adapts:
        return {"precision": "bf16-pure" if half else "bf16", "weights": None if half else "float32", "lora_rank": 0}
    module = stated(keys, "network_module")
    keys.note(
        "network_module",
        f"has adapters of {module}'s own form, and LoRA's are counted",
        parts="gradients optimizer",
        when=module.endswith(("loha", "lokr")),
    )
    return {
        "precision": "bf16",
        "weights": "bfloat16",
        "lora_rank": keys.whole("network_dim") or 4,
        "lora_targets": own.get("targets", "all"),
        "lora_dtype": "bfloat16" if half else "float32",
    }


def _musubi_optimizer(keys: Keys) -> str:
    name = optimizer(keys, (keys.word("optimizer_type") or "adamw").lower(), "optimizer_type")
    return f"{name}:in-backward" if keys.flag("fused_backward_pass") else name


MUSUBI_TUNER = Dialect(
    name="musubi-tuner",
    title="musubi-tuner",
    versions="musubi-tuner 0.2 - 0.3",
    syntaxes=("argv",),
    style="flags",
    blank={"argv": "accelerate launch wan_train_network.py --task t2v-14B --network_module networks.lora_wan\n"},
    ideas=(
        launched(),
        processes(),
        Idea(keys=("task", "model_version"), facts=("model",), read=lambda keys: {"model": _variant(keys)}),
        _data,
        ACCUMULATION,
        CHECKPOINTS,
        Idea(
            keys=names_in("network_module network_dim full_bf16 full_fp16 blocks_to_swap"),
            read=_method,
            facts=names_in("precision weights lora_rank lora_targets lora_dtype"),
            write=lambda facts, keys: {"network_dim": facts.get("lora_rank") or None},
        ),
        dropout("network_dropout"),
        fixed("optimizer_type", "fused_backward_pass", optimizer=_musubi_optimizer),
        row("compile", "compile", kind="flag", off=False, add=False),
        fixed(encoders="cached"),
    ),
)


def _spelled(document: Document) -> tuple[str, list[tuple[str, str]]]:
    """The options of a configuration under their names: with or without dashes, or as variables."""
    plain = {name: name.lstrip("-").replace("-", "_").lower() for name in document.names()}
    words = {name: table("simpletuner_variables").get(word, word) for name, word in plain.items()}
    return "", [(name, word) for name, word in words.items() if word != name]


def _tuned(keys: Keys) -> str | None:
    family, flavour = (keys.word("model_family") or "").lower(), (keys.word("model_flavour") or "").lower()
    flavours: dict[str, str] = table("simpletuner").get(family, {"": ""})
    usual = next((model for word, model in flavours.items() if word and word in flavour), flavours[""])
    return usual or None if flavour else named(keys, stated(keys, NAME), usual, f"--model_family {family}")


def _square(data: dict[str, Any], side: float, way: str) -> tuple[int, int, int]:
    """Frames, height and width of a set of data: a square of as many pixels, or with the shortest side of pictures."""
    size, video = data.get("resolution", side), data.get("video")
    size = float(size) if isinstance(size, int | float) and 0 < size < 20_000 else side
    pixels = math.sqrt(size) * 1000 if data.get("resolution_type", way) == "area" else size
    whole = max(1, round(pixels / ALIGNED)) * ALIGNED
    return _number(video.get("num_frames"), 125) if isinstance(video, dict) else 1, whole, whole


@reads("resolution", "resolution_type", "data_backend_config", facts="pictures video")
def _pixels(keys: Keys) -> Facts:
    """Sizes of the largest set of data (`--data_backend_config`), which says its own, or by `--resolution`."""
    side, way = keys.real("resolution") or 1024, keys.word("resolution_type") or "pixel_area"

    def read(text: str) -> Facts:
        sets = [data for data in json.loads(text) if data.get("dataset_type", "image") in ("image", "video")]
        return sized(*max((_square(data, side, way) for data in sets), key=math.prod))

    return sized(*_square({}, side, way)) | of_data(keys, "data_backend_config", read, "squares of --resolution")


def _trained(keys: Keys) -> Facts:
    """16 bits throughout, unless the precision is none; adapters beside attention's matrices."""
    word = keys.choice("mixed_precision", PRECISIONS) or "bf16"
    facts: Facts = {"precision": "fp32" if word == "fp32" else f"{word}-pure", "lora_rank": 0}
    if (keys.word("model_type") or "full") != "lora":
        return facts
    keys.note(
        "lora_type",
        "has adapters that another file says, and LoRA's are counted",
        parts="gradients optimizer",
        when=keys.word("lora_type") == "lycoris",
    )
    bits = (keys.word("base_model_precision") or "no_change").lower()
    share = 0.75 if re.search(r"int[2-4]|nf4|fp4", bits) else 0.5
    keys.note(
        "base_model_precision",
        "keeps the frozen weights in fewer bits",
        "saves",
        "weights",
        share,
        when=bits != "no_change",
    )
    usual = table("simpletuner_targets").get(keys.word("model_family") or "", "to_k,to_q,to_v,to_out.0")
    chosen = keys.words("peft_lora_target_modules")
    return facts | {
        "lora_rank": keys.whole("lora_rank") or 16,
        "lora_targets": ",".join(chosen) if chosen else usual,
        "lora_dtype": HALVES.get(word, "float32"),
    }


SIMPLETUNER = Dialect(
    name="simpletuner",
    title="SimpleTuner",
    versions="SimpleTuner 1.0 - 4.0",
    syntaxes=("json", "toml"),
    renames=_spelled,
    blank={
        "json": '{\n  "--model_family": "flux",\n  "--data_backend_config": "config/multidatabackend.json"\n}\n',
        "toml": 'model_family = "flux"\ndata_backend_config = "config/multidatabackend.json"\n',
    },
    ideas=(
        processes(argv=False),
        Idea(
            keys=(NAME, "model_family", "model_flavour"),
            facts=("model",),
            read=lambda keys: {"model": _tuned(keys)},
            write=lambda facts, keys: {NAME: facts.get("model") or None},
        ),
        _pixels,
        row("micro_batch", "train_batch_size", default=4),
        ACCUMULATION,
        row("recompute", "gradient_checkpointing", words={"true": "full", "false": "none"}, default="full"),
        Idea(
            keys=names_in(
                "model_type lora_type lora_rank peft_lora_target_modules mixed_precision base_model_precision"
            ),
            facts=names_in("precision lora_rank lora_targets lora_dtype"),
            read=_trained,
            write=lambda facts, keys: {
                "model_type": "lora" if facts.get("lora_rank") else "full",
                "lora_rank": facts.get("lora_rank") or None,
            },
        ),
        dora("use_dora"),
        dropout("lora_dropout", lambda keys: 0.1 if keys.word("model_type") == "lora" else None),
        fixed(
            "vae_cache_disable",
            "text_cache_disable",
            encoders=lambda keys: STAYING[bool(keys.flag("vae_cache_disable")), bool(keys.flag("text_cache_disable"))],
        ),
        fixed("optimizer", optimizer=lambda keys: optimizer(keys, (keys.word("optimizer") or "adamw_bf16").lower())),
        row("zero", "fsdp_enable", words={"true": 3, "false": 0}, default=0, off=0),
    ),
)
