"""Days, money and failures against the papers' own figures and against a simulation."""

from __future__ import annotations

import math
import random

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.estimate.time.cost import (
    DAY,
    Budget,
    Failures,
    checkpoint_interval,
    goodput,
    gpus_needed,
    training_seconds,
)
from published_formulas import training_seconds_by_flops


def test_days_of_gpt3_and_a_trillion_parameters():
    # Narayanan et al. 2021, section 5.1: 175 B, 300 B tokens, 1024 A100 at 140 TFLOP/s: 34 days; 1 T, 450 B tokens, 3072
    # A100 at 163 TFLOP/s: 84 days. Layers run again: 8 FLOPs a parameter and token.
    small = training_seconds_by_flops(8 * 175e9 * 300e9, 1024, 140e12) / DAY
    large = training_seconds_by_flops(8 * 1e12 * 450e9, 3072, 163e12) / DAY
    assert small == pytest.approx(34, abs=0.5)
    assert large == pytest.approx(84, abs=0.9)


def test_gpus_needed_inverts_the_days():
    seconds = training_seconds_by_flops(1e24, 1024, 4e14)
    assert gpus_needed(1e24, seconds, 4e14) == pytest.approx(1024)


def test_a_run_is_so_many_steps():
    assert training_seconds(15e12, 4e6, 2.0) == pytest.approx(15e12 / 4e6 * 2)
    run = Budget.of(tokens=15e12, gpus=512, step_tokens=4e6, step_seconds=2.0, price=3.0, watts=700, wanted_days=10)
    assert run.steps == 3.75e6
    assert run.days == pytest.approx(3.75e6 * 2 / DAY)
    assert run.gpu_hours == pytest.approx(512 * 3.75e6 * 2 / 3600)
    assert run.cost == pytest.approx(3 * run.gpu_hours)
    assert run.kilowatt_hours == pytest.approx(0.7 * run.gpu_hours)
    assert run.gpus_needed == math.ceil(512 * run.days / 10)


def simulated(work: float, interval: float, checkpoint: float, between: float, restart: float, seed: int) -> float:
    """Seconds until `work` is done and saved, with failures at random times, also while restarting."""
    chance = random.Random(seed)
    clock, done, next_failure = 0.0, 0.0, chance.expovariate(1 / between)
    while done < work:
        end = clock + interval + checkpoint
        if next_failure >= end:
            clock, done = end, done + interval
            continue
        clock = next_failure
        while True:
            next_failure = clock + chance.expovariate(1 / between)
            if next_failure >= clock + restart:
                clock += restart
                break
            clock = next_failure
    return clock


@pytest.mark.parametrize(
    ("checkpoint", "between", "restart"), [(60, 20_000, 300), (300, 5_000, 600), (5, 100_000, 100)]
)
def test_goodput_against_a_simulation(checkpoint: float, between: float, restart: float):
    interval = checkpoint_interval(checkpoint, between)
    work = 3000 * interval
    seconds = sum(simulated(work, interval, checkpoint, between, restart, seed) for seed in range(8)) / 8
    assert goodput(checkpoint, between, restart) == pytest.approx(work / seconds, rel=0.01)


def test_youngs_interval_is_the_best_to_first_order():
    best = checkpoint_interval(10, 1e6)
    at_best = goodput(10, 1e6, 0, best)
    assert at_best > goodput(10, 1e6, 0, best / 2)
    assert at_best > goodput(10, 1e6, 0, best * 2)


def test_failures_of_a_cluster_add_up():
    failures = Failures(hours_between_failures_per_gpu=50_000)
    assert failures.cluster_seconds(1000) == pytest.approx(50 * 3600)
    with_failures = Budget.of(tokens=1e12, gpus=1000, step_tokens=1e6, step_seconds=1.0, failures=failures)
    without = Budget.of(tokens=1e12, gpus=1000, step_tokens=1e6, step_seconds=1.0)
    assert with_failures.days == pytest.approx(without.days / with_failures.goodput)
    assert 0.9 < with_failures.goodput < 1
    with pytest.raises(ConfigError, match="no progress"):
        Budget.of(
            tokens=1e12, gpus=10**6, step_tokens=1e6, step_seconds=1.0,
            failures=Failures(hours_between_failures_per_gpu=0.01, checkpoint_seconds=1000),
        )  # fmt: skip
