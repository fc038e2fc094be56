"""The fastest step of a task after pre-training that fits: every layout of the trainer, its micro-batches, every rollout and split.

The step times of all candidates are found first, from parts that many of them share; then, from the fastest on, the memory of each
until two fit. Of one that does not, all with the same phase too large are left out: the memory of a phase on the trainer's side
does not depend on how much of a card a sleeping engine may use. This is what a loop over single estimates finds (`plain`).
Where none fits, the nearest is the one with the least memory: the phases that are known bound that of the others from below.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import Counter
from typing import Any, TypeAlias

import msgspec

from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.definitions.job.job import Job, fields
from loadgauge.core.definitions.serving.rollout import ENGINES, Engine
from loadgauge.core.definitions.training.tasks import TASKS
from loadgauge.core.plan.space.task_space import AXES, NEUTRAL, Space, candidates
from loadgauge.core.post_training.memory import PostMemory, engine_of, memory
from loadgauge.core.post_training.roles import Run
from loadgauge.core.post_training.step import Known, StepTime, step_time, timed
from loadgauge.core.resolve.posttrain import resolve_posttrain
from loadgauge.core.resolve.recompute_words import recompute_policy
from loadgauge.core.resolve.resolve import named_card


def opened(asked: Job, whole: Job, stated: dict[str, tuple[Any, ...]]) -> tuple[Job, Space]:
    """Return a job file's job with its axes open, and their space, with the values that the file has.

    asked: the job with the flags that were given, which stay; whole: with the file's too; stated: axes that are locked
    """
    engine, free = Engine.parse(whole.rollout or "vllm"), [name for name in AXES if getattr(asked, name) is None]
    share = ENGINES[engine.kind].share
    keeps = not whole.staleness or "," in (whole.placement or "")
    opens: dict[str, Any] = dict.fromkeys(("sequence_parallel", *free))
    if "placement" in free and keeps:
        opens["placement"] = whole.placement
    values = {name: getattr(whole, name) for name in free}
    own: dict[str, tuple[Any, ...]] = {
        name: (NEUTRAL.get(name) if value is None else value,) for name, value in values.items()
    }
    if asked.rollout is None and whole.rollout is not None:
        plain_one = getattr(Engine.parse(engine.kind), share) if share else None
        opens["rollout"] = msgspec.structs.replace(engine, tp=1, **({share: plain_one} if share else {})).text()
        own |= {"rollout_tp": (engine.tp,), "share": (getattr(engine, share),) if share else ()}
    job = whole.replace(**opens)
    space = Space.of(job, stated)
    more = {
        name: tuple(dict.fromkeys((*getattr(space, name), *(value for value in values if value is not None))))
        for name, values in own.items()
        if name not in stated
    }
    return job, msgspec.structs.replace(space, **more)


def beside_file(choice: Choice | None, asked: Job, whole: Job) -> Choice | None:
    """Return a choice whose job is its file with flags: those that were given, its axes, and what differs from the file."""
    if choice is None:
        return None
    values = {name: getattr(choice.job, name) for name in fields()}
    if values["samples"] and values["prompts"]:
        values["global_batch"] = values["global_batch"] or values["samples"] * values["prompts"]
    flags = {
        name: NEUTRAL.get(name) if value is None else value
        for name, value in values.items()
        if name != "model" and (name in (*AXES, "rollout", "gpus", "task") or value != getattr(whole, name))
    }
    return msgspec.structs.replace(choice, job=asked.replace(**flags))


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate: the job, the time of its step, and its memory."""

    job: Job
    time: StepTime
    memory: PostMemory


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a search. candidates: with a time; refused: that are no layouts; looked: whose memory was found; nearest: of those
    that do not fit, the one whose largest phase is the smallest, at its upper end
    """

    best: Choice | None
    runner_up: Choice | None
    candidates: int
    refused: int
    looked: int
    nearest: Choice | None = None
    why: str = ""


def plain(job: Job, space: Space, reading: Any = None) -> Choice | None:
    """Return the fastest candidate that fits, each estimated by itself; of equal ones the first."""
    best = None
    for candidate in candidates(job, space):
        try:
            run, _ = resolve_posttrain(candidate, reading=reading)
            held = memory(run)
            time, _ = timed(run, held)
        except Error:
            continue
        if time is not None and held.verdict == "fits" and (best is None or time.step < best.time.step):
            best = Choice(job=candidate, time=time, memory=held)
    return best


Timed = tuple[float, int, Job, StepTime]
"""Seconds of a candidate's step, its place among all, the candidate, and its time."""


class Unstarted(ConfigError):
    """The error of a space in which no engine starts: more GPUs may help."""


class NoSplit(ConfigError):
    """The error of too few GPUs for a trainer and a rollout of their own."""


class _Search:
    """Runs, times and memory of a space, made from parts that candidates share. refusals: why candidates are no run, by number

    unstarted: why engines do not start, by number
    """

    def __init__(self, job: Job, reading: Any) -> None:
        self.job, self.reading = job, reading
        self.resolved: dict[Any, Run | str] = {}
        self.pools: dict[Any, float | Error | None] = {}
        self.known: dict[Any, Known] = {}
        self.refusals, self.unstarted = Counter[str](), Counter[str]()
        self.highs: dict[Any, dict[int, float]] = {}
        self.held: dict[int, PostMemory | None] = {}

    def run(self, job: Job) -> Run | None:
        """The run of a candidate, resolved once for its layout and its rollout; None where it is no layout."""
        base = self._resolved(job, 1)
        if isinstance(base, str):
            self._refused(base)
            return None
        ranks, batch = base.trained.layout.dp, base.trained.layout.global_batch
        assert job.micro_batch is not None
        micro = job.micro_batch * base.task.rows
        if batch % (micro * ranks):
            self._refused(f"global_batch: {batch} sequences are no multiple of dp x micro-batch")
            return None
        several = base if job.micro_batch == 1 else self._resolved(job, job.micro_batch)
        base = base if isinstance(several, str) else several
        word = job.recompute or "none"
        members = {}
        for name, member in base.members.items():
            policy = recompute_policy(word, member.model, member.training)
            layout = msgspec.structs.replace(member.layout, micro_batch=micro, recompute=policy)
            members[name] = msgspec.structs.replace(member, layout=layout)
        rows = base.logprob_rows
        if base.logprob_tokens is None:
            rows = (job.logprob_batch or job.micro_batch) * base.task.rows
        return msgspec.structs.replace(base, members=members, logprob_rows=rows)

    def _resolved(self, job: Job, micro_batch: int) -> Run | str:
        """The run of a layout, or why it is none; with several sequences in a micro-batch, which are padded, once more, and where
        lengths differ for each number of them."""
        # What leaves the card may need that it runs again.
        again = "none" if job.activation_offload in (None, "none") else job.recompute
        key = (
            job.placement,
            job.tp,
            job.pp,
            job.ep,
            job.zero,
            job.rollout,
            again,
            micro_batch if job.lengths else micro_batch > 1,
        )
        if key not in self.resolved:
            more = {"micro_batch": micro_batch, "recompute": again, "logprob_batch": job.logprob_batch and 1}
            try:
                self.resolved[key] = resolve_posttrain(job.replace(**more), reading=self.reading)[0]
            except Error as error:
                self.resolved[key] = str(error)
        return self.resolved[key]

    def time(self, job: Job, run: Run, *, walked: bool = False) -> StepTime | None:
        """The time of a candidate's step, or at least (`step.step_time`); None where it has no cache or no time."""
        key = (job.placement, job.rollout)
        if job.rollout is None:
            self.pools[key] = None
        if key not in self.pools:
            try:
                card = engine_of(run)
                self.pools[key] = Unstarted(card.unstarted) if card.unstarted else card.pool
            except Error as error:
                self.pools[key] = error
        pool = self.pools[key]
        if isinstance(pool, Error):
            (self.unstarted if isinstance(pool, Unstarted) else self.refusals)[str(pool)] += 1
            return None
        try:
            return step_time(run, pool, cache=self.known.setdefault(job.placement, {}), walked=walked)
        except Error as error:
            self._refused(str(error))
            return None

    def walked(self, job: Job) -> StepTime:
        """The time of the step of a candidate that has one."""
        run = self.run(job)
        assert run is not None
        time = self.time(job, run, walked=True)
        assert time is not None
        return time

    def _refused(self, reason: str) -> None:
        self.refusals[reason] += 1

    def memory(self, order: int, job: Job) -> PostMemory | None:
        """The memory of a candidate, whose phases are noted for others; None where it has none."""
        if order not in self.held:
            run = self.run(job)
            assert run is not None
            try:
                self.held[order] = held = memory(run)
            except Error:
                self.held[order] = None
                return None
            keys = _keys(job)
            for phase in held.phases:
                key, size = keys[_side(phase.name)]
                highs = self.highs.setdefault(key, {})
                highs[size] = max(highs.get(size, 0.0), phase.high)
        return self.held[order]

    def least(self, job: Job) -> float:
        """Return a lower bound of what the largest phase of a candidate needs [bytes]: its memory with fewer sequences at once."""
        keys = _keys(job).values()
        return max(
            (
                high
                for key, size in keys
                for measured_size, high in self.highs.get(key, {}).items()
                if measured_size <= size
            ),
            default=0.0,
        )

    def nearest(self, rows: list[Timed]) -> Choice | None:
        """The candidate of the least memory; of equal ones the fastest. rows: the fastest first"""

        def entry(index: int) -> tuple[float, bool, tuple[Any, ...], int]:
            job = rows[index][2]
            exact = rows[index][1] in self.held or all(
                size in self.highs.get(key, ()) for key, size in _keys(job).values()
            )
            lean = () if exact else (job.recompute != "full", job.micro_batch, job.logprob_batch)
            return self.least(job), not exact, lean, index

        queue = [entry(index) for index in range(len(rows))]
        heapq.heapify(queue)
        while queue:
            before = heapq.heappop(queue)
            index = before[-1]
            _, order, job, time = rows[index]
            if (now := entry(index)) != before:
                heapq.heappush(queue, now)
                continue
            held = self.memory(order, job)
            if held is not None and not before[1]:
                return Choice(job=job, time=time if time.beside is None else self.walked(job), memory=held)
            if held is not None:
                heapq.heappush(queue, entry(index))
        return None


def plan_task(job: Job, space: Space, *, nearest: bool = True, reading: Any = None) -> Found:
    """Return the fastest candidate that fits, and the next of another kind. Raises `ConfigError` without --gpu and --gpus.

    nearest: look for the one that lacks least, where none fits; reading: as of `resolve_posttrain`

    >>> job = Job("qwen3-0.6b", task="grpo", gpu="h100-sxm5-80gb", gpus=2, prompts=16, samples=4, answers="512", prompt_len=128)
    >>> plan_task(job, Space.of(job, {"tp": (1,), "pp": (1,), "rollout_tp": (1,)})).best.memory.verdict
    'fits'
    """
    for name in ("gpu", "gpus"):
        if getattr(job, name) is None:
            raise ConfigError("is missing: a plan needs --gpu and --gpus", key=name)
    try:
        first = _searched(job, space, nearest and not space.wider, reading)
    except Unstarted:
        if not space.wider:
            raise
        first = None
    if not space.wider or (first is not None and first.best is not None):
        assert first is not None
        return first
    across = msgspec.structs.replace(space, **space.wider)
    with contextlib.suppress(Error):
        wide = _searched(job, across, nearest, reading)
        seen = 0 if first is None else first.candidates
        return msgspec.structs.replace(wide, candidates=wide.candidates + seen)
    return _searched(job, space, nearest, reading)


def _searched(job: Job, space: Space, nearest: bool, reading: Any) -> Found:
    search, refused = _Search(job, reading), 0
    timed_ones: list[Timed] = []
    for order, candidate in enumerate(candidates(job, space)):
        run = search.run(candidate)
        time = None if run is None else search.time(candidate, run)
        if run is None or time is None:
            refused += 1
            continue
        timed_ones.append((time.step, order, candidate, time))
    timed_ones.sort(key=lambda row: row[:2])
    if not space.placement:
        raise NoSplit("a trainer and a rollout need one each", key="gpus")
    if not timed_ones:
        # Of candidates that are layouts rather than of those that are none.
        reasons = (search.unstarted or search.refusals).most_common(1)
        if not reasons:
            raise ConfigError("what is locked leaves no layout to try", key="plan")
        ((reason, number),) = reasons
        if number == refused:
            resolve_posttrain(next(candidates(job, space)), reading=reading)  # says why
        kind = Unstarted if search.unstarted else ConfigError
        raise kind(f"no candidate of {refused:,} is a run; of {number:,} of them: {reason}")
    best = runner_up = None
    card = named_card(job)[0]
    assert card is not None
    exact: set[int] = set()
    queue = list(timed_ones)
    while queue:
        _, order, candidate, time = heapq.heappop(queue)
        held = search.memory(order, candidate) if search.least(candidate) <= card.capacity else None
        if held is None or held.verdict != "fits":
            continue
        if order not in exact and time.beside is not None:
            exact.add(order)
            time = search.walked(candidate)
            heapq.heappush(queue, (time.step, order, candidate, time))
            continue
        choice = Choice(job=candidate, time=time, memory=held)
        if best is None:
            best = choice
        elif _shape(candidate) != _shape(best.job):
            runner_up = choice
            break
    return Found(
        best=best,
        runner_up=runner_up,
        candidates=len(timed_ones),
        refused=refused,
        looked=len(search.held),
        nearest=search.nearest(timed_ones) if best is None and nearest else None,
        why="" if best is None or runner_up is None else why(best, runner_up),
    )


QUANTUM, LONGEST = 256, 2**23
"""Tokens to which a length is found, and at which the search for it ends."""
MOST = {"samples": 2**12, "micro_batch": 2**10}
"""At which the search for a number ends."""
OLD, ALIKE = (0, 1, 2, 4, 8, 16), 0.002
"""Updates that answers may be old, of which the fewest are found; and the share within which two steps are as short."""
SHARES = tuple(round(number / 100, 2) for number in range(95, 4, -5))
"""Shares of a card for an engine, of which the largest that fits is found to a hundredth."""


def sought_of(task: str) -> tuple[str, ...]:
    """Return the fields that a search for the most that fits may ask of a task; of gpus the fewest.

    >>> sought_of("dpo")
    ('seq_len', 'micro_batch', 'gpus')
    """
    own = ("answers", "samples", "utilization", "staleness") if TASKS[task].rollout else ("seq_len",)
    return (*own, "micro_batch", "gpus")


Value: TypeAlias = "int | float"


def with_value(
    job: Job, stated: dict[str, tuple[Any, ...]], name: str, value: Value
) -> tuple[Job, dict[str, tuple[Any, ...]]]:
    """Return a job and its locked axes with a value of what is sought.

    A larger micro-batch needs a global batch that is a multiple of it on every number of ranks, where none is given.
    """
    if name == "utilization":
        return job, stated | {"share": (float(value),)}
    if name == "micro_batch":
        every = TASKS[job.task or ""].rollout is False and job.global_batch is None
        job = job.replace(global_batch=int(value) * (job.gpus or 1)) if every else job
        return job, stated | {"micro_batch": (int(value),)}
    return job.replace(**{name: str(value) if name == "answers" else value}), stated


def find_value(job: Job, stated: dict[str, tuple[Any, ...]], name: str, reading: Any = None) -> Value | None:
    """Return the most of something with which some layout fits (see `sought_of`), or the fewest GPUs; None where none fits. Of
    staleness the least with which the best step is as short as with any more: then the rollout is hidden, as far as it can be.

    Only the leanest layouts are looked at: all run again, a sequence at a time. GPUs, samples and micro-batches are powers of two.
    Raises `ConfigError` for another field, or one that the job has.

    >>> find_value(Job("qwen3-0.6b", task="dpo", gpu="rtx4090", gpus=1), {}, "seq_len") % 256
    0
    """
    every = sought_of(job.task or "")
    words = [each.replace("_", "-") for each in every]
    if name not in every:
        raise ConfigError(f"with --task {job.task} it is {', '.join(words[:-1])} or {words[-1]}", key="find")
    engine = Space.of(job, {}).share if name == "utilization" else ()
    if name in stated or getattr(job, name, None) is not None or len(engine) == 1:
        raise ConfigError(f"leave --{name.replace('_', '-')} out: it is what is looked for", key="find")

    if name == "staleness":
        steps: dict[int, float] = {}
        for value in OLD:
            candidate = job.replace(staleness=value or None)
            with contextlib.suppress(Unstarted, NoSplit):
                best = plan_task(candidate, Space.of(candidate, stated), nearest=False, reading=reading).best
                steps |= {} if best is None else {value: best.time.step}
        least = min(steps.values(), default=0.0) * (1 + ALIKE)
        return next((value for value in sorted(steps) if steps[value] <= least), None)

    def fits(value: Value) -> bool:
        candidate, axes = with_value(job, stated, name, value)
        lean: dict[str, tuple[Any, ...]] = {"recompute": ("full",), "micro_batch": (1,)}
        if TASKS[job.task or ""].rollout:
            lean["logprob_batch"] = (1 if job.logprob_tokens is None else None,)
        try:
            space = Space.of(candidate, lean | axes)
            return plan_task(candidate, space, nearest=False, reading=reading).best is not None
        except ConfigError:
            # More of it may be no run: a position table's end, a batch that is too small.
            if name in ("gpus", "utilization") or value > (QUANTUM if name in ("seq_len", "answers") else 1):
                return False
            raise

    if name == "gpus":
        return next((2**power for power in range(17) if fits(2**power)), None)
    if name in MOST:
        sizes = itertools.takewhile(fits, (2**power for power in range(MOST[name].bit_length())))
        return max(sizes, default=None)
    if name == "utilization":
        coarse = next((share for share in SHARES if fits(share)), None)
        finer = () if coarse is None else (round(coarse + more / 100, 2) for more in (4, 3, 2, 1))
        return next((share for share in finer if fits(share)), coarse)
    low = 0
    while low < LONGEST and fits(max(QUANTUM, 2 * low)):
        low = max(QUANTUM, 2 * low)
    high = 2 * low
    while high - low > QUANTUM:
        middle = (low + high) // 2 // QUANTUM * QUANTUM
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


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


def _keys(job: Job) -> dict[str, tuple[Any, int]]:
    """Return, for each phase, the fields that its memory depends on (not the memory share of an engine that sleeps), and its
    sequences at once, with which it grows. Without an engine the frozen roles run while tensors of the update are kept.

    Every phase is of the rank on which the update is the largest, and with stages that is another one by what is recomputed. A
    teacher may run in the midst of the update.
    """
    engine = Engine.parse(job.rollout or "vllm")
    asleep = job.rollout if not engine.sleep and job.placement == "colocated" else (engine.tp, engine.sleep)
    staged = (
        (job.recompute, job.micro_batch) if job.pp is not None or job.teacher is not None or job.rollout is None else ()
    )
    trainer = (job.placement, job.tp, job.pp, job.ep, job.zero, *staged)
    resting = (*trainer, job.rollout)
    return {
        "update": (("update", *trainer, job.recompute, asleep), job.micro_batch or 1),
        "score": (("score", *trainer, asleep), job.logprob_batch or job.micro_batch or 1),
        "generate": (("generate", *resting), 1),
        "sync": (("sync", *trainer, asleep), 1),
    }


def _shape(job: Job) -> tuple[Any, ...]:
    """Return the key by which two candidates differ in kind: the trainer's layout, the engine's ranks, the split."""
    return (job.placement, job.tp, job.pp, job.ep, job.zero, Engine.parse(job.rollout or "vllm").tp)


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
