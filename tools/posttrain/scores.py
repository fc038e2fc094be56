"""Predicted over measured peaks of the rows that `posttrain.runs` writes."""

from __future__ import annotations

import csv
import shlex
import statistics
from collections.abc import Iterator
from typing import Literal

import msgspec

from loadgauge.cli.options import parse
from loadgauge.posttrain.memory import memory
from loadgauge.resolve.posttrain import resolve_posttrain
from loadgauge.units import GIB
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
        run, _ = resolve_posttrain(parse([row["model"], *shlex.split(row["flags"])]))
        found = memory(run)
        for side in ("rollout", "update"):
            phases = [
                phase
                for phase in found.phases
                if (phase.name == "generate") == (side == "rollout") and phase.name != "weight sync"
            ]
            worst = max(phase.total for phase in phases)
            yield Score(row["id"], row["model"], row["gpu"], side, float(row[f"{side}_gib"]) * GIB, worst)


def summary(found: list[Score]) -> tuple[float, float]:
    """Return the mean and the largest absolute error."""
    errors = [abs(score.error) for score in found]
    return statistics.mean(errors), max(errors)
