"""Recompute policies whose operations depend on the model: how files say them and what they mean, both ways."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations

import msgspec

from loadgauge.core.base.errors import ConfigError, refuse
from loadgauge.core.definitions.layout.layout import LEAST, RecomputePolicy
from loadgauge.core.definitions.model.model import ModelSpec, Moe
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.layers import View, block_layers
from loadgauge.core.layers.attention.attention import CORE
from loadgauge.core.layers.operations.operations import Layer, Recompute

INTENSITIES = (150.0, 600.0)
"""FLOPs that take as long as moving a byte, from the least to the most that kernels of cards reach."""
MOST_SETS = 64
SEQUENCE = 4096
"""Tokens of the sequence by which a memory budget is shared out."""
KEPT = {"attention.query", "attention.value", "attention.flash", "attention.context", "attention.qkv"}
KEPT |= {"mlp.gate", "mlp.down", "mlp.gate_up"}
LATENT = {"attention.query_up", "attention.key_value_up", "attention.rotary_q", "attention.rotary_k"}
LATENT |= {"attention.query_joined", "attention.key_joined", "attention.value"}
ACTIVATION = {"mlp.activation", "mlp.multiply", "mlp.split", "mlp.gate_clamped", "mlp.up_clamped", "mlp.clamped"}
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
SAID = {
    **dict.fromkeys(("norm", "norms", "rmsnorm", "rms_norm", "layer_norm"), "layernorm"),
    "mla_up": "mla_up_proj",
    **dict.fromkeys(("attn", "attention", "flash_attention"), "core_attn"),
    **dict.fromkeys(("swiglu", "geglu", "gelu", "silu", "activation", "act_fn"), "act"),
}
"""Words of papers for what runs again, as modules; `act` is what stands between the matrices of an MLP, its experts' too."""

NAMES = {
    "query_proj": ("attention.query",), "key_proj": ("attention.key",), "value_proj": ("attention.value",),
    "kv_proj": ("attention.key", "attention.value"), "out_proj": ("attention.output",),
    "qkv_proj": ("attention.query", "attention.key", "attention.value", "attention.qkv"),
    "context": ("attention.flash", "attention.context"), "mlpwi_0": ("mlp.gate", "mlp.gate_up"), "mlpwi_1": ("mlp.up",),
    "mlpwi": ("mlp.gate", "mlp.up", "mlp.gate_up"), "mlpwo": ("mlp.down",),
}  # fmt: skip
"""MaxText's names of tensors, as the operations whose outputs they are (source: maxtext, `configs/base.yml`)."""
REMAT = {
    "full": "", "minimal": "qkv_proj out_proj mlpwi mlpwo", "save_out_proj": "out_proj", "save_qkv_proj": "qkv_proj",
    "minimal_with_context": "qkv_proj context out_proj mlpwi mlpwo", "save_dot_except_mlp": "qkv_proj out_proj",
    "save_dot_with_context_except_mlp": "qkv_proj context out_proj", "save_dot_except_mlpwi": "qkv_proj out_proj mlpwo",
    "qkv_proj_offloaded": "qkv_proj", "minimal_offloaded": "qkv_proj out_proj mlpwi mlpwo",
}  # fmt: skip
REMAT["minimal_flash"] = REMAT["minimal_with_context"]
"""MaxText's `remat_policy` and what each keeps; those that are offloaded wait in host memory and come back beside the computing
(source: maxtext, `layers/decoders.py`, `get_remat_policy`)."""


def resolve_recompute(word: str, model: ModelSpec, training: Training) -> str:
    """Translates a recompute policy into operations of the model: `per-op` (torchtitan's `selective`: attention and
    every second matrix product keep their outputs), `memory_budget=0.5` (torch.compile: what costs least to make again, until
    the layer keeps that share), `modules:...` (Megatron) and `remat:...` (MaxText: the name of a `remat_policy`, or
    `remat:custom=` with what is kept, joined by +); words of papers stand beside names of operations (`norm,swiglu,mlp.up`).
    Any other stays as it is. Raises `ConfigError` for an unknown name.

    >>> from loadgauge.core.families.reference import llama_model
    >>> from loadgauge.core.definitions.training.training import training
    >>> resolve_recompute("modules:layernorm", llama_model(2, 64, 4, 100), training("megatron"))
    'attention.norm,mlp.norm'
    >>> resolve_recompute("norm,swiglu", llama_model(2, 64, 4, 100), training("megatron"))
    'attention.norm,mlp.multiply,mlp.norm'

    Compiled, `per-op` does not keep what no gradient reads (torch 2.13, `min_cut_rematerialization_partition`):

    >>> ["mlp.down" in resolve_recompute("per-op", llama_model(2, 64, 4, 100), training("torchtitan", compiled=compiled))
    ...  for compiled in (False, True)]
    [False, True]
    """
    kind, _, modules = word.partition(":")
    refuse(kind == LEAST, "least: needs `loadgauge plan`, which chooses what runs again", key="recompute")
    if kind.startswith("memory_budget="):
        return ",".join(sorted(_budget(kind.partition("=")[2], model, training))) or "none"
    if kind == "per-op":
        return ",".join(sorted(_per_op(model, training))) or "none"
    if kind == "modules":
        return ",".join(sorted(_of_modules(modules.split(","), model, _names(model, training)))) or "none"
    if kind == "remat":
        return _remat(modules, model, training)
    words = {SAID.get(each.strip(), each.strip()) for each in word.split(",")}
    if halves := words.intersection((*MODULES, "act")):
        return (
            ",".join(sorted(_of_modules(sorted(halves), model, _names(model, training)) | (words - halves))) or "none"
        )
    return word


def recompute_policy(word: str, model: ModelSpec, training: Training) -> RecomputePolicy:
    """Return the policy that a word of `--recompute` means in a framework.

    >>> from loadgauge.core.families.reference import llama_model
    >>> from loadgauge.core.definitions.training.training import training
    >>> str(recompute_policy("selective", llama_model(2, 64, 4, 100), training("torchtitan")))
    'per-op'
    """
    own = training.framework.selective if word == "selective" else word
    operations = resolve_recompute(own, model, training)
    policy = RecomputePolicy.parse(operations)
    return policy if operations == own else msgspec.structs.replace(policy, word=own)


def light_modules(model: ModelSpec, training: Training) -> str:
    """Return the policy of Megatron's modules that run again for little: all but feed-forwards and experts, whose products
    and exchanges are most of a layer (megatron-bridge, docs/training/activation-recomputation.md).

    >>> from loadgauge.core.families.reference import llama_model
    >>> from loadgauge.core.definitions.training.training import training
    >>> light_modules(llama_model(2, 64, 4, 100), training("megatron"))
    'modules:core_attn,layernorm'
    """
    light = (name for name in MODULES if name not in ("mlp", "moe", "shared_experts"))
    names = _names(model, training)
    return "modules:" + ",".join(name for name in light if _of_modules([name], model, names))


def every_policy(model: ModelSpec, training: Training) -> tuple[str, ...]:
    """Return the policies among which a planner finds the least that fits: none; where parts of a layer can run again, every set
    of Megatron's modules and, in frameworks that choose by operation, the sets of operations that save the most for what they take
    (`_front`); the first n layers of each stage, every n-th layer, all layers.

    >>> from loadgauge.core.families.reference import llama_model
    >>> from loadgauge.core.definitions.training.training import training
    >>> every_policy(llama_model(2, 64, 4, 100), training("megatron"))[:3]
    ('none', 'modules:core_attn', 'modules:layernorm')
    """
    layers, framework = model.num_hidden_layers, training.framework
    named = _names(model, training)
    modules = [name for name in MODULES if framework.recomputes_parts and _of_modules([name], model, named)]
    sets = (chosen for count in range(1, len(modules) + 1) for chosen in combinations(modules, count))
    parts = ["modules:" + ",".join(chosen) for chosen in sets]
    if framework.selective == "per-op":
        parts += [
            ",".join(sorted(chosen)) for each in INTENSITIES for chosen in _front(model, training, each) if chosen
        ]
    whole = (f"full:{how}={number}" for how, first in (("layers", 1), ("every", 2)) for number in range(first, layers))
    by_meaning: dict[str, str] = {}
    for word in ("none", *parts, *whole, "full"):
        by_meaning.setdefault(resolve_recompute(word, model, training), word)
    return tuple(by_meaning.values())


def taken_for(word: str, training: Training) -> str:
    """Return a remark on a word of `--recompute` that means something of the framework's own, or saves nothing in it; else ""."""
    framework = training.framework
    if word != "selective":
        return ""
    if framework.selective != word:
        return (
            f"{framework.selective} ({framework.name}'s selective: attention and every second matrix product are kept)"
        )
    saves = "" if training.kernels.attention == "eager" else "; it saves nothing, as flash attention keeps no scores"
    if not framework.recomputes_parts:
        return f"selective (Megatron's, attention alone{saves}; {framework.name} itself has none and full)"
    return f"selective (attention alone{saves}; full or names of operations do)" if saves else ""


def _remat(policy: str, model: ModelSpec, training: Training) -> str:
    custom, equals, kept = policy.partition("=")
    if custom == "custom" and equals:
        names = kept.split("+")
    elif policy in REMAT:
        names = REMAT[policy].split()
    else:
        raise ConfigError(
            f"unknown remat policy {policy[:40]!r} (known: {', '.join(REMAT)}, custom=NAME+NAME)", key="recompute"
        )
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ConfigError(f"unknown tensor {unknown[0][:40]!r} (known: {', '.join(NAMES)})", key="recompute")
    keeps = {operation for name in names for operation in NAMES[name]}
    return ",".join(sorted(frozenset.union(*_names(model, training)) - keeps)) if keeps else "full"


def spell_recompute(policy: str, model: ModelSpec, training: Training) -> str:
    """Translates a recompute policy of the command line into `per-op` or `modules:...` where one means these operations for
    the model; any other policy stays as it is."""
    if policy.partition(":")[0] in ("none", "selective", "full"):
        return policy
    policy = resolve_recompute(policy, model, training)
    wanted = {name.strip() for name in policy.split(",")}
    if wanted == _per_op(model, training):
        return "per-op"
    named = _names(model, training)
    for count in range(1, 4):
        for modules in combinations(MODULES, count):
            if wanted == _of_modules(list(modules), model, named):
                return f"modules:{','.join(modules)}"
    return policy


def _names(model: ModelSpec, training: Training) -> list[frozenset[str]]:
    """Of each kind of block, the names of its operations, without those of adapters."""
    view = View(tokens=1, pairs=1, kernels=training.kernels)
    names = [layer.names for layer in block_layers(model.blocks, model.hidden_size, view)]
    if training.lora is None:
        return names
    tuned = msgspec.structs.replace(view, lora=training.lora)  # beside adapters, two products may be one
    adapted = [layer.names for layer in block_layers(model.blocks, model.hidden_size, tuned)]
    return [both & (plain | {"mlp.gate_up"}) for plain, both in zip(names, adapted, strict=True)]


def _per_op(model: ModelSpec, training: Training) -> frozenset[str]:
    gated = any(block.mlp is not None and block.mlp.gated for block in model.blocks)
    kept = KEPT | (set() if gated else {"mlp.up"})
    if training.kernels.compiled:
        kept = kept - {"mlp.down"}  # whose output nothing reads in backward, which the compiler sees
    # Products of several experts run again, and what they sent each other is kept (source: torchtitan 0.3,
    # `distributed/activation_checkpoint.py`).
    names = _names(model, training)
    scattered = training.kernels.experts == "scattered" and model.has_experts
    first = (
        {"mlp.gate", "mlp.gate_up"}.intersection(*(own for own in names if "mlp.router" in own)) if scattered else set()
    )
    common = frozenset.intersection(*names) or frozenset.union(
        *names
    )  # layers that are a mixer or an MLP alone share none
    return (common - kept - {"mlp.dispatch"}) | {f"{name}@experts" for name in first}


def of_kinds(chosen: dict[bool, set[str]], names: dict[bool, frozenset[str]]) -> frozenset[str]:
    """Return names of operations with `@dense` or `@experts` where the layers of the other kind have one of that name that
    is not chosen. chosen, names: by whether a layer has experts

    >>> sorted(of_kinds({False: {"mlp.down", "mlp.up"}, True: set()}, {False: frozenset(("mlp.down", "mlp.up")),
    ...                                                               True: frozenset(("mlp.down",))}))
    ['mlp.down@dense', 'mlp.up']
    """
    words = {False: "dense", True: "experts"}
    return frozenset(
        f"{name}@{words[routed]}"
        if name in names.get(not routed, ()) and name not in chosen.get(not routed, ())
        else name
        for routed, own in chosen.items()
        for name in own
    )


def _budget(text: str, model: ModelSpec, training: Training) -> frozenset[str]:
    """The operations that torch.compile's `activation_memory_budget` makes again, the cheapest by FLOPs a byte first."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    refuse(not 0 <= share <= 1, f"memory_budget must be a share from 0 to 1, got {text[:20]!r}", key="recompute")
    chosen: set[str] = set()
    for layer in _layers(model, training):
        most = share * float(layer.saved())
        own: set[str] = set()
        for name in _by_price(layer):
            if float(layer.saved(Recompute(discarded=frozenset(own)))) <= most:
                break
            own.add(name)
        chosen |= own
    return frozenset(chosen)


def _layers(model: ModelSpec, training: Training) -> list[Layer]:
    view = View.of(SEQUENCE, 1, kernels=training.kernels)
    return list(block_layers(model.blocks, model.hidden_size, view))


def _by_price(layer: Layer) -> list[str]:
    """The operations of a layer whose outputs can be made again, the cheapest by FLOPs a byte first."""
    built = {
        operation.name: float(sum(tensor.nbytes for tensor in operation.outputs))
        for operation in layer
        if operation.gradients
    }
    price = {
        operation.name: float(operation.forward_flops) / max(built.get(operation.name, 0.0), 1.0) for operation in layer
    }
    return sorted(built, key=lambda name: price[name])


def _freeing(layer: Layer) -> Iterator[frozenset[str]]:
    """Yield the sets of operations that run again so that a tensor need not be kept: its maker, then too the makers of what these
    would have kept in its place, and so on."""
    made_by = {tensor.name: each.name for each in layer if each.gradients for tensor in each.outputs}
    kept = {tensor.name for tensor in layer.kept()}
    for first in {made_by[name] for name in sorted(kept) if name in made_by}:
        chosen, more = frozenset[str](), {first}
        while more:
            chosen |= more
            yield chosen
            now = (tensor.name for tensor in layer.kept(Recompute(discarded=chosen)))
            more = {made_by[name] for name in now if name not in kept and name in made_by} - chosen


def _front(model: ModelSpec, training: Training, intensity: float) -> list[frozenset[str]]:
    """Return the sets of operations of which no other keeps less for as little work, of all layers together: what a set frees is
    joined to what others free, one after another, and what another beats is dropped; of many, `MOST_SETS` are left.

    intensity: FLOPs that take as long as a byte that is moved
    """
    layers = [(layer, times) for layer, times in zip(_layers(model, training), model.layer_counts(), strict=True)]
    work: dict[str, float] = {}
    for layer, times in layers:
        for each in layer:
            moved = sum(tensor.nbytes for tensor in (*each.inputs, *each.outputs))
            work[each.name] = work.get(each.name, 0.0) + times * float(each.forward_flops + intensity * moved)

    def kept(chosen: frozenset[str]) -> float:
        return sum(times * float(layer.saved(Recompute(discarded=chosen & layer.names))) for layer, times in layers)

    front = {frozenset[str](): kept(frozenset())}
    for more in sorted(
        {own for layer, _ in layers for own in _freeing(layer)}, key=lambda own: (len(own), sorted(own))
    ):
        front |= {chosen | more: kept(chosen | more) for chosen in front if not more <= chosen}
        ranked = sorted(front, key=lambda chosen: (sum(work[name] for name in chosen), front[chosen], sorted(chosen)))
        least = list(accumulate((front[chosen] for chosen in ranked), min))
        front = {chosen: front[chosen] for n, chosen in enumerate(ranked) if not n or front[chosen] < least[n - 1]}
        if len(front) > MOST_SETS:  # of each band of bytes the one that takes least
            band = (max(front.values()) - min(front.values())) / MOST_SETS
            front = dict({size // band: (chosen, size) for chosen, size in reversed(front.items())}.values())
    return list(front)


def _of_modules(modules: list[str], model: ModelSpec, named: Sequence[frozenset[str]]) -> frozenset[str]:
    chosen: dict[bool, set[str]] = {}
    every: dict[bool, frozenset[str]] = {}
    for block, names in zip(model.blocks, named, strict=True):
        routed = isinstance(block.mlp, Moe)
        every[routed] = every.get(routed, frozenset()) | names
        halves = {name for name in names if name.startswith("mlp.") and name not in ("mlp.residual", "mlp.norm")}
        means = {
            "core_attn": names & CORE,
            "layernorm": names & {"attention.norm", "mlp.norm"},
            "mla_up_proj": names & LATENT if "attention.key_value_up" in names else set(),
            "mlp": set() if routed else halves,
            "moe": halves if routed else set(),
            "moe_act": names & ACTIVATION if routed else set(),
            "act": names & ACTIVATION,
            "shared_experts": {name for name in names if name.startswith("mlp.shared")},
        }
        for module in modules:
            chosen.setdefault(routed, set()).update(means[module] & names)
    return of_kinds(chosen, every)
