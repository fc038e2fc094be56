"""The same run with one thing changed at a time, and the inverse questions."""

import math
from collections.abc import Iterator

import msgspec

from loadgauge.core.base.errors import ConfigError, Error, refuse
from loadgauge.core.estimate.estimate import estimate
from loadgauge.fleets.fleet import Fleet
from loadgauge.fleets.simulate import away

FINDS = ("checkpoint-interval", "spares", "oversubscription", "sites")
"""The inverse questions about a fleet."""
FEW = 200
"""Runs of a change: on the draws of the run itself, so that their differences are far smaller than their spread."""


class Change(msgspec.Struct, frozen=True):
    """A run with one thing changed: the flags of it, what it is in words, and the fleet."""

    flags: str
    what: str
    fleet: Fleet


def changed(base: Fleet) -> Iterator[Change]:
    """Yield the run with one thing changed at a time; those that cannot be are left out."""
    run, way, detect = base.run, base.checkpoint.way, base.run.recovery.detect
    spares = 2 * run.spares or max(1, run.gpus // run.node // 100)
    often, rarely = run.every / 2, 2 * run.every
    # The option, its value, in words, and whether the run can be so and is not.
    tries = (
        ("checkpoint", f"{way}:{often:.0f}s", "checkpoints twice as often", often < run.work),
        ("checkpoint", f"{way}:{rarely:.0f}s", "checkpoints half as often", rarely < run.work),
        ("checkpoint", "memory", "checkpoints in the memory of peers", way != "memory"),
        ("checkpoint", "async", "checkpoints written beside the steps", way == "sync"),
        ("storage", f"{4 * base.storage / 1e9:.6g}GB/s", "storage four times as fast", way != "none"),
        ("spares", "0", "no spares", run.spares > 0),
        ("spares", str(spares), "twice the spares" if run.spares else "1 % spares", True),
        ("recover", "elastic", "go on without a replica that lacks a host", run.recovery.way != "elastic"),
        ("recover", "reroute", "peers of a dead stage take its work", run.recovery.way != "reroute"),
        (
            "detect",
            f"{detect.low / 4:g}s..{detect.high / 4:g}s",
            "failures noticed four times as fast",
            detect.high > 60,
        ),
    )
    for name, value, title, possible in tries:
        if not possible:
            continue
        try:
            other = base.again(None, min(FEW, base.options.runs), **{name: value})
        except Error:
            continue
        yield Change(f"--{name} {value}", title, other)


def best_interval(base: Fleet) -> tuple[float, list[tuple[float, float]]]:
    """Return the seconds of work between checkpoints with the most goodput, and the goodput of each that was tried.

    Raises `ConfigError` without checkpoints.
    """
    refuse(base.checkpoint.way == "none", "needs checkpoints", key="find")
    refuse(not base.failures.rate, "nothing fails, so that no checkpoint is read", key="failures")
    start = base.again(runs=2, checkpoint=base.checkpoint.way).run.every
    tried: list[tuple[float, float]] = []
    for power in range(-6, 7):
        every = max(base.step, start * 2 ** (power / 2))
        if every >= base.run.work or (tried and every == tried[-1][0]):
            continue
        again = base.again(runs=FEW, checkpoint=f"{base.checkpoint.way}:{every:.3f}s")
        tried.append((again.run.every, float(again.outcome.goodput.mean())))
    return max(tried, key=lambda pair: pair[1])[0], tried


def best_spares(base: Fleet) -> tuple[int, list[tuple[int, float, float]]]:
    """Return the spare hosts with which the run costs the fewest GPU-hours, spares included; days and GPU-hours of those tried."""
    lacking = away(msgspec.structs.replace(base.run, spares=0))
    most = max(4, math.ceil(2.5 * lacking + 4))
    tried: list[tuple[int, float, float]] = []
    for number in sorted({round(most * part / 10) for part in range(11)} | {math.ceil(lacking)}):
        try:
            again = base.again(runs=FEW, spares=str(number))
        except ConfigError:
            continue  # too few to make any progress
        days = float(again.outcome.seconds.mean()) / 86_400
        tried.append((number, days, days * 24 * again.gpus))
    refuse(not tried, "with these failures no progress is ever made", key="failures")
    return min(tried, key=lambda row: row[2])[0], tried


FACTORS = (1, 2, 3, 4, 6, 7, 8, 12, 16)


def most_oversubscription(base: Fleet, slack: float) -> tuple[float, list[tuple[float, float]]]:
    """Return the largest oversubscription of all tiers above the leaves that makes a step at most `slack` longer, and each step.

    Raises `ConfigError` without a topology of such tiers.
    """
    result = base.estimate
    cluster = result.cluster
    if cluster is None or cluster.topology is None:
        raise ConfigError("needs --topology", key="find")
    tried: list[tuple[float, float]] = []
    for factor in FACTORS:
        narrow = msgspec.structs.replace(cluster, topology=cluster.topology.with_oversubscription(factor))
        narrowed = estimate(result.model, result.layout, result.training, cluster=narrow)
        tried.append((factor, narrowed.timing.step))
    least = tried[0][1]
    return max(factor for factor, step in tried if step <= least * (1 + slack)), tried
