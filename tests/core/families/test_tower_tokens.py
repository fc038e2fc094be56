"""Tokens of pictures, against the arithmetic of transformers' own processors."""

from __future__ import annotations

import ast
import importlib
import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from loadgauge import Job, estimate
from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.model.model import Rule
from loadgauge.core.families.encoders.pictures import cut, frame, heard
from loadgauge.core.resolve.resolve import resolve_job

transformers = pytest.importorskip("transformers")

SIZES = ((1024, 768), (224, 224), (1920, 1080), (4000, 3000), (333, 777), (60, 45), (3000, 200), (641, 480))
NEXT = tuple((336 * a, 336 * b) for a, b in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)))
ONE_VISION = tuple((384 * a, 384 * b) for a in range(1, 7) for b in range(1, 7))


def of(model: str, name: str) -> Any:
    """Something of transformers' module, whose processors want neither pictures nor torchvision."""
    return getattr(importlib.import_module(f"transformers.models.{model}"), name)


def patches(model: str, name: str, **settings: Any) -> Callable[[int, int], Any]:
    made = of(f"{model}.image_processing_pil_{model}", f"{name}ImageProcessorPil")(**settings)
    return lambda width, height: made.get_number_of_image_patches(height, width, {})


def anyres(model: str, name: str, grids: Any, side: int, **settings: Any) -> Callable[[int, int], Any]:
    kind = of(f"{model}.processing_{model}", f"{name}Processor")
    mine = SimpleNamespace(image_processor=SimpleNamespace(image_grid_pinpoints=list(map(list, grids))), **settings)
    mine._get_unpadded_features = MethodType(kind._get_unpadded_features, mine)
    return lambda width, height: kind._get_number_of_features(mine, height, width, side, side)


def pixtral(width: int, height: int) -> int:
    resized = of("pixtral.image_processing_pil_pixtral", "get_resize_output_image_size")
    tall, wide = resized(np.zeros((height, width, 3)), size=(1540, 1540), patch_size=(28, 28))
    return int(tall // 28 * (wide // 28 + 1))


def gemma4(width: int, height: int) -> int:
    tall, wide = of("gemma4.image_processing_pil_gemma4", "get_aspect_ratio_preserving_size")(
        height, width, 16, 2520, 3
    )
    return int(tall * wide // 48**2)


def idefics3(width: int, height: int) -> tuple[int, int]:
    limits = {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}}
    tiles, rows, columns = patches("idefics3", "Idefics3", **limits)(width, height)
    return tiles, 169 + 3 + rows * ((169 + 2) * columns + 1)


def alone(model: str, *names: str) -> Any:
    """The last of some functions of a processor's file, which imports torchvision."""
    file = Path(transformers.__file__).parent / "models" / model / f"image_processing_{model}.py"
    parts = ast.parse(file.read_text("utf-8")).body
    parts += [method for kind in parts if isinstance(kind, ast.ClassDef) for method in kind.body]
    own = [part for part in parts if getattr(part, "name", "") in names]
    there: dict[str, Any] = {"math": math, "np": np, "lru_cache": lru_cache}
    exec(compile(ast.Module(own, []), str(file), "exec"), there)
    return there[names[-1]]


def kimi(width: int, height: int) -> int:
    _, (tall, wide) = alone("kimi_k25", "navit_resize")(height, width, 14, 2, 4096, 512)
    return int(tall * wide // 14**2)


def cohere2(width: int, height: int) -> tuple[int, int]:
    grid = alone("cohere2_vision", "get_all_supported_aspect_ratios", "get_optimal_tiled_canvas")
    tiles = int(np.prod(grid((height, width), (512, 512), 1, 12)))
    tiles += tiles > 1
    return tiles, 2 + tiles * (256 + 1)


def lfm2(width: int, height: int) -> tuple[int, int, int]:
    names = "_get_grid_layout", "_is_image_too_large", "smart_resize"
    functions = ("round_by_factor", "find_closest_aspect_ratio", "_target_ratios")
    own = type("Own", (), {name: alone("lfm2_vl", *functions, name) for name in ("_target_ratios", *names)})()
    wide, tall = own.smart_resize(height, width, 2, 64, 256, 16)
    whole = 2 + wide * tall // 32**2
    if not own._is_image_too_large(height, width, 256, 16, 2, 2.0):
        return 1, 1024, whole
    *_, tiles = own._get_grid_layout(height, width, 2, 10, 512)
    return tiles + 1, 1024, tiles * 257 + 1 + whole


def minicpmv(width: int, height: int) -> int:
    kind = of("minicpmv4_6.image_processing_pil_minicpmv4_6", "MiniCPMV4_6ImageProcessorPil")
    grid = kind.get_sliced_grid(None, (height, width), 9, 448)
    return 1 + (grid[0] * grid[1] if grid else 0)


LIMITS = {"shortest_edge": 3136, "longest_edge": 12845056}
TILES = {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 12, "crop_to_patches": True}
CASES: dict[str, tuple[Rule, Any, Callable[[int, int], Any]]] = {
    "qwen2_vl": (Rule(kind="area", patch=14, merge=2, low=3136, high=12845056), "patches",
                 patches("qwen2_vl", "Qwen2VL", size=LIMITS)),
    "glm4v": (Rule(kind="area", patch=14, merge=2, low=6272, high=4816896), "patches",
              patches("glm4v", "Glm4v", size={"shortest_edge": 12544, "longest_edge": 9633792})),
    "internvl": (Rule(kind="canvas", patch=14, merge=2, tile=448, low=1, high=12), "tiles",
                 patches("got_ocr2", "GotOcr2", **TILES)),
    "idefics3": (Rule(kind="split", patch=14, merge=2, tile=364, marks=3), ("tiles", "tokens"), idefics3),
    "mistral3": (Rule(kind="edge", patch=14, merge=2, high=1540), "tokens", pixtral),
    "minicpmv": (Rule(kind="slices", patch=14, tile=448, low=64, high=9), "tiles", minicpmv),
    "kimi_vl": (Rule(kind="native", patch=14, merge=2, low=512, high=4096), "patches", kimi),
    "cohere2_vision": (Rule(kind="fit", patch=16, merge=2, tile=512, high=12, marks=3), ("tiles", "tokens"), cohere2),
    "lfm2_vl": (Rule(kind="thumbs", patch=16, merge=2, tile=512, low=64, high=10, marks=2, each=1),
                ("tiles", "patches", "tokens"), lfm2),
    "gemma4": (Rule(kind="budget", patch=16, merge=3, high=280), "tokens", gemma4),
    "llava_next": (Rule(kind="anyres", patch=14, tile=336, grids=NEXT), "tokens",
                   anyres("llava_next", "LlavaNext", NEXT, 336, patch_size=14, num_additional_image_tokens=0)),
    "llava_onevision": (Rule(kind="anyres", patch=14, tile=384, high=9, grids=ONE_VISION), "tokens",
                        anyres("llava_onevision", "LlavaOnevision", ONE_VISION, 384, num_image_tokens=729,
                               vision_aspect_ratio="anyres_max_9")),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_a_picture_is_cut_as_its_processor_cuts_it(kind: str) -> None:
    rule, names, theirs = CASES[kind]
    for size in SIZES:
        found = cut(rule, *size)
        ours = tuple(getattr(found, name) for name in names) if isinstance(names, tuple) else getattr(found, names)
        assert ours == theirs(*size), size


def test_frames_are_not_cut_into_tiles() -> None:
    averaged = Rule(kind="anyres", patch=14, tile=384, pool=2, grids=ONE_VISION)  # as its processor's video tokens
    assert frame(averaged, 1024, 768).tokens == math.ceil(math.isqrt(729) / 2) ** 2
    assert frame(CASES["internvl"][0], 4000, 3000).tiles == 1
    assert frame(CASES["qwen2_vl"][0], 448, 448) == cut(CASES["qwen2_vl"][0], 448, 448)


@pytest.mark.parametrize("seconds", [0.5, 3.21, 10, 20, 29.99, 30, 71.4])
def test_a_sound_is_cut_as_its_tower_cuts_it(seconds: float) -> None:
    omni = of("qwen2_5_omni", "modeling_qwen2_5_omni")
    frames = torch.tensor([-(-round(16000 * seconds) // 160)])
    _, chunks = omni.chunk_and_pad_features(torch.zeros(8, int(frames)), frames, 100)
    ends = omni.get_audio_cu_seqlens(chunks)
    own = (ends[1:] - ends[:-1]).tolist()
    each = {"tiles": len(own), "patches": sum(own), "pairs": sum(side**2 for side in own)}
    assert heard(Rule(kind="chunks", patch=2, merge=2, tile=100), seconds) == (each, len(omni.get_pool_indices(frames)))
    if seconds <= 30:
        lengths = of("qwen2_audio", "modeling_qwen2_audio").Qwen2AudioEncoder._get_feat_extract_output_lengths(
            None, frames
        )
        _, tokens = heard(Rule(kind="padded", patch=2, merge=2, tile=3000), seconds)
        assert tokens == int(lengths[1])


@pytest.mark.thorough
def test_what_hears_is_what_runs(tmp_path: Path) -> None:
    """Parameters and FLOPs are those of the class; kept bytes but for the spectrum (and a mask's last 4 columns, to pad it)."""
    tower = {"d_model": 256, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 512}
    text = {"model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 1024, "max_position_embeddings": 2048}  # fmt: skip
    place = tmp_path / "config.json"
    place.write_text(json.dumps({"model_type": "qwen2_audio", "text_config": text, "audio_config": tower}))
    said = {"gpu": "h200", "seq_len": 1024, "audio": 20.0, "precision": "bf16-pure", "optimizer": "sgd"}
    ours = estimate(str(place), tower="trained", **said)
    captured = estimate(str(place), road="captured", **said)
    assert (ours.params, ours.flops.model) == (captured.params, captured.flops.model)
    kept = [result.memory.largest("activations").parts["activations"] for result in (ours, captured)]
    spectrum = 128 * 3000 * 4  # which processors make in float32, and captures in the dtype of weights
    assert kept[0] == pytest.approx(kept[1] + spectrum, rel=0.005)


VL = "qwen3-vl-8b"


def test_the_tower_is_in_every_number() -> None:
    """Its parameters are; what is frozen keeps nothing, adapters in it keep something, training it whole more."""
    alone = estimate(VL, seq_len=2048, lora_rank=16)
    (tower,) = alone.model.towers
    kept, times = [], []
    for how in ("frozen", "projector", "adapters", "trained"):
        seen = estimate(VL, seq_len=2048, lora_rank=16, pictures="1x640x480", tower=how)
        assert seen.params == alone.params + tower.parameters
        assert not seen.towers_left_out
        kept.append(seen.memory.largest("activations").parts["activations"])
        times.append(seen.flops.model)
    assert kept[0] == pytest.approx(alone.memory.largest("activations").parts["activations"], rel=1e-3)
    assert kept[0] < kept[1] < min(kept[2:])
    assert alone.flops.model < times[0] < times[1] < times[2] < times[3]


def test_a_job_is_resolved_again_with_the_model_it_made() -> None:
    setup = resolve_job(Job(VL, lora_rank=8, pictures="1x640x480", seq_len=1024))
    again = resolve_job(setup.job, setup.model)
    assert again.model == setup.model
    assert (
        resolve_job(setup.job.replace(pictures=None, lora_rank=None), setup.model).model.blocks
        == estimate(VL).model.blocks
    )


@pytest.mark.parametrize(
    ("error", "flags", "said"),
    [
        (ConfigError, {"pictures": "1x4000x3000"}, "are 11,750 tokens of each sequence, which has --seq-len 4,096"),
        (ConfigError, {"pictures": "large"}, "must be such as 2x1024x768"),
        (ConfigError, {"pictures": "1x9000x9"}, "one side is more than 200 times"),
        (ConfigError, {"tower": "frozen"}, "needs --pictures or --video"),
        (ConfigError, {"pictures": "1x640x480", "tower": "adapters"}, "needs --lora-rank"),
        (NotModelled, {"pictures": "1x640x480", "pp": 2}, "over pipeline stages"),
    ],
)
def test_what_pictures_cannot_be_says_what_is_wrong(error: type[Exception], flags: dict[str, Any], said: str) -> None:
    with pytest.raises(error, match=said):
        estimate(VL, **flags)


@pytest.mark.parametrize("model", ["qwen2-vl-7b", "qwen2.5-vl-7b"])
@pytest.mark.parametrize(("side", "tokens"), [(20, 4), (3584, 16_384), (8000, 16_384)])
def test_a_picture_has_from_4_to_16384_tokens(model: str, side: int, tokens: int) -> None:
    """As the model cards of Qwen2-VL and Qwen2.5-VL state of their processors' own limits."""
    setup = resolve_job(Job(model, gpu="h100-sxm5-80gb", pictures=f"1x{side}x{side}", seq_len=32768))
    assert f", {tokens:,} tokens" in setup.assumed["pictures of a sequence"]


@pytest.mark.parametrize(
    ("keys", "said", "why"),
    [
        (
            {"model_type": "whisper", "max_target_positions": 448},
            {"seq_len": 2048},
            "2048 is more than the model's 448",
        ),
        ({"model_type": "janus"}, {"video": "8x224x224"}, "a video in a captured model"),
    ],
)
def test_what_no_capture_answers_is_refused_before_it(
    keys: dict[str, Any], said: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadgauge.pytorch.capture.road.model_of", lambda *_: pytest.fail("it was captured"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(keys))
    with pytest.raises((ConfigError, NotModelled), match=why):
        estimate(str(file), **said)
