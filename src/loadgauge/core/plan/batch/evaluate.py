"""Memory and time of every layout of a space, with arrays of sizes in place of numbers.

The formulas are those of `estimate`, which read open arrays where a single layout has whole numbers. What does not change
from one structure to the next is worked out once: the operations of a layer for all pipelines, ZeRO stages and kinds of
recomputation, what is in flight for all ZeRO stages, the weights of a stage for all schedules and kinds of recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import msgspec

from loadgauge.core.base.algebra import Size
from loadgauge.core.base.errors import NotModelled
from loadgauge.core.definitions.hardware.calibration import Efficiencies
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.counters import Margins
from loadgauge.core.estimate.memory.in_flight import works
from loadgauge.core.estimate.schedule.stages import Stage, stages
from loadgauge.core.estimate.states.overhead import Assumed, non_pytorch_memory, workspaces
from loadgauge.core.estimate.time.collectives import Fabric, Group
from loadgauge.core.estimate.time.roofline import Machine
from loadgauge.core.estimate.time.traffic import layout_groups
from loadgauge.core.plan.batch.memo import ByIdentity, Memo
from loadgauge.core.plan.batch.memory import ArrayMemory, Peak, SomeBatches, fullest, joined, peaks, without_layers
from loadgauge.core.plan.batch.step_time import ArrayStep, PipelineTimes, Step, play_all
from loadgauge.core.plan.batch.types import Batch, Wanted
from loadgauge.core.plan.space.constraints import Constraints, Places
from loadgauge.core.plan.space.space import Grid, Space, Structure

Pipeline: TypeAlias = "tuple[Any, ...]"


class KnownGroup(Group, frozen=True, dict=True):
    """A group of ranks that remembers its place on the cluster."""

    def members(self, domain: int) -> Size:
        """As in `Group`."""
        return self._once("members", domain)

    def domains(self, domain: int) -> Size:
        """As in `Group`."""
        return self._once("domains", domain)

    def aligned(self, domain: int) -> Any:
        """As in `Group`."""
        return self._once("aligned", domain)

    def _once(self, name: str, domain: int) -> Any:
        key = f"{name} {domain}"
        if key not in self.__dict__:
            self.__dict__[key] = getattr(Group, name)(self, domain)
        return self.__dict__[key]


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

    def _stages(self, pp: int, vpp: int, schedule: Any, stage_layers: tuple[int, ...] | None) -> list[Stage]:
        layout = Layout(pp=pp, vpp=vpp, schedule=schedule, stage_layers=stage_layers, seq_len=1)
        return list(stages(self.space.model, layout))

    def batches(
        self, progress: Callable[[int, int], None] | None = None, wanted: Wanted | None = None
    ) -> Iterator[Batch]:
        """Yield the valid layouts, structure by structure; the schedules of one pipeline are simulated together.

        progress: called with the structures done and their number; wanted: decides from the memory [bytes] and a lower bound
        of the time [s] whose exact time is needed; the step time of the others is infinite
        """
        families: dict[bool, dict[int, dict[Pipeline, list[Structure]]]] = {}
        for one in self.space.structures():
            pipelines = families.setdefault(one.sequence_parallel, {}).setdefault(one.pp, {})
            pipelines.setdefault((one.pp, one.vpp, one.schedule, one.stage_layers), []).append(one)
        done, count = 0, sum(map(len, families.values()))
        for spread, by_pp in families.items():
            for part, grid in enumerate(self.space.grids(spread)):
                evaluator = GridEvaluator(self, grid)
                for pp, pipelines in by_pp.items():
                    if progress is not None:
                        progress(min(done, count), count)
                    done += not part
                    evaluator.start(pp)
                    for structures in pipelines.values():
                        try:
                            with self.numpy.errstate(all="ignore"):
                                batches = evaluator.evaluate(structures, wanted)
                        except NotModelled as error:
                            self._left_out(grid, error)
                            break
                        yield from batches

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

    def evaluate(self, structures: Iterable[Structure], wanted: Wanted | None) -> list[Batch]:
        """Evaluate the valid layouts of structures that share one pipeline; only `wanted` schedules are simulated."""
        self.of_pipeline = Memo()
        steps = []
        for structure in structures:
            places = self.limits.possible(structure)
            if not len(places):
                continue
            layout = self.space.layout(structure, self.grid.sizes, self.grid.ragged)
            memory = self.memory(structure, layout)
            nbytes = self.peak_bytes(structure, memory, places) * places.read_once(self.usual(layout))
            nbytes = nbytes + places.read_once(self.fixed(layout, memory))
            ends = nbytes, self.upper(layout, places, nbytes)
            steps.append(Step(self.times(structure, memory, places), structure, memory, places, ends))
        for step in steps:
            if wanted is None:
                step.times.needed[:] = True
            else:
                step.narrow(wanted)
        play_all([step.times for step in steps])
        return [Batch(step.structure, self.grid, step.places.flat, *step.nbytes, step.seconds()) for step in steps]

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
        memory.weighing = self.of_pp.once(("weights", layout.ends_together, layout.zero, memory.lazy and key), Memo)
        return memory

    def groups(self, layout: Layout) -> dict[str, Group]:
        """The groups of ranks that communicate, by name (`layout_groups`)."""

        def make() -> dict[str, Group]:
            made = layout_groups(layout)
            return {
                name: KnownGroup(**{field: getattr(group, field) for field in Group.__struct_fields__})
                for name, group in made.items()
            }

        return self.of_pp.once("groups", make)

    # -- memory ---------------------------------------------------------------------------------------------------------

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
            found: dict[object, Peak] = {}
            numbers = tuple(map(int, numpy.unique(self.points(structure).of(short))))
            for some, kept in self.classes(structure, left, numbers):
                more = peaks(left.under(SomeBatches.of(left.layout, max(some))), kept)
                found = joined(found, more, numpy.isin(short, some)) if len(some) < len(numbers) else more
            return found

        found: dict[object, Peak] = self.of_pipeline.once(("peaks", key), make)
        if memory.shares and memory.layout.zero < 2:
            found = self.of_pipeline.once(("peaks", key, "whole"), lambda: without_layers(found))
        return found

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
                held = tuple((stage.index, works(some.layout, stage.index)) for stage in kept)
                alike.setdefault((held, number > 1), ([], kept))[0].append(number)
            self.whole.classes[key] = [(tuple(some), kept) for some, kept in alike.values()]
        return self.whole.classes[key]

    def fixed(self, layout: Layout, memory: ArrayMemory) -> Any:
        """Memory outside PyTorch's allocator plus permanent workspaces, as an open array [bytes]."""
        scratch = (
            workspaces(self.whole.cluster.gpu, self.training, grouped=memory.has_experts) + memory.model.own.resident
        )
        return self.of_pp.once(("fixed", layout.zero), lambda: self.outside(layout)[0] + self.usual(layout) * scratch)

    def usual(self, layout: Layout) -> Any:
        """By which factor a card usually shows more than PyTorch hands out, as an open array."""
        return self.of_pp.once(("usual", layout.zero), lambda: self.numpy.asarray(self.margins(layout).shown(1.0)))

    def margins(self, layout: Layout) -> Margins:
        """Return the margins of a layout, without what lies outside PyTorch's allocator."""
        ragged, adapters = layout.tokens is not None, self.training.lora is not None
        framework, nothing = self.training.framework, Assumed(0.0, 0.0, 0.0)
        gathers, split = framework.engine is not None and layout.zero == 3, layout.tp > 1
        return Margins.of(nothing, framework, ragged=ragged, adapters=adapters, split=split, gathers=gathers)

    def upper(self, layout: Layout, places: Places, nbytes: Any) -> Any:
        """The upper end of the range of what each place needs [bytes], without small things that are not said."""
        margins = self.margins(layout)
        value, high = map(places.read_once, self.outside(layout))
        return self.numpy.maximum(nbytes, (nbytes - value) * margins.spread.high + high)

    def outside(self, layout: Layout) -> tuple[Any, Any]:
        """Return what lies outside PyTorch's allocator, and the most that may, as open arrays [bytes]."""

        def make() -> tuple[Any, Any]:
            beside = non_pytorch_memory(layout, self.whole.cluster.gpu)
            return self.numpy.asarray(beside.value), self.numpy.asarray(beside.high)

        both: tuple[Any, Any] = self.of_pp.once("outside", make)
        return both

    # -- time -----------------------------------------------------------------------------------------------------------

    def time(self, memory: ArrayMemory, places: Places) -> ArrayStep:
        """Return the step model at some places of the grid; structures with the same recomputation share times of operations."""
        order = self.space.base.order
        # Where the pipeline is numbered before other axes, it moves their ranks apart.
        known = "known" if set(order[-2:]) == {"dp", "pp"} else ("known", self.pp)
        return ArrayStep(
            memory,
            self.whole.machine,
            self.whole.fabric,
            self.groups(memory.layout),
            places,
            self.of_grid.once(known, Memo),
            self.of_pp.once(("gathers", places), Memo),
        )

    def times(self, structure: Structure, memory: ArrayMemory, places: Places) -> PipelineTimes:
        """The stage times of a pipeline; ZeRO stages below 3 share one, unless sharded weights are trained in another way."""
        pipeline = structure.pp, structure.vpp, structure.schedule, structure.stage_layers
        whole = structure.zero == 3
        recast = self.of_grid.once(("recast", structure.zero), self._recast, structure.zero)
        points = places if whole else self.points(structure)

        def step() -> ArrayStep:
            return self.time(memory, points)

        def make() -> PipelineTimes:
            key = "step", structure.recompute, structure.splits, memory.layout.ends_together, whole, recast, points
            time = self.of_pp.once(key, step).under(memory, points)
            return PipelineTimes(self.of_pp, structure, time, self.whole.stages(*pipeline), points, shared=not whole)

        return self.of_pipeline.once(("pace", structure.recompute, whole, recast), make)

    def _recast(self, zero: int) -> bool:
        """Return whether weights are held in another dtype, or cast elsewhere, at a ZeRO stage than unsharded."""
        return self.training.under(zero) != self.training.under(0)

    def points(self, structure: Structure) -> Places:
        """One place for each combination of row and micro-batch that valid layouts of a pipeline have, at any ZeRO stage."""
        both = [
            self.limits.possible(msgspec.structs.replace(structure, zero=zero))
            for zero in {min(zero, 1) for zero in self.space.zero}
        ]

        def make() -> Places:
            mark = self.numpy.zeros(self.grid.shape[0], dtype=bool)
            for places in both:
                mark[places.combinations] = True
            return Places(self.numpy.flatnonzero(mark) * self.grid.shape[1], self.grid.dims)

        return self.of_pp.once(("points", *both), make)
