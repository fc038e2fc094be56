"""Towers of images and sounds that are left out: named always, and counted as transformers' classes count them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from command_line import typed
from loadgauge import estimate
from loadgauge.core.families import from_dict, models
from loadgauge.core.families.catalogue import config as shipped, model
from loadgauge.core.families.encoders.multimodal import WRAPPERS
from loadgauge.core.families.encoders.towers import HEARS, JOINED, LISTENING, SEES
from meta_models import NOT_COUNTED, everything, transformers

SEEING = [name for name in models() if shipped(name)["model_type"] in JOINED and "vision_config" in shipped(name)]


def as_written(kind: str) -> dict[str, Any]:
    """A class's defaults, each of them stated."""
    sees = {"vision_config": {}} if kind == "gemma4" else {}
    config = json.loads(transformers.CONFIG_MAPPING[kind](**sees).to_json_string(use_diff=False))
    return {key: value for key, value in config.items() if key != "architectures"}


CHANGED = {
    "siglip's head": ("gemma3", {"vision_use_head": False}),
    "patches": ("gemma3", {"image_size": 448, "patch_size": 14}),
    "one merger": ("qwen3_vl", {"deepstack_visual_indexes": []}),
    "wide merger": ("qwen3_vl", {"spatial_merge_size": 4, "out_hidden_size": 2048}),
    "no class token": ("llava", {"model_type": "siglip_vision_model", "vision_use_head": False}),
    "whole pictures": ("llava", {"model_type": "pixtral", "head_dim": 64}),
    "rows of heads": ("gemma4", {"num_key_value_heads": 3, "position_embedding_size": 640}),
    "gated": ("qwen2_5_vl", {"intermediate_size": 1000, "depth": 3}),
    "ratio": ("qwen2_vl", {"mlp_ratio": 3, "hidden_size": 128}),
}


def theirs(config: dict[str, Any]) -> int:
    """Parameters of the class that are not of its language model."""
    return sum(count for name, count in everything(config).items() if any(part in name for part in NOT_COUNTED))


@pytest.mark.parametrize("name", SEEING)
def test_shipped_towers(name: str) -> None:
    (tower,) = from_dict(shipped(name)).towers
    assert (tower.name, tower.parameters) == ("vision_config", theirs(shipped(name)))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "qwen2-audio-7b",
            "voxtral-mini-3b",
            "pixtral-12b",
            "internvl3-8b",
            "qwen3.5-9b",
            "aya-vision-8b",
            "internvl3-38b",
        ),
        *("ministral-3-8b", "paligemma2-3b", "kimi-vl-a3b", "qwen3.5-4b", "qwen2-vl-2b", "llava-interleave-qwen-0.5b"),
        *("granite-vision-3.2-2b", "lfm2-vl-450m"),
    ],
)
def test_towers_by_name(name: str) -> None:
    (tower,) = model(name).towers
    assert tower.parameters == theirs(shipped(name))


def test_a_model_may_see_and_hear() -> None:
    own = shipped("qwen2.5-omni-7b")
    seen, heard = model("qwen2.5-omni-7b").towers
    encoder = transformers.models.qwen2_5_omni.modeling_qwen2_5_omni.Qwen2_5OmniAudioEncoder
    with torch.device("meta"):
        theirs_built = encoder(transformers.Qwen2_5OmniAudioEncoderConfig(**own["audio_config"]))
    assert heard.parameters == sum(parameter.numel() for parameter in theirs_built.parameters())
    result = estimate("qwen2.5-omni-7b", seq_len=2048, audio=20, pictures="1x640x480")
    assert not result.towers_left_out
    assert result.params == estimate("qwen2.5-omni-7b", seq_len=2048).params + seen.parameters + heard.parameters


@pytest.mark.parametrize(
    "kind", sorted({*JOINED} - {"aya_vision", "dots_ocr", "minicpmv", "qwen3_omni_moe"})
)  # of 14 and 28 heads, and no class
def test_towers_of_class_defaults(kind: str) -> None:
    (tower,) = from_dict(as_written(kind), class_defaults=True).towers
    assert tower.parameters == theirs(as_written(kind))


@pytest.mark.parametrize("change", CHANGED)
def test_towers_of_other_sizes(change: str) -> None:
    kind, keys = CHANGED[change]
    config = as_written(kind)
    config["vision_config"] |= keys
    (tower,) = from_dict(config, class_defaults=True).towers
    assert tower.parameters == theirs(config)


@pytest.mark.parametrize(
    "kind", sorted({*WRAPPERS, "phi4_multimodal"} - {"kimi_k3", "dots_ocr", "minicpmv"})
)  # which have no class
def test_every_model_that_sees_names_what_is_left_out(kind: str) -> None:
    stated = from_dict(as_written(kind), class_defaults=True) if kind != "qwen3_omni_moe" else None
    for spec in (stated, from_dict(bare(kind), class_defaults=True)):
        if spec is not None:
            assert (HEARS if kind in LISTENING else SEES) in [tower.name for tower in spec.towers]


def bare(kind: str) -> dict[str, Any]:
    """A config that leaves its tower to the class."""
    head_dim = {"thinker_config": {"text_config": {"head_dim": 128}}} if kind == "qwen3_omni_moe" else {}
    return {"model_type": kind, **head_dim}


def test_a_tower_of_sizes_that_are_not_stated_has_no_number() -> None:
    for vision in ({"hidden_size": 1152}, {"hidden_size": "wide", "patch_size": 0}, [1]):
        (tower,) = from_dict({**shipped("gemma-3-4b"), "vision_config": vision}).towers
        assert (tower.name, tower.parameters) == ("vision_config", None)
    assert not from_dict(shipped("llama-3.1-8b")).towers


@pytest.mark.parametrize(
    "line",
    ["--gpu h100 --lora-rank 16", "--gpu h100 --lora-rank 16 --brief", "--gpu h100 --task dpo --lora-rank 8",
     "--gpu h100 --task generate", "--gpu h100 --task generate --brief"],
)  # fmt: skip
def test_what_a_verdict_leaves_out_stands_below_it(line: str) -> None:
    second = typed(f"estimate qwen3-vl-8b {line}").out.splitlines()[1]
    assert second.startswith("Left out: vision_config (576.39 M parameters, at least 1.07 GiB)")
    assert "Left out" not in typed(f"estimate qwen3-8b {line}").out


def test_a_card_that_holds_all_but_the_towers_weights_decides_nothing() -> None:
    said = {
        "weights": "bfloat16",
        "loss": "chunked",
        "optimizer": "adamw-fused",
        "qlora": True,
        "kbit_upcast": "none",
        "seq_len": 512,
    }
    memory = estimate("qwen3-vl-8b", **said).memory
    (tower,) = memory.unsaid
    assert tower.more == 2 * 576388336
    between = (memory.high + memory.widest.high) / 2
    found = estimate("qwen3-vl-8b", memory=f"{between / 2**30:.6f}GiB", **said).memory
    assert found.verdict == "depends"
    assert found.question is not None
    assert (found.question.flag, found.question.key) == ("vision_config", True)


def test_a_tower_may_be_trained_with_the_rest() -> None:
    """A parameter of the tower takes what a parameter of the language model does; beside adapters its weights alone."""
    ways = {}
    for lora in (None, 16):
        result = estimate("gemma-3-4b", gpu="h200-sxm-141gb", gpus=8, zero=1, seq_len=512, lora_rank=lora)
        things = [thing for thing in result.memory.unsaid if thing.flag == "vision_config"]
        ways[lora] = {other.value: other.change for thing in things for other in thing.others}, result
    (trained, result), (tower, _) = ways[None], ways[16]
    parts = [result.memory.largest(part).parts[part] for part in ("weights", "gradients", "optimizer")]
    (each,) = result.model.towers
    assert trained["trained whole"] == pytest.approx(each.parameters / result.params * sum(parts), rel=0.01)
    assert "trained whole" not in tower
