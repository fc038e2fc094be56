"""How a hybrid's layers are told apart, and how another mixer comes in the place of their attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from loadgauge.families import common as parts
from loadgauge.families.reader import Reader, shown
from loadgauge.spec.model import Block, LinearMixer, ModelSpec

RENAMED = {"mamba": "linear_attention", "attention": "full_attention"}
"""Older names of layer types, which transformers renames as it reads."""


def types_of(reader: Reader, count: int, linear: str = "linear_attention") -> tuple[str, ...] | None:
    """`layer_types`, each full_attention or the family's other kind; None where the config has none."""
    key = "layers_block_type" if reader.has("layers_block_type") and not reader.has("layer_types") else "layer_types"
    types = reader.texts(key)
    if types is None:
        return None
    if len(types) != count:
        raise reader.wrong(key, f"has {len(types)} entries for {count} layers")
    renamed = tuple(RENAMED.get(kind, kind) for kind in types)
    for kind in renamed:
        if kind not in ("full_attention", linear):
            raise reader.unmodelled(key, f"{shown(kind)} is not modelled for this family")
    return renamed


def rebuilt(spec: ModelSpec, change: Callable[[int, Block], Block]) -> ModelSpec:
    """The model with each layer's block changed, by its place."""
    blocks, pattern = parts.distinct([change(i, spec.blocks[kind]) for i, kind in enumerate(spec.pattern)])
    return msgspec.structs.replace(spec, blocks=blocks, pattern=pattern)


def interleaved(spec: ModelSpec, types: Sequence[str], mixer: LinearMixer) -> ModelSpec:
    """The model with `mixer` in place of the attention wherever the type is not full_attention."""

    def change(index: int, block: Block) -> Block:
        return block if types[index] == "full_attention" else msgspec.structs.replace(block, attention=mixer)

    return rebuilt(spec, change)


def language(prefix: str, *, classifier: bool = False) -> dict[str, str]:
    """transformers' classes of a family, most of which have none for classification."""
    names = parts.decoder_classes(prefix)
    return names if classifier else {name: use for name, use in names.items() if use != parts.CLASSIFY}
