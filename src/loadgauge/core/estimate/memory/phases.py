"""The moments of a step on one rank of a pipeline stage: what is alive at each of them, part by part.

The forward of the last layer of each kind, which finds the activations of all before it; the loss; the backward of a
layer of each kind (the last one comes first and finds the most activations, the first one finds the most gradients);
the embedding's backward; the optimizer step. On a stage of several chunks, for each of them. Under FSDP also the layers
next to the first and the last one, and the reduction of the gradients that are whole until the end of backward.

More recomputation never keeps more, but a stage of few layers may peak a little higher with it: a recomputed layer is
alive whole at once, with its input, while one that is not frees its MLP before its attention runs backward.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base.algebra import Size, maximum, same, where
from loadgauge.core.estimate.memory.in_flight import Work, peak_candidates
from loadgauge.core.estimate.memory.points import At, Pass
from loadgauge.core.estimate.memory.rank_memory import ChunkBytes, MemoryModel, Prediction
from loadgauge.core.estimate.schedule.stages import Chunk, Key, Stage
from loadgauge.core.estimate.states import zero_engine
from loadgauge.core.estimate.states.gathered import at, copies
from loadgauge.core.estimate.states.optimizer_step import away, on_card, step_transient
from loadgauge.core.estimate.states.states import RankWeights
from loadgauge.core.layers.operations.operations import LYING, PIXELS, TYPED

PARTS = ("weights", "gradients", "optimizer", "gathered", "activations", "loss", "transient", "evaluation", "outside")


NO_LAYERS: dict[Key, int] = {}
JOINED = 3
"""Copies of a table's rows that a step with states makes at once: joined ones, their squares, the state's (torch.optim.Adagrad)."""


class Phase(StrEnum):
    """Work of a rank at a moment of the step."""

    FORWARD = "forward"
    LOSS = "loss"
    """The head, forward or backward."""
    PREDICTION = "prediction"
    """The backward of a multi-token prediction module's block, when the heads are done."""
    BACKWARD = "backward"
    EMBEDDING = "embedding"
    """The backward of the embedding."""
    REDUCTION = "reduction"
    """The reduction of the gradients that are whole until the end of backward (FSDP)."""
    CLIP = "clip"
    """Phase between backward and the optimizer step, in which DeepSpeed clips the gradients."""
    STEP = "step"
    """The optimizer step."""
    EVALUATION = "evaluation"
    GENERATION = "generation"
    SAVING = "saving"
    """A checkpoint whose weights are gathered."""
    SETUP = "setup"
    """Weights that are loaded, and sharded as they come."""

    @property
    def between_steps(self) -> bool:
        """Return whether no step is under way."""
        return self in (Phase.EVALUATION, Phase.GENERATION, Phase.SAVING, Phase.SETUP)

    @property
    def at_head(self) -> bool:
        """Return whether the layers of this micro-batch have not begun their backward."""
        return self in (Phase.LOSS, Phase.PREDICTION)


class Moment(msgspec.Struct, frozen=True):
    """Bytes by part at one moment of the step. name: its phase and layer in words, for display only.

    position: the layer in backward, where the moment is one's; work: what the stage does; key: the kind of layer at work
    gone: layers of its chunk that this micro-batch has not reached yet, or whose backward is over
    point: the key of its gathered copies; items: what is held between steps, in words and bytes
    elsewhere: of many layouts at once, those whose moment is at another point (an array of booleans), and that point
    """

    name: str
    phase: Phase
    parts: dict[str, Size]
    position: int | None = None
    work: Work | None = None
    key: Key | None = None
    gone: dict[Key, int] = {}
    point: At | None = None
    items: tuple[tuple[str, Size], ...] = ()
    elsewhere: tuple[Any, At] | None = None

    @property
    def total(self) -> Size:
        """Sum of all parts [bytes]."""
        return sum(self.parts.values())


class Holding(NamedTuple):
    """Bytes kept in some layers of a stage, with the numbers of micro-batches that hold them.

    each: bytes that one micro-batch keeps there; whole: micro-batches between forward and backward; waiting: those that
    wait for the gradients of the weights; heads, heads_waiting: the same of the head; gone: whether this is subtracted
    """

    each: ChunkBytes
    whole: Size
    waiting: Size
    heads: Size = 0
    heads_waiting: Size = 0
    gone: bool = False


class StageAtWork:
    """One rank of a stage: its memory at each moment in which it runs forward or backward of one of its chunks."""

    def __init__(self, memory: MemoryModel, stage: Stage) -> None:
        self.memory, self.stage = memory, stage
        self.layout = memory.layout
        self.ends, self.weights, self.states, self.head_gradients, self.pending = memory.weighed(stage)
        self.accumulating = self.layout.num_microbatches > 1
        self.whole_gradients = memory.training.precision.reduced * self.weights.all.trainable
        self.chunks = [memory.of_chunk(stage, chunk) for chunk in stage.chunks]
        self.alike, self.around = memory.make_up(stage), memory.around(stage)
        self.works = peak_candidates(self.layout, stage.index, self.alike, memory.put_off)
        self.unchanging: dict[str, Size] = dict.fromkeys(PARTS, 0)
        self.unchanging.update(weights=self.states.weights, gradients=self.states.gradients)
        self.unchanging.update(optimizer=self.states.optimizer)
        self.offloaded = on_card(memory, stage)
        self._layers: dict[object, ChunkBytes] = {}
        self._points: dict[tuple[Pass, int | None], At] = {}
        self._copies: dict[At, Size] = {}
        self._positions: dict[tuple[int, int, str], list[tuple[Key, int]]] = {}
        # By the identity of the work, which is kept with the answer so that no other one can take its place.
        self._folded: dict[int, tuple[Work, list[tuple[ChunkBytes, Size, Size, int]]]] = {}

    def moments(self) -> Iterator[Moment]:
        """Yield the moments of a step in the order in which a micro-batch reaches them."""
        forwards, backwards = self.fullest(True), self.fullest(False)
        for work in forwards:
            for layer in self.between(forward=True):
                yield self.forward(work, self.memory.key(self.stage, layer), layer)
            for key, position in self.positions(self.chunk(work), "last"):
                yield self.forward(work, key, position)
        apart = self.memory.ends_apart
        if apart:
            yield from (self.at_embedding_gathered(work) for work in forwards)
        if apart and self.memory.training.lora is None:
            # PEFT's module around the model hides the norm from accelerate: there the head comes after it.
            yield from (self.at_head_gathered(work) for work in forwards)
        # The head runs backward as soon as it has run forward; a split backward may find more that waits.
        ways = (True, False) if self.layout.splits_backward else (True,)
        at_head = [work for work in self.works if self.chunk(work).last and work.forward in ways]
        if at_head:
            yield self.at_loss(max(at_head, key=self.nbytes))
            trains = not same(self.memory.head_trainable, 0)
            if self.memory.engine is not None and self.layout.zero < 3 and trains:
                yield self.at_head_gradient(max(at_head, key=self.nbytes))
            if self.memory.prediction is not None:
                yield from (self.predicted(work, self.memory.prediction) for work in backwards if self.chunk(work).last)
        if apart:
            yield from (self.at_head_reduced(work) for work in backwards)
        ends = ("first", "last") if self.memory.lazy or self.layout.splits_backward else ("last",)
        for work in reversed(backwards):
            reached = {layer: (key, end) for end in ends for key, layer in self.positions(self.chunk(work), end)}
            for layer, (key, end) in sorted(reached.items(), reverse=True):
                yield self.backward(work, key, layer, end)
        if self.memory.fully_sharded and self.layout.pp > 1:
            yield self.at_reduction()
        for work in backwards:
            for layer in self.between(forward=False):
                yield self.backward(work, self.memory.key(self.stage, layer), layer)
            if self.chunk(work).first:
                yield self.at_embedding(work)
                if self.memory.by_layer:
                    yield self.at_ends(work)
        if self.memory.engine is not None:
            yield self.at_clip()
        yield self.at_step()

    def positions(self, chunk: Chunk, order: str) -> list[tuple[Key, int]]:
        """Return kind and position of the last (or first) layer of each kind in a chunk; `order`: "last" or "first"."""
        key = chunk.start, chunk.stop, order
        if key not in self._positions:
            self._positions[key] = list(self.memory.positions(self.stage, chunk, order))
        return self._positions[key]

    def chunk(self, work: Work) -> Chunk:
        """Return the chunk that a piece of work is on."""
        return self.stage.chunks[work.chunk]

    def between(self, *, forward: bool) -> tuple[int, ...]:
        """Return the positions of layers that find other gathered copies than their neighbours, under FSDP layer by layer.

        Forward, the first layer runs alongside the buffer that the embedding and the head were gathered in. Backward, the
        last layer finds no gradient being reduced, and the first one no layer gathered ahead. Of DeepSpeed, the layer at
        which a bucket is full for the first time.
        """
        start, stop = self.stage.start, self.stage.stop
        if self.memory.engine is not None and not forward:
            return zero_engine.first_full(self.memory, self.stage)
        if not self.memory.by_layer or stop - start < 2:
            return ()
        if forward:
            return (start,)
        return tuple(layer for layer in sorted({stop - 2, start + 1}, reverse=True) if start < layer < stop - 1)

    def fullest(self, forward: bool) -> list[Work]:
        """Return the forwards (or backwards) with the most bytes in flight, one for all chunks with the same layers."""
        best: dict[object, Work] = {}
        for work in self.works:
            if work.forward == forward:
                like = self.alike[work.chunk], work.splits
                best[like] = max(best[like], work, key=self.nbytes) if like in best else work
        return sorted(best.values(), key=lambda work: work.chunk)

    def nbytes(self, work: Work) -> Size:
        """Return the bytes of everything in flight at a piece of work."""
        return sum(
            whole * (chunk.kept + chunk.head) + waits * (chunk.waiting + chunk.head_waiting)
            for chunk, whole, waits, _ in self.folded(work)
        )

    def folded(self, work: Work) -> list[tuple[ChunkBytes, Size, Size, int]]:
        """Return a row for each group of chunks with the same layers, for `nbytes` and `holdings`.

        Each row: bytes one micro-batch keeps on one chunk, micro-batches in flight, micro-batches waiting for W, and 1 where the
        work is on one of the chunks, else 0.
        """
        if id(work) in self._folded:
            return self._folded[id(work)][1]
        chunks = self.unfolded(work)
        if len(chunks) > 1:
            sums: dict[object, tuple[ChunkBytes, Size, Size, int]] = {}
            for alike, (chunk, whole, waits, own) in zip(self.alike, chunks, strict=True):
                if alike in sums:
                    _, before, waited, at_work = sums[alike]
                    whole, waits, own = before + whole, waited + waits, at_work + own
                sums[alike] = chunk, whole, waits, own
            chunks = list(sums.values())
        self._folded[id(work)] = work, chunks
        return chunks

    def unfolded(self, work: Work) -> list[tuple[ChunkBytes, Size, Size, int]]:
        """Return the rows of `folded`, one for each chunk."""
        return [
            (chunk, whole, waits, int(index == work.chunk))
            for index, (chunk, whole, waits) in enumerate(zip(self.chunks, *work.flight, strict=True))
        ]

    def holdings(
        self, work: Work, gone: dict[Key, int], *, at_head: bool = False, by_chunk: bool = False
    ) -> Iterator[Holding]:
        """Yield everything in flight, less what the layers `gone` do not hold of the current micro-batch.

        Activations and the head's tensors are the sums over these, in totals and in the ledger alike.
        at_head: the layers of the current micro-batch have not begun their backward; by_chunk: list equal chunks one by one
        """
        splits = int(work.splits)
        if gone:
            layers = tuple(gone.items())
            if layers not in self._layers:
                self._layers[layers] = self.memory.of_layers(gone)
            yield Holding(self._layers[layers], -1, splits, gone=True)
            at_work = self.chunk(work)
            every = sum(gone.values()) == at_work.stop - at_work.start
            if every and (idle := self.memory.idle(self.stage, at_work)):
                yield Holding(ChunkBytes.of(idle), -1, 0, gone=True)
        extra = self.memory.prediction
        if extra is not None and self.chunk(work).last and not at_head:
            yield Holding(ChunkBytes.of((extra.terms,)), -1, splits, gone=True)
        for chunk, whole, waits, own in self.unfolded(work) if by_chunk else self.folded(work):
            yield Holding(chunk, whole, waits, whole - own, waits + (0 if at_head else own * splits))

    # -- what a moment is made of -------------------------------------------------------------------------------------

    def at(
        self,
        name: str,
        phase: Phase,
        work: Work | None = None,
        point: At | None = None,
        *,
        position: int | None = None,
        key: Key | None = None,
        gone: dict[Key, int] = NO_LAYERS,
        elsewhere: tuple[Any, At] | None = None,
        **parts: Size,
    ) -> Moment:
        """Return a moment with the given parts [bytes], the model states, and the copies gathered at `point`."""
        every = self.unchanging.copy()
        if point is not None and "gathered" not in parts:
            every["gathered"] = self.gathered(point)
        every.update(parts)
        if self.memory.engine is not None and point is not None and not phase.between_steps:
            every["gradients"] = sum(zero_engine.gradients(self.memory, self.stage, point).values())
        if self.offloaded and away(self.memory, phase):
            every.update(self.offloaded)
        return Moment(name, phase, every, position, work, key, gone, point, elsewhere=elsewhere)

    def counts(self, start: int, stop: int) -> dict[Key, int]:
        """Return the number of layers of each kind, recomputed or not, in `start:stop` of the stage."""
        return self.memory.counts(self.stage, start, stop)

    def point(self, doing: Pass, position: int | None = None) -> At:
        """Return the point of the step at which a pass finds its copies (see `gathered.at`)."""
        if (doing, position) not in self._points:
            self._points[doing, position] = at(self.memory, self.stage, doing, position)
        return self._points[doing, position]

    def gathered(self, point: At) -> Size:
        """Return the bytes of all gathered copies at a point of the step."""
        if point not in self._copies:
            self._copies[point] = sum(copies(self.memory, self.stage, point).values())
        return self._copies[point]

    def gradients(self, grown: Size, unsummed: Size = 0) -> Size:
        """Return the bytes of gradients alive in a backward.

        grown: of the gradients this backward has produced so far; unsummed: of those not yet added to the accumulated ones
        """
        if not self.memory.lazy or self.memory.training.optimizer.one_block:
            return self.states.gradients
        if self.memory.fully_sharded and self.layout.pp > 1:
            # Shards come with the reduction after the last micro-batch; until then gradients are whole, among the copies.
            grown, unsummed = (where(self.memory.sharded, 0, nbytes) for nbytes in (grown, unsummed))
            whole = where(self.memory.sharded, 0, self.states.gradients)
            return where(self.accumulating, whole + unsummed, grown)
        sharded = where(self.accumulating, self.states.gradients + unsummed, grown)
        if same(self.memory.whole_gradients, False):
            return sharded
        return where(self.memory.whole_gradients, self.whole_gradients, sharded)

    def held(self, work: Work, gone: dict[Key, int], *, at_head: bool = False) -> dict[str, Size]:
        """Return the bytes of `holdings` by part: activations and loss."""
        kept: Size = 0
        loss: Size = 0
        for holding in self.holdings(work, gone, at_head=at_head):
            chunk = holding.each
            kept = kept + holding.whole * chunk.kept + holding.waiting * chunk.waiting
            loss = loss + holding.heads * chunk.head + holding.heads_waiting * chunk.head_waiting
        return {"activations": kept, "loss": loss}

    def name(self, verb: str, order: str, work: Work, position: int) -> str:
        """Return the name of a layer's forward or backward for display."""
        if len(self.chunks) > 1:
            return f"{verb} of the {order} layer of the stage's chunk {work.chunk}"
        own = position - self.memory.model.tower_layers
        if own < 0:
            return f"{verb} of the tower's layer {position}"
        return f"{verb} of layer {own}" if self.layout.pp == 1 else f"{verb} of the stage's {order} layer"

    # -- the moments --------------------------------------------------------------------------------------------------

    def forward(self, work: Work, key: Key, position: int) -> Moment:
        """Return the moment of the forward of the layer at `position`, after all earlier layers kept their tensors."""
        memory, facts, held = self.memory, self.memory.facts[key], self.around
        ahead = self.counts(position + 1, self.chunk(work).stop)
        if 0 < position < memory.model.tower_layers:
            first = memory.facts[memory.key(self.stage, 0)].layer
            held = held + sum(each.outputs[0].nbytes for each in first if each.name.startswith(TYPED))
        return self.at(
            self.name("forward", "last", work, position),
            Phase.FORWARD,
            work,
            self.point("forward", position),
            gradients=self.gradients(0),
            transient=memory.forming(self.stage, position) - facts.kept + held,
            key=key,
            gone=ahead,
            **self.held(work, ahead),
        )

    def at_loss(self, work: Work) -> Moment:
        """Return the moment of the head, forward or backward, whichever holds more, for one micro-batch."""
        memory, in_flight, extra = self.memory, self.held(work, {}, at_head=True), self.memory.prediction
        working, point, parts, elsewhere = memory.head_working, self.point("loss"), {}, None
        if memory.head_apart:
            forward = self.point("head")
            ahead, back = self.gathered(forward), self.gathered(point)
            is_forward = ahead + memory.head_forming > back + memory.head_backward
            working = where(is_forward, memory.head_forming, memory.head_backward)
            parts["gathered"] = where(is_forward, ahead, back)
            point, elsewhere = (forward, None) if is_forward is True else (point, (is_forward, forward))
        return self.at(
            "loss",
            Phase.LOSS,
            work,
            point,
            gradients=self.gradients(0),
            activations=in_flight["activations"],
            loss=in_flight["loss"] + working + (0 if extra is None else extra.head),
            elsewhere=elsewhere,
            **parts,
        )

    def at_embedding_gathered(self, work: Work) -> Moment:
        """Return the moment at which an embedding that FSDP shards by itself is gathered, before all layers."""
        output = self.memory.embedding.operations[-1].outputs[0].nbytes
        chunk = self.chunk(work)
        counts = self.counts(chunk.start, chunk.stop)
        return self.at(
            "gathering of the embedding",
            Phase.FORWARD,
            work,
            self.point("enter"),
            gradients=self.gradients(0),
            transient=output,
            gone=counts,
            **self.held(work, counts),
        )

    def at_head_gathered(self, work: Work) -> Moment:
        """Return the moment at which a head that FSDP shards by itself is gathered, after all layers."""
        output = self.memory.embedding.operations[-1].outputs[0].nbytes
        return self.at(
            "gathering of the head",
            Phase.FORWARD,
            work,
            self.point("gather"),
            gradients=self.gradients(0),
            transient=self.around + output,
            **self.held(work, {}, at_head=True),
        )

    def at_head_reduced(self, work: Work) -> Moment:
        """Return the moment at which the gradients of a head that FSDP shards by itself are reduced, before all layers'."""
        precision, output = self.memory.training.precision, self.memory.embedding.operations[-1].outputs[0].nbytes
        # The shard is the gradient itself, where that is as wide and stays on the card.
        beside = precision.reduced != precision.gradient or "gradients" in self.memory.offloaded
        shard = (precision.reduced if beside else 0) / self.layout.zero_ranks
        several = where(self.memory.sharded, 1, 0)
        return self.at(
            "reduction of the head's gradients",
            Phase.REDUCTION,
            work,
            self.point("reduce"),
            gradients=self.gradients(self.head_gradients),
            transient=output + several * shard * self.memory.head_trainable,
            **self.held(work, {}, at_head=True),
        )

    def at_head_gradient(self, work: Work) -> Moment:
        """Return the moment at which the head's gradient is copied into the bucket, which is there from then on."""
        memory, in_flight, extra = self.memory, self.held(work, {}, at_head=True), self.memory.prediction
        return self.at(
            "gradient of the head",
            Phase.LOSS,
            work,
            self.point("prediction")._replace(doing="prediction"),  # in a pipeline all points are one
            activations=in_flight["activations"],
            loss=in_flight["loss"] + memory.head_copied + (0 if extra is None else extra.head),
        )

    def predicted(self, work: Work, extra: Prediction) -> Moment:
        """Return the moment of the backward of a multi-token prediction block, after the heads."""
        facts = self.memory.facts[extra.key]
        in_flight = self.held(work, {}, at_head=True)
        left = self.chunks[work.chunk].head_waiting if work.splits else 0
        return self.at(
            "backward of multi-token prediction",
            Phase.PREDICTION,
            work,
            self.point("prediction"),
            gradients=self.gradients(self.head_gradients, self.pending),
            transient=facts.working - facts.kept,
            activations=in_flight["activations"],
            loss=in_flight["loss"] + left,
            key=extra.key,
        )

    def backward(self, work: Work, key: Key, position: int, order: str = "") -> Moment:
        """Return the moment of the backward of the layer at `position`; later layers have already freed their activations."""
        memory, facts, stop = self.memory, self.memory.facts[key], self.chunk(work).stop
        behind = self.counts(position + 1, stop)
        grown: Size = 0
        if memory.lazy:
            grown = self.head_gradients + memory.produced(behind, self.counts(stop, self.stage.stop))
        transient = facts.working - facts.kept
        group = self.layout.recompute.group
        if key[1] and group > 1:
            transient = transient + (min(group, self.stage.stop - self.stage.start) - 1) * facts.layer.saved()
        if memory.engine is not None:
            transient = maximum(transient, zero_engine.flattened(memory, self.stage, self.point("backward", position)))
        return self.at(
            self.name("backward", order, work, position),
            Phase.BACKWARD,
            work,
            self.point("backward", position),
            gradients=self.gradients(grown, self.pending),
            transient=transient,
            position=position,
            key=key,
            gone=behind,
            **self.held(work, behind),
        )

    def at_embedding(self, work: Work) -> Moment:
        """Return the moment of the embedding's backward, after all layers."""
        memory, chunk = self.memory, self.chunk(work)
        counts = self.counts(chunk.start, chunk.stop)
        table = memory.count(memory.embedding.operations[0].weights).all.trainable
        tied = any(weight.trainable for operation in memory.head for weight in operation.borrows)
        precision = memory.training.precision
        # Besides the token table's gradient there is a new one where it is accumulated or sharded, and for a tied table the
        # head's part and the sum of both. PyTorch sums in place unless the first is a view, as that of a matrix is that no
        # autocast has copied and no loss has summed itself (torch/csrc/autograd/input_buffer.cpp).
        adds = where(self.accumulating, 1, 0) if memory.lazy else 1
        itemsize = precision.compute if self.layout.zero == 3 and not memory.lazy else precision.weight
        whole = memory.view.kernels.loss in ("liger", "chunked", "tiled")
        summed = where(memory.copied, 0, 1) if tied and memory.lazy and not whole else 0
        new: Size = itemsize * (adds + (1 + summed if memory.lazy and tied else 0))
        if (optimizer := memory.training.optimizer).in_backward:
            new = precision.gradient * (2 if tied else 1) + optimizer.update_bytes
        elif optimizer.one_block:
            new = 0
        elif memory.fully_sharded:
            # A whole gradient, and of a tied table the sum with the head's part, which is among the copies.
            new = where(self.memory.sharded, precision.compute * (2 if tied else 1), new)
        output = memory.embedding.operations[-1].outputs[0].nbytes if memory.reaches_embedding else 0
        if tied and memory.lazy and not (optimizer.in_backward or optimizer.one_block or memory.fully_sharded):
            # That of the output is gone when both parts are summed.
            output = maximum(output - summed * itemsize * table, 0)
        return self.at(
            "backward of the embedding",
            Phase.EMBEDDING,
            work,
            self.point("embedding"),
            gradients=self.gradients(self.reduced()),
            transient=new * table + output,
            gone=counts,
            **self.held(work, counts),
        )

    def at_reduction(self) -> Moment:
        """Return the moment of the first reduction after the last micro-batch of a pipeline (FSDP).

        Gradients are whole until then; the unit that is reduced first has freed its weights.
        """
        memory, precision = self.memory, self.memory.training.precision
        reduced = precision.reduced
        largest = memory.weighed(self.stage)[0].all.trainable
        for key in self.counts(self.stage.start, self.stage.stop):
            largest = maximum(largest, memory.facts[key].weights.all.trainable)
        return self.at(
            "reduction of the stage's gradients",
            Phase.REDUCTION,
            None,
            self.point("ends"),
            gradients=self.gradients(0),
            transient=where(self.memory.sharded, maximum(reduced - precision.compute, 0) * largest, 0),
        )

    @property
    def last_reduced(self) -> RankWeights:
        """The weights whose gradients FSDP reduces when the backward of all layers is over: embedding and head."""
        return self.memory.end_weights[0] if self.memory.ends_apart else self.ends

    def reduced(self) -> Size:
        """Return the bytes of gradients when the backward of all layers is over.

        Under FSDP those of embedding and head are not reduced yet and not counted here.
        """
        if not self.memory.by_layer:
            return self.states.gradients
        own = self.memory.states(self.last_reduced).gradients
        return self.states.gradients - where(self.memory.sharded, own, 0)

    def at_ends(self, work: Work) -> Moment:
        """Return the moment at which the whole gradients of embedding and head are reduced, after backward (FSDP)."""
        memory, chunk = self.memory, self.chunk(work)
        counts = self.counts(chunk.start, chunk.stop)
        precision, trainable = memory.training.precision, self.last_reduced.all.trainable
        several = where(self.memory.sharded, 1, 0)
        # In the dtype that they are computed or accumulated in, and in the one that they are reduced in; or in the latter, with
        # the shard that is made and the gradient of the head, which autograd still holds.
        whole = where(memory.whole_gradients, precision.reduced, precision.compute)
        shard = precision.reduced * trainable / self.layout.zero_ranks
        head = 0 if memory.ends_apart else precision.compute * memory.head_trainable
        last = head + precision.reduced * trainable + shard
        return self.at(
            "reduction of the gradients of embedding and head",
            Phase.REDUCTION,
            work,
            self.point("ends"),
            gradients=where(memory.whole_gradients, self.reduced(), self.gradients(self.reduced())),
            transient=several * maximum((whole + precision.reduced) * trainable, last),
            gone=counts,
            **self.held(work, counts),
        )

    def at_clip(self) -> Moment:
        """Return the moment between backward and the optimizer step: the norm of the gradients, their float32 copy."""
        transient = zero_engine.before_step(self.memory, self.stage)
        return self.at("norm and copies of the gradients", Phase.CLIP, point=At("clip"), transient=transient)

    def at_step(self) -> Moment:
        """Return the moment of the optimizer step, with nothing in flight."""
        memory = self.memory
        if memory.engine is None:
            transient = step_transient(memory, self.stage)
        else:
            transient = zero_engine.in_step(memory, self.stage)
        if self.stage.index == 0:
            lying = (lookup for lookup in memory.embedding if lookup.name in LYING)
            for operation in lying:
                joined = JOINED * operation.workspace if memory.training.optimizer.moments else 0
                rows = operation.backward_workspace + joined
                transient = transient + rows + sum(kept.nbytes for kept in operation.keeps)
            seen = (each for (_, again), facts in memory.facts.items() if not again for each in facts.layer)
            transient = transient + sum(kept.nbytes for each in seen if each.name == PIXELS for kept in each.keeps)
            if memory.model.tower_layers:  # ids and labels
                transient = transient + 2 * memory.view.kernels.dtypes.index * memory.view.tokens
        return self.at("optimizer step", Phase.STEP, point=At("step"), transient=transient)


def moments(memory: MemoryModel, stage: Stage) -> Iterator[Moment]:
    """Yield the moments of a step on one rank of a pipeline stage, in order."""
    return StageAtWork(memory, stage).moments()
