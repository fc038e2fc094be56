"""One list of operations, three readings: int, float64 array and symbol agree (design, section 1)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import sympy
from hypothesis import given, settings, strategies as st

from loadgauge.core.base.algebra import ceil_div, maximum, minimum, spread, where
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.attention.attention import CORE
from loadgauge.core.layers.operations.operations import Layer, Recompute
from strategies import Sizes, kernels, kinds, sizes

SYMBOLS = Sizes(*sympy.symbols("s b h a k d f t", positive=True, integer=True))
SELECTIVE = Recompute(checkpointed=CORE)
QUANTITIES = ("params", "forward_flops", "backward_flops", "recompute_flops", "saved", "selective", "wire")


def read(layer: Layer) -> dict[str, object]:
    return {
        "params": layer.params,
        "forward_flops": layer.forward_flops,
        "backward_flops": layer.backward_flops,
        "recompute_flops": layer.recompute_flops(Recompute(checkpointed=layer.names)),
        "saved": layer.saved(),
        "selective": layer.saved(SELECTIVE),
        "wire": layer.wire,
    }


def layer_of(size: Sizes, kind: str, sequence_parallel: bool, how: Kernels) -> Layer:
    view = View.of(size.s, size.b, tp=size.t, sequence_parallel=sequence_parallel, kernels=how)
    return block_layer(size.block(kind), size.h, view)


@functools.cache
def closed_form(kind: str, sequence_parallel: bool, how: Kernels) -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(Sizes)]
    # In a GPT the head width follows from h and a; the symbols keep them apart.
    layer = layer_of(SYMBOLS, kind, sequence_parallel, how)
    arguments = [getattr(SYMBOLS, name) for name in names]
    return {name: sympy.lambdify(arguments, value, "math") for name, value in read(layer).items()}


@settings(max_examples=60, deadline=None)
@given(sizes(), kinds, st.booleans(), kernels)
def test_number_array_and_symbol_agree(size: Sizes, kind: str, sequence_parallel: bool, how: Kernels) -> None:
    exact = read(layer_of(size, kind, sequence_parallel, how))
    as_array = Sizes(**{name: np.array([float(v)]) for name, v in dataclasses.asdict(size).items()})
    array = read(layer_of(as_array, kind, sequence_parallel, how))
    compiled = closed_form(kind, sequence_parallel, how)
    for name in QUANTITIES:
        number = exact[name]
        assert isinstance(number, int)
        assert np.ravel(array[name])[0] == pytest.approx(number, rel=1e-12)
        assert compiled[name](*dataclasses.astuple(size)) == pytest.approx(number, rel=1e-12)


@given(st.integers(1, 10**9), st.integers(1, 10**5))
def test_the_functions_of_the_algebra_agree(x: int, n: int) -> None:
    X, N = sympy.symbols("X N", positive=True, integer=True)
    at = {X: x, N: n}
    for function in (ceil_div, maximum, minimum):
        number = function(x, n)
        assert number == function(np.array([float(x)]), np.array([float(n)]))[0] == int(function(X, N).subs(at))
    assert where(x > n, x, n) == where(np.array([x]) > n, np.array([x]), n)[0] == int(where(X > N, X, N).subs(at))
    assert spread(x, n) == spread(np.array([float(x)]), float(n))[0]
    assert spread(X, N) == X / N
