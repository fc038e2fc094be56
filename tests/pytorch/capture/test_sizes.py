"""Sizes as formulas: what SymPy and PyTorch make of shapes, read back as numbers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import sympy
from torch.utils._sympy.functions import CeilToInt, CleanDiv, FloorDiv, IntTrueDiv, Mod, PythonMod

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor, Weight
from loadgauge.core.layers.operations.profile import Row
from loadgauge.pytorch.capture.lists.listed import Listing, Segment, pack
from loadgauge.pytorch.capture.symbols.sizes import Formula, compiled, written

B, S = sympy.symbols("b s", integer=True, positive=True)
NAMES = {B: "b", S: "s"}
POINTS = [(1, 1), (2, 15), (3, 128), (5, 129), (64, 500)]


@pytest.mark.parametrize(
    "expression",
    [
        B * S * 4 + 512, sympy.ceiling(S / 128) * B * 7, sympy.floor((S + 1) / 2) ** 2 * B, sympy.Max(S, 128) * B,
        FloorDiv(S + 127, 128) * 3 * B, CeilToInt(IntTrueDiv(S, 32)) * B, Mod(S, 16) * B, PythonMod(-S, 16) + 1, CleanDiv(4 * S, 2),
        (B + S) ** 2 * 3, sympy.Min(B, S) - S,
    ],
    ids=str,
)  # fmt: skip
def test_a_size_has_the_value_of_its_expression(expression: sympy.Expr) -> None:
    size = Formula.of(expression, NAMES)
    for b, s in POINTS:
        assert size.at({"b": b, "s": s}) == int(expression.subs({B: b, S: s}))


@pytest.mark.parametrize(
    "relation", [sympy.Eq(Mod(S, 16), 0), sympy.Ne(B, 2), S <= 512, B * S > 100, sympy.And(S > 2, B > 1)], ids=str
)
def test_a_guard_has_the_truth_of_its_relation(relation: sympy.Basic) -> None:
    for b, s in POINTS:
        assert bool(compiled(written(relation, NAMES))({"b": b, "s": s})) == bool(relation.subs({B: b, S: s}))


def test_what_is_no_size_is_refused() -> None:
    for text in ("b.real", "[b]", "b(s)", "lambda: b", "'b'", "__name__", "1.5", "b if s else 1", "9" * 5000, "b +"):
        with pytest.raises(ConfigError, match="not a size"):
            compiled(text)
    with pytest.raises(NotModelled, match="depends on values"):
        Formula.of(sympy.Symbol("u0", integer=True) * 8, NAMES)
    with pytest.raises(NotModelled, match="sin"):
        Formula.of(sympy.sin(S), NAMES)


TENSOR = {"name": "x", "itemsize": 2, "dtype": "activation"}


def test_segments_are_read_as_they_were_written_or_not_at_all() -> None:
    s, less = Formula((("b*s", 2), ("s", 1))), Formula((("1", -3),))
    x = Tensor("x", s, 2)
    product = Operation("up", "gemm", (x,), (x,), (Weight("w", 64),), gemms=(Gemm(s, 4, 8),), forward_flops=Formula(()))
    segments = [Segment(name, (product,), (Row(0, less),), (), (), (), (), s) for name in ("entry", "exit")]
    packed, table = pack(segments)
    listing = Listing(("b", "s"), {"b": 2, "s": 3}, (), packed, table, s)
    assert listing.segments[0].operations[0] == msgspec.structs.replace(product, forward_flops=0)
    assert listing.entry.forward == (Row(0, less),)
    assert set(listing.formulas()) == {s, less}
    layer = listing.entry.layer({"b": 2, "s": 3})
    assert (layer.operations[0].gemms[0].m, layer.operations[0].inputs[0].nbytes, layer.params) == (15, 30, 64)
    wrong: Any
    numbers = msgspec.msgpack.decode(packed)
    for wrong in ("9", [1], {"terms": []}, -len(table) - 1):
        tensor = [
            {**numbers[0], "operations": [{**numbers[0]["operations"][0], "inputs": [{**TENSOR, "numel": wrong}]}]}
        ]
        stored = msgspec.msgpack.encode([{**numbers[0], "entering": wrong}, *numbers])
        with pytest.raises((ConfigError, msgspec.ValidationError)):
            _ = msgspec.structs.replace(listing, packed=msgspec.msgpack.encode([*tensor, *numbers])).segments
        with pytest.raises((ConfigError, msgspec.ValidationError)):
            _ = msgspec.structs.replace(listing, packed=stored).segments
    with pytest.raises(ConfigError):
        _ = msgspec.structs.replace(listing, packed=msgspec.msgpack.encode(segments[:1])).segments
