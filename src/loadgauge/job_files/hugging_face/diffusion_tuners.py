"""musubi-tuner's command lines with their file of data, and SimpleTuner's configurations (JSON, TOML or a file of variables)."""

from __future__ import annotations

import json
import math
import re
import tomllib
from typing import Any

from loadgauge.core.base.package_data import read_table
from loadgauge.job_files.hugging_face.diffusers import (
    ACCUMULATION,
    CHECKPOINTS,
    HALVES,
    NAME,
    PRECISIONS,
    STAYING,
    named,
    optimizer,
    said,
    unseen,
)
from loadgauge.job_files.hugging_face.huggingface import dropout, processes
from loadgauge.job_files.ideas.lenses import dora, fixed
from loadgauge.job_files.ideas.table import Dialect, Document, Facts, Idea, Keys, names_in, row
from loadgauge.job_files.pre_training.megatron import launched
from loadgauge.job_files.reading.known_files import beside

STARTED = re.compile(r"\b(\w+?)_train(_network)?(?:_self_flow)?\.py\b")
ALIGNED = 64
"""Pixels of which SimpleTuner makes sides whole multiples."""


def _program(keys: Keys) -> tuple[dict[str, Any], bool]:
    """The row of the program, and whether it trains adapters."""
    found = STARTED.search(" ".join(getattr(keys.document, "program", ())))
    table: dict[str, dict[str, Any]] = read_table("diffusion.toml")["musubi"]
    return ({}, True) if found is None else (table.get(found[1], {}), bool(found[2]))


def _variant(keys: Keys) -> str | None:
    models: dict[str, str] = read_table("diffusion.toml")["musubi_models"]
    return models.get(said(keys, "task") or said(keys, "model_version") or "", _program(keys)[0].get("model"))


def _rows(keys: Keys) -> list[dict[str, Any]]:
    """The sets of data of a file, each over what it says of all; none where it is not there."""
    text = beside(said(keys, "dataset_config") or "", keys) if keys.has("dataset_config") else None
    try:
        read = tomllib.loads(text or "")
    except tomllib.TOMLDecodeError as error:
        raise keys.wrong("dataset_config", f"is no TOML: {error}") from None
    sets = read.get("datasets", [])
    return [{**read.get("general", {}), **one} for one in sets if isinstance(one, dict)]


def _number(value: Any, usual: int) -> int:
    return value if isinstance(value, int) and 0 < value < 100_000 else usual


def _sized(one: dict[str, Any], doubled: bool) -> tuple[int, int, int, int]:
    """Frames, width, height and batch of a set of data: of several lengths the longest."""
    side = one.get("resolution", (960, 544))
    width, height = (
        _number(each, 960) for each in (side if isinstance(side, list | tuple) and len(side) == 2 else (side, side))
    )
    video = any(key.startswith("video_") for key in one)
    frames = [_number(each, 1) for each in one.get("target_frames", [1])] if video else [1]
    longest = (
        _number(one.get("max_frames"), 129)
        if video and one.get("frame_extraction") == "full"
        else max(frames, default=1)
    )
    twice = doubled and any("control" in key for key in one)
    return longest, width, height * (2 if twice else 1), _number(one.get("batch_size"), 1)


def _data(keys: Keys) -> Facts:
    """The micro-batch and the sizes of the set of data that has most pixels."""
    sets = [_sized(one, "doubled" in _program(keys)[0]) for one in _rows(keys)]
    if not sets:
        unseen(keys)
        return {"micro_batch": 1}
    frames, width, height, batch = max(sets, key=math.prod)
    sizes = {"video": f"{frames}x{width}x{height}"} if frames > 1 else {"pictures": f"1x{width}x{height}"}
    return {"micro_batch": batch} | sizes


def _method(keys: Keys) -> Facts:
    """Adapters in float32 beside 16 bits; what is trained whole is float32 unless it is told otherwise."""
    own, adapts = _program(keys)
    half = next((word for word in ("bf16", "fp16") if keys.flag(f"full_{word}")), "")
    if swapped := keys.whole("blocks_to_swap", minimum=0):
        why = f"keeps {swapped} blocks on the host, each of which is fetched when it runs"
        keys.note("blocks_to_swap", why, "saves", "weights", min(0.95, swapped / own.get("blocks", 40)))
    if not adapts:
        return {"precision": "bf16-pure" if half else "bf16", "weights": None if half else "float32", "lora_rank": 0}
    if (module := said(keys, "network_module") or "").rpartition(".")[2] in ("loha", "lokr"):
        keys.note(
            "network_module",
            f"has adapters of {module}'s own form, and LoRA's are counted",
            parts="gradients optimizer",
        )
    return {
        "precision": "bf16",
        "weights": "bfloat16",
        "lora_rank": keys.whole("network_dim") or 4,
        "lora_targets": own.get("targets", "all"),
        "lora_dtype": "bfloat16" if half else "float32",
    }


def _musubi_optimizer(keys: Keys) -> str:
    name = optimizer(keys, (keys.word("optimizer_type") or "adamw").lower())
    return f"{name}:in-backward" if keys.flag("fused_backward_pass") else name


MUSUBI_TUNER = Dialect(
    name="musubi-tuner", title="musubi-tuner", versions="musubi-tuner 0.2 - 0.3", syntaxes=("argv",), style="flags",
    blank={"argv": "accelerate launch wan_train_network.py --task t2v-14B --network_module networks.lora_wan\n"},
    ideas=(
        launched(),
        processes(),
        Idea(keys=("task", "model_version"), facts=("model",), read=lambda keys: {"model": _variant(keys)},
             write=lambda facts, keys: {}),
        Idea(keys=("dataset_config",), facts=names_in("micro_batch pictures video"), read=_data, write=lambda facts, keys: {}),
        ACCUMULATION,
        CHECKPOINTS,
        Idea(keys=names_in("network_module network_dim full_bf16 full_fp16 blocks_to_swap"), read=_method,
             facts=names_in("precision weights lora_rank lora_targets lora_dtype"),
             write=lambda facts, keys: {"network_dim": facts.get("lora_rank") or None}),
        dropout("network_dropout"),
        fixed("optimizer_type", "fused_backward_pass", optimizer=_musubi_optimizer),
        row("compile", "compile", kind="flag", off=False, add=False),
        fixed(encoders="cached"),
    ),
)  # fmt: skip


OPTIMIZERS = {
    "adamw_bf16": "stable-adamw", "optimi-adamw": "stable-adamw", "optimi-stableadamw": "stable-adamw",
    "adamw_schedulefree": "schedule-free-adamw", "torch-adamw": "adamw", "torch-adam": "adamw", "torch-adafactor": "adafactor",
    "bnb-adamw": "adamw-bnb-32bit", "bnb-adamw8bit": "adamw-8bit", "bnb-adamw-paged": "paged-adamw-32bit",
    "bnb-adamw8bit-paged": "paged-adamw-8bit", "ao-adamw8bit": "adamw-torchao-8bit", "ao-adamw4bit": "adamw-4bit",
    "ao-adamfp8": "adamw-fp8", "ao-adamwfp8": "adamw-fp8", "bnb-lion": "lion-bnb-32bit", "bnb-lion8bit": "lion-8bit",
    "bnb-lion-paged": "paged-lion-32bit", "bnb-lion8bit-paged": "paged-lion-8bit", "soap": "soap", "torch-sgd": "sgd",
}  # fmt: skip
"""SimpleTuner's words; those of 16 bits make up for what rounding loses."""
ENVIRONMENT = {
    "dataloader_config": "data_backend_config", "model_name": NAME, "use_gradient_checkpointing": "gradient_checkpointing",
    "training_num_processes": "num_processes", "training_num_machines": "num_machines", "trainer_dynamo_backend": "dynamo_backend",
    "training_dynamo_backend": "dynamo_backend", "training_seed": "seed", "num_epochs": "num_train_epochs",
    "max_num_steps": "max_train_steps", "lr_schedule": "lr_scheduler", "hub_model_name": "hub_model_id",
    "checkpointing_limit": "checkpoints_total_limit", "checkpointing_steps": "checkpoint_step_interval",
    "validation_steps": "validation_step_interval", "resume_checkpoint": "resume_from_checkpoint",
}  # fmt: skip
"""Variables that are called otherwise than the options."""


def _spelled(document: Document) -> tuple[str, list[tuple[str, str]]]:
    """The options of a configuration under their names: with or without dashes, or as variables."""
    plain = {name: name.lstrip("-").replace("-", "_").lower() for name in document.names()}
    return "", [
        (name, ENVIRONMENT.get(word, word)) for name, word in plain.items() if ENVIRONMENT.get(word, word) != name
    ]


def _tuned(keys: Keys) -> str | None:
    family, flavour = (keys.word("model_family") or "").lower(), (keys.word("model_flavour") or "").lower()
    flavours: dict[str, str] = read_table("diffusion.toml")["simpletuner"].get(family, {"": ""})
    usual = next((model for word, model in flavours.items() if word and word in flavour), flavours[""])
    return usual or None if flavour else named(keys, said(keys, NAME), usual, f"--model_family {family}")


def _side(one: dict[str, Any], side: float, way: str) -> int:
    size, way = one.get("resolution", side), str(one.get("resolution_type", way))
    size = float(size) if isinstance(size, int | float) and 0 < size < 20_000 else side
    return max(1, round((math.sqrt(size) * 1000 if way == "area" else size) / ALIGNED)) * ALIGNED


def _pixels(keys: Keys) -> Facts:
    """Squares of the largest set of data (`--data_backend_config`), which says its own size, or of `--resolution`."""
    side, way = keys.real("resolution") or 1024, keys.word("resolution_type") or "pixel_area"
    text = beside(said(keys, "data_backend_config") or "", keys)
    try:
        sets = json.loads(text or "[]")
    except ValueError as error:
        raise keys.wrong("data_backend_config", f"is no JSON: {error}") from None
    pictures = [one for one in sets if isinstance(one, dict) and one.get("dataset_type", "image") in ("image", "video")]
    sizes = []
    for one in pictures or [{}]:
        video = one.get("video") if one.get("dataset_type") == "video" else None
        frames = _number(video.get("num_frames"), 125) if isinstance(video, dict) else 1
        sizes.append((frames, _side(one, side, way)))
    frames, largest = max(sizes, key=lambda size: size[0] * size[1] ** 2)
    return {"video": f"{frames}x{largest}x{largest}"} if frames > 1 else {"pictures": f"1x{largest}x{largest}"}


def _trained(keys: Keys) -> Facts:
    """16 bits throughout, unless the precision is none; adapters beside attention's matrices."""
    word = keys.choice("mixed_precision", PRECISIONS) or "bf16"
    facts: Facts = {"precision": "fp32" if word == "fp32" else f"{word}-pure", "lora_rank": 0}
    if (keys.word("model_type") or "full") != "lora":
        return facts
    if keys.word("lora_type") == "lycoris":
        keys.note(
            "lora_type", "has adapters that another file says, and LoRA's are counted", parts="gradients optimizer"
        )
    stated = (keys.word("base_model_precision") or "no_change").lower()
    if stated != "no_change":
        share = 0.75 if re.search(r"int[2-4]|nf4|fp4", stated) else 0.5
        keys.note("base_model_precision", "keeps the frozen weights in fewer bits", "saves", "weights", share)
    usual = read_table("diffusion.toml")["simpletuner_targets"].get(
        keys.word("model_family"), "to_k,to_q,to_v,to_out.0"
    )
    chosen = keys.words("peft_lora_target_modules")
    return facts | {
        "lora_rank": keys.whole("lora_rank") or 16,
        "lora_targets": ",".join(chosen) if chosen else usual,
        "lora_dtype": HALVES.get(word, "float32"),
    }


def _uncached(keys: Keys) -> str:
    return STAYING[bool(keys.flag("vae_cache_disable")), bool(keys.flag("text_cache_disable"))]


def _named_optimizer(keys: Keys) -> str:
    name = (keys.word("optimizer") or "adamw_bf16").lower()
    return OPTIMIZERS[name] if name in OPTIMIZERS else optimizer(keys, name)


SIMPLETUNER = Dialect(
    name="simpletuner", title="SimpleTuner", versions="SimpleTuner 1.0 - 4.0", syntaxes=("json", "toml"), renames=_spelled,
    blank={"json": '{\n  "--model_family": "flux",\n  "--data_backend_config": "config/multidatabackend.json"\n}\n',
           "toml": 'model_family = "flux"\ndata_backend_config = "config/multidatabackend.json"\n'},
    ideas=(
        processes(argv=False),
        Idea(keys=(NAME, "model_family", "model_flavour"), facts=("model",), read=lambda keys: {"model": _tuned(keys)},
             write=lambda facts, keys: {NAME: facts.get("model") or None}),
        Idea(keys=names_in("resolution resolution_type data_backend_config"), facts=("pictures", "video"), read=_pixels,
             write=lambda facts, keys: {}),
        row("micro_batch", "train_batch_size", default=4),
        ACCUMULATION,
        row("recompute", "gradient_checkpointing", words={"true": "full", "false": "none"}, default="full"),
        Idea(keys=names_in("model_type lora_type lora_rank peft_lora_target_modules mixed_precision base_model_precision"),
             facts=names_in("precision lora_rank lora_targets lora_dtype"), read=_trained, write=lambda facts, keys: {
                 "model_type": "lora" if facts.get("lora_rank") else "full", "lora_rank": facts.get("lora_rank") or None}),
        dora("use_dora"),
        dropout("lora_dropout", lambda keys: 0.1 if keys.word("model_type") == "lora" else None),
        fixed("vae_cache_disable", "text_cache_disable", encoders=_uncached),
        fixed("optimizer", optimizer=_named_optimizer),
        row("zero", "fsdp_enable", words={"true": 3, "false": 0}, default=0, off=0),
    ),
)  # fmt: skip
