"""A block of the treemap, explained: the rule, the formula with the user's numbers, the tensors, the source."""

from __future__ import annotations

from typing import Any

from loadgauge.core.answers.figures.treemap import Node, treemap
from loadgauge.core.answers.why.reason import Line, Reason
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.estimate.explain import Explanation, Kept
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import Estimate
from loadgauge.page.panels.reasons import Step, shown


def explained(result: Estimate, id: str, tree: list[Node] | None = None) -> dict[str, Any]:
    """Return why one block of the treemap is what it is, by its id, in the form of `reasons.shown`, with its tensors [bytes].

    tree: the treemap, where it is there already.

    Raises `ConfigError` for an unknown block. The numbers are those of `loadgauge estimate --explain`.
    """
    part = id.partition("/")[0]
    if part not in PARTS:
        raise ConfigError(f"no block {id[:60]!r}", key="id")
    block = find(treemap(result) if tree is None else tree, id)
    explanation = result.explain(part)
    lines = tuple(
        Line(
            what=form.what,
            letters=form.letters,
            numbers=form.numbers,
            value=form.nbytes,
            unit="bytes",
            legend=form.legend,
        )
        for form in explanation.formulas
    )
    value = result.memory.parts[part] if block is None else block["bytes"]
    found = Reason(
        topic=part, what=part, value=value, unit="byte", basis=explanation.basis, rule=explanation.rule,
        notes=explanation.notes, sources=explanation.sources,
    )  # fmt: skip
    steps = (Step(step.what, step.nbytes, "B") for step in explanation.steps)
    return {**shown(value, "B", found, lines, steps), "tensors": _tensors(explanation, id)}


def find(nodes: list[Node], id: str) -> Node | None:
    """Return the block with this id (`part/layer/...`) in a tree of blocks; None where there is none."""
    for node in nodes:
        if node["id"] == id:
            return node
        if id.startswith(f"{node['id']}/") and (inner := find(node["children"], id)) is not None:
            return inner
    return None


def _tensors(explanation: Explanation, id: str) -> list[dict[str, Any]]:
    """The tensors of a block: all of its part, or those of the layer, operation or tensor that the id names."""
    place = id.partition("/")[2]
    chosen = [tensor for tensor in explanation.tensors if not place or _within(tensor, place)]
    return [
        {
            "layer": tensor.layer,
            "name": tensor.name,
            "numel": tensor.numel,
            "bytes": tensor.nbytes,
            "itemsize": tensor.nbytes / tensor.numel if tensor.numel else None,
            "saved_by": list(tensor.by),
        }
        for tensor in chosen or explanation.tensors
    ]


def _within(tensor: Kept, place: str) -> bool:
    """Return whether a tensor is under `layer/operation/tensor`."""
    layer, _, rest = place.partition("/")
    operation, _, name = rest.partition("/")
    if tensor.layer != layer:
        return False
    return (not name or tensor.name == name) and (
        not operation or any(by.removesuffix(" (runs again)") == operation for by in tensor.by)
    )
