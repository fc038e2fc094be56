"""The best layouts of a search: kept while it goes over all of them, estimated one by one when they are read."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.batch.types import Batch, May, Wanted
from loadgauge.core.plan.space.space import Grid, Structure

CLOSE = 1e-9
"""Relative; sums of floats in another order differ in the last bits."""
SLOWEST = 2.0
"""In a space that is narrowed down, the front ends with layouts that take so many times as long as the fastest that fits."""


class Row(NamedTuple):
    """A layout among the best: the score (minimised), step time [s], memory [bytes], and what decides between equals.

    order: the number of its case, of its structure, and its place in the grid; source: that structure and grid, or the layout
    """

    score: float
    step: float
    memory: float
    order: tuple[int, int, int]
    source: tuple[Structure, Grid] | Layout

    @classmethod
    def of(cls, number: int, batch: Batch, score: Any, index: int) -> Row:
        """One layout of a batch. number: of its case; score: of all its layouts"""
        own = float(score[index]), float(batch.step[index]), float(batch.memory[index])
        return cls(*own, (number, batch.order, int(batch.places[index])), (batch.structure, batch.grid))

    @property
    def case(self) -> int:
        """The number of its case."""
        return self.order[0]

    @property
    def layout(self) -> Layout:
        """The layout, every size a whole number."""
        if isinstance(self.source, Layout):
            return self.source
        structure, grid = self.source
        return grid.layout(structure, self.order[2])


class Pool:
    """The best layouts seen so far of those that fit, or of those that may, and their front if it is asked for."""

    def __init__(self, numpy: Any, kept: int, distinct: bool = False, fronted: bool = True) -> None:
        self.numpy, self.kept, self.distinct, self.fronted = numpy, kept, distinct, fronted
        self.rows: list[Row] = []
        self.front: list[Row] = []
        self.ceiling = float("inf")
        self.slowest: dict[int, float] = {}
        """Of each case that is narrowed down, the longest step of the front [s]."""

    def limit(self, number: int, step: float) -> None:
        """End the front of a case at some times a step that fits [s]."""
        self.slowest[number] = min(self.slowest.get(number, float("inf")), SLOWEST * step)

    def add(self, number: int, batch: Batch, score: Any, members: Any) -> None:
        """Add layouts of one structure. members: which of the batch are of this pool"""
        numpy = self.numpy
        good = members[(score[members] <= self.ceiling) & (batch.step[members] < numpy.inf)]
        if len(good) > self.kept:
            good = good[numpy.argpartition(score[good], self.kept)[: self.kept]]
        self.rows += [Row.of(number, batch, score, int(index)) for index in good]
        if len(self.rows) > 20 * self.kept:
            self.trim()
        if self.fronted:
            self._front(number, batch, score, members)

    def contenders(self, number: int, score: Any, memory: Any, least: Any) -> Any:
        """Return which layouts might be among the best kept by a bound of their score, or on the front by one of their time."""
        if len(self.rows) >= self.kept:
            self.trim()
        if not self.fronted:
            return score <= self.ceiling
        in_time = least <= self.slowest.get(number, self.numpy.inf)
        return (score <= self.ceiling) | (in_time & self._before_front(memory, least))

    def _before_front(self, memory: Any, step: Any, equal: bool = False) -> Any:
        """Layouts that need less memory than all on the front that take no longer; or no more than these."""
        numpy = self.numpy
        steps = numpy.array([row.step for row in self.front])
        bytes_by_then = numpy.array([numpy.inf, *(row.memory for row in self.front)])
        there = bytes_by_then[numpy.searchsorted(steps, step, side="right")]
        return memory <= there if equal else memory < there

    def trim(self) -> None:
        """Only the best stay; where a layout may have come several times, one of those that are equal."""
        if self.distinct:
            self.rows = list({row[:3]: row for row in self.rows}.values())
        self.rows.sort(key=lambda row: row[:4])
        del self.rows[self.kept :]
        if len(self.rows) == self.kept:
            self.ceiling = self.rows[-1].score * (1 + 1e-12)

    def _front(self, number: int, batch: Batch, score: Any, members: Any) -> None:
        numpy = self.numpy
        members = members[batch.step[members] < numpy.inf]
        members = members[self._before_front(batch.memory[members], batch.step[members], equal=True)]
        if not len(members):
            return
        order = members[numpy.lexsort((batch.memory[members], batch.step[members]))]
        memory = batch.memory[order]
        lowest = numpy.minimum.accumulate(memory)
        better = numpy.concatenate([[True], memory[1:] < lowest[:-1]])
        self.merge([Row.of(number, batch, score, int(index)) for index in order[better]])

    def merge(self, others: Sequence[Row]) -> None:
        """Add layouts to the front."""
        merged = sorted([*self.front, *others], key=lambda row: row[1:4])
        self.front = []
        for row in merged:
            if not self.front or row.memory < self.front[-1].memory:
                self.front.append(row)


class Best:
    """The best layouts seen so far that fit as assumed, and those that are tight.

    Once a layout fits, of the tight ones only those matter that would be better than it.
    narrowed: the cases whose front ends at `SLOWEST`
    """

    def __init__(self, kept: int, fronted: bool = True) -> None:
        import numpy

        self.numpy = numpy
        self.sure, self.tight, self.seeds = (Pool(numpy, kept, again, fronted) for again in (False, False, True))
        self.lowest = float("inf")
        self.narrowed: set[int] = set()
        self.valid = self.seen = self.fitting = self.timed = 0

    def add(self, number: int, batch: Batch, score: Any, limit: float, capacity: float) -> None:
        """Add the layouts of one structure; limit: memory that they may need, of the card's capacity [bytes]."""
        numpy = self.numpy
        self.valid += batch.valid
        self.seen += len(batch.places)
        self.timed += int(numpy.isfinite(batch.step).sum())
        if not len(batch.places):
            return
        sure, tight = self._split(batch.memory, batch.high, limit, capacity)
        self.fitting += int(sure.sum())
        for pool, members in ((self.sure, numpy.flatnonzero(sure)), (self.tight, numpy.flatnonzero(tight))):
            if len(members):
                self._take(pool, number, batch, score, members)
        self.lowest = min((row.score for row in self.sure.rows), default=self.lowest)

    def seed(self, number: int, batch: Batch, score: Any, limit: float, capacity: float) -> None:
        """Take layouts that are added later once more for what any better one has to beat."""
        members = self.numpy.flatnonzero(self._split(batch.memory, batch.high, limit, capacity)[0])
        if len(members):
            self._take(self.seeds, number, batch, score, members)
            self.lowest = min((row.score for row in self.seeds.rows), default=self.lowest)

    def _take(self, pool: Pool, number: int, batch: Batch, score: Any, members: Any) -> None:
        if number in self.narrowed:
            pool.limit(number, float(batch.step[members].min()))
        pool.add(number, batch, score, members)

    def contenders(self, number: int, score: Any, memory: Any, least: Any) -> Any:
        """Return which layouts that fit might be among the best kept or on the front; score: a function of the next two"""
        # A little quicker than they may be, so that those seen already and their equals are among them.
        before = least * (1 - CLOSE)
        lowest = score(before, memory)
        may_win = self.sure.contenders(number, lowest, memory, before)
        return may_win & self.seeds.contenders(number, lowest, memory, before) if self.seeds.rows else may_win

    def wanted(self, number: int, score: Any, limit: float, capacity: float) -> Wanted:
        """Return whether the exact time of each layout can matter: by its least time it may be among the best, or on the front."""

        def contenders(memory: Any, high: Any, least: Any) -> Any:
            sure, tight = self._split(memory, high, limit, capacity)
            lowest = score(least, memory)
            fits = self.sure.rows or self.seeds.rows
            might = lowest < self.lowest if fits else self.tight.contenders(number, lowest, memory, least)
            return (sure & self.contenders(number, score, memory, least)) | (tight & might)

        return contenders

    def may(self, number: int, score: Any, limit: float) -> May:
        """Return whether a layout can matter: by its least memory and its least time it fits, and might be kept or on the front."""

        def matters(low: Any, least: Any) -> Any:
            return (low <= limit) & self.contenders(number, score, low, least)

        return matters

    def _split(self, memory: Any, high: Any, limit: float, capacity: float) -> tuple[Any, Any]:
        room = memory <= limit
        return room & (high <= capacity), room & (high > capacity)

    @property
    def pool(self) -> Pool:
        """The layouts to answer with: those that fit, or the tight ones where none does."""
        return self.sure if self.sure.rows else self.tight

    @property
    def front(self) -> list[Row]:
        """The front of the layouts to answer with."""
        pool = self.pool
        return [row for row in pool.front if row.step <= pool.slowest.get(row.case, self.numpy.inf)]


class Estimates(Sequence[Estimate]):
    """The exact estimates of layouts, each made when it is first read."""

    def __init__(self, number: int, make: Callable[[int], Estimate]) -> None:
        self.number, self.make = number, make

    def __len__(self) -> int:
        return self.number

    @overload
    def __getitem__(self, index: int) -> Estimate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Estimate, ...]: ...
    def __getitem__(self, index: int | slice) -> Estimate | tuple[Estimate, ...]:
        if isinstance(index, slice):
            return tuple(self.make(number) for number in range(*index.indices(self.number)))
        return self.make(range(self.number)[index])


Rank = tuple[int, float, float, tuple[int, ...]]
"""A place in the ranking: the word of the verdict, the score, and what decides between equals."""


class Ranked:
    """Layouts ranked by their exact estimates, of which no more are made than the places that are read rest on.

    rows: by their scores; rank: of an estimate; close: the scores are the exact ones but for rounding, so that a row whose
    score is higher comes later; ranks: of the first rows, where they are known from before
    """

    def __init__(
        self,
        rows: Sequence[Row],
        exact: Callable[[Row], Estimate],
        rank: Callable[[Row, Estimate], Rank],
        close: bool,
        ranks: Sequence[Rank] = (),
    ) -> None:
        self.rows, self.exact, self.rank, self.close = rows, exact, rank, close
        self.ranks = list(ranks)
        self.done: list[tuple[Rank, int]] = []

    def at(self, rank: int) -> Estimate:
        """The estimate at a place of the ranking."""
        while len(self.done) < len(self.rows) and not self._settled(rank):
            number = len(self.done)
            if number == len(self.ranks):
                self.ranks.append(self.rank(row := self.rows[number], self.exact(row)))
            insort(self.done, (self.ranks[number], number))
        return self.exact(self.rows[self.done[rank][1]])

    def _settled(self, rank: int) -> bool:
        """Return whether no layout that is not yet estimated can come before this place."""
        if not self.close or len(self.done) <= rank:
            return False
        word, score = self.done[rank][0][:2]
        following = self.rows[len(self.done)].score
        return word == 0 and bool(score < following - abs(following) * CLOSE)

    @property
    def moved(self) -> int:
        """Number of the estimated layouts that changed ranks."""
        return sum(1 for rank, (_, number) in enumerate(self.done) if rank != number)
