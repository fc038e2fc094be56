"""The ledger: every byte of a rank at one phase of the step, as entries that add up to each part of its memory.

`--explain`, the treemap and `Estimate.ledger` show these entries and no others. Totals are computed from the same terms:
activations and the loss from `StageAtWork.holdings`, gathered copies from `copies`, model states from `model_states`.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import msgspec

from loadgauge.core.base.algebra import Size, same
from loadgauge.core.base.sources import cite
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.model.lora import base_format
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS
from loadgauge.core.estimate.memory.in_flight import Work
from loadgauge.core.estimate.memory.phases import PARTS, Holding, Moment, Phase, StageAtWork
from loadgauge.core.estimate.memory.rank_memory import End, Kept
from loadgauge.core.estimate.schedule.stages import Key
from loadgauge.core.estimate.states import zero_engine
from loadgauge.core.estimate.states.gathered import copies
from loadgauge.core.estimate.states.optimizer_step import away, on_card, staying
from loadgauge.core.estimate.states.overhead import communication, communicators, context
from loadgauge.core.estimate.states.states import RankWeights, States, WeightCount, model_states
from loadgauge.core.estimate.symbols import kinds
from loadgauge.core.layers.operations.operations import NOTHING, Layer, Recompute, Tensor

NOT_ITEMISED = "further bytes, not itemised"
"""The entry for whatever the others do not account for."""
READ_OFF = "the layer's list of operations"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the ledger [bytes]; what is freed already is negative.

    layer: the kind of layer that holds it, or the embedding or the head; operation: the one that keeps the tensor for its
    backward; times: layers times micro-batches that hold it; source: where the rule is from
    """

    part: str
    what: str
    nbytes: Size
    phase: Phase
    layer: str = ""
    operation: str = ""
    times: Size = 1
    source: str = ""


class Ledger:
    """The entries of one rank of a stage at one phase of the step.

    workspaces: bytes of cuBLAS and the like on `gpu`; idle: bytes that the allocator holds and has not handed out
    """

    def __init__(
        self, rank: StageAtWork, moment: Moment, workspaces: float = 0.0, gpu: Gpu | None = None, idle: float = 0.0
    ) -> None:
        self.rank, self.moment, self.workspaces, self.gpu, self.idle = rank, moment, workspaces, gpu, idle
        self.memory, self.stage = rank.memory, rank.stage
        self.layout, self.training = self.memory.layout, self.memory.training
        self.work: Work | None = moment.work

    @cached_property
    def names(self) -> tuple[str, ...]:
        """A name for each distinct block of the model (`loadgauge.core.estimate.symbols.kinds`)."""
        return kinds(self.memory.model)

    @cached_property
    def counts(self) -> dict[Key, int]:
        """Number of layers of each kind on the stage."""
        return self.memory.counts(self.stage, self.stage.start, self.stage.stop)

    @property
    def key(self) -> Key | None:
        """The kind of the layer in backward; None in other phases."""
        return None if self.work is not None and self.work.forward else self.moment.key

    def kind(self, key: Key) -> str:
        """Return the name of a kind of layer, and whether it is recomputed."""
        return self.names[key[0]] + (" run again in backward" if key[1] else "")

    def entries(self, part: str) -> tuple[Entry, ...]:
        """Return the non-zero entries of one of `PARTS`, in the order in which they are explained.

        Their bytes add up to that part of the memory at this phase; empty where all of the part is offloaded to the host.
        """
        if part in away(self.memory, self.moment.phase):
            nbytes = on_card(self.memory, self.stage)[part]
            kept = f"states of {100 * float(staying(self.memory, self.stage)):.3g} % of what this rank updates"
            return (self.entry(part, f"not offloaded: {kept}", nbytes),) if nbytes else ()
        readers: dict[str, Callable[[], Iterable[Entry]]] = {
            "weights": self._weights,
            "gradients": self._gradients,
            "optimizer": self._optimizer,
            "gathered": self._gathered,
            "activations": self._activations,
            "loss": self._loss,
            "transient": self._transient,
            "evaluation": self._evaluation,
            "outside": self._outside,
        }
        return tuple(entry for entry in readers[part]() if entry.nbytes)

    def all(self) -> tuple[Entry, ...]:
        """Return the entries of all parts; activations are split by layer, operation and tensor."""
        entries: list[Entry] = []
        for part in PARTS:
            entries += self.tensors() if part == "activations" else self.entries(part)
        return tuple(entry for entry in entries if entry.nbytes)

    def entry(self, part: str, label: str, nbytes: Size, **more: Any) -> Entry:
        """Make an entry at this phase; `more` sets further fields of `Entry`."""
        return Entry(part=part, what=label, nbytes=nbytes, phase=self.moment.phase, **more)

    # -- model states -------------------------------------------------------------------------------------------------

    @property
    def quantised(self) -> bool | str:
        """The format of the frozen base weights, as in `Lora.quantised`; False without one."""
        return self.training.lora is not None and self.training.lora.quantised

    def groups(self) -> Iterator[tuple[str, WeightCount, Size]]:
        """Yield, for each group of ranks that ZeRO shards over, its name in words, its weights and its number of ranks."""
        weights = self.rank.weights
        if not self.memory.has_experts:
            yield "", weights.dense, self.layout.zero_ranks
            return
        yield " outside the experts", weights.dense, self.layout.zero_ranks
        yield " of the experts", weights.expert, self.layout.expert_zero_ranks

    def states(self, count: WeightCount, ranks: Size, **changes: Any) -> States:
        """Return the model states [bytes] of some weights sharded over `ranks`.

        changes: `precision` or `optimizer` to use in place of the job's
        """
        return model_states(
            count,
            changes.get("precision", self.training.precision),
            changes.get("optimizer", self.training.optimizer),
            zero=self.layout.zero,
            dp=ranks,
            quantised=self.quantised,
            weights_stage=self.training.framework.weights_stage,
        )

    def over(self, ranks: Size, stage: int) -> str:
        """Return " / n ranks" where this job's ZeRO stage is at least `stage`, else an empty string."""
        return f" / {ranks} ranks" if self.layout.zero >= stage and ranks > 1 else ""

    def _weights(self) -> Iterator[Entry]:
        precision = self.training.precision
        stored, low = base_format(self.quantised), precision.products
        itemsize = f"{precision.weight} B" if stored is None else stored.words
        source = str(cite(precision.source))
        for where, count, ranks in self.groups():
            over = self.over(ranks, self.training.framework.weights_stage)
            narrow = count.trainable - count.wide
            plain, base = (
                WeightCount(trainable=narrow, frozen=count.frozen - count.wide_frozen),
                WeightCount(base=count.base),
            )
            for of, wide in (
                ("adapters", WeightCount(trainable=count.wide, wide=count.wide)),
                ("frozen ones cast to float32", WeightCount(frozen=count.wide_frozen, wide_frozen=count.wide_frozen)),
            ):
                text = f"{wide.total:,} parameters{where} ({of}) x 4 B{over}"
                yield self.entry("weights", text, self.states(wide, ranks).weights, source=str(cite("peft")))
            label = f"{plain.total:,} parameters{where} x {precision.weight} B{over}"
            yield self.entry("weights", label, self.states(plain, ranks).weights, source=source)
            label = f"{base.total:,} frozen base parameters{where} x {itemsize}{over}"
            yield self.entry("weights", label, self.states(base, ranks).weights, source=source)
            if low is not None:
                instead = low.weights == "instead"
                less = f" instead of {precision.weight} B{over}" if instead else " beside them"
                label = (
                    f"{count.quantised:,} of them{where} in {low.format}, by rows and by columns,"
                    f" {low.weight_element:g} B{less}"
                )
                nbytes = self.states(WeightCount(quantised=count.quantised), ranks).weights
                yield self.entry("weights", label, nbytes, source=source)

    @property
    def whole_gradients(self) -> bool:
        """Return whether the rank has gradients of all its weights at this phase."""
        phases = (Phase.STEP, Phase.EMBEDDING, Phase.REDUCTION)
        if self.moment.phase.between_steps:
            return not self.memory.frees_gradients
        return not self.memory.lazy or self.rank.accumulating or self.moment.phase in phases

    def _gradients(self) -> Iterator[Entry]:
        memory, precision, phase = self.memory, self.training.precision, self.moment.phase
        if self.training.optimizer.one_block:
            text = f"the one layer that is trained x {precision.gradient} B"
            yield self.entry("gradients", text, self.rank.states.gradients)
            return
        if self.training.optimizer.in_backward:
            text = "the tied table's gradient, until that of the embedding is added"
            held = self.rank.head_gradients if phase in (Phase.PREDICTION, Phase.BACKWARD) else 0
            yield self.entry("gradients", text, held)
            return
        if memory.engine is not None and not phase.between_steps and self.moment.point is not None:
            for label, nbytes in zero_engine.gradients(memory, self.stage, self.moment.point).items():
                yield self.entry("gradients", label, nbytes, source=str(cite(self.training.framework.source)))
            return
        fsdp = memory.fully_sharded and self.layout.zero_ranks > 1 and not phase.between_steps
        accumulating, key = self.rank.accumulating, self.key
        pieces: list[tuple[str, RankWeights]] = []
        unreduced = RankWeights()
        source = str(cite(precision.source))
        if memory.whole_gradients and phase not in (Phase.STEP, Phase.REDUCTION):
            number = self.rank.weights.all.trainable
            text = f"{number:,} parameters (all, whole until the last micro-batch) x {precision.reduced} B"
            yield self.entry("gradients", text, self.rank.whole_gradients, source=str(cite("accelerate")))
            return
        if fsdp and not memory.by_layer and phase is not Phase.STEP:
            pass  # whole ones, among the gathered copies
        elif self.whole_gradients:
            pieces.append(("all of the rank", self.rank.weights))
            if fsdp and phase in (Phase.EMBEDDING, Phase.REDUCTION) and (memory.whole_gradients or not accumulating):
                unreduced = self.rank.last_reduced
            if accumulating and memory.lazy and not fsdp and key is not None and self.stage.last:
                tied = memory.count(tuple(weight for operation in memory.head for weight in operation.borrows))
                pieces.append(("the tied table's new gradient, not summed yet", tied))
        elif key is not None:
            head = RankWeights()
            if self.stage.last and (not fsdp or memory.ends_apart):
                head = memory.count(
                    tuple(weight for operation in memory.head for weight in (*operation.weights, *operation.borrows))
                )
            if memory.prediction is not None and self.stage.last:
                head = head + memory.prediction.weights
            done = self.moment.gone
            pieces = [("head", head), (f"the {sum(done.values())} layers whose backward is over", memory.weights(done))]
        over = self.over(self.layout.zero_ranks, 2)
        for label, count in pieces:
            itemsize = precision.gradient if same(count.all.wide, 0) else 4
            text = f"{count.all.trainable:,} parameters ({label}) x {itemsize} B{over}"
            yield self.entry("gradients", text, memory.states(count).gradients, source=source)
        text = f"{unreduced.all.trainable:,} parameters (embedding and head, not reduced yet) x {precision.gradient} B{over}"
        yield self.entry("gradients", text, -memory.states(unreduced).gradients, source=source)

    def _optimizer(self) -> Iterator[Entry]:
        precision, optimizer = self.training.precision, self.training.optimizer
        bare = msgspec.structs.replace(precision, main_gradient=0, master=0)
        sources = {"source": str(cite(precision.source))}
        if optimizer.one_block:
            label = (
                f"{optimizer.name}: float32 weights and {optimizer.moments} moments of the one layer that is trained"
            )
            yield self.entry("optimizer", label, self.rank.states.optimizer, source=str(cite(optimizer.source)))
            return
        for where, count, ranks in self.groups():
            of = f"{count.trainable:,} parameters{where}"
            over = self.over(ranks, 1)
            for label, field in (("float32 main gradients", "main_gradient"), ("float32 master weights", "master")):
                itemsize = getattr(precision, field)
                only = msgspec.structs.replace(bare, **{field: itemsize})
                plain = WeightCount(trainable=count.trainable)
                nbytes = self.states(plain, ranks, precision=only, optimizer=OPTIMIZERS["sgd"]).optimizer
                yield self.entry("optimizer", f"{label}: {of} x {itemsize} B{over}", nbytes, **sources)
            nbytes = self.states(count, ranks, precision=bare).optimizer
            label = f"{optimizer.name}: {of} x {self._moments(same(count.wide, 0))}{over}"
            yield self.entry("optimizer", label, nbytes, source=str(cite(optimizer.source)))

    def _moments(self, narrow: bool = True) -> str:
        """Return the optimizer's states for each parameter, in words; narrow: none is float32 beside 16-bit ones."""
        optimizer = self.training.optimizer
        if optimizer.factored:
            return "a row and a column of float32 for each matrix"
        if (low := optimizer.low_rank) is not None:
            return f"{optimizer.moments} moments, of the blocks' matrices of rank {low.rank}, with the projections"
        if optimizer.preconditioners is not None:
            return f"{optimizer.moments} moments, and {2 * optimizer.preconditioners.each} squares for each matrix"
        if optimizer.paged:
            return f"{optimizer.moments} moments, of tensors below {optimizer.paged:,} elements (the others are paged)"
        itemsize = optimizer.moment(self.training.precision)
        if not narrow and optimizer.moment_bytes is None:
            itemsize = 4
        special = optimizer.matrix_moments
        fewer = "" if special is None else f" ({special} for the matrices of the blocks)"
        kept = f" (4 B below {optimizer.small:,} elements" if optimizer.small_float32 else ""
        kept += ", and of embeddings)" if optimizer.table_float32 else ")" if kept else ""
        average = f", and their average of {optimizer.average} B" if optimizer.average else ""
        return f"{optimizer.moments} moments{fewer} x {itemsize:g} B{kept}{average}"

    # -- copies, and what no tensor of the step is ----------------------------------------------------------------------

    def _gathered(self) -> Iterator[Entry]:
        if self.moment.phase in (Phase.SAVING, Phase.SETUP):
            for label, nbytes in self.moment.items:
                yield self.entry("gathered", label, nbytes)
        elif self.moment.point is not None:
            source = str(cite(self.training.framework.source))
            for label, nbytes in copies(self.memory, self.stage, self.moment.point).items():
                yield self.entry("gathered", label, nbytes, source=source)

    def _evaluation(self) -> Iterator[Entry]:
        if self.moment.phase not in (Phase.SAVING, Phase.SETUP):
            for label, nbytes in self.moment.items:
                yield self.entry("evaluation", label, nbytes)

    def _outside(self) -> Iterator[Entry]:
        label = f"buffers of {communicators(self.layout)} NCCL communicators"
        for text, nbytes in (
            ("CUDA context and loaded kernels", context(self.gpu).value),
            ("workspaces of cuBLAS and Transformer Engine, from PyTorch's allocator", self.workspaces),
            (label, communication(self.layout, self.gpu).value),
            (
                "blocks that PyTorch's allocator usually holds idle, and what measured cards show beyond",
                self.idle,
            ),
        ):
            yield self.entry("outside", text, nbytes)

    # -- activations ----------------------------------------------------------------------------------------------------

    @cached_property
    def holdings(self) -> list[Holding]:
        """Return the tensors in flight, chunk by chunk, then (negative) what layers do not hold of the current micro-batch."""
        if self.work is None:
            return []
        at_head = self.moment.phase.at_head
        held = self.rank.holdings(self.work, self.moment.gone, at_head=at_head, by_chunk=True)
        return sorted(held, key=lambda holding: holding.gone)

    def term_name(self, term: Kept) -> str:
        """Return the name of the kind of layer, or of the end of the model, that a term belongs to."""
        return str(term.unit) if isinstance(term.unit, End) else self.kind(term.unit)

    def _activations(self) -> Iterator[Entry]:
        gone = [holding for holding in self.holdings if holding.gone]
        for holding in self.holdings:
            if holding.gone:
                continue
            terms = sorted(holding.each.terms, key=lambda term: _order(term.unit))
            for term in terms:
                yield from self._in_flight(holding, term)
                if term.unit is End.PREDICTION:
                    yield from self._freed(*(other for other in gone if other.each.terms[0].unit is End.PREDICTION))
        yield from self._freed(*(other for other in gone if other.each.terms[0].unit is not End.PREDICTION))

    def _in_flight(self, holding: Holding, term: Kept) -> Iterator[Entry]:
        """Yield what the micro-batches in flight hold in the layers of a chunk."""
        name, flight, waits = self.term_name(term), holding.whole, holding.waiting
        many = f" x {flight:g} micro-batches in flight" if flight != 1 else ""
        if not isinstance(term.unit, End):
            label = f"{term.stored} x {term.kept:,} B ({name}){many}"
            more = (
                f"{term.count} x {term.waiting:,} B ({name}) x {waits:g} micro-batches that wait for the weights'"
                " gradients"
            )
        elif term.unit is End.PREDICTION:
            label = f"{self._modules()} x {flight:g} micro-batches in flight"
            more = f"{self._modules()}, {waits:g} micro-batches that wait for the weights' gradients"
        else:
            shared = term.unit is End.SHARED
            label, more = f"{'what all layers share: tables of rotary positions, masks' if shared else name}{many}", ""
        times = flight * term.stored
        yield self.entry("activations", label, times * term.kept, layer=name, times=times)
        waiting = waits * term.count
        yield self.entry("activations", more, waiting * term.waiting, layer=name, times=waiting)

    def _freed(self, *gone: Holding) -> Iterator[Entry]:
        """Yield what the micro-batch at work does not hold: not kept yet, or given back."""
        assert self.work is not None or not gone
        forward = self.work is not None and self.work.forward
        why, over = ("not come to yet", "") if forward else ("given back", " whose backward is over")
        for holding in gone:
            for term in holding.each.terms:
                name = self.term_name(term)
                if term.unit is End.PREDICTION:
                    label, more = (
                        f"{self._modules()}, {why}",
                        f"{self._modules()}, of it waiting for the weights' gradients",
                    )
                else:
                    label = f"{why}: {term.stored} x {term.kept:,} B ({name}){over}"
                    more = f"{term.count} x {term.waiting:,} B ({name}) of the same, waiting for the weights' gradients"
                times, waiting = holding.whole * term.stored, holding.waiting * term.count
                yield self.entry("activations", label, times * term.kept, layer=name, times=times)
                yield self.entry("activations", more, waiting * term.waiting, layer=name, times=waiting)

    def _modules(self) -> str:
        assert self.memory.prediction is not None
        return f"multi-token prediction ({self.memory.prediction.modules} x)"

    def tensors(self) -> Iterator[Entry]:
        """Yield the entries of activations, layers of one kind together and split by operation and tensor."""
        stored: dict[Any, Size] = {}
        waiting: dict[Any, Size] = {}
        terms: dict[Any, Kept] = {}
        for holding in self.holdings:
            for term in holding.each.terms:
                terms.setdefault(term.unit, term)
                stored[term.unit] = stored.get(term.unit, 0) + holding.whole * term.stored
                waiting[term.unit] = waiting.get(term.unit, 0) + holding.waiting * term.count
        first = self.memory.key(self.stage, self.stage.start)
        if End.IDLE in terms:
            stored[first] = stored[first] - stored[End.IDLE]  # it has a block of its own, of what it does keep
        for unit, term in sorted(terms.items(), key=lambda item: _order(item[0])):
            name, times, waits = self.term_name(term), stored[unit], waiting[unit]
            more = waits * term.waiting
            if unit is End.SHARED:
                text = "rotary tables and masks, which all layers share"
                yield self.entry("activations", text, times * term.kept, layer=name, times=times)
            elif unit in (End.PREDICTION, End.IDLE):
                whole = self.memory.facts[first].kept if unit is End.IDLE else 0
                yield self.entry("activations", name, times * (whole + term.kept) + more, layer=name, times=times)
            else:
                layer, again = self.memory.embedding, NOTHING
                if unit is not End.EMBEDDING:
                    layer, again = self.memory.facts[unit].layer, self.memory.facts[unit].recompute
                for operation, tensor in kept_by(layer, again):
                    yield self.entry(
                        "activations",
                        tensor.name,
                        times * tensor.nbytes,
                        layer=name,
                        operation=operation,
                        times=times,
                        source=READ_OFF,
                    )
                text = f"{name}: waits for the gradients of its weights"
                yield self.entry("activations", text, more, layer=f"{name} waiting", times=waits)

    # -- the loss, and what lives only for a while ----------------------------------------------------------------------

    def _loss(self) -> Iterator[Entry]:
        work, phase, memory = self.work, self.moment.phase, self.memory
        if not self.stage.last or work is None:
            return
        index = next(number for number, chunk in enumerate(self.stage.chunks) if chunk.last)
        holding = self.holdings[index]
        head, head_waiting, own = holding.each.head, holding.each.head_waiting, index == work.chunk
        others, waits = holding.heads, holding.heads_waiting + int(phase is Phase.PREDICTION and own and work.splits)
        label = f"{others:g} other micro-batches in flight x {head:,} B"
        yield self.entry("loss", label, head * others, layer="head", operation="others", times=others)
        if phase is Phase.LOSS and memory.prediction is not None:
            label = "kept by the heads of multi-token prediction"
            yield self.entry("loss", label, memory.prediction.head, layer="head", operation="prediction")
        label = f"{waits:g} that wait for the gradient of the head's weights x {head_waiting:,} B"
        yield self.entry("loss", label, waits * head_waiting, layer="head", operation="waiting", times=waits)
        if phase is Phase.LOSS and self.moment.point is not None and self.moment.point.doing == "prediction":
            label = "the head's gradient, while it is copied into the bucket"
            yield self.entry("loss", label, memory.head_copied, layer="head", operation="working")
        elif phase is Phase.LOSS:
            point, forward, backward = self.moment.point, memory.head_forming, memory.head_backward
            chosen = None if point is None or not memory.head_apart else {"head": True, "loss": False}.get(point.doing)
            is_forward = forward >= backward if chosen is None else chosen
            which, nbytes = ("forward", forward) if is_forward else ("backward", backward)
            label = f"the largest set alive at once in the head's {which}"
            yield self.entry("loss", label, nbytes, layer="head", operation="working")

    def _transient(self) -> Iterator[Entry]:
        phase, total, key, work = self.moment.phase, self.moment.parts["transient"], self.moment.key, self.work
        group, memory = self.layout.recompute.group, self.memory
        if phase is Phase.EMBEDDING:
            output = memory.embedding.operations[-1].outputs[0].nbytes if memory.reaches_embedding else 0
            label = "a second gradient of the token table, until the two are summed"
            yield self.entry("transient", label, total - output, layer="embedding")
            yield self.entry("transient", "the gradient of the embedding's output", output, layer="embedding")
        elif phase is Phase.REDUCTION:
            label = "whole gradients of the unit that is reduced, as they came and in the dtype of the reduction"
            yield self.entry("transient", label, total)
        elif phase.between_steps:
            return
        elif phase is Phase.CLIP:
            label = "the last reduction, the norm of the gradients in float64, or their float32 copy"
            yield self.entry("transient", label, total)
        elif key is None and phase is Phase.FORWARD:
            label = "the last layer's output, and what the model's forward holds: masks, the embedding's output"
            yield self.entry("transient", label, total)
        elif key is None:
            label = f"temporary of {self.training.framework.name}'s optimizer step"
            yield self.entry("transient", label, total)
        else:
            facts, kind = memory.facts[key], self.kind(key)
            kept = "of it, held for the backward (counted under activations)"
            if work is not None and work.forward:
                position = self.stage.chunks[work.chunk].stop - 1 - sum(self.moment.gone.values())
                forming = memory.forming(self.stage, position)
                label = f"the largest set alive at once in the forward of one {kind}, or while its weights are gathered"
                yield self.entry("transient", label, forming, layer=kind)
                yield self.entry("transient", kept, -facts.kept, layer=kind)
                label = "held by the model's forward: masks, the embedding's output"
                yield self.entry("transient", label, memory.around(self.stage))
                return
            label = f"the largest set alive at once in the backward of one {kind}"
            yield self.entry("transient", label, facts.working, layer=kind)
            yield self.entry("transient", kept, -facts.kept, layer=kind)
            if key[1] and group > 1:
                more = min(group, self.stage.stop - self.stage.start) - 1
                label = f"{more} more layers of the group, run again together"
                yield self.entry("transient", label, more * facts.layer.saved(), layer=kind)
            if memory.engine is not None:
                more = min(group, self.stage.stop - self.stage.start) - 1 if key[1] and group > 1 else 0
                rest = total - (facts.working - facts.kept + more * facts.layer.saved())
                yield self.entry("transient", "what a full bucket's flat copy needs more than that", rest)


def _order(unit: Key | End) -> int:
    """Layers first, then the ends."""
    return 1 + list(End).index(unit) if isinstance(unit, End) else 0


def kept_by(layer: Layer, again: Recompute = NOTHING) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that a layer keeps for its backward, with the name of the first operation that needs it there.

    again: what is recomputed in backward, whose tensors are not kept
    """
    keeper: dict[str, str] = {}
    for operation in layer:
        for tensor in (*operation.keeps, *(operation.inputs if operation.name in again else ())):
            keeper.setdefault(tensor.name, operation.name)
    for tensor in layer.kept(again):
        yield keeper.get(tensor.name, tensor.name), tensor
