"""Blocks in 8 and 4 bits: three readings agree, fewer bits never keep more, and ranks together hold one whole."""

from __future__ import annotations

import dataclasses
import functools

import msgspec
import numpy as np
import pytest
import sympy
from hypothesis import given, settings, strategies as st

from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.training.frameworks import LOW_PRECISIONS
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.memory.liveness import backward_peak
from loadgauge.core.estimate.states.states import WeightCount, model_states
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.operations.operations import Layer, Recompute
from strategies import Sizes, kernels, kinds, sizes

NAMES = [(framework, name) for framework, recipes in LOW_PRECISIONS.items() for name in recipes]
SYMBOLS = Sizes(*sympy.symbols("s b h a k d f t", positive=True, integer=True))
recipes = st.sampled_from(NAMES)


def recipe_of(chosen: tuple[str, str]) -> object:
    return LOW_PRECISIONS[chosen[0]][chosen[1]]


def layer_of(
    size: Sizes, kind: str, parallel: bool, how: Kernels, chosen: tuple[str, str] | None, lora: Lora | None = None
) -> Layer:
    changes = {"dtypes": msgspec.structs.replace(how.dtypes, activation=2)}
    low = None if chosen is None else recipe_of(chosen)
    how = msgspec.structs.replace(how, products=low, **changes)
    view = View.of(size.s, size.b, tp=size.t, sequence_parallel=parallel, kernels=how, lora=lora)
    return block_layer(size.block(kind), size.h, view)


def read(layer: Layer) -> dict[str, object]:
    return {
        "saved": layer.saved(),
        "dropped": layer.saved(Recompute(checkpointed=layer.names)),
        "wire": layer.wire,
        "inside": sum(
            operation.workspace for operation in layer if any(weight.quantised for weight in operation.weights)
        ),
        "low": sum(weight.numel for weight in layer.weights if weight.quantised),
    }


@functools.cache
def closed_form(kind: str, parallel: bool, how: Kernels, chosen: tuple[str, str]) -> dict[str, object]:
    names = [field.name for field in dataclasses.fields(Sizes)]
    arguments = [getattr(SYMBOLS, name) for name in names]
    layer = layer_of(SYMBOLS, kind, parallel, how, chosen)
    return {name: sympy.lambdify(arguments, value, "math") for name, value in read(layer).items()}


@settings(max_examples=40, deadline=None)
@given(sizes(), kinds, st.booleans(), kernels, recipes)
def test_number_array_and_symbol_agree(
    size: Sizes, kind: str, parallel: bool, how: Kernels, chosen: tuple[str, str]
) -> None:
    exact = read(layer_of(size, kind, parallel, how, chosen))
    as_array = Sizes(**{name: np.array([float(v)]) for name, v in dataclasses.asdict(size).items()})
    array = read(layer_of(as_array, kind, parallel, how, chosen))
    compiled = closed_form(kind, parallel, how, chosen)
    for name, number in exact.items():
        assert np.ravel(array[name])[0] == pytest.approx(number, rel=1e-12)
        assert compiled[name](*dataclasses.astuple(size)) == pytest.approx(number, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(sizes(), kinds, st.booleans(), kernels, recipes)
def test_fewer_bits_never_keep_or_send_more(
    size: Sizes, kind: str, parallel: bool, how: Kernels, chosen: tuple[str, str]
) -> None:
    """And only what products read is kept otherwise: shapes and everything else are the same."""
    low, plain = (layer_of(size, kind, parallel, how, one) for one in (chosen, None))
    assert low.saved() <= plain.saved()
    assert low.wire <= plain.wire
    assert (low.params, low.forward_flops, low.backward_flops) == (
        plain.params,
        plain.forward_flops,
        plain.backward_flops,
    )
    if not LOW_PRECISIONS[chosen[0]][chosen[1]].keeps:
        assert low.kept() == plain.kept()
        assert low.wire == plain.wire
    held = {tensor.name for tensor in plain.kept()}
    new = {tensor.name for tensor in low.kept()} - held
    assert all(name.endswith(".quantised") for name in new)
    everything = Recompute(checkpointed=low.names)
    assert low.saved(everything) == plain.saved(Recompute(checkpointed=plain.names))


@settings(max_examples=40, deadline=None)
@given(sizes(), kinds, kernels, st.integers(2, 6))
def test_formats_are_in_order(size: Sizes, kind: str, how: Kernels, factor: int) -> None:
    """4 bits keep less than 8, scales of smaller blocks cost more, and all grow with the tokens."""
    order = ["nvfp4", "fp8-tensorwise", "fp8-blockwise"]
    saved = [layer_of(size, kind, True, how, ("megatron", name)).saved() for name in order]
    assert saved == sorted(saved)
    assert saved[0] < saved[1] < saved[2]
    if how.attention == "flash":
        # Everything but scores grows with the tokens.
        more = dataclasses.replace(size, b=size.b * factor)
        for name, once in zip(order, saved, strict=True):
            assert layer_of(more, kind, True, how, ("megatron", name)).saved() == factor * once


@settings(max_examples=40, deadline=None)
@given(sizes(), kinds, kernels, recipes)
def test_a_frozen_block_keeps_the_same(size: Sizes, kind: str, how: Kernels, chosen: tuple[str, str]) -> None:
    low, plain = (layer_of(size, kind, False, how, one, Lora(rank=8)) for one in (chosen, None))
    assert low.kept() == plain.kept()
    assert backward_peak(low) >= backward_peak(plain)


@given(st.integers(1, 10**12), st.integers(0, 100), st.sampled_from([1, 2, 4, 8, 64]), recipes)
def test_ranks_together_hold_one_whole(parameters: int, share: int, dp: int, chosen: tuple[str, str]) -> None:
    precision = training(*chosen).precision
    parameters = dp * parameters
    count = WeightCount(trainable=parameters, quantised=dp * (parameters // dp * share // 100))
    whole = model_states(count, precision)
    sharded = model_states(count, precision, zero=3, dp=dp)
    low = precision.products
    assert low is not None
    beside = 2 * low.weight_element * count.quantised if low.weights == "beside" else 0
    assert dp * sharded.total == pytest.approx(whole.total - beside, rel=1e-12)
    assert model_states(count, precision, zero=1, dp=dp).weights == whole.weights
