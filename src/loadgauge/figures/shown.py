"""An estimate that is to be drawn, with the facts that it was made of."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from loadgauge.algebra import Size
from loadgauge.estimate.memory.rank_memory import MemoryModel
from loadgauge.estimate.result import Estimate
from loadgauge.estimate.schedule.simulate import Simulation, simulate
from loadgauge.estimate.schedule.stages import Stage, stages
from loadgauge.estimate.time.collectives import Fabric
from loadgauge.estimate.time.roofline import Machine, OperationTime, operation_seconds
from loadgauge.estimate.time.step import MicroBatch, StepModel
from loadgauge.estimate.workings import Apart
from loadgauge.layers.operations import NOTHING, Layer, Operation, Recompute
from loadgauge.resolve.setup import Setup
from loadgauge.spec.calibration import rates

MICROBATCHES, STAGES = 16, 16
"""Micro-batches and pipeline stages that are drawn, where there are more."""


class Timed(NamedTuple):
    """One operation of the slowest stage. times: in one micro-batch; again: whether it runs again in backward."""

    layer: str
    operation: Operation
    times: Size
    again: bool
    seconds: OperationTime

    @property
    def each(self) -> Size:
        """Seconds in one micro-batch, forward, backward and again."""
        more = self.seconds.forward if self.again else 0
        return self.times * (self.seconds.forward + self.seconds.backward + more)


class Shown:
    """A job, its estimate, and the facts behind it; each is worked out once, when a figure needs it."""

    def __init__(self, job: Setup, result: Estimate) -> None:
        self.job, self.result = job, result
        self.layout = result.layout

    @cached_property
    def apart(self) -> Apart:
        """The estimate taken apart at its peak moment."""
        return Apart(self.result, "activations")

    @property
    def memory(self) -> MemoryModel:
        """The facts of the layers."""
        return self.apart.facts

    @cached_property
    def stages(self) -> list[Stage]:
        """All pipeline stages."""
        return list(stages(self.result.model, self.layout))

    @cached_property
    def clock(self) -> StepModel | None:
        """The time of the step; None where no GPU is given, or its figures are not known."""
        result = self.result
        if result.time is None or result.cluster is None:
            return None
        known = rates(result.cluster.gpu.id)
        machine = Machine.of(result.cluster.gpu, known, result.training)
        return StepModel(self.memory, machine, Fabric.of(result.cluster, known))

    @cached_property
    def chunks(self) -> list[tuple[MicroBatch, ...]]:
        """What a micro-batch takes on each chunk of each stage."""
        assert self.clock is not None
        alike: dict[object, tuple[MicroBatch, ...]] = {}
        keys = [self.memory.make_up(stage) for stage in self.stages]
        for key, stage in zip(keys, self.stages, strict=True):
            if key not in alike:
                alike[key] = self.clock.of_stage(stage)
        return [alike[key] for key in keys]

    @property
    def scale(self) -> float:
        """What every second is multiplied by, after a measured run of the user's."""
        return 1.0 if self.result.time is None else self.result.time.scale

    @property
    def passes(self) -> Size:
        """Micro-batches that a stage works on in a step."""
        return self.layout.num_microbatches / self.layout.copies

    def play(self, batches: int) -> Simulation:
        """The schedule with so many micro-batches; in units of a forward where no time is known."""
        layout, clock, split = self.layout, self.clock, self.layout.splits_backward
        how: dict[str, Any] = {"forward": 1, "backward": 1 if split else 2, "weight": 1 if split else 0}
        if clock is not None:
            held = self.chunks
            how = {
                "forward": [[sum(one.forward.values()) for one in each] for each in held],
                "backward": [
                    [sum(one.backward.values()) - (one.weight if split else 0) for one in each] for each in held
                ],
                "weight": [[one.weight for one in each] for each in held] if split else 0,
                "send": clock.send_seconds(),
                "overlap_send": clock.sends_hidden,
            }
        chunks = layout.vpp if layout.schedule == "interleaved" else None
        return simulate(layout.schedule, layout.pp, batches, chunks=chunks, **how)

    def some(self, wanted: int) -> int:
        """About so many micro-batches, as the schedule can run them, and no more than there are."""
        layout, batches = self.layout, int(self.layout.num_microbatches)
        if layout.schedule == "interleaved":
            wanted = -(-wanted // layout.pp) * layout.pp
        elif layout.schedule in ("dualpipe", "dualpipev"):
            wanted = max(wanted + wanted % 2, 2 * layout.pp)
        return min(batches, wanted)

    @cached_property
    def operations(self) -> list[Timed]:
        """Every operation of the slowest stage, with its seconds on this machine."""
        assert self.clock is not None
        return [
            Timed(name, operation, times, operation.name in again, operation_seconds(operation, self.clock.machine))
            for name, layer, again, times in self.layers()
            for operation in layer
        ]

    def layers(self) -> Iterator[tuple[str, Layer, Recompute, Size]]:
        """The layers that a micro-batch passes on the slowest stage: name, operations, what runs again, how many."""
        assert self.result.time is not None
        stage, memory = self.stages[self.result.time.stage], self.memory
        for key, count in memory.counts(stage, stage.start, stage.stop).items():
            yield self.apart.kind(key), memory.facts[key].layer, memory.facts[key].recompute, count
        if stage.first:
            yield "embedding", memory.embedding, NOTHING, 1
        if stage.last:
            yield "head", memory.head, NOTHING, 1
            if (more := memory.prediction) is not None:
                block = memory.facts[more.key]
                yield "multi-token prediction", block.layer, block.recompute, more.modules
                for end in more.ends:
                    yield "multi-token prediction", end, NOTHING, more.modules


def shared_out(total: float, weights: list[Size]) -> list[float]:
    """A total shared out by weights; whole numbers stay whole, and the shares add up to the total.

    >>> shared_out(10, [1, 1, 1]), shared_out(0, [])
    ([3, 3, 4], [])
    """
    whole = sum(weights)
    if not whole:
        return [0 for _ in weights]
    shares: list[float] = []
    seen: Size = 0
    done: float = 0
    for weight in weights:
        seen = seen + weight
        exact = isinstance(total, int) and isinstance(seen, int) and isinstance(whole, int)
        upto = total * seen // whole if exact else total * (seen / whole)
        shares.append(upto - done)
        done = upto
    return shares
