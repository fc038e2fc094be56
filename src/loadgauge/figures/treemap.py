"""Where every byte goes: the parts at the peak moment of the worst rank, down to kinds of layers, operations and tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loadgauge.algebra import Size, ceil_div
from loadgauge.estimate.explain import explain
from loadgauge.estimate.memory.phases import PARTS, Phase
from loadgauge.estimate.memory.rank_memory import Prediction
from loadgauge.estimate.memory.states import RankWeights
from loadgauge.estimate.schedule.stages import Key
from loadgauge.estimate.workings import NOT_ITEMISED
from loadgauge.figures.shown import Shown, shared_out
from loadgauge.layers.operations import NOTHING, Layer, Recompute, Tensor, Weight

Node = dict[str, Any]
STATES = ("weights", "gradients", "optimizer")
GROUPS = {
    **dict.fromkeys(STATES, "states"), "activations": "activations", "loss": "activations", "gathered": "temporary",
    "transient": "temporary", "outside": "outside",
}  # fmt: skip
"""The four kinds of parts that have colours of their own."""


def treemap(shown: Shown) -> list[Node]:
    """The parts of the estimate, each with what it is made of [bytes]. Children add up to their parent, all to the total.

    An `id` is the names on the way down, with slashes between; `/api/explain` takes any of them.
    """
    parts = shown.result.memory.parts
    return [
        {**node(part, part, part, parts[part], _children(shown, part)), "group": GROUPS[part]}
        for part in PARTS
        if parts[part]
    ]


def node(part: str, id: str, label: str, nbytes: Size, children: Iterable[Node] = ()) -> Node:
    """One block. What its children do not account for is said, never lost."""
    listed = [child for child in children if child["bytes"]]
    if listed:
        settle(listed, nbytes, part, id)
    return {"id": id, "part": part, "label": label, "bytes": nbytes, "children": listed}


def settle(children: list[Node], nbytes: Size, part: str, id: str) -> None:
    """Makes children add up to their parent: the last bits of floats go to the largest, more is a child of its own."""
    rest = nbytes - sum(child["bytes"] for child in children)
    if abs(rest) > 1e-9 * nbytes:
        children.append(node(part, f"{id}/rest", NOT_ITEMISED, rest))
        return
    largest = max(children, key=lambda child: child["bytes"])
    for _ in range(4):
        if not rest:
            return
        # One of floats: adding the rest once may leave another.
        largest["bytes"] = largest["bytes"] + rest
        largest["children"] = []
        rest = nbytes - sum(child["bytes"] for child in children)


def _children(shown: Shown, part: str) -> list[Node]:
    if part in shown.memory.offloaded:
        return []
    if part in STATES:
        return _states(shown, part)
    if part == "activations":
        return _activations(shown)
    if part == "loss":
        return _loss(shown)
    if part == "transient":
        return []
    steps = explain(shown.result, part).steps
    return [node(part, f"{part}/{number}", step.what, step.nbytes) for number, step in enumerate(steps)]


# -- model states ------------------------------------------------------------------------------------------------------


def _states(shown: Shown, part: str) -> list[Node]:
    """Each kind of layer and each weight by its share of the part, as ZeRO shares out all of them together."""
    total = shown.result.memory.parts[part]
    if part == "gradients" and shown.memory.lazy and shown.apart.key is not None:
        steps = explain(shown.result, part).steps
        return [node(part, f"{part}/{number}", step.what, step.nbytes) for number, step in enumerate(steps)]
    pieces = list(_pieces(shown))
    sizes = [[times * _of(shown, weight, part) for weight in weights] for _, times, weights in pieces]
    shares = shared_out(total, [sum(each) for each in sizes])
    found = []
    for (label, times, weights), each, share in zip(pieces, sizes, shares, strict=True):
        id = f"{part}/{label}"
        name = f"{times} x {label}" if times > 1 else label
        inner = [
            node(part, f"{id}/{weight.name}", weight.name, nbytes)
            for weight, nbytes in zip(weights, shared_out(share, each), strict=True)
        ]
        found.append(node(part, id, name, share, inner))
    return found


def _pieces(shown: Shown) -> Iterable[tuple[str, int, tuple[Weight, ...]]]:
    """What holds weights on the worst rank: its name, how many of it, its weights."""
    apart, memory, stage = shown.apart, shown.memory, shown.apart.stage
    layers: dict[int, int] = {}
    for (kind, _), count in apart.counts.items():
        layers[kind] = layers.get(kind, 0) + count
    for kind, count in layers.items():
        yield apart.names[kind], count, memory.facts[kind, False].layer.weights
    if stage.first:
        yield "embedding", 1, memory.embedding.weights
    if stage.last:
        yield "head", 1, memory.head.weights
        if (more := memory.prediction) is not None:
            ends = tuple(weight for end in more.ends for weight in end.weights)
            yield "multi-token prediction", more.modules, (*memory.facts[more.key].layer.weights, *ends)


def _of(shown: Shown, weight: Weight, part: str) -> Size:
    return getattr(shown.memory.states(RankWeights.of((weight,))), part)


# -- what is kept for backward -----------------------------------------------------------------------------------------


def _activations(shown: Shown) -> list[Node]:
    """Of each kind of layer what it keeps, times the layers and micro-batches that hold it at the peak."""
    apart, memory = shown.apart, shown.memory
    work, gone = apart.at_work.work, apart.at_work.gone
    if work is None:
        return []
    held: dict[Key, Size] = {}
    waiting: dict[Key, Size] = {}
    ends: Size = 0
    shared: Size = 0

    def stored(key: Key, count: int) -> Size:
        return ceil_div(count, apart.layout.recompute.group) if key[1] else count

    found: list[Node] = []
    for chunk, flight, waits in zip(apart.stage.chunks, *work.flight, strict=True):
        for key, count in memory.counts(apart.stage, chunk.start, chunk.stop).items():
            held[key] = held.get(key, 0) + flight * stored(key, count)
            waiting[key] = waiting.get(key, 0) + waits * count
        ends = ends + (flight if chunk.first else 0)
        shared = shared + flight
        if memory.prediction is not None and chunk.last:
            found += _predicted(shown, memory.prediction, flight, waits)
    for key, count in gone.items():
        held[key] = held[key] - stored(key, count)
        if work.splits:
            waiting[key] = waiting[key] + count
    layers = []
    for key, times in held.items():
        facts, name = memory.facts[key], apart.kind(key)
        layers.append(_kept("activations", f"activations/{name}", name, times, facts.layer, facts.recompute))
        waits, label = waiting[key] * facts.waiting, f"{name}: waits for the gradients of its weights"
        layers.append(node("activations", f"activations/{name} waiting", label, waits))
    layers.append(_kept("activations", "activations/embedding", "embedding", ends, memory.embedding, NOTHING))
    label = "rotary tables and masks, which all layers share"
    layers.append(node("activations", "activations/shared", label, shared * memory.shared))
    return layers + found


def _predicted(shown: Shown, extra: Prediction, flight: Size, waits: Size) -> list[Node]:
    """What multi-token prediction keeps, on the chunk before the head."""
    work = shown.apart.at_work.work
    assert work is not None
    if shown.apart.stage.chunks[work.chunk].last and not shown.apart.moment.phase.at_head:
        flight, waits = flight - 1, waits + int(work.splits)
    nbytes = flight * extra.kept + waits * extra.waiting
    return [node("activations", "activations/multi-token prediction", "multi-token prediction", nbytes)]


def _kept(part: str, id: str, name: str, times: Size, layer: Layer, again: Recompute) -> Node:
    """A layer so many times, by its operations and the tensors that they keep."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in layer.kept(again):
        groups.setdefault(_keeper(layer, tensor, again), []).append(tensor)
    inner = []
    for operation, tensors in groups.items():
        one = f"{id}/{operation}"
        each = [node(part, f"{one}/{tensor.name}", tensor.name, times * tensor.nbytes) for tensor in tensors]
        inner.append(node(part, one, operation, sum(leaf["bytes"] for leaf in each), each))
    whole = sum(child["bytes"] for child in inner)
    return node(part, id, f"{times:g} x {name}" if times != 1 else name, whole, inner)


def _keeper(layer: Layer, tensor: Tensor, again: Recompute) -> str:
    """The first operation that needs a tensor in backward."""
    for operation in layer:
        read = (*operation.keeps, *(operation.inputs if operation.name in again else ()))
        if any(one.name == tensor.name for one in read):
            return operation.name
    return tensor.name


# -- the loss ----------------------------------------------------------------------------------------------------------


def _loss(shown: Shown) -> list[Node]:
    """What the head keeps for other micro-batches, what waits, and what it works on."""
    apart, memory = shown.apart, shown.memory
    work, at_head = apart.at_work.work, apart.moment.phase is Phase.LOSS
    if not apart.stage.last or work is None:
        return []
    index = next(number for number, chunk in enumerate(apart.stage.chunks) if chunk.last)
    one, own = memory.of_chunk(apart.stage, apart.stage.chunks[index]), index == work.chunk
    others = work.flight.whole[index] - own
    waits = work.flight.waiting[index] + (own and work.splits and not at_head)
    found = [
        node("loss", "loss/others", f"{others:g} other micro-batches in flight", others * one.head),
        node("loss", "loss/waiting", "waits for the gradient of the head's weights", waits * one.head_waiting),
    ]
    if at_head:
        extra = 0 if memory.prediction is None else memory.prediction.head
        found.append(node("loss", "loss/prediction", "kept by the heads of multi-token prediction", extra))
        found.append(node("loss", "loss/working", "the largest set alive at once in the head", memory.head_working))
    return found
