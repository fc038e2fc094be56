"""The worked cases of five articles and their sources (`theory_cases.json`), and how exactly they must be met.

`computed` was worked out by hand for each case: the library must give it to 1e-9, or to the digits it was written with.
`published` is what was printed: it is met to half a unit of its last digit, or where the text cuts digits off, to the
cut; where the inputs were printed rounded too, to what their rounding allows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.kernels import PAPER
from loadgauge.core.definitions.model.model import Block, ModelSpec
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.operations.operations import Layer

_TEXT = (Path(__file__).parents[1] / "core" / "paper" / "theory_cases.json").read_text(encoding="utf-8")
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in json.loads(_TEXT)}
PRINTED: dict[str, Any] = {case["id"]: case["published"] for case in json.loads(_TEXT, parse_float=str, parse_int=str)}
"""The published values as written."""
TESTED: dict[str, list[str]] = {}
"""Which tests claim each case."""
EXACT = 1e-9
AS_PUBLISHED = ("reproduces", "reproduces_if", "rebuilt_no_published_value")
"""Verdicts of cases whose claim is right; every other verdict's claim is tested as wrong."""


def cases(*patterns: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test once for each case whose id matches, under that id."""
    chosen = [case for name, case in CASES.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    unmatched = [p for p in patterns if not any(fnmatchcase(case["id"], p) for case in chosen)]
    assert not unmatched, f"no case matches {unmatched}"

    def claim(test: Callable[..., None]) -> Callable[..., None]:
        for case in chosen:
            TESTED.setdefault(case["id"], []).append(f"{test.__module__}.{test.__name__}")
        return pytest.mark.parametrize("case", chosen, ids=lambda case: case["id"])(test)

    return claim


def place(printed: str) -> float:
    """The unit of the last printed digit. A count given as a float (65170000000.0) ends at its last digit but zeros."""
    whole, _, fraction = printed.partition(".")
    if fraction == "0" and len(whole) > 6:
        return 10.0 ** (len(whole) - len(whole.rstrip("0")))
    return 10.0 ** -len(fraction)


def computed(case: dict[str, Any], value: float) -> None:
    """The library gives the computed value."""
    assert value == pytest.approx(case["computed"], rel=EXACT, abs=0), case["formula"]


def meets(
    case: dict[str, Any], value: float, *, unit: float | None = None, cut: bool = False, inputs: float = 0
) -> bool:
    """Whether a value is what was printed. `cut`: digits were cut off, not rounded; `inputs`: the share by which the
    rounding of printed inputs may move the value."""
    printed = float(PRINTED[case["id"]])
    unit = place(PRINTED[case["id"]]) if unit is None else unit
    low, high = (printed, printed + unit) if cut else (printed - unit / 2, printed + unit / 2)
    slack = 1e-12 * abs(printed)
    return value * (1 + inputs) >= low - slack and value * (1 - inputs) <= high + slack


def reproduces(case: dict[str, Any], value: float, **how: Any) -> None:
    """The library gives the computed value, and it is the published one."""
    assert case["verdict"] in AS_PUBLISHED
    computed(case, value)
    if case["published"] is not None:
        assert meets(case, value, **how), f"{value} is not {PRINTED[case['id']]}"


def refutes(case: dict[str, Any], value: float, by: float, **how: Any) -> None:
    """The library gives the computed value, and it is off the published claim by the stated share (to 0.1 %)."""
    assert case["verdict"] not in AS_PUBLISHED
    computed(case, value)
    assert not meets(case, value, **how)
    assert value / float(PRINTED[case["id"]]) - 1 == pytest.approx(by, abs=1e-3)


def rounding(printed: float, unit: float) -> float:
    """The share by which a printed input may be off."""
    return unit / 2 / printed


def layer_of(block: Block, hidden_size: int, seq_len: int, micro_batch: int, **how: Any) -> Layer:
    """One layer in the papers' accounting unless said otherwise."""
    return block_layer(block, hidden_size, View.of(seq_len, micro_batch, **{"kernels": PAPER, **how}))


def layout_of(inputs: dict[str, Any], **how: Any) -> Layout:
    """The layout of article 3's letters: t, p, d, b, B and s."""
    i = inputs
    return Layout(tp=i["t"], pp=i["p"], dp=i["d"], micro_batch=i["b"], global_batch=i["B"], seq_len=i["s"], **how)


def activations(model: ModelSpec, seq_len: int, micro_batch: int, **how: Any) -> float:
    """Bytes that all layers keep for one micro-batch."""
    layers = (layer_of(block, model.hidden_size, seq_len, micro_batch, **how) for block in model.blocks)
    return sum(count * layer.saved() for count, layer in zip(model.layer_counts(), layers, strict=True))
