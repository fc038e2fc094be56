"""Memory and time of every layout of a space: the array reading of the list of operations.

The formulas are those of `estimate`, which read open arrays where a single layout has whole numbers. What does not change
from one structure to the next is worked out once: the facts of a layer for all pipelines, ZeRO stages and schedules, the
weights of a stage for all kinds of recomputation, a pipeline's schedule for all ZeRO stages that leave its times alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec

from loadgauge.algebra import Size
from loadgauge.estimate.comm import Fabric
from loadgauge.estimate.estimate import view_of
from loadgauge.estimate.flight import works
from loadgauge.estimate.memory import MemoryModel
from loadgauge.estimate.outside import outside, workspaces
from loadgauge.estimate.roofline import Machine
from loadgauge.estimate.stages import Stage, stages
from loadgauge.estimate.step import ROUNDS, MicroBatch, StepModel
from loadgauge.estimate.traffic import Traffic, layout_groups, weight_traffic
from loadgauge.hardware import Cluster
from loadgauge.layout import Layout
from loadgauge.rates import Rates
from loadgauge.search.held import ArrayMemory, SomeBatches, fullest, peak
from loadgauge.search.space import Constraints, Grid, Space, Structure
from loadgauge.search.timeline import play
from loadgauge.training import Training

Wanted: TypeAlias = Callable[[Any, Any], Any]
"""Of bytes and of the least seconds of layouts: for which of them the exact time matters."""


class Batch(NamedTuple):
    """Layouts of one structure: places in the arrays of a grid, bytes on the worst rank, seconds of a step."""

    structure: Structure
    grid: Grid
    places: Any
    memory: Any
    step: Any


class Reading:
    """The array reading of one space on one cluster."""

    def __init__(self, space: Space, training: Training, cluster: Cluster, rates: Rates) -> None:
        import numpy

        training.check(space.model)
        self.space, self.training, self.cluster, self.numpy = space, training, cluster, numpy
        self.machine = Machine.of(cluster.gpu, rates, training)
        self.fabric = Fabric.of(cluster, rates)

    def batches(
        self, progress: Callable[[int, int], None] | None = None, wanted: Wanted | None = None
    ) -> Iterator[Batch]:  # fmt: skip
        """The layouts that can exist, structure by structure; those with one pipeline are played together.

        wanted: whether the time of a layout matters, given its memory and the least time it can take
        """
        groups: dict[tuple[int, bool], dict[object, list[Structure]]] = {}
        for one in self.space.structures():
            pipelines = groups.setdefault((one.pp, one.sequence_parallel), {})
            pipelines.setdefault((one.vpp, one.schedule, one.stage_layers), []).append(one)
        for number, (within, pipelines) in enumerate(groups.items()):
            if progress is not None:
                progress(number, len(groups))
            for grid in self.space.grids(within):
                each = GridReading(self, grid)
                for structures in pipelines.values():
                    with self.numpy.errstate(all="ignore"):
                        steps = [step for one in structures if (step := each.step(one)) is not None]
                        if wanted is not None:
                            for step in steps:
                                step.narrow(wanted)
                        play_all(steps)
                        found = [step.batch() for step in steps]
                    yield from found


class GridReading:
    """The array reading of one grid. The caches are keyed by what their values depend on."""

    def __init__(self, reading: Reading, grid: Grid) -> None:
        import numpy

        self.grid, self.numpy = grid, numpy
        self.space, self.training = reading.space, reading.training
        self.machine, self.fabric, self.gpu = reading.machine, reading.fabric, reading.cluster.gpu
        self.limits = Constraints(grid)
        self.caches: dict[str, dict[object, Any]] = {}

    def cached(self, name: str, key: object, make: Callable[[], Any]) -> Any:
        """A value that is worked out when it is first needed."""
        cache = self.caches.setdefault(name, {})
        if key not in cache:
            cache[key] = make()
        return cache[key]

    def step(self, structure: Structure) -> Step | None:
        """The layouts of one structure, their schedules not played yet; None where none can exist."""
        places = self.limits.possible(structure)
        if not places.size:
            return None
        layout = self.space.layout(structure, self.grid.sizes, self.grid.ragged)
        pipeline = structure.pp, structure.vpp, structure.schedule, structure.stage_layers
        each = self.cached("stages", pipeline, lambda: list(stages(self.space.model, layout)))
        facts = self.facts_key(structure, layout)
        memory, time = self.models(facts, layout)
        held = self.held(structure, memory, each, places)
        return Step(self, structure, facts, time, each, places, held + self.fixed(structure, layout, memory, places))

    # -- facts ----------------------------------------------------------------------------------------------------------

    def facts_key(self, structure: Structure, layout: Layout) -> tuple[object, ...]:
        """What the facts of a layer depend on."""
        lazy, whole = not self.training.framework.gradients_persist, structure.zero == 3
        return (
            structure.sequence_parallel, structure.recompute, whole, structure.splits, layout.ends_together,
            structure.pp if lazy or whole else 0,
        )  # fmt: skip

    def models(self, facts: tuple[object, ...], layout: Layout) -> tuple[ArrayMemory, StepModel]:
        """The memory and the step of a structure; what one layer needs is shared with other structures."""

        def make() -> tuple[ArrayMemory, StepModel]:
            base = ArrayMemory(self.space.model, layout, self.training, view_of(layout, self.training))
            return base, StepModel(base, self.machine, self.fabric)

        base, clock = self.cached("facts", facts, make)
        memory, time = copy.copy(base), copy.copy(clock)
        memory.layout = layout
        # Weights depend on the pipeline and on ZeRO, not on what is kept of activations.
        key = layout.pp, layout.ends_together, layout.zero, memory.lazy and facts
        memory.weighing = self.cached("weights", key, dict)
        time.memory, time.layout = memory, layout
        time.groups = self.cached("groups", layout.pp, lambda: layout_groups(layout))
        return memory, time

    def at(self, value: Size, places: Any) -> Any:
        """A size at some places of the grid, by the least indexing that does."""
        numpy = self.numpy
        array = numpy.asarray(value, dtype="float64")
        if array.size == 1:
            return numpy.full(len(places), float(array.reshape(-1)[0]))
        columns = self.grid.shape[1]
        if array.shape[1] == 1:
            return array[places // columns, 0] if array.shape[0] > 1 else numpy.full(len(places), array[0, 0])
        if array.shape[0] == 1:
            return array[0, places % columns]
        return array.reshape(-1)[places]

    # -- memory ---------------------------------------------------------------------------------------------------------

    def held(self, structure: Structure, memory: ArrayMemory, each: list[Stage], places: Any) -> Any:
        """Bytes of the worst rank at its peak, without what is outside the step."""
        numpy, layout = self.numpy, memory.layout
        if structure.schedule in ("1f1b", "gpipe"):
            return self.at(peak(memory, fullest(memory, each)), places)
        batches = self.at(layout.num_microbatches, places)
        short = numpy.minimum(batches, 4 * structure.pp)
        found = numpy.empty(len(places))
        alike: dict[object, list[int]] = {}
        for number in map(int, numpy.unique(short)):
            some = memory.under(SomeBatches.of(layout, number))
            key = (
                structure.pp, structure.vpp, structure.schedule, structure.stage_layers, structure.recompute, number
            )  # fmt: skip
            kept = self.cached("kept", key, partial(fullest, some, each))
            held = tuple((stage.index, works(some.layout, stage.index)) for stage in kept)
            alike.setdefault((held, number > 1), []).append(number)
        for numbers in alike.values():
            under = memory.under(SomeBatches.of(layout, max(numbers)))
            chosen = numpy.isin(short, numbers)
            found[chosen] = self.at(peak(under, fullest(under, each)), places[chosen])
        return found

    def fixed(self, structure: Structure, layout: Layout, memory: MemoryModel, places: Any) -> Any:
        """Bytes outside the allocator, which depend on which axes have several ranks, and for good inside it."""

        def make() -> Any:
            numpy, code, axes = self.numpy, 0, ("dp", "tp", "cp", "ep")
            alone = Layout(pp=layout.pp)
            for bit, axis in enumerate(axes):
                code = code + self.numpy.asarray(getattr(layout, axis) > 1) * 2**bit
            values = [
                outside(
                    msgspec.structs.replace(alone, **{axis: 1 + (number >> bit & 1) for bit, axis in enumerate(axes)})
                ).value
                for number in range(2 ** len(axes))
            ]
            return numpy.array(values)[code] + workspaces(self.gpu, self.training, grouped=memory.has_experts)

        return self.at(self.cached("outside", structure.pp, make), places)


class Step:
    """The time of the layouts of one structure, as `StepModel.step` adds it up."""

    def __init__(
        self, reading: GridReading, structure: Structure, facts: object, time: StepModel, each: list[Stage], places: Any,
        held: Any,
    ) -> None:  # fmt: skip
        import numpy

        self.reading, self.structure, self.facts, self.time = reading, structure, facts, time
        self.places, self.held, self.numpy = places, held, numpy
        memory = time.memory
        makes = [memory.make_up(stage) for stage in each]
        self.chunks: dict[object, MicroBatch] = {}
        for stage, make in zip(each, makes, strict=True):
            for chunk, of_it in zip(stage.chunks, make, strict=True):
                if of_it not in self.chunks:
                    self.chunks[of_it] = reading.cached("chunks", (facts, of_it), partial(time.of_chunk, stage, chunk))
        rows = {of_it: row for row, of_it in enumerate(self.chunks)}
        firsts: dict[object, int] = {}
        for index, make in enumerate(makes):
            firsts.setdefault(make, index)
        order = sorted(firsts.values())
        self.kinds = tuple(rows[of_it] for make in makes for of_it in make)
        """Of each chunk of each stage, its row in the times."""
        # Replicas change the times of a layer under ZeRO-3 only.
        columns = reading.grid.shape[1]
        self.shared = structure.zero < 3
        self.distinct, self.back = places, None
        if self.shared:
            first = numpy.concatenate([[True], numpy.diff(places // columns) > 0])
            self.distinct, self.back = places[first], numpy.cumsum(first) - 1
        self.times = self.seconds(self.distinct)
        self.batches = reading.at(time.layout.num_microbatches, self.distinct)
        self.send: Any = reading.at(time.send_seconds(), self.distinct)
        work = self.times[0] + self.times[1]
        busy = numpy.stack([sum(work[rows[of_it]] for of_it in makes[index]) for index in order])
        self.slowest = busy.max(axis=0)
        which = self.spread(busy.argmax(axis=0))
        ends = numpy.stack([reading.at(self.once(each[index]), places) for index in order])
        self.ends = numpy.take_along_axis(ends, which[None, :], axis=0)[0]
        self.played: Any = None
        self.needed: Any = numpy.ones(len(self.distinct), dtype=bool)
        """Of the layouts of distinct times, those whose schedule is to be played."""

    @property
    def alike(self) -> object:
        """The same for structures with the same times."""
        return (self.facts, len(self.distinct)) if self.shared else id(self)

    @property
    def least(self) -> Any:
        """Seconds that a step takes at least: the slowest stage is busy for all micro-batches."""
        return self.spread(self.batches * self.slowest) / self.time.layout.copies * (1 - 1e-9) + self.ends

    def narrow(self, wanted: Wanted) -> None:
        """Leaves out the schedules of layouts that are not wanted; their time is then infinite."""
        chosen = wanted(self.held, self.least)
        if self.back is None:
            self.needed = chosen
        else:
            self.needed = self.numpy.zeros(len(self.distinct), dtype=bool)
            self.needed[self.back[chosen]] = True

    def spread(self, values: Any) -> Any:
        """From layouts of distinct times to all."""
        return values if self.back is None else values[self.back]

    def seconds(self, places: Any) -> Any:
        """Seconds of each chunk: forward, backward, and of that the gradients of the weights: [3, chunks, layouts]."""

        def sums(one: MicroBatch) -> tuple[Size, Size, Size]:
            return sum(one.forward.values()), sum(one.backward.values()), one.weight

        reading, numpy = self.reading, self.numpy
        each = [reading.cached("sums", (self.facts, key), partial(sums, one)) for key, one in self.chunks.items()]
        return numpy.stack([numpy.stack([reading.at(one[part], places) for one in each]) for part in range(3)])

    def once(self, stage: Stage) -> Size:
        """Seconds that a step has once, on one stage: gradients, new weights and the update."""
        time, layout, memory, reading = self.time, self.time.layout, self.time.memory, self.reading
        make_up = memory.make_up(stage)
        counts = tuple(memory.counts(stage, stage.start, stage.stop).items())
        kinds = tuple(sorted((kind, stage.pattern.count(kind)) for kind in set(stage.pattern)))
        of_weights = stage.first, stage.last, layout.pp, layout.zero, layout.copies, layout.ends_together

        def make_rows() -> tuple[Traffic, ...]:
            return tuple(weight_traffic(memory, reading.fabric, stage, time.groups))

        def make() -> Size:
            micro = MicroBatch({}, {})
            for of_it in make_up:
                micro = micro.add(self.chunks[of_it])
            key = layout.sequence_parallel, kinds, *of_weights
            rows = reading.cached("rows", key, make_rows)
            update = reading.cached("update", key, lambda: time.optimizer(stage))
            return sum(time.once(rows, stage, micro).values()) + update

        return reading.cached("once", (self.facts, counts, *of_weights), make)

    def batch(self) -> Batch:
        """The layouts, the schedule played."""
        structure, layout = self.structure, self.time.layout
        if structure.pp == 1:
            pipeline = self.batches * self.slowest
        else:
            rest = self.slowest / layout.copies
            rest = rest + (0 if self.time.sends_hidden else 2 * self.send * structure.vpp)
            pipeline = self.played + (self.batches - self.short) * rest
        return Batch(structure, self.reading.grid, self.places, self.held, self.spread(pipeline) + self.ends)

    @property
    def short(self) -> Any:
        """Micro-batches that are played."""
        return self.numpy.minimum(self.batches, ROUNDS * self.structure.pp)


def play_all(steps: list[Step]) -> None:
    """Plays the schedules of structures with one pipeline, all together; equal times once, and only those needed."""
    import numpy

    if not steps or steps[0].structure.pp == 1:
        return
    leaders: dict[object, Step] = {}
    groups: dict[tuple[int, ...], list[Step]] = {}
    for step in steps:
        leader = leaders.setdefault(step.alike, step)
        if leader is step:
            groups.setdefault(step.kinds, []).append(step)
        else:
            leader.needed = leader.needed | step.needed
    for kinds, each in groups.items():
        structure = each[0].structure
        forward, backward, weight = (
            numpy.concatenate([step.times[n][:, step.needed] for step in each], axis=1) for n in range(3)
        )
        if structure.splits:
            backward = backward - weight
        else:
            weight = numpy.zeros_like(weight)
        send, short = (
            numpy.concatenate([getattr(step, name)[step.needed] for step in each]) for name in ("send", "short")
        )
        found = numpy.empty(len(short))
        for number in numpy.unique(short):
            mine = short == number
            found[mine] = play(
                structure.schedule, structure.pp, int(number), kinds, forward[:, mine], backward[:, mine],
                weight[:, mine], send[mine], overlap_send=each[0].time.sends_hidden,
            )  # fmt: skip
        start = 0
        for step in each:
            step.played = numpy.full(len(step.distinct), numpy.inf)
            count = int(step.needed.sum())
            step.played[step.needed] = found[start : start + count]
            start += count
    for step in steps:
        step.played = leaders[step.alike].played
