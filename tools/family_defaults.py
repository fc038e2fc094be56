"""Writes `data/family_defaults.json`: the defaults of transformers' configuration class of each family.

    python tools/family_defaults.py

One line a family, with the keys that its class declares and that can change memory or FLOPs. Needs transformers;
`tests/core/families/test_defaults.py` checks that the file is what this writes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from loadgauge.core.families.encoders.multimodal import TEXT_READERS
from loadgauge.core.families.hf import model_types
from loadgauge.core.families.reader import HARMLESS, HARMLESS_BEGINNINGS, HARMLESS_ENDINGS

FILE = Path(__file__).parents[1] / "src" / "loadgauge" / "data" / "family_defaults.json"
SAME_CLASS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
NO_CLASS = ("bailing_moe", "bailing_moe_v2", "dots_ocr", "kimi_k3", "minicpmv", "nemotron-nas")
"""Families whose configuration class is not in transformers: their configs state what matters."""
"""Families that transformers has no configuration class for, and the one whose class reads their configs."""
TOWERS = ("text_config", "vision_config")
"""Parts of a config that have an entry of their own, or are not read."""
SHARED = ("tie_word_embeddings", "is_decoder")
"""Keys that count although the base class declares them too."""


def declared(kind: Any) -> dict[str, Any]:
    """The keys that a configuration class declares, and their defaults; those of a part in an object of their own."""
    from transformers import PreTrainedConfig

    bases = PreTrainedConfig.__mro__
    own = {key for base in kind.__mro__ if base not in bases for key in vars(base).get("__annotations__", {})}
    shared = {field.name for field in dataclasses.fields(PreTrainedConfig)} - set(SHARED) - own
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = None if field.default is dataclasses.MISSING else field.default
        harmless = field.name in HARMLESS or field.name.startswith(HARMLESS_BEGINNINGS)
        if harmless or field.name.endswith(HARMLESS_ENDINGS) or field.name in {*shared, *TOWERS}:
            continue
        if value is None and dataclasses.is_dataclass(kind.sub_configs.get(field.name)):
            value = declared(kind.sub_configs[field.name])
        if value is None or isinstance(value, str | int | dict) or (isinstance(value, float) and math.isfinite(value)):
            defaults[field.name] = value
    return defaults


def family_defaults() -> dict[str, dict[str, Any]]:
    """The defaults of each `model_type` that is read, by key, as transformers' classes declare them."""
    from transformers import CONFIG_MAPPING

    families = sorted({*model_types(), *TEXT_READERS} - set(NO_CLASS))
    return {family: declared(CONFIG_MAPPING[SAME_CLASS.get(family, family)]) for family in families}


def as_json(defaults: dict[str, dict[str, Any]]) -> str:
    """The content of the file, one line a family."""
    lines = (f"{json.dumps(name)}: {json.dumps(values, sort_keys=True)}" for name, values in defaults.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(as_json(family_defaults()), encoding="utf-8")
