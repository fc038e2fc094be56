"""`--layers`: every shipped type takes another number of layers, and each list with an entry a layer follows."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.families import models
from loadgauge.core.families.catalogue import config
from loadgauge.pytorch.trace.programs.target import config_object, with_layers
from loadgauge.pytorch.trace.transformers_api import text_config
from meta_models import CALLED_OTHERWISE, NO_CLASS

PER_TYPE = {config(name)["model_type"]: name for name in models()}
READ = sorted(set(PER_TYPE) - NO_CLASS - set(CALLED_OTHERWISE))


def shipped(model_type: str) -> Any:
    """transformers' configuration object of a shipped model of a type."""
    return config_object(config(PER_TYPE[model_type]), model_type)


def lists(own: Any, count: int) -> dict[str, list[Any]]:
    """The lists of a config that have an entry a layer, stored or derived."""
    derived = {key: getattr(own, key, None) for key in ("layer_types", "layers_block_type")}
    every = {**vars(own), **derived, "architectures": None}
    return {key: value for key, value in every.items() if isinstance(value, list) and len(value) == count > 2}


@pytest.mark.parametrize("model_type", READ)
def test_all_lists_with_an_entry_a_layer_follow(model_type: str) -> None:
    whole = text_config(shipped(model_type))
    before = lists(whole, whole.num_hidden_layers)
    for layers in (2, whole.num_hidden_layers + 4):
        own = text_config(with_layers(shipped(model_type), layers))
        assert own.num_hidden_layers == layers
        for key, value in before.items():
            now = getattr(own, key)
            assert len(now) == layers, key
            assert now[: len(value)] == value[:layers], key


def test_types_with_derived_and_with_several_lists_are_among_them() -> None:
    """The lists of these four are properties; that of Gemma 4 has sizes beside it."""
    kinds = {"bamba", "falcon_h1", "jamba", "mamba2"}
    assert kinds <= set(READ)
    for kind in kinds:
        own = text_config(shipped(kind))
        assert lists(own, own.num_hidden_layers), kind
    own = text_config(with_layers(shipped("gemma4"), 42 * 3))
    wide = {number for number, kind in enumerate(own.layer_types) if kind == "full_attention"}
    assert {number for number in range(42 * 3) if own.per_layer_config[number].head_dim == 512} == wide


def test_a_number_that_a_class_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^layers: 3 are not possible: longcat_flash has its layers in groups$"):
        with_layers(shipped("longcat_flash"), 3)
