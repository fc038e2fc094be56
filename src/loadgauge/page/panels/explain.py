"""A block of the treemap, explained: the rule, the formula with the user's numbers, the tensors, the source."""

from __future__ import annotations

import re
from typing import Any

from loadgauge.core.answers.figures.treemap import Node, treemap
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.units import gib, whole
from loadgauge.core.estimate.explain import Explanation, Formula, Kept
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import Estimate

ADDRESSES = (
    (re.compile(r"\(arXiv:([\w.\-/]+)\)"), "https://arxiv.org/abs/{}"),
    (re.compile(r"\((https?://[^\s)]+)\)"), "{}"),
    (re.compile(r"\(((?:github\.com|huggingface\.co|docs\.nvidia\.com|pytorch\.org)/[^\s)]+)\)"), "https://{}"),
)
"""Where a source says to find it."""


def explained(result: Estimate, id: str, tree: list[Node] | None = None) -> dict[str, Any]:
    """Return the rule, formulas, tensors and sources of one block of the treemap, by its id, as plain values [bytes].

    tree: the treemap, where it is there already.

    Raises `ConfigError` for an unknown block. The numbers are those of `loadgauge estimate --explain`.
    """
    part = id.partition("/")[0]
    if part not in PARTS:
        raise ConfigError(f"no block {id[:60]!r}", key="id")
    block = find(treemap(result) if tree is None else tree, id)
    explanation = result.explain(part)
    formulas = [_formula(formula) for formula in explanation.formulas if formula.letters]
    first = formulas[0] if formulas else None
    return {
        "id": id,
        "part": part,
        "title": part if block is None or id == part else f"{part}: {block['label']}",
        "bytes": result.memory.parts[part] if block is None else block["bytes"],
        "part_bytes": explanation.total,
        "rule": explanation.rule,
        "basis": explanation.basis,
        "formula": first["letters"] if first else explanation.rule,
        "numbers": first["numbers"] if first else {},
        "with_numbers": first["with_numbers"] if first else _sum(explanation),
        "formulas": formulas,
        "steps": [{"what": step.what, "bytes": step.nbytes} for step in explanation.steps],
        "tensors": _tensors(explanation, id),
        "source": _source(explanation.sources[0]) if explanation.sources else None,
        "sources": [_source(source) for source in explanation.sources],
        "notes": list(explanation.notes),
    }


def find(nodes: list[Node], id: str) -> Node | None:
    """Return the block with this id (`part/layer/...`) in a tree of blocks; None where there is none."""
    for node in nodes:
        if node["id"] == id:
            return node
        if id.startswith(f"{node['id']}/") and (inner := find(node["children"], id)) is not None:
            return inner
    return None


def _formula(formula: Formula) -> dict[str, Any]:
    return {
        "what": formula.what,
        "letters": formula.letters,
        "numbers": {name: value for name, (_, value) in formula.legend.items()},
        "meaning": {name: meaning for name, (meaning, _) in formula.legend.items()},
        "with_numbers": f"{formula.numbers} = {whole(formula.nbytes)} bytes = {gib(formula.nbytes)}",
        "bytes": formula.nbytes,
    }


def _sum(explanation: Explanation) -> str:
    """How the steps add up."""
    return f"{' + '.join(step.what for step in explanation.steps)} = {whole(explanation.total)} bytes = {gib(explanation.total)}"


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


def _source(text: str) -> dict[str, str]:
    """A source with its address, where it says one.

    >>> _source("Korthikanti et al., Reducing Activation Recomputation (arXiv:2205.05198)")["url"]
    'https://arxiv.org/abs/2205.05198'
    """
    for pattern, address in ADDRESSES:
        match = pattern.search(text)
        if match:
            return {"text": text, "url": address.format(match[1])}
    return {"text": text, "url": ""}
