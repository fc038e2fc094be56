"""Linear mixers: three readings agree, ranks hold one whole, and all grows with the batch and with the sequence."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import sympy
from hypothesis import given, settings, strategies as st

from loadgauge.core.base.errors import LayoutError
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.definitions.model.model import (
    Block,
    GatedDeltaNet,
    LightningAttention,
    LinearMixer,
    Mamba1,
    Mamba2,
    Mlp,
    ModelSpec,
    Norm,
    ShortConvolution,
)
from loadgauge.core.estimate.time.flops import microbatch_flops
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.operations.operations import Layer, Recompute
from published_formulas import forward_flops_per_token, kv_cache_bytes

CHUNK = 64
"""Whole chunks in every sequence, so that all is linear in their number."""
kinds = st.sampled_from([Mamba2, Mamba1, GatedDeltaNet, ShortConvolution, LightningAttention])
SHARDED = (Mamba2, GatedDeltaNet, LightningAttention, ShortConvolution)
how = st.builds(
    Kernels,
    norm=st.sampled_from(["fused", "upcast"]),
    activation=st.sampled_from(["fused", "unfused"]),
    joint_output=st.booleans(),
    dtypes=st.builds(Dtypes, activation=st.sampled_from([2, 4])),
)
sizes = st.fixed_dictionaries(
    {
        "h": st.integers(1, 64).map(lambda n: 64 * n),
        "g": st.integers(1, 4),
        "r": st.integers(1, 4),
        "d": st.sampled_from([16, 64, 128]),
        "n": st.sampled_from([16, 64, 256]),
        "k": st.integers(2, 4),
        "f": st.integers(1, 64).map(lambda n: 128 * n),
        "t": st.sampled_from([1, 2, 4]),
        "c": st.integers(1, 64),
        "b": st.integers(1, 8),
    }
)


def mixer(kind: type[LinearMixer], size: dict[str, Any]) -> LinearMixer:
    """g groups (or key heads) and r heads of each, a rank; head width d, state n, convolution k."""
    groups = size["g"] * size["t"]
    heads = groups * size["r"]
    if kind is Mamba2:
        return Mamba2(
            num_heads=heads, n_groups=groups, head_dim=size["d"], state_size=size["n"], conv_kernel=size["k"],
            chunk_size=CHUNK, use_bias=True,
        )  # fmt: skip
    if kind is Mamba1:
        return Mamba1(
            intermediate_size=heads * size["d"], state_size=size["n"], time_step_rank=size["d"],
            conv_kernel=size["k"], norm=Norm("rmsnorm"),
        )  # fmt: skip
    if kind is GatedDeltaNet:
        return GatedDeltaNet(
            linear_num_key_heads=groups, linear_num_value_heads=heads, linear_key_head_dim=size["n"],
            linear_value_head_dim=size["d"], linear_conv_kernel_dim=size["k"], chunk_size=CHUNK,
        )  # fmt: skip
    if kind is ShortConvolution:
        return ShortConvolution(conv_L_cache=size["k"])
    return LightningAttention(num_attention_heads=heads, head_dim=size["d"], block_size=CHUNK)


def layer_of(kind: type[LinearMixer], size: dict[str, Any], kernels: Kernels, **rest: Any) -> Layer:
    block = Block(attention=mixer(kind, size), mlp=Mlp(intermediate_size=size["f"]), norm=Norm("rmsnorm"))
    tp = size["t"] if kind in SHARDED else 1
    return block_layer(block, size["h"], View.of(size["c"] * CHUNK, size["b"], tp=tp, kernels=kernels, **rest))


def read(layer: Layer) -> dict[str, Any]:
    return {
        "params": layer.params,
        "forward": layer.forward_flops,
        "backward": layer.backward_flops,
        "again": layer.recompute_flops(Recompute(checkpointed=layer.names)),
        "saved": layer.saved(),
        "wire": layer.wire,
    }


@settings(max_examples=80, deadline=None)
@given(kinds, sizes, how)
def test_number_array_and_symbol_agree(kind: type[LinearMixer], size: dict[str, Any], kernels: Kernels) -> None:
    size = {**size, "f": size["f"] * size["t"]}
    exact = read(layer_of(kind, size, kernels))
    array = read(
        layer_of(kind, {key: np.array([float(value)]) for key, value in size.items()} | one_rank(kind), kernels)
    )
    letters = {key: sympy.Symbol(key, positive=True, integer=True) for key in size} | one_rank(kind)
    symbols = read(layer_of(kind, letters, kernels))
    if kind not in SHARDED:
        exact = read(layer_of(kind, {**size, "t": 1}, kernels))
    for name, number in exact.items():
        assert number == pytest.approx(np.ravel(array[name])[0], rel=1e-12)
        read_off = sympy.sympify(symbols[name]).subs({letters[key]: value for key, value in size.items()}).doit()
        assert float(read_off) == pytest.approx(number, rel=1e-12)
    assert isinstance(exact["saved"], int)


def one_rank(kind: type[LinearMixer]) -> dict[str, Any]:
    """Mixers without heads are on one rank: a number, since what is modelled depends on it."""
    return {} if kind in SHARDED else {"t": 1}


@settings(max_examples=60, deadline=None)
@given(kinds, sizes, how, st.integers(2, 5), st.sampled_from(["b", "c"]))
def test_linear_in_batch_and_sequence(
    kind: type[LinearMixer], size: dict[str, Any], kernels: Kernels, many: int, what: str
) -> None:
    size = {**size, "f": size["f"] * size["t"]}
    if kind is Mamba1 and what == "c":
        size["c"] *= 2048 // CHUNK  # its kernel keeps a state every 2048 tokens
    one, two, more = (layer_of(kind, {**size, what: factor * size[what]}, kernels) for factor in (1, 2, many))
    assert more.forward_flops == many * one.forward_flops
    assert more.backward_flops == many * one.backward_flops
    assert more.params == one.params
    # Beside what grows, a few vectors of the weights' size are kept.
    assert more.saved() - one.saved() == (many - 1) * (two.saved() - one.saved())
    assert 0 <= one.saved() - (two.saved() - one.saved()) <= 4 * one.params


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHARDED), sizes, how, st.booleans())
def test_tensor_parallel_ranks_hold_one_whole(
    kind: type[LinearMixer], size: dict[str, Any], kernels: Kernels, sequence_parallel: bool
) -> None:
    size = {**size, "f": size["f"] * size["t"]}
    spec = mixer(kind, size)
    mlp = Mlp(intermediate_size=size["f"])
    block = Block(attention=spec, mlp=mlp, norm=Norm("rmsnorm"))
    view = View.of(size["c"] * CHUNK, size["b"], kernels=kernels)
    whole = block_layer(block, size["h"], view)
    shared = msgspec.structs.replace(view, tp=size["t"], sequence_parallel=sequence_parallel)
    part = block_layer(block, size["h"], shared)
    by_name = {weight.name: weight for weight in part.weights}
    for weight in whole.weights:
        share = by_name[weight.name]
        assert share.shards in (1, size["t"])
        assert share.numel * share.shards == weight.numel
    assert part.forward_flops * size["t"] == whole.forward_flops
    assert part.backward_flops * size["t"] == whole.backward_flops
    assert part.saved() <= whole.saved()
    if sequence_parallel:
        # Of a norm over all heads each rank keeps the statistic of every token.
        statistics = 4 * size["c"] * CHUNK * size["b"] if kind is LightningAttention else 0
        assert part.saved() * size["t"] == whole.saved() + (size["t"] - 1) * statistics


@settings(max_examples=60, deadline=None)
@given(kinds, sizes, how)
def test_recomputation_keeps_the_input(kind: type[LinearMixer], size: dict[str, Any], kernels: Kernels) -> None:
    size = {**size, "t": 1}
    layer = layer_of(kind, size, kernels)
    full = layer.saved(Recompute(checkpointed=layer.names))
    assert full == kernels.dtypes.activation * size["b"] * size["c"] * CHUNK * size["h"] <= layer.saved()


@given(st.integers(1, 10), st.sampled_from([3, 5, 6]))
def test_a_group_is_not_divided(groups: int, tp: int) -> None:
    spec = Mamba2(num_heads=30 * groups, n_groups=groups, head_dim=8, state_size=8)
    block = Block(attention=spec, mlp=None, norm=Norm("rmsnorm"))
    model = ModelSpec(name="x", model_type="mamba2", hidden_size=64, vocab_size=60, blocks=(block,), pattern=(0,))
    problems = Layout(tp=tp, global_batch=1, seq_len=30).valid(model)
    assert any("n_groups over tp" in problem for problem in problems) == bool(groups % tp)
    if groups % tp:
        with pytest.raises(LayoutError, match="n_groups of Mamba-2"):
            block_layer(block, 64, View.of(30, 1, tp=tp))


@given(kinds, sizes, st.integers(1, 8))
def test_decoding_does_not_grow(kind: type[LinearMixer], size: dict[str, Any], many: int) -> None:
    """A state is as large, and a token as much work, however long the context."""
    block = Block(attention=mixer(kind, size), mlp=None, norm=Norm("rmsnorm"))
    model = ModelSpec(name="x", model_type="x", hidden_size=size["h"], vocab_size=64, blocks=(block,), pattern=(0, 0))
    assert 0 < kv_cache_bytes(model, 1, 100) == kv_cache_bytes(model, 1, 100 * many)
    assert kv_cache_bytes(model, many, 7) == many * kv_cache_bytes(model, 1, 7)
    assert forward_flops_per_token(model, 1) == forward_flops_per_token(model, 1 + many)
    assert (
        microbatch_flops(model, View.of(CHUNK, many)).model == many * microbatch_flops(model, View.of(CHUNK, 1)).model
    )
