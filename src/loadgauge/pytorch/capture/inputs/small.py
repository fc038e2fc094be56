"""Small models of every kind that transformers knows: the class's defaults, cut in depth, and what `small.toml` states."""

from __future__ import annotations

from typing import Any

from loadgauge.core.base.package_data import read_table

DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth",
          "num_decoder_layers", "num_encoder_layers", "n_head_layers", "vision_layers", "num_blocks")  # fmt: skip
"""Keys of configs that say how many layers there are."""
TAKEN = ("intermediate_layers_indices",)
"""Keys of configs that list the layers whose outputs are taken: as many of a model that is cut."""
HEADS = ("IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM")
"""Tables of transformers whose model types are tried; those with a picture first."""


def model_types() -> dict[str, str]:
    """Return every model type of the installed transformers with a head of `HEADS`, and the first such head."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for head in HEADS:
        for kind in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES"):
            found.setdefault(kind, head)
    return dict(sorted(found.items()))


def small_config(kind: str, layers: int = 2) -> Any:
    """Return the config object of a small model of a type: its class's defaults, what is stated for it, and `layers` layers.

    A list with an entry a layer keeps its kinds in turn. Raises what transformers raises where it cannot be built.
    """
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    stated = read_table("capture/small.toml").get(kind, {})
    try:
        tree = made().to_dict()
    except Exception:  # the defaults contradict themselves
        nested: dict[str, Any] = {}
        for key, value in stated.items():
            if "." in key:
                _put(nested, key, value)
        tree = made(**nested).to_dict()
    tree = _cut(tree, stated.get("layers", layers))
    for key, value in stated.items():
        if key not in ("layers", "precision", "rows"):
            _put(tree, key, value)
    config = made.from_dict(tree)
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    return config


def shallow(config: Any, layers: int) -> Any:
    """Return a config object with so many layers; a list with an entry a layer keeps its kinds in turn."""
    return type(config).from_dict(_cut(config.to_dict(), layers))


def precision(kind: str) -> str:
    """Return the precision that a type is tried in: that of most, unless another is stated."""
    return str(read_table("capture/small.toml").get(kind, {}).get("precision", "bf16-pure"))


def rows(kind: str) -> str:
    """Return how many rows its data chooses, as for `capture`, where a type is tried with all there are; "" else."""
    return str(read_table("capture/small.toml").get(kind, {}).get("rows", ""))


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for name in above:
        below = tree.get(name)
        tree[name] = tree = below if isinstance(below, dict) else {}
    tree[last] = value


def _cut(tree: dict[str, Any], layers: int) -> dict[str, Any]:
    old = {tree[key] for key in DEPTHS if isinstance(tree.get(key), int)}
    for key, value in tree.items():
        if key == "per_layer_config" and isinstance(value, dict):
            tree[key] = {at: own for at, own in value.items() if int(at) < layers}
        elif isinstance(value, dict):
            _cut(value, layers)
        elif key in TAKEN and isinstance(value, list):
            tree[key] = [min(layer, layers - 1) for layer in value]
        elif key in DEPTHS and isinstance(value, int) and value > 1:
            tree[key] = layers
        elif isinstance(value, list) and len(value) in old and len(value) > 1 and key != "architectures":
            tree[key] = _kinds(value, layers)
    return tree


def _kinds(value: list[Any], layers: int) -> list[Any]:
    """As many entries as layers: the first ones, or where they lack a kind, one of each kind first."""
    try:
        kinds = list(dict.fromkeys(value))
    except TypeError:  # lists of lists
        kinds = value
    first = value[:layers]
    return first if all(kind in first for kind in kinds) else (kinds + first)[:layers]
