"""Whatever comes as a config: a model that holds together, or one of the two errors, in one line."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from hypothesis import HealthCheck, given, settings, strategies as st

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.model.model import Attention, ModelSpec
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families import from_dict, model_types, models
from loadgauge.core.families.hf import decode


def shipped(name: str) -> dict[str, Any]:
    """A config of the catalogue, as it is in the file."""
    text = resources.files("loadgauge").joinpath(f"data/models/{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(1, 64) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
BASES = sorted({shipped(name)["model_type"]: name for name in models()}.values())
"""One config of each family in the catalogue."""
KEYS = sorted(
    {key for name in BASES for key in shipped(name)}
    | {
        "layer_types",
        "num_labels",
        "id2label",
        "use_sliding_window",
        "is_decoder",
        "text_config",
        "head_dim",
        "n_inner",
        "rotary_dim",
        "rope_parameters",
        "mlp_layer_types",
        "moe_layers",
        "num_nextn_predict_layers",
    }
)


def read_or_refuse(config: object) -> None:
    """Reads a config; a model must hold together, and an error must be one line of the two kinds."""
    try:
        spec = from_dict(config, "config.json")
    except (ConfigError, NotModelled) as error:
        message = str(error)
    else:
        message = ""
        holds_together(spec)
        try:
            assert 0 < parameters(spec).active <= parameters(spec).total
        except NotModelled as error:
            message = str(error)
    assert "\n" not in message
    assert len(message) < 1000


def holds_together(spec: ModelSpec) -> None:
    """What every model has."""
    assert spec.hidden_size >= 1
    assert spec.vocab_size >= 1
    assert set(spec.pattern) == set(range(len(spec.blocks)))
    for block in spec.blocks:
        if isinstance(block.attention, Attention):
            assert block.attention.num_attention_heads % block.attention.num_key_value_heads == 0
        assert 0 <= block.dropout <= 1


@given(ANYTHING | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), ANYTHING))
def test_any_json_is_read_or_refused(config: object) -> None:
    read_or_refuse(config)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(BASES),
    st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=3),
    st.sets(st.sampled_from(KEYS), max_size=4),
    st.sampled_from([*model_types(), None]),
)
def test_any_mutation_is_read_or_refused(
    base: str, changes: dict[str, Any], dropped: set[str], model_type: str | None
) -> None:
    config = {key: value for key, value in shipped(base).items() if key not in dropped}
    if model_type is not None:
        config["model_type"] = model_type
        config.pop("architectures", None)
    read_or_refuse({**config, **changes})


@given(st.binary(max_size=200) | st.integers(0, 400).map(lambda n: json.dumps(shipped("llama-7b")).encode()[:n]))
def test_any_bytes_are_decoded_or_refused(content: bytes) -> None:
    try:
        config = decode(content, "config.json")
    except ConfigError:
        return
    read_or_refuse(config)
