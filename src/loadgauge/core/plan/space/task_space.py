"""The layouts of a trainer and its rollout that a plan of a task tries."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.hardware.cluster import GPUS_PER_NODE
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import TRAINER_AXES
from loadgauge.core.definitions.serving.rollout import ENGINES, Engine
from loadgauge.core.definitions.training.tasks import TASKS
from loadgauge.core.resolve.model import found_model


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The values of every axis. rollout_tp, share: of the engine, share as its own option means it; placement: as of the flag

    wider: values of axes of a second search, of layouts across nodes, where nothing of the first fits
    """

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    ep: tuple[int, ...] = (1,)
    zero: tuple[int, ...]
    recompute: tuple[str, ...]
    micro_batch: tuple[int, ...]
    logprob_batch: tuple[int | None, ...]
    rollout_tp: tuple[int, ...]
    share: tuple[float, ...]
    placement: tuple[str | None, ...]
    wider: dict[str, tuple[Any, ...]] = {}

    @classmethod
    def of(cls, job: Job, stated: dict[str, tuple[Any, ...]]) -> Space:
        """Return the space around a job. given: axes that are locked or narrowed; a --rollout or --placement locks its own

        >>> Space.of(Job("qwen3-32b", task="grpo", gpus=16, rollout="vllm:tp=4"), {}).rollout_tp
        (4,)
        """
        gpus, generates = job.gpus or 1, TASKS[job.task or ""].rollout
        inside = tuple(degree for degree in (1, 2, 4, 8) if degree <= min(gpus, GPUS_PER_NODE))
        engine = None if job.rollout is None else Engine.parse(job.rollout)
        named = (job.rollout or "").partition(":")[2]
        kind = engine.kind if engine is not None else "vllm"
        own = ENGINES[kind].share
        fixed = own and own in named.replace("gpu_memory_utilization", own).replace("mem_fraction_static", own)
        placements: tuple[str | None, ...] = ("colocated",) if generates else (None,)
        if job.staleness:
            placements = tuple(
                f"split:{trainer}+{gpus - trainer}"
                for trainer in sorted({max(1, eighths * gpus // 8) for eighths in range(1, 8)})
                if trainer < gpus
            )
        usual: dict[str, tuple[Any, ...]] = {
            "tp": inside,
            "pp": inside,
            "ep": tuple(dict.fromkeys((1, inside[-1]))) if _has_experts(job) else (1,),
            "zero": (1, 3),
            "recompute": ("none", "selective", "full"),
            "micro_batch": (1, 2, 4, 8),
            "logprob_batch": (1, 4, 16) if generates and job.logprob_tokens is None else (None,),
            "rollout_tp": (engine.tp,) if engine is not None and "tp" in named else inside,
            "share": (getattr(engine, own),)
            if fixed and engine is not None
            else (0.5, 0.6, 0.7, 0.8, 0.9)
            if own
            else (0.0,),
            "placement": (job.placement,) if job.placement else placements,
        }
        across = WIDER if gpus > GPUS_PER_NODE else {}
        held = {name for name in across if name in stated or len(usual[name]) == 1}
        return cls(**usual | stated, wider={name: values for name, values in across.items() if name not in held})


WIDER: dict[str, tuple[Any, ...]] = {
    "tp": (1, 4, 8),
    "pp": (1, 8, 16, 32),
    "ep": (8, 16, 32, 64),
    "recompute": ("selective", "full"),
    "micro_batch": (1,),
    "logprob_batch": (1,),
    "rollout_tp": (8, 16, 32, 64),
    "share": (0.5, 0.7, 0.9),
}
"""Values of the axes of layouts across nodes, with as little at once as can be: for models that no node trains or serves."""


def _has_experts(job: Job) -> bool:
    """Return whether a job's model is known to have experts to shard."""
    with contextlib.suppress(Error):
        return found_model(job).spec.has_experts
    return False


AXES = (*TRAINER_AXES, "zero", "recompute", "micro_batch", "logprob_batch", "placement")
"""Axes of a space that are fields of a job."""


NEUTRAL = {**dict.fromkeys(TRAINER_AXES, 1), "sequence_parallel": False}
"""Values of a candidate that leaves a field out which its file has."""


def candidates(job: Job, space: Space) -> Iterator[Job]:
    """Yield every job of a space, in the order of its axes. ZeRO 3 goes without tp, pp and ep, as FSDP has it."""
    axes = (space.placement, space.tp, space.pp, space.ep, space.zero, space.recompute, space.micro_batch)
    for placement, tp, pp, ep, zero, recompute, micro, logprobs in itertools.product(*axes, space.logprob_batch):
        if (zero == 3 and tp * pp * ep > 1) or max(tp, ep) * pp > (job.gpus or 1):
            continue
        for rollout in rollouts(job, space):
            yield job.replace(
                placement=placement,
                tp=tp if tp > 1 else None,
                pp=pp if pp > 1 else None,
                ep=ep if ep > 1 else None,
                zero=zero,
                framework=job.framework or _framework(rollout, tp * pp * ep, zero),
                recompute=recompute,
                sequence_parallel=True if tp > 1 else None,
                micro_batch=micro,
                logprob_batch=logprobs,
                rollout=rollout,
            )


def _framework(rollout: str | None, ranks: int, zero: int) -> str | None:
    """Return who trains: beside an engine Megatron or FSDP; without one the job's own default, where no model is split."""
    if rollout is None and ranks == 1:
        return None
    return "megatron" if zero < 3 else "fsdp"


def rollouts(job: Job, space: Space) -> list[str | None]:
    """Return the engines of a space, as of the flag: what is said of it, with another tp and share; None where none answers."""
    if not TASKS[job.task or ""].rollout:
        return [None]
    engine = Engine.parse(job.rollout or ("vllm:sleep=1" if not job.staleness else "vllm"))
    own = ENGINES[engine.kind].share
    return [
        msgspec.structs.replace(engine, tp=tp, **({own: share} if own else {})).text()
        for tp in space.rollout_tp
        for share in space.share
    ]
