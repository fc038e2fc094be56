"""Mixtures of experts, as configs state them: how many experts, how wide, in which layers."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from loadgauge.core.definitions.model.model import Mlp, Moe
from loadgauge.core.families.common import Switch, switch
from loadgauge.core.families.reader import Reader, shown

Sparse = Callable[[Reader, int], Sequence[bool]]
"""From the config and the number of layers: whether each layer has experts."""
Shared = Callable[[Reader, int], int]
"""From the config and the width of one expert: the width of the shared experts together; 0: none."""


# Which layers have experts


def every_layer(reader: Reader, count: int) -> Sequence[bool]:
    """Return whether each of `count` layers has experts: all of them do."""
    return [True] * count


def after_first(reader: Reader, count: int) -> Sequence[bool]:
    """Return whether each of `count` layers has experts: all but the first `first_k_dense_replace` (DeepSeek)."""
    if reader.whole("moe_layer_freq", default=1) != 1:
        raise reader.unmodelled("moe_layer_freq", "experts in some layers only are not modelled for this family")
    first = reader.optional_whole("first_k_dense_replace", minimum=0) or 0
    return [i >= first for i in range(count)]


def stepped(reader: Reader, count: int) -> Sequence[bool]:
    """Return for each of `count` layers whether it has experts: each `decoder_sparse_step`-th, but for `mlp_only_layers` (Qwen)."""
    dense = set(reader.wholes("mlp_only_layers") or ())
    step = reader.whole("decoder_sparse_step")
    return [i not in dense and not (i + 1) % step for i in range(count)]


def listed(reader: Reader, count: int) -> Sequence[bool]:
    """Return whether each of `count` layers has experts: those in `moe_layers`, or else each `interleave_moe_layer_step`-th
    (Llama 4).
    """
    step = reader.whole("interleave_moe_layer_step", default=1)
    chosen = reader.wholes("moe_layers")
    return [not (i + 1) % step if chosen is None else i in chosen for i in range(count)]


def typed(reader: Reader, count: int) -> Sequence[bool]:
    """Return whether each of `count` layers has experts: by `mlp_layer_types`, or else all but the first (GLM-4.7 Flash)."""
    reader.ignore("first_k_dense_replace")
    types = reader.texts("mlp_layer_types")
    if types is None:
        return [i > 0 for i in range(count)]
    if len(types) != count or not set(types) <= {"dense", "sparse"}:
        raise reader.wrong("mlp_layer_types", f"must be dense or sparse for each of {count} layers")
    return [kind == "sparse" for kind in types]


def typed_or_first(reader: Reader, count: int) -> Sequence[bool]:
    """Return whether each of `count` layers has experts: by `mlp_layer_types`, or else all but the first `first_k_dense_replace`,
    which is one where neither the config nor the class says how many.
    """
    key = "first_k_dense_replace"
    stated = reader.has(key) or reader.class_default(key) is not None
    return typed(reader, count) if reader.texts("mlp_layer_types") or not stated else after_first(reader, count)


def after_dense(reader: Reader, count: int) -> Sequence[bool]:
    """Return whether each of `count` layers has experts: all but the first `num_dense_layers`."""
    dense = reader.whole("num_dense_layers", minimum=0)
    return [i >= dense for i in range(count)]


def between(reader: Reader, count: int) -> Sequence[bool]:
    """Return whether each of `count` layers has experts: each `moe_layer_interval`-th from `moe_layer_start_index` to
    `moe_layer_end_index` (ERNIE 4.5).
    """
    first, step = (
        reader.whole(f"moe_layer_{n}", default=1, minimum=m) for n, m in (("start_index", 0), ("interval", 1))
    )
    last = reader.whole("moe_layer_end_index", default=-1, minimum=-1)
    return [not (i + 1) % step and first <= i and (last == -1 or i <= last) for i in range(count)]


# What every token passes through


def no_shared(reader: Reader, width: int) -> int:
    """Width of the shared experts of a family that has none: 0."""
    return 0


def counted(*keys: str) -> Shared:
    """A reader of the width of the shared experts: one of `keys` is how many there are, each as wide as a routed one."""

    def shared(reader: Reader, width: int) -> int:
        return width * (reader.optional_whole(*keys, minimum=0) or 0)

    return shared


def wide(key: str) -> Shared:
    """A reader of the width of the shared expert: the value of `key`."""

    def shared(reader: Reader, width: int) -> int:
        return reader.whole(key, minimum=0)

    return shared


def one_more(reader: Reader, width: int) -> int:
    """Width of one shared expert that is as wide as a routed one."""
    return width


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """Keys in which a family states its mixture of experts. `count`, `per_token` and `width` are names of keys.

    A config must have those keys whose default in the class is null. The other fields are those of `Moe`.
    """

    count: tuple[str, ...]
    per_token: tuple[str, ...] = ("num_experts_per_tok",)
    width: str = "moe_intermediate_size"
    sparse: Sparse = every_layer
    shared: Shared = no_shared
    shared_gate: bool = False
    shared_bias: bool = False
    """The shared experts have biases where the dense MLPs have them."""
    activation: str = ""
    """Where it is not that of the dense MLPs."""
    expert_bias: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    router_score: Literal["softmax", "sigmoid", "sqrtsoftplus", "softmax_of_chosen"] = "softmax"
    scores_float32: bool = True
    norm_topk_prob: Switch = True
    router_float32: bool = False
    weights_float32: bool = False
    everywhere: bool = False
    zero_key: str = ""
    """The key of `Moe.zero_experts`."""


DEEPSEEK_V3 = Experts(
    count=("n_routed_experts", "num_local_experts"),
    sparse=after_first,
    shared=counted("n_shared_experts"),
    router_score="sigmoid",
    norm_topk_prob="norm_topk_prob",
    router_float32=True,
    weights_float32=True,
)


def expert_layers(reader: Reader, family: Experts, count: int, dense: Mlp) -> list[Moe | None]:
    """The experts of each layer; None where it has none, and `dense` is its MLP."""
    experts = _needed(reader, family.count)
    width = reader.whole(family.width)
    together = family.shared(reader, width)
    shared = Mlp(
        intermediate_size=together,
        gated=dense.gated,
        bias=dense.bias and family.shared_bias,
        activation=dense.activation,
    )
    moe = Moe(
        num_experts=experts,
        num_experts_per_tok=1,
        moe_intermediate_size=width,
        gated=dense.gated,
        activation=family.activation or dense.activation,
        expert_bias=family.expert_bias,
        router_bias=family.router_bias,
        correction_bias=family.correction_bias,
        router_score=family.router_score,
        scores_float32=family.scores_float32,
        norm_topk_prob=switch(reader, family.norm_topk_prob),
        router_float32=family.router_float32,
        weights_float32=family.weights_float32,
        everywhere=family.everywhere,
        shared=shared if together else None,
        shared_gate=family.shared_gate,
        groups=_groups(reader),
        zero_experts=reader.optional_whole(family.zero_key, minimum=0) or 0 if family.zero_key else 0,
    )
    layers = zip(_chosen(reader, family, count, experts), family.sparse(reader, count), strict=True)
    return [msgspec.structs.replace(moe, num_experts_per_tok=chosen) if sparse else None for chosen, sparse in layers]


def _groups(reader: Reader) -> tuple[int, int]:
    """Groups of experts, and to how many of them a token may go; one where a config says nothing of them."""
    count, chosen = (reader.optional_whole(key, default=None) or 1 for key in ("n_group", "topk_group"))
    return (count, chosen) if 1 < chosen < count and reader.raw("topk_method", default="") != "greedy" else (1, 1)


def _needed(reader: Reader, names: Sequence[str]) -> int:
    if reader.class_default(*names) is None and reader.raw(*names) is None:
        raise reader.wrong(names[0], "is missing, and this family has no default for it")
    return reader.whole(*names)


def _chosen(reader: Reader, family: Experts, count: int, experts: int) -> list[int]:
    """Experts that a token is sent to, in each layer; some families may list them layer by layer."""
    names = family.per_token
    key = next((name for name in names if reader.has(name)), names[0])
    if isinstance(reader.raw(*names), list):
        chosen = list(reader.wholes(key) or ())
        if len(chosen) < count:
            raise reader.wrong(key, f"has {len(chosen)} entries for {count} layers")
    else:
        chosen = [_needed(reader, names)] * count
    for number in set(chosen):
        if not 1 <= number <= experts:
            raise reader.wrong(key, f"{shown(number)} of {experts} experts cannot be chosen")
    return chosen[:count]
