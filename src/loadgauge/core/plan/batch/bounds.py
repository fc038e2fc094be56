"""Lower bounds of the time and the memory of many layouts from sizes alone, before their pipelines are looked at.

Seconds: all layers, the embedding and the head are computed, with their own collectives, and the slowest stage takes no
less than stages do on average. Bytes: the first stage holds its states and what its micro-batches in flight keep; the last
one its states, one micro-batch and the head. What is left out (gathered copies, working sets, bubbles, traffic of gradients)
is never negative.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import msgspec

from loadgauge.core.base.algebra import Size, maximum, minimum
from loadgauge.core.definitions.layout.layout import RecomputePolicy, Schedule
from loadgauge.core.estimate.memory.rank_memory import LayerFacts
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.estimate.states.gathered import at
from loadgauge.core.estimate.states.states import RankWeights
from loadgauge.core.estimate.time.contention import NOTHING, Links
from loadgauge.core.estimate.time.step import MicroBatch, StepModel
from loadgauge.core.estimate.time.traffic import exchange
from loadgauge.core.layers.operations.operations import Layer
from loadgauge.core.plan.batch.memory import STATES, ArrayMemory
from loadgauge.core.plan.batch.step_time import ArrayStep

May: TypeAlias = Callable[[Any, Any], Any]
"""From lower bounds of memory [bytes] and step time [s] to a mask: which layouts may be among those that are sought."""
ROUNDING = 1 - 1e-9


class LeastStep(ArrayStep):
    """The part of a step model that is the same for all pipelines, and what weights take that are gathered again and again.

    sharded: the least seconds to gather the weights of a layer and to reduce their gradients, with any number of replicas; None
    where they are not gathered
    """

    sharded: Callable[[StepModel, RankWeights], tuple[Size, Size]] | None = None

    def of_layer(self, facts: LayerFacts) -> MicroBatch:
        """Return the time of a layer with what of ZeRO-3's traffic cannot hide, without what travels to the host [s]."""
        time = self.computed(facts)
        if self.sharded is not None:
            gather, scatter = self.sharded(self, facts.weights)
            if not exchange(self.layout, self.training).after:
                time.forward["zero"] = maximum(gather - sum(time.forward.values()), 0)
            time.backward["zero"] = maximum(gather + scatter - sum(time.backward.values()), 0)
        return time

    def on_network(self, *_: Any) -> Links:
        """Return nothing: a bound leaves out what collectives meet of one another."""
        return NOTHING

    def of_end(self, layer: Layer) -> MicroBatch:
        """Return the time of an end without gathers [s]."""
        return self.computed_end(layer)[0]

    def work(self, whole: Stage) -> Work:
        """The least seconds of one micro-batch on all stages together, and of its parts. whole: has the whole model"""
        step: ArrayStep = self
        policy = self.layout.recompute
        if policy.layers is not None or policy.every > 1:  # which layers these are, depends on the stage
            memory = self.memory.under(msgspec.structs.replace(self.layout, recompute=RecomputePolicy()))
            memory._counts = {}
            step = self.under(memory, None)
        layers = [_seconds(step.layers[key]) for key in step.memory.counts(whole, whole.start, whole.stop)]
        return Work(
            _seconds(step.of_chunk(whole, whole.chunks[0])), functools.reduce(minimum, layers), _seconds(step.head)
        )


class Work(NamedTuple):
    """Least seconds of one micro-batch, forward and backward: of everything, of the quickest layer, of the head."""

    whole: Size
    layer: Size
    head: Size


def _seconds(micro: MicroBatch) -> Size:
    return (sum(micro.forward.values()) + sum(micro.backward.values())) * ROUNDING


class Filling(NamedTuple):
    """Layers of the last stage, and of all first chunks before it, that a micro-batch passes; the same of the stage before."""

    last: int = 0
    ahead: int = 0
    before: int = 0
    further: int = 0

    @classmethod
    def of(cls, every: list[Stage], schedule: Schedule) -> Filling:
        """Count the layers of a pipeline's stages; none where a schedule has an order of its own."""
        if schedule not in ("1f1b", "gpipe", "interleaved") or len(every) < 2:
            return cls()
        ahead = [stage.chunks[0].stop - stage.chunks[0].start for stage in every]
        own = [stage.stop - stage.start for stage in every[-2:]]
        return cls(own[1], sum(ahead[:-1]), own[0], sum(ahead[:-2]))

    def seconds(self, batches: Any, layer: Any, head: Any) -> Any:
        """A lower bound of a pipeline's seconds: a stage works on all micro-batches once the first one has come to it."""
        import numpy

        last = (batches * self.last + self.ahead) * layer + batches * (head if self.last else 0)
        return numpy.maximum(last, (batches * self.before + self.further) * layer)


def least_bytes(memory: ArrayMemory, stage: Stage, schedule: Schedule) -> Iterator[tuple[Size, Size]]:
    """Yield the least bytes of the states of the first stage, or of the last, and of what else it holds at the same time.

    Interleaved, each chunk of the first stage has as many micro-batches in flight as the stage has under 1F1B.
    """
    layout, states = memory.layout, memory.weighed(stage)[2]
    lasting = STATES[:3] if not memory.frees_gradients else ("weights", "optimizer")
    own = sum(getattr(states, part) for part in lasting if part not in memory.offloaded)
    if schedule not in ("1f1b", "gpipe", "interleaved") or not memory.embedding_trained or stage.start == stage.stop:
        yield own, 0
        return
    # When the last layer runs backward, everything is held that the stage keeps; at the loss, the head comes to it.
    flight = layout.num_microbatches if schedule == "gpipe" else minimum(layout.num_microbatches, layout.pp)
    counts = memory.counts(stage, stage.start, stage.stop)
    kept = memory.of_layers(counts).kept
    working = functools.reduce(minimum, (memory.facts[key].working - memory.facts[key].kept for key in counts))
    gathered = memory.gathered(stage, at(memory, stage, "backward", stage.stop - 1)) if layout.zero == 3 else 0
    yield own + gathered, (kept if stage.last else flight * kept) + working
    if stage.last:
        yield own, kept + memory.head_working
