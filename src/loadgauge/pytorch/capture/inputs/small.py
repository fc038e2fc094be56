"""Models cut in depth: configs with fewer layers, of the same kinds."""

from typing import Any

DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth",
          "num_decoder_layers", "num_encoder_layers", "n_head_layers", "vision_layers", "num_blocks")  # fmt: skip
"""Keys of configs that say how many layers there are."""
TAKEN = ("intermediate_layers_indices",)
"""Keys of configs that list the layers whose outputs are taken: as many of a model that is cut."""


def shallow(config: Any, layers: int) -> Any:
    """Return a config object with so many layers; a list with an entry a layer keeps its kinds in turn."""
    return type(config).from_dict(cut(config.to_dict(), layers))


def cut(tree: dict[str, Any], layers: int) -> dict[str, Any]:
    """Set the depth of a config, given as nested keys, to `layers` in place, and return it."""
    old = {tree[key] for key in DEPTHS if isinstance(tree.get(key), int)}
    for key, value in tree.items():
        if key == "per_layer_config" and isinstance(value, dict):
            tree[key] = {at: own for at, own in value.items() if int(at) < layers}
        elif isinstance(value, dict):
            cut(value, layers)
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
