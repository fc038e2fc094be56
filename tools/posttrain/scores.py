"""Predicted over measured peaks of the rows that `posttrain.runs` writes."""

from __future__ import annotations

import csv
import shlex
import statistics
from collections.abc import Iterator
from typing import Literal

import msgspec

from loadgauge.core.base.units import GIB
from loadgauge.core.command_line.options.options import parse
from loadgauge.core.estimate.memory.phases import Moment, Phase
from loadgauge.core.post_training.memory import PhaseMemory, memory
from loadgauge.core.resolve.posttrain import resolve_posttrain
from posttrain.runs import OUT

Side = Literal["rollout", "update"]


class Score(msgspec.Struct, frozen=True):
    """A peak as measured and as predicted [bytes]."""

    id: str
    model: str
    gpu: str
    side: Side
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def scores(every: int = 1) -> Iterator[Score]:
    """Yield the scores of every so many rows."""
    with OUT.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows[::every]:
        job = parse([row["model"], *shlex.split(row["flags"])])
        run, setup = resolve_posttrain(job)
        found = memory(run)
        moments = setup.estimate().memory.moments
        for side in ("rollout", "update"):
            phases = [
                phase
                for phase in found.phases
                if (phase.name == "generate") == (side == "rollout") and phase.name != "weight sync"
            ]
            worst = max(phase.total for phase in phases)
            if side == "update" and job.global_batch == job.samples:
                worst = max(first_step(phase, moments) for phase in phases)
            yield Score(row["id"], row["model"], row["gpu"], side, float(row[f"{side}_gib"]) * GIB, worst)


def first_step(phase: PhaseMemory, moments: tuple[Moment, ...]) -> float:
    """Return the peak of a phase of the first step [bytes]: the optimizer's states come with its end.

    The rig measures the first update alone; where that is one batch, no states are there before.
    """
    states = sum(one.nbytes for one in phase.residents if one.part == "optimizer")
    if phase.name != "update":
        return phase.total - states
    own = max(float(moment.total) for moment in moments)
    return (
        phase.total
        - own
        + max(
            float(moment.total - (0 if moment.phase is Phase.STEP else moment.parts["optimizer"])) for moment in moments
        )
    )


def summary(found: list[Score]) -> tuple[float, float]:
    """Return the mean and the largest absolute error."""
    errors = [abs(score.error) for score in found]
    return statistics.mean(errors), max(errors)
