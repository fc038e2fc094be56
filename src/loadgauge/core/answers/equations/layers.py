"""The subject of an equation: a layer of the papers with letters for all its sizes, or a real model's layers.

SymPy is imported by `letter`, when the first size is asked for.
"""

from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, Size, closest
from loadgauge.core.definitions.model.model import Attention, Block, LatentAttention, Mlp, ModelSpec, Moe
from loadgauge.core.estimate.symbols import Symbolic, letter, symbolic_block, symbolic_ends
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.families.reference import deepseek_block, gpt_model, llama_block, llama_model, mixtral_block

LAYERS = {"gpt": "gpt", "llama": "llama", "mixtral": "mixtral", "moe": "mixtral", "deepseek": "deepseek",
          "mla": "deepseek"}  # fmt: skip
"""The layers with every size open, by the names they go under."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A model with letters for its sizes.

    model: the real one, or a stand-in for an open layer
    blocks: each distinct layer, and the numbers behind its letters (none where all is open)
    counts: how many of each the model has
    ends: the model as its embedding and head see it
    kinds: how many of the blocks have an equation of their own
    """

    name: str
    model: ModelSpec
    blocks: tuple[Symbolic, ...]
    counts: tuple[Size, ...]
    ends: Symbolic
    kinds: int
    is_open: bool

    @property
    def has_experts(self) -> bool:
        """Return whether any of its layers has experts."""
        return any(isinstance(block.mlp, Moe) for block in self.model.blocks)

    @property
    def exchanged_over_cp(self) -> str:
        """Return how context-parallel ranks exchange, by the mixers of its layers."""
        mixers = [block.attention for block in self.model.blocks if block.attention is not None]
        attends = {isinstance(mixer, Attention | LatentAttention) for mixer in mixers}
        ways = {True: "keys and values go around a ring", False: "recurrences exchange tokens for heads (all-to-all)"}
        return ", ".join(ways[attention] for attention in sorted(attends, reverse=True))


def subject(layer: str, tp: int = 1) -> Subject:
    """Return the layer or model of that name, with letters. `tp`: ranks, where they are a number (`symbolic_block`).

    >>> subject("moe").blocks[0].what.mlp.num_experts
    E
    """
    if layer in LAYERS:
        return _open(LAYERS[layer])
    try:
        model = find_model(layer)
    except ConfigError:
        close = closest(layer, LAYERS, cutoff=0.75)
        if not close or not layer.isalpha():
            raise
        raise ConfigError(f"no layer {layer!r}; did you mean {close[0]}?") from None
    counts: tuple[Size, ...] = model.layer_counts()
    ends = symbolic_ends(model)
    if len(counts) == 1:
        # Layers that differ get their numbers of each kind, not a letter.
        ends = Symbolic(ends.what, ends.numbers | {"l": counts[0]})
        counts = (letter("l"),)
    blocks = tuple(symbolic_block(block, model.hidden_size, tp) for block in model.blocks)
    return Subject(
        name=model.name, model=model, blocks=blocks, counts=counts, ends=ends, kinds=len(blocks), is_open=False
    )


def letters(names: str) -> tuple[Any, ...]:
    """Return the symbols of letters that are named with spaces between them."""
    return tuple(letter(name) for name in names.split())


def _open(name: str) -> Subject:
    layers = letter("l")
    hidden_size, heads, vocabulary = letters("h a v")
    if name == "gpt":
        model = gpt_model(1, hidden_size, heads, vocabulary, positions=letter("n"))
        return _subject(name, model, model.blocks, (layers,))
    model = llama_model(1, hidden_size, heads, vocabulary, intermediate_size=letter("f"))
    if name == "llama":
        return _subject(name, model, (llama_block(*letters("h a k d f")),), (layers,))
    if name == "mixtral":
        return _subject(name, model, (mixtral_block(*letters("h a k d E K f_e")),), (layers,))
    block = deepseek_block(*letters("h a q m d_n d_r d_v E K f_e f_s"))
    # The first layers have an MLP; the layer that is asked about is one of the others.
    dense = msgspec.structs.replace(block, mlp=Mlp(intermediate_size=letter("f")))
    return _subject(name, model, (block, dense), (layers - letter("l_d"), letter("l_d")))


def _subject(name: str, model: ModelSpec, blocks: tuple[Block, ...], counts: tuple[Size, ...]) -> Subject:
    model = msgspec.structs.replace(model, name=name, blocks=blocks, pattern=tuple(range(len(blocks))))
    symbolic = tuple(Symbolic(block, {}) for block in blocks)
    return Subject(
        name=name, model=model, blocks=symbolic, counts=counts, ends=Symbolic(model, {}), kinds=1, is_open=True
    )
