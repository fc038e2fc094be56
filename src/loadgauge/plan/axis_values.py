"""Which values each axis may have, where the user does not say: all that the framework can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from loadgauge.lengths import Lengths
from loadgauge.plan.space import Space, divisors
from loadgauge.spec.layout import SCHEDULES, Layout, RecomputePolicy
from loadgauge.spec.model import ModelSpec, Moe
from loadgauge.spec.training import Training

RECOMPUTE = tuple(RecomputePolicy.parse(text) for text in ("none", "selective", "full"))
WHOLE_LAYERS = (RECOMPUTE[0], RECOMPUTE[-1])
"""The models of transformers checkpoint whole layers, or none."""
ALL = "all"

FRAMEWORKS: dict[str, dict[str, tuple[Any, ...]]] = {
    # Megatron-LM runs its own 1F1B and interleaved schedules; ZeRO 2 and 3 are Megatron-FSDP's.
    "megatron": {"schedule": ("1f1b", "interleaved")},
    # FSDP2 shards everything, or nothing (DDP).
    "torchtitan": {
        "zero": (0, 3), "schedule": ("1f1b", "gpipe", "interleaved", "zb-v", "dualpipev"),
    },
    "deepspeed": {
        "tp": (1,), "pp": (1,), "cp": (1,), "ep": (1,), "etp": (1,), "replicas": (1,), "schedule": ("1f1b",),
        "recompute": WHOLE_LAYERS,
    },
    # DDP, and FSDP's SHARD_GRAD_OP and FULL_SHARD.
    "huggingface": {
        "tp": (1,), "pp": (1,), "cp": (1,), "ep": (1,), "etp": (1,), "zero": (0, 2, 3), "schedule": ("1f1b",),
        "recompute": WHOLE_LAYERS,
    },
}  # fmt: skip
"""Values that a framework narrows down; the user's own go before these."""


def space_for(
    model: ModelSpec,
    training: Training,
    gpus: int,
    global_batch: int,
    seq_len: int,
    *,
    locks: dict[str, tuple[Any, ...]] | None = None,
    stage_layers: tuple[int, ...] | None = None,
    lengths: Lengths | None = None,
    base: Layout | None = None,
) -> Space:
    """Every layout that the framework can run. locks: values of an axis that the user wants, by its name.

    >>> from loadgauge import model, training
    >>> space = space_for(model("llama-3.1-8b"), training("megatron"), 8, 16, 4096, locks={"tp": (2,)})
    >>> space.tp, space.pp, space.micro_batch
    ((2,), (1, 2, 4, 8), (1, 2, 4, 8, 16))
    """
    locked = dict(locks or {})
    every = divisors(gpus)
    experts = [block.mlp for block in model.blocks if isinstance(block.mlp, Moe)]
    open_axes: dict[str, tuple[Any, ...]] = {
        "tp": every, "pp": every, "cp": every, "ep": every if experts else (1,), "etp": every if experts else (1,),
        "replicas": every, "micro_batch": divisors(global_batch), "vpp": tuple(range(1, model.num_hidden_layers + 1)),
        "recompute": RECOMPUTE, "schedule": SCHEDULES,
    }  # fmt: skip
    if training.kernels.attention == "eager":
        open_axes["cp"] = (1,)  # rings of eager attention are not modelled
    for name, values in locked.items():
        if name == "schedule" and values == (ALL,):
            locked[name] = SCHEDULES
    chosen = {**open_axes, **FRAMEWORKS[training.framework.name], **locked}
    space = Space(
        model=model, gpus=gpus, global_batch=global_batch, seq_len=seq_len, stage_layers=stage_layers, lengths=lengths,
        padded=training.kernels.attention == "eager", base=_common(base or Layout(seq_len=1)), **chosen,
    )  # fmt: skip
    return trimmed(space, keep=set(locked))


def _common(layout: Layout) -> Layout:
    """What all layouts of a space have in common with one."""
    return Layout(cp_comm=layout.cp_comm, order=layout.order, expert_imbalance=layout.expert_imbalance, seq_len=1)


def trimmed(space: Space, keep: set[str]) -> Space:
    """Without values that no layout can have whatever its other sizes, so that the arrays are smaller; never a user's own.

    >>> from loadgauge import model
    >>> trimmed(Space(model=model("llama-3.1-8b"), gpus=96, global_batch=96, seq_len=4096, tp=(1, 3, 8, 96)), set()).tp
    (1, 8)
    """
    model, base = space.model, msgspec.structs.replace(space.base, seq_len=space.seq_len, expert_imbalance=1.0)

    def exists(**sizes: Any) -> bool:
        layout = msgspec.structs.replace(base, global_batch=sizes.get("dp", 1), **sizes)
        return not layout.valid(model)

    def with_tp(tp: int) -> bool:
        return any(
            exists(tp=tp, sequence_parallel=spread) for spread in space.sequence_parallel if tp > 1 or not spread
        )

    tests: dict[str, Callable[[int], bool]] = {
        "tp": with_tp,
        "cp": lambda cp: exists(cp=cp),
        "ep": lambda ep: exists(dp=ep, ep=ep),
        "etp": lambda etp: exists(dp=etp, etp=etp),
    }
    kept = {
        name: tuple(value for value in getattr(space, name) if test(value)) or getattr(space, name)
        for name, test in tests.items()
        if name not in keep
    }
    pp = tuple(pp for pp in space.pp if pp <= model.num_hidden_layers) or space.pp
    return msgspec.structs.replace(space, pp=space.pp if "pp" in keep else pp, **kept)


def out_of_reach(space: Space) -> list[str]:
    """Why tensor, context and expert parallelism go no further than the values of a space: the next larger value that the
    GPUs divide by, and what `Layout.valid` has against it.

    >>> from loadgauge import model
    >>> space = Space(model=model("llama-3.1-8b"), gpus=64, global_batch=64, seq_len=4096, tp=(1, 2, 4, 8, 16, 32))
    >>> out_of_reach(space)[0]
    'tp 64: num_attention_heads over tp: 32 over 64 leaves 32'
    """
    base = msgspec.structs.replace(space.base, seq_len=space.seq_len, expert_imbalance=1.0)
    found = []
    experts = any(isinstance(block.mlp, Moe) for block in space.model.blocks)
    for name in ("tp", "cp", "ep", "etp") if experts else ("tp", "cp"):
        most = max(getattr(space, name))
        for value in (value for value in divisors(space.gpus) if value > most):
            with_dp = {"dp": value, "global_batch": value} if name in ("ep", "etp") else {"global_batch": 1}
            problems = msgspec.structs.replace(base, **{name: value}, **with_dp).valid(space.model)
            if problems:
                found.append(f"{name} {value}: {problems[0]}")
                break
    return found
