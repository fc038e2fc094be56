"""Recomputation policies applied to a layer and to a stage."""

from typing import NamedTuple

import msgspec

from loadgauge.core.base import ConfigError, Size
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.layers import View, block_layers
from loadgauge.core.layers.attention.attention import CORE
from loadgauge.core.layers.operations.operations import NOTHING, Collective, Layer, Operation, Recompute


def applied(policy: RecomputePolicy, layer: Layer, model: frozenset[str] = frozenset()) -> Recompute:
    """Return the operations of one layer that a recompute policy runs again in backward.

    Names of operations are dropped for everyone (as Megatron's and PyTorch's selective checkpointing do); a name without
    a dot means all operations of that half; `@dense` and `@experts` after it mean the layers without and with experts alone.
    Raises `ConfigError` for a name that no operation of the layer has, unless one of the whole `model` has it, as in models of
    several kinds of blocks.
    """
    # Steps around the blocks of a tower are in none that is checkpointed.
    if policy.mode == "none" or layer.name == "tower" or not layer.operations[-1].gradients:
        return NOTHING
    if policy.mode == "selective" and layer.profile is not None:
        return Recompute(checkpointed=_core(layer))
    if policy.mode == "selective":
        return Recompute(
            checkpointed=frozenset(
                operation.name for operation in layer if operation.name in CORE and operation.gradients
            )
        )
    if policy.mode == "full":
        return Recompute(checkpointed=layer.names)
    chosen: set[str] = set()
    # Fused kernels make the activation within the product with the gate.
    within = {f"{name.removesuffix('multiply')}activation" for name in layer.names if name.endswith(".multiply")}
    kind = "experts" if any(weight.expert for weight in layer.weights) else "dense"
    for word in policy.ops:
        name, _, only = word.partition("@")
        matches = _named(name, layer.names) if only in ("", kind) else set()
        if not matches and name not in within and not _named(name, model):
            names = ", ".join(sorted(layer.names | model))
            raise ConfigError(f"no operation {name!r} in this model's layers (known: {names})", key="recompute")
        chosen |= matches
    return Recompute(
        discarded=frozenset(operation.name for operation in layer if operation.name in chosen and operation.gradients)
    )


def in_parts(layers: tuple[Layer, ...], layout: Layout) -> tuple[Layer, ...]:
    """Return layers whose inputs are kept in parts, where the policy says so; under sequence parallelism they are already."""
    if not layout.recompute.partitioned or layout.sequence_parallel:
        return layers
    return tuple(_partitioned(layer, layout.tp, layout.recompute.group) for layer in layers)


def _partitioned(layer: Layer, ranks: Size, group: int) -> Layer:
    """Return a layer that is handed a rank's part of its input to keep, and gathers the whole one when it runs again (source:
    rajbhandari2019, section 6.1; DeepSpeed, `gather_partitioned_activations`). group: layers of which one gathers"""
    whole = next((tensor for operation in layer for tensor in operation.inputs if tensor.name == "input"), None)
    if whole is None:
        return layer
    part = msgspec.structs.replace(whole, name="input.part", numel=whole.numel / ranks)
    gather = Collective("all_gather", "tp", whole.nbytes / group, ranks)
    first = Operation("input.gather", "view", (part,), (whole,), again_comm=(gather,), shares_gradient=True)
    return Layer(layer.name, (first, *layer.operations), layer.profile)


def _core(layer: Layer) -> frozenset[str]:
    """The attention itself in a captured layer: its kernel, or where it is written out, the two products around a softmax."""
    operations = layer.operations
    attention = {operation.name for operation in operations if operation.kind == "attention"}
    products = [
        index
        for index, operation in enumerate(operations)
        if operation.gemms and not (operation.weights or operation.borrows)
    ]
    for index, each in enumerate(operations):
        before, after = [at for at in products if at < index], [at for at in products if at > index]
        if "softmax" in each.name and before and after:
            attention |= {inner.name for inner in operations[before[-1] : after[0] + 1]}
    if not attention:
        raise ConfigError(
            "selective: no attention is found in the captured layers; full, or names of operations", key="recompute"
        )
    return frozenset(attention)


MODULES = {
    "attn_norm": {"attention.norm"},
    "qkv_linear": {f"attention.{name}" for name in ("query", "key", "value", "qkv")},
    "core_attn": CORE,
    "attn_proj": {"attention.output"},
    "mlp_norm": {"mlp.norm"},
    "expert_fc1": {f"mlp.{name}@experts" for name in ("gate", "up", "gate_up")},
    "moe_act": {f"mlp.{name}@experts" for name in ("activation", "multiply")},
}
"""Megatron's `--offload-modules`, each as the operations whose kept tensors leave the card (source: megatron-core,
user-guide/features/fine_grained_activation_offloading)."""
OF_EXPERTS = ("expert_fc1", "moe_act")
"""Of these, what only layers of experts have."""


class Leaving(NamedTuple):
    """Tensors that a layer keeps and that are in host memory alone, and the bytes of all that it has: of these, and of copies of
    what something else keeps on the card."""

    names: frozenset[str] = frozenset()
    nbytes: Size = 0


def leaving(words: str, layer: Layer, recompute: Recompute, model: frozenset[str]) -> Leaving:
    """Return the tensors that leave the card. words: see `Host.activations`; model: names of all its operations

    Raises `ConfigError` for an unknown word.
    """
    chosen = set(words.split(",")) - {"none"}
    if not chosen:
        return Leaving()
    if "least" in chosen:
        raise ConfigError("least: needs `loadgauge plan`, which chooses what is off the card", key="activation_offload")
    kept = {tensor.name: tensor.nbytes for tensor in layer.kept(recompute)}
    if "all" in chosen or ("checkpoints" in chosen and recompute):
        return Leaving(frozenset(kept), sum(kept.values()))
    named: set[str] = set()
    for word in chosen - {"checkpoints"}:
        own = _hosted(word, model)
        if not own and word not in MODULES:
            accepted = ", ".join(("none", "checkpoints", "all", *MODULES))
            raise ConfigError(f"no module or operation {word[:40]!r} (known: {accepted})", key="activation_offload")
        named |= own
    moved = applied(RecomputePolicy(mode="ops", ops=frozenset(named)), layer, model).discarded if named else set()
    holders = {name: set(layer.keepers(name, recompute)) for name in kept} if moved else {}
    names = frozenset(name for name, by in holders.items() if by <= moved)
    return Leaving(names, sum(kept[name] for name, by in holders.items() if by & moved))


def _hosted(word: str, model: frozenset[str]) -> set[str]:
    """Return the operations that a word of `--activation-offload` means, of those that a model has; none of another's."""
    return {name for name in MODULES.get(word, {word}) if _named(name.partition("@")[0], model)}


def offload_words(model: ModelSpec, training: Training) -> tuple[str, ...]:
    """Return what may be off the card between forward and backward: checkpoints, all, what one of Megatron's modules keeps.

    >>> from loadgauge.core.families.reference import llama_model
    >>> from loadgauge.core.definitions.training.training import training
    >>> offload_words(llama_model(2, 64, 4, 100), training("megatron"))[:3]
    ('checkpoints', 'all', 'attn_norm')
    """
    view = View.of(1, 1, kernels=training.kernels)
    layers = block_layers(model.blocks, model.hidden_size, view)
    names = frozenset(name for layer in layers for name in layer.names)
    own = (word for word in MODULES if _hosted(word, names) and (model.has_experts or word not in OF_EXPERTS))
    return ("checkpoints", "all", *own)


def _named(name: str, operations: frozenset[str]) -> set[str]:
    return {operation for operation in operations if operation == name or operation.startswith(f"{name}.")}


def recomputed_counts(model: ModelSpec, policy: RecomputePolicy, start: int, stop: int) -> tuple[int, ...]:
    """Return, for each distinct block, how many of its layers in `start:stop` the policy recomputes."""
    if policy.mode == "none":
        return (0,) * len(model.blocks)
    chosen = model.pattern[start:stop]
    chosen = chosen[: policy.layers] if policy.layers is not None else chosen[policy.every - 1 :: policy.every]
    return tuple(chosen.count(index) for index in range(len(model.blocks)))


def checkpointed(layers: Size, checkpoints: Size, input_bytes: Size, layer_bytes: Size) -> Size:
    """Return the bytes kept with c checkpoints over L layers: c A_in + (L / c) A_layer.

    A_in: `input_bytes` of one layer; A_layer: `layer_bytes`, all it keeps. The minimum is at c = sqrt(L A_layer / A_in)
    (source: narayanan2021, section 3.5; chen2016).

    >>> checkpointed(48, 48, 2, 34)
    130.0
    """
    return checkpoints * input_bytes + layers / checkpoints * layer_bytes
