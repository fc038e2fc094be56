"""Answers of unequal lengths: beside a simulation of slots that runs every sequence, step by step."""

from __future__ import annotations

import heapq
import random
import statistics

import pytest

from loadgauge.core.base.lengths import Lengths
from loadgauge.core.post_training.answers import answers
from loadgauge.core.post_training.tail import _steps, expected_longest, generation


def simulated(lengths: Lengths, step, n: int, slots: int, prompt: int, replicas: int, seed: int) -> float:
    """Seconds until the last replica is done: each slot takes the next sequence when its own ends."""
    draw = random.Random(seed)
    population = [value for value, upto, below in zip(
        lengths.values, lengths.cumulative, (0, *lengths.cumulative[:-1]), strict=True) for _ in range(upto - below)]  # fmt: skip
    longest = 0.0
    for _ in range(replicas):
        waiting = [draw.choice(population) for _ in range(n)]
        running: list[tuple[int, int]] = []  # (step at which it ends, step at which it began)
        now, took = 0, 0.0
        while waiting or running:
            while waiting and len(running) < slots:
                heapq.heappush(running, (now + waiting.pop(), now))
            until = running[0][0]
            middle = (now + until) / 2
            context = prompt + statistics.fmean(middle - begun for _, begun in running)
            took += (until - now) * step(len(running), context)
            now = until
            while running and running[0][0] == now:
                heapq.heappop(running)
        longest = max(longest, took)
    return longest


def line(running: float, context: float) -> float:
    return 5e-3 + 1e-4 * running + 2e-8 * running * context


@pytest.mark.parametrize(
    ("law", "n", "slots", "replicas"),
    [
        ("exp:200,1000", 32, 64, 1),  # all at once: the tail alone
        ("exp:200,1000", 64, 16, 1),  # a queue
        ("exp:200,1000", 20, 16, 4),  # a few wait, and four replicas wait for one
        ("uniform:600", 48, 48, 2),
        ("uniform:600", 96, 10, 1),
        ("lognormal:150,0.9,1500", 40, 16, 3),
        ("300", 24, 8, 2),
    ],
)  # fmt: skip
def test_generation_takes_what_a_simulation_of_the_slots_takes(law: str, n: int, slots: int, replicas: int) -> None:
    lengths = answers(law)
    found = generation(lengths, line, sequences=n, slots=slots, prompt=100, replicas=replicas)
    rough = Lengths.of([max(1, round(v)) for v in _quantiles(lengths, 400)])
    runs = [simulated(rough, line, n, slots, 100, replicas, seed) for seed in range(60)]
    noise = statistics.stdev(runs) / len(runs) ** 0.5
    assert found.seconds == pytest.approx(statistics.fmean(runs), abs=3 * noise + 0.01 * found.seconds)


def _quantiles(lengths: Lengths, count: int) -> list[float]:
    total, out, index = lengths.cumulative[-1], [], 0
    for k in range(count):
        while lengths.cumulative[index] < (k + 0.5) / count * total:
            index += 1
        out.append(float(lengths.values[index]))
    return out


def test_the_last_answer_ends_when_the_longest_does() -> None:
    lengths = Lengths.uniform(1000)
    found = generation(lengths, lambda running, context: 1.0, sequences=30, slots=64, prompt=1)
    assert found.steps == pytest.approx(expected_longest(lengths, 30), rel=5e-3)
    assert found.seconds == pytest.approx(found.steps)


def test_half_of_the_slots_are_idle_where_lengths_are_uniform_and_many() -> None:
    """Of U{1..N} and steps of equal time, S is a line: half of the area under the peak."""
    found = generation(Lengths.uniform(2000), lambda running, context: 1.0, sequences=10_000, slots=10_000, prompt=1)
    assert found.idle == pytest.approx(0.5, abs=0.01)


def test_tokens_are_conserved() -> None:
    """What runs, summed over the steps, is the tokens of all answers."""
    lengths = answers("exp:200,1000")
    found = generation(lengths, lambda running, context: running, sequences=64, slots=16, prompt=1)
    assert found.seconds == pytest.approx(64 * lengths.mean, rel=5e-3)


def test_very_many_that_wait_take_tokens_over_throughput() -> None:
    lengths = Lengths.uniform(100)
    found = generation(lengths, line, sequences=200_000, slots=16, prompt=10)
    full = line(16, 10 + lengths.mean_square / (2 * lengths.mean))
    assert found.seconds == pytest.approx(200_000 * lengths.mean / 16 * full, rel=0.01)


def test_steps_between_those_that_were_timed_lie_on_a_line() -> None:
    import numpy

    found = _steps(lambda size, at: 3.0 + 2 * size + 5 * at, numpy.array([1.0, 7, 64]), numpy.array([100.0, 300, 900]))
    assert found == pytest.approx([505, 1517, 4631])


def test_a_step_s_context_is_the_prompt_and_what_was_made() -> None:
    """One answer of 128 tokens, each step as long as its context: 128 prompts of p tokens, and half of 128 squared."""
    for prompt in (0, 1000):
        found = generation(Lengths.of([128]), lambda running, context: context, sequences=1, slots=1, prompt=prompt)
        assert found.seconds == pytest.approx(128 * prompt + 128**2 / 2, rel=1e-4)


def test_the_tail_and_the_empty_slots_by_hand() -> None:
    """Of 1000 answers 950 have 50 tokens, 50 have 100: for the second half of the time 5 % run."""
    found = generation(
        Lengths.histogram({50: 950, 100: 50}), lambda running, context: 1.0, sequences=1000, slots=1000, prompt=10
    )
    assert found.seconds == pytest.approx(100)
    assert found.tail == pytest.approx(50)
    assert found.idle == pytest.approx(1 - (1000 * 50 + 50 * 50) / (1000 * 100))
