"""The memory of a stage for many layouts at once: `estimate.memory` and `estimate.moments` with open arrays.

A moment's bytes are those of the states, which depend on ZeRO and the replicas and not on the micro-batch, and the rest,
which is the other way round. So the rest is worked out once for all ZeRO stages (where the framework's gradients exist
from the start), and the two are added up where a layout is.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any, NamedTuple

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.optimizers import NO_TEMPORARIES
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.memory.in_flight import Work, works
from loadgauge.core.estimate.memory.phases import PARTS, Moment, StageAtWork
from loadgauge.core.estimate.memory.points import At
from loadgauge.core.estimate.memory.rank_memory import ChunkBytes, MemoryModel
from loadgauge.core.estimate.schedule.stages import Chunk, Key, Stage
from loadgauge.core.estimate.states import gathered as copied, pools
from loadgauge.core.estimate.states.optimizer_step import on_card
from loadgauge.core.estimate.states.states import RankWeights, States
from loadgauge.core.layers import View
from loadgauge.core.layers.operations.operations import Layer
from loadgauge.core.plan.batch.memo import ByIdentity, Memo

STATES = ("weights", "gradients", "optimizer", "gathered")
"""Parts that depend on ZeRO, and not on what is in flight."""
REST = tuple(part for part in PARTS if part not in STATES)


class SomeBatches(Layout, frozen=True, kw_only=True):
    """Layouts with one number of micro-batches, for orders of work that need a whole number."""

    batches: int = 1

    @property
    def num_microbatches(self) -> Size:
        """Micro-batches each pipeline runs in one step."""
        return self.batches

    @classmethod
    def of(cls, layout: Layout, batches: int) -> SomeBatches:
        """Return the same array layouts with `batches` micro-batches."""
        return cls(**{name: getattr(layout, name) for name in Layout.__struct_fields__}, batches=batches)


class Later(NamedTuple):
    """A placeholder for what is gathered at a point of the step, computed later for each ZeRO stage."""

    point: At


class ArrayMemory(MemoryModel):
    """`MemoryModel` of many layouts; what several structures need is computed once.

    operations: those of the model's parts; shared_bytes: what depends on the facts of the layers alone; weighing: on
    the pipeline and the ZeRO stage; growing: on the weights of some layers alone, whatever of them is computed again
    later: whether the states are left for each ZeRO stage to add
    """

    later = False

    def __init__(self, model: ModelSpec, layout: Layout, training: Training, view: View, operations: Memo) -> None:
        self.operations = operations
        self.shared_bytes = Memo()
        self.weighing, self.growing = Memo(), Memo()
        super().__init__(model, layout, training, view)

    def under(self, layout: Layout) -> ArrayMemory:
        """This model for another layout of the same structure."""
        other = copy.copy(self)
        other.layout, other._weighed = layout, {}
        if (layout.zero == 3) != (self.layout.zero == 3):
            other.placeholders = other._placeholders()
        return other

    @property
    def sharded(self) -> Any:
        """Return whether ZeRO shards over several ranks; layouts with ZeRO over one rank are not valid in a search."""
        return True if self.layout.zero else super().sharded

    @property
    def shares(self) -> bool:
        """Return whether everything except states is the same for all ZeRO stages."""
        training, precision = self.training, self.training.precision
        apart = self.lazy or training.optimizer.step != NO_TEMPORARIES or training.framework.engine is not None
        counted = training.framework.fully_shards and training.framework.stack == "fine-tuning"
        return not (apart or counted) and precision.compute == precision.weight

    def produced(self, *counts: dict[Key, int]) -> Size:
        """Bytes of gradients of some layers, once for all recomputation policies."""
        key = tuple(tuple(some.items()) for some in counts)
        return self.growing.once(key, super().produced, *counts)

    def block_layers(self) -> tuple[Layer, ...]:
        """The operations of each of the model's blocks."""
        return self.operations.once("blocks", super().block_layers)

    def end_layers(self) -> tuple[Layer, Layer]:
        """The operations of the embedding and of the head."""
        return self.operations.once(("ends", self.layout.ends_together), super().end_layers)

    def of_chunk(self, stage: Stage, chunk: Chunk) -> ChunkBytes:
        """Return the bytes that one micro-batch keeps on a chunk."""
        key = "chunk", chunk.first, chunk.last, tuple(self.counts(stage, chunk.start, chunk.stop).items())
        return self.shared_bytes.once(key, super().of_chunk, stage, chunk)

    def make_up(self, stage: Stage) -> tuple[object, ...]:
        """A key for each chunk of a stage, equal for chunks with the same layers."""
        return _make_up(self.layout.recompute, stage)

    def around(self, stage: Stage) -> Size:
        """Memory that the model's forward holds while its layers run, besides what they keep [bytes]."""
        key = "around", stage.first, stage.start == stage.stop or stage.kind(stage.start)
        return self.shared_bytes.once(key, super().around, stage)

    def weighed(self, stage: Stage) -> tuple[RankWeights, RankWeights, States, Size, Size]:
        """Weights and states of the stage, computed once for all recomputation policies."""
        if self.later:
            return RankWeights(), RankWeights(), States(0, 0, 0), 0, 0
        memo, key = self.weighing, weights_key(stage)
        if self.lazy:  # what is gathered of its layers depends on what is computed again, which weights do not
            memo = self.growing
            key = (
                stage.first,
                stage.last,
                self.layout.ends_together,
                *self.counts(stage, stage.start, stage.stop).items(),
            )
        return memo.once(("weighed", key), super().weighed, stage)

    def gathered(self, stage: Stage, point: At) -> Size:
        """Gathered and cast copies of weights and gradients at a point of the step [bytes]."""
        if self.later:
            return Later(point)
        key = "gathered", weights_key(stage), point
        return self.weighing.once(key, lambda: sum(copied.copies(self, stage, point).values()))

    def states_at(self, stage: Stage, point: At) -> Size:
        """All states of a stage on the device, with what is gathered at a point of the step [bytes]."""

        def make() -> Size:
            states, left = self.weighed(stage)[2], on_card(self, stage)
            parts = [left.get(part, getattr(states, part)) for part in STATES[:3]]
            return sum(parts) + self.gathered(stage, point)

        return self.weighing.once(("states", weights_key(stage), point), make)


def weights_key(stage: Stage) -> tuple[object, ...]:
    """A key that is equal for stages with the same weights."""
    return stage.first, stage.last, *((kind, stage.pattern.count(kind)) for kind in sorted(set(stage.pattern)))


@lru_cache(maxsize=8192)
def _make_up(policy: RecomputePolicy, stage: Stage) -> tuple[object, ...]:
    return tuple(
        (chunk.first, chunk.last, tuple(stage.counts(policy, chunk.start, chunk.stop).items()))
        for chunk in stage.chunks
    )


class Choice(NamedTuple):
    """Layouts whose peak is at the same work: their mask, and the bytes in flight of each work at one of them."""

    mask: Any
    nbytes: dict[ByIdentity, float]


class ArrayStage(StageAtWork):
    """A stage of many layouts. The work with the most in flight may differ between them; each `Choice` is evaluated in turn."""

    memory: ArrayMemory
    chosen: Choice | None = None

    def choices(self) -> list[Choice]:
        """Group the layouts by which work has the most in flight."""
        import numpy

        if self.layout.schedule in ("1f1b", "gpipe"):
            return [Choice(True, {})]
        groups: dict[object, list[int]] = {}
        ways = (True, False) if self.layout.splits_backward else (True,)
        for number, work in enumerate(self.works):
            groups.setdefault((work.forward, self.alike[work.chunk], work.splits), []).append(number)
            if self.chunk(work).last and work.forward in ways:
                groups.setdefault("head", []).append(number)
        several = [numbers for numbers in groups.values() if len(numbers) > 1]
        if not several:
            return [Choice(True, {})]
        every = sorted({number for numbers in several for number in numbers})
        arrays = numpy.broadcast_arrays(*(StageAtWork.nbytes(self, self.works[number]) for number in every))
        sizes = dict(zip(every, arrays, strict=True))
        picks = numpy.stack([numpy.argmax(numpy.stack([sizes[n] for n in numbers]), axis=0) for numbers in several])
        flat = picks.reshape(len(several), -1)
        if (flat == flat[:, :1]).all():
            return [Choice(True, {ByIdentity(self.works[n]): float(sizes[n].reshape(-1)[0]) for n in every})]
        _, index, inverse = numpy.unique(flat, axis=1, return_index=True, return_inverse=True)
        inverse = inverse.reshape(picks.shape[1:])
        return [
            Choice(inverse == number, {ByIdentity(self.works[n]): float(sizes[n].reshape(-1)[index_of]) for n in every})
            for number, index_of in enumerate(index)
        ]

    def gathered(self, point: At) -> Size:
        """Return the gathered copies of `StageAtWork` [bytes], computed once for stages with the same weights."""
        return self.memory.gathered(self.stage, point)

    def nbytes(self, work: Work) -> Size:
        """Memory in flight at one layout of the current choice [bytes]; -1 for works that are never its peak."""
        return -1.0 if self.chosen is None else self.chosen.nbytes.get(ByIdentity(work), -1.0)


class Peak(NamedTuple):
    """The most that phases with the same states hold besides them [bytes]; -infinity for layouts without these phases.

    states: bytes of the states, or where to work them out: a stage and a point of the step
    """

    states: Any
    rest: Any


def peaks(memory: ArrayMemory, kept: list[Stage]) -> dict[object, Peak]:
    """Return the phases of these stages merged by their states: for each key of states one `Peak`.

    Where other pools are counted, their most is part of each phase instead of what it holds in them.
    """
    import numpy

    merged: dict[object, Peak] = {}
    for stage in kept:
        at_work = ArrayStage(memory, stage)
        for chosen in at_work.choices():
            at_work.chosen = chosen
            moments = list(at_work.moments())
            for moment, further in zip(moments, pools.further(at_work, moments), strict=True):
                if memory.later and not isinstance(moment.parts["gathered"], Later):
                    continue  # the optimizer step, which then finds nothing but the states
                rest = sum(moment.parts[part] for part in REST) + further
                if chosen.mask is not True:
                    rest = numpy.where(chosen.mask, rest, -numpy.inf)
                key, states = _states(moment, stage)
                if key in merged:
                    merged[key] = Peak(merged[key].states, numpy.maximum(merged[key].rest, rest))
                else:
                    merged[key] = Peak(states, rest)
    return merged


def _states(moment: Moment, stage: Stage) -> tuple[object, Any]:
    """A name for the states of a moment, and these."""
    gathered = moment.parts["gathered"]
    if isinstance(gathered, Later):
        return (weights_key(stage), gathered.point), (stage, gathered.point)
    parts = [moment.parts[part] for part in STATES]
    return tuple(ByIdentity(part) if hasattr(part, "shape") else part for part in parts), (sum(parts),)


def without_layers(peaks_by_states: dict[object, Peak]) -> dict[object, Peak]:
    """Merge peaks for ZeRO stages that gather nothing layer by layer, where more phases share their states."""
    import numpy

    both: dict[object, Peak] = {}
    for peak in peaks_by_states.values():
        weights = weights_key(peak.states[0])
        before = both.get(weights)
        rest = peak.rest if before is None else numpy.maximum(before.rest, peak.rest)
        both[weights] = Peak((peak.states[0], At()), rest)
    return both


def joined(first: dict[object, Peak], second: dict[object, Peak], mask: Any) -> dict[object, Peak]:
    """Join the peaks of two groups of layouts: `second` where the mask is true, `first` elsewhere."""
    import numpy

    nothing = -numpy.inf
    both = {key: Peak(peak.states, numpy.where(mask, nothing, peak.rest)) for key, peak in first.items()}
    for key, other in second.items():
        before = first[key].rest if key in first else nothing
        both[key] = Peak(other.states, numpy.where(mask, other.rest, before))
    return both


def fullest(memory: MemoryModel, every: tuple[Stage, ...]) -> list[Stage]:
    """Drop stages that hold no more in flight than another stage with the same chunks."""
    alike: dict[object, list[Stage]] = {}
    for stage in every:
        alike.setdefault(memory.make_up(stage), []).append(stage)
    layout = memory.layout
    if layout.schedule in ("1f1b", "gpipe", "interleaved"):
        return [same[0] for same in alike.values()]  # a later stage holds no more micro-batches
    kept = []
    for same in alike.values():
        numbers = _fullest(
            layout.schedule, layout.pp, int(layout.num_microbatches), tuple(s.index for s in same), memory.put_off
        )
        kept += [stage for stage in same if stage.index in numbers]
    return kept


@lru_cache(maxsize=4096)
def _fullest(
    schedule: Any, stages: int, batches: int, indices: tuple[int, ...], put_off: tuple[int, ...]
) -> tuple[int, ...]:
    layout = Layout(pp=stages, schedule=schedule, global_batch=batches, seq_len=1)
    of_stage = {index: works(layout, index, put_off) for index in indices}
    kept: list[int] = []
    for index in indices:
        if not any(_exceeds(of_stage[other], of_stage[index]) for other in kept):
            kept = [other for other in kept if not _exceeds(of_stage[index], of_stage[other])] + [index]
    return tuple(kept)


def _exceeds(these: tuple[Work, ...], those: tuple[Work, ...]) -> bool:
    """Return whether each of those works has one among these that holds as much of everything."""
    return all(
        any(
            mine[:3] == other[:3]
            and all(a >= b for n in (0, 1) for a, b in zip(mine.flight[n], other.flight[n], strict=True))
            for mine in these
        )
        for other in those
    )
