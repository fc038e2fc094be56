"""A config that does not state a size: each one that a default stands in for is named, and the largest are asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.families import from_dict, model_types, models
from loadgauge.core.families.catalogue import config
from loadgauge.core.families.reader import ESSENTIAL

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip
NEEDED = {"lfm2_moe": {"layer_types": ["conv"] * 32}}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in LLAMA.items() if name != key}


def test_a_config_that_states_all_sizes_names_none() -> None:
    assert from_dict(LLAMA).defaults == ()


@pytest.mark.parametrize(
    ("key", "size"),
    [
        ("num_attention_heads", 32), ("intermediate_size", 11008), ("vocab_size", 32000),
        ("max_position_embeddings", 2048), ("num_key_value_heads", 4),
    ],
)  # fmt: skip
def test_each_missing_size_is_named_with_the_default_taken(key: str, size: int) -> None:
    assert from_dict(without(key)).defaults == ((key, size),)


def test_the_text_tower_and_the_experts_of_a_config_are_named_by_their_place() -> None:
    tower = {"model_type": "llava", "text_config": without("vocab_size")}
    assert from_dict(tower).defaults == (("text_config.vocab_size", 32000),)
    mixtral = dict(from_dict({**LLAMA, "model_type": "mixtral"}).defaults)
    assert {"num_local_experts": 8, "num_experts_per_tok": 2}.items() <= mixtral.items()


CLASSLESS = {"bailing_moe", "bailing_moe_v2", "deepseek_v2", "dots1", "kimi_k2", "nemotron-nas"}


@pytest.mark.parametrize("model_type", sorted(set(model_types()) - CLASSLESS))
def test_no_family_guesses_its_hidden_size_or_its_number_of_layers(model_type: str) -> None:
    with pytest.raises(ConfigError, match="is missing; state it") as caught:
        from_dict({"model_type": model_type, **NEEDED.get(model_type, {})})
    assert "\n" not in str(caught.value)


def test_no_published_config_leaves_them_out() -> None:
    """And without any one of them, it is refused."""
    for name in models():
        published = config(name)
        from_dict(published)
        inner = published.get("text_config", published)
        for key in sorted(ESSENTIAL & inner.keys()):
            less = {other: value for other, value in inner.items() if other != key}
            if key == "num_hidden_layers" and published["model_type"] == "nemotron_h":
                continue  # The pattern of its blocks says how many there are.
            with pytest.raises(ConfigError, match="is missing"):
                from_dict({**published, "text_config": less} if inner is not published else less)


def test_the_command_names_them_and_asks(tmp_path: Path) -> None:
    place = tmp_path / "config.json"
    place.write_text(json.dumps(without("vocab_size")))
    told = typed(f"estimate {place}")
    assert told.code == 0
    assert "vocab_size 32000 (not in the config: llama's default)" in " ".join(told.out.split())
    answer = document(f"estimate {place}")
    assert answer["assumed"]["vocab_size"] == "32000 (not in the config: llama's default)"
    assert answer["model"]["defaults"] == {"vocab_size": 32000}
    place.write_text('{"model_type": "llama"}')
    told = typed(f"estimate {place}")
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert "hidden_size: is missing" in told.err


def test_a_family_without_a_class_does_without_its_longest_sequence() -> None:
    """It changes no weight, and transformers has no default for it."""
    less = {key: value for key, value in config("ling-lite").items() if key != "max_position_embeddings"}
    read, whole = from_dict(less), from_dict(config("ling-lite"))
    assert (read.max_position_embeddings, whole.max_position_embeddings) == (None, 16384)
    assert (read.blocks, read.pattern) == (whole.blocks, whole.pattern)


def test_layers_that_a_search_made_are_asked_for() -> None:
    less = {key: value for key, value in config("nemotron-super-49b").items() if key != "block_configs"}
    with pytest.raises(
        ConfigError, match=r'^block_configs: is missing; add .*"ffn_mult": 5.25}} for each of 80 layers$'
    ):
        from_dict(less)
