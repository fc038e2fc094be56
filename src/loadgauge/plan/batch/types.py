"""What the batch evaluation hands on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from loadgauge.plan.space import Grid, Structure

Wanted: TypeAlias = Callable[[Any, Any], Any]
"""Of bytes and of the least seconds of layouts: for which of them the exact time matters."""


class Batch(NamedTuple):
    """Layouts of one structure: places in the arrays of a grid, bytes on the worst rank, seconds of a step."""

    structure: Structure
    grid: Grid
    places: Any
    memory: Any
    step: Any
