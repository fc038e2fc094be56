"""Classes of layouts that share their lower bounds, whatever their pipeline: which combinations of sizes a search looks at.

A class is a number of stages, a ZeRO stage and what is computed again. Its bounds are worked out on grids without replicas
(`Grid.unreplicated`), and the combinations that no class needs are dropped before anything else is worked out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.plan.batch.bounds import Filling, May
from loadgauge.core.plan.batch.memory import weights_key
from loadgauge.core.plan.space.space import COMBINED, Grid, Structure

if TYPE_CHECKING:
    from loadgauge.core.plan.batch.evaluate import BatchEvaluator, LeastEvaluator

Key = tuple[object, ...]
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.13)
"""Of the memory of a GPU: by how much a layout that looks good may need, the fastest of each."""
MOST, EACH = 16, 2
"""Combinations that look good: at most of each kind, and of each class for each share."""


class Bounded(NamedTuple):
    """Combinations of sizes that a class has, with lower bounds of memory [bytes] and step time [s] of each.

    batches: micro-batches; layer, head: the least seconds of one in the quickest layer and in the head
    """

    rows: Any
    low: Any
    least: Any
    batches: Any
    layer: Any
    head: Any

    def at(self, mark: Any) -> Bounded:
        """Some of the combinations."""
        return Bounded(*(column[mark] for column in self))


class Lines(NamedTuple):
    """The pipelines of a class: the least that any has ahead, and its first and last stages with the layers they may have."""

    filling: Filling
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
        self, grid: Grid, parts: list[tuple[Grid, LeastEvaluator]], structures: Mapping[int, list[Structure]]
    ) -> None:
        import numpy

        self.grid, self.numpy = grid, numpy
        self.structures = structures
        self.of: dict[Key, Bounded] = {}
        self.valid: dict[Structure, int] = {}
        each: dict[Key, list[Bounded]] = {}
        lines = self._lines(parts[0][1].whole)
        first = 0
        for part, evaluator in parts:
            for pp, several in structures.items():
                evaluator.start(pp)
                mine: dict[Key, Bounded] = {}
                for structure in several:
                    self.valid[structure] = self.valid.get(structure, 0) + evaluator.with_replicas.valid(structure)
                    key = key_of(structure)
                    if key not in mine:
                        mine[key] = evaluator.bounded(structure, lines[key], first)
                for key, bounded in mine.items():
                    each.setdefault(key, []).append(bounded)
            first += part.shape[0]
        for key, some in each.items():
            self.of[key] = Bounded(*map(numpy.concatenate, zip(*some, strict=True)))
        columns = [part.columns for part, _ in parts]
        self.columns = {name: numpy.concatenate([one[name] for one in columns]) for name in COMBINED}

    def _lines(self, whole: BatchEvaluator) -> dict[Key, Lines]:
        """What the pipelines of each class have."""
        of_pipelines: dict[object, tuple[Filling, Stage, Stage]] = {}
        lines: dict[Key, Lines] = {}
        for one in (structure for several in self.structures.values() for structure in several):
            pipeline = one.pp, one.vpp, one.schedule, one.stage_layers
            if pipeline not in of_pipelines:
                every = whole.stages(*pipeline)
                of_pipelines[pipeline] = Filling.of(every, one.schedule), every[0], every[-1]
            own, *ends = of_pipelines[pipeline]
            mine = lines.setdefault(key_of(one), Lines(own, {}, {}))
            filling = Filling(*map(min, mine.filling, own))
            for stages, stage in zip(mine[1:], ends, strict=True):
                again = stage.counts(one.recompute, stage.start, stage.stop)
                stages.setdefault((weights_key(stage), *again.items()), stage)
            lines[key_of(one)] = mine._replace(filling=filling)
        return lines

    def kept(self, may: May) -> Classes:
        """Return the classes without combinations that bounds rule out."""
        numpy = self.numpy
        marks = {key: may(one.low, one.least) for key, one in self.of.items()}
        rows = numpy.unique(numpy.concatenate([self.of[key].rows[mark] for key, mark in marks.items()] or [[]]))
        return self.at(rows.astype("int64"), marks)

    def at(self, rows: Any, marks: Mapping[Key, Any]) -> Classes:
        """Return the classes with some combinations alone. marks: which a class has of its own"""
        numpy, other = self.numpy, Classes.__new__(Classes)
        other.__dict__.update(self.__dict__)
        other.columns = {name: column[rows] for name, column in self.columns.items()}
        other.of = {
            key: one._replace(rows=numpy.searchsorted(rows, one.rows))
            for key, mark in marks.items()
            for one in (self.of[key].at(mark),)
        }
        return other

    def parts(self, many: int) -> Iterator[Classes]:
        """Yield the classes of each number of stages apart, where there are many combinations."""
        numpy = self.numpy
        if len(self.columns["tp"]) <= many:
            yield self
            return
        for pp, structures in self.structures.items():
            mine = {key: one for key, one in self.of.items() if key[0] == pp}
            rows = numpy.unique(numpy.concatenate([one.rows for one in mine.values()]))
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


def promising(pools: list[Classes], may: May) -> Iterator[tuple[Classes, list[list[Structure]]]]:
    """Yield, of each pool, combinations that look good by their bounds, and pipelines to try them with.

    These are those on the front of both bounds, and the quickest: without ZeRO-3, whose bounds say least, unless nothing else
    may fit.
    """
    import numpy

    entries: list[Entry] = []
    for number, pool in enumerate(pools):
        for key, one in pool.of.items():
            inside = may(one.low, one.least)
            most = one.low[inside].max(initial=0.0)
            for share in SHARES:
                fitting = numpy.flatnonzero(inside & (one.low <= share * most))
                for best in fitting[numpy.argsort(one.least[fitting])[:EACH]]:
                    entries.append(
                        Entry(float(one.least[best]), float(one.low[best]), number, key, int(one.rows[best]))
                    )
    entries = sorted(set(entries), key=lambda entry: entry[:3])
    front, lowest = [], float("inf")
    for entry in entries:
        if entry.low < lowest:
            front.append(entry)
            lowest = entry.low
    spread = {round(n * (len(front) - 1) / MOST) for n in range(MOST + 1)} if front else ()
    quick = [entry for entry in entries if entry.key[3] != 3] or entries
    chosen = [*quick[:MOST], *(front[place] for place in sorted(spread))]
    for number, pool in enumerate(pools):
        mine = [entry for entry in chosen if entry.pool == number]
        if not mine:
            continue
        keys = {entry.key for entry in mine}
        rows = numpy.unique(numpy.array([entry.row for entry in mine]))
        marks = {key: numpy.isin(one.rows, rows) for key, one in pool.of.items()}
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
