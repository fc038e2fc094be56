"""The fastest step of a task after pre-training that fits: every layout of the trainer, its micro-batches, every rollout and split.

The step times of all candidates are found first, from parts that many of them share; then, from the fastest on, the memory of each
until two fit. Of one that does not, all with the same phase too large are left out: the memory of a phase on the trainer's side
does not depend on how much of a card a sleeping engine may use. This is what a loop over single estimates finds (`plain`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from loadgauge.errors import ConfigError, Error
from loadgauge.posttrain.memory import PostMemory, engine_of, memory
from loadgauge.posttrain.roles import Run
from loadgauge.posttrain.step import Known, StepTime, step_time, timed
from loadgauge.resolve.posttrain import resolve_posttrain
from loadgauge.spec.job import Job
from loadgauge.spec.layout import RecomputePolicy
from loadgauge.spec.rollout import ENGINES, Engine

NODE = 8


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The values of every axis. rollout_tp, share: of the engine, share as its own option means it; placement: as of the flag"""

    tp: tuple[int, ...]
    pp: tuple[int, ...]
    zero: tuple[int, ...]
    recompute: tuple[str, ...]
    micro_batch: tuple[int, ...]
    logprob_batch: tuple[int, ...]
    rollout_tp: tuple[int, ...]
    share: tuple[float, ...]
    placement: tuple[str, ...]

    @classmethod
    def of(cls, job: Job, given: dict[str, tuple[Any, ...]]) -> Space:
        """Return the space around a job. given: axes that are locked or narrowed; a --rollout or --placement locks its own

        >>> Space.of(Job("qwen3-32b", gpus=16, rollout="vllm:tp=4"), {}).rollout_tp
        (4,)
        """
        gpus = job.gpus or 1
        inside = tuple(one for one in (1, 2, 4, 8) if one <= min(gpus, NODE))
        engine = None if job.rollout is None else Engine.parse(job.rollout)
        named = (job.rollout or "").partition(":")[2]
        kind = engine.kind if engine is not None else "vllm"
        own = ENGINES[kind].share
        fixed = own and own in named.replace("gpu_memory_utilization", own).replace("mem_fraction_static", own)
        placements: tuple[str, ...] = ("colocated",)
        if job.staleness:
            placements = tuple(
                f"split:{trainer}+{gpus - trainer}"
                for trainer in sorted({max(1, gpus // 4), max(1, gpus // 2), max(1, 3 * gpus // 4)}) if trainer < gpus
            )  # fmt: skip
        found: dict[str, tuple[Any, ...]] = {
            "tp": inside, "pp": inside, "zero": (1, 3), "recompute": ("none", "selective", "full"),
            "micro_batch": (1, 2, 4, 8), "logprob_batch": (1, 4, 16),
            "rollout_tp": (engine.tp,) if engine is not None and "tp" in named else inside,
            "share": (getattr(engine, own),) if fixed and engine is not None else (0.5, 0.6, 0.7, 0.8, 0.9) if own else (0.0,),
            "placement": (job.placement,) if job.placement else placements,
        }  # fmt: skip
        return cls(**found | given)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate: the job, the time of its step, and its memory."""

    job: Job
    time: StepTime
    memory: PostMemory


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan found. candidates: with a time; refused: that are no layouts; looked: whose memory was found"""

    best: Choice | None
    runner_up: Choice | None
    candidates: int
    refused: int
    looked: int
    nearest: Choice | None = None
    why: str = ""


def candidates(job: Job, space: Space) -> Iterator[Job]:
    """Yield every job of a space, in the order of its axes. ZeRO 3 goes without tp and pp, as FSDP has it."""
    axes = (space.placement, space.tp, space.pp, space.zero, space.recompute, space.micro_batch, space.logprob_batch)
    for placement, tp, pp, zero, recompute, micro, logprobs in itertools.product(*axes):
        if zero == 3 and tp * pp > 1:
            continue
        for rollout in rollouts(job, space):
            yield job.replace(
                placement=placement, tp=tp if tp > 1 else None, pp=pp if pp > 1 else None, zero=zero,
                framework=job.framework or ("megatron" if zero < 3 else "fsdp"), recompute=recompute,
                sequence_parallel=True if tp > 1 else None, micro_batch=micro, logprob_batch=logprobs, rollout=rollout,
            )  # fmt: skip


def rollouts(job: Job, space: Space) -> list[str]:
    """Return the engines of a space, as of the flag: what is said of it, with another tp and share."""
    engine = Engine.parse(job.rollout or ("vllm:sleep=1" if not job.staleness else "vllm"))
    own = ENGINES[engine.kind].share
    return [
        msgspec.structs.replace(engine, tp=tp, **({own: share} if own else {})).text()
        for tp in space.rollout_tp
        for share in space.share
    ]


def plain(job: Job, space: Space) -> Choice | None:
    """Return the fastest candidate that fits, each estimated by itself; of equal ones the first."""
    best = None
    for one in candidates(job, space):
        try:
            run, _ = resolve_posttrain(one)
            held = memory(run)
            time, _ = timed(run, held)
        except Error:
            continue
        if time is not None and held.verdict == "fits" and (best is None or time.step < best.time.step):
            best = Choice(job=one, time=time, memory=held)
    return best


class _Search:
    """Runs and times of a space, made from parts that candidates share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.resolved: dict[Any, Run | None] = {}
        self.pools: dict[Any, float | None] = {}
        self.known: dict[Any, Known] = {}

    def run(self, one: Job) -> Run | None:
        """The run of a candidate, resolved once for its layout and its rollout; None where it is no layout."""
        key = (one.placement, one.tp, one.pp, one.zero, one.rollout)
        if key not in self.resolved:
            try:
                self.resolved[key] = resolve_posttrain(one.replace(micro_batch=1, recompute="none", logprob_batch=1))[0]
            except Error:
                self.resolved[key] = None
        base = self.resolved[key]
        if base is None:
            return None
        ranks = base.trained.layout.dp
        assert one.micro_batch is not None
        if base.trained.layout.global_batch % (one.micro_batch * ranks):
            return None
        policy = RecomputePolicy.parse(one.recompute or "none")
        members = {
            name: msgspec.structs.replace(
                member, layout=msgspec.structs.replace(member.layout, micro_batch=one.micro_batch, recompute=policy)
            )
            for name, member in base.members.items()
        }
        return msgspec.structs.replace(
            base, members=members, logprob_rows=(one.logprob_batch or one.micro_batch) * base.task.rows
        )

    def time(self, one: Job, run: Run) -> StepTime | None:
        """The time of a candidate's step; None where it has no cache or no time."""
        key = (one.placement, one.rollout)
        if key not in self.pools:
            try:
                self.pools[key] = engine_of(run).pool
            except Error:
                self.pools[key] = None
        pool = self.pools[key]
        if pool is None:
            return None
        try:
            return step_time(run, pool, known=self.known.setdefault(one.placement, {}))
        except Error:
            return None


def plan_task(job: Job, space: Space) -> Found:
    """Return the fastest candidate that fits, and the next of another kind. Raises `ConfigError` without --gpu and --gpus.

    >>> job = Job("qwen3-0.6b", task="grpo", gpu="h100-sxm5-80gb", gpus=2, prompts=16, samples=4, answers="512", prompt_len=128)
    >>> plan_task(job, Space.of(job, {"tp": (1,), "pp": (1,), "rollout_tp": (1,)})).best.memory.verdict
    'fits'
    """
    for name in ("gpu", "gpus"):
        if getattr(job, name) is None:
            raise ConfigError("is needed", key=name)
    search, refused = _Search(job), 0
    timed_ones: list[tuple[float, int, Job, StepTime]] = []
    for order, one in enumerate(candidates(job, space)):
        run = search.run(one)
        time = None if run is None else search.time(one, run)
        if run is None or time is None:
            refused += 1
            continue
        timed_ones.append((time.step, order, one, time))
    timed_ones.sort(key=lambda row: row[:2])
    if not timed_ones:
        resolve_posttrain(next(candidates(job, space)))  # says why
        raise ConfigError(f"no candidate of {refused:,} is a run", key="gpus")
    best = runner_up = nearest = None
    looked, large = 0, set[Any]()
    for _, _, one, time in timed_ones:
        keys = _keys(one)
        if large & set(keys.values()):
            continue
        run = search.run(one)
        assert run is not None
        try:
            held = memory(run)
        except Error:
            continue
        looked += 1
        choice = Choice(job=one, time=time, memory=held)
        if held.verdict != "fits":
            large |= {keys[_side(phase.name)] for phase in held.phases if phase.high > (held.capacity or 0)}
            if nearest is None or held.decisive.high < nearest.memory.decisive.high:
                nearest = choice
        elif best is None:
            best = choice
        elif _shape(one) != _shape(best.job):
            runner_up = choice
            break
    return Found(
        best=best, runner_up=runner_up, candidates=len(timed_ones), refused=refused, looked=looked, nearest=nearest,
        why="" if best is None or runner_up is None else why(best, runner_up),
    )  # fmt: skip


def _side(phase: str) -> str:
    return (
        "update"
        if "update" in phase
        else "generate"
        if phase == "generate"
        else "sync"
        if phase == "weight sync"
        else "score"
    )


def _keys(one: Job) -> dict[str, Any]:
    """What the memory of a phase depends on: of a sleeping engine, not on its share of the card."""
    engine = Engine.parse(one.rollout or "vllm")
    asleep = one.rollout if not engine.sleep and one.placement == "colocated" else (engine.tp, engine.sleep)
    trainer = (one.placement, one.tp, one.pp, one.zero)
    resting = (*trainer, one.rollout)
    return {
        "update": ("update", *trainer, one.recompute, one.micro_batch, asleep),
        "score": ("score", *trainer, one.logprob_batch, asleep),
        "generate": ("generate", *resting), "sync": ("sync", *trainer, asleep),
    }  # fmt: skip


def _shape(one: Job) -> tuple[Any, ...]:
    """What makes two candidates different in kind: the trainer's layout, the engine's ranks, the split."""
    return (one.placement, one.tp, one.pp, one.zero, Engine.parse(one.rollout or "vllm").tp)


def why(best: Choice, other: Choice) -> str:
    """Return why the other lost: the phase in which it takes the most longer.

    Where two sides run at once, of those on the slower side alone.
    """
    own = {phase.name: phase.seconds for phase in best.time.phases}
    slower = [
        (phase.seconds - own.get(phase.name, 0.0), phase)
        for phase in other.time.phases
        if not other.time.sides or phase.side in (other.time.bound, "both")
    ]
    more, phase = max(slower, key=lambda row: row[0])
    return f"{phase.name} takes {phase.seconds:.1f} s, {more:.1f} s more; its step {other.time.step - best.time.step:.1f} s more"
