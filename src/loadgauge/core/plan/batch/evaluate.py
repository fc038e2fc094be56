"""Memory and time of every layout of a space, with arrays of sizes in place of numbers.

The formulas are those of `estimate`, which read open arrays where a single layout has whole numbers. What does not change
from one structure to the next is worked out once: the operations of a layer for all pipelines, ZeRO stages and kinds of
recomputation, what is in flight for all ZeRO stages, the weights of a stage for all schedules and kinds of recomputation.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec

from loadgauge.core.base.errors import NotModelled
from loadgauge.core.definitions.hardware.calibration import Efficiencies
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.counters import Margins
from loadgauge.core.estimate.schedule.stages import Stage, stages
from loadgauge.core.estimate.states.overhead import Assumed, non_pytorch_memory, workspaces
from loadgauge.core.estimate.states.states import RankWeights
from loadgauge.core.estimate.time.collectives import Fabric, Group
from loadgauge.core.estimate.time.roofline import Machine
from loadgauge.core.estimate.time.step import StepModel
from loadgauge.core.estimate.time.traffic import exchange
from loadgauge.core.plan.batch.bounds import ROUNDING, Filling, LeastStep, Work, least_bytes, least_kept
from loadgauge.core.plan.batch.classes import Bounded, Classes, Lines, key_of, promising, steps_between
from loadgauge.core.plan.batch.memo import ByIdentity, Memo
from loadgauge.core.plan.batch.memory import ArrayMemory, Peak, SomeBatches, fullest, joined, peaks, without_layers
from loadgauge.core.plan.batch.step_time import ArrayStep, PipelineTimes, Step, finish, known_groups
from loadgauge.core.plan.batch.types import Batch, May, Wanted, untimed
from loadgauge.core.plan.space.constraints import Constraints, Places
from loadgauge.core.plan.space.space import Grid, Space, Structure

Pipeline: TypeAlias = "tuple[Any, ...]"
ROUNDS, FEW = 2, 1000
"""Most trials of combinations that look good, and the least number of combinations."""
MANY = 2000
"""Combinations, above which each number of stages has a grid of its own."""
Families: TypeAlias = dict[bool, dict[int, dict[Pipeline, list[Structure]]]]
"""Structures by sequence parallelism, stages and pipeline."""


class BatchEvaluator:
    """Evaluates all layouts of one space on one cluster, as arrays."""

    def __init__(self, space: Space, training: Training, cluster: Cluster, efficiencies: Efficiencies) -> None:
        import numpy

        training.check(space.model)
        self.space, self.training, self.cluster, self.numpy = space, training, cluster, numpy
        self.machine = Machine.of(cluster.gpu, efficiencies, training, experts=space.model.has_experts)
        self.fabric = Fabric.of(cluster, efficiencies)
        self.classes: dict[object, list[tuple[tuple[int, ...], list[Stage]]]] = {}
        self.stages = functools.cache(self._stages)
        self.timed = True

    def _stages(self, pp: int, vpp: int, schedule: Any, stage_layers: tuple[int, ...] | None) -> tuple[Stage, ...]:
        layout = Layout(pp=pp, vpp=vpp, schedule=schedule, stage_layers=stage_layers, seq_len=1)
        return stages(self.space.model, layout)

    def batches(
        self,
        progress: Callable[[int, int], None] | None = None,
        wanted: Wanted | None = None,
        may: May | None = None,
        seed: Callable[[Batch], None] | None = None,
    ) -> Iterator[Batch]:
        """Yield the valid layouts, structure by structure; the schedules of one pipeline are simulated together.

        progress: called with the structures done and their number; wanted: decides from the memory [bytes] and a lower bound
        of the time [s] whose exact time is needed; the step time of the others is infinite
        may: rules layouts out by lower bounds of both before any of this is worked out; they are only counted
        seed: called before with some layouts that look good, after which `may` may rule out more
        """
        self.timed = wanted is not untimed
        families = self.families()
        every = (
            structure
            for by_pp in families.values()
            for lines in by_pp.values()
            for some in lines.values()
            for structure in some
        )
        numbers = {structure: number for number, structure in enumerate(every)}
        parts: list[tuple[GridEvaluator, bool, Classes | None]]
        if may is None or not self.space.narrowed:
            parts = [(GridEvaluator(self, grid), key, None) for key in families for grid in self.space.grids(key)]
        else:
            parts = self.narrowed(families, may, seed)
        done, count = 0, sum(len(families[spread]) for _, spread, _ in parts)
        pending: list[list[Step]] = []
        for evaluator, spread, classes in parts:
            for pp, pipelines in families[spread].items():
                if classes is not None and pp not in classes.structures:
                    continue
                if progress is not None:
                    progress(done, count)
                done += 1
                evaluator.start(pp)
                for structures in pipelines.values():
                    try:
                        with self.numpy.errstate(all="ignore"):
                            some = evaluator.evaluate(structures, wanted, may, classes)
                    except NotModelled as error:
                        self._left_out(evaluator.grid, error)
                        break
                    yield from (
                        batch._replace(order=numbers[batch.structure]) for batch in some if isinstance(batch, Batch)
                    )
                    steps = [step for step in some if isinstance(step, Step)]
                    if pp > 1 and classes is not None and any(step.first < self.numpy.inf for step in steps):
                        pending.append(steps)
                    else:
                        yield from (batch._replace(order=numbers[batch.structure]) for batch in finish(steps, wanted))
        # What looks best is played first, so that less of the rest has to be.
        for steps in sorted(pending, key=lambda steps: min(step.first for step in steps)):
            yield from (batch._replace(order=numbers[batch.structure]) for batch in finish(steps, wanted))

    def families(self) -> Families:
        """The structures of the space."""
        families: Families = {}
        for structure in self.space.structures():
            pipelines = families.setdefault(structure.sequence_parallel, {}).setdefault(structure.pp, {})
            pipelines.setdefault((structure.pp, structure.vpp, structure.schedule, structure.stage_layers), []).append(
                structure
            )
        return families

    def narrowed(
        self, families: Families, may: May, seed: Callable[[Batch], None] | None
    ) -> list[tuple[GridEvaluator, bool, Classes | None]]:
        """Evaluators of the combinations that lower bounds do not rule out."""
        pools = []
        with self.numpy.errstate(all="ignore"):
            for spread, by_pp in families.items():
                structures = {
                    pp: [structure for some in lines.values() for structure in some] for pp, lines in by_pp.items()
                }
                for values in self.space.alike():
                    grid = Grid(self.space, values, spread)
                    marks, valid = [], dict.fromkeys(itertools.chain.from_iterable(structures.values()), 0)
                    for part in (parts := list(grid.parts())):
                        for structure, count in Constraints(part).numbers(structures):
                            valid[structure] += count
                        least = LeastEvaluator(self, part).least(valid)
                        mark = may(self.numpy.zeros(len(least)), least)
                        mark[least.argmin()] = True  # for those that are only counted
                        marks.append(mark)
                    if parts:
                        each = [(some, LeastEvaluator(self, some)) for some in Grid.marked(parts, marks)]
                        pools.append((spread, Classes(grid, each, structures, valid, self.stages)))
            left = [(spread, classes.kept(may)) for spread, classes in pools]
            for _ in range(ROUNDS):
                if seed is None or sum(len(classes.columns["tp"]) for _, classes in left) <= FEW:
                    break
                self._try([classes for _, classes in left], may, seed)
                left = [(spread, classes.kept(may)) for spread, classes in left]
        # Few combinations share what does not depend on the number of stages; where there are many, arrays stay short.
        several = [(spread, part) for spread, classes in left for part in classes.parts(MANY)]
        return [(GridEvaluator(self, part.listed(part.grid.replicas)), spread, part) for spread, part in several]

    def _try(self, pools: list[Classes], may: May, seed: Callable[[Batch], None]) -> None:
        """Time some combinations that look good."""
        few, tried = self._few(may), []
        for classes, pipelines in promising(pools, may):
            evaluator, pp = (
                GridEvaluator(self, classes.listed(self.numpy.array([min(self.space.replicas)], dtype=float))),
                0,
            )
            for same in pipelines:
                if same[0].pp != pp:
                    pp = same[0].pp
                    evaluator.start(pp)
                tried.append(
                    [result for result in evaluator.evaluate(same, few, may, classes) if isinstance(result, Step)]
                )
        for steps in sorted(filter(None, tried), key=lambda steps: min(step.first for step in steps)):
            for batch in finish(steps, few):
                seed(batch)

    def _few(self, may: May) -> Wanted:
        """Of the layouts of a structure that fit for sure, and of those that need little, the one that looks quickest."""
        numpy, room = self.numpy, self.cluster.gpu.capacity

        def chosen(memory: Any, high: Any, least: Any) -> Any:
            mark, might = numpy.zeros(len(memory), dtype=bool), may(memory, least) & (high <= room)
            for most in steps_between(high[might])[::2]:
                inside = numpy.flatnonzero(might & (high <= most))
                if len(inside):
                    mark[inside[least[inside].argmin()]] = True
            return mark

        return chosen

    def _left_out(self, grid: Grid, error: NotModelled) -> None:
        """Note that captured layers do not run on so many ranks; else, and on one rank, raise the error."""
        own, ranks = self.space.model.own, {name: grid.sizes[name] for name in ("tp", "ep")}
        if not own.states_splits or all(count == 1 for count in ranks.values()):
            raise error
        own.left_out[", ".join(f"{name} {count}" for name, count in ranks.items())] = str(error)


class GridEvaluator:
    """Evaluates all layouts of one grid. The caches are keyed by what their values depend on.

    of_grid: what all numbers of stages share; of_pp: what those with one number of stages share; of_pipeline: what structures
    with one pipeline share
    """

    def __init__(self, whole: BatchEvaluator, grid: Grid) -> None:
        import numpy

        self.whole, self.grid, self.numpy = whole, grid, numpy
        self.space, self.training = whole.space, whole.training
        self.limits = Constraints(grid)
        self.of_grid, self.of_pp, self.of_pipeline = Memo(), Memo(), Memo()

    def start(self, pp: int) -> None:
        """Move on to another number of pipeline stages and drop what depends on the last one."""
        self.pp = pp
        self.of_pp, self.of_pipeline = Memo(), Memo()
        self.limits.forget()

    def evaluate(
        self,
        structures: Iterable[Structure],
        wanted: Wanted | None,
        may: May | None = None,
        classes: Classes | None = None,
    ) -> list[Step | Batch]:
        """Evaluate the valid layouts of structures that share one pipeline, but for the time of those to be simulated."""
        self.of_pipeline = Memo()
        left = []
        for structure in structures:
            places = (
                self.limits.possible(structure) if self.grid.size else Places(self.numpy.zeros(0, int), self.grid.dims)
            )
            valid = len(places) if classes is None else classes.valid[structure]
            if not valid:
                continue
            layout = self.space.layout(structure, self.grid.sizes, self.grid.ragged) if len(places) else None
            if may is not None and classes is not None and layout is not None:
                places = self.left(structure, places, may, classes)
            left.append((structure, layout, valid, places))
        self.among = {
            structure.recompute: [p for s, _, _, p in left if s.recompute == structure.recompute]
            for structure, *_ in left
        }
        results: list[Step | Batch] = []
        looked: list[tuple[Structure, ArrayMemory, Places, int, Step | None]] = []
        for structure, layout, valid, places in left:
            step = None
            if layout is not None and len(places):
                memory = self.memory(structure, layout)
                if wanted is not untimed:
                    times = self.times(structure, memory, places)
                    step = Step(times, structure, self.grid, memory, places, valid)
                    if may is not None and classes is not None:
                        step.shorten(may, classes.low(structure)[places.combinations], self.same_places)
                    places = step.places
                if len(places):
                    looked.append((structure, memory, places, valid, step))
                    continue
            nothing = self.numpy.zeros(0)
            results.append(Batch(structure, self.grid, nothing.astype("int64"), nothing, nothing, nothing, valid))
        self.in_flight: dict[object, list[Places]] = {}
        for structure, _, places, *_ in looked:
            self.in_flight.setdefault(structure.recompute, []).append(places)
        for structure, memory, places, valid, step in looked:
            nbytes = self.nbytes(structure, memory, places)
            if step is not None:
                step.narrow(nbytes, wanted)
                results.append(step)
            else:
                never = self.numpy.full(len(places), self.numpy.inf)
                results.append(Batch(structure, self.grid, places.flat, *nbytes, never, valid))
        return results

    def same_places(self, flat: Any) -> Places:
        """Places of the grid, the same object for the same ones."""
        return self.of_pp.once(("places", flat.tobytes()), lambda: Places(flat, self.grid.dims))

    # -- bounds ---------------------------------------------------------------------------------------------------------

    def left(self, structure: Structure, valid: Places, may: May, classes: Classes) -> Places:
        """The valid layouts of combinations that lower bounds do not rule out; none where those of its pipeline do."""
        numpy, nothing = self.numpy, Places(valid.flat[:0], valid.dims)
        some = classes.of[key_of(structure)]
        some = some.at(may(some.low, some.least))
        if not len(some.rows):
            return nothing
        pipeline = structure.pp, structure.vpp, structure.schedule, structure.stage_layers
        if filling := Filling.of(self.whole.stages(*pipeline), structure.schedule, classes.blocks):
            more = filling.nbytes(some.batches, structure.pp, some.kept)
            low = some.with_first(more, self.whole.cluster.gpu.capacity)
            least = numpy.maximum(some.least, filling.seconds(some.batches, some.layers, some.head))
            some = some.at(may(low, least))
            if not len(some.rows):
                return nothing
        alive = numpy.zeros(self.grid.shape[0], dtype=bool)
        alive[some.rows] = True
        key = "left", valid, alive.tobytes()
        return self.of_pp.once(key, lambda: Places(valid.flat[alive[valid.combinations]], valid.dims))

    # -- facts ----------------------------------------------------------------------------------------------------------

    def facts_key(self, structure: Structure, layout: Layout) -> tuple[object, ...]:
        """The key under which structures share what one layer needs."""
        framework = self.training.framework
        lazy = not framework.gradients_persist
        own = min(structure.zero, 2) if framework.engine is not None else 0
        return (
            structure.recompute,
            structure.splits,
            layout.ends_together,
            (structure.pp, structure.zero >= 2) if lazy else own,
        )

    def memory(self, structure: Structure, layout: Layout) -> ArrayMemory:
        """Return the memory model of a structure under array layouts; it shares what one layer needs with other structures."""
        key = self.facts_key(structure, layout)

        def make() -> ArrayMemory:
            training = self.training.under(layout.zero)
            seen = training is self.training, self.space.model.partly and structure.recompute.mode
            view = self.of_grid.once(("view", *seen), lambda: view_of(layout, training))
            operations = self.of_grid.once(("operations", *seen), Memo)
            return ArrayMemory(self.space.model, layout, training, view, operations)

        memory: ArrayMemory = self.of_grid.once(("facts", key), make).under(layout)
        # Weights depend on the pipeline and on ZeRO, not on what is kept of activations.
        memory.growing = self.of_pp.once(("grown", layout.zero), Memo)
        memory.weighing = self.of_pp.once(("weights", layout.ends_together, layout.zero, memory.lazy and key), Memo)
        return memory

    def groups(self, layout: Layout) -> dict[str, Group]:
        """The groups of ranks that communicate, by name (`layout_groups`)."""

        return self.of_pp.once("groups", lambda: known_groups(layout))

    # -- memory ---------------------------------------------------------------------------------------------------------

    def nbytes(self, structure: Structure, memory: ArrayMemory, places: Places) -> tuple[Any, Any]:
        """Memory of the worst rank at each place, and the upper end of its range [bytes]."""
        layout = memory.layout
        nbytes = self.peak_bytes(structure, memory, places) * places.read_once(self.factor(layout, "usual"))
        nbytes = nbytes + places.read_once(self.fixed(layout, memory))
        return self.filled(layout, places, nbytes), self.upper(layout, places, nbytes)

    def filled(self, layout: Layout, places: Places, nbytes: Any) -> Any:
        """Return what the card shows where one with room shows `nbytes`."""
        outside = places.read_once(self.outside(layout)[0])
        needed = (nbytes - outside) * places.read_once(self.factor(layout, "returned")) + outside
        return Margins.filled(nbytes, needed, self.whole.cluster.gpu.capacity)

    def peak_bytes(self, structure: Structure, memory: ArrayMemory, places: Places) -> Any:
        """Peak memory of the worst rank at each place [bytes], without `fixed`."""
        most: Any = None
        for peak in self.peaks(structure, memory).values():
            states = memory.states_at(*peak.states) if isinstance(peak.states[0], Stage) else peak.states[0]
            value = places.read_once(states) + self.of_pipeline.once(
                (places, ByIdentity(peak.rest)), places.of, peak.rest
            )
            most = value if most is None else self.numpy.maximum(most, value, out=most)
        return most

    def peaks(self, structure: Structure, memory: ArrayMemory) -> dict[object, Peak]:
        """The phases that may be the peak, by the states they share."""
        left = memory.under(memory.layout)
        left.later = memory.shares
        key = structure.recompute, 3 if memory.shares else memory.layout.zero

        def make() -> dict[object, Peak]:
            if structure.schedule in ("1f1b", "gpipe"):
                return peaks(left, self.classes(structure, left, (1,))[0][1])
            numpy = self.numpy
            short = numpy.minimum(memory.layout.num_microbatches, 4 * structure.pp)
            by_group: dict[object, Peak] = {}
            counts = [places.of(short) for places in dict.fromkeys(self.in_flight[structure.recompute])]
            numbers = tuple(map(int, numpy.unique(numpy.concatenate(counts))))
            for some, kept in self.classes(structure, left, numbers):
                more = peaks(left.under(SomeBatches.of(left.layout, max(some))), kept)
                by_group = joined(by_group, more, numpy.isin(short, some)) if len(some) < len(numbers) else more
            return by_group

        by_group: dict[object, Peak] = self.of_pipeline.once(("peaks", key), make)
        if memory.shares and memory.layout.zero < 2:
            by_group = self.of_pipeline.once(("peaks", key, "whole"), lambda: without_layers(by_group))
        return by_group

    def classes(
        self, structure: Structure, memory: ArrayMemory, numbers: tuple[int, ...]
    ) -> list[tuple[tuple[int, ...], list[Stage]]]:
        """Group numbers of micro-batches with the same work in flight; with each group, the stages that can hold the most."""
        pipeline = structure.pp, structure.vpp, structure.schedule, structure.stage_layers
        key = pipeline, structure.recompute, numbers
        if key not in self.whole.classes:
            each = self.whole.stages(*pipeline)
            if structure.schedule in ("1f1b", "gpipe"):
                self.whole.classes[key] = [(numbers, fullest(memory, each))]
                return self.whole.classes[key]
            alike: dict[object, tuple[list[int], list[Stage]]] = {}
            for number in numbers:
                some = memory.under(SomeBatches.of(memory.layout, number))
                kept = fullest(some, each)
                held = tuple((stage.index, some.alike(stage)) for stage in kept)
                alike.setdefault((held, number > 1), ([], kept))[0].append(number)
            self.whole.classes[key] = [(tuple(some), kept) for some, kept in alike.values()]
        return self.whole.classes[key]

    def fixed(self, layout: Layout, memory: ArrayMemory) -> Any:
        """Memory outside PyTorch's allocator plus permanent workspaces, as an open array [bytes]."""
        scratch = (
            workspaces(self.whole.cluster.gpu, self.training, grouped=memory.has_experts) + memory.model.own.resident
        )
        usual = self.factor(layout, "usual")
        return self.of_pp.once(("fixed", layout.zero), lambda: self.outside(layout)[0] + usual * scratch)

    def factor(self, layout: Layout, name: str) -> Any:
        """A factor of `margins`, by the path of its attribute, as an open array."""
        return self.of_pp.once((name, layout.zero), lambda: self.numpy.asarray(attrgetter(name)(self.margins(layout))))

    def margins(self, layout: Layout) -> Margins:
        """Return the margins of a layout, without what lies outside PyTorch's allocator."""
        ragged, adapters = layout.tokens is not None, self.training.lora is not None
        nothing = Assumed(0.0, 0.0, 0.0)
        return Margins.of(nothing, self.training.framework, ragged=ragged, adapters=adapters, split=layout.tp > 1)

    def upper(self, layout: Layout, places: Places, nbytes: Any) -> Any:
        """The upper end of the range of what each place needs [bytes], without small things that are not said."""
        value, high, factor = map(places.read_once, (*self.outside(layout), self.factor(layout, "spread.high")))
        return nbytes + self.numpy.hypot((nbytes - value) * (factor - 1), high - value)

    def outside(self, layout: Layout) -> tuple[Any, Any]:
        """Return the bytes outside PyTorch's allocator, and their upper bound, as open arrays."""

        def make() -> tuple[Any, Any]:
            beside = non_pytorch_memory(layout, self.whole.cluster.gpu)
            return self.numpy.asarray(beside.value), self.numpy.asarray(beside.high)

        both: tuple[Any, Any] = self.of_pp.once("outside", make)
        return both

    # -- time -----------------------------------------------------------------------------------------------------------

    @property
    def alike(self) -> bool:
        """Return whether ranks of a group are as far apart with any number of stages: not where these are numbered first."""
        return set(self.space.base.order[-2:]) == {"dp", "pp"}

    @property
    def known(self) -> Memo:
        """The times of operations."""
        return self.of_grid.once("known" if self.alike else ("known", self.pp), Memo)

    def time(self, memory: ArrayMemory, places: Places) -> ArrayStep:
        """Return the step model at some places of the grid; structures with the same recomputation share times of operations."""
        return ArrayStep(
            memory,
            self.whole.machine,
            self.whole.fabric,
            self.groups(memory.layout),
            places,
            self.known,
            self.of_pp.once("gathers", Memo),
        )

    def times(self, structure: Structure, memory: ArrayMemory, places: Places) -> PipelineTimes:
        """The stage times of a pipeline; ZeRO stages below 3 share one, unless sharded weights are trained in another way."""
        pipeline = structure.pp, structure.vpp, structure.schedule, structure.stage_layers
        whole = structure.zero == 3
        recast = self.recast(structure.zero)
        points = places if whole else self.points(structure)

        def step() -> ArrayStep:
            return self.time(memory, points)

        def make() -> PipelineTimes:
            key = "step", structure.recompute, structure.splits, memory.layout.ends_together, whole, recast, points
            time = self.of_pp.once(key, step).under(memory, points)
            return PipelineTimes(self.of_pp, structure, time, self.whole.stages(*pipeline), points, shared=not whole)

        return self.of_pipeline.once(("pace", structure.recompute, whole, recast), make)

    def recast(self, zero: int) -> bool:
        """Return whether weights are held in another dtype, or cast elsewhere, at a ZeRO stage than unsharded."""
        return self.of_grid.once(("recast", zero), lambda: self.training.under(zero) != self.training.under(0))

    def points(self, structure: Structure) -> Places:
        """One place for each combination of row and micro-batch that layouts of a pipeline have, at any ZeRO stage."""
        both = dict.fromkeys(self.among[structure.recompute])

        def make() -> Places:
            mark = self.numpy.zeros(self.grid.shape[0], dtype=bool)
            for places in both:
                mark[places.combinations] = True
            return Places(self.numpy.flatnonzero(mark) * self.grid.shape[1], self.grid.dims)

        return self.of_pp.once(("points", *both), make)


class LeastEvaluator(GridEvaluator):
    """Works out bounds alone, on a grid without replicas. part: the same with them"""

    def __init__(self, whole: BatchEvaluator, part: Grid) -> None:
        super().__init__(whole, part.unreplicated())
        self.part, self.with_replicas = part, Constraints(part)

    def start(self, pp: int) -> None:
        """Move on to another number of pipeline stages."""
        super().start(pp)
        self.with_replicas.forget()

    def least(self, structures: Iterable[Structure]) -> Any:
        """Lower bounds of the step time of each combination, in all of these structures: what has to be computed [s]."""
        numpy = self.numpy
        bounds: dict[object, Any] = {None: numpy.full(self.grid.shape[0], numpy.inf)}
        for structure in structures if self.whole.timed else ():
            plain = msgspec.structs.replace(structure, recompute=RecomputePolicy())
            key = structure.splits, structure.pp == 1, self.recast(structure.zero), self.alike or structure.pp
            if key not in bounds and len(self.limits.possible(structure)):
                self.start(structure.pp)
                layout = self.space.layout(plain, self.grid.sizes, self.grid.ragged)
                whole = self.work(plain, self.memory(plain, layout), gathers=False).whole
                seconds = numpy.broadcast_to(layout.num_microbatches / structure.pp * whole, self.grid.dims).reshape(-1)
                bounds[key] = numpy.where(numpy.isnan(seconds), numpy.inf, seconds)
        return functools.reduce(numpy.minimum, bounds.values())

    def bounded(self, structure: Structure, lines: Lines, first: int) -> Bounded:
        """The combinations of a class with their bounds.

        lines: the pipelines of the class; first: the number of the grid's first combination
        """
        numpy, places = self.numpy, self.limits.possible(msgspec.structs.replace(structure, schedule="1f1b", vpp=1))
        if not len(places):
            none, layers = numpy.zeros(0), numpy.zeros((0, len(set(self.space.model.pattern))))
            return Bounded(places.flat, none, none, none, layers, none, none, none, none)
        layout = self.space.layout(structure, self.grid.sizes, self.grid.ragged)
        memory = self.memory(structure, layout)
        untold = Work(0.0, (0.0,) * len(set(self.space.model.pattern)), 0.0)
        work = self.work(structure, memory, gathers=structure.zero == 3) if self.whole.timed else untold
        whole, head, *layers = map(places.read_once, (work.whole, work.head, *work.layers))
        of_layers = numpy.stack(layers, axis=1)
        batches = places.read_once(self.of_pp.once("batches", lambda: layout.num_microbatches))
        least = batches / structure.pp * whole
        if lines.filling is not None:
            least = numpy.maximum(least, lines.filling.seconds(batches, of_layers, head))
        usual, fixed = places.read_once(self.factor(layout, "usual")), places.read_once(self.fixed(layout, memory))
        both = [self.least_bytes(structure, memory, places, each) for each in (lines.firsts, lines.lasts)]
        ahead, behind = ((nbytes * usual + fixed) * ROUNDING for nbytes in both)
        kept = places.of(least_kept(memory, lines.firsts.values()))
        low, share = self.filled(layout, places, numpy.maximum(ahead, behind)), self.factor(layout, "returned")
        shares = places.read_once(share)
        return Bounded(places.flat + first, low, least, batches, of_layers, head, ahead, kept, shares)

    def least_bytes(
        self, structure: Structure, memory: ArrayMemory, places: Places, stages: dict[object, Stage]
    ) -> Any:
        """A lower bound of what one stage needs in each layout [bytes]. stages: what it may be"""
        numpy, lowest = self.numpy, self.numpy.inf
        for stage in stages.values():
            most: Any = 0.0
            for states, rest in least_bytes(memory, stage, structure.schedule):
                most = numpy.maximum(most, places.read_once(states) + places.of(rest))
            lowest = numpy.minimum(lowest, most)
        return lowest

    def work(self, structure: Structure, memory: ArrayMemory, *, gathers: bool) -> Work:
        """The least seconds of a micro-batch, as open arrays. gathers: with what ZeRO-3 gathers"""
        whole = self.whole

        def make() -> Work:
            groups = self.groups(memory.layout)
            step = LeastStep.__new__(LeastStep)
            if gathers:
                step.sharded = functools.partial(self.sharded, structure)
            step.__init__(memory, whole.machine, whole.fabric, groups, None, self.known, Memo())  # type: ignore[misc]
            return step.work(whole.stages(1, 1, "1f1b", None)[0])

        key = "work", structure.recompute, structure.splits, memory.layout.ends_together, self.recast(structure.zero)
        return (self.of_grid if self.alike and not gathers else self.of_pp).once((*key, gathers), make)

    def sharded(self, structure: Structure, step: StepModel, weights: RankWeights) -> tuple[Any, Any]:
        """The least seconds to gather weights and to reduce their gradients, over all replicas that a row may have."""
        numpy = self.numpy

        def make() -> tuple[Any, Any]:
            of_batches, of_replicas = self.with_replicas.halves(structure)
            exists = of_batches.any(axis=1, keepdims=True) & of_replicas
            rows = numpy.flatnonzero(exists.any(axis=2))
            if not len(rows):
                return numpy.inf, numpy.inf
            # Rows that differ in what the traffic does not depend on share it.
            each_batch = not exchange(step.layout, step.training).reduces
            alike = [self.part.rows[name][rows] for name in self.part.rows if name != "micro_batch" or each_batch]
            _, firsts, back = numpy.unique(numpy.stack(alike), axis=1, return_index=True, return_inverse=True)
            few = self.part.some(chosen := rows[firsts])
            layout = self.space.layout(structure, few.sizes, few.ragged)
            with_replicas = copy.copy(step)
            with_replicas.layout, with_replicas.training = layout, self.training.under(3)
            with_replicas.groups = self.of_pp.once("with replicas", lambda: known_groups(layout))
            mine = weights.mapped(lambda count: count[chosen] if len(getattr(count, "shape", ())) == 3 else count)
            both = []
            for seconds in StepModel.zero_seconds(with_replicas, mine):
                least = numpy.where(exists[chosen], seconds, numpy.inf).min(axis=2, keepdims=True)
                both.append(numpy.full((len(exists), *least.shape[1:]), numpy.inf))
                both[-1][rows] = least[back.reshape(-1)]
            return tuple(both)

        return self.of_pp.once(("sharded", ByIdentity(weights)), make)
