"""Small models of every kind that transformers knows: the class's defaults, cut in depth, and what `small_models.toml` states."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from loadgauge.pytorch.capture.inputs.small import cut

HEADS = ("IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM")
"""Tables of transformers whose model types are tried; those with a picture first."""


@cache
def _stated() -> dict[str, Any]:
    """What is stated for each type."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


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
    stated = _stated().get(kind, {})
    try:
        tree = made().to_dict()
    except Exception:  # the defaults contradict themselves
        nested: dict[str, Any] = {}
        for key, value in stated.items():
            if "." in key:
                _put(nested, key, value)
        tree = made(**nested).to_dict()
    tree = cut(tree, stated.get("layers", layers))
    for key, value in stated.items():
        if key not in ("layers", "precision", "rows"):
            _put(tree, key, value)
    config = made.from_dict(tree)
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    return config


def precision(kind: str) -> str:
    """Return the precision that a type is tried in: that of most, unless another is stated."""
    return str(_stated().get(kind, {}).get("precision", "bf16-pure"))


def rows(kind: str) -> str:
    """Return how many rows its data chooses, as for `capture`, where a type is tried with all there are; "" else."""
    return str(_stated().get(kind, {}).get("rows", ""))


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for name in above:
        below = tree.get(name)
        tree[name] = tree = below if isinstance(below, dict) else {}
    tree[last] = value
