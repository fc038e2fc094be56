"""Trainer and engine beside each other: the walk over means, beside a loop that runs every answer, token by token."""

from __future__ import annotations

import heapq
import math
import random
import statistics

import pytest

from loadgauge.core.answers.plan.task import planned
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan.posttrain import plain, plan_task
from loadgauge.core.plan.space.task_space import Space
from loadgauge.core.post_training.answers import answers
from loadgauge.core.post_training.memory import memory
from loadgauge.core.post_training.step import step_time
from loadgauge.core.post_training.walk import Sides, walk
from loadgauge.core.resolve.posttrain import resolve_posttrain

JUMP = 4


def line(running: float, context: float) -> float:
    return 5e-3 + 1e-4 * running + 2e-8 * running * context


def drawn(lengths: Lengths) -> list[int]:
    below = (0, *lengths.cumulative[:-1])
    return [v for v, upto, before in zip(lengths.values, lengths.cumulative, below, strict=True)
            for _ in range(upto - before)]  # fmt: skip


class Loop:
    """Each answer is a [tokens left, tokens made] of one replica; every event in its order."""

    def __init__(self, lengths: Lengths, sides: Sides, seed: int) -> None:
        self.draw, self.population, self.sides = random.Random(seed), drawn(lengths), sides
        self.running: list[list[list[int]]] = [[] for _ in range(sides.replicas)]
        self.clocks = [0.0] * sides.replicas
        self.away: list[float] = []
        self.now, self.until, self.draining = 0.0, math.inf, False
        self.begun = self.ended = self.queued = self.moved = 0
        self.marks: list[float] = []

    def begin(self) -> None:
        sides = self.sides
        most = (self.moved * sides.every + sides.staleness + 1) * sides.sequences
        while not self.draining and self.begun < most:
            if self.queued + sum(map(len, self.running)) + len(self.away) >= sides.inflight:
                break
            self.begun, self.queued = self.begun + 1, self.queued + 1
        while self.queued:
            at = min(range(sides.replicas), key=lambda index: len(self.running[index]))
            if len(self.running[at]) >= sides.slots / sides.replicas:
                break
            if not self.running[at]:
                self.clocks[at] = self.now
            self.running[at].append([self.draw.choice(self.population), 0])
            self.queued -= 1

    def event(self) -> None:
        sides, nexts = self.sides, []
        for at, here in enumerate(self.running):
            if here:
                jump = max(1, min(JUMP, *(left for left, _ in here), JUMP))
                context = sides.prompt + statistics.fmean(made for _, made in here) + jump / 2
                nexts.append((self.clocks[at] + jump * sides.scale * line(len(here), context), 0, at, jump))
        nexts += [(self.until, 1, 0, 0)] if self.until < math.inf else []
        nexts += [(self.away[0], 2, 0, 0)] if self.away else []
        when, kind, at, jump = min(nexts)
        self.now = max(self.now, when)
        if kind == 2:
            heapq.heappop(self.away)
            self.ended += 1
        elif kind == 1:
            self.marks.append(self.now)
            self.until = math.inf
            if len(self.marks) % sides.every == 0 and sides.partial:
                self.now, self.moved = self.now + sides.sync, self.moved + 1
                self.clocks = [clock + sides.sync for clock in self.clocks]
                self.away = [when + sides.sync for when in self.away]
            elif len(self.marks) % sides.every == 0:
                self.draining = True
        else:
            self.clocks[at] = when
            for answer in self.running[at]:
                answer[0] -= jump
                answer[1] += jump
            done = sum(left <= 0 for left, _ in self.running[at])
            self.running[at] = [answer for answer in self.running[at] if answer[0] > 0]
            for _ in range(done if sides.tool else 0):
                heapq.heappush(self.away, self.now + sides.tool)
            self.ended += 0 if sides.tool else done

    def step(self, updates: int = 40, skip: int = 15) -> float:
        sides = self.sides
        while len(self.marks) < updates:
            self.begin()
            if self.draining and not self.queued and not any(self.running) and not self.away:
                self.now, self.moved, self.draining = self.now + sides.sync, self.moved + 1, False
                self.clocks = [max(clock, self.now) for clock in self.clocks]
                continue
            if self.until == math.inf and not self.draining:
                self.until = (
                    self.now + sides.update if self.ended >= (len(self.marks) + 1) * sides.sequences else math.inf
                )
            self.event()
        return (self.marks[-1] - self.marks[skip]) / (updates - 1 - skip)


def of(**more: float) -> Sides:
    return Sides(**{"sequences": 64, "update": 2.0, "sync": 0.5, "slots": 1e9, "prompt": 100, "staleness": 1} | more)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "sides"),
    [
        ("exp:200,1000", of(slots=64)),  # all end before weights move
        ("exp:1000,600", of(sequences=96, slots=32, update=3.0)),  # half of them at the limit, and a queue
        ("exp:200,1000", of(partial=True)),
        ("exp:200,1000", of(partial=True, update=5.0)),  # the trainer is the slower
        ("exp:200,1000", of(partial=True, staleness=4, slots=48)),
        ("exp:200,1000", of(partial=True, staleness=2, inflight=64)),
        ("uniform:600", of(sequences=48, update=3.0, slots=96, staleness=2)),
        ("uniform:600", of(update=1.0, sync=0.2, slots=64, staleness=3, every=2)),
        ("exp:200,1000", of(partial=True, tool=3.0)),
        ("exp:200,1000", of(tool=3.0)),
        ("300", of(sequences=24, update=1.0, staleness=3, partial=True)),
        ("lognormal:150,0.9,1500", of(partial=True, staleness=2, slots=32, replicas=4)),
    ],
)  # fmt: skip
def test_a_step_takes_what_a_loop_over_every_answer_takes(law: str, sides: Sides) -> None:
    lengths = answers(law)
    runs = [Loop(lengths, sides, seed).step() for seed in range(4)]
    noise = statistics.stdev(runs) / 2
    assert walk(lengths, line, sides).step == pytest.approx(statistics.fmean(runs), abs=2 * noise + 0.02 * runs[0])


def constant(running: float, context: float) -> float:
    return 0.01


def test_answers_of_one_length_by_hand() -> None:
    """Answers take 6 s however many run: with k updates of U seconds between, (k + 1) steps hold an answer and an update."""
    lengths = Lengths.of([600])
    for staleness, update in ((1, 1.0), (2, 1.0), (3, 0.5)):
        found = walk(lengths, constant, of(partial=True, staleness=staleness, update=update, sync=0.0))
        assert found.step == pytest.approx((6.0 + update) / (staleness + 1), rel=0.02)
    slower = walk(lengths, constant, of(partial=True, staleness=1, update=8.0, sync=0.0))
    assert (slower.step, slower.waits) == (pytest.approx(8.0, rel=1e-3), pytest.approx(0.0, abs=1e-3))
    apart = walk(lengths, constant, of(staleness=1, update=2.0, sync=0.5))
    assert apart.step == pytest.approx(6.5, rel=0.01)
    assert (apart.waits, apart.idle, apart.behind) == (pytest.approx(4.0, rel=0.02), 0.0, pytest.approx(1.0))
    assert walk(lengths, constant, of(staleness=1, update=9.0)).idle == pytest.approx(3.0, rel=0.03)


def test_full_slots_take_tokens_over_throughput() -> None:
    lengths = answers("exp:200,1000")
    found = walk(lengths, constant, of(partial=True, slots=16, update=0.1, sync=0.0, staleness=8))
    assert found.step == pytest.approx(64 * lengths.mean * 0.01 / 16, rel=0.01)
    assert found.running == pytest.approx(16, rel=0.01)
    reads = walk(lengths, constant, of(partial=True, slots=16, update=0.1, sync=0.0, staleness=8, reads=0.05))
    assert reads.step == pytest.approx(found.step + 64 * 0.05, rel=0.02)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_replicas_read_their_prompts_beside_each_other(replicas: int) -> None:
    """9.6 seconds of tokens, an update and a move, after 64 prompts of 0.05 s, of which each replica reads its own."""
    sides = of(staleness=0, update=3.0, sync=0.5, replicas=replicas, reads=0.05)
    assert walk(Lengths.of([960]), constant, sides).step == pytest.approx(9.6 + 3.0 + 0.5 + 64 * 0.05 / replicas)


def test_weights_that_move_every_second_update_are_waited_for_half_as_often() -> None:
    lengths = Lengths.of([10])
    each, second = (walk(lengths, constant, of(every=every, staleness=3, update=4.0, sync=2.0)) for every in (1, 2))
    assert each.step == pytest.approx(6.0, rel=1e-3)
    assert second.step == pytest.approx(5.0, rel=1e-3)


JOB = Job(
    "qwen2.5-7b", task="grpo", prompts=32, samples=8, prompt_len=512, answers="exp:800,4096", gpu="h100-sxm5-80gb", gpus=16,
    zero=3, placement="split:8+8", staleness=1, rollout="vllm:tp=2",
)  # fmt: skip


def test_a_batch_that_ends_before_weights_move_takes_the_slower_side_as_the_walk_has_it() -> None:
    """The closed form of such a step, beside the walk of the same sides."""
    found = step_time(resolve_posttrain(JOB)[0])
    assert found.beside is not None
    assert found.sync is not None
    assert found.beside.step == pytest.approx(max(found.sides.values()) + found.sync.seconds, rel=1e-9)
    beside = of(sequences=64, slots=64, update=4.0, staleness=2)
    lengths = answers("exp:200,1000")
    both = [walk(lengths, line, beside).step, walk(lengths, line, of(slots=64, update=0.0, sync=0.0)).step]
    assert both[0] == pytest.approx(max(4.0, both[1]) + 0.5, rel=1e-3)


def test_partial_rollouts_hide_the_tail() -> None:
    ends, goes_on = (step_time(resolve_posttrain(JOB.replace(rollout=f"vllm:tp=2{more}"))[0])
                     for more in ("", ",partial=true"))  # fmt: skip
    assert ends.beside is not None
    assert goes_on.beside is not None
    assert goes_on.step < 0.7 * ends.step
    assert goes_on.beside.running > 2 * ends.beside.running
    later = step_time(resolve_posttrain(JOB.replace(rollout="vllm:tp=2,partial=true,turns=3,tool=20"))[0])
    assert later.step > goes_on.step + 10  # one answer waits 40 s, and two steps hold it


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", ":partial=true"])
def test_a_plan_with_old_answers_is_the_best_of_a_loop(more: str) -> None:
    job = JOB.replace(placement=None, zero=None, rollout=f"vllm{more}")
    space = Space.of(job, {
        "tp": (1, 2), "pp": (1,), "zero": (1, 3), "rollout_tp": (2, 4), "share": (0.6, 0.9), "micro_batch": (1, 4),
        "logprob_batch": (4,), "recompute": ("full",), "placement": ("split:8+8", "split:12+4"),
    })  # fmt: skip
    best, single = plan_task(job, space).best, plain(job, space)
    assert best is not None
    assert single is not None
    assert (best.job, best.time.step, best.memory) == (single.job, single.time.step, single.memory)


def test_a_trainer_and_a_rollout_may_have_parts_of_nodes() -> None:
    """Of two machines the trainer has four GPUs, the engines twelve; or the other way round, in parts of four."""
    wide = resolve_posttrain(JOB.replace(placement="split:4+12"))[0]
    assert (wide.replicas, wide.trained.layout.gpus) == (6, 4)
    other = resolve_posttrain(JOB.replace(placement="split:12+4", prompts=36))[0]
    assert other.trained.cluster is not None
    assert (other.trained.cluster.gpus_per_node, other.trained.layout.gpus) == (4, 12)
    assert "no whole nodes" in other.assumed["--gpus-per-node"]


def test_a_plan_of_one_gpu_cannot_have_old_answers() -> None:
    with pytest.raises(ConfigError, match="a trainer and a rollout need one each"):
        plan_task(JOB.replace(gpus=1, placement=None), Space.of(JOB.replace(gpus=1, placement=None), {}))


def test_where_no_engine_starts_a_plan_says_so_and_what_helps() -> None:
    job = Job(
        "qwen2.5-7b",
        task="rloo",
        gpu="rtx3060",
        gpus=1,
        lora_rank=16,
        prompts=4,
        samples=4,
        answers="512",
        prompt_len=128,
    )
    axes: dict[str, tuple[object, ...]] = {
        "tp": (1,),
        "pp": (1,),
        "zero": (3,),
        "micro_batch": (1,),
        "recompute": ("full",),
    }
    with pytest.raises(ConfigError, match=r"does not start; a layout fits with --gpus \d"):
        planned(job, axes)


def test_options_of_old_answers_that_change_nothing_are_named() -> None:
    run = resolve_posttrain(JOB.replace(staleness=None, rollout="vllm:tp=2,partial=true"))[0]
    assert "no answer is old" in run.assumed["--staleness"]


def test_a_rollout_in_mxfp8_holds_33_bytes_of_32_elements() -> None:
    """A matrix of the blocks: a byte an element and one for each 32; a card without such products takes those of 16 bits."""
    held = {}
    for name in ("bf16", "fp8", "mxfp8"):
        run = resolve_posttrain(JOB.replace(gpu="b200-sxm-180gb", rollout=f"vllm:tp=2,weights={name}"))[0]
        card = memory(run).engine
        assert card is not None
        held[name] = card.weights
    assert held["mxfp8"] - held["fp8"] == pytest.approx((held["bf16"] - held["fp8"]) / 32, rel=1e-6)
    steps = {
        (card, name): step_time(resolve_posttrain(JOB.replace(gpu=card, rollout=f"vllm:tp=2,weights={name}"))[0]).sides["rollout"]
        for card in ("b200-sxm-180gb", "h100-sxm5-80gb") for name in ("bf16", "fp8", "mxfp8")
    }  # fmt: skip
    ones, others = (
        [steps[card, name] for name in ("bf16", "fp8", "mxfp8")] for card in ("b200-sxm-180gb", "h100-sxm5-80gb")
    )
    assert ones[1] < ones[2] < 1.05 * ones[1]
    assert ones[2] < ones[0]
    assert others[1] < others[2]
