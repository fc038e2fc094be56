"""Training a part of a model's own weights: which ones the words of `--train` name, and the model with the others frozen."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import msgspec

from loadgauge.core.base import ConfigError, NotModelled, closest, lists, refuse, sums
from loadgauge.core.definitions.model.lora import MIXERS
from loadgauge.core.definitions.model.model import Block, ModelSpec
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer
from loadgauge.core.layers.operations.operations import Layer

T = TypeVar("T")
CONTAINERS = {
    "attention": ("self_attn", "attn", "attention", "self_attention"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "ffn"),
    "mlp.shared": ("mlp.shared_experts", "mlp.shared_expert", "mlp.shared_mlp"),
    "mamba": ("mamba", "mixer"), "delta": ("linear_attn",), "convolution": ("conv",), "lightning": ("self_attn",),
    "kda": ("self_attn",),
}  # fmt: skip
"""Modules of a layer by transformers' names; what is in them has the name before the last dot."""
MODULES = {
    "query": ("q_proj", "wq"), "key": ("k_proj", "wk"), "value": ("v_proj", "wv"), "query_norm": ("q_norm", "q_layernorm"),
    "key_norm": ("k_norm", "k_layernorm"), "qkv": ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "wqkv", "in_proj"),
    "output": ("o_proj", "out_proj", "c_proj", "dense", "Wo", "wo"), "query_down": ("q_a_proj",), "query_up": ("q_b_proj",),
    "key_value_down": ("kv_a_proj_with_mqa",), "key_value_up": ("kv_b_proj",), "key_value_norm": ("kv_a_layernorm",),
    "gate": ("gate_proj", "w1"), "up": ("up_proj", "w3", "fc1", "c_fc", "fc_in", "dense_h_to_4h"),
    "gate_up": ("gate_up_proj", "Wi", "input_linear"),
    "down": ("down_proj", "output_linear", "w2", "fc2", "c_proj", "fc_out", "dense_4h_to_h"), "router": ("gate", "router"),
    "shared_gate": ("shared_expert_gate",),
    "per_layer_gate": ("per_layer_input_gate",),
    "per_layer_project": ("per_layer_projection",),
}  # fmt: skip
"""Layers of those modules."""
MIXED = {
    "delta.qkv": ("in_proj_qkv",), "delta.gate": ("in_proj_z",), "delta.rates": ("in_proj_b",), "delta.steps": ("in_proj_a",),
    "delta.qkvz": ("in_proj_qkvz",), "delta.rates_steps": ("in_proj_ba",), "mamba.input": ("in_proj",),
    "mamba.parameters": ("x_proj",), "mamba.step": ("dt_proj",), "convolution.input": ("in_proj",), "lightning.qkv": ("qkv_proj",),
    "kda.qkv": ("q_proj", "k_proj", "v_proj"), "kda.query": ("q_proj",), "kda.key": ("k_proj",), "kda.value": ("v_proj",),
    "kda.decay_down": ("f_a_proj",), "kda.decay": ("f_b_proj", "f_proj"), "kda.gate_down": ("g_a_proj",),
    "kda.gate": ("g_b_proj", "g_proj"), "kda.rates": ("b_proj",), "lightning.gate": ("output_gate",),
    **{f"{mixer}.output": ("out_proj",) for mixer in MIXERS}, "kda.output": ("o_proj",),
}  # fmt: skip
"""Layers of mixers without softmax, by their whole names."""
NORMS = {
    "attention.norm": ("input_layernorm", "ln_1", "self_attn_layer_norm"), "mlp.norm": ("post_attention_layernorm", "ln_2"),
    "attention.post_norm": ("post_attention_layernorm",), "mlp.post_norm": ("post_feedforward_layernorm",),
}  # fmt: skip
ENDS = {
    "embedding.tokens": ("embed_tokens", "wte", "word_embeddings", "embed_in"),
    "embedding.positions": ("embed_positions", "wpe"), "head.logits": ("lm_head", "embed_out"),
    "head.norm": ("norm", "ln_f", "final_layer_norm", "final_layernorm"),
}  # fmt: skip
"""Modules before the layers and after them."""
PATTERN = set("^$[](){}*+?|\\")
SHARE = "frozen:"
BUT = "but:"
TOWER = "tower"
"""The word for that which is trained before the language model."""


class Part(NamedTuple):
    """Weights of one operation: the layer it is in (None: before or after the layers), its name, its elements."""

    layer: int | None
    operation: str
    numel: int

    def names(self, block: Block | None) -> tuple[str, ...]:
        """Return the names that transformers' modules may have within a layer, or within the model."""
        return tuple(modules_of(self.operation, block))


def train_only(model: ModelSpec, words: str) -> ModelSpec:
    """Return the model with all weights frozen but those that `words` name. Raises `ConfigError` or `NotModelled`.

    Words are separated by commas: `layers.-8:` (a place, a range as Python writes it, or `*`), `layers.24:32.mlp`, `embed_tokens`,
    `lm_head`, `norm`; a regular expression on the parameters' names in transformers, which must fit their beginning;
    `frozen:0.8`, all but the first 80 % of the parameters; or `but:` before any of them, which takes it out of the others, or
    of all where there are none. `tower` names none of the language model's: what sees or hears is trained as `--tower` says.

    >>> from loadgauge.core.families.reference import llama_model
    >>> half = train_only(llama_model(4, 512, 8, 1000), "layers.2:")
    >>> half.pattern, [block.reached for block in half.blocks]
    ((0, 0, 1, 2), [False, False, True])
    >>> sorted(train_only(llama_model(4, 512, 8, 1000), "but:embed_tokens").trained)
    ['head.logits', 'head.norm']
    """
    refuse(
        any(block.shares_weights for block in model.blocks),
        f"training a part of {model.name}, whose layers share their weights",
        NotModelled,
    )
    refuse(model.mtp_layers, "training a part of a model together with its multi-token prediction modules", NotModelled)
    ends, by_block = _weights(model)
    parts = _parts(model, ends, by_block)

    def find(word: str) -> set[tuple[int | None, str]]:
        matched = set() if word == TOWER else {(part.layer, part.operation) for part in _named(word, model, parts)}
        if not matched and word != TOWER:
            names = sorted({_plain(part, model)[0].split(".")[0] for part in parts} | {"layers"})
            hint = "".join(f"; did you mean {match!r}?" for match in closest(word, names))
            raise ConfigError(
                f"nothing in {model.name} is called {word!r} (known: {', '.join(names)}){hint}", key="train"
            )
        return matched

    return _frozen(model, ends, by_block, chosen_by(words, {(part.layer, part.operation) for part in parts}, find))


def chosen_by(words: str, everything: set[T], find: Callable[[str], set[T]]) -> set[T]:
    """Return the parts that words of `--train` choose. Raises `ConfigError` where that is nothing, and as `find` does.

    find: what one word names

    >>> chosen_by("a,but:b", {"a", "b"}, lambda word: {word}), chosen_by("but:b", {"a", "b"}, lambda word: {word})
    ({'a'}, {'a'})
    """
    listed = words_of(words)
    chosen = set(everything) if all(word.startswith(BUT) for word in listed) else set()
    for word in sorted(listed, key=lambda word: word.startswith(BUT)):
        matched = find(word.removeprefix(BUT))
        chosen = chosen - matched if word.startswith(BUT) else chosen | matched
    refuse(not chosen and TOWER not in listed, f"{words!r} leaves nothing to train", key="train")
    return chosen


def adapt_only(model: ModelSpec, layers: str) -> ModelSpec:
    """Return the model with adapters in some layers only: places and ranges, with commas. Raises `ConfigError`.

    >>> from loadgauge.core.families.reference import llama_model
    >>> [(block.adapted, block.reached) for block in adapt_only(llama_model(4, 512, 8, 1000), "2,3").blocks]
    [(False, False), (True, False), (True, True)]
    """
    count = model.num_hidden_layers
    chosen = {layer for word in words_of(layers) for layer in places(word, count, "lora_layers")}
    blocks, pattern = _Distinct(), []
    reached = False
    for layer, kind in enumerate(model.pattern):
        adapted = layer in chosen
        pattern.append(blocks.of(model.blocks[kind], adapted=adapted, reached=reached))
        reached = reached or adapted
    return msgspec.structs.replace(model, blocks=tuple(blocks.found), pattern=tuple(pattern))


class _Distinct:
    """Blocks, each once."""

    def __init__(self) -> None:
        self.found: list[Block] = []

    def of(self, block: Block, **changes: object) -> int:
        """Return the place of a block with these changes."""
        changed = msgspec.structs.replace(block, **changes)
        if changed not in self.found:
            self.found.append(changed)
        return self.found.index(changed)


def words_of(text: str) -> list[str]:
    """Return the words of a list with commas; those in brackets or braces are part of a word. Raises `ConfigError`.

    >>> words_of("lm_head, layers.(0,1)")
    ['lm_head', 'layers.(0,1)']
    """
    words = [word.strip() for word in re.split(r",(?![^\[\]{}()]*[\]})])", text)]
    refuse(not all(words), f"an empty word in {text!r}", key="train")
    return words


def _operations(layer: Layer) -> dict[str, int]:
    """Elements of the weights of each operation."""
    return sums((weight.name.rpartition(".")[0], int(weight.numel)) for weight in layer.weights)


def _weights(model: ModelSpec) -> tuple[tuple[dict[str, int], dict[str, int]], list[dict[str, int]]]:
    view = View.of(1, 1)
    ends = _operations(embedding_layer(model, view)), _operations(head_layer(model, view, loss=False))
    return ends, [_operations(block_layer(block, model.hidden_size, view)) for block in model.blocks]


def _parts(model: ModelSpec, ends: tuple[dict[str, int], dict[str, int]], by_block: list[dict[str, int]]) -> list[Part]:
    """All weights, in the order in which transformers' modules register them: of a layer, norms come last."""
    parts = [Part(None, *item) for item in ends[0].items()]
    for layer, kind in enumerate(model.pattern):
        parts += [Part(layer, *item) for item in sorted(by_block[kind].items(), key=lambda item: item[0] in NORMS)]
    return parts + [Part(None, *item) for item in ends[1].items()]


def modules_of(operation: str, block: Block | None) -> Iterator[str]:
    """Yield the names of the modules in transformers that may run an operation, within their layer or the model."""
    if operation in ENDS:
        yield from ENDS[operation]
        return
    if operation in NORMS:
        # Where a norm follows the attention, the MLP's own has another name.
        sandwich = operation == "mlp.norm" and block is not None and block.placement == "sandwich"
        yield from ("pre_feedforward_layernorm",) if sandwich else NORMS[operation]
        return
    container, _, leaf = operation.rpartition(".")
    if operation in MIXED:
        yield from (
            f"{module}.{name}" for module in CONTAINERS.get(container, (container,)) for name in MIXED[operation]
        )
        return
    experts = block is not None and container == "mlp" and block.mlp is not None and leaf in ("gate_up", "up", "down")
    inner = "experts." if experts and hasattr(block.mlp, "num_experts") else ""  # type: ignore[union-attr]
    for module in CONTAINERS.get(container, (container,)):
        for name in MODULES.get(leaf, (leaf,)):
            yield f"{module}.{inner}{name}"


def _plain(part: Part, model: ModelSpec) -> tuple[str, ...]:
    return part.names(None if part.layer is None else model.blocks[model.pattern[part.layer]])


def _named(word: str, model: ModelSpec, parts: list[Part]) -> list[Part]:
    """The weights that a word names."""
    if word.startswith(SHARE):
        return parts[after_share(word, [part.numel for part in parts]) :]
    # A row of a table alone (`[:32000]`): its gradient has all rows, and so have the states.
    word = re.sub(r"\[\d*:\d*\]$", "", word)
    if (pattern := pattern_in(word)) is not None:
        return _matching(pattern, model, parts)
    selected, path = _selector(word, model.num_hidden_layers)

    def fits(part: Part) -> bool:
        if selected is not None and part.layer not in selected:
            return False
        names = _plain(part, model)
        if model.tie_word_embeddings and part.operation == "embedding.tokens":
            names += ENDS["head.logits"]
        return not path or path == part.operation or any(f".{path}." in f".{name}." for name in names)

    return [part for part in parts if fits(part)]


def _selector(word: str, count: int) -> tuple[set[int] | None, str]:
    """The layers that a word names (None: it names none), and the module within them."""
    pieces = word.split(".")
    if pieces[-1] in ("weight", "bias") and len(pieces) > 1:
        pieces.pop()
    for index, piece in enumerate(pieces):
        if re.fullmatch(r"\*|-?\d*(:-?\d*){0,2}", piece) and piece:
            return set(places(piece, count, "train")), ".".join(pieces[index + 1 :])
    if pieces[-1] in ("layers", "h", "blocks"):
        return set(range(count)), ""
    return None, ".".join(pieces[1:] if pieces[0] in ("model", "transformer") and len(pieces) > 1 else pieces)


def places(text: str, count: int, key: str) -> list[int]:
    """Return the places in a list of `count` that a number, a range or `*` means. Raises `ConfigError` for none; key: the field's.

    >>> places("-2:", 4, "train")
    [2, 3]
    """
    try:
        if text == "*":
            return list(range(count))
        if ":" in text:
            chosen = list(range(count))[slice(*(int(part) if part else None for part in text.split(":")))]
        else:
            chosen = [range(count)[int(text)]]
    except (ValueError, IndexError):
        chosen = []
    refuse(
        not chosen,
        f"{text!r} are none of the {count} layers (0 to {count - 1}, -1 is the last, 24: the last from 24 on)",
        key=key,
    )
    return chosen


def pattern_in(word: str) -> re.Pattern[str] | None:
    """Return the regular expression that a word is; None for a name. Raises `ConfigError`.

    >>> pattern_in("layers.*.mlp"), pattern_in("layers.(0|1)").pattern
    (None, 'layers.(0|1)')
    """
    if not PATTERN & set(word) or re.fullmatch(r"[\w.:-]*\.\*(\.[\w.]+)?", word):
        return None
    try:
        return re.compile(word)
    except re.error as error:
        raise ConfigError(f"{word!r} is no regular expression: {error}", key="train") from None


def _matching(pattern: re.Pattern[str], model: ModelSpec, parts: list[Part]) -> list[Part]:
    """The weights whose names in transformers a regular expression fits the beginning of."""

    def full(part: Part) -> Iterator[str]:
        for name in _plain(part, model):
            for ending in ("weight", "bias"):
                if part.layer is None:
                    yield f"{name}.{ending}"
                    yield f"model.{name}.{ending}"
                    yield f"transformer.{name}.{ending}"
                else:
                    yield f"model.layers.{part.layer}.{name}.{ending}"
                    yield f"transformer.h.{part.layer}.{name}.{ending}"

    return [part for part in parts if any(map(pattern.match, full(part)))]


def after_share(word: str, sizes: Sequence[int]) -> int:
    """Return the number of weights that a word such as `frozen:0.8` freezes, which are the first of a share of all elements. Raises
    `ConfigError`. sizes: elements of each weight (source: ms-swift, `freeze_parameters`)

    >>> after_share("frozen:0.6", [9, 4, 4])
    1
    """
    try:
        share = float(word.removeprefix(SHARE))
    except ValueError:
        share = -1.0
    refuse(not 0 <= share < 1, f"{word!r}: a share below 1, such as frozen:0.8", key="train")
    return bisect_right([*accumulate(sizes)], int(sum(sizes) * share))


def _frozen(
    model: ModelSpec,
    ends: tuple[dict[str, int], dict[str, int]],
    by_block: list[dict[str, int]],
    chosen: set[tuple[int | None, str]],
) -> ModelSpec:
    """The model with all other weights frozen."""
    outside = {name for layer, name in chosen if layer is None}
    if model.tie_word_embeddings and "embedding.tokens" in outside:
        outside.add("head.logits")
    if len(chosen) == len(ends[0]) + len(ends[1]) + sum(len(by_block[kind]) for kind in model.pattern):
        return model
    inside = lists((layer, name) for layer, name in chosen if layer is not None)
    blocks, pattern = _Distinct(), []
    reached = any(name in outside for name in ends[0])
    for layer, kind in enumerate(model.pattern):
        names = inside.get(layer, [])
        trained = None if len(names) == len(by_block[kind]) else frozenset(names)
        pattern.append(blocks.of(model.blocks[kind], trained=trained, reached=reached))
        reached = reached or bool(names)
    return msgspec.structs.replace(
        model, blocks=tuple(blocks.found), pattern=tuple(pattern), trained=frozenset(outside), reached=reached
    )
