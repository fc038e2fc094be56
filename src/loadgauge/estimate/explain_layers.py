"""Explanations of what the layers hold: activations, the loss, and what lives only while one layer runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from loadgauge.algebra import Size, ceil_div
from loadgauge.estimate.equation.symbols import (
    MEANING,
    letter,
    substitute,
    symbolic_block,
    symbolic_ends,
    symbolic_view,
    text,
)
from loadgauge.estimate.memory.in_flight import Work
from loadgauge.estimate.memory.phases import Phase
from loadgauge.estimate.memory.rank_memory import Prediction
from loadgauge.estimate.memory.recompute import applied
from loadgauge.estimate.workings import Apart, Explanation, Formula, Kept, Key, Step
from loadgauge.layers import block_layer, head_layer
from loadgauge.layers.operations import NOTHING, Layer, Recompute
from loadgauge.sources import cite


def activations(apart: Apart) -> Explanation:
    """What the layers of the stage keep for backward, for every micro-batch in flight."""
    work = apart.at_work.work
    if work is None:
        return apart.explanation("nothing is kept for backward at this moment", ())
    facts, stage = apart.facts, apart.stage
    steps, formulas, tensors = [], [], []
    for chunk, flight, waits in zip(stage.chunks, *work.flight, strict=True):
        many = f" x {flight:g} micro-batches in flight" if flight != 1 else ""
        for key, count in facts.counts(stage, chunk.start, chunk.stop).items():
            one, name, stored = facts.facts[key], apart.kind(key), _stored(apart, key, count)
            steps.append(Step(f"{stored} x {one.kept:,} B ({name}){many}", flight * stored * one.kept))
            what = (
                f"{count} x {one.waiting:,} B ({name}) x {waits:g} micro-batches that wait for the weights' gradients"
            )
            steps.append(Step(what, waits * count * one.waiting))
        if chunk.first:
            steps.append(Step(f"embedding{many}", flight * facts.embedding_kept))
        steps.append(Step(f"what all layers share: tables of rotary positions, masks{many}", flight * facts.shared))
        if facts.prediction is not None and chunk.last:
            steps += _predicted(apart, work, facts.prediction, flight, waits)
    for key in apart.counts:
        formulas.append(_layer_formula(apart, key))
        tensors += _kept(apart.kind(key), facts.facts[key].layer, facts.facts[key].recompute)
    if stage.first:
        tensors += _kept("embedding", facts.embedding, NOTHING)
    for key, count in apart.at_work.gone.items():
        stored, one = _stored(apart, key, count), facts.facts[key]
        why = "not come to yet" if work.forward else "given back"
        over = "" if work.forward else " whose backward is over"
        steps.append(Step(f"{why}: {stored} x {one.kept:,} B ({apart.kind(key)}){over}", -stored * one.kept))
        if work.splits:
            what = f"{count} x {one.waiting:,} B ({apart.kind(key)}) of the same, waiting for the weights' gradients"
            steps.append(Step(what, count * one.waiting))
    return apart.explanation(
        "bytes a layer keeps x layers of the stage x micro-batches in flight",
        tuple(steps),
        formulas=tuple(formulas),
        tensors=tuple(tensors),
        sources=(f"read off the layer's list of operations, counted as in {cite('korthikanti2022')}",),
    )


def _predicted(apart: Apart, work: Work, extra: Prediction, flight: Size, waits: Size) -> Iterator[Step]:
    """What multi-token prediction keeps, on the chunk before the head."""
    what = f"multi-token prediction ({extra.modules} x)"
    yield Step(f"{what} x {flight:g} micro-batches in flight", flight * extra.kept)
    yield Step(f"{what}, {waits:g} micro-batches that wait for the weights' gradients", waits * extra.waiting)
    if apart.stage.chunks[work.chunk].last and not apart.moment.phase.at_head:
        yield Step(f"{what}, {'not come to yet' if work.forward else 'given back'}", -extra.kept)
        yield Step(f"{what}, of it waiting for the weights' gradients", extra.waiting if work.splits else 0)


def _stored(apart: Apart, key: Key, count: int) -> Size:
    """How many layers of a kind keep something: of those that run again, one a group."""
    return ceil_div(count, apart.layout.recompute.group) if key[1] else count


def _layer_formula(apart: Apart, key: Key) -> Formula:
    block = symbolic_block(apart.model.blocks[key[0]], apart.model.hidden_size, apart.view.tp)
    view = symbolic_view(apart.view, ragged=apart.layout.tokens is not None)
    layer = block_layer(block.what, letter("h"), view.what)
    again = applied(apart.layout.recompute, layer, apart.facts.names) if key[1] else NOTHING
    what = f"bytes that one {apart.kind(key)} keeps"
    return _formula(what, layer.saved(again), block.numbers | view.numbers, apart.facts.facts[key].kept)


def _kept(where: str, layer: Layer, again: Recompute) -> list[Kept]:
    found = []
    for tensor in layer.kept(again):
        users = [
            operation.name + (" (runs again)" if operation.name in again else "")
            for operation in layer
            if any(kept.name == tensor.name for kept in operation.keeps)
            or (operation.name in again and any(read.name == tensor.name for read in operation.inputs))
        ]
        found.append(Kept(layer=where, name=tensor.name, numel=tensor.numel, nbytes=tensor.nbytes, by=tuple(users)))
    return found


def loss(apart: Apart) -> Explanation:
    """Logits, their copies and gradients on the last stage."""
    work = apart.at_work.work
    if not apart.stage.last or work is None:
        return apart.explanation("the head is not at work on this rank at this moment", ())
    facts, index = apart.facts, next(n for n, chunk in enumerate(apart.stage.chunks) if chunk.last)
    one, own = facts.of_chunk(apart.stage, apart.stage.chunks[index]), index == work.chunk
    others, waits = work.flight.whole[index] - own, work.flight.waiting[index]
    steps = [Step(f"{others:g} other micro-batches in flight x {one.head:,} B", one.head * others)]
    waits = waits + (own and work.splits and apart.moment.phase is not Phase.LOSS)
    if apart.moment.phase is Phase.LOSS and facts.prediction is not None:
        steps.append(Step("kept by the heads of multi-token prediction", facts.prediction.head))
    what = f"{waits:g} that wait for the gradient of the head's weights x {one.head_waiting:,} B"
    steps.append(Step(what, waits * one.head_waiting))
    if apart.moment.phase is Phase.LOSS:
        point, forward, backward = apart.at_work.point, facts.head_forming, facts.head_backward
        chosen = None if point is None or not facts.head_apart else {"head": True, "loss": False}.get(point.doing)
        is_forward = forward >= backward if chosen is None else chosen
        which, nbytes = ("forward", forward) if is_forward else ("backward", backward)
        steps.append(Step(f"the largest set alive at once in the head's {which}", nbytes))
    ends, view = symbolic_ends(apart.model), symbolic_view(apart.view, ragged=apart.layout.tokens is not None)
    kept = head_layer(ends.what, view.what).saved()
    return apart.explanation(
        "logits, their float32 copies and gradients while the loss is computed",
        tuple(steps),
        formulas=(
            _formula("bytes that the head keeps for backward", kept, ends.numbers | view.numbers, facts.head_kept),
        ),
        tensors=tuple(_kept("head", facts.head, NOTHING)),
        sources=(f"read off the head's list of operations; kernels: {cite(apart.training.framework.source)}",),
        notes=(f"loss: {apart.training.kernels.loss}",),
    )


def transient(apart: Apart) -> Explanation:
    """What one layer, or the optimizer step, makes for itself and drops again."""
    if apart.at_embedding:
        total = apart.moment.parts["transient"]
        output = apart.facts.embedding.operations[-1].outputs[0].nbytes
        steps = [
            Step("a second gradient of the token table, until the two are summed", total - output),
            Step("the gradient of the embedding's output", output),
        ]
        return apart.explanation("temporaries of the backward of the embedding", tuple(steps))
    if apart.at_reduction:
        what = "whole gradients of the unit that is reduced, as they came and in the dtype of the reduction"
        return apart.explanation(
            "temporaries of the reduction of gradients", (Step(what, apart.moment.parts["transient"]),)
        )
    key, group = apart.at_work.key, apart.layout.recompute.group
    if key is None:
        rule = "temporaries of the optimizer step" if apart.at_step else "nothing at this moment"
        what = f"temporary of {apart.training.framework.name}'s optimizer step"
        return apart.explanation(rule, (Step(what, apart.moment.parts["transient"]),))
    facts, work = apart.facts.facts[key], apart.at_work.work
    walked = "walked operation by operation, as autograd makes and drops its tensors"
    kept = Step("of it, held for the backward (counted under activations)", -facts.kept)
    if work is not None and work.forward:
        position = apart.stage.chunks[work.chunk].stop - 1 - sum(apart.at_work.gone.values())
        forming, what = apart.facts.forming(apart.stage, position), f"the forward of one {apart.kind(key)}"
        largest = Step(f"the largest set alive at once in {what}, or while its weights are gathered", forming)
        around = Step("held by the model's forward: masks, the embedding's output", apart.facts.around(apart.stage))
        rule = "temporaries of the forward of one layer"
        return apart.explanation(rule, (largest, kept, around), sources=(walked,))
    steps = [Step(f"the largest set alive at once in the backward of one {apart.kind(key)}", facts.working), kept]
    if key[1] and group > 1:
        more = min(group, apart.stage.stop - apart.stage.start) - 1
        steps.append(Step(f"{more} more layers of the group, run again together", more * facts.layer.saved()))
    return apart.explanation(
        "temporaries of the backward of one layer",
        tuple(steps),
        sources=(walked,),
    )


def _formula(what: str, expression: Any, numbers: dict[str, Size], nbytes: Size) -> Formula:
    """The closed form, if the whole numbers agree with it."""
    if substitute(expression, numbers) != nbytes:
        return Formula(what=what, letters="", numbers="", nbytes=nbytes, legend={})
    letters = text(expression)
    names = {symbol.name for symbol in getattr(expression, "free_symbols", ())}
    filled = re.sub(r"[A-Za-z_]+", lambda match: str(numbers.get(match[0], match[0])), letters)
    legend = {name: (MEANING[name], numbers[name]) for name in MEANING if name in names}
    return Formula(what=what, letters=letters, numbers=filled, nbytes=nbytes, legend=legend)
