"""Classes of layouts that share their lower bounds, whatever their pipeline: which combinations of sizes a search looks at.

A class is a number of stages, a ZeRO stage and what is computed again. Its bounds are worked out on grids without replicas
(`Grid.unreplicated`), and the combinations that no class needs are dropped before anything else is worked out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from loadgauge.core.base.algebra import maximum
from loadgauge.core.estimate.memory.counters import Margins
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.plan.batch.bounds import Filling
from loadgauge.core.plan.batch.memory import weights_key
from loadgauge.core.plan.batch.types import May
from loadgauge.core.plan.space.space import COMBINED, Grid, Structure

Key = tuple[object, ...]
SHARES = 8
"""Memories that a layout which looks good may need, the fastest of each."""
MOST, EACH = 16, 2
"""Combinations that look good: at most of each kind, and of each class for each share."""


class Bounded(NamedTuple):
    """Combinations of sizes that a class has, with lower bounds of memory [bytes] and step time [s] of each.

    batches: micro-batches; layers, head: the least seconds of one in a layer of each kind and in the head
    first: the bound of memory by the first stage alone, on a card with room; kept: what a micro-batch keeps there in the leanest
    layer [bytes]; returned: `Margins.returned`
    """

    rows: Any
    low: Any
    least: Any
    batches: Any
    layers: Any
    head: Any
    first: Any
    kept: Any
    returned: Any

    def at(self, mark: Any) -> Bounded:
        """Some of the combinations."""
        return Bounded(*(column[mark] for column in self))

    def with_first(self, more: Any, card: float) -> Any:
        """The bounds of memory where the first stage holds `more` bytes than its own bound says. card: its capacity [bytes]"""
        shown = self.first + more
        return maximum(self.low, Margins.filled(shown, shown * self.returned, card))


class Bounds(Protocol):
    """A grid's lower bounds."""

    def start(self, pp: int) -> None:
        """Move on to another number of pipeline stages."""
        ...

    def bounded(self, structure: Structure, lines: Lines, first: int) -> Bounded:
        """The combinations of a structure's class; first: the number of the grid's first one."""
        ...


class Lines(NamedTuple):
    """The pipelines of a class: the least that any has ahead, and its first and last stages with the layers they may have."""

    filling: Filling | None
    firsts: dict[object, Stage]
    lasts: dict[object, Stage]


class Entry(NamedTuple):
    """A combination that looks good: its bounds, the number of its pool, its class and its row there."""

    least: float
    low: float
    pool: int
    key: Key
    row: int


class Classes:
    """The classes of one grid. of: the combinations of each; valid: how many layouts each structure has, with replicas"""

    def __init__(
        self,
        grid: Grid,
        parts: Sequence[tuple[Grid, Bounds]],
        structures: Mapping[int, list[Structure]],
        valid: dict[Structure, int],
        stages: Callable[..., tuple[Stage, ...]],
    ) -> None:
        import numpy

        self.grid, self.numpy = grid, numpy
        self.blocks = sorted(set(grid.space.model.pattern))
        self.structures = structures
        self.of: dict[Key, Bounded] = {}
        self.valid = valid
        each: dict[Key, list[Bounded]] = {}
        lines = self._lines(stages)
        first = 0
        for part, evaluator in parts:
            for pp, several in structures.items():
                evaluator.start(pp)
                mine: dict[Key, Bounded] = {}
                for structure in several:
                    key = key_of(structure)
                    if key not in mine:
                        mine[key] = evaluator.bounded(structure, lines[key], first)
                for key, bounded in mine.items():
                    each.setdefault(key, []).append(bounded)
            first += part.shape[0]
        for key, some in each.items():
            self.of[key] = Bounded(*map(numpy.concatenate, zip(*some, strict=True)))
        columns = [part.columns for part, _ in parts]
        self.columns = {name: numpy.concatenate([column[name] for column in columns]) for name in COMBINED}

    def _lines(self, stages_of: Callable[..., tuple[Stage, ...]]) -> dict[Key, Lines]:
        """Return the pipelines of each class."""
        of_pipelines: dict[object, tuple[Filling | None, Stage, Stage]] = {}
        lines: dict[Key, Lines] = {}
        for structure in itertools.chain.from_iterable(self.structures.values()):
            pipeline = structure.pp, structure.vpp, structure.schedule, structure.stage_layers
            if pipeline not in of_pipelines:
                every = stages_of(*pipeline)
                filling = Filling.of(every, structure.schedule, self.blocks)
                of_pipelines[pipeline] = filling, every[0], every[-1]
            own, *ends = of_pipelines[pipeline]
            mine = lines.setdefault(key_of(structure), Lines(own, {}, {}))
            for stages, stage in zip(mine[1:], ends, strict=True):
                again = stage.counts(structure.recompute, stage.start, stage.stop)
                lasts = (chunk.stop - 1 for chunk in stage.chunks if chunk.stop > chunk.start)
                last_keys = sorted({(stage.kind(n), stage.repeated(structure.recompute, n)) for n in lasts})
                stages.setdefault((weights_key(stage), *again.items(), *last_keys), stage)
            lines[key_of(structure)] = mine._replace(filling=own and own.least(mine.filling))
        return lines

    def low(self, structure: Structure) -> Any:
        """The bound of memory of a structure's class at each combination [bytes]; infinite where it has none there."""
        own = self.of[key_of(structure)]
        low = self.numpy.full(len(self.columns["tp"]), self.numpy.inf)
        low[own.rows] = own.low
        return low

    def kept(self, may: May) -> Classes:
        """Return the classes without combinations that bounds rule out."""
        numpy = self.numpy
        marks = {key: may(own.low, own.least) for key, own in self.of.items()}
        rows = numpy.unique(numpy.concatenate([self.of[key].rows[mark] for key, mark in marks.items()] or [[]]))
        return self.at(rows.astype("int64"), marks)

    def at(self, rows: Any, marks: Mapping[Key, Any]) -> Classes:
        """Return the classes with some combinations alone. marks: which a class has of its own"""
        numpy, other = self.numpy, Classes.__new__(Classes)
        other.__dict__.update(self.__dict__)
        other.columns = {name: column[rows] for name, column in self.columns.items()}
        other.of = {
            key: own._replace(rows=numpy.searchsorted(rows, own.rows))
            for key, mark in marks.items()
            for own in (self.of[key].at(mark),)
        }
        return other

    def parts(self, many: int) -> Iterator[Classes]:
        """Yield the classes of each number of stages apart, where there are many combinations."""
        numpy = self.numpy
        if len(self.columns["tp"]) <= many:
            yield self
            return
        for pp, structures in self.structures.items():
            mine = {key: own for key, own in self.of.items() if key[0] == pp}
            rows = numpy.unique(numpy.concatenate([own.rows for own in mine.values()]))
            part = self.at(rows, {key: slice(None) for key in mine})
            part.structures = {pp: structures}
            yield part

    def listed(self, replicas: Any) -> Grid:
        """A grid of all combinations."""
        return Grid.listed(self.grid.space, self.columns, replicas)


def key_of(structure: Structure) -> Key:
    """A key that is equal for structures of one class; schedules with orders of their own are classes of their own."""
    usual = structure.schedule in ("1f1b", "interleaved")
    kind = None if usual else (structure.schedule, structure.vpp)
    return structure.pp, structure.stage_layers, structure.recompute, structure.zero, kind


def steps_between(nbytes: Any) -> Any:
    """Return memories from the most to the least of some layouts, each the same share of the one before [bytes]."""
    import numpy

    if not len(nbytes):
        return ()
    return numpy.geomspace(nbytes.max(), nbytes.min(), SHARES) * (1 + 1e-9)


def promising(pools: list[Classes], may: May) -> Iterator[tuple[Classes, list[list[Structure]]]]:
    """Yield, of each pool, combinations that look good by their bounds, and pipelines to try them with.

    These are those on the front of both bounds, and the quickest: without ZeRO-3, whose bounds say least, unless nothing else
    may fit.
    """
    import numpy

    entries: list[Entry] = []
    for number, pool in enumerate(pools):
        for key, own in pool.of.items():
            inside = may(own.low, own.least)
            for most in steps_between(own.low[inside]):
                fitting = numpy.flatnonzero(inside & (own.low <= most))
                for best in fitting[numpy.argsort(own.least[fitting])[:EACH]]:
                    entries.append(
                        Entry(float(own.least[best]), float(own.low[best]), number, key, int(own.rows[best]))
                    )
    entries = sorted(set(entries), key=lambda entry: entry[:3])
    front, lowest = [], float("inf")
    for entry in entries:
        if entry.low < lowest:
            front.append(entry)
            lowest = entry.low
    spread = {round(n * (len(front) - 1) / MOST) for n in range(MOST + 1)} if front else ()
    quick = [entry for entry in entries if entry.key[3] != 3] or entries
    chosen = [*quick[:MOST], *(front[index] for index in sorted(spread))]
    for number, pool in enumerate(pools):
        mine = [entry for entry in chosen if entry.pool == number]
        if not mine:
            continue
        keys = {entry.key for entry in mine}
        rows = numpy.unique(numpy.array([entry.row for entry in mine]))
        marks = {key: numpy.isin(own.rows, rows) for key, own in pool.of.items()}
        tried: list[list[Structure]] = []
        for several in pool.structures.values():
            pipelines: dict[object, list[Structure]] = {}
            for structure in several:
                if key_of(structure) in keys:
                    pipelines.setdefault((structure.schedule, structure.vpp, structure.stage_layers), []).append(
                        structure
                    )
            each = list(pipelines.values())
            tried += each if len(each) < 3 else [each[-1], each[0], each[len(each) // 2]]
        yield pool.at(rows, marks), tried
