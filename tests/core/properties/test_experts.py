"""Experts and latent attention: three readings agree, ranks together hold one whole, nothing is lost between them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import sympy
from hypothesis import assume, given, settings, strategies as st

from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.definitions.model.model import Block, ModelSpec, Moe, Norm
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.estimate.time.flops import microbatch_flops
from loadgauge.core.families.reference import deepseek_block, mixtral_block
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.attention.attention import CORE
from loadgauge.core.layers.operations.operations import Layer, Recompute
from published_formulas import kv_cache_bytes

DEGREES = st.sampled_from([1, 2, 4])


@dataclass(frozen=True)
class Sizes:
    """Sizes of one block and micro-batch. Every dimension divides over the ranks that share it."""

    s: int
    b: int
    h: int
    a: int
    k: int
    d: int
    q: int
    m: int
    n: int
    r: int
    v: int
    E: int
    K: int
    f: int
    g: int
    t: int
    e: int
    u: int

    def block(self, kind: str) -> Block:
        if kind == "mixtral":
            return mixtral_block(self.h, self.a, self.k, self.d, self.E, self.K, self.f)
        query_rank = self.q if kind == "deepseek" else None
        return deepseek_block(
            self.h, self.a, query_rank, self.m, self.n, self.r, self.v, self.E, self.K, self.f, self.g
        )


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    t, e, u = draw(DEGREES), draw(DEGREES), draw(DEGREES)
    k = t * draw(st.integers(1, 3))
    experts = e * draw(st.integers(2, 16))
    return Sizes(
        s=8 * draw(st.integers(1, 512)), b=draw(st.integers(1, 8)), h=64 * draw(st.integers(1, 64)),
        a=k * draw(st.integers(1, 8)), k=k, d=draw(st.sampled_from([64, 80, 128])), q=32 * draw(st.integers(1, 48)),
        m=32 * draw(st.integers(1, 16)), n=draw(st.sampled_from([64, 128])), r=draw(st.sampled_from([32, 64])),
        v=draw(st.sampled_from([64, 96, 128])), E=experts, K=draw(st.integers(1, min(8, experts))),
        f=u * 16 * draw(st.integers(1, 64)), g=t * 16 * draw(st.integers(1, 64)), t=t, e=e, u=u,
    )  # fmt: skip


kernels = st.builds(
    Kernels,
    attention=st.sampled_from(["eager", "flash"]),
    norm=st.sampled_from(["fused", "upcast"]),
    activation=st.sampled_from(["fused", "unfused"]),
    experts=st.sampled_from(["grouped", "fused"]),
    router_aux_loss=st.booleans(),
    softmax_float32=st.booleans(),
    repeat_kv=st.booleans(),
    views_pin_storage=st.booleans(),
    keep_gathered=st.booleans(),
    dtypes=st.builds(Dtypes, activation=st.sampled_from([2, 4])),
)
kinds = st.sampled_from(["mixtral", "deepseek", "deepseek-lite"])
QUANTITIES = ("params", "forward_flops", "backward_flops", "recompute_flops", "saved", "selective", "wire")


def layer_of(size: Sizes, kind: str, how: Kernels, *, sharded: bool = True, block: Block | None = None) -> Layer:
    """One rank's layer; Megatron asks for sequence parallelism wherever tensor parallelism meets experts."""
    view = View.of(size.s, size.b, tp=size.t, sequence_parallel=sharded, ep=size.e, etp=size.u, kernels=how)
    return block_layer(block or size.block(kind), size.h, view)


def read(layer: Layer) -> dict[str, object]:
    return {
        "params": layer.params,
        "forward_flops": layer.forward_flops,
        "backward_flops": layer.backward_flops,
        "recompute_flops": layer.recompute_flops(Recompute(checkpointed=layer.names)),
        "saved": layer.saved(),
        "selective": layer.saved(Recompute(checkpointed=CORE)),
        "wire": layer.wire,
    }


@functools.cache
def closed_form(kind: str, sharded: bool, how: Kernels) -> dict[str, object]:
    letters = sympy.symbols([field.name for field in dataclasses.fields(Sizes)], positive=True, integer=True)
    layer = layer_of(Sizes(*letters), kind, how, sharded=sharded)
    return {name: sympy.lambdify(letters, value, "math") for name, value in read(layer).items()}


@settings(max_examples=60, deadline=None)
@given(sizes(), kinds, st.booleans(), kernels)
def test_number_array_and_symbol_agree(size: Sizes, kind: str, sharded: bool, how: Kernels) -> None:
    assume(size.v != size.n + size.r)  # of equal widths another kernel runs, which letters do not know
    size = dataclasses.replace(size, s=64 * size.s)  # a ring's chunks are whole bytes, which the closed form neglects
    exact = read(layer_of(size, kind, how, sharded=sharded))
    as_array = Sizes(**{name: np.array([float(v)]) for name, v in dataclasses.asdict(size).items()})
    array = read(layer_of(as_array, kind, how, sharded=sharded))
    compiled = closed_form(kind, sharded, how)
    for name in QUANTITIES:
        number = exact[name]
        assert isinstance(number, int), name
        assert np.ravel(array[name])[0] == pytest.approx(number, rel=1e-12), name
        assert compiled[name](*dataclasses.astuple(size)) == pytest.approx(number, rel=1e-12), name


@settings(max_examples=60, deadline=None)
@given(sizes(), kinds, kernels)
def test_ranks_hold_one_whole_of_every_weight(size: Sizes, kind: str, how: Kernels) -> None:
    whole = layer_of(dataclasses.replace(size, t=1, e=1, u=1), kind, how)
    part = {weight.name: weight for weight in layer_of(size, kind, how).weights}
    assert set(part) == {weight.name for weight in whole.weights}
    for weight in whole.weights:
        share = part[weight.name]
        assert share.numel * share.shards == weight.numel
        assert share.shards in ((size.e * size.u,) if weight.expert else (1, size.t))
        assert weight.expert == share.expert == (weight.name in ("mlp.gate_up.weight", "mlp.down.weight"))
    routed = sum(weight.numel for weight in whole.weights if weight.expert)
    assert routed == 3 * size.E * size.h * size.f


@settings(max_examples=60, deadline=None)
@given(sizes(), kinds, kernels)
def test_ranks_compute_one_whole(size: Sizes, kind: str, how: Kernels) -> None:
    """Balanced, the ranks that share a micro-batch do its work, whatever the experts are split into."""
    whole = layer_of(dataclasses.replace(size, t=1, e=1, u=1), kind, how)
    part = layer_of(size, kind, how)
    for quantity in ("forward_flops", "backward_flops"):
        assert getattr(part, quantity) * size.t == getattr(whole, quantity)


@settings(max_examples=60, deadline=None)
@given(sizes(), kinds, kernels)
def test_every_copy_of_a_token_is_somewhere(size: Sizes, kind: str, how: Kernels) -> None:
    """T K rows, each of them on the t_e ranks of its expert: dispatched rows x ranks / t_e, with ranks = t."""
    layer = layer_of(size, kind, how)
    dispatch = next(operation for operation in layer if operation.name == "mlp.dispatch")
    rows = dispatch.outputs[0].numel // size.h
    assert rows * size.t == size.u * size.s * size.b * size.K
    # Out and back, forward and backward: four exchanges of the rank's own rows, and as many over its expert's ranks.
    sent = [collective for collective in layer.comm if collective.axis == "ep"]
    shared = [collective for collective in layer.comm if collective.axis == "etp"]
    payload = how.dtypes.activation * size.s * size.b * size.K * size.h // size.t
    assert [collective.nbytes for collective in sent] == [payload] * 4
    assert [collective.nbytes for collective in shared] == [size.u * payload] * 4
    assert [collective.kind for collective in sent] == ["all_to_all"] * 4
    assert sorted(collective.kind for collective in shared) == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    if size.e == 1:
        assert not sum(collective.wire for collective in sent)
    # Rows that leave the rank are there twice for a while; rows that stay are not copied, but those that Megatron sorts.
    buffer = size.u * payload if size.e * size.u > 1 else 0
    copying = ("mlp.dispatch",) if how.experts == "fused" else ("mlp.dispatch", "mlp.down")
    assert [each.workspace for each in layer if each.name in copying] == [buffer] * len(copying)
    if how.experts == "fused":
        held = next(each for each in layer if each.name == "mlp.dispatched").outputs[0]
        assert held.nbytes == ((size.e > 1) + (size.e < size.E)) * payload


@settings(max_examples=60, deadline=None)
@given(sizes(), kinds, kernels, st.integers(2, 5))
def test_linear_in_the_batch(size: Sizes, kind: str, how: Kernels, many: int) -> None:
    one = layer_of(size, kind, how)
    more = layer_of(dataclasses.replace(size, b=many * size.b), kind, how)
    for quantity in ("forward_flops", "backward_flops"):
        assert getattr(more, quantity) == many * getattr(one, quantity)
    # What does not grow: the ends of the experts' rows, and the router's matrix where it is copied to float32.
    grouped = how.experts == "grouped"
    fixed = 4 * size.E // size.e if grouped else 0
    if grouped and kind != "mixtral" and how.dtypes.activation != 4:
        fixed += 4 * size.E * size.h
    assert more.saved() - fixed == many * (one.saved() - fixed)
    assert more.params == one.params


@settings(max_examples=60, deadline=None)
@given(sizes(), kinds, kernels)
def test_recomputation_never_keeps_more(size: Sizes, kind: str, how: Kernels) -> None:
    layer = layer_of(size, kind, how)
    full = layer.saved(Recompute(checkpointed=layer.names))
    assert full <= layer.saved(Recompute(checkpointed=CORE)) <= layer.saved()
    assert full == how.dtypes.activation * size.s * size.b // size.t * size.h


@settings(max_examples=60, deadline=None)
@given(sizes(), kinds, kernels, st.sampled_from([2, 4]), st.sampled_from([1, 3]))
def test_imbalance_and_capacity(size: Sizes, kind: str, how: Kernels, imbalance: int, capacity: int) -> None:
    block = size.block(kind)
    assert isinstance(block.mlp, Moe)
    capped = msgspec.structs.replace(block, mlp=msgspec.structs.replace(block.mlp, capacity_factor=capacity))

    def of(block: Block, factor: int) -> Layer:
        view = View.of(size.s, size.b, ep=size.e, etp=size.u, imbalance=factor, kernels=how)
        return block_layer(block, size.h, view)

    def routed(layer: Layer) -> int:
        return sum(o.forward_flops for o in layer if any(weight.expert for weight in o.weights))

    balanced, busiest = of(block, 1), of(block, imbalance)
    assert routed(busiest) == imbalance * routed(balanced)
    assert busiest.saved() > balanced.saved()
    assert busiest.forward_flops - routed(busiest) == balanced.forward_flops - routed(balanced)
    assert routed(of(capped, imbalance)) == min(imbalance, capacity) * routed(balanced)
    assert of(capped, 1).saved() == balanced.saved()


def model_of(size: Sizes, kind: str) -> ModelSpec:
    return ModelSpec(
        name="random", model_type=kind, hidden_size=size.h, vocab_size=1000, blocks=(size.block(kind),),
        pattern=(0,) * 3, final_norm=Norm("rmsnorm"),
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(sizes(), kinds, kernels)
def test_expert_parallelism_leaves_the_model_as_it_is(size: Sizes, kind: str, how: Kernels) -> None:
    model = model_of(size, kind)
    views = [
        View.of(size.s, size.b, kernels=how),
        View.of(size.s, size.b, tp=size.t, sequence_parallel=True, ep=size.e, etp=size.u, imbalance=2, kernels=how),
    ]
    assert microbatch_flops(model, views[0]) == microbatch_flops(model, views[1])


@settings(max_examples=40, deadline=None)
@given(sizes(), kinds)
def test_active_parameters(size: Sizes, kind: str) -> None:
    """A token passes through the model that has only its own experts, beside a router for all."""
    found = parameters(model_of(size, kind))
    one = parameters(model_of(dataclasses.replace(size, E=size.K), kind))
    router = 3 * size.h * (size.E - size.K)
    assert isinstance(found.active, int)
    assert found.active == one.total + router
    assert found.total - found.active == 3 * 3 * (size.E - size.K) * size.h * size.f


@given(sizes(), st.integers(1, 8), st.integers(1, 4096))
def test_the_cache_of_latent_attention(size: Sizes, sequences: int, length: int) -> None:
    cache = kv_cache_bytes(model_of(size, "deepseek"), sequences, length)
    assert cache == 2 * 3 * sequences * length * (size.m + size.r)
