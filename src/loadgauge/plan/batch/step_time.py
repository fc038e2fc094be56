"""The time of a step for many layouts at once: `estimate.step` at places of open arrays."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

from loadgauge.algebra import Size
from loadgauge.estimate.memory.rank_memory import LayerFacts
from loadgauge.estimate.memory.states import RankWeights
from loadgauge.estimate.schedule.stages import Stage
from loadgauge.estimate.time.collectives import Fabric, Group
from loadgauge.estimate.time.roofline import Machine
from loadgauge.estimate.time.step import ROUNDS, MicroBatch, StepModel
from loadgauge.estimate.time.traffic import weight_traffic
from loadgauge.layers.operations import Layer
from loadgauge.plan.batch.memory import ArrayMemory, weights_key
from loadgauge.plan.batch.schedule import least, play
from loadgauge.plan.batch.types import Once, Wanted
from loadgauge.plan.constraints import Places
from loadgauge.plan.space import ByIdentity, Structure


class ArrayStep(StepModel):
    """The step of many layouts, at some places of the arrays: one number for each place.

    known: the times of operations, in open arrays, for all structures that run them; of each only the sum over lanes
    gathers: the times of ZeRO-3's collectives at these places, by the weights that they carry
    """

    memory: ArrayMemory

    def __init__(
        self, memory: ArrayMemory, machine: Machine, fabric: Fabric, groups: dict[str, Group], places: Places | None,
        known: dict[object, Any], gathers: dict[ByIdentity, Any],
    ) -> None:  # fmt: skip
        self.places, self.known, self.gathers = places, known, gathers
        self.chunks: dict[object, tuple[Any, Any, Any]] = {}
        super().__init__(memory, machine, fabric, groups)

    def read(self, value: Size) -> Any:
        """A size at the places."""
        return value if self.places is None else self.places.of(value)

    def computed(self, facts: LayerFacts) -> MicroBatch:
        """Of a layer and micro-batch what does not depend on where its weights are."""
        key = ByIdentity(facts.layer), facts.recompute
        if key not in self.known:
            micro = super().computed(facts)
            self.known[key] = sum(micro.forward.values()), sum(micro.backward.values()), micro.weight
        return self._at(*self.known[key])

    def computed_end(self, layer: Layer) -> tuple[MicroBatch, Size, Size]:
        """The embedding, or the head with its loss, and of it the compute."""
        key = ByIdentity(layer)
        if key not in self.known:
            micro, *compute = super().computed_end(layer)
            sums = sum(micro.forward.values()), sum(micro.backward.values()), micro.weight
            self.known[key] = sums, compute
        sums, (forward, backward) = self.known[key]
        return self._at(*sums), self._known(forward), self._known(backward)

    def zero_seconds(self, weights: RankWeights) -> tuple[Any, Any]:
        """Seconds to gather some weights and to scatter their gradients under ZeRO-3."""
        key = ByIdentity(weights)
        if key not in self.gathers:
            self.gathers[key] = super().zero_seconds(weights)
        seconds: tuple[Any, Any] = self.gathers[key]
        return seconds

    def _known(self, value: Size) -> Any:
        return value if self.places is None else self.places.known(value)

    def _at(self, forward: Size, backward: Size, weight: Size) -> MicroBatch:
        at = self._known
        return MicroBatch({"": at(forward)}, {"": at(backward)}, at(weight))

    def under(self, memory: ArrayMemory, places: Places | None) -> ArrayStep:
        """The same under another ZeRO stage, at other places or (None) in open arrays."""
        other = copy.copy(self)
        other.memory, other.layout, other.places, other.chunks = memory, memory.layout, places, {}
        return other

    def chunk(self, key: object, stage: Stage, chunk: Any) -> tuple[Any, Any, Any]:
        """Seconds of a chunk: forward, backward, and of that the gradients of the weights."""
        if key not in self.chunks:
            one = self.of_chunk(stage, chunk)
            self.chunks[key] = sum(one.forward.values()), sum(one.backward.values()), one.weight
        return self.chunks[key]


class Pace:
    """The times of a pipeline at some points, of which layouts with other ZeRO stages or replicas may have several.

    times: seconds of each chunk: forward, backward, and of that the gradients of the weights: [3, chunks, points]
    slowest: of the slowest stage for one micro-batch; which: what that stage is
    """

    def __init__(
        self, once: Once, structure: Structure, time: ArrayStep, each: list[Stage], points: Places, *,
        shared: bool,
    ) -> None:  # fmt: skip
        import numpy

        self.once, self.structure, self.time, self.points, self.shared = once, structure, time, points, shared
        self.numpy = numpy
        makes = [time.memory.make_up(stage) for stage in each]
        chunks: dict[object, tuple[Any, Any, Any]] = {}
        for stage, make in zip(each, makes, strict=True):
            for chunk, of_it in zip(stage.chunks, make, strict=True):
                if of_it not in chunks:
                    chunks[of_it] = time.chunk(of_it, stage, chunk)
        rows = {of_it: row for row, of_it in enumerate(chunks)}
        self.kinds = tuple(rows[of_it] for make in makes for of_it in make)
        """Of each chunk of each stage, its row in the times."""
        self.make_ups = makes
        self.rows = rows
        firsts: dict[object, int] = {}
        for index, make in enumerate(makes):
            firsts.setdefault(make, index)
        self.stages = [each[index] for index in sorted(firsts.values())]
        shape = len(points)
        self.times = numpy.array(
            [[numpy.broadcast_to(one[part], shape) for one in chunks.values()] for part in range(3)]
        )
        self.batches = points.known(once("batches", lambda: time.layout.num_microbatches))
        self.send: Any = points.known(once(("send", structure.schedule), time.send_seconds))
        self.busy = numpy.array([self.of_stage(stage, 0) + self.of_stage(stage, 1) for stage in self.stages])
        self.which = self.busy.argmax(axis=0)
        self.slowest = self.busy.max(axis=0)
        self.played: Any = None
        self.needed: Any = numpy.zeros(shape, dtype=bool)
        """The points whose schedule is to be played."""

    def of_stage(self, stage: Stage, part: int) -> Any:
        """Seconds of one micro-batch on a stage: forward (0) or backward (1)."""
        return sum(self.times[part][self.rows[of_it]] for of_it in self.time.memory.make_up(stage))

    def step(self, structure: Structure, memory: ArrayMemory, places: Places, held: Any) -> Step:
        """The layouts of one ZeRO stage."""
        return Step(self, structure, memory, places, held)

    def back(self, places: Places) -> Any:
        """Which point each layout has; None where it is the one at the same place."""
        if not self.shared:
            return None
        numpy, combinations = self.numpy, self.points.combinations
        return self.once(("back", self.points, places), lambda: numpy.searchsorted(combinations, places.combinations))

    @property
    def short(self) -> Any:
        """Micro-batches that are played."""
        return self.numpy.minimum(self.batches, ROUNDS * self.structure.pp)

    @functools.cached_property
    def least(self) -> Any:
        """Seconds that the pipeline takes at least."""
        structure = self.structure
        if structure.pp == 1:
            return self.batches * self.slowest
        return least(
            structure.schedule, structure.pp, self.batches, self.kinds, self.times[0], self.times[1], self.send
        )

    def seconds(self) -> Any:
        """Seconds of the pipeline at each point; infinite where it was not played."""
        if self.structure.pp == 1:
            return self.batches * self.slowest
        rest = self.slowest / self.time.layout.copies
        if self.structure.schedule == "gpipe":
            rest = self.times[0].max(axis=0) + self.times[1].max(axis=0)
        rest = rest + (0 if self.time.sends_hidden else 2 * self.send * self.structure.vpp)
        return self.played + (self.batches - self.short) * rest


class Step:
    """The time of the layouts of one structure, as `StepModel.step` adds it up."""

    def __init__(self, pace: Pace, structure: Structure, memory: ArrayMemory, places: Places, held: Any) -> None:
        self.pace, self.structure, self.places, self.held = pace, structure, places, held
        self.memory, self.numpy, self.back = memory, pace.numpy, pace.back(places)
        self.ends = self._ends()

    def spread(self, values: Any) -> Any:
        """From points to layouts."""
        return values if self.back is None else values[self.back]

    def narrow(self, wanted: Wanted) -> None:
        """Asks for the schedules of layouts that are wanted."""
        chosen = wanted(self.held, self.spread(self.pace.least) + self.ends)
        if self.back is None:
            self.pace.needed |= chosen
        else:
            self.pace.needed[self.back[chosen]] = True

    def seconds(self) -> Any:
        """Seconds of a step, the schedule played."""
        return self.spread(self.pace.seconds()) + self.ends

    def _ends(self) -> Any:
        """Seconds that a step has once, on its slowest stage: gradients, new weights and the update."""
        numpy, pace = self.numpy, self.pace
        slow = numpy.flatnonzero(numpy.bincount(pace.which, minlength=len(pace.stages)))
        each = [self._end(pace.stages[number]) for number in slow]
        if len(each) == 1:
            return each[0]
        which = self.spread(pace.which)
        found = each[0]
        for number, other in zip(slow[1:], each[1:], strict=True):
            found = numpy.where(which == number, other, found)
        return found

    def _end(self, stage: Stage) -> Any:
        """The same on one stage."""
        pace, once, memory, places = self.pace, self.pace.once, self.memory, self.places
        layout, overlaps = memory.layout, pace.time.overlap.dp
        key = weights_key(stage), layout.zero, layout.copies, layout.ends_together
        open_time = pace.time.under(memory, None)
        rows = once(
            ("rows", key),
            lambda: tuple(weight_traffic(memory, open_time.fabric, stage, open_time.groups, once=True)),
        )
        update = once(("update", key), lambda: open_time.optimizer(stage))
        if overlaps:
            forward, backward = (self.spread(pace.of_stage(stage, part)) for part in (0, 1))
            micro = MicroBatch({"": forward}, {"": backward})
            return sum(pace.time.under(memory, places).once(rows, stage, micro).values()) + places.known(update)
        nothing = MicroBatch({}, {})
        whole = once(("ends", key), lambda: sum(open_time.once(rows, stage, nothing).values()) + update)
        return places.known(whole)


def play_all(paces: Iterable[Pace]) -> None:
    """Plays the schedules of one pipeline, all together; only where they are needed."""
    import numpy

    each = list(dict.fromkeys(paces))
    if not each or each[0].structure.pp == 1:
        return
    groups: dict[tuple[int, ...], list[Pace]] = {}
    for pace in each:
        groups.setdefault(pace.kinds, []).append(pace)
    for kinds, alike in groups.items():
        structure = alike[0].structure
        forward, backward, weight = (
            numpy.concatenate([pace.times[n][:, pace.needed] for pace in alike], axis=1) for n in range(3)
        )
        if structure.splits:
            backward = backward - weight
        else:
            weight = numpy.zeros_like(weight)
        send, short = (
            numpy.concatenate([getattr(pace, name)[pace.needed] for pace in alike]) for name in ("send", "short")
        )
        found = numpy.empty(len(short))
        for number in numpy.unique(short):
            mine = short == number
            found[mine] = play(
                structure.schedule, structure.pp, int(number), kinds, forward[:, mine], backward[:, mine],
                weight[:, mine], send[mine], overlap_send=alike[0].time.sends_hidden,
            )  # fmt: skip
        start = 0
        for pace in alike:
            pace.played = numpy.full(len(pace.points), numpy.inf)
            count = int(pace.needed.sum())
            pace.played[pace.needed] = found[start : start + count]
            start += count
