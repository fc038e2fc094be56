"""Lower bounds of the time and the memory of many layouts from sizes alone, before their pipelines are looked at.

Seconds: all layers, the embedding and the head are computed, with their own collectives, and the slowest stage takes no
less than stages do on average. Bytes: the first stage holds its states and what its micro-batches in flight keep; the last
one its states, one micro-batch and the head. What is left out (gathered copies, working sets, bubbles, traffic of gradients)
is never negative.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base.algebra import Size, maximum, minimum
from loadgauge.core.definitions.layout.layout import RecomputePolicy, Schedule
from loadgauge.core.estimate.memory.rank_memory import LayerFacts
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.estimate.states import gathered as copied
from loadgauge.core.estimate.states.optimizer_step import on_card
from loadgauge.core.estimate.states.states import RankWeights
from loadgauge.core.estimate.time.contention import NOTHING, Links
from loadgauge.core.estimate.time.step import MicroBatch, StepModel
from loadgauge.core.estimate.time.traffic import exchange
from loadgauge.core.layers.operations.operations import Layer
from loadgauge.core.plan.batch.memory import STATES, ArrayMemory
from loadgauge.core.plan.batch.step_time import ArrayStep

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
        layers: dict[int, Size] = {}
        for key in step.memory.counts(whole, whole.start, whole.stop):
            time = _seconds(step.layers[key])
            layers[key[0]] = minimum(layers.get(key[0], time), time)
        ordered = tuple(layers[kind] for kind in sorted(layers))
        return Work(_seconds(step.of_chunk(whole, whole.chunks[0])), ordered, _seconds(step.head))


class Work(NamedTuple):
    """Least seconds of one micro-batch, forward and backward: of everything, of a layer of each kind, of the head."""

    whole: Size
    layers: tuple[Size, ...]
    head: Size


def _seconds(micro: MicroBatch) -> Size:
    return (sum(micro.forward.values()) + sum(micro.backward.values())) * ROUNDING


class Filling(NamedTuple):
    """Layers of each kind on the last stage, and in the first chunks before it, that a micro-batch passes; of the stage before.

    chunks: of a stage, and the fewest layers of one on the first stage; None where a schedule has an order of its own
    """

    last: tuple[int, ...]
    ahead: tuple[int, ...]
    before: tuple[int, ...]
    further: tuple[int, ...]
    chunks: int = 1
    fewest: int = 0

    @classmethod
    def of(cls, every: tuple[Stage, ...], schedule: Schedule, blocks: Sequence[int]) -> Filling | None:
        """Count the layers of a pipeline's stages. blocks: the kinds of the model's layers"""
        if schedule not in ("1f1b", "gpipe", "interleaved") or len(every) < 2:
            return None

        def counted(patterns: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
            each = list(itertools.chain.from_iterable(patterns))
            return tuple(each.count(kind) for kind in blocks)

        firsts = [stage.pattern[: stage.chunks[0].stop - stage.chunks[0].start] for stage in every]
        last, before = counted([every[-1].pattern]), counted([every[-2].pattern])
        fewest = min(chunk.stop - chunk.start for chunk in every[0].chunks)
        return cls(last, counted(firsts[:-1]), before, counted(firsts[:-2]), len(every[0].chunks), fewest)

    def least(self, other: Filling | None) -> Filling:
        """The fewest layers of both."""
        if other is None:
            return self
        last, ahead, before, further = (tuple(map(min, *both)) for both in zip(self[:4], other[:4], strict=True))
        return Filling(last, ahead, before, further)

    def seconds(self, batches: Any, layers: Any, head: Any) -> Any:
        """A lower bound of a pipeline's seconds: a stage works on all micro-batches once the first one has come to it.

        layers: of each kind [layouts, kinds]
        """
        import numpy

        last, ahead, before, further = (layers @ numpy.array(counts) for counts in self[:4])
        return numpy.maximum(batches * (last + head) + ahead, batches * before + further)

    def nbytes(self, batches: Any, stages: int, kept: Any) -> Any:
        """Least bytes of the first stage beyond those of as many micro-batches as there are stages, on each of its chunks.

        Interleaved, (vpp + 1) x pp - 1 chunks are in flight when the first backward runs. kept: by the leanest layer
        """
        import numpy

        flight = numpy.minimum(self.chunks * batches, (self.chunks + 1) * stages - 1)
        more = flight - self.chunks * numpy.minimum(batches, stages)
        return numpy.maximum(more, 0) * self.fewest * kept if self.chunks > 1 else 0.0


def least_kept(memory: ArrayMemory, stages: Iterable[Stage]) -> Size:
    """Bytes that a micro-batch keeps on the leanest layer of some stages."""
    keys = {key for stage in stages for key in memory.counts(stage, stage.start, stage.stop)}
    if not keys or not memory.embedding_trained or memory.layout.recompute.group > 1:
        return 0
    return functools.reduce(minimum, (memory.facts[key].kept for key in keys))


def least_bytes(memory: ArrayMemory, stage: Stage, schedule: Schedule) -> Iterator[tuple[Size, Size]]:
    """Yield the least bytes of the states of the first stage, or of the last, and of what else it holds at the same time.

    Interleaved, each chunk of the first stage has as many micro-batches in flight as the stage has under 1F1B.
    """
    layout, states = memory.layout, memory.weighed(stage)[2]
    lasting = STATES[:3] if not memory.frees_gradients else ("weights", "optimizer")
    left = on_card(memory, stage)
    own = sum(left.get(part, getattr(states, part)) for part in lasting)
    if schedule not in ("1f1b", "gpipe", "interleaved") or not memory.embedding_trained or stage.start == stage.stop:
        yield own, 0
        return
    # When the last layer runs backward, everything is held that the stage keeps; at the loss, the head comes to it.
    flight = layout.num_microbatches if schedule == "gpipe" else minimum(layout.num_microbatches, layout.pp)
    counts = memory.counts(stage, stage.start, stage.stop)
    kept = memory.of_layers(counts).kept
    lasts = {memory.key(stage, chunk.stop - 1) for chunk in stage.chunks if chunk.stop > chunk.start}
    working = functools.reduce(minimum, (memory.facts[key].working - memory.facts[key].kept for key in lasts))
    gathered = memory.gathered(stage, copied.at(memory, stage, "backward", stage.stop - 1)) if layout.zero == 3 else 0
    yield own + gathered, (kept if stage.last else flight * kept) + working
    if stage.last:
        yield own, kept + memory.head_working
