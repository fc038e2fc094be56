"""Parts of a model that mix tokens: attention behind the interface, and everything else that does.

Found by looking, not by name: the model runs on two short sequences, every layer and its parts are noted, and a part mixes
tokens when the gradient of its output at one position with respect to its input at another is not exactly zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from loadgauge.core.base.errors import NotModelled
from loadgauge.train.hooks import arguments, by_name
from loadgauge.train.layers.attention import MADE, NAMES, PROBES, Seen
from loadgauge.train.layers.masks import Reach, reach_of
from loadgauge.train.layers.mixers import Notes, leaves, token_dims

UNDERSTOOD = {
    *("dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "cache_position"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "deterministic"),
}
"""Arguments of an attention function that padding-free attention takes or may leave out."""

LENGTHS = (7, 5)
"""Tokens of the two short sequences a model is looked at with."""


@dataclass(frozen=True)
class Anatomy:
    """Attention layers behind the interface with what their tokens see, other mixers, every different reach of the masks
    the model makes, and the outputs of both sequences.
    """

    attention: dict[nn.Module, Reach]
    mixers: dict[nn.Module, Notes]
    reaches: tuple[Reach, ...]
    alone: tuple[Tensor, Tensor]


def whole(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside `model` (itself, or what an adapter wraps). Raises `NotModelled` without one."""
    model_part = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if model_part is None:
        raise NotModelled(f"{type(model).__name__} holds no transformers model")
    return model_part


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> type(backbone(LlamaForCausalLM(config))).__name__
    'LlamaModel'
    """
    inner = getattr(model, model.base_model_prefix, None)
    return inner if isinstance(inner, PreTrainedModel) else model


def stock_implementation(model: PreTrainedModel) -> str:
    """The implementation a layer runs where it gets no boundaries: "sdpa" where the model supports it, else "eager"."""
    current = backbone(model).config._attn_implementation
    if current in NAMES:
        return str(current)
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def sample(model: PreTrainedModel, length: int, seed: int) -> Tensor:
    """Random token ids (1, length) without any special token but one mask: some embeddings count masks."""
    config = model.config.get_text_config()
    special = {value for key, value in config.to_dict().items() if key.endswith("token_id") and isinstance(value, int)}
    ids = [token for token in range(min(config.vocab_size, 1000)) if token not in special]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.tensor(ids)[torch.randint(len(ids), (1, length), generator=generator)]
    if isinstance(mask := getattr(config, "mask_token_id", None), int):
        chosen[0, length // 2] = mask
    return chosen.to(embedding(model).device)


def embedding(model: PreTrainedModel) -> Tensor:
    """The weight of the input embedding, (words, width), whose device and dtype are taken for the model's."""
    return next(model.get_input_embeddings().parameters())


def first_tensor(output: Any) -> Tensor:
    """Return the logits of an output of transformers; of any other value, the first tensor in it."""
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else next(v for v in leaves(output) if isinstance(v, Tensor))


@contextlib.contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """A context with the model in evaluation mode and random numbers put aside; both are as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.random.fork_rng(enabled=True):
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def configs(model: nn.Module) -> list[Any]:
    """The configurations of a model and of the models inside it, each once."""
    return list({id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values())


def look(model: PreTrainedModel, samples: tuple[Tensor, Tensor], stock: str, interface: bool) -> Anatomy:
    """Run `model` on both samples alone and tell its parts apart. `interface`: leave attention to the interface."""
    inner = backbone(model)
    before = inner.config._attn_implementation
    noted = _Noted(inner)
    try:
        settable = model._can_set_attn_implementation()
        attention, reaches = _probe(model, inner, noted, samples[0], stock, settable)
        attention = attention if interface else {}
        if settable:
            model.set_attn_implementation(stock)
        with torch.no_grad():
            runs = zip(("first", "second"), samples, strict=True)
            alone = tuple(first_tensor(noted.run(name, model, ids)).detach() for name, ids in runs)
        mixers = noted.mixers(set(attention))
    finally:
        noted.remove()
        if inner.config._attn_implementation != before:
            model.set_attn_implementation(before)
    if not attention and not mixers:
        raise NotModelled(f"{type(model).__name__}: no part of it was found to mix tokens")
    # Such a model may leave out a mask that a short sequence does not need, and a longer one does.
    if mixers and not settable and any(reach not in (Reach(), Reach(right=-1)) for reach in reaches):
        raise NotModelled(f"{type(model).__name__} has windows of its own and ignores the attention interface")
    return Anatomy(attention, mixers, reaches, (alone[0], alone[1]))


def _probe(
    model: PreTrainedModel, inner: PreTrainedModel, noted: _Noted, ids: Tensor, stock: str, settable: bool
) -> tuple[dict[nn.Module, Reach], tuple[Reach, ...]]:
    """The attention layers behind the interface, and every different reach of the masks the model makes."""
    before = inner.config._attn_implementation
    MADE.clear()
    for module in inner.modules():
        module.padding_free_notes = []  # type: ignore[assignment]
    try:
        if settable:
            model.set_attn_implementation(PROBES[stock])
        else:  # it is asked for its masks alone, and need not understand what it then gets
            inner.config._attn_implementation = PROBES[stock]
        with torch.no_grad(), contextlib.suppress(Exception):
            noted.run("probe", model, ids)
        read: dict[Any, Reach | None] = {}  # layers share the functions that make their masks
        if not all("padding_free_notes" in module.__dict__ for module in inner.modules()):  # BigBird
            raise NotModelled(f"{type(model).__name__} exchanges its attention layers for others on short sequences")
        called = {module: notes for module in inner.modules() if (notes := module.__dict__["padding_free_notes"])}
        attention = {module: _agreed(notes, read) for module, notes in called.items()}
        reaches: list[Reach] = []
        for function in dict.fromkeys(MADE):
            if (reach := reach_of(function)) not in reaches:
                reaches.append(reach)
    finally:
        for module in inner.modules():
            module.__dict__.pop("padding_free_notes", None)
        if settable:
            model.set_attn_implementation(before)
        else:
            inner.config._attn_implementation = before
    # An argument that is not understood (indices of sparse attention, say) must not be dropped.
    understood = all(note.arguments <= UNDERSTOOD for notes in called.values() for note in notes)
    reached = {module: reach for module, reach in attention.items() if reach is not None}
    return reached if understood and settable else {}, tuple(reaches)


def _agreed(notes: list[Seen], read: dict[Any, Reach | None]) -> Reach | None:
    for note in notes:
        if note.key not in read:
            read[note.key] = note.reach()
    reaches = [read[note.key] for note in notes]
    return reaches[0] if reaches and all(reach == reaches[0] for reach in reaches) else None


class _Noted:
    """Calls of every layer and of its parts."""

    def __init__(self, inner: nn.Module) -> None:
        lists = [m for m in inner.modules() if isinstance(m, nn.ModuleList)]
        self.layers = list(dict.fromkeys(layer for group in lists for layer in group))
        parts = [part for layer in self.layers for part in layer.children()]
        self.notes = {module: Notes() for module in [*self.layers, *parts] if not isinstance(module, nn.ModuleList)}
        self.current = ""
        self.handles = [module.register_forward_hook(self._note, with_kwargs=True) for module in self.notes]

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.current:
            self.notes[module].calls[self.current] = (by_name(arguments(module), args, kwargs), output)

    def run(self, name: str, model: PreTrainedModel, ids: Tensor) -> Any:
        self.current = name
        try:
            return model(input_ids=ids)
        finally:
            self.current = ""

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def mixers(self, attention: set[nn.Module]) -> dict[nn.Module, Notes]:
        notes_of: dict[nn.Module, Notes] = {}
        for layer in self.layers:
            behind_interface = any(module in attention for module in layer.modules())
            for part in layer.children():
                notes = self.notes.get(part)
                if notes and not any(module in attention for module in part.modules()) and mixes(part, notes):
                    notes_of[part] = notes
            if (
                not behind_interface
                and not any(m in notes_of for m in layer.modules())
                and mixes(layer, self.notes[layer])
            ):
                raise NotModelled(
                    f"{type(layer).__name__} mixes tokens in its own forward: it cannot be made padding-free"
                )
        inside = {m for part in notes_of for m in part.modules() if m is not part}
        return {part: notes for part, notes in notes_of.items() if part not in inside}


def mixes(module: nn.Module, notes: Notes) -> bool:
    """Return whether an output at one position depends on an input at another, by the exact gradient."""
    if {"first", "second"} - notes.calls.keys():
        return False
    (first, output), (second, output_second) = notes.calls["first"], notes.calls["second"]
    out_dims = token_dims(leaves(output)[0], leaves(output_second)[0], LENGTHS)
    if len(out_dims) != 1:
        return False
    inputs: list[tuple[Tensor, int]] = []
    call = {name: _leaf_copies(value, second.get(name), inputs) for name, value in first.items()}
    if not inputs:
        return False
    with torch.enable_grad():
        result = leaves(module(**call))[0]
    if not result.requires_grad:  # rotary tables in a list of their own, made without gradients
        return False
    length = LENGTHS[0]
    for position in (0, length - 1):
        weights = torch.randn_like(result)
        weights.narrow(out_dims[0], position, 1).zero_()
        gradients = torch.autograd.grad(
            result, [tensor for tensor, _ in inputs], weights, retain_graph=True, allow_unused=True
        )
        for gradient, (_, dim) in zip(gradients, inputs, strict=True):
            if gradient is not None and bool(gradient.narrow(dim, position, 1).ne(0).any()):
                return True
    return False


def _leaf_copies(value: Any, second: Any, inputs: list[tuple[Tensor, int]]) -> Any:
    flat, shape = tree_flatten(value)
    beside = leaves(second)
    copies = []
    for i, leaf in enumerate(flat):
        dims = token_dims(leaf, beside[i] if i < len(beside) else None, LENGTHS)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and len(dims) == 1:
            leaf = leaf.detach().clone().requires_grad_()
            inputs.append((leaf, dims[0]))
        copies.append(leaf)
    return tree_unflatten(copies, shape)
