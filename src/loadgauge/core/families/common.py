"""Helpers of the families' readers: which head the model class has, how heads divide, which layers are alike."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from loadgauge.core.definitions.model.model import Attention, Block, Head, LinearMixer, Mlp, ModelSpec, Norm
from loadgauge.core.families.reader import Reader, shown

LAYER_NORM = Norm("layernorm", bias=True)
RMS_NORM = Norm("rmsnorm")
RMS_NORM_PLUS_ONE = Norm("rmsnorm_plus_one")

MOST_LAYERS = 10_000
"""Each layer has its entry in `ModelSpec.pattern`, so a slip here would fill the memory of this machine."""

LANGUAGE, CLASSIFY, BODY = "language", "classify", "body"
"""Kinds of head: logits over the vocabulary, over labels, or none."""


Switch: TypeAlias = bool | str
"""Always so; or as this key of the config says, where the family's class declares it."""


def switch(reader: Reader, value: Switch) -> bool:
    """Return whether a model has what `value` switches.

    >>> switch(Reader({"model_type": "llama", "mlp_bias": True}), "mlp_bias")
    True
    >>> switch(Reader({"model_type": "qwen2", "mlp_bias": True}), "mlp_bias")  # a key that Qwen2Config does not declare
    False
    """
    if isinstance(value, bool):
        return value
    return value in reader.declared and reader.flag(value)


def decoder_classes(prefix: str) -> dict[str, str]:
    """transformers' names for a decoder's classes, and what each one's head does.

    >>> sorted(decoder_classes("Llama"))
    ['LlamaForCausalLM', 'LlamaForSequenceClassification', 'LlamaModel']
    """
    return {
        f"{prefix}ForCausalLM": LANGUAGE,
        f"{prefix}ForSequenceClassification": CLASSIFY,
        f"{prefix}Model": BODY,
    }


def task(reader: Reader, classes: Mapping[str, str]) -> str:
    """Return what the head of the class in `architectures` does, by `classes`; the first of them where none is named.

    Raises `NotModelled` for another class.
    """
    names = reader.texts("architectures")
    if reader.task:
        return reader.task
    if not names:
        return next(iter(classes.values()))
    for name, meaning in classes.items():
        if name.lower() == names[0].lower():
            return meaning
    raise reader.unmodelled(
        "architectures",
        f"{shown(names[0])} is not modelled for model_type {shown(reader.model_type)} (known: {', '.join(classes)})",
    )


def refuse_unusual(reader: Reader) -> None:
    """Raises `NotModelled` for what transformers allows in a config of any family and no reader here models."""
    if reader.model_type != "gemma4_text" and reader.raw("per_layer_config", default=None):
        raise reader.unmodelled("per_layer_config", "layers that differ one by one are not modelled")
    if reader.flag("is_encoder_decoder", default=False):
        raise reader.unmodelled("is_encoder_decoder", "an encoder with a decoder is not modelled for this family")


def num_labels(reader: Reader) -> int:
    """Columns of a classifier: the length of `id2label`, or `num_labels`, or 2. Raises ConfigError where they disagree."""
    labels = reader.raw("id2label", default=None)
    count = reader.optional_whole("num_labels", default=None)
    if labels is None:
        return 2 if count is None else count
    if not isinstance(labels, dict) or not labels:
        raise reader.wrong("id2label", f"must be an object of labels, got {shown(labels)}")
    if count is not None and count != len(labels):
        raise reader.wrong("num_labels", f"is {count} but id2label has {len(labels)}")
    return len(labels)


def decoder_head(reader: Reader, classes: Mapping[str, str], *, softcap: bool = False, bias: Switch = False) -> Head:
    """The head that the class in `architectures` has: a matrix over the vocabulary (with a bias where `bias` says so), one
    over the labels, or none; no layer before it. `softcap`: the logits are capped.
    """
    wanted = task(reader, classes)
    biased = switch(reader, bias)
    if wanted == LANGUAGE:
        return Head(softcap=softcap, bias=biased)
    if wanted == CLASSIFY:
        return Head(kind="classifier", num_labels=num_labels(reader))
    return Head(kind="none")


def layers(reader: Reader, *keys: str) -> int:
    """The number of layers, under any of these names of the key; `ConfigError` above `MOST_LAYERS`."""
    return reader.whole(*keys, maximum=MOST_LAYERS)


def sizes(reader: Reader, *own: str) -> tuple[int, int, int]:
    """Return the hidden size, the heads and the layers. own: a config's other names for these, in this order

    >>> sizes(Reader({"n_embd": 768, "n_head": 12, "num_hidden_layers": 2}, "gpt"), "n_embd", "n_head", "n_layer")
    (768, 12, 2)
    """
    usual = ("hidden_size", "num_attention_heads", "num_hidden_layers")
    width, heads, count = ((*own[at : at + 1], name) for at, name in enumerate(usual))
    return reader.whole(*width), reader.whole(*heads), layers(reader, *count)


def head_width(reader: Reader, hidden_size: int, heads: int, key: str = "hidden_size") -> int:
    """Channels of a head: `hidden_size` over the number of heads; `ConfigError`, naming `key`, where that leaves a rest."""
    if hidden_size % heads:
        raise reader.wrong(key, f"{hidden_size} is not divisible by {heads} attention heads, and no head_dim is given")
    return hidden_size // heads


def key_value_heads(reader: Reader, heads: int, default: UnsetType | None = UNSET) -> int:
    """The number of key-value heads: `num_key_value_heads`, or `heads` where it is null; `ConfigError` where it does not
    divide `heads`.
    """
    count = reader.optional_whole("num_key_value_heads", default=default)
    if count is None:
        if not reader.has("num_key_value_heads"):
            reader.default("num_key_value_heads", heads)
        return heads
    if heads % count:
        raise reader.wrong("num_key_value_heads", f"{count} does not divide num_attention_heads {heads}")
    return count


def rotary_dim(reader: Reader, head_dim: int, default: float, *names: str) -> int | None:
    """Channels of each head that are rotated, by `rotary_dim` or `partial_rotary_factor`; None: all of them."""
    stated = reader.optional_whole("rotary_dim", default=None, maximum=head_dim)
    if stated is not None:
        return None if stated == head_dim else stated
    factor = reader.optional_real(*(names or ("partial_rotary_factor",)), default=None)
    nested = reader.raw("rope_parameters", default=None)
    if factor is None and isinstance(nested, dict) and "partial_rotary_factor" in nested:
        factor = reader.section("rope_parameters", default={}).optional_real("partial_rotary_factor", default=None)
    factor = default if factor is None else factor
    if factor > 1:
        raise reader.wrong("partial_rotary_factor", f"must be at most 1, got {factor:g}")
    turned = int(head_dim * factor)
    return None if turned == head_dim else turned


def next_token_layers(reader: Reader) -> int:
    """The number of multi-token prediction layers that come with the model, by `num_nextn_predict_layers`."""
    keys = ("num_nextn_predict_layers", "num_mtp_layers")
    usual = reader.class_default(*keys) or 0
    return reader.optional_whole(*keys, default=usual, minimum=0, maximum=MOST_LAYERS) or 0


def layer_types(
    reader: Reader, count: int, allowed: Sequence[str] = ("full_attention", "sliding_attention")
) -> tuple[str, ...] | None:
    """Return `layer_types`, one of `known` for each of `count` layers; None where the config has none.

    Raises `ConfigError` for a wrong number of entries, `NotModelled` for another type.
    """
    types = reader.texts("layer_types")
    if types is None:
        return None
    if len(types) != count:
        raise reader.wrong("layer_types", f"has {len(types)} entries for {count} layers")
    # transformers renames the first to the second as it reads.
    renamed = tuple("full_attention" if kind == "attention" else kind for kind in types)
    for kind in renamed:
        if kind not in allowed:
            raise reader.unmodelled("layer_types", f"{shown(kind)} is not modelled for this family")
    return renamed


def windows(reader: Reader, types: Sequence[str], window: int | None, key: str = "sliding_window") -> list[int | None]:
    """The window of each layer [tokens]: `window` where its type is not full_attention, else None (all keys).

    Raises ConfigError, about `key`, where a layer has a window and there is none.
    """
    local = next((kind for kind in types if kind != "full_attention"), None)
    if window is None and local is not None:
        raise reader.wrong(key, f"is null (or switched off), but some layers are {local}")
    return [None if kind == "full_attention" else window for kind in types]


def windows_where(reader: Reader, count: int, window: int | None, local: Callable[[int], bool]) -> list[int | None]:
    """The window of each of `count` layers [tokens]: `window` where `layer_types` says so; without it, where `local` does.

    local: of the index of a layer. Raises as `layer_types` and `windows`.
    """
    types = layer_types(reader, count)
    if types is None:
        types = tuple("sliding_attention" if local(i) else "full_attention" for i in range(count))
    return windows(reader, types, window)


def distinct(blocks: Sequence[Block]) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Each different block once, and which of them each layer is.

    >>> distinct(["local", "global", "local"])
    (('local', 'global'), (0, 1, 0))
    """
    index: dict[Block, int] = {}
    pattern = tuple(index.setdefault(block, len(index)) for block in blocks)
    return tuple(index), pattern


def masked_language_head(activation: str) -> Head:
    """A masked-LM head: a dense layer with this activation, a norm, and the vocabulary's matrix with a bias."""
    return Head(transform=True, transform_norm=LAYER_NORM, activation=activation, bias=True, loss_float32=False)


def first_token_classifier(reader: Reader, activation: str) -> Head:
    """A classifier on the first token: a dense layer with this activation, and a matrix over the labels with a bias."""
    return Head(kind="classifier", transform=True, activation=activation, bias=True, num_labels=num_labels(reader))


def refuse_untied(reader: Reader) -> None:
    """Raises `NotModelled` for a masked-LM head whose matrix is not the embedding's."""
    if not reader.flag("tie_word_embeddings"):
        raise reader.unmodelled(
            "tie_word_embeddings", "false is not modelled here: transformers then keeps a second bias that nothing uses"
        )


def refuse_cross_attention(reader: Reader, model: str) -> None:
    """Raises `NotModelled`, about `model`, for layers that also attend to another model's output."""
    if reader.flag("add_cross_attention"):
        raise reader.unmodelled("add_cross_attention", f"{model} is not modelled")


# What most configs state alike


def multi_head(reader: Reader, hidden_size: int, heads: int, key: str = "hidden_size", **own: Any) -> Attention:
    """Attention whose query heads have keys and values of their own, each of `hidden_size` over `heads` channels.

    own: the other fields of `Attention`. Raises `ConfigError`, naming `key`, where the heads do not divide `hidden_size`.
    """
    width = head_width(reader, hidden_size, heads, key)
    return Attention(num_attention_heads=heads, num_key_value_heads=heads, head_dim=width, **own)


def plain_mlp(reader: Reader, intermediate_size: int, activation: str, *, bias: bool = True, **own: Any) -> Mlp:
    """An MLP of two matrices, with biases unless said otherwise; activation: the key that states it; own: other fields."""
    return Mlp(intermediate_size=intermediate_size, gated=False, bias=bias, activation=reader.text(activation), **own)


def assembled(reader: Reader, hidden_size: int, layers: Sequence[Block], **own: Any) -> ModelSpec:
    """The model of these layers, first to last; vocabulary and tied table by the keys that every config has for them.

    own: the other fields of `ModelSpec`
    """
    blocks, pattern = distinct(layers)
    return ModelSpec(
        name=reader.name,
        model_type=reader.model_type,
        hidden_size=hidden_size,
        vocab_size=reader.whole("vocab_size"),
        blocks=blocks,
        pattern=pattern,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        **own,
    )


# Hybrids: layers of different mixers

RENAMED = {"mamba": "linear_attention", "attention": "full_attention"}
"""Older names of layer types, which transformers renames as it reads."""


def types_of(reader: Reader, count: int, linear: str = "linear_attention") -> tuple[str, ...] | None:
    """The type of each of `count` layers by `layer_types`: full_attention or `linear`; None where the config does not say.

    Raises `ConfigError` for a wrong number of entries, `NotModelled` for another type.
    """
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
    """The model with the block of layer i replaced by `change(i, block)`."""
    blocks, pattern = distinct([change(i, spec.blocks[kind]) for i, kind in enumerate(spec.pattern)])
    return msgspec.structs.replace(spec, blocks=blocks, pattern=pattern)


def interleaved(spec: ModelSpec, types: Sequence[str], mixer: LinearMixer) -> ModelSpec:
    """The model with `mixer` in place of attention in each layer whose type, of `types`, is not full_attention."""

    def change(index: int, block: Block) -> Block:
        return block if types[index] == "full_attention" else msgspec.structs.replace(block, attention=mixer)

    return rebuilt(spec, change)


def language(prefix: str, *, classifier: bool = False) -> dict[str, str]:
    """Return what `decoder_classes` returns, without the class for classification, which most hybrids do not have."""
    names = decoder_classes(prefix)
    return names if classifier else {name: use for name, use in names.items() if use != CLASSIFY}
