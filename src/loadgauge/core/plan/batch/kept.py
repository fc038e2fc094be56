"""Searches kept on disk: the second same one answers from there, and one that was interrupted goes on.

What is kept are the best layouts, the front and the counts; what is shown of them is estimated again. A file is named by all that
decides the answer: models, cards and tables as they stand in the cases, the objective, and this package's own files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

import msgspec

from loadgauge._version import __version__
from loadgauge.core.base.files import files_as_they_are, keep, kept_file, read_kept
from loadgauge.core.base.hooks import PACKAGE
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.plan.batch.best import Best, Pool, Rank, Ranked, Row

KEEPING: ContextVar[bool] = ContextVar("keeping", default=False)
"""True where searches are kept: those of `loadgauge plan` are."""
QUICK = 0.1
"""Seconds below which a search is not worth a file."""
COUNTS = ("valid", "seen", "fitting", "timed")
KeptRow = tuple[float, float, float, tuple[int, int, int], Layout]


class KeptPool(msgspec.Struct, array_like=True):
    """The rows of a pool, its front, and where that ends [s], by the number of a case."""

    rows: list[KeptRow] = []
    front: list[KeptRow] = []
    slowest: dict[int, float] = {}

    @classmethod
    def of(cls, *pools: Pool) -> KeptPool:
        """Of several pools together."""
        slowest: dict[int, float] = {}
        for pool in pools:
            for number, step in pool.slowest.items():
                slowest[number] = min(step, slowest.get(number, step))
        return cls(_layouts(pools, "rows"), _layouts(pools, "front"), slowest)

    def restore(self, pool: Pool) -> None:
        """Fill a pool, which is empty."""
        pool.rows, pool.slowest = [Row(*row) for row in self.rows], dict(self.slowest)
        pool.merge([Row(*row) for row in self.front])
        pool.trim()


def _layouts(pools: Sequence[Pool], name: str) -> list[KeptRow]:
    return [(*row[:4], row.layout) for pool in pools for row in getattr(pool, name)]


class State(msgspec.Struct):
    """How far a search is: the cases that are done, what they left, layouts of the next one, and what follows the last.

    ranks: of the best layouts by their exact estimates; least: the layout that needs least where none fits, and its case
    fits: how many layouts do, where that was counted apart
    """

    cases: int = 0
    sure: KeptPool = msgspec.field(default_factory=KeptPool)
    tight: KeptPool = msgspec.field(default_factory=KeptPool)
    counts: tuple[int, ...] = (0,) * len(COUNTS)
    lowest: float = float("inf")
    seeds: KeptPool = msgspec.field(default_factory=KeptPool)
    ranks: list[Rank] = []
    least: tuple[Layout, int] | None = None
    fits: int | None = None
    seconds: float = 0.0


class Kept:
    """One search and its file, if it has one. found: whether all of it was there"""

    ranked: Ranked | None = None

    def __init__(self, best: Best, cases: Sequence[Any], *facts: Any, usual: bool = True) -> None:
        """Take up what is on disk. facts: all else that decides the answer; usual: whether the search is one to be kept"""
        self.best, self.file = best, None
        if usual and KEEPING.get() and all(case.space.model.listed is None for case in cases):
            own = msgspec.msgpack.encode(cases, enc_hook=_spelled)
            self.file = kept_file("plans", __version__, _code(), own.hex(), *facts)
        self.state = (self.file and read_kept(self.file, State)) or State()
        self.found, self.known = self.state.cases == len(cases), len(self.state.ranks)
        self.began = time.perf_counter() - self.state.seconds
        for name in ("sure", "tight", "seeds"):
            getattr(self.state, name).restore(getattr(best, name))
        best.lowest = self.state.lowest
        for name, count in zip(COUNTS, self.state.counts, strict=True):
            setattr(best, name, count)

    @property
    def seconds(self) -> float:
        """The time that the search took, with that before it was interrupted [s]."""
        return self.state.seconds if self.found else time.perf_counter() - self.began

    def passed(self) -> None:
        """Note that one more case is done."""
        if self.file is not None:
            best, cases = self.best, self.state.cases + 1
            counts = tuple(getattr(best, name) for name in COUNTS)
            self.state = State(
                cases, KeptPool.of(best.sure), KeptPool.of(best.tight), counts, seconds=self.state.seconds
            )

    def save(self, counted: bool = False) -> None:
        """Write how far the search is, where that is news and took a while. counted: afterwards, how many layouts fit"""
        ranks = self.state.ranks if self.ranked is None else self.ranked.ranks
        news = counted or not self.found or len(ranks) > self.known
        if self.file is None or self.seconds < QUICK or not news:
            return
        state = self.state
        state.seconds = state.seconds if counted else self.seconds
        state.ranks, state.lowest = ranks, self.best.lowest
        state.seeds = KeptPool.of(self.best.sure, self.best.seeds)
        keep(self.file, state)


def _spelled(value: Any) -> list[int] | str:
    """Return what msgspec does not know: the lengths of a job by their ends, prices by their text. Raises TypeError for others."""
    if isinstance(value, float):
        return str(value)
    if not isinstance(value, range):
        raise TypeError(f"a {type(value).__name__} has no spelling here")
    return [value.start, value.stop, value.step]


@cache
def _code() -> str:
    """Return what changes where formulas or tables do."""
    rooms = (os.path.join(PACKAGE, name) for name in ("core", "data", "fleets"))
    return files_as_they_are(*filter(os.path.isdir, rooms))
