"""Memory and time of every layout of a space: the array reading of the list of operations.

The formulas are those of `estimate`, which read open arrays where a single layout has whole numbers. What depends only
on tp, cp, ep, micro-batch, sequence parallelism and recomputation (the facts of one layer) is worked out once for each
combination of those and shared by all pipelines, ZeRO stages and schedules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from loadgauge.algebra import Size
from loadgauge.estimate.comm import Fabric
from loadgauge.estimate.estimate import view_of
from loadgauge.estimate.flight import Work, works
from loadgauge.estimate.memory import MemoryModel
from loadgauge.estimate.moments import StageAtWork
from loadgauge.estimate.outside import outside, workspaces
from loadgauge.estimate.roofline import Machine
from loadgauge.estimate.stages import Stage, stages
from loadgauge.estimate.step import ROUNDS, MicroBatch, StepModel
from loadgauge.estimate.traffic import layout_groups, weight_traffic
from loadgauge.hardware import Cluster
from loadgauge.layout import Layout
from loadgauge.rates import Rates
from loadgauge.search.space import SIZES, Constraints, Kind, Space, Structure
from loadgauge.search.timeline import play
from loadgauge.training import Training


class Batch(NamedTuple):
    """Layouts of one structure: places in the open arrays, bytes on the worst rank, seconds of a step."""

    structure: Structure
    kind: Kind
    places: Any
    memory: Any
    step: Any


class SomeBatches(Layout, frozen=True, kw_only=True):
    """Layouts that run the same number of micro-batches, where the order of work needs a whole number."""

    batches: int = 1

    @property
    def num_microbatches(self) -> Size:
        """Micro-batches each pipeline runs in one step."""
        return self.batches


class Reading:
    """The array reading of one space on one cluster."""

    def __init__(self, space: Space, training: Training, cluster: Cluster, rates: Rates) -> None:
        import numpy

        training.check(space.model)
        self.space, self.training, self.cluster, self.rates, self.numpy = space, training, cluster, rates, numpy
        self.machine = Machine.of(cluster.gpu, rates, training)
        self.fabric = Fabric.of(cluster, rates)
        self.facts: dict[object, tuple[MemoryModel, StepModel]] = {}
        self.times: dict[object, Any] = {}
        self.limits = {kind: Constraints(space, kind) for kind in space.kinds}

    def batches(self) -> Iterator[Batch]:
        """All layouts that can exist, one structure and grid after the other."""
        for structure in self.space.structures():
            for kind in self.space.kinds:
                found = self.batch(structure, kind)
                if found is not None:
                    yield found

    def batch(self, structure: Structure, kind: Kind) -> Batch | None:
        """The layouts of one structure on one grid; None where there are none."""
        limits = self.limits[kind]
        if structure.sequence_parallel and kind.tp == (1,):
            return None
        possible = limits.possible(structure)
        places = self.numpy.flatnonzero(possible)
        if not places.size:
            return None
        layout = self.space.layout(structure, limits.sizes)
        memory, time = self.models(structure, kind, layout)
        each = list(stages(self.space.model, layout))
        with self.numpy.errstate(all="ignore"):
            step = self.step(structure, kind, time, each, places)
            held = self.held(structure, memory, each, places)
        fixed = self.outside(layout, places)
        extra = workspaces(self.cluster.gpu, self.training, grouped=memory.has_experts)
        return Batch(structure, kind, places, held + extra + fixed, step)

    # -- facts ----------------------------------------------------------------------------------------------------------

    def models(self, structure: Structure, kind: Kind, layout: Layout) -> tuple[MemoryModel, StepModel]:
        """The memory and the step of a structure; what one layer needs is shared with other structures."""
        lazy = not self.training.framework.gradients_persist
        whole = structure.zero == 3
        key = (
            kind, structure.sequence_parallel, structure.recompute, whole, structure.splits, layout.ends_together,
            structure.pp if lazy or whole else 0,
        )  # fmt: skip
        if key not in self.facts:
            with self.numpy.errstate(all="ignore"):
                base = MemoryModel(self.space.model, layout, self.training, view_of(layout, self.training))
                self.facts[key] = base, StepModel(base, self.machine, self.fabric)
        base, clock = self.facts[key]
        memory, time = copy.copy(base), copy.copy(clock)
        memory.layout = layout
        time.memory, time.layout = memory, layout
        with self.numpy.errstate(all="ignore"):
            time.groups = layout_groups(layout)
        return memory, time

    def at(self, value: Size, kind: Kind, places: Any) -> Any:
        """A size at some places of the grid."""
        whole = self.numpy.broadcast_to(self.numpy.asarray(value, dtype="float64"), self.limits[kind].shape)
        return whole[self.numpy.unravel_index(places, whole.shape)]

    # -- memory ---------------------------------------------------------------------------------------------------------

    def held(self, structure: Structure, memory: MemoryModel, each: list[Stage], places: Any) -> Any:
        """Bytes of the worst rank at its peak, without what is outside the step."""
        kind = next(kind for kind in self.space.kinds if self.limits[kind].sizes["tp"] is memory.layout.tp
                    and self.limits[kind].sizes["cp"] is memory.layout.cp)  # fmt: skip
        if structure.schedule in ("1f1b", "gpipe"):
            return self.at(self.peak(memory, fullest(memory, each)), kind, places)
        numpy = self.numpy
        batches = self.at(memory.layout.num_microbatches, kind, places)
        found = numpy.empty(len(places))
        for number in numpy.unique(numpy.minimum(batches, max(4 * structure.pp, 2))):
            chosen = numpy.minimum(batches, max(4 * structure.pp, 2)) == number
            fields = {name: getattr(memory.layout, name) for name in Layout.__struct_fields__}
            some = copy.copy(memory)
            some.layout = SomeBatches(**fields, batches=int(number))
            found[chosen] = self.at(self.peak(some, fullest(some, each)), kind, places[chosen])
        return found

    def peak(self, memory: MemoryModel, each: list[Stage]) -> Size:
        """The most that any of these stages holds at any moment."""
        most: Any = 0.0
        for stage in each:
            at_work = ArrayStage(memory, stage)
            for chosen in at_work.choices():
                peak: Any = 0.0
                at_work.chosen = chosen
                for moment in at_work.moments():
                    peak = self.numpy.maximum(peak, moment.total)
                most = self.numpy.where(chosen.mask, self.numpy.maximum(most, peak), most)
        return most

    def outside(self, layout: Layout, places: Any) -> Any:
        """Bytes outside the allocator, which depend on which axes have several ranks."""
        kind = next(kind for kind in self.space.kinds if self.limits[kind].sizes["tp"] is layout.tp
                    and self.limits[kind].sizes["cp"] is layout.cp)  # fmt: skip
        numpy, code = self.numpy, 0
        axes = ("dp", "tp", "cp", "ep")
        for bit, axis in enumerate(axes):
            code = code + (self.at(getattr(layout, axis), kind, places) > 1) * 2**bit
        values = [
            outside(Layout(pp=layout.pp, **{axis: 1 + (number >> bit & 1) for bit, axis in enumerate(axes)})).value
            for number in range(2 ** len(axes))
        ]
        return numpy.array(values)[code]

    # -- time -----------------------------------------------------------------------------------------------------------

    def step(self, structure: Structure, kind: Kind, time: StepModel, each: list[Stage], places: Any) -> Any:
        """Seconds of a step, as `StepModel.step` adds them up."""
        numpy, layout = self.numpy, time.layout
        batches = self.at(layout.num_microbatches, kind, places)
        makes = [time.memory.make_up(stage) for stage in each]
        chunks: dict[object, MicroBatch] = {}
        for stage, make in zip(each, makes, strict=True):
            for chunk, of_it in zip(stage.chunks, make, strict=True):
                if of_it not in chunks:
                    chunks[of_it] = time.of_chunk(stage, chunk)
        rows = {of_it: row for row, of_it in enumerate(chunks)}
        forward, backward, weight = (
            numpy.stack([self.at(part(one), kind, places) for one in chunks.values()])
            for part in (lambda one: sum(one.forward.values()), lambda one: sum(one.backward.values()), lambda one: one.weight)
        )
        distinct = {make: stage for stage, make in reversed(list(zip(each, makes, strict=True)))}
        order = sorted(distinct.values(), key=lambda stage: stage.index)
        busy = [sum((forward + backward)[rows[of_it]] for of_it in time.memory.make_up(stage)) for stage in order]
        slowest = numpy.argmax(numpy.stack(busy), axis=0)
        ends = numpy.empty((len(order), len(places)))
        for row, stage in enumerate(order):
            micro = MicroBatch({}, {})
            for of_it in time.memory.make_up(stage):
                micro = micro.add(chunks[of_it])
            ends[row] = self.at(self.once(time, stage, micro), kind, places)
        kinds = [rows[of_it] for make in makes for of_it in make]
        played = self.pipeline(
            structure, time, kinds, (forward, backward, weight), numpy.stack(busy).max(axis=0), batches,
            self.at(time.send_seconds(), kind, places),
        )  # fmt: skip
        return played + numpy.take_along_axis(ends, slowest[None, :], axis=0)[0]

    def once(self, time: StepModel, stage: Stage, micro: MicroBatch) -> Size:
        """Seconds that a step has once, on one stage: gradients, new weights and the update."""
        rows = tuple(weight_traffic(time.memory, self.fabric, stage, time.groups))
        return sum(time.once(rows, stage, micro).values()) + time.optimizer(stage)

    def pipeline(
        self, structure: Structure, time: StepModel, kinds: list[int], times: tuple[Any, Any, Any], slowest: Any,
        batches: Any, send: Any,
    ) -> Any:  # fmt: skip
        """Seconds of the schedule, as `StepModel.pipeline_seconds` plays it."""
        numpy, p = self.numpy, structure.pp
        if p == 1:
            return batches * slowest
        hidden = time.sends_hidden
        forward, backward, weight = times
        if structure.splits:
            backward = backward - weight
        else:
            weight = numpy.zeros_like(weight)
        found = numpy.empty(len(batches))
        short = numpy.minimum(batches, ROUNDS * p)
        for number in numpy.unique(short):
            mine = short == number
            found[mine] = play(
                structure.schedule, p, int(number), kinds, forward[:, mine], backward[:, mine], weight[:, mine],
                send[mine], overlap_send=hidden,
            )  # fmt: skip
        each = slowest / time.layout.copies
        return found + (batches - short) * (each + (0 if hidden else 2 * send * structure.vpp))


def fullest(memory: MemoryModel, every: list[Stage]) -> list[Stage]:
    """The stages that no other one with the same chunks exceeds in what is in flight."""
    alike: dict[object, list[Stage]] = {}
    for stage in every:
        alike.setdefault(memory.make_up(stage), []).append(stage)
    if memory.layout.schedule in ("1f1b", "gpipe"):
        return [same[0] for same in alike.values()]  # a later stage holds no more micro-batches
    found = []
    for same in alike.values():
        held = {stage.index: works(memory.layout, stage.index) for stage in same}
        kept: list[Stage] = []
        for stage in same:
            if not any(_exceeds(held[other.index], held[stage.index]) for other in kept):
                kept = [other for other in kept if not _exceeds(held[stage.index], held[other.index])] + [stage]
        found += kept
    return found


def _exceeds(these: tuple[Work, ...], those: tuple[Work, ...]) -> bool:
    """Whether each of those works has one among these that holds as much of everything."""
    return all(
        any(
            one[:3] == other[:3]
            and all(a >= b for n in (0, 1) for a, b in zip(one.flight[n], other.flight[n], strict=True))
            for one in these
        )
        for other in those
    )


class Choice(NamedTuple):
    """Layouts for which the same work finds the most in flight: a mask, and the bytes of each work at one of them."""

    mask: Any
    nbytes: dict[int, float]


class ArrayStage(StageAtWork):
    """A stage of many layouts. Which work finds the most may differ between them, so each choice is read in turn."""

    chosen: Choice | None = None

    def choices(self) -> list[Choice]:
        """The choices there are."""
        import numpy

        groups: dict[object, list[int]] = {}
        for number, work in enumerate(self.works):
            groups.setdefault((work.forward, self.alike[work.chunk], work.splits), []).append(number)
            if self.chunk(work).last:
                groups.setdefault("head", []).append(number)
        several = [
            numbers for numbers in groups.values()
            if any(self.works[number].flight is not self.works[numbers[0]].flight for number in numbers)
        ]  # fmt: skip
        if not several:
            return [Choice(True, {})]
        every = sorted({number for numbers in several for number in numbers})
        arrays = numpy.broadcast_arrays(*(StageAtWork.nbytes(self, self.works[number]) for number in every))
        sizes = dict(zip(every, arrays, strict=True))
        picks = numpy.stack([numpy.argmax(numpy.stack([sizes[n] for n in numbers]), axis=0) for numbers in several])
        flat = picks.reshape(len(several), -1)
        _, index, inverse = numpy.unique(flat, axis=1, return_index=True, return_inverse=True)
        inverse = inverse.reshape(picks.shape[1:])
        return [
            Choice(inverse == number, {id(self.works[n]): float(sizes[n].reshape(-1)[place]) for n in every})
            for number, place in enumerate(index)
        ]

    def nbytes(self, work: Work) -> Size:
        """Bytes of all that is in flight, at one of the layouts of the choice at hand."""
        return 0.0 if self.chosen is None else self.chosen.nbytes.get(id(work), 0.0)


__all__ = ["SIZES", "Batch", "Reading"]
