"""What the batch evaluation hands on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from loadgauge.plan.space import Grid, Structure

Wanted: TypeAlias = Callable[[Any, Any], Any]
"""From memory [bytes] and lower bounds of the step time [s] to a mask: whose exact time matters."""


class Batch(NamedTuple):
    """Layouts of one structure: places in a grid, memory of the worst rank [bytes], step time [s]; one entry per layout."""

    structure: Structure
    grid: Grid
    places: Any
    memory: Any
    step: Any
