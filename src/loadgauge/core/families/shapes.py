"""A model from its size: `llama:13B`, `gpt:layers=48,hidden=6144,heads=48,vocab=50k`, `moe:47B,experts=8`.

What is not said is chosen as published models have it: heads of 64 or 128, a width to depth of 64 to 200 that grows with the
size, a feed-forward of 4 h (gpt), 8/3 h (llama) or 3.5 h (moe). For a size, layers and width are those nearest to that whose
count of parameters is the size, and the feed-forward is moved where none is.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base import ConfigError, count, parse_count, refuse, suggest
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.families.hf import from_dict
from loadgauge.core.families.reference import llama_ffn

CLOSE = 0.005
"""A shape whose parameters are this near to the size, as a share, is taken as it is."""
WITHIN = 0.01
"""The share by which a model may miss the size that was asked for."""
HIDDEN = (128, 65_536)
LAYERS = (1, 1024)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """All sizes of a model. heads, kv_heads: of attention; ffn: width of the feed-forward; experts, top_k: of a moe"""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int
    experts: int = 0
    top_k: int = 0

    @property
    def params(self) -> int:
        """Number of parameters, in closed form: what the list of operations of `spec` comes to (a test compares them)."""
        return FAMILIES[self.family].params(self)

    @property
    def text(self) -> str:
        """The whole shape as a name of a model, which reads back as itself."""
        pairs = (f"{key}={getattr(self, key.replace('-', '_'))}" for key in _keys(self.family))
        return f"{self.family}:{','.join(pairs)}"

    def config(self) -> dict[str, Any]:
        """Return the `config.json` of a model of this shape."""
        return FAMILIES[self.family].config(self)


class _Family(NamedTuple):
    """A family: its config.json, its parameters, and what it has where nothing is said."""

    config: Callable[[Shape], dict[str, Any]]
    params: Callable[[Shape], int]
    ffn: Callable[[int], int]
    vocab: int
    positions: int
    grouped: bool = False


def _gpt_config(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "n_positions": shape.positions,
        "vocab_size": shape.vocab,
    }


def _gpt_params(shape: Shape) -> int:
    """12 h^2 + 13 h a layer with f = 4h (source: narayanan2021); tied tables."""
    h, f = shape.hidden, shape.ffn
    return (shape.vocab + shape.positions) * h + 2 * h + shape.layers * (4 * h * h + 2 * h * f + 9 * h + f)


def _llama_config(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": False,
    }


def _llama_params(shape: Shape) -> int:
    return (
        2 * shape.vocab * shape.hidden
        + shape.hidden
        + shape.layers * (_attention(shape) + 3 * shape.hidden * shape.ffn)
    )


def _attention(shape: Shape) -> int:
    """Queries, keys, values, output and the two norms of a layer."""
    h = shape.hidden
    return 2 * h * h + 2 * h * shape.kv_heads * (h // shape.heads) + 2 * h


def _moe_config(shape: Shape) -> dict[str, Any]:
    return {
        **_llama_config(shape),
        "model_type": "mixtral",
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
    }


def _moe_params(shape: Shape) -> int:
    layer = _attention(shape) + shape.experts * (shape.hidden + 3 * shape.hidden * shape.ffn)
    return 2 * shape.vocab * shape.hidden + shape.hidden + shape.layers * layer


FAMILIES: dict[str, _Family] = {
    "gpt": _Family(_gpt_config, _gpt_params, lambda hidden: 4 * hidden, 50_257, 2048),
    "llama": _Family(_llama_config, _llama_params, llama_ffn, 32_000, 4096, grouped=True),
    "moe": _Family(_moe_config, _moe_params, lambda hidden: 7 * hidden // 2, 32_000, 4096, grouped=True),
}
"""The families by name: GPT-2, Llama, and Mixtral."""
KEYS = ("layers", "hidden", "heads", "kv-heads", "ffn", "vocab", "positions", "experts", "top-k")


def _keys(family: str) -> tuple[str, ...]:
    without = {"kv-heads"} if not FAMILIES[family].grouped else set()
    if family != "moe":
        without |= {"experts", "top-k"}
    return tuple(key for key in KEYS if key not in without)


def is_shape(text: str) -> bool:
    """Return whether the name of a model is a family and sizes.

    >>> is_shape("llama:13B"), is_shape("meta-llama/Llama-2-13b-hf")
    (True, False)
    """
    return text.partition(":")[0] in FAMILIES and ":" in text


def written(family: str, sizes: Mapping[str, str]) -> str:
    """Return a family and its sizes as the name of a model; a key is one of `KEYS` or `size`.

    >>> written("gpt", {"size": "10B", "vocab": "50k"})
    'gpt:10B,vocab=50k'
    """
    return f"{family}:" + ",".join(value if key == "size" else f"{key}={value}" for key, value in sizes.items())


def read(text: str) -> tuple[ModelSpec, Shape]:
    """Build the model that a family and sizes name. Raises `ConfigError` for sizes that no model has.

    >>> spec, shape = read("llama:7B")
    >>> shape.text
    'llama:layers=38,hidden=4096,heads=32,kv-heads=8,ffn=11008,vocab=32000,positions=4096'
    """
    family, _, rest = text.partition(":")
    size, sizes = _given(family, rest)
    shape = _shape(family, sizes) if size is None else _sized(family, size, sizes)
    spec = from_dict(shape.config(), text, text)
    return msgspec.structs.replace(spec, defaults=(), source="sizes given"), shape


def how(text: str, shape: Shape) -> str:
    """Say in words what shape was chosen, and what of it was not said."""
    _, sizes = _given(shape.family, text.partition(":")[2])
    chosen = [key for key in _keys(shape.family) if key.replace("-", "_") not in sizes]
    why = f"; chosen as published models have it: {', '.join(chosen)}" if chosen else ""
    return f"{count(shape.params)} parameters, {shape.text.partition(':')[2].replace(',', ', ')}{why}"


def _given(family: str, text: str) -> tuple[float | None, dict[str, int]]:
    """The size and the sizes that a text states."""
    size, sizes = None, {}
    for word in filter(None, text.split(",")):
        key, equals, value = word.strip().partition("=")
        if not equals or key == "size":
            refuse(size is not None, f"two sizes are given: {text[:60]!r}", key="size")
            size = parse_count(value if equals else key, "size")
            continue
        key = key.replace("_", "-")
        if key not in _keys(family):
            keys = _keys(family)
            raise ConfigError(
                f"a {family} has no {key[:40]!r} (known: size, {', '.join(keys)}){suggest(key, keys)}", key="model"
            )
        number = parse_count(value, key)
        refuse(
            number != int(number) or not 1 <= number <= 10**8,
            f"must be a whole number from 1 to 100,000,000, got {value!r}",
            key=key,
        )
        sizes[key.replace("-", "_")] = int(number)
    return size, sizes


def _shape(family: str, sizes: Mapping[str, int]) -> Shape:
    """The shape with what is not given filled in. Raises `ConfigError` where sizes are missing or contradict each other."""
    for key in ("layers", "hidden"):
        refuse(key not in sizes, f"is missing; state it, or give a size such as {family}:10B", key=key)
    kind, hidden = FAMILIES[family], sizes["hidden"]
    heads = sizes.get("heads") or _heads(hidden)
    refuse(hidden % heads, f"hidden {hidden:,} is not a multiple of heads {heads:,}", key="heads")
    kv_heads = sizes.get("kv_heads") or (8 if kind.grouped and heads > 8 and heads % 8 == 0 else heads)
    refuse(heads % kv_heads, f"heads {heads:,} are not a multiple of kv-heads {kv_heads:,}", key="kv-heads")
    experts = sizes.get("experts", 8) if family == "moe" else 0
    top_k = sizes.get("top_k", min(2, experts)) if family == "moe" else 0
    refuse(top_k > experts, f"a token cannot go to {top_k:,} of {experts:,} experts", key="top-k")
    return Shape(
        family=family,
        layers=sizes["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=sizes.get("ffn") or kind.ffn(hidden),
        vocab=sizes.get("vocab", kind.vocab),
        positions=sizes.get("positions", kind.positions),
        experts=experts,
        top_k=top_k,
    )


def _heads(hidden: int) -> int:
    """Heads of 128, of 64 in a narrow model, else the next smaller width that divides it."""
    widest = 128 if hidden >= 2048 else 64
    width: int = next(width for width in (*range(widest, 31, -32), *range(widest, 0, -1)) if hidden % width == 0)
    return hidden // width


def _aspect(params: float) -> float:
    """Width to depth of published models: 64 at 0.1 B, 128 from 10 B to 200 B, 200 at 1 T (GPT-3, LLaMA, Megatron-LM)."""
    return min(128.0, max(64.0, 128 * math.pow(params / 10e9, 0.2))) * max(1.0, math.pow(params / 200e9, 0.25))


class _Choice(NamedTuple):
    """A shape, how far its parameters are from the size (as a share), and how far it is from the usual."""

    shape: Shape
    miss: float
    unusual: float


def _sized(family: str, size: float, sizes: Mapping[str, int]) -> Shape:
    """The shape of that many parameters that is most like published models."""
    choices = list(_choices(family, size, sizes))
    near = [choice for choice in choices if choice.miss <= WITHIN]
    if near:
        return min(near, key=lambda choice: (choice.unusual + 20 * choice.miss, choice.shape.hidden)).shape
    closest = min(choices, key=lambda choice: choice.miss).shape if choices else None
    words = ", ".join(f"{key.replace('_', '-')} {value:,}" for key, value in sizes.items())
    nearest = "" if closest is None else f"; the nearest is {closest.text} with {count(closest.params)}"
    raise ConfigError(
        f"no {family}{f' with {words}' if words else ''} has {count(size)} parameters{nearest}", key="size"
    )


def _choices(family: str, size: float, sizes: Mapping[str, int]) -> Iterator[_Choice]:
    """The shapes of each width, as deep as the size asks for, with the usual feed-forward and with one that is moved."""
    routed = min(1.0, sizes.get("top_k", 2) / sizes.get("experts", 8)) if family == "moe" else 1.0
    aspect = _aspect(size * routed)
    for hidden in _widths(sizes):
        if "heads" in sizes and hidden % sizes["heads"]:
            continue
        usual = _shape(family, {**sizes, "hidden": hidden, "layers": 1})
        ends = _resized(usual, layers=0).params
        layer = usual.params - ends
        depth = (size - ends) / layer
        for layers in [sizes["layers"]] if "layers" in sizes else _whole(depth, LAYERS):
            plain = _resized(usual, layers=layers)
            odd = abs(math.log(hidden / layers / aspect)) + _odd(layers, usual.heads, hidden)
            yield _Choice(plain, abs(plain.params / size - 1), odd)
            if "ffn" in sizes or abs(plain.params / size - 1) <= CLOSE:
                continue
            wide = (_resized(plain, ffn=plain.ffn + 1).params - plain.params) or 1
            for ffn in _whole((plain.ffn + (size - plain.params) / wide) / 64, (1, 10**6)):
                moved = _resized(plain, ffn=64 * ffn)
                yield _Choice(moved, abs(moved.params / size - 1), odd + abs(math.log(moved.ffn / plain.ffn)))


def _odd(layers: int, heads: int, hidden: int) -> float:
    """Return the penalty of sizes that no tensor or pipeline parallelism divides well, on the scale of a logarithm."""
    stages = 0.1 if layers % 2 else 0.05 if layers % 4 else 0.0
    ranks = next(penalty for by, penalty in ((8, 0.0), (4, 0.1), (2, 0.2), (1, 0.4)) if heads % by == 0)
    return stages + (ranks if hidden >= 2048 else ranks / 4)


def _resized(shape: Shape, **sizes: int) -> Shape:
    return msgspec.structs.replace(shape, **sizes)


def _widths(sizes: Mapping[str, int]) -> Iterable[int]:
    if "hidden" in sizes:
        return [sizes["hidden"]]
    low, high = HIDDEN
    return [*range(low, 2048, 64), *range(2048, high + 1, 128)]


def _whole(value: float, bounds: tuple[int, int]) -> Iterator[int]:
    """The whole numbers beside a value."""
    for number in {math.floor(value), math.ceil(value)}:
        if bounds[0] <= number <= bounds[1]:
            yield number
