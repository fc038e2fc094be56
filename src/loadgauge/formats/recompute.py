"""Recompute policies whose operations depend on the model: how files say them and what they mean, both ways."""

from __future__ import annotations

from itertools import combinations

from loadgauge.layers import View, block_layer
from loadgauge.layers.attention import CORE
from loadgauge.spec.model import ModelSpec, Moe
from loadgauge.spec.training import Training

KEPT = {"attention.query", "attention.value", "attention.flash", "attention.context", "attention.qkv"}
KEPT |= {"mlp.gate", "mlp.down", "mlp.gate_up"}
LATENT = {"attention.query_up", "attention.key_value_up", "attention.rotary_q", "attention.rotary_k"}
LATENT |= {"attention.query_joined", "attention.key_joined", "attention.value"}
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


def resolve_recompute(word: str, model: ModelSpec, training: Training) -> str:
    """Translates a recompute policy of a job file into one of the command line: `per-op` (torchtitan: attention and every
    second matrix product keep their outputs) and `modules:...` (Megatron) become operations of the model.

    >>> from loadgauge.families.reference import llama_model
    >>> from loadgauge.spec.training import training
    >>> resolve_recompute("modules:layernorm", llama_model(2, 64, 4, 100), training("megatron"))
    'attention.norm,mlp.norm'
    """
    kind, _, modules = word.partition(":")
    if kind == "per-op":
        return ",".join(sorted(_per_op(model, training)))
    if kind == "modules":
        return ",".join(sorted(_of_modules(modules.split(","), model, training))) or "none"
    return word


def spell_recompute(policy: str, model: ModelSpec, training: Training) -> str:
    """Translates a recompute policy of the command line into `per-op` or `modules:...` where one means these operations for
    the model; any other policy stays as it is."""
    if policy.partition(":")[0] in ("none", "selective", "full"):
        return policy
    wanted = {name.strip() for name in policy.split(",")}
    if wanted == _per_op(model, training):
        return "per-op"
    for count in range(1, 4):
        for modules in combinations(MODULES, count):
            if wanted == _of_modules(list(modules), model, training):
                return f"modules:{','.join(modules)}"
    return policy


def _names(model: ModelSpec, training: Training) -> list[frozenset[str]]:
    view = View(tokens=1, pairs=1, kernels=training.kernels)
    return [block_layer(block, model.hidden_size, view).names for block in model.blocks]


def _per_op(model: ModelSpec, training: Training) -> frozenset[str]:
    gated = any(block.mlp is not None and block.mlp.gated for block in model.blocks)
    kept = KEPT | (set() if gated else {"mlp.up"})
    return frozenset.intersection(*_names(model, training)) - kept


def _of_modules(modules: list[str], model: ModelSpec, training: Training) -> frozenset[str]:
    chosen: set[str] = set()
    for block, names in zip(model.blocks, _names(model, training), strict=True):
        routed = isinstance(block.mlp, Moe)
        halves = {name for name in names if name.startswith("mlp.") and name not in ("mlp.residual", "mlp.norm")}
        means = {
            "core_attn": names & CORE, "layernorm": names & {"attention.norm", "mlp.norm"},
            "mla_up_proj": names & LATENT, "mlp": set() if routed else halves, "moe": halves if routed else set(),
            "moe_act": names & {"mlp.activation", "mlp.multiply", "mlp.split"} if routed else set(),
            "shared_experts": {name for name in names if name.startswith("mlp.shared")},
        }  # fmt: skip
        for module in modules:
            chosen |= means[module]
    return frozenset(chosen) & frozenset.union(*_names(model, training))
