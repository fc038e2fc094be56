"""Where every byte goes: the parts at the peak moment of the worst rank, down to kinds of layers, operations and tensors."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from loadgauge.core.answers.figure import Figure
from loadgauge.core.base import Size, lists, sums
from loadgauge.core.estimate.memory.ledger import NOT_ITEMISED, Ledger
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.states.optimizer_step import away
from loadgauge.core.estimate.states.states import States
from loadgauge.core.layers.operations.operations import Layer

Node = dict[str, Any]
Piece = tuple[str, int, list[tuple[str, States]]]
STATES = ("weights", "gradients", "optimizer")
GROUPS = {
    **dict.fromkeys(STATES, "states"), "activations": "activations", "loss": "activations", "gathered": "temporary",
    "transient": "temporary", "evaluation": "temporary", "outside": "outside",
}  # fmt: skip
"""The four kinds of parts that have colours of their own."""


@Figure(title="Where every byte goes", form="treemap", order=1, plot="bytes", row=1, shown=("single",))
def treemap(result: Estimate) -> list[Node]:
    """Return the parts of the estimate, each with its contents [bytes]. Children add up to their parent, all to the total.

    An `id` is the path of names, joined by slashes; `/api/explain` takes any of them.
    """
    parts, ledger = result.memory.parts, result.workings.ledger(result.memory.peak)
    pieces = list(_pieces(ledger))
    return [
        {**node(part, part, part, parts[part], _children(result, ledger, part, pieces)), "group": GROUPS[part]}
        for part in PARTS
        if parts[part]
    ]


def node(part: str, id: str, label: str, nbytes: Size, children: Iterable[Node] = ()) -> Node:
    """Return one block of the treemap. Bytes its children do not account for become a child of their own.

    part: of the memory; id, label: see `treemap`; nbytes: of the block; children: blocks within it
    """
    listed = [child for child in children if child["bytes"]]
    if listed:
        settle(listed, nbytes, part, id)
    return {"id": id, "part": part, "label": label, "bytes": nbytes, "children": listed}


def settle(children: list[Node], nbytes: Size, part: str, id: str) -> None:
    """Make children add up to their parent's bytes, in place: rounding goes to the largest, more becomes its own child."""
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


def _children(result: Estimate, ledger: Ledger, part: str, pieces: list[Piece]) -> list[Node]:
    if part in away(ledger.memory, ledger.moment.phase) or part == "transient":
        return []
    if part in STATES and not (part == "gradients" and ledger.memory.lazy and ledger.key is not None):
        return _states(pieces, part, result.memory.parts[part])
    if part == "activations":
        return list(_activations(ledger))
    if part == "loss":
        return [
            node(
                part,
                f"{part}/{entry.operation}",
                LOSS[entry.operation] or entry.what.partition(" x ")[0],
                entry.nbytes,
            )
            for entry in sorted(ledger.entries(part), key=lambda entry: list(LOSS).index(entry.operation))
        ]
    entries = [(entry.what, entry.nbytes) for entry in ledger.entries(part)]
    rest = result.memory.parts[part] - sum(nbytes for _, nbytes in entries)
    if abs(rest) > 1e-9 * result.memory.total:
        entries.append((NOT_ITEMISED, rest))
    return [node(part, f"{part}/{number}", what, nbytes) for number, (what, nbytes) in enumerate(entries)]


LOSS = {
    "others": "", "waiting": "waits for the gradient of the head's weights", "prediction": "", "working": "logits and their copies",
}  # fmt: skip
"""The entries of the loss, in the order in which they are drawn, and what each is called (empty: by what it is of)."""


# -- model states ------------------------------------------------------------------------------------------------------


def _states(pieces: list[Piece], part: str, total: float) -> list[Node]:
    """Each kind of layer and each weight by its share of the part, as ZeRO shards all of them together."""
    sizes = [[times * getattr(states, part) for _, states in weights] for _, times, weights in pieces]
    shares = apportion(total, [sum(weight_bytes) for weight_bytes in sizes])
    nodes = []
    for (label, times, weights), weight_bytes, share in zip(pieces, sizes, shares, strict=True):
        id = f"{part}/{label}"
        name = f"{times} x {label}" if times > 1 else label
        inner = [
            node(part, f"{id}/{weight}", weight, nbytes)
            for (weight, _), nbytes in zip(weights, apportion(share, weight_bytes), strict=True)
        ]
        nodes.append(node(part, id, name, share, inner))
    return nodes


def _pieces(ledger: Ledger) -> Iterator[Piece]:
    """Yield what holds weights on the worst rank: its name, how many of it, the states of each of its weights [bytes]."""
    memory, stage = ledger.memory, ledger.stage

    def piece(name: str, times: int, *layers: Layer) -> Piece:
        weights = (weight for layer in layers for weight in layer.weights)
        return name, times, [(weight.name, memory.states(memory.count((weight,)))) for weight in weights]

    for kind, count in sums((kind, count) for (kind, _), count in ledger.counts.items()).items():
        yield piece(ledger.names[kind], count, memory.facts[kind, False].layer)
    if stage.first:
        yield piece("embedding", 1, memory.embedding)
    if stage.last:
        yield piece("head", 1, memory.head)
        if (more := memory.prediction) is not None:
            yield piece("multi-token prediction", more.modules, memory.facts[more.key].layer, *more.ends)


def apportion(total: float, weights: list[Size]) -> list[float]:
    """Split a total by weights; whole numbers stay whole, and the shares add up to the total.

    >>> apportion(10, [1, 1, 1]), apportion(0, [])
    ([3, 3, 4], [])
    """
    whole = sum(weights)
    if not whole:
        return [0 for _ in weights]
    shares: list[float] = []
    seen: Size = 0
    done: float = 0
    for weight in weights:
        seen = seen + weight
        exact = isinstance(total, int) and isinstance(seen, int) and isinstance(whole, int)
        upto = total * seen // whole if exact else total * (seen / whole)
        shares.append(upto - done)
        done = upto
    return shares


# -- what is kept for backward -----------------------------------------------------------------------------------------


def _activations(ledger: Ledger) -> Iterator[Node]:
    """Each kind of layer by the operations and tensors that its entries in the ledger name."""
    for layer, entries in groupby(ledger.tensors(), key=lambda entry: entry.layer):
        kept, id = list(entries), f"activations/{layer}"
        operations = lists((entry.operation, entry) for entry in kept)
        if "" in operations:  # a layer's bytes that no operation keeps
            yield node("activations", id, kept[0].what, kept[0].nbytes)
            continue
        inner = []
        for operation, tensors in operations.items():
            leaves = [
                node("activations", f"{id}/{operation}/{entry.what}", entry.what, entry.nbytes) for entry in tensors
            ]
            whole = sum(leaf["bytes"] for leaf in leaves)
            inner.append(node("activations", f"{id}/{operation}", operation, whole, leaves))
        times = kept[0].times
        whole = sum(child["bytes"] for child in inner)
        yield node("activations", id, f"{times:g} x {layer}" if times != 1 else layer, whole, inner)
