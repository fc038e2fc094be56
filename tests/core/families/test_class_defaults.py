"""The config of every class that transformers has, as it writes it: read, or refused in one line, never a defect."""

from __future__ import annotations

import json
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from loadgauge.core.base.errors import ConfigError, Error, NotModelled  # noqa: E402
from loadgauge.core.estimate.states.parameters import parameters  # noqa: E402
from loadgauge.core.families import from_dict, model_types  # noqa: E402
from meta_models import total_size  # noqa: E402

CONTRADICT = {"gemma4_assistant", "nougat"}
"""Classes whose own defaults transformers refuses."""
INCOMPLETE = {"deepseek_v2", "dots1", "lfm2_moe", "qwen3_omni_moe"}
"""Families whose class defaults make no model that runs: a size is null, or heads do not divide."""


def written(kind: str) -> list[dict[str, Any]]:
    """What transformers writes of a class's defaults: whole, and its language model's part."""
    config = transformers.CONFIG_MAPPING[kind]()
    parts = [config]
    if kind not in ("musicgen", "musicgen_melody"):  # two language models
        parts.append(config.get_text_config())
    return [json.loads(part.to_json_string(use_diff=False)) for part in parts]


@pytest.mark.long
def test_every_class_is_read_or_refused_in_one_line() -> None:
    answered, refused = set(), {}
    for kind in set(transformers.CONFIG_MAPPING.keys()) - CONTRADICT:
        for config in written(kind):
            try:
                from_dict(config, "config.json")
            except Error as refusal:
                refused[kind] = str(refusal)
            else:
                answered.add(config["model_type"])
    assert all(text.startswith("config.json: ") and "\n" not in text for text in refused.values()), refused
    assert set(model_types()) & set(transformers.CONFIG_MAPPING.keys()) - INCOMPLETE <= answered


WIDE = {"head_dim": 128}
FEW = {"num_key_value_heads": 8}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 2},
        {"num_hidden_layers": 12, "per_layer_config": {"5": WIDE, "11": WIDE}},
        {"num_hidden_layers": 12, "per_layer_config": {"05": FEW, "11": FEW}},
        {"num_hidden_layers": 12, "per_layer_config": {}},
        {"num_hidden_layers": 120, "global_head_dim": 1024},
    ],
)
def test_gemma_4_as_its_class_writes_it(change: dict[str, Any]) -> None:
    """Layers that see all keys are wider; the class writes them by their index, "05" of 12 and "005" of 120."""
    made = transformers.CONFIG_MAPPING["gemma4_text"](**change)
    for config in (json.loads(made.to_json_string(use_diff=False)), {"model_type": "gemma4_text", **change}):
        config["architectures"] = ["Gemma4ForCausalLM"]
        assert parameters(from_dict(config, class_defaults=True)).total == total_size(config)


@pytest.mark.parametrize(
    ("layers", "kind", "message"),
    [
        ({"30": WIDE}, ConfigError, "per_layer_config.30: is not one of layers 0 to 29"),
        ({"five": WIDE}, ConfigError, "per_layer_config.five: is not one of layers 0 to 29"),
        ({"5": 3}, ConfigError, "per_layer_config.5: must be a JSON object"),
        ({"5": {"head_dim": None}}, ConfigError, "per_layer_config.5.head_dim: must be a whole number"),
        ({"5": {"num_key_value_heads": 3}}, ConfigError, "per_layer_config: 3 does not divide 8 heads"),
        ({"5": {"intermediate_size": 3}}, NotModelled, "per_layer_config.5.intermediate_size: layers that differ"),
    ],
)
def test_layers_of_gemma_4_that_cannot_be_read(layers: dict[str, Any], kind: type[Error], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        from_dict({"model_type": "gemma4_text", "per_layer_config": layers}, class_defaults=True)
