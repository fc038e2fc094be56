"""Days, money and failures against the papers' own figures and against a simulation."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.hardware.prices import Prices
from loadgauge.core.estimate.time.cost import (
    DAY,
    Budget,
    Failures,
    checkpoint_interval,
    goodput,
    gpus_needed,
    progress,
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


def test_spot_beside_on_demand_is_a_simulation_of_instances_that_are_taken_away() -> None:
    """Each of 8 instances is taken away every 6 hours in the mean; what was done since the last checkpoint is lost."""
    share, every = progress(Prices.read("1.2@6h"), 64)
    assert every is not None
    draw, clock, done = random.Random(7), 0.0, 0.0
    taken = min(draw.expovariate(1 / 21600) for _ in range(8))
    while done < 3000 * every:
        if clock + every + 60 <= taken:
            clock += every + 60
            done += every
            continue
        clock = taken
        restarted = False
        while not restarted:  # a restart may be broken off too
            taken = clock + min(draw.expovariate(1 / 21600) for _ in range(8))
            restarted = clock + 600 <= taken
            clock = min(clock + 600, taken)
    assert share == pytest.approx(done / clock, rel=0.03)
    both, _ = progress(Prices.read("1.2@6h"), 64, Failures(hours_between_failures_per_gpu=48.0))
    assert both == pytest.approx(progress(Prices.read("1.2@3h"), 64)[0])  # 64 / 48 h and 8 / 6 h add up to 8 / 3 h


def test_the_price_that_costs_least_in_all_is_taken_and_each_is_said() -> None:
    line = "estimate llama-3.1-8b --gpu h100 --gpus 64 --zero 3 --tokens 1T --price"
    plain = document(f"{line} 3")["time"]
    for hours in ("6h", "20min"):
        told = document(f"{line} on-demand=3,spot=1.2@{hours}")["time"]
        share, _ = progress(Prices.read(f"1@{hours}"), 64)
        spot = plain["gpu_hours"] / share * 1.2
        assert told["cost"] == pytest.approx(min(plain["cost"], spot))
        assert told["goodput"] == pytest.approx(share if spot < plain["cost"] else 1)
    assert "(in 21.2 days)" in " ".join(typed(f"{line} on-demand=3,spot=1.2@6h").out.split())
    later = document(f"{line} 1.2@6h --restart-seconds 1200")["time"]
    assert later["days"] > document(f"{line} 1.2@6h")["time"]["days"]
    assert "--price on-demand=3" in typed("estimate gpt2 --gpu h100 --spot").err


def test_the_cheapest_kind_of_gpu_by_a_date_counts_what_is_taken_away(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    line = f"plan qwen3-0.6b --find gpu --tokens 20B --days 10 --gpus 8 --tp 1 --pp 1 --cp 1 --prices {file}"
    file.write_text("h100-sxm5-80gb = 2\na100-sxm4-80gb = 1\n")
    plain = {answer["text"].split(" at ")[0]: answer["value"] for answer in document(line)["answers"]}
    file.write_text("h100-sxm5-80gb = 2\na100-sxm4-80gb = 1@12h\n")
    spot = {answer["text"].split(" at ")[0]: answer["value"] for answer in document(line)["answers"]}
    share, _ = progress(Prices.read("1@12h"), 8)
    assert "taken away every 12 h" in " ".join(typed(line).out.split())
    ratios = sorted(spot[name] / plain[name] for name in plain)
    assert ratios == pytest.approx([1, 1 / share])


def test_a_plan_takes_prices_of_several_providers() -> None:
    line = "plan qwen3-0.6b --gpu h100 --gpus 8 --global-batch 64 --tp 1 --pp 1 --cp 1 --price"
    told, plain = (typed(f"{line} {price}") for price in ("runpod=2,lambda=3", "2"))
    assert (told.code, told.err) == (0, "")
    timeless = [re.sub(r"; [0-9.]+ s\.", "", each.out) for each in (told, plain)]
    assert timeless[0] == timeless[1]


def test_the_energy_of_a_run_is_that_of_its_phases() -> None:
    """Every card at its design power, so each phase has its share of the time; the phases add up."""
    line = "estimate llama-3.1-8b --gpu h100 --gpus 64 --zero 3 --tokens 1T"
    told = document(f"{line} --explain energy")["explain"]
    time = document(line)["time"]
    phases = {row["what"].removeprefix("of it in "): row["value"] for row in told["lines"] if "of it in" in row["what"]}
    assert told["value"] == pytest.approx(time["energy_kwh"]) == pytest.approx(sum(phases.values()))
    assert phases["forward"] == pytest.approx(time["energy_kwh"] * time["parts"]["forward"] / time["step"])
