"""Types that the batch evaluation hands on."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from loadgauge.core.plan.space.space import Grid, Structure

Wanted: TypeAlias = Callable[[Any, Any, Any], Any]
"""From memory, its upper end [bytes] and lower bounds of the step time [s] to a mask: whose exact time matters."""

May: TypeAlias = Callable[[Any, Any], Any]
"""From lower bounds of memory [bytes] and step time [s] to a mask: which layouts may be among those that are sought."""


class Batch(NamedTuple):
    """Layouts of one structure: places in a grid, memory of the worst rank and the upper end of its range [bytes], step time [s].

    One entry per layout. The upper end is that of the run as assumed, without small things that are not said.
    valid: layouts of the structure, those included that a bound ruled out; order: its number among all structures
    """

    structure: Structure
    grid: Grid
    places: Any
    memory: Any
    high: Any
    step: Any
    valid: int
    order: int = 0


def untimed(memory: Any, high: Any, least: Any) -> Any:
    """Return that no layout needs an exact time (a `Wanted`), nor a bound of it."""
    return [False] * len(memory)
