"""The same run with one thing changed at a time, and the inverse questions."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from loadgauge.core.base.errors import ConfigError, Error
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
    run, way = base.run, base.checkpoint.way
    tries: list[tuple[dict[str, Any], str]] = []
    if math.isfinite(run.every):
        for factor, word in ((0.5, "twice as often"), (2, "half as often")):
            seconds = factor * run.every
            if seconds < run.work:
                tries.append(({"checkpoint": f"{way}:{seconds:.0f}s"}, f"checkpoints {word}"))
    if way != "memory":
        tries.append(({"checkpoint": "memory"}, "checkpoints in the memory of peers"))
    if way == "sync":
        tries.append(({"checkpoint": "async"}, "checkpoints written beside the steps"))
    tries.append(({"storage": f"{4 * base.storage / 1e9:.6g}GB/s"}, "storage four times as fast"))
    if run.spares:
        tries.append(({"spares": "0"}, "no spares"))
    tries.append(
        (
            {"spares": str(2 * run.spares or max(1, run.gpus // run.node // 100))},
            "twice the spares" if run.spares else "1 % spares",
        )
    )
    for recover, word in (
        ("elastic", "go on without a replica that lacks a host"),
        ("reroute", "peers of a dead stage take its work"),
    ):
        if run.recovery.way != recover:
            tries.append(({"recover": recover}, word))
    detect = run.recovery.detect
    if detect.high > 60:
        tries.append(({"detect": f"{detect.low / 4:g}s..{detect.high / 4:g}s"}, "failures noticed four times as fast"))
    for options, title in tries:
        if way == "none" and "storage" in options:
            continue
        try:
            other = base.again(None, min(FEW, base.options.runs), **options)
        except Error:
            continue
        flags = " ".join(f"--{name} {value}" for name, value in options.items())
        yield Change(flags, title, other)


def best_interval(base: Fleet) -> tuple[float, list[tuple[float, float]]]:
    """Return the seconds of work between checkpoints with the most goodput, and the goodput of each that was tried.

    Raises `ConfigError` without checkpoints.
    """
    if base.checkpoint.way == "none":
        raise ConfigError("needs checkpoints", key="find")
    if not base.failures.rate:
        raise ConfigError("nothing fails, so that no checkpoint is read", key="failures")
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
    if not tried:
        raise ConfigError("with these failures no progress is ever made", key="failures")
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
