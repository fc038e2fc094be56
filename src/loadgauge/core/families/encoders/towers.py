"""Towers beside a language model, which are left out of it: their names in a config, and their parameters where it states them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loadgauge.core.definitions.model.model import Tower

KEYS = ("vision_config", "audio_config", "talker_config", "code2wav_config")
"""Where configs have them, at the top or in `thinker_config`."""
ALWAYS = ("vision_config",)
"""Those that a model of text and images has also where its config leaves them to the class."""


def towers(config: Mapping[str, Any], model_type: str, beside: bool) -> tuple[Tower, ...]:
    """Return the towers of a config. beside: whether its family reads the language model of a model of text and images.

    >>> towers({"audio_config": {"depth": 2}}, "gemma4", True)
    (Tower(name='vision_config', parameters=None), Tower(name='audio_config', parameters=None))
    """
    around = config.get("thinker_config")
    inner: dict[str, Any] = around if isinstance(around, dict) else {}
    stated: dict[str, Any] = {}
    for key in KEYS:
        place = f"thinker_config.{key}" if not config.get(key) and inner.get(key) else key
        value = config.get(key) or inner.get(key)
        if value or (beside and key in ALWAYS):
            stated[place] = value
    return tuple(Tower(name, _counted(name, value, config, model_type)) for name, value in stated.items())


def _counted(name: str, tower: Any, config: Mapping[str, Any], model_type: str) -> int | None:
    """The parameters of a tower and of what joins it to the language model; None where they are not known."""
    count = COUNTED.get(model_type) if name == "vision_config" else None
    if count is None or not isinstance(tower, dict):
        return None
    try:
        return count(tower, config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # sizes that are left to the class, or are none
        return None


def _blocks(depth: int, width: int, inner: int, *, matrices: int = 2, norm: int = 2) -> int:
    """`depth` blocks of attention and an MLP of two or three `matrices`, with biases, and two norms of `norm` vectors."""
    attention = 4 * width * width + 4 * width
    mlp = matrices * width * inner + (matrices - 1) * inner + width
    return depth * (attention + mlp + 2 * norm * width)


def _siglip(tower: dict[str, Any], config: Mapping[str, Any]) -> int:
    """Gemma 3's: SigLIP with positions for all patches, and a matrix and a norm that join it."""
    width, inner = tower["hidden_size"], tower["intermediate_size"]
    rows = (tower["image_size"] // tower["patch_size"]) ** 2
    patches = tower.get("num_channels", 3) * tower["patch_size"] ** 2 * width + width
    pooled = _blocks(1, width, inner) + width - 2 * width if tower.get("vision_use_head", True) else 0
    joined = width * config["text_config"]["hidden_size"] + width
    blocks = _blocks(tower["num_hidden_layers"], width, inner)
    return int(patches + rows * width + blocks + 2 * width + pooled + joined)


def _qwen(norm: int, matrices: int = 2, bias: bool = True) -> Callable[[dict[str, Any], Mapping[str, Any]], int]:
    """Qwen's from 2-VL on: blocks, and one merger of patches, from 3-VL on with others after single layers.

    norm: vectors of a norm; matrices: of an MLP; bias: of the patches' matrix
    """

    def count(tower: dict[str, Any], config: Mapping[str, Any]) -> int:
        first = "embed_dim" in tower  # Qwen2-VL
        width = tower["embed_dim" if first else "hidden_size"]
        inner = int(width * tower["mlp_ratio"]) if first else tower["intermediate_size"]
        out = tower["hidden_size" if first else "out_hidden_size"]
        volume = tower.get("in_channels", 3) * tower.get("temporal_patch_size", 2) * tower["patch_size"] ** 2
        merged = tower.get("spatial_merge_size", 2) ** 2 * width
        merger = merged * merged + merged + merged * out + out
        stem = (volume + bias) * width + tower.get("num_position_embeddings", 0) * width
        deep = len(tower.get("deepstack_visual_indexes", ())) * (merger + norm * merged)
        blocks = _blocks(tower["depth"], width, inner, matrices=matrices, norm=norm)
        return int(stem + blocks + merger + norm * width + deep)

    return count


COUNTED: dict[str, Callable[[dict[str, Any], Mapping[str, Any]], int]] = {
    "gemma3": _siglip,
    "qwen2_vl": _qwen(norm=2, bias=False),
    "qwen2_5_vl": _qwen(norm=1, matrices=3, bias=False),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen(norm=2)),
}
"""What counts the vision tower of a `model_type`, from its config and the whole one."""
