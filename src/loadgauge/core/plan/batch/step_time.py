"""The time of a step for many layouts at once: `estimate.step` at places of open arrays."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.estimate.memory.rank_memory import LayerFacts
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.estimate.states.states import RankWeights
from loadgauge.core.estimate.time.collectives import Fabric, Group
from loadgauge.core.estimate.time.contention import NOTHING, Links, added
from loadgauge.core.estimate.time.roofline import Machine
from loadgauge.core.estimate.time.step import ROUNDS, MicroBatch, StepModel
from loadgauge.core.estimate.time.traffic import layout_groups, weight_traffic
from loadgauge.core.layers.operations.operations import Layer, Recompute
from loadgauge.core.plan.batch.memo import ByIdentity, Memo
from loadgauge.core.plan.batch.memory import ArrayMemory, weights_key
from loadgauge.core.plan.batch.schedule import least, play
from loadgauge.core.plan.batch.types import Batch, May, Wanted
from loadgauge.core.plan.space.constraints import Places
from loadgauge.core.plan.space.space import Grid, Structure


class KnownGroup(Group, frozen=True, dict=True):
    """A group of ranks that remembers its place on the cluster."""

    def members(self, domain: int) -> Size:
        """Return the value of `Group`, computed once for a domain."""
        return self._once("members", domain)

    def domains(self, domain: int) -> Size:
        """Return the value of `Group`, computed once for a domain."""
        return self._once("domains", domain)

    def aligned(self, domain: int) -> Any:
        """Return the value of `Group`, computed once for a domain."""
        return self._once("aligned", domain)

    def _once(self, name: str, domain: int) -> Any:
        key = f"{name} {domain}"
        if key not in self.__dict__:
            self.__dict__[key] = getattr(Group, name)(self, domain)
        return self.__dict__[key]


def known_groups(layout: Layout) -> dict[str, Group]:
    """The groups of ranks that communicate, by name."""
    return {
        name: KnownGroup(**{field: getattr(group, field) for field in Group.__struct_fields__})
        for name, group in layout_groups(layout).items()
    }


class ArrayStep(StepModel):
    """`StepModel` of many layouts, at some places of the arrays: one number for each place.

    operations: the times of operations, in open arrays, for all structures that run them; of each only the sum over lanes
    gathers: the times of ZeRO-3's collectives at these places, by the weights that they carry
    """

    memory: ArrayMemory

    def __init__(
        self,
        memory: ArrayMemory,
        machine: Machine,
        fabric: Fabric,
        groups: dict[str, Group],
        places: Places | None,
        operations: Memo,
        gathers: Memo,
    ) -> None:
        self.places, self.operations, self.gathers, self.chunks = places, operations, gathers, Memo()
        super().__init__(memory, machine, fabric, groups)

    def read(self, value: Size) -> Any:
        """The values of an open array at the places."""
        return value if self.places is None else self.places.of(value)

    def computed(self, facts: LayerFacts) -> MicroBatch:
        """Time of a layer for one micro-batch, without what depends on how its weights are sharded [s]."""
        # A split backward has nothing beside the gradients of weights that it puts off.
        key = ByIdentity(facts.layer), facts.recompute, self.layout.splits_backward
        if key not in self.operations:
            self.operations[key] = _sums(super().computed(facts))
        return self._at(*self.operations[key])

    def comm(self, layer: Layer, direction: str, recompute: Recompute | None = None) -> dict[str, Size]:
        """The seconds of collectives, once for all kinds of recomputation."""
        if recompute is not None:
            return super().comm(layer, direction, recompute)
        return self.operations.once(("comm", ByIdentity(layer), direction), super().comm, layer, direction)

    def computed_end(self, layer: Layer) -> tuple[MicroBatch, Size, Size]:
        """Time of the embedding, or of the head with its loss; then the compute of its forward and backward [s]."""
        key = ByIdentity(layer)
        if key not in self.operations:
            micro, *compute = super().computed_end(layer)
            self.operations[key] = _sums(micro), compute
        sums, (forward, backward) = self.operations[key]
        return self._at(*sums), self._read_once(forward), self._read_once(backward)

    def zero_seconds(self, weights: RankWeights) -> tuple[Any, Any]:
        """Time to gather weights and to reduce-scatter their gradients under ZeRO-3 [s]."""
        open_arrays = self.under(self.memory, None)
        gather, scatter = self.gathers.once(
            ByIdentity(weights), lambda: super(ArrayStep, open_arrays).zero_seconds(weights)
        )
        return self._read_once(gather), self._read_once(scatter)

    def of_call(self, row: Any, times: Size) -> Size:
        """The seconds of one call of some traffic, in open arrays."""
        return self.gathers.once(("call", ByIdentity(row)), super().of_call, row, times)

    def _read_once(self, value: Size) -> Any:
        return value if self.places is None else self.places.read_once(value)

    def _at(self, forward: Size, backward: Size, weight: Size, links: Links) -> MicroBatch:
        at = self._read_once
        return MicroBatch({"": at(forward)}, {"": at(backward)}, at(weight), self._links_at(links))

    def _links_at(self, links: Links) -> Links:
        if links is NOTHING:
            return links
        ahead, all_ahead, back, all_back = (self._read_once(link) for link in links)
        return ahead, all_ahead, back, all_back

    def under(self, memory: ArrayMemory, places: Places | None) -> ArrayStep:
        """This model for another ZeRO stage, at other places or (None) in open arrays."""
        other = copy.copy(self)
        other.memory, other.layout, other.places, other.chunks = memory, memory.layout, places, Memo()
        return other

    def chunk(self, key: object, stage: Stage, chunk: Any) -> tuple[Any, Any, Any, Links]:
        """Time of a chunk [s]: forward, backward, the weight-gradient part of the backward; and `MicroBatch.links`."""
        return self.chunks.once(key, lambda: _sums(self.of_chunk(stage, chunk)))


def _sums(micro: MicroBatch) -> tuple[Any, Any, Any, Links]:
    """Seconds of all components: forward, backward, of that the gradients of the weights; and on the network."""
    return sum(micro.forward.values()), sum(micro.backward.values()), micro.weight, micro.links


class PipelineTimes:
    """Stage times of a pipeline at some points; layouts that differ in ZeRO stage or replicas share a point.

    times: seconds of each chunk: forward, backward, and of that the gradients of the weights: [3, chunks, points]
    slowest: of the slowest stage for one micro-batch; which: what that stage is
    """

    def __init__(
        self,
        memo: Memo,
        structure: Structure,
        time: ArrayStep,
        stages: tuple[Stage, ...],
        points: Places,
        *,
        shared: bool,
    ) -> None:
        import numpy

        self.memo, self.structure, self.time, self.points, self.shared = memo, structure, time, points, shared
        self.numpy = numpy
        makes = [time.memory.make_up(stage) for stage in stages]
        chunks: dict[object, tuple[Any, Any, Any, Links]] = {}
        for stage, make in zip(stages, makes, strict=True):
            for chunk, of_it in zip(stage.chunks, make, strict=True):
                if of_it not in chunks:
                    chunks[of_it] = time.chunk(of_it, stage, chunk)
        rows = {of_it: row for row, of_it in enumerate(chunks)}
        self.on_network = tuple(parts[3] for parts in chunks.values())
        self.kinds = tuple(rows[of_it] for make in makes for of_it in make)
        """Of each chunk of each stage, its row in the times."""
        self.make_ups = makes
        self.rows = rows
        firsts: dict[object, int] = {}
        for index, make in enumerate(makes):
            firsts.setdefault(make, index)
        self.stages = [stages[index] for index in sorted(firsts.values())]
        shape = len(points)
        self.times = numpy.array(
            [[numpy.broadcast_to(parts[part], shape) for parts in chunks.values()] for part in range(3)]
        )
        self.batches = points.read_once(memo.once("batches", lambda: time.layout.num_microbatches))
        self.send: Any = points.read_once(memo.once(("send", structure.schedule), time.send_seconds))
        self.busy = numpy.array([self.of_stage(stage, 0) + self.of_stage(stage, 1) for stage in self.stages])
        self.which = self.busy.argmax(axis=0)
        self.slowest = self.busy.max(axis=0)
        self.played: Any = None
        self.needed: Any = numpy.zeros(shape, dtype=bool)
        """The points whose schedule is to be played."""

    def of_stage(self, stage: Stage, part: int) -> Any:
        """Time of one micro-batch on a stage [s]: forward (part 0) or backward (part 1)."""
        return sum(self.times[part][self.rows[of_it]] for of_it in self.time.memory.make_up(stage))

    def links(self, stage: Stage, spread: Callable[[Any], Any]) -> Links:
        """`MicroBatch.links` of one micro-batch on a stage, as layouts have it."""
        total = NOTHING
        for of_it in self.time.memory.make_up(stage):
            total = added(total, self.on_network[self.rows[of_it]])
        if total is NOTHING:
            return total
        ahead, all_ahead, back, all_back = (spread(link) for link in total)
        return ahead, all_ahead, back, all_back

    def back(self, places: Places) -> Any:
        """The index of each layout's point; None where layouts and points are the same."""
        if not self.shared:
            return None
        numpy, combinations = self.numpy, self.points.combinations
        return self.memo.once(
            ("back", self.points, places), lambda: numpy.searchsorted(combinations, places.combinations)
        )

    @property
    def short(self) -> Any:
        """The number of micro-batches that are simulated; the rest repeat a steady state."""
        return self.numpy.minimum(self.batches, ROUNDS * self.structure.pp)

    @functools.cached_property
    def least(self) -> Any:
        """A lower bound of the pipeline's duration at each point [s]."""
        structure = self.structure
        if structure.pp == 1:
            return self.batches * self.slowest
        return least(
            structure.schedule, structure.pp, self.batches, self.kinds, self.times[0], self.times[1], self.send
        )

    def seconds(self) -> Any:
        """The pipeline's duration at each point [s]; infinite where it was not simulated."""
        if self.structure.pp == 1:
            return self.batches * self.slowest
        rest = self.slowest / self.time.layout.copies
        if self.structure.schedule == "gpipe":
            rest = self.times[0].max(axis=0) + self.times[1].max(axis=0)
        rest = rest + (0 if self.time.sends_hidden else 2 * self.send * self.structure.vpp)
        return self.played + (self.batches - self.short) * rest


class Step:
    """The time of the layouts of one structure, as `StepModel.step` adds it up.

    nbytes: the memory of each and its upper end, once `narrow` has it; valid: layouts of the structure, with those that a bound
    ruled out
    first: the least bound of those that are to be timed [s]; infinite where there is none
    """

    nbytes: tuple[Any, Any]
    ends: Any = None

    def __init__(
        self,
        times: PipelineTimes,
        structure: Structure,
        grid: Grid,
        memory: ArrayMemory,
        places: Places,
        valid: int,
    ) -> None:
        self.times, self.structure, self.places, self.valid = times, structure, places, valid
        self.grid = grid
        self.memory, self.numpy, self.back = memory, times.numpy, times.back(places)
        self.some, self.chosen = places, None
        self.least = self.spread(times.least)
        self.first = float("inf")

    def shorten(self, may: May, low: Any, places: Callable[[Any], Places]) -> None:
        """Leave out layouts that the bound of their pipeline rules out, first without what comes once a step.

        low: bounds of the memory of each [bytes]; places: from those of the grid, the same object for the same ones
        """
        for with_ends in (False, True):
            if with_ends and len(low):
                self.ends = self._ends()
                self.least = self.least + self.ends
            mark = may(low, self.least)
            if not mark.all():
                low, self.least = low[mark], self.least[mark]
                self.ends = None if self.ends is None else self.ends[mark]
                self.places = self.some = places(self.places.flat[mark])
                self.back = self.numpy.flatnonzero(mark) if self.back is None else self.back[mark]

    def narrow(self, nbytes: tuple[Any, Any], wanted: Wanted | None) -> None:
        """Choose the layouts to time, those for which `wanted` is true (None: all), and mark the points to simulate."""
        self.nbytes = nbytes
        least, numpy = self.least, self.numpy
        if wanted is not None:
            # First without what comes once a step, which takes long to work out.
            chosen = numpy.flatnonzero(wanted(*self.nbytes, least))
            if len(chosen) < len(least):
                self.chosen, self.some, self.least = (
                    chosen,
                    Places(self.places.flat[chosen], self.places.dims),
                    least[chosen],
                )
                self.back = chosen if self.back is None else self.back[chosen]
                self.ends = None if self.ends is None else self.ends[chosen]
        if self.ends is None and len(self.least):
            self.ends = self._ends()
            self.least = self.least + self.ends
        self.need(wanted)

    def need(self, wanted: Wanted | None) -> None:
        """Mark the points to simulate, once the chosen layouts have a bound with all there is."""
        needed: Any = slice(None)
        if wanted is not None and len(self.least):
            nbytes = self.nbytes if self.chosen is None else (ends[self.chosen] for ends in self.nbytes)
            needed = self.numpy.flatnonzero(wanted(*nbytes, self.least))
            self.first = self.least[needed].min(initial=self.numpy.inf)
        points = needed if self.back is None else self.back[needed]
        if len(self.least):
            self.times.needed[points] = True

    def spread(self, values: Any) -> Any:
        """Values of points, as values of the chosen layouts."""
        return values if self.back is None else values[self.back]

    def batch(self) -> Batch:
        """The layouts with their step times [s]; infinite where the schedule was not simulated."""
        seconds: Any = self.numpy.full(len(self.places), self.numpy.inf)
        if len(self.some) and (self.structure.pp == 1 or self.times.played is not None):
            seconds[slice(None) if self.chosen is None else self.chosen] = self.spread(self.times.seconds()) + self.ends
        return Batch(self.structure, self.grid, self.places.flat, *self.nbytes, seconds, self.valid)

    def _ends(self) -> Any:
        """Seconds that a step has once, on its slowest stage: gradients, new weights and the update."""
        numpy, times, which = self.numpy, self.times, self.spread(self.times.which)
        slow = numpy.flatnonzero(numpy.bincount(which, minlength=len(times.stages)))
        ends = [self._end(times.stages[number]) for number in slow]
        if len(ends) == 1:
            return ends[0]
        seconds = ends[0]
        for number, other in zip(slow[1:], ends[1:], strict=True):
            seconds = numpy.where(which == number, other, seconds)
        return seconds

    def _end(self, stage: Stage) -> Any:
        """The same on one stage."""
        times, memo, memory, places = self.times, self.times.memo, self.memory, self.some
        layout = memory.layout
        key = weights_key(stage), layout.zero, layout.copies, layout.ends_together, layout.pp > 1
        open_time = times.time.under(memory, None)
        rows = memo.once(
            ("rows", key),
            lambda: tuple(weight_traffic(memory, open_time.fabric, stage, open_time.groups, once=True)),
        )
        update = memo.once(("update", key), lambda: open_time.optimizer(stage))
        if any(row.hidden for row in rows if row.lane == "dp"):
            forward, backward = (self.spread(times.of_stage(stage, part)) for part in (0, 1))
            micro = MicroBatch({"": forward}, {"": backward}, links=times.links(stage, self.spread))
            return sum(times.time.under(memory, places).once(rows, stage, micro).values()) + places.read_once(update)
        nothing = MicroBatch({}, {})
        whole = memo.once(("ends", key), lambda: sum(open_time.once(rows, stage, nothing).values()) + update)
        return places.read_once(whole)


def finish(steps: list[Step], wanted: Wanted | None) -> Iterator[Batch]:
    """Simulate the schedules of structures with one pipeline that are still wanted, and yield all of their layouts."""
    for times in dict.fromkeys(step.times for step in steps):
        times.needed[:] = False
    for step in steps:
        step.need(wanted)
    play_all([step.times for step in steps])
    for step in steps:
        yield step.batch()


def play_all(pipelines: Iterable[PipelineTimes]) -> None:
    """Simulate the schedules of pipelines of one shape together, at the points that are needed."""
    import numpy

    distinct = list(dict.fromkeys(pipelines))
    if not distinct or distinct[0].structure.pp == 1:
        return
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[PipelineTimes]] = {}
    for times in distinct:
        groups.setdefault((times.kinds, times.time.memory.put_off), []).append(times)
    for (shapes, late), alike in groups.items():
        structure = alike[0].structure
        forward, backward, weight = (
            numpy.concatenate([times.times[n][:, times.needed] for times in alike], axis=1) for n in range(3)
        )
        if structure.splits:
            backward = backward - weight
        else:
            weight = numpy.zeros_like(weight)
        send, short = (
            numpy.concatenate([getattr(times, name)[times.needed] for times in alike]) for name in ("send", "short")
        )
        seconds = numpy.empty(len(short))
        for number in numpy.unique(short):
            mine = short == number
            seconds[mine] = play(
                structure.schedule,
                structure.pp,
                int(number),
                shapes,
                forward[:, mine],
                backward[:, mine],
                weight[:, mine],
                send[mine],
                overlap_send=alike[0].time.sends_hidden,
                put_off=late,
            )
        start = 0
        for times in alike:
            times.played = numpy.full(len(times.points), numpy.inf)
            count = int(times.needed.sum())
            times.played[times.needed] = seconds[start : start + count]
            start += count
