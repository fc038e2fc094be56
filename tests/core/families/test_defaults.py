"""What a config leaves out and parameters do not show: dropout, activation, windows, rotation and positions."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from loadgauge.core.definitions.model.model import Attention, LatentAttention, Moe
from loadgauge.core.families import from_dict
from loadgauge.core.families.reader import class_defaults
from meta_models import bare, classed, transformers_config

KINDS = [
    kind
    for kind in classed()
    if all(
        isinstance(block.attention, Attention | LatentAttention)
        for block in from_dict(bare(kind), class_defaults=True).blocks
    )
]
"""Families all of whose blocks attend. The mixers of the others have tests of their own."""

NO_KEY: dict[str, dict[str, object]] = {
    "bloom": {"activation": "gelu_pytorch_tanh"},  # of its own making, with the same arithmetic
    "mpt": {"activation": "gelu"},
    "dbrx": {"activation": "silu"},  # nested
    "gpt_oss": {"activation": "clamped_swiglu"},  # hidden_act is silu, but the class has its own
    "lfm2": {"activation": "silu"},
    "lfm2_moe": {"activation": "silu"},
    "lfm2_vl": {"activation": "silu"},
}
"""What transformers' class does without a key of its config."""

LOCAL_ROTATE = (
    "muse_glimmer",
    "afmoe",
    "aya_vision",
    "cohere2",
    "cohere2_vision",
    "exaone4",
    "exaone4_5",
    "exaone_moe",
)
"""Families whose layers rotate where they have a window."""

NOT_IN_THE_CLASS = {
    "phi3": "embd_pdrop",
    "mpt": "emb_pdrop",
    "dbrx": "emb_pdrop",
    "electra": "embedding_dropout",
}
"""Keys of a dropout that the class does not have."""


def first(config: Any, *names: str, default: object = None) -> Any:
    """The first of these attributes that is there."""
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)


def read(model_type: str) -> tuple[Any, Any]:
    """Both readings of the smallest config."""
    return from_dict(bare(model_type), class_defaults=True), transformers_config(bare(model_type)).get_text_config()


def test_the_defaults_are_those_of_the_configuration_classes() -> None:
    """`data/family_defaults.json` is what its tool writes with the installed transformers."""
    tool = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "family_defaults.py"))
    written = tool["family_defaults"]()
    assert {model_type: class_defaults(model_type) for model_type in written} == written
    assert tool["FILE"].read_text(encoding="utf-8") == tool["as_json"](written)


def activation(model_type: str, ours: Any, theirs: Any) -> None:
    names = ("activation_function", "hidden_activation", "hidden_act", "activation")
    expected = NO_KEY.get(model_type, {}).get("activation") or first(theirs, *names)
    assert ours.blocks[-1].mlp.activation == expected
    for block in ours.blocks:
        if isinstance(block.mlp, Moe) and block.mlp.shared is not None:
            assert block.mlp.shared.activation == expected


def dropout(model_type: str, ours: Any, theirs: Any) -> None:
    block = ours.blocks[-1]
    hidden = {"hidden_dropout_prob", "hidden_dropout", "dropout"}
    assert block.attention.dropout == first(
        theirs, "attn_pdrop", "attention_probs_dropout_prob", "attention_dropout", default=0.0
    )
    names = {"embd_pdrop", "embed_dropout", "embedding_dropout", *hidden} - {NOT_IN_THE_CLASS.get(model_type, "")}
    if model_type in ("falcon", "persimmon", "stablelm", "opt"):
        names -= hidden  # their embeddings are not dropped
    assert ours.embedding_dropout == first(theirs, *sorted(names), default=0.0)
    if model_type == "modernbert":
        names = {"attention_dropout"}  # the output of attention by the rate of its probabilities
    elif model_type == "mpt":
        names = set()  # by the rate of attention, which is nested
    else:
        names = {"resid_pdrop", "residual_dropout", "resid_dropout", *hidden}
    assert block.dropout == first(theirs, *sorted(names), default=0.0)


def positions(model_type: str, ours: Any, theirs: Any) -> None:
    longest = first(theirs, "max_position_embeddings", "n_positions", "max_seq_len")
    spare = 2 if model_type in ("opt", "biogpt") else 0  # rows that no token reaches
    assert (ours.learned_positions or ours.max_position_embeddings) == (None if longest is None else longest + spare)


def layer_types(model_type: str, theirs: Any) -> list[str]:
    """The type of each layer, where a class has it as a key or does the same to all layers."""
    if model_type == "gpt_neo":
        return ["sliding_attention" if kind == "local" else "full_attention" for kind in theirs.attention_layers]
    if first(theirs, "layer_types") is not None:
        return list(theirs.layer_types)
    kind = "sliding_attention" if first(theirs, "sliding_window") else "full_attention"
    return [kind] * theirs.num_hidden_layers


def windows(model_type: str, ours: Any, theirs: Any) -> None:
    window = first(theirs, "attention_chunk_size", "window_size", "sliding_window")
    kinds = layer_types(model_type, theirs)
    seen = [None if kind == "full_attention" else window for kind in kinds]
    if model_type == "modernbert":
        seen = [keys and 2 * keys + 1 for keys in seen]  # theirs is the half of it
    assert [ours.blocks[index].attention.sliding_window for index in ours.pattern] == seen


def rotation(model_type: str, ours: Any, theirs: Any) -> None:
    """Which layers rotate, and how much of each head."""
    angles = first(theirs, "rope_parameters", default={})
    kinds = layer_types(model_type, theirs)
    rotates = [bool(angles) or first(theirs, "rotary_dim") is not None] * len(ours.pattern)
    if first(theirs, "no_rope_layers"):
        rotates = [bool(one) for one in theirs.no_rope_layers]
    elif model_type in LOCAL_ROTATE:
        rotates = [kind == "sliding_attention" for kind in kinds]
    blocks = [ours.blocks[index] for index in ours.pattern]
    if isinstance(blocks[0].attention, LatentAttention):
        assert {block.attention.qk_rope_head_dim for block in blocks} == {theirs.qk_rope_head_dim}
        return
    assert [block.attention.rotary for block in blocks] == rotates
    nested = next(iter(angles.values()), None) if angles else None
    factor = (nested if isinstance(nested, dict) else angles).get("partial_rotary_factor", 1.0)
    for block in blocks:
        if block.attention.rotary:
            stated = first(theirs, "rotary_dim") or int(block.attention.head_dim * factor)
            assert (block.attention.rotary_dim or block.attention.head_dim) == stated


@pytest.mark.parametrize("model_type", KINDS)
def test_what_parameters_do_not_show(model_type: str) -> None:
    ours, theirs = read(model_type)
    activation(model_type, ours, theirs)
    dropout(model_type, ours, theirs)
    positions(model_type, ours, theirs)
    windows(model_type, ours, theirs)
    rotation(model_type, ours, theirs)
