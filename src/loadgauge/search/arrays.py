"""Memory and time of every layout of a space: the array reading of the list of operations.

The formulas are those of `estimate`, which read open arrays where a single layout has whole numbers. What does not change
from one structure to the next is worked out once: the facts of a layer for all pipelines, ZeRO stages and schedules, the
weights of a stage for all kinds of recomputation, a pipeline's schedule for all ZeRO stages that leave its times alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from loadgauge.algebra import Size
from loadgauge.estimate.comm import Fabric
from loadgauge.estimate.estimate import view_of
from loadgauge.estimate.memory import MemoryModel
from loadgauge.estimate.outside import outside, workspaces
from loadgauge.estimate.roofline import Machine
from loadgauge.estimate.stages import Stage, stages
from loadgauge.estimate.step import ROUNDS, MicroBatch, StepModel
from loadgauge.estimate.traffic import layout_groups, weight_traffic
from loadgauge.hardware import Cluster
from loadgauge.layout import Layout
from loadgauge.rates import Rates
from loadgauge.search.held import ArrayMemory, SomeBatches, fullest, peak
from loadgauge.search.space import Constraints, Grid, Space, Structure
from loadgauge.search.timeline import play
from loadgauge.training import Training


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
        self.grids = [GridReading(self, grid) for grid in space.grids()]

    def batches(self, structure: Structure) -> list[Batch]:
        """The layouts of one structure that can exist."""
        with self.numpy.errstate(all="ignore"):
            return [found for each in self.grids if (found := each.batch(structure)) is not None]


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

    def batch(self, structure: Structure) -> Batch | None:
        """The layouts of one structure; None where none can exist."""
        places = self.limits.possible(structure)
        if not places.size:
            return None
        layout = self.cached(
            "layout", structure, lambda: self.space.layout(structure, self.grid.sizes, self.grid.ragged)
        )
        pipeline = structure.pp, structure.vpp, structure.schedule, structure.stage_layers
        each = self.cached("stages", pipeline, lambda: list(stages(self.space.model, layout)))
        facts = self.facts_key(structure, layout)
        memory, time = self.models(facts, layout)
        held = self.held(structure, facts, memory, each, places)
        step = self.step(structure, facts, time, each, places)
        return Batch(structure, self.grid, places, held + self.fixed(structure, layout, memory, places), step)

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

    def held(
        self, structure: Structure, facts: object, memory: ArrayMemory, each: list[Stage], places: Any
    ) -> Any:  # fmt: skip
        """Bytes of the worst rank at its peak, without what is outside the step."""
        numpy, layout = self.numpy, memory.layout
        if structure.schedule in ("1f1b", "gpipe"):
            return self.at(peak(memory, fullest(memory, each)), places)
        batches = self.at(layout.num_microbatches, places)
        short = numpy.minimum(batches, 4 * structure.pp)
        found = numpy.empty(len(places))
        alike: dict[object, list[int]] = {}
        for number in numpy.unique(short):
            some = SomeBatches.of(layout, int(number))
            key = self.cached(
                "flights", (structure.pp, structure.vpp, structure.schedule, structure.stage_layers, int(number)),
                lambda some=some: tuple((stage.index, flights(some, stage)) for stage in fullest(memory.under(some), each)),
            )  # fmt: skip
            alike.setdefault((key, number > 1), []).append(int(number))
        for (key, _), numbers in alike.items():
            under = memory.under(SomeBatches.of(layout, max(numbers)))
            chosen = numpy.isin(short, numbers)
            kept = [each[index] for index, _ in key]  # type: ignore[attr-defined]
            found[chosen] = self.at(peak(under, kept), places[chosen])
        return found

    def fixed(self, structure: Structure, layout: Layout, memory: MemoryModel, places: Any) -> Any:
        """Bytes outside the allocator, which depend on which axes have several ranks, and for good inside it."""

        def make() -> Any:
            numpy, code, axes = self.numpy, 0, ("dp", "tp", "cp", "ep")
            for bit, axis in enumerate(axes):
                code = code + self.numpy.asarray(getattr(layout, axis) > 1) * 2**bit
            values = [
                outside(Layout(pp=layout.pp, **{axis: 1 + (number >> bit & 1) for bit, axis in enumerate(axes)})).value
                for number in range(2 ** len(axes))
            ]
            return numpy.array(values)[code] + workspaces(self.gpu, self.training, grouped=memory.has_experts)

        return self.at(self.cached("outside", structure.pp, make), places)

    # -- time -----------------------------------------------------------------------------------------------------------

    def step(
        self, structure: Structure, facts: object, time: StepModel, each: list[Stage], places: Any
    ) -> Any:  # fmt: skip
        """Seconds of a step, as `StepModel.step` adds them up."""
        numpy, layout, memory = self.numpy, time.layout, time.memory
        makes = [memory.make_up(stage) for stage in each]
        chunks: dict[object, MicroBatch] = {}
        for stage, make in zip(each, makes, strict=True):
            for chunk, of_it in zip(stage.chunks, make, strict=True):
                if of_it not in chunks:
                    chunks[of_it] = self.cached(
                        "chunks", (facts, of_it), lambda stage=stage, chunk=chunk: time.of_chunk(stage, chunk)
                    )
        rows = {of_it: row for row, of_it in enumerate(chunks)}
        firsts: dict[object, int] = {}
        for index, make in enumerate(makes):
            firsts.setdefault(make, index)
        order = sorted(firsts.values())
        table = self.times(facts, chunks, places)
        work = table[0] + table[1]
        busy = numpy.stack([sum(work[rows[of_it]] for of_it in makes[index]) for index in order])
        ends = numpy.stack([self.at(self.once(facts, time, each[index], chunks), places) for index in order])
        slowest = busy.argmax(axis=0)
        kinds = [rows[of_it] for make in makes for of_it in make]
        batches = self.at(layout.num_microbatches, places)
        played = self.pipeline(structure, facts, time, kinds, chunks, busy.max(axis=0), batches, places)
        return played + numpy.take_along_axis(ends, slowest[None, :], axis=0)[0]

    def times(self, facts: object, chunks: dict[object, MicroBatch], places: Any) -> Any:
        """Seconds of each chunk: forward, backward, and of that the gradients of the weights: [3, chunks, layouts]."""

        def sums(one: MicroBatch) -> tuple[Size, Size, Size]:
            return sum(one.forward.values()), sum(one.backward.values()), one.weight

        each = [self.cached("sums", (facts, key), lambda one=one: sums(one)) for key, one in chunks.items()]
        return self.numpy.stack([self.numpy.stack([self.at(one[part], places) for one in each]) for part in range(3)])

    def once(self, facts: object, time: StepModel, stage: Stage, chunks: dict[object, MicroBatch]) -> Size:
        """Seconds that a step has once, on one stage: gradients, new weights and the update."""

        def make() -> Size:
            micro = MicroBatch({}, {})
            for of_it in make_up:
                micro = micro.add(chunks[of_it])
            rows = tuple(weight_traffic(time.memory, self.fabric, stage, time.groups))
            return sum(time.once(rows, stage, micro).values()) + time.optimizer(stage)

        layout, make_up = time.layout, time.memory.make_up(stage)
        totals = stage.first, stage.last, tuple(time.memory.counts(stage, stage.start, stage.stop).items())
        return self.cached("once", (facts, layout.pp, layout.zero, layout.copies, totals), make)

    def pipeline(
        self, structure: Structure, facts: object, time: StepModel, kinds: list[int], chunks: dict[object, MicroBatch],
        slowest: Any, batches: Any, places: Any,
    ) -> Any:  # fmt: skip
        """Seconds of the schedule, as `StepModel.pipeline_seconds` plays it."""
        numpy, p = self.numpy, structure.pp
        if p == 1:
            return batches * slowest
        hidden = time.sends_hidden
        columns = self.grid.shape[1]
        # Replicas change the times of a layer under ZeRO-3 only.
        if structure.zero == 3:
            distinct, back = places, numpy.arange(len(places))
        else:
            distinct, back = numpy.unique(places // columns, return_inverse=True)
            distinct = distinct * columns
        short = numpy.minimum(self.at(time.layout.num_microbatches, distinct), ROUNDS * p)
        send = self.at(time.send_seconds(), distinct)

        def make() -> Any:
            forward, backward, weight = self.times(facts, chunks, distinct)
            backward, weight = (backward - weight, weight) if structure.splits else (backward, numpy.zeros_like(weight))
            found = numpy.empty(len(distinct))
            for number in numpy.unique(short):
                mine = short == number
                found[mine] = play(
                    structure.schedule, p, int(number), kinds, forward[:, mine], backward[:, mine], weight[:, mine],
                    send[mine], overlap_send=hidden,
                )  # fmt: skip
            return found

        key = facts, p, structure.vpp, structure.schedule, structure.stage_layers, len(distinct)
        played = self.cached("played", key, make) if structure.zero < 3 else make()
        each = slowest / time.layout.copies
        rest = each + (0 if hidden else 2 * send[back] * structure.vpp)
        return played[back] + (batches - short[back]) * rest


def flights(layout: Layout, stage: Stage) -> tuple[object, ...]:
    """What a stage holds of its micro-batches."""
    from loadgauge.estimate.flight import works

    return works(layout, stage.index)
