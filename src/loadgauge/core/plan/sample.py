"""Some of the layouts of each structure, kept while a search goes over all of them: the points of a scatter plot."""

from typing import Any

from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.plan.batch.types import Batch, Wanted


class Sampler:
    """Keeps up to `each` layouts of every structure that fit, as (memory [bytes], step [s], layout) in `rows`; where none
    does, those that are tight."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.sure: list[tuple[float, float, Layout]] = []
        self.tight: list[tuple[float, float, Layout]] = []

    @property
    def rows(self) -> list[tuple[float, float, Layout]]:
        """Return what was kept."""
        return self.sure or self.tight

    def widen(self, wanted: Wanted, limit: float) -> Wanted:
        """Has some layouts of each structure timed that need at most `limit` bytes, besides those that are wanted."""

        def more(memory: Any, high: Any, least: Any) -> Any:
            import numpy

            chosen = wanted(memory, high, least).copy()
            chosen[spaced(numpy.flatnonzero(memory <= limit), self.each)] = True
            return chosen

        return more

    def take(self, batch: Batch, limit: float) -> None:
        """Keeps some of the layouts of one structure that were timed and need at most `limit` bytes."""
        import numpy

        timed, fits = (batch.memory <= limit) & (batch.step < numpy.inf), batch.high <= limit
        for rows, members in ((self.sure, timed & fits), (self.tight, timed & ~fits)):
            for index in spaced(numpy.flatnonzero(members), self.each):
                layout = batch.grid.layout(batch.structure, int(batch.places[index]))
                rows.append((float(batch.memory[index]), float(batch.step[index]), layout))


def spaced(places: Any, most: int) -> Any:
    """At most `most` of the places, evenly spaced, the first and the last among them.

    >>> import numpy
    >>> list(map(int, spaced(numpy.arange(10), 4))), len(spaced(numpy.arange(3), 4))
    ([0, 3, 6, 9], 3)
    """
    import numpy

    if len(places) <= most:
        return places
    return places[numpy.unique(numpy.linspace(0, len(places) - 1, most).round().astype(int))]
