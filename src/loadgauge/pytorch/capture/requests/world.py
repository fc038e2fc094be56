"""Support of each model type of the installed transformers: a hand-written family, a capture, or none and why.

Nothing is captured here, and neither PyTorch nor transformers is imported: types are read from transformers' own table of classes,
results from `data/capture/tried.json`, which `tools/captured_models.py` makes.
"""

import ast
import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.core.base.package_data import read_data
from loadgauge.core.families import model_types
from loadgauge.pytorch.capture.lists.store import version_of

HEADS = {
    "CAUSAL_LM": "causal LM", "SEQ_TO_SEQ_CAUSAL_LM": "sequence to sequence", "IMAGE_TEXT_TO_TEXT": "pictures and text",
    "MASKED_LM": "encoder",
}  # fmt: skip
"""Tables of transformers by the last words of their names, and what the page calls them; the first that has a type counts."""
ROADS = ("family", "formulas", "numbers", "not captured", "not tried")


class Known(msgspec.Struct, frozen=True):
    """A model type. `road`: one of `ROADS`; `why`: for the last three, in the words of the capture."""

    type: str
    cls: str
    head: str
    road: str
    why: str = ""


class Tried(msgspec.Struct, frozen=True):
    """The shipped results: road and reason by type, and the releases that they were made with."""

    transformers: str
    torch: str
    types: dict[str, tuple[str, str]]


@functools.cache
def tried() -> Tried:
    """Return what was tried, and with which releases."""
    return msgspec.json.decode(read_data("capture/tried.json"), type=Tried)


def installed() -> str:
    """The version of transformers that is installed; empty where none is."""
    return version_of("transformers")


def world() -> list[Known]:
    """Every model type with one of `HEADS`, by name: of the installed transformers, or of the one that was tried.

    >>> next((one.road for one in world() if one.type == "llama"), "family")
    'family'
    """
    families, types_tried = set(model_types()), tried().types
    families_found: dict[str, tuple[str, str]] = {}
    for head, classes in _classes().items():
        for kind, cls in classes.items():
            families_found.setdefault(kind, (HEADS[head], cls))
    if not families_found:
        families_found = dict.fromkeys(types_tried, ("", ""))
    rows = []
    for kind, (head, cls) in sorted(families_found.items()):
        road, why = types_tried.get(kind, ("not tried", ""))
        rows.append(Known(kind, cls, head, *(("family", "") if kind in families else (road, why))))
    return rows


def may_be_known(kind: str) -> bool:
    """Whether some table of classes of the installed transformers has a model type, as far as its text says; True without one."""
    text = _tables()
    return not text or f'"{kind}"' in text


def _tables() -> str:
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    try:
        return (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _classes() -> dict[str, dict[str, str]]:
    """The tables of transformers, read as text."""
    try:
        tree = ast.parse(_tables())
    except (SyntaxError, ValueError):
        return {}
    wanted = {f"MODEL_FOR_{head}_MAPPING_NAMES": head for head in HEADS}
    by_head: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in wanted and isinstance(node.value, ast.Call) and node.value.args:
                by_head[wanted[name]] = {
                    kind: cls if isinstance(cls, str) else cls[0] for kind, cls in _pairs(node.value.args[0])
                }
    return {head: by_head[head] for head in HEADS if head in by_head}


def _pairs(node: ast.expr) -> list[Any]:
    try:
        return list(ast.literal_eval(node))
    except ValueError:
        return []


def counts(rows: list[Known]) -> dict[str, int]:
    """How many types each road takes.

    >>> counts([Known("a", "A", "", "family"), Known("b", "B", "", "family")])
    {'family': 2}
    """
    by_road = {road: sum(row.road == road for row in rows) for road in ROADS}
    return {road: count for road, count in by_road.items() if count}
