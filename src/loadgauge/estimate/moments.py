"""The moments of a step on one rank of a pipeline stage: what is alive at each of them, part by part.

The forward of the last layer of each kind, which finds the activations of all before it; the loss; the backward of a
layer of each kind (the last one comes first and finds the most activations, the first one finds the most gradients);
the embedding's backward; the optimizer step. On a stage of several chunks, for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from loadgauge.algebra import Size, where
from loadgauge.estimate.flight import Work, heaviest
from loadgauge.estimate.stages import Chunk, Key, Stage
from loadgauge.estimate.states import RankWeights

if TYPE_CHECKING:
    from loadgauge.estimate.memory import ChunkBytes, MemoryModel, Prediction
PARTS = ("weights", "gradients", "optimizer", "gathered", "activations", "loss", "transient", "outside")


class Phase(StrEnum):
    """What a rank does at a moment of the step."""

    FORWARD = "forward"
    LOSS = "loss"
    """The head, forward or backward."""
    PREDICTION = "prediction"
    """The backward of a multi-token prediction module's block, when the heads are done."""
    BACKWARD = "backward"
    EMBEDDING = "embedding"
    """The backward of the embedding."""
    STEP = "step"
    """The optimizer step."""

    @property
    def at_head(self) -> bool:
        """Whether the layers of this micro-batch have not begun their backward."""
        return self in (Phase.LOSS, Phase.PREDICTION)


class Moment(msgspec.Struct, frozen=True):
    """Bytes by part at one moment of the step. name: its phase and layer, in words, which nothing depends on.

    position: the layer in backward, where the moment is one's; work: what the stage does; key: the kind of layer at work
    gone: layers of its chunk that this micro-batch has not come to yet, or that its backward is through with
    """

    name: str
    phase: Phase
    parts: dict[str, Size]
    position: int | None = None
    work: Work | None = None
    key: Key | None = None
    gone: dict[Key, int] = {}

    @property
    def total(self) -> Size:
        """All parts."""
        return sum(self.parts.values())


class StageAtWork:
    """One rank of a stage, while it runs forward or backward of one of its chunks."""

    def __init__(self, memory: MemoryModel, stage: Stage) -> None:
        self.memory, self.stage = memory, stage
        self.layout = memory.layout
        self.ends, self.weights, self.states, self.head_gradients, self.pending = memory.weighed(stage)
        self.accumulating = self.layout.num_microbatches > 1
        self.chunks = [memory.of_chunk(stage, chunk) for chunk in stage.chunks]
        self.alike, self.around = memory.make_up(stage), memory.around(stage)
        self.works = heaviest(self.layout, stage.index, self.alike)

    def moments(self) -> Iterator[Moment]:
        """All of them, in the order in which a micro-batch comes to them."""
        forwards, backwards = self.fullest(True), self.fullest(False)
        for work in forwards:
            for key, position in self.memory.positions(self.stage, self.chunk(work), "last"):
                yield self.forward(work, key, position)
        # The head runs backward as soon as it has run forward; a split backward may find more that waits.
        ways = (True, False) if self.layout.splits_backward else (True,)
        at_head = [work for work in self.works if self.chunk(work).last and work.forward in ways]
        if at_head:
            yield self.at_loss(max(at_head, key=self.nbytes))
            if self.memory.prediction is not None:
                yield from (self.predicted(work, self.memory.prediction) for work in backwards if self.chunk(work).last)
        for order in ("last", "first") if self.memory.lazy or self.layout.splits_backward else ("last",):
            for work in reversed(backwards):
                for key, position in self.memory.positions(self.stage, self.chunk(work), order):
                    yield self.backward(work, key, position, order)
        for work in backwards:
            if self.chunk(work).first:
                yield self.at_embedding(work)
        yield self.at_step()

    def chunk(self, work: Work) -> Chunk:
        """The chunk that some work is on."""
        return self.stage.chunks[work.chunk]

    def fullest(self, forward: bool) -> list[Work]:
        """The forwards (or backwards) that find the most, one for all chunks with the same layers."""
        best: dict[object, Work] = {}
        for work in self.works:
            if work.forward == forward:
                like = self.alike[work.chunk], work.splits
                best[like] = max(best[like], work, key=self.nbytes) if like in best else work
        return sorted(best.values(), key=lambda work: work.chunk)

    def nbytes(self, work: Work) -> Size:
        """Bytes of all that is in flight."""
        folded = self.folded(work)
        return sum(n * (one.kept + one.head) + waits * (one.waiting + one.head_waiting) for one, n, waits, _ in folded)

    def folded(self, work: Work) -> list[tuple[ChunkBytes, Size, Size, int]]:
        """For chunks of the same layers together: what one keeps, micro-batches in flight, those that wait, and whether
        the work is on one of them.
        """
        found: dict[object, tuple[ChunkBytes, Size, Size, int]] = {}
        for index, (alike, one, whole, waits) in enumerate(zip(self.alike, self.chunks, *work.flight, strict=True)):
            own = int(index == work.chunk)
            if alike in found:
                _, before, waited, at_work = found[alike]
                whole, waits, own = before + whole, waited + waits, at_work + own
            found[alike] = one, whole, waits, own
        return list(found.values())

    # -- what a moment is made of -------------------------------------------------------------------------------------

    def at(self, name: str, phase: Phase, work: Work | None = None, **parts: Size) -> Moment:
        """A moment with these parts beside the model states."""
        every: dict[str, Size] = dict.fromkeys(PARTS, 0)
        every.update((part, getattr(self.states, part)) for part in ("weights", "gradients", "optimizer"))
        every.update(parts)
        every.update(dict.fromkeys(self.memory.offloaded, 0))
        return Moment(name, phase, every, work=work)

    def gradients(self, grown: Size, unsummed: Size = 0) -> Size:
        """Bytes of gradients where `grown` are those of this backward so far, `unsummed` not added to the rest yet."""
        if not self.memory.lazy:
            return self.states.gradients
        return where(self.accumulating, self.states.gradients + unsummed, grown)

    def held(self, work: Work, gone: dict[Key, int], *, at_head: bool = False) -> dict[str, Size]:
        """All that is in flight, less what the layers `gone` do not hold of the micro-batch at work."""
        kept: Size = -self.memory.kept(gone)
        if work.splits:
            kept = kept + self.memory.waiting(gone)
        extra = self.memory.prediction
        if extra is not None and self.chunk(work).last and not at_head:
            kept = kept - extra.kept + (extra.waiting if work.splits else 0)
        loss: Size = 0
        for one, whole, waits, own in self.folded(work):
            behind = waits + own * int(work.splits and not at_head)
            kept = kept + whole * one.kept + waits * one.waiting
            loss = loss + (whole - own) * one.head + behind * one.head_waiting
        return {"activations": kept, "loss": loss}

    def name(self, verb: str, order: str, work: Work, position: int) -> str:
        """What to call the forward or backward of a layer."""
        if len(self.chunks) > 1:
            return f"{verb} of the {order} layer of the stage's chunk {work.chunk}"
        return f"{verb} of layer {position}" if self.layout.pp == 1 else f"{verb} of the stage's {order} layer"

    # -- the moments --------------------------------------------------------------------------------------------------

    def forward(self, work: Work, key: Key, position: int) -> Moment:
        """The forward of the last layer of a kind: all before it have kept what they keep."""
        memory, facts = self.memory, self.memory.facts[key]
        ahead = memory.counts(self.stage, position + 1, self.chunk(work).stop)
        found = self.at(
            self.name("forward", "last", work, position),
            Phase.FORWARD,
            work,
            gradients=self.gradients(0),
            gathered=memory.gathered(self.weights, self.ends, None),
            transient=facts.forming - facts.kept + self.around,
            **self.held(work, ahead),
        )
        return msgspec.structs.replace(found, key=key, gone=ahead)

    def at_loss(self, work: Work) -> Moment:
        """The head, forward or backward, for one micro-batch."""
        held, extra = self.held(work, {}, at_head=True), self.memory.prediction
        return self.at(
            "loss",
            Phase.LOSS,
            work,
            gradients=self.gradients(0),
            gathered=self.memory.gathered(self.weights, self.ends, None),
            activations=held["activations"],
            loss=held["loss"] + self.memory.head_working + (0 if extra is None else extra.head),
        )

    def predicted(self, work: Work, extra: Prediction) -> Moment:
        """The backward of a multi-token prediction module's block, when the heads are done."""
        facts = self.memory.facts[extra.key]
        held = self.held(work, {}, at_head=True)
        left = self.chunks[work.chunk].head_waiting if work.splits else 0
        found = self.at(
            "backward of multi-token prediction",
            Phase.PREDICTION,
            work,
            gradients=self.gradients(self.head_gradients, self.pending),
            gathered=self.memory.gathered(self.weights, self.ends, facts.weights),
            transient=facts.working - facts.kept,
            activations=held["activations"],
            loss=held["loss"] + left,
        )
        return msgspec.structs.replace(found, key=extra.key)

    def backward(self, work: Work, key: Key, position: int, order: str) -> Moment:
        """The backward of the last (or first) layer of a kind: those behind it have given back what they kept."""
        memory, facts, stop = self.memory, self.memory.facts[key], self.chunk(work).stop
        behind = memory.counts(self.stage, position + 1, stop)
        grown: Size = 0
        if memory.lazy:
            done = memory.weights(behind) + memory.weights(memory.counts(self.stage, stop, self.stage.stop))
            grown = self.head_gradients + memory.states(done).gradients
        transient = facts.working - facts.kept
        group = self.layout.recompute.group
        if key[1] and group > 1:
            transient = transient + (min(group, self.stage.stop - self.stage.start) - 1) * facts.layer.saved()
        found = self.at(
            self.name("backward", order, work, position),
            Phase.BACKWARD,
            work,
            gradients=self.gradients(grown, self.pending),
            gathered=memory.gathered(self.weights, self.ends, facts.weights),
            transient=transient,
            **self.held(work, behind),
        )
        return msgspec.structs.replace(found, position=position, key=key, gone=behind)

    def at_embedding(self, work: Work) -> Moment:
        """The backward of the embedding, when the layers behind it are done."""
        memory, chunk = self.memory, self.chunk(work)
        counts = memory.counts(self.stage, chunk.start, chunk.stop)
        # Beside the token table's gradient stand a new one where it is added to or sharded, and of a tied table
        # the head's part and the sum of both.
        table = RankWeights.of(memory.embedding.operations[0].weights).all.trainable
        new = 1 if self.layout.zero >= 2 or not memory.lazy else where(self.accumulating, 1, 0)
        copies = new + (2 if memory.lazy and any(operation.borrows for operation in memory.head) else 0)
        precision = memory.training.precision
        itemsize = precision.compute if self.layout.zero == 3 else precision.weight
        found = self.at(
            "backward of the embedding",
            Phase.EMBEDDING,
            work,
            gathered=memory.gathered(self.weights, self.ends, None),
            transient=copies * itemsize * table + memory.embedding.operations[-1].outputs[0].nbytes,
            **self.held(work, counts),
        )
        return msgspec.structs.replace(found, gone=counts)

    def at_step(self) -> Moment:
        """The optimizer step, when nothing is in flight."""
        transient = self.memory.step_transient(self.weights, self.states)
        return self.at("optimizer step", Phase.STEP, transient=transient)
