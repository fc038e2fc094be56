"""Why a part of the memory is as large as it is: the rule, its entries in the ledger, formulas, tensors and sources.

Each explanation adds up, step by step, to the very number that `estimate` gives for that part at that phase.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, Size
from loadgauge.core.base.sources import cite
from loadgauge.core.definitions.model.lora import base_format
from loadgauge.core.estimate.memory.ledger import NOT_ITEMISED, READ_OFF, Ledger
from loadgauge.core.estimate.memory.peak import Memory, When
from loadgauge.core.estimate.memory.phases import PARTS, Phase
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.schedule.stages import Key
from loadgauge.core.estimate.states.optimizer_step import away, on_card
from loadgauge.core.estimate.symbols import (
    MEANING,
    letter,
    substitute,
    symbolic_block,
    symbolic_ends,
    symbolic_view,
    text,
)
from loadgauge.core.estimate.workings import Workings
from loadgauge.core.layers import block_layer, head_layer
from loadgauge.core.layers.operations.operations import NOTHING, Layer, Recompute


class Formula(msgspec.Struct, frozen=True, kw_only=True):
    """A closed form with letters, with the user's numbers in their place, and its value [bytes].

    `letters` is empty where sizes do not divide evenly and only the whole numbers hold.
    """

    what: str
    letters: str
    numbers: str
    nbytes: Size
    legend: dict[str, tuple[str, Size]]


class Step(msgspec.Struct, frozen=True):
    """One summand [bytes]: an entry of the ledger."""

    what: str
    nbytes: Size


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor held from forward to backward, and the operations that keep it."""

    layer: str
    name: str
    numel: Size
    nbytes: Size
    by: tuple[str, ...]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The items of one part of the memory, on the worst rank at one phase. `steps` add up to `total` [bytes].

    peak, largest: the phase of the rank's peak and the one at which this part is largest; at_peak, at_largest: bytes
    of the part then
    """

    part: str
    total: Size
    moment: str
    phase: Phase
    peak: str
    at_peak: Size
    largest: str
    at_largest: Size
    stage: int
    rule: str
    basis: str
    steps: tuple[Step, ...]
    formulas: tuple[Formula, ...] = ()
    tensors: tuple[Kept, ...] = ()
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain values for JSON [bytes]."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def explain(workings: Workings, memory: Memory, basis: Mapping[str, str], part: str, at: When = "peak") -> Explanation:
    """Explain one part of an estimate (`PARTS`) at one phase of the worst rank; see `Estimate.explain`.

    basis: of each part, whether it is derived or assumed; at: "peak", "largest" (where this part is largest), or a phase of
    the step, of which the moment is taken at which the part is largest. Raises `ConfigError` where the rank has no moment in
    that phase.
    """
    if part not in PARTS:
        raise ConfigError(f"unknown part {part!r} (known: {', '.join(PARTS)})", key="explain")
    index = memory.index(part, at)
    ledger, moment, total = workings.ledger(index), memory.moments[index], memory.moments[index].parts[part]
    steps = [Step(entry.what, entry.nbytes) for entry in ledger.entries(part)]
    rest = total - sum(step.nbytes for step in steps)
    if abs(rest) > 1e-9 * memory.total:
        steps.append(Step(NOT_ITEMISED, rest))
    peak, largest = memory.moments[memory.peak], memory.largest(part)
    return Explanation(
        part=part,
        total=total,
        moment=moment.name,
        phase=moment.phase,
        peak=peak.name,
        at_peak=peak.parts[part],
        largest=largest.name,
        at_largest=largest.parts[part],
        stage=ledger.stage.index,
        basis=basis[part],
        steps=tuple(steps),
        **(_offloaded if part in away(ledger.memory, ledger.moment.phase) else READERS[part])(ledger, part),
    )


def _offloaded(ledger: Ledger, part: str) -> dict[str, Any]:
    nbytes = getattr(ledger.memory.states(ledger.rank.weights), part)
    left = on_card(ledger.memory, ledger.stage)[part]
    rule = (
        "offloaded in part: of each parameter it is in one place" if left else "offloaded: none of it stays on the GPU"
    )
    return {"rule": rule, "notes": (f"on the host: {max(0, nbytes - left):,.0f} bytes",)}


def _cited(*keys: str) -> tuple[str, ...]:
    """The works behind citation keys, each once."""
    return tuple(str(cite(key)) for key in dict.fromkeys(keys))


# -- model states, copies, and what is outside ---------------------------------------------------------------------------


def _weights(ledger: Ledger, _: str) -> dict[str, Any]:
    training, stored = ledger.training, base_format(ledger.quantised)
    stages = "ZeRO 3" if training.framework.weights_stage == 3 else "ZeRO 2 and 3 (FSDP)"
    adapters = () if training.lora is None else (training.lora.source, *(() if stored is None else (stored.source,)))
    return {
        "rule": f"parameters on the rank x bytes per parameter, sharded over the data-parallel ranks by {stages}",
        "sources": _cited(training.precision.source, "rajbhandari2019", *adapters),
        "notes": (_parameters(ledger),),
    }


def _parameters(ledger: Ledger) -> str:
    """Sums of the rank's parameters."""
    memory, stage = ledger.memory, ledger.stage
    layers: dict[Key, int] = {}
    for (kind, _), count in ledger.counts.items():
        layers[kind, False] = layers.get((kind, False), 0) + count
    terms = [f"{count} x {memory.facts[key].weights.total:,} ({ledger.kind(key)})" for key, count in layers.items()]
    for name, layer, here in (("embedding", memory.embedding, stage.first), ("head", memory.head, stage.last)):
        if here and layer.params:
            terms.append(f"{layer.params:,} ({name})")
    if memory.prediction is not None and stage.last:
        terms.append(f"{memory.prediction.weights.total:,} (multi-token prediction)")
    return f"parameters on this rank before ZeRO: {' + '.join(terms)} = {ledger.rank.weights.total:,}"


def _gradients(ledger: Ledger, _: str) -> dict[str, Any]:
    whole = ledger.whole_gradients
    note = "gradients are held through the whole step" if whole else "gradients come into being during backward"
    return {
        "rule": "trainable parameters that have a gradient at this moment x bytes, sharded by ZeRO 2 and 3",
        "sources": _cited(ledger.training.precision.source, "rajbhandari2019"),
        "notes": (note,),
    }


def _optimizer(ledger: Ledger, _: str) -> dict[str, Any]:
    precision, optimizer = ledger.training.precision, ledger.training.optimizer
    return {
        "rule": "trainable parameters x bytes of optimizer states, sharded over the data-parallel ranks by ZeRO 1 and above",
        "sources": _cited(precision.source, optimizer.source, "rajbhandari2019"),
    }


def _gathered(ledger: Ledger, _: str) -> dict[str, Any]:
    return {
        "rule": "copies beside the model states, as the framework makes them",
        "sources": _cited(ledger.training.framework.source),
    }


def _outside(_: Ledger, __: str) -> dict[str, Any]:
    return {"rule": "memory beside the tensors of the step", "notes": ("assumed figures, not measured here",)}


# -- what the layers hold --------------------------------------------------------------------------------------------------


def _activations(ledger: Ledger, _: str) -> dict[str, Any]:
    if ledger.work is None:
        return {"rule": "nothing is kept for backward at this moment"}
    facts = ledger.memory.facts
    tensors = [
        kept for key in ledger.counts for kept in _kept(ledger.kind(key), facts[key].layer, facts[key].recompute)
    ]
    if ledger.stage.first:
        tensors += _kept("embedding", ledger.memory.embedding, NOTHING)
    return {
        "rule": "bytes a layer keeps x layers of the stage x micro-batches in flight",
        "formulas": tuple(_of_layer(ledger, key) for key in ledger.counts),
        "tensors": tuple(tensors),
        "sources": (f"read off {READ_OFF}, counted as in {cite('korthikanti2022')}",),
    }


def _of_layer(ledger: Ledger, key: Key) -> Formula:
    memory = ledger.memory
    block = symbolic_block(memory.model.blocks[key[0]], memory.model.hidden_size, memory.view.tp)
    view = symbolic_view(memory.view, ragged=ledger.layout.tokens is not None, captured=memory.model.own.states_splits)
    layer = block_layer(block.what, letter("h"), view.what)
    again = applied(ledger.layout.recompute, layer, memory.names) if key[1] else NOTHING
    title = f"bytes that one {ledger.kind(key)} keeps"
    return closed_form(title, layer.saved(again), block.numbers | view.numbers, memory.facts[key].kept)


def _kept(where: str, layer: Layer, again: Recompute) -> Iterator[Kept]:
    for tensor in layer.kept(again):
        yield Kept(
            layer=where,
            name=tensor.name,
            numel=tensor.numel,
            nbytes=tensor.nbytes,
            by=layer.keepers(tensor.name, again),
        )


def _loss(ledger: Ledger, _: str) -> dict[str, Any]:
    memory, training = ledger.memory, ledger.training
    if not ledger.stage.last or ledger.work is None:
        return {"rule": "the head is not at work on this rank at this moment"}
    ends, view = (
        symbolic_ends(memory.model),
        symbolic_view(memory.view, ragged=ledger.layout.tokens is not None, captured=memory.model.own.states_splits),
    )
    kept = head_layer(ends.what, view.what).saved()
    numbers = ends.numbers | view.numbers
    return {
        "rule": "logits, their float32 copies and gradients while the loss is computed",
        "formulas": (closed_form("bytes that the head keeps for backward", kept, numbers, memory.head_kept),),
        "tensors": tuple(_kept("head", memory.head, NOTHING)),
        "sources": (f"read off the head's list of operations; kernels: {cite(training.framework.source)}",),
        "notes": (f"loss: {training.kernels.loss}",),
    }


def _transient(ledger: Ledger, _: str) -> dict[str, Any]:
    phase, work = ledger.moment.phase, ledger.work
    if phase is Phase.EMBEDDING:
        return {"rule": "temporaries of the backward of the embedding"}
    if phase is Phase.REDUCTION:
        return {"rule": "temporaries of the reduction of gradients"}
    if phase is Phase.CLIP:
        return {
            "rule": "temporaries between backward and the optimizer step",
            "sources": _cited(ledger.training.framework.source),
        }
    if ledger.moment.key is None:
        return {"rule": "temporaries of the optimizer step" if phase is Phase.STEP else "nothing at this moment"}
    way = "forward" if work is not None and work.forward else "backward"
    walked = "walked operation by operation, as autograd makes and drops its tensors"
    return {"rule": f"temporaries of the {way} of one layer", "sources": (walked,)}


def _evaluation(ledger: Ledger, _: str) -> dict[str, Any]:
    if not ledger.moment.phase.between_steps:
        return {"rule": "nothing at this moment"}
    rule = "what an evaluation holds: the forward of a batch, logits kept of earlier ones, a cache of keys and values"
    return {"rule": rule, "sources": _cited("transformers")}


READERS: dict[str, Callable[[Ledger, str], dict[str, Any]]] = {
    "weights": _weights,
    "gradients": _gradients,
    "optimizer": _optimizer,
    "gathered": _gathered,
    "activations": _activations,
    "loss": _loss,
    "transient": _transient,
    "evaluation": _evaluation,
    "outside": _outside,
}
"""Rule, formulas, tensors, sources and notes of each part, beside its entries."""


def closed_form(title: str, expression: Any, numbers: dict[str, Size], nbytes: Size) -> Formula:
    """The closed form, if the whole numbers agree with it."""
    if substitute(expression, numbers) != nbytes:
        return Formula(what=title, letters="", numbers="", nbytes=nbytes, legend={})
    letters = text(expression)
    names = {symbol.name for symbol in getattr(expression, "free_symbols", ())}
    filled = re.sub(r"[A-Za-z_]+", lambda match: str(numbers.get(match[0], match[0])), letters)
    legend = {name: (MEANING[name], numbers[name]) for name in MEANING if name in names}
    return Formula(what=title, letters=letters, numbers=filled, nbytes=nbytes, legend=legend)
