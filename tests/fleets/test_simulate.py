"""Simulated runs: limits that are known, every second has one name, a seed gives the same runs again, and published runs."""

import math

import msgspec
import numpy as np
import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.estimate.time.cost import checkpoint_interval, goodput
from loadgauge.fleets.failures import (
    NONE,
    Checkpoint,
    Failures,
    Part,
    Recovery,
    Span,
    checkpoint,
    failures,
    failures_ids,
    span,
)
from loadgauge.fleets.simulate import NAMES, Run, simulate

DAY, HOUR = 86_400.0, 3600.0
AT_ONCE = Recovery(
    detect=Span(0, 0), diagnose=Span(0, 0), swap=Span(0, 0), warm=Span(0, 0), regroup=Span(0, 0), restart=Span(0, 0)
)


def failing(mean: float, gpus: int = 1000, needs: str = "restart") -> Failures:
    """Failures of the whole job every so many seconds, of one kind."""
    rate = 1 / (mean * gpus)
    return Failures(id="", name="", source=(), low=rate, high=rate, parts=(Part(name="any", count=1, needs=needs),))


def fixed(restart: float) -> Recovery:
    return msgspec.structs.replace(AT_ONCE, restart=Span(restart, restart))


def test_without_failures_a_run_is_its_steps() -> None:
    work = 1234.5678 * 86_400
    for every, stall in ((math.inf, 0.0), (600.0, 0.0)):
        found = simulate(Run(work=work, gpus=4096, every=every, stall=stall, failures=NONE), 3)
        assert found.seconds == pytest.approx(work, rel=1e-12)
    never = Failures(id="", name="", source=(), low=1e-40, high=1e-40, parts=(Part(name="any", count=1),))
    assert simulate(Run(work=work, gpus=8, every=600, failures=never), 3).seconds == pytest.approx(work, rel=1e-12)


@pytest.mark.parametrize("mean", [1200.0, 3600.0, 4 * HOUR, 12 * HOUR])
@pytest.mark.parametrize(
    ("stall", "restart", "shift"), [(60, 300, 1), (20, 600, 0.5), (60, 0, 2), (120, 900, 1), (5, 60, 1)]
)
def test_exponential_failures_give_daly(mean: float, stall: float, restart: float, shift: float) -> None:
    """daly2006 at 20 points: within three errors of the mean of the sample, and within 1 %."""
    every = shift * checkpoint_interval(stall, mean)
    work = 400 * every
    run = Run(work=work, gpus=1000, every=every, stall=stall, failures=failing(mean), recovery=fixed(restart))
    found = simulate(run, 300, seed=7).seconds
    # The last interval writes no checkpoint.
    expected = (work / goodput(stall, mean, restart, every)) - stall
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - expected) < 3.3 * error + 1e-3 * expected
    assert found.mean() == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_the_best_interval_is_that_of_the_closed_form() -> None:
    """Daly's exact optimum by brute force over his formula, and by brute force over simulated runs."""
    mean, stall, restart = 3600.0, 60.0, 300.0
    grid = [checkpoint_interval(stall, mean) * factor for factor in (0.4, 0.6, 0.8, 1.0, 1.25, 1.6, 2.2)]
    formula = [goodput(stall, mean, restart, every) for every in grid]
    found = [
        simulate(
            Run(work=3e6, gpus=1000, every=every, stall=stall, failures=failing(mean), recovery=fixed(restart)), 60, 3
        ).goodput.mean()
        for every in grid
    ]
    best = max(formula)
    assert formula[int(np.argmax(found))] > best * 0.998
    assert found == pytest.approx(formula, rel=0.01)


def mixed(**changes: object) -> Run:
    return Run(
        **{
            "work": 20 * DAY, "gpus": 16384, "spares": 20, "every": 600.0, "stall": 3.0, "lag": 60.0, "reload": 40.0,
            "storage": HOUR, "group": 128, "slow": (0.0, 0.02), "failures": failures("llama3"), **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize("way", ["restart", "elastic", "reroute"])
@pytest.mark.parametrize("horizon", [None, 10 * DAY])
def test_every_second_of_every_gpu_has_one_name(way: str, horizon: float | None) -> None:
    for changes in ({}, {"spares": 0}, {"gpus": 98304, "every": 120.0}):
        run = mixed(recovery=Recovery(way=way, repair=DAY), **changes)
        found = simulate(run, 20, seed=1, horizon=horizon)
        assert set(found.names) == set(NAMES)
        assert sum(found.names.values()) == pytest.approx(found.seconds, rel=1e-10)
        assert all((values >= -1e-6).all() for values in found.names.values())
        whole = 1 + run.spares * 8 / run.gpus
        assert found.names["progress"] * whole == pytest.approx(found.work, rel=1e-9)
        if horizon is None:
            assert found.work == pytest.approx(run.work, rel=1e-9)
        else:
            assert found.seconds == pytest.approx(horizon, rel=1e-12)


def test_the_seed_gives_the_same_runs() -> None:
    first, second, other = (simulate(mixed(), 30, seed=seed).seconds for seed in (5, 5, 6))
    assert (first == second).all()
    assert (first != other).any()


def test_failures_come_as_often_as_they_should() -> None:
    """419 of 466 interruptions are unplanned; a Poisson count in 54 days."""
    found = simulate(mixed(recovery=AT_ONCE), 400, seed=2, horizon=54 * DAY).interruptions
    assert found.mean() == pytest.approx(419, abs=4 * math.sqrt(419 / 400))
    assert found.std() == pytest.approx(math.sqrt(419), rel=0.15)


def test_what_helps() -> None:
    def share(**changes: object) -> float:
        return float(simulate(mixed(gpus=65536, **changes), 40, seed=3, horizon=20 * DAY).goodput.mean())

    usual, none = share(spares=400), share(spares=0)
    assert none < 0.6 * usual  # waiting for repairs
    assert share(spares=400, recovery=Recovery(way="elastic")) > usual
    few = Recovery(way="elastic"), Recovery(way="reroute")
    small, large = (share(spares=0, recovery=few[0], group=group) for group in (16, 1024))
    assert small > large  # a smaller replica is lost with a host
    assert share(spares=0, recovery=few[1], group=1024) > large
    corrupt = Part(name="corruption", count=1, silent_hours=5.0)
    silent = msgspec.structs.replace(failures("llama3"), parts=(*failures("llama3").parts, corrupt))
    assert share(spares=400, failures=silent) < usual


@pytest.mark.slow
def test_a_million_gpus_cost_as_many_turns() -> None:
    """Groups are simulated, not GPUs: the failures of one run are bounded, and a longer run goes on as its part did."""
    small, large = (mixed(gpus=gpus, spares=gpus // 100, recovery=Recovery(way="elastic")) for gpus in (10**5, 10**6))
    for run in (small, large):
        found = simulate(msgspec.structs.replace(run, failures=failures("400000h")), 200, horizon=90 * DAY)
        assert found.interruptions.mean() == pytest.approx(run.gpus * 90 * 24 / 400_000, rel=0.02)
        assert sum(found.names.values()) == pytest.approx(found.seconds, rel=1e-9)
    part = simulate(
        mixed(
            failures=failing(600.0), gpus=1000, every=60.0, lag=0.0, reload=0.0, slow=(0, 0), spares=0, recovery=AT_ONCE
        ),
        50,
        horizon=200 * DAY,
    )
    assert float(part.goodput.mean()) == pytest.approx(goodput(3.0, 600.0, 0.0, 60.0), rel=0.01)


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match="below 0"):
        Run(work=1, gpus=8, spares=-1, failures=NONE)
    with pytest.raises(ConfigError, match="longer than the run"):
        Run(work=DAY, gpus=8, every=2 * DAY, failures=NONE)
    with pytest.raises(ConfigError, match="no progress"):
        simulate(Run(work=DAY, gpus=1000, failures=failing(60.0), recovery=fixed(600)), 2)
    for text in ("lama3", "0h", "3"):
        with pytest.raises(ConfigError, match="failures"):
            failures(text)
    for text in ("async:5", "often", "none:5min", "async:0s"):
        with pytest.raises(ConfigError, match=r"checkpoint|unit"):
            checkpoint(text)
    with pytest.raises(ConfigError, match="rise"):
        span("10min..1min", "detect")
    assert checkpoint("memory") == Checkpoint(way="memory")
    assert all(failures(name).parts for name in failures_ids())


# -- published ---------------------------------------------------------------------------------------------------------


def test_llama3() -> None:
    """54 days on 16,384 H100: 419 unexpected interruptions, by what other fleets saw, and more than 90 % effective time.

    From the paper: 405 B parameters, 24,576 GPUs in the cluster, 2 TB/s of storage. The interval is the best one.
    """
    write = 405e9 * 14 / 2e12
    every = checkpoint_interval(write, 54 * DAY / 419)
    job = {
        "spares": 1024,
        "every": every,
        "stall": write,
        "lag": 0.0,
        "reload": write,
        "storage": 0.0,
        "slow": (0.0, 0.0),
    }
    fleets = simulate(mixed(failures=failures("studies"), **job), 300, seed=1, horizon=54 * DAY)
    low, _, high = fleets.quantiles(fleets.interruptions)
    assert low < 419 < high
    own = simulate(mixed(failures=failures("llama3"), **job), 300, seed=1, horizon=54 * DAY)
    low, middle, high = own.quantiles(own.goodput)
    assert low < 0.90 < middle < high


def chronicle(nodes: int, spares: int, days: float, every: float, horizon: float | None = None) -> object:
    """A run of 2022, where somebody has to notice: at once, or in the morning."""
    recovery = Recovery(detect=Span(600.0, 10 * HOUR))
    run = Run(
        work=days * DAY, gpus=8 * nodes, spares=spares, every=every, stall=40.0, reload=40.0,
        failures=failures("studies"), recovery=recovery,
    )  # fmt: skip
    return simulate(run, 400, seed=4, horizon=horizon)


def test_bloom() -> None:
    """48 nodes and 4 spares, a checkpoint every 100 steps; 366 B tokens in steps of 2,048 x 2,048 of 105 s: 1 to 2 failures a week.

    From the run's README and SLURM script (github.com/bigscience-workshop/bigscience, train/tr11-176B-ml).
    """
    found = chronicle(48, 4, 366e9 / 2048**2 * 105 / DAY, 100 * 105)
    low, _, high = found.quantiles(found.interruptions / (found.seconds / (7 * DAY)))
    assert low < 1.5 < high
    low, _, high = found.quantiles(found.seconds / DAY)
    assert low < 117.5 < high  # 1,082,990 GPU hours on 384 GPUs


def test_opt() -> None:
    """124 nodes and 12 buffer nodes, two months: at least 35 manual restarts for hardware. Diverged losses are
    not modelled, so no days.

    From the chronicles (github.com/facebookresearch/metaseq, projects/OPT/chronicles): 33 days without failures.
    """
    found = chronicle(124, 12, 33, 3 * HOUR, 60 * DAY)
    low, _, high = found.quantiles(found.interruptions)
    assert low < 35 < high
