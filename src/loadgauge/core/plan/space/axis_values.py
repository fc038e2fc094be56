"""Default values of each axis of a search: all that the framework can run."""

from collections.abc import Callable
from typing import Any

import msgspec

from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.layout.axes import AXES, MODEL_PARALLEL, STAGE_AXES
from loadgauge.core.definitions.layout.layout import SCHEDULES, Layout
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.frameworks import Framework
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.plan.space.space import Space, divisors
from loadgauge.core.resolve.recompute_words import every_policy, recompute_policy

RECOMPUTE = ("none", "selective", "full")
WHOLE_LAYERS = (RECOMPUTE[0], RECOMPUTE[-1])
"""The models of transformers checkpoint whole layers, or none."""
ALL = "all"


SPLIT_BY_PLAN = tuple(name for name in STAGE_AXES if name == "tp" or AXES[name].experts)
"""Axes that a captured model's own class may state."""


def narrowed(framework: Framework, sharded: bool = True) -> dict[str, tuple[Any, ...]]:
    """Return the values of the axes that a framework restricts, by axis; values that the user locks take precedence.

    sharded: whether ZeRO can shard the optimizer
    """
    narrow: dict[str, tuple[Any, ...]] = {} if framework.splits_model else dict.fromkeys(MODEL_PARALLEL, (1,))
    if not framework.hybrid_shards:
        narrow["replicas"] = (1,)
    if framework.zero_stages is not None:
        narrow["zero"] = framework.zero_stages
    if not sharded:
        narrow["zero"] = (0,)
    if not framework.recomputes_parts:
        narrow["recompute"] = WHOLE_LAYERS
    return {**narrow, "schedule": framework.schedules}


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
    padded: bool | None = None,
    base: Layout | None = None,
) -> Space:
    """Return the space of all layouts that the framework can run.

    locks: the values that an axis may have, by its name; base: a layout whose order of axes, cp exchange and expert imbalance
    all layouts share; padded: whether micro-batches of `lengths` are padded (None: where attention is eager)

    >>> from loadgauge import model, training
    >>> space = space_for(model("llama-3.1-8b"), training("megatron"), 8, 16, 4096, locks={"tp": (2,)})
    >>> space.tp, space.pp, space.micro_batch
    ((2,), (1, 2, 4, 8), (1, 2, 4, 8, 16))
    """
    locked = dict(locks or {})
    every = divisors(gpus)
    experts = model.has_experts
    open_axes: dict[str, tuple[Any, ...]] = {
        **{axis: every if experts or not AXES[axis].experts else (1,) for axis in MODEL_PARALLEL},
        "replicas": every,
        "micro_batch": divisors(global_batch),
        "vpp": tuple(range(1, model.num_hidden_layers + 1)),
        "recompute": RECOMPUTE,
        "schedule": SCHEDULES,
    }
    if training.kernels.attention == "eager":
        open_axes["cp"] = (1,)  # rings of eager attention are not modelled
    for name, values in locked.items():
        if name == "schedule" and values == (ALL,):
            locked[name] = SCHEDULES
    narrow = narrowed(training.framework, training.optimizer.sharded)
    if model.own.states_splits:  # its class states how it is split, whatever trains it
        narrow = {name: values for name, values in narrow.items() if name not in SPLIT_BY_PLAN}
    chosen: dict[str, Any] = {**open_axes, **narrow, **locked}
    if "least" in chosen["recompute"]:
        chosen["recompute"] = every_policy(model, training)
    chosen["recompute"] = tuple(recompute_policy(str(policy), model, training) for policy in chosen["recompute"])
    space = Space(
        model=model,
        gpus=gpus,
        global_batch=global_batch,
        seq_len=seq_len,
        stage_layers=stage_layers,
        lengths=lengths,
        padded=training.kernels.attention == "eager" if padded is None else padded,
        base=_common(base or Layout(seq_len=1)),
        **chosen,
    )
    return trimmed(space, keep=set(locked))


def _common(layout: Layout) -> Layout:
    """Return the parts that all layouts of a space share with one."""
    return Layout(cp_comm=layout.cp_comm, order=layout.order, expert_imbalance=layout.expert_imbalance, seq_len=1)


def trimmed(space: Space, keep: set[str]) -> Space:
    """Return the space without values that no valid layout has, whatever its other sizes; axes in `keep` stay as they are.

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
        "pp": lambda pp: pp == 1 or exists(pp=pp, stage_layers=(model.num_hidden_layers - pp + 1, *(1,) * (pp - 1))),
    }
    kept = {
        name: tuple(value for value in getattr(space, name) if test(value)) or getattr(space, name)
        for name, test in tests.items()
        if name not in keep
    }
    return msgspec.structs.replace(space, **kept)


def out_of_reach(space: Space) -> list[str]:
    """Explain why tp, cp, ep and etp stop at the largest values of a space: for each axis the next divisor of the GPUs and
    what `Layout.valid` objects to.

    >>> from loadgauge import model
    >>> space = Space(model=model("llama-3.1-8b"), gpus=64, global_batch=64, seq_len=4096, tp=(1, 2, 4, 8, 16, 32))
    >>> out_of_reach(space)[0]
    'tp 64: num_attention_heads over tp: 32 over 64 leaves 32; 32 divides it'
    """
    base = msgspec.structs.replace(space.base, seq_len=space.seq_len, expert_imbalance=1.0)
    reasons = []
    experts = space.model.has_experts
    for name in (axis for axis in STAGE_AXES if experts or not AXES[axis].experts):
        most = max(getattr(space, name))
        for value in (value for value in divisors(space.gpus) if value > most):
            with_dp = {"dp": value, "global_batch": value} if AXES[name].experts else {"global_batch": 1}
            problems = msgspec.structs.replace(base, **{name: value}, **with_dp).valid(space.model)
            if problems:
                reasons.append(f"{name} {value}: {problems[0]}")
                break
    return reasons
