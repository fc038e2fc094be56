"""Changes that make a run of a task fit: which settings, the mildest first, alone or together."""

from typing import Any

import msgspec

from loadgauge.core.base import Error
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.serving.rollout import ENGINES, Engine
from loadgauge.core.definitions.training.tasks import TASKS
from loadgauge.core.post_training.memory import PostMemory, memory
from loadgauge.core.resolve.posttrain import resolve_posttrain
from loadgauge.core.resolve.resolve import asks_for_files

Settings = dict[str, Any]
"""Fields of a job that are changed; `rollout.NAME` is an option of the engine."""
Moves = list[tuple[str, tuple[Any, ...]]]
"""Settings, each with the values to try, the mildest first."""
Tried = tuple[str, PostMemory]
"""Flags, and the memory of the run with them."""
Changed = tuple[Settings, PostMemory]


def remedies(
    job: Job, before: PostMemory, most: int = 3, model: ModelSpec | None = None, layout: Layout | None = None
) -> list[Tried]:
    """Return changes that make a run fit, the mildest first: single ones, several together where none does, and adapters where
    the whole model cannot be trained. What may fit comes after what surely does.

    model: that of the job, where it was read before; layout: of the run, stated beside a change of it where the job says none
    """
    stated = {} if layout is None else _stated(job, layout)
    job = job.replace(**stated)
    remedies_tried: list[Changed] = []
    moves: Moves = _moves(job, before.engine is not None and bool(before.engine.unstarted))
    adapters: Moves = [("lora_rank", (16,))]
    for more, every in ((moves, moves), (adapters, moves + adapters))[: 1 if job.adapts else 2]:
        remedies_tried += _alone(job, before, more, model)
        if not _fitting(remedies_tried) and (together := _together(job, before, every, model)) is not None:
            remedies_tried.append(together)
        if _fitting(remedies_tried):
            break
    ranked = sorted(remedies_tried, key=lambda item: item[1].verdict != "fits")[:most]
    return [
        (_flags(job, (stated if set(stated) & set(settings) else {}) | settings), tried) for settings, tried in ranked
    ]


def _stated(job: Job, layout: Layout) -> Settings:
    """Return the fields of a layout that was assumed, as nothing was said of it; empty where something was, or it is plain."""
    shared = {
        name: getattr(layout, name) for name in (*MODEL_PARALLEL, "sequence_parallel") if getattr(layout, name) > 1
    }
    split = any(getattr(job, name) is not None for name in (*MODEL_PARALLEL, "zero"))
    if split or not (shared or layout.zero):
        return {}
    shared |= {"sequence_parallel": True} if layout.sequence_parallel else {}
    return {"zero": layout.zero, "recompute": str(layout.recompute), **shared}


def _fitting(tries: list[Changed]) -> bool:
    return any(tried.verdict == "fits" for _, tried in tries)


def _better(before: PostMemory, tried: PostMemory | None) -> bool:
    """Return whether a run that did not fit now does, or may."""
    return tried is not None and (
        tried.verdict == "fits" or (before.verdict, tried.verdict) == ("does not fit", "tight")
    )


def _try(job: Job, settings: Settings, model: ModelSpec | None) -> PostMemory | None:
    """The memory of the job with other settings; None where it is no run."""
    try:
        return memory(resolve_posttrain(job.replace(**_fields(job, settings)), model)[0])
    except Error:
        return None


def _fields(job: Job, settings: Settings) -> dict[str, Any]:
    fields = {name: value for name, value in settings.items() if "." not in name}
    options = {name.partition(".")[2]: value for name, value in settings.items() if "." in name}
    if options:
        fields["rollout"] = msgspec.structs.replace(Engine.parse(job.rollout or "vllm"), **options).text()
    return fields


def _flags(job: Job, settings: Settings) -> str:
    return Job("", **_fields(job, settings)).flags()


def _alone(job: Job, before: PostMemory, moves: Moves, model: ModelSpec | None) -> list[Changed]:
    """Of each setting the mildest value with which the run fits, or the last with which it may."""
    tries: list[Changed] = []
    for name, values in moves:
        best: list[Changed] = []
        for value in values:
            tried = _try(job, {name: value}, model)
            if tried is not None and _better(before, tried):
                best = [({name: value}, tried)]
                if tried.verdict == "fits":
                    break
        tries += best
    return tries


def _together(job: Job, before: PostMemory, moves: Moves, model: ModelSpec | None) -> Changed | None:
    """Settings that make phases smaller, the mildest first, until the run fits; then no more of each than it needs."""
    settings: Settings = {}
    held = before
    for name, values in moves:
        for value in values:
            tried = None if held.verdict == "fits" else _try(job, settings | {name: value}, model)
            if tried is not None and _missing(tried) < _missing(held):
                settings, held = settings | {name: value}, tried
    for name, values in reversed(moves):
        milder = values[: values.index(settings[name])] if name in settings else ()
        fewer = {other: value for other, value in settings.items() if other != name}
        for rest in (fewer, *(settings | {name: value} for value in milder)) if name in settings else ():
            tried = _try(job, rest, model)
            if tried is not None and tried.verdict == held.verdict:
                settings, held = rest, tried
                break
    return (settings, held) if settings and _better(before, held) else None


def _missing(held: PostMemory) -> float:
    """Bytes that the phases' upper ends lie above the card, together: one phase may grow a little where another falls by much."""
    return sum(max(0.0, phase.high - (held.capacity or 0)) for phase in held.phases)


def _moves(job: Job, starved: bool = False) -> Moves:
    """Settings that may make a phase smaller, the mildest first. starved: the engine's share is too small for it"""
    task = TASKS[job.task or ""]
    engine = Engine.parse(job.rollout or "vllm")
    server, share = ENGINES[engine.kind], getattr(engine, ENGINES[engine.kind].share or "utilization") or 0.0
    colocated = task.rollout and not engine.inside and job.placement in (None, "colocated")
    micro, stage = job.micro_batch or 1, job.zero or 0
    several = (job.gpus or 1) > 1 and (job.pp or 1) == 1
    moves: list[tuple[str, tuple[Any, ...], bool]] = [
        ("rollout.sleep", (1,), colocated and server.sleeps and not engine.sleep),
        ("logprob_batch", (1,), (job.logprob_batch or micro) > 1),
        ("micro_batch", tuple(micro >> power for power in range(1, micro.bit_length())), micro > 1),
        ("zero", tuple(range(stage + 1, 4)), several),
        ("recompute", ("full",), job.recompute in (None, "none", "selective")),
        ("gradient_sync", ("each",), several and job.gradient_sync is None),
        ("loss", ("chunked:16",), job.loss is None),
        (
            "reference",
            ("precomputed",),
            task.reference == "model" and not task.rollout and not job.adapts and job.reference in (None, "model"),
        ),
        ("rollout.tp", tuple(tp for tp in (2, 4, 8) if tp > engine.tp and not (job.gpus or 1) % tp), colocated),
        (
            f"rollout.{server.share}",
            tuple(
                round(other, 2)
                for step in (0.1, 0.2, 0.3, 0.4)
                if 0.1 < (other := share + step if starved else share - step) < 0.96
            ),
            colocated,
        ),
        (
            "rollout_offload",
            ("optimizer", "all")[job.rollout_offload == "optimizer" :],
            colocated and job.rollout_offload not in ("all", "states", "idle"),
        ),
        (
            "frozen_offload",
            (True,),
            job.frozen_offload is None and any("train" not in role.uses for role in task.roles),
        ),
        ("framework", ("fsdp",), several and job.framework is None and not asks_for_files(job)),
        ("offload", ("optimizer",), job.offload in (None, "none")),
    ]
    return [(name, values) for name, values, possible in moves if possible]
