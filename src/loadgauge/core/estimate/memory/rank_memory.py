"""Memory of one rank of each pipeline stage: what each layer keeps, needs and holds in weights.

`MemoryModel` holds these facts; `loadgauge.core.estimate.memory.phases` combines them at each moment of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from enum import StrEnum
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base.algebra import Size, ceil_div, maximum, same, where
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.layout.zero_engine import ZeroEngine
from loadgauge.core.definitions.model.model import ModelSpec, Moe
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.memory.in_flight import AHEAD, late_weights, peak_candidates, pending_wgrad, summed, works
from loadgauge.core.estimate.memory.liveness import (
    backward_peak,
    forward_peak,
    idle_kept,
    keeps_input,
    rerun_peak,
    returned,
)
from loadgauge.core.estimate.memory.recompute import Leaving, applied, in_parts, leaving
from loadgauge.core.estimate.schedule.stages import Chunk, Key, Stage, stages
from loadgauge.core.estimate.states.states import RankWeights, States, WeightCount, gathered_bytes, model_states
from loadgauge.core.layers import View, block_layers, embedding_layer, head_layer, rotary_layer
from loadgauge.core.layers.embedding_head import mask_bytes, prediction_layer
from loadgauge.core.layers.operations.operations import NOTHING, Layer, Recompute, Weight

__all__ = ["LayerFacts", "MemoryModel", "Stage", "stages"]


class LayerFacts(msgspec.Struct, frozen=True):
    """Bytes one layer needs for one micro-batch, and its weights.

    kept: bytes held from forward to backward on the card; hosted: in host memory; waiting: what the gradients of the weights
    need, where they are computed later
    entering: its input; forming, working: the largest set alive in its forward and in its backward, including what it keeps
    """

    layer: Layer
    recompute: Recompute
    kept: Size
    waiting: Size
    entering: Size
    forming: Size
    working: Size
    weights: RankWeights
    hosted: Size = 0

    @classmethod
    def of(
        cls, layer: Layer, again: Recompute, peaks: tuple[Size, Size], waits: Size, weights: RankWeights, off: Leaving
    ) -> LayerFacts:
        """Compute the facts of a layer with these weights. again: what of it runs again in backward

        peaks: its `forward_peak` and `backward_peak`; waits: its `pending_wgrad` [bytes]; off: what of it is in host memory
        """
        kept = sum(tensor.nbytes for tensor in layer.kept(again) if tensor.name not in off.names)
        inputs = (tensor for operation in layer for tensor in operation.inputs)
        entering = next((tensor.nbytes for tensor in inputs if tensor.name == "input"), 0)
        return cls(layer, again, kept, waits, entering, *peaks, weights, off.nbytes)


class End(StrEnum):
    """Holders of tensors for backward besides the layers of the model."""

    EMBEDDING = "embedding"
    SHARED = "shared"
    """Tables of rotary positions and masks, which all layers read."""
    IDLE = "first layer, before anything is trained"
    """Counted with the layers, and subtracted: nothing there needs a gradient."""
    PREDICTION = "multi-token prediction"


class Kept(NamedTuple):
    """Bytes that layers of one kind keep for one micro-batch; also the embedding, what all layers share, the MTP modules.

    stored: how many keep `kept` bytes each (of layers recomputed together, one a group); count: how many need `waiting`
    bytes each for the gradients of their weights
    """

    unit: Key | End
    stored: Size
    kept: Size
    count: Size
    waiting: Size


class ChunkBytes(msgspec.Struct, frozen=True):
    """Bytes that one micro-batch keeps in some layers, and what waits for the gradients of their weights [bytes].

    terms: the summands of `kept` and `waiting`; head, head_waiting: the same of the head, on the chunk before it
    """

    terms: tuple[Kept, ...]
    kept: Size
    waiting: Size
    head: Size = 0
    head_waiting: Size = 0

    @classmethod
    def of(cls, terms: tuple[Kept, ...], head: Size = 0, head_waiting: Size = 0) -> ChunkBytes:
        """Sum terms [bytes]; head, head_waiting: bytes of the head on this chunk."""
        kept: Size = sum(term.stored * term.kept for term in terms)
        return cls(terms, kept, sum(term.count * term.waiting for term in terms), head, head_waiting)


class Prediction(msgspec.Struct, frozen=True):
    """The multi-token prediction modules together: bytes they keep for one micro-batch, and their weights.

    key: the kind of layer their block is; ends: the operations before that block, and after it
    head: of the bytes, what their heads keep; head_waiting: what of it waits for the gradients of weights
    """

    modules: int
    key: Key
    ends: tuple[Layer, Layer]
    kept: Size
    waiting: Size
    head: Size
    head_waiting: Size
    weights: RankWeights

    @property
    def terms(self) -> Kept:
        """Return the bytes that all modules keep outside their heads, as a term of `ChunkBytes`."""
        return Kept(End.PREDICTION, 1, self.kept, 1, self.waiting)


class MemoryModel:
    """The memory of a model under a layout. Facts of each kind of layer are computed once, whatever its number."""

    def __init__(self, model: ModelSpec, layout: Layout, training: Training, view: View) -> None:
        self.model, self.layout, self.training, self.view = model, layout, training, view
        # Gradients allocated during backward add to its working set; a permanent buffer does not.
        self.has_experts = model.has_experts
        self.lazy = not training.framework.gradients_persist
        self.facts: dict[Key, LayerFacts] = {}
        self._weighed: dict[object, tuple[RankWeights, RankWeights, States, Size, Size]] = {}
        self._counts: dict[tuple[tuple[int, ...], int, int], dict[Key, int]] = {}
        self.delays: dict[object, tuple[int, ...]] = {}
        layers = self.block_layers()
        self.names = frozenset(name for layer in layers for name in layer.names)
        for kind, layer in enumerate(layers):
            self.facts.update(self._facts_of(kind, layer))
        self.embedding, self.head = self.end_layers()
        self.embedding_trained = any(weight.trainable for weight in self.embedding.weights)
        self.shared = rotary_layer(model, view).saved()
        self.masks = mask_bytes(model, view)
        if layout.recompute.mode == "full":
            self.shared = self.shared + self.masks
        self.placeholders = self._placeholders()
        self.prediction = self._prediction() if model.mtp_layers else None
        self._measure_head()
        borrowed = [weight for operation in self.head for weight in operation.borrows]
        self.tied_matrices = sum(weight.numel for weight in borrowed if weight.cast)
        self.head_trainable = sum(weight.numel for weight in (*self.head.weights, *borrowed) if weight.trainable)

    def _measure_head(self) -> None:
        """Sets what the head keeps and needs at its peaks. A loss of the model's own runs before its forward returns the logits."""
        loss = self.view.kernels.loss, self.view.kernels.logprobs
        beside = "head.shifted" if self.model.head.inner else "head.norm"
        held = (beside, "head.logits") if loss == ("float32", "") else ()
        self.head_kept, self.head_forming = self.head.saved(), self.head.once(forward_peak, held=held)
        after = self.head_kept + returned(self.head) if self.training.copies_outputs and not self.by_layer else 0
        self.head_backward = maximum(self.backward(self.head, NOTHING), after)
        self.head_working = maximum(self.head_forming, self.head_backward)

    def with_end(self, training: Training) -> MemoryModel:
        """Return the memory of a training that differs in its loss only; all but the head is shared."""
        other = copy(self)
        other.training, other.view = training, msgspec.structs.replace(self.view, kernels=training.kernels)
        other.head = other.end_layers()[1]
        other._measure_head()
        return other

    def _facts_of(self, kind: int, layer: Layer) -> dict[Key, LayerFacts]:
        """The facts of one kind of layer: as it is, and where layers are recomputed also of one that is."""
        policy, waits = self.layout.recompute, layer.once(pending_wgrad) if self.layout.splits_backward else 0
        weights, facts = self.weights_of(layer), dict[Key, LayerFacts]()
        for repeated in (False, True) if policy.mode != "none" else (False,):
            again = applied(policy, layer, self.names) if repeated else NOTHING
            working, off = self.backward(layer, again), self.leaving(layer, again)
            if repeated and policy.mode == "full" and layer.profile is None:
                working = maximum(working, layer.once(rerun_peak))
            forming = layer.once(forward_peak, again, ("input",), hosts=off.names)
            facts[kind, repeated] = LayerFacts.of(layer, again, (forming, working), waits, weights, off)
        return facts

    def rerouted(self, layout: Layout, view: View) -> MemoryModel:
        """Return the memory under a layout that differs in `expert_imbalance` only; all but its MoE layers are shared."""
        other = copy(self)
        other.layout, other.view, other.facts, other.delays = layout, view, dict(self.facts), {}
        for kind, (block, layer) in enumerate(zip(self.model.blocks, other.block_layers(), strict=True)):
            if isinstance(block.mlp, Moe):
                other.facts.update(other._facts_of(kind, layer))
        other.prediction = other._prediction() if self.model.mtp_layers else None
        return other

    def block_layers(self) -> tuple[Layer, ...]:
        """Return the list of operations of each of the model's distinct blocks."""
        return in_parts(block_layers(self.model.blocks, self.model.hidden_size, self.view), self.layout)

    def end_layers(self) -> tuple[Layer, Layer]:
        """Return the operations of the embedding and of the head."""
        holds_table = not self.layout.ends_together
        return embedding_layer(self.model, self.view), head_layer(self.model, self.view, holds_table=holds_table)

    @property
    def reaches_embedding(self) -> bool:
        """Return whether the gradient of the embedding's output is made."""
        written = self.model.own.rewritten
        reached = self.model.blocks[self.model.pattern[0]].reached if written else self.embedding_trained
        return self.view.input_gradients or reached

    def leaving(self, layer: Layer, recompute: Recompute) -> Leaving:
        """Return the tensors of a layer that are in host memory between forward and backward."""
        return leaving(self.training.host.activations, layer, recompute, self.names)

    @property
    def sharded(self) -> Any:
        """Return whether ZeRO shards over more than one rank (an array of booleans for array layouts)."""
        return self.layout.zero_ranks > 1

    @property
    def engine(self) -> ZeroEngine | None:
        """The engine that runs ZeRO 1 to 3, where it is one of its own (`zero_engine`)."""
        return self.training.framework.engine if self.layout.zero else None

    @property
    def head_copied(self) -> Size:
        """Bytes of the head's gradient while it is copied into a bucket; under ZeRO 1 it is among the gradients."""
        return self.training.precision.compute * self.head_trainable if self.layout.zero > 1 else 0

    @property
    def frees_gradients(self) -> bool:
        """Return whether no gradients are held between steps."""
        return self.lazy or (self.engine is not None and self.layout.zero < 3)

    @property
    def fully_sharded(self) -> bool:
        """Return whether FSDP2 shards the weights, with whole gradients before their reduction."""
        return self.training.framework.fully_shards and self.layout.zero >= 2

    @property
    def by_layer(self) -> bool:
        """Return whether FSDP2 gathers and reduces layer by layer (with pipeline stages it waits for the last micro-batch)."""
        return self.fully_sharded and self.layout.pp == 1

    @property
    def ends_apart(self) -> bool:
        """Return whether FSDP2 has the embedding and the head as units of their own."""
        return self.by_layer and self.training.ends_apart and not (self.model.tie_word_embeddings or self.prediction)

    @property
    def whole_gradients(self) -> Any:
        """Return whether FSDP2 holds gradients whole until the last micro-batch (an array of booleans for array layouts)."""
        if not (self.by_layer and self.training.framework.reduces_once):
            return False
        return self.sharded & (self.layout.num_microbatches > 1)

    @property
    def copied(self) -> bool:
        """Return whether autocast makes 16-bit copies of the weights."""
        return self.training.precision.autocast and self.layout.zero < self.training.framework.weights_stage

    @property
    def caches(self) -> bool:
        """Return whether autocast's cache alone holds 16-bit copies of adapters through the forward, as their layers run again."""
        return self.training.lora is not None and self.training.lora.casts and self.layout.recompute.mode == "full"

    @property
    def head_apart(self) -> bool:
        """Return whether the gathered copies differ between the head's forward and its backward."""
        return self.layout.pp == 1 and (
            self.copied or self.caches or (self.by_layer and self.layout.zero == 2) or self.ends_apart
        )

    def weights_of(self, layer: Layer) -> RankWeights:
        """Return the weights of a layer on this rank, by the group that ZeRO shards them over."""
        return layer.once(RankWeights.of_layer, self.training.optimizer)

    def count(self, weights: tuple[Weight, ...]) -> RankWeights:
        """Return the elements of some weights and of their state in the optimizer."""
        return RankWeights.of(weights, self.training.optimizer)

    def backward(self, layer: Layer, recompute: Recompute) -> Size:
        """Return the working set of a layer's backward [bytes], including gradients allocated in it (`backward_peak`)."""
        gradient: float = self.training.precision.gradient if self.lazy else 0
        optimizer, split = self.training.optimizer, self.layout.splits_backward
        peak = partial(layer.once, backward_peak, recompute=recompute, hosts=self.leaving(layer, recompute).names)
        if optimizer.in_backward:
            # Of one tensor at a time, with what its update needs.
            return peak(gradient + optimizer.update_bytes, accumulating=True)
        if optimizer.one_block:
            return peak(0)
        if self.engine is not None:
            # Whole until backward is over, or each one until it is in the bucket.
            compute, gathers = self.training.precision.compute, self.layout.zero > 1
            if gathers:
                return peak(compute, accumulating=True)
            return self._backward_whole(peak, self.training.precision.gradient)
        if self.training.framework.gradient_tensors and not self.view.kernels.gradient_placeholders:
            return peak(self.training.precision.compute, accumulating=True, split=split)
        if self.fully_sharded and not same(self.layout.zero_ranks, 1):
            # Whole until it is reduced (what that makes of it is among the `copies`). A pipeline adds it to that of the
            # micro-batches before: when it is allocated, or when it is cast to another dtype.
            precision = self.training.precision
            alike = precision.compute == precision.reduced
            sharded = peak(precision.compute, accumulating=self.layout.pp > 1 and alike, split=split)
            if alike and not same(self.whole_gradients, False):
                added = peak(precision.compute, accumulating=True, split=split)
                sharded = where(self.whole_gradients, added, sharded)
            if self.sharded is True:
                return sharded
            return where(self.sharded, sharded, self._backward_whole(peak, gradient))
        return self._backward_whole(peak, gradient)

    def _backward_whole(self, peak: Callable[..., Size], gradient: float) -> Size:
        """The same where gradients are not sharded as they come."""
        split = self.layout.splits_backward
        several = self.layout.num_microbatches > 1
        if not gradient or several is False:
            return peak(gradient, split=split)
        added = peak(gradient, accumulating=True, split=split)
        if several is True:
            return added
        return where(several, added, peak(gradient, split=split))

    def _placeholders(self) -> Size:
        """Bytes of the empty placeholder tensors for the gradients of the blocks' matrices, one of each shape."""
        if not self.view.kernels.gradient_placeholders or self.layout.zero == 3:
            return 0
        shapes: list[tuple[str, Size, Size]] = []
        for facts in self.facts.values():
            for operation in facts.layer:
                for weight in operation.weights:
                    if weight.kind == "matrix" and weight.trainable and operation.kind != "router":
                        # All experts of a rank share one; the same name in two kinds of layer means the same weight.
                        experts = operation.gemms[0].batch if weight.expert else 1
                        if not any(name == weight.name and same(numel, weight.numel) for name, numel, _ in shapes):
                            shapes.append((weight.name, weight.numel, weight.numel / experts))
        return self.training.precision.compute * sum(size for _, _, size in shapes)

    def _prediction(self) -> Prediction:
        """The modules of multi-token prediction, which are on the stage of the head."""
        model, view, many = self.model, self.view, self.model.mtp_layers
        key = model.pattern[-1], self.layout.recompute.every_layer
        owns = not (self.layout.ends_together or model.tie_word_embeddings)
        entry = prediction_layer(model, view, holds_table=owns)
        # Several modules read the same table.
        again = prediction_layer(model, view)
        head, block = head_layer(model, view, shared=True), self.facts[key]
        weights = (block.weights + self.weights_of(again) + self.weights_of(head)).times(many - 1)
        weights = weights + block.weights + self.weights_of(entry) + self.weights_of(head)
        return Prediction(
            modules=many,
            key=key,
            ends=(entry, head),
            kept=many * (entry.saved() + block.kept),
            waiting=many * (pending_wgrad(entry) + block.waiting) if self.layout.splits_backward else 0,
            head=many * head.saved(),
            head_waiting=many * pending_wgrad(head) if self.delays_head else 0,
            weights=weights,
        )

    @property
    def delays_head(self) -> bool:
        """Return whether the gradient of the head's matrix is computed later (a chunked loss computes all gradients at once)."""
        return self.layout.splits_backward and self.view.kernels.loss not in ("chunked", "tiled")

    # -- one stage ----------------------------------------------------------------------------------------------------

    def repeated(self, stage: Stage, position: int) -> bool:
        """Return whether the layer at `position` is recomputed in backward."""
        return stage.repeated(self.layout.recompute, position)

    @property
    def put_off(self) -> tuple[int, ...]:
        """How many weight gradients each stage puts off at the most, where a schedule of `AHEAD` does; else empty."""
        key = (layout := self.layout).schedule, layout.pp, layout.stage_layers, layout.recompute
        if layout.schedule in AHEAD and key not in self.delays:
            counts = (self.counts(stage, stage.start, stage.stop) for stage in stages(self.model, layout))
            held = [(layers.kept, layers.waiting) for layers in map(self.of_layers, counts)]
            self.delays[key] = late_weights(layout.schedule, held)
        return self.delays.get(key, ())

    def counts(self, stage: Stage, start: int, stop: int) -> dict[Key, int]:
        """Return the number of layers of each kind, recomputed or not, in `start:stop` of a stage."""
        key = stage.pattern, start - stage.start, stop - stage.start
        if key not in self._counts:
            self._counts[key] = stage.counts(self.layout.recompute, start, stop)
        return self._counts[key]

    def of_layers(self, counts: dict[Key, int]) -> ChunkBytes:
        """Return the bytes that one micro-batch keeps in `counts` layers of each kind."""
        return ChunkBytes.of(tuple(self._kept(counts)))

    def _kept(self, counts: dict[Key, int]) -> Iterator[Kept]:
        group = self.layout.recompute.group
        for key, count in counts.items():
            facts = self.facts[key]
            yield Kept(key, ceil_div(count, group) if key[1] else count, facts.kept, count, facts.waiting)

    def of_chunk(self, stage: Stage, chunk: Chunk) -> ChunkBytes:
        """Return the bytes that one micro-batch keeps on a chunk: layers, shared tables, embedding, head, MTP modules."""
        terms = [*self._kept(self.counts(stage, chunk.start, chunk.stop)), Kept(End.SHARED, 1, self.shared, 0, 0)]
        head: Size = 0
        head_waiting: Size = 0
        if chunk.first:
            terms.append(Kept(End.EMBEDDING, 1, self.embedding.saved(), 0, 0))
            terms.extend(self.idle(stage, chunk))
        if chunk.last:
            head = self.head_kept
            head_waiting = pending_wgrad(self.head) if self.delays_head else 0
            if (extra := self.prediction) is not None:
                terms.append(extra.terms)
                head, head_waiting = head + extra.head, head_waiting + extra.head_waiting
        return ChunkBytes.of(tuple(terms), head, head_waiting)

    def idle(self, stage: Stage, chunk: Chunk) -> tuple[Kept, ...]:
        """Return the tensors that the first layer need not keep, as nothing before it is trained; rerun, it keeps its input."""
        if not chunk.first or chunk.start == chunk.stop or self.embedding_trained or not self.reaches_embedding:
            return ()
        key = self.key(stage, chunk.start)
        # A captured one was seen as it is.
        if key[1] or self.training.host.activations != "none" or not self.model.own.rewritten:
            return ()
        nbytes = idle_kept(self.facts[key].layer, self.training.precision.compute if self.copied else 0)
        return (Kept(End.IDLE, 1, -nbytes, 0, 0),) if not same(nbytes, 0) else ()

    def make_up(self, stage: Stage) -> tuple[object, ...]:
        """Return a key for each chunk of a stage; equal keys mean the same layers and ends."""
        return tuple(
            (chunk.first, chunk.last, tuple(self.counts(stage, chunk.start, chunk.stop).items()))
            for chunk in stage.chunks
        )

    def around(self, stage: Stage) -> Size:
        """Return the bytes that the model's forward holds while its layers run, besides what they keep: masks, embeddings."""
        around = self.model.own.around  # of captured layers it is among what is alive in each
        total: Size = self.masks if around and self.layout.recompute.mode != "full" else 0
        if around and stage.first:
            if seen := self.model.tower_layers:  # what a tower made of pictures
                total = total + self.facts[self.key(stage, seen - 1)].layer.operations[-1].outputs[0].nbytes
            key = None if stage.start == stage.stop else self.key(stage, stage.start)
            if key is None or not (key[1] or (self.embedding_trained and keeps_input(self.facts[key].layer))):
                total = total + self.embedding.operations[-1].outputs[0].nbytes
        return total

    def alike(self, stage: Stage) -> object:
        """Return a key that is equal for stages with the same memory: same layers, same micro-batches in flight on them."""
        make_up = self.make_up(stage)
        if len(make_up) == 1:
            return make_up, works(self.layout, stage.index, self.put_off)
        candidates = peak_candidates(self.layout, stage.index, make_up, self.put_off)
        return make_up, summed(candidates, tuple(map(make_up.index, make_up)), by_chunk=self.lazy)

    def weights(self, counts: dict[Key, int]) -> RankWeights:
        """Return the weights on this rank of `counts` layers of each kind."""
        total = RankWeights()
        for key, count in counts.items():
            total = total + self.facts[key].weights.times(count)
        return total

    def produced(self, *counts: dict[Key, int]) -> Size:
        """Return the bytes of gradients of `counts` layers of each kind."""
        return self.states(reduce(RankWeights.__add__, map(self.weights, counts))).gradients

    @cached_property
    def end_weights(self) -> tuple[RankWeights, RankWeights]:
        """Weights of the embedding and of the head."""
        return self.weights_of(self.embedding), self.weights_of(self.head)

    def units(self, stage: Stage) -> RankWeights:
        """Return the weights of the embedding and the head, as far as they are on this stage."""
        ends = zip((stage.first, stage.last), self.end_weights, strict=True)
        return sum((weights for there, weights in ends if there), RankWeights())

    def ends(self, stage: Stage) -> RankWeights:
        """Return the weights of a stage besides its layers: embedding, head and multi-token prediction."""
        units = self.units(stage)
        return units if self.prediction is None or not stage.last else units + self.prediction.weights

    def weighed(self, stage: Stage) -> tuple[RankWeights, RankWeights, States, Size, Size]:
        """Return the weights and states of a stage, computed once for stages of the same layers and ends.

        Weights of embedding and head; all weights; states of all [bytes]; gradients that exist from the head's backward on
        [bytes]; of these, those of a tied table [bytes].
        """
        counts = self.counts(stage, stage.start, stage.stop)
        key = stage.first, stage.last, tuple(counts.items())
        if key in self._weighed:
            return self._weighed[key]
        weights = self.weights(counts) + self.ends(stage)
        # A tied table has its gradient from the head on.
        tied = self.count(tuple(weight for operation in self.head for weight in operation.borrows))
        head = self.weights_of(self.head) + tied
        extra = RankWeights() if self.prediction is None else self.prediction.weights
        gradients: list[Size] = [self.states(part).gradients if stage.last else 0 for part in (head + extra, tied)]
        if self.fully_sharded and not self.ends_apart:
            # One unit with the embedding: its gradients are whole until the end of backward, among the copies.
            reduced = (self.states(extra).gradients if stage.last else 0, 0)
            gradients = [where(self.sharded, *both) for both in zip(reduced, gradients, strict=True)]
        states = self.states(weights)
        optimizer = self.training.optimizer
        if optimizer.in_backward:
            # Of a tied table both gradients are summed before it is updated.
            gradients = [self.training.precision.gradient * tied.all.trainable if stage.last else 0, 0]
        elif optimizer.one_block:
            states = States(states.weights, *self.block_states(counts))
        weights_of_stage = self.units(stage), weights, states, *gradients
        self._weighed[key] = weights_of_stage
        return weights_of_stage

    def block_states(self, counts: dict[Key, int]) -> tuple[Size, Size]:
        """Return the bytes of gradients and optimizer states where one layer is trained at a time: of the largest of `counts`.

        Moments and master weights are float32 (badam, `BlockOptimizer.switch_trainable_params`).
        """
        largest: Size = 0
        for key in counts:
            largest = maximum(largest, self.facts[key].weights.all.trainable)
        precision, optimizer = self.training.precision, self.training.optimizer
        return precision.gradient * largest, (4 + optimizer.moments * optimizer.moment(precision)) * largest

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The parts of the memory that live on the host: none, the optimizer (between updates alone), gradients and weights too."""
        word, buffers = self.training.offload.partition(":")[0], self.training.framework.host
        parts: tuple[str, ...] = () if word == "none" else ("optimizer", "weights") if word == "all" else ("optimizer",)
        if word in buffers.gradients and self.layout.zero >= buffers.gradients_from:
            parts = (*parts, "gradients")
        return parts

    @cached_property
    def largest_trained(self) -> Size:
        """Elements of the largest trained tensor on this rank."""
        return self._largest(trained=True)

    @cached_property
    def largest_weight(self) -> Size:
        """Elements of the largest tensor of weights on this rank, trained or not."""
        return self._largest(trained=False)

    def _largest(self, *, trained: bool) -> Size:
        largest: Size = 0
        operations = [operation for facts in self.facts.values() for operation in facts.layer]
        for operation in (*operations, *self.embedding, *self.head):
            for weight in operation.weights:
                if weight.trainable or not trained:
                    largest = maximum(largest, weight.numel)
        return largest

    def positions(self, stage: Stage, chunk: Chunk, order: str) -> Iterator[tuple[Key, int]]:
        """Yield kind and position of the last (or first) layer of each kind in a chunk; `order`: "last" or "first"."""
        distinct = len(self.counts(stage, chunk.start, chunk.stop))
        seen: set[Key] = set()
        places = range(chunk.start, chunk.stop)
        for position in reversed(places) if order == "last" else places:
            key = self.key(stage, position)
            if key not in seen:
                seen.add(key)
                yield key, position
            if len(seen) == distinct:
                return

    def states(self, count: RankWeights) -> States:
        """Return the model states [bytes]; each group of weights is sharded over its own data-parallel ranks."""
        layout, training = self.layout, self.training

        def of(part: WeightCount, ranks: Size) -> States:
            return model_states(
                part,
                training.precision,
                training.optimizer,
                zero=layout.zero,
                dp=ranks,
                quantised=training.lora is not None and training.lora.quantised,
                weights_stage=training.framework.weights_stage,
            )

        both = of(count.dense, layout.zero_ranks)
        if self.has_experts:
            both = both + of(count.expert, layout.expert_zero_ranks)
        return States(both.weights, 0, 0) if training.optimizer.one_block else both

    def gathered_bytes(self, weights: RankWeights) -> Size:
        """Return the bytes of weights gathered over their ranks, a quantised base in its stored format."""
        lora = self.training.lora
        return gathered_bytes(weights.all, self.training.precision, lora is not None and lora.quantised)

    def forming(self, stage: Stage, position: int) -> Size:
        """Return the largest set alive in the forward of the layer at `position` [bytes], including what it keeps."""
        facts = self.facts[self.key(stage, position)]
        if not self.by_layer:
            return facts.forming
        # While the layer is gathered, the previous buffer is still alive; of its own tensors only the input is.
        first = position == stage.start
        above = self.end_weights[0] if self.ends_apart else self.units(stage)
        before = self.gathered_bytes(above if first else self.facts[self.key(stage, position - 1)].weights)
        return maximum(facts.forming, where(self.sharded, before, 0) + facts.entering)

    def key(self, stage: Stage, position: int) -> Key:
        """Return the kind of the layer at `position`, and whether it is recomputed in backward."""
        return stage.kind(position), self.repeated(stage, position)
