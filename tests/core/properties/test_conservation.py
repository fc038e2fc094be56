"""Ranks together hold one whole; everything is linear in the batch; sharding and recomputation never add bytes."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS
from loadgauge.core.definitions.training.precision import PRECISIONS
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.estimate import estimate, view_of
from loadgauge.core.estimate.memory.liveness import backward_peak
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.estimate.states.states import WeightCount, model_states
from loadgauge.core.estimate.time.flops import microbatch_flops
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer
from loadgauge.core.layers.attention.attention import CORE
from loadgauge.core.layers.operations.operations import Collective, Layer, Recompute, Weight
from strategies import Sizes, kernels, kinds, sizes, small_models


def layer_of(size: Sizes, kind: str, how: Kernels, *, sequence_parallel: bool = False) -> Layer:
    view = View.of(size.s, size.b, tp=size.t, sequence_parallel=sequence_parallel, kernels=how)
    return block_layer(size.block(kind), size.h, view)


@settings(max_examples=80, deadline=None)
@given(sizes(), kinds, kernels)
def test_tensor_parallel_ranks_hold_one_whole(size: Sizes, kind: str, how: Kernels) -> None:
    whole = layer_of(dataclasses.replace(size, t=1), kind, how)
    part = layer_of(size, kind, how)
    by_name = {weight.name: weight for weight in part.weights}
    for weight in whole.weights:
        share = by_name[weight.name]
        assert share.shards in (1, size.t)
        assert share.numel * share.shards == weight.numel
    assert part.forward_flops * size.t == whole.forward_flops
    assert part.backward_flops * size.t == whole.backward_flops
    assert part.saved() <= whole.saved()


@settings(max_examples=80, deadline=None)
@given(sizes(), kinds, kernels)
def test_sequence_parallelism_divides_what_is_kept(size: Sizes, kind: str, how: Kernels) -> None:
    how = msgspec.structs.replace(how, keep_gathered=False)
    whole = layer_of(dataclasses.replace(size, t=1), kind, how)
    part = layer_of(size, kind, how, sequence_parallel=True)
    # Norms over a head's width keep a small vector that every rank holds (none in these two families).
    assert part.saved() * size.t == whole.saved()
    assert part.saved() <= layer_of(size, kind, how).saved()


@settings(max_examples=80, deadline=None)
@given(sizes(), kinds, kernels, st.integers(2, 5))
def test_linear_in_the_batch(size: Sizes, kind: str, how: Kernels, many: int) -> None:
    one = layer_of(size, kind, how)
    more = layer_of(dataclasses.replace(size, b=many * size.b), kind, how)
    for quantity in ("forward_flops", "backward_flops"):
        assert getattr(more, quantity) == many * getattr(one, quantity)
    assert more.saved() == many * one.saved()
    assert more.params == one.params


@settings(max_examples=60, deadline=None)
@given(sizes(), kinds, kernels, st.booleans())
def test_recomputation_never_keeps_more(size: Sizes, kind: str, how: Kernels, sequence_parallel: bool) -> None:
    layer = layer_of(size, kind, how, sequence_parallel=sequence_parallel)
    none, selective = layer.saved(), layer.saved(Recompute(checkpointed=CORE))
    full = layer.saved(Recompute(checkpointed=layer.names))
    assert full <= selective <= none
    tokens = size.s * size.b // (size.t if sequence_parallel else 1)
    assert full == how.dtypes.activation * tokens * size.h, "a checkpoint keeps the input of the layer and nothing else"


@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]), st.integers(1, 10**12))
def test_one_rank_sends_nothing(kind: str, nbytes: int) -> None:
    assert Collective(kind, "tp", nbytes, 1).wire == 0


@given(st.integers(1, 10**9), st.integers(2, 4096))
def test_all_reduce_is_reduce_scatter_and_all_gather(nbytes: int, ranks: int) -> None:
    both = sum(Collective(kind, "dp", nbytes, ranks).wire for kind in ("reduce_scatter", "all_gather"))
    assert Collective("all_reduce", "dp", nbytes, ranks).wire == both


@given(
    st.integers(1, 10**12),
    st.integers(1, 10_000),
    st.sampled_from(sorted(PRECISIONS)),
    st.sampled_from(sorted(OPTIMIZERS)),
)
def test_model_states_by_zero_stage(params: int, dp: int, precision: str, optimizer: str) -> None:
    weight = Weight("any", params, shape=(params, 1))
    count = WeightCount.of((weight,), OPTIMIZERS[optimizer])
    by_stage = [
        model_states(count, PRECISIONS[precision], OPTIMIZERS[optimizer], zero=zero, dp=dp) for zero in (0, 1, 2, 3)
    ]
    totals = [states.total for states in by_stage]
    assert totals == sorted(totals, reverse=True), "states never rise with the stage"
    # The ranks together hold one whole: the largest share times dp exceeds it by less than one element a rank.
    per_element = totals[0] / params
    assert 0 <= totals[3] * dp - totals[0] <= per_element * 3 * dp + 1e-6 * totals[0]
    one = model_states(count, PRECISIONS[precision], OPTIMIZERS[optimizer], zero=3, dp=1)
    assert one.total == totals[0]


@settings(max_examples=60, deadline=None)
@given(small_models(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_pipeline_stages_hold_one_model(model: ModelSpec, pp: int, tp: int) -> None:
    layout = Layout(pp=pp, tp=tp, global_batch=8, seq_len=64)
    chosen = training("huggingface")
    facts = MemoryModel(model, layout, chosen, view_of(layout, chosen))
    held = sum(
        (facts.weights(facts.counts(stage, stage.start, stage.stop)) + facts.ends(stage)).total
        for stage in stages(model, layout)
    )
    view = View(tokens=1, pairs=1, tp=tp)
    replicated = [
        *(
            w
            for block in model.blocks
            for w in block_layer(block, model.hidden_size, view).weights * len(model.pattern)
        ),
        *embedding_layer(model, view).weights,
        *head_layer(model, view, holds_table=pp > 1).weights,
    ]
    assert held == sum(weight.numel for weight in replicated)
    whole = parameters(model).total
    table = model.vocab_size * model.hidden_size if pp > 1 and model.tie_word_embeddings else 0
    padding = tp * model.hidden_size * 2
    assert whole + table <= sum(weight.numel * weight.shards for weight in replicated) <= whole + table + padding


@settings(max_examples=60, deadline=None)
@given(
    small_models(),
    st.sampled_from(sorted(FRAMEWORKS)),
    st.sampled_from(["bf16", "fp32", "bf16-pure", "bf16-autocast"]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "selective", "full", "full:every=2", "full:group=2"]),
    st.sampled_from([1, 4]),
)
def test_the_peak_bounds_every_moment(
    model: ModelSpec, framework: str, precision: str, zero: int, tp: int, recompute: str, accumulate: int
) -> None:
    layout = Layout(
        dp=4, tp=tp, zero=zero, micro_batch=2, global_batch=8 * accumulate, seq_len=256,
        recompute=RecomputePolicy.parse(recompute),
    )  # fmt: skip
    memory = estimate(model, layout, training(framework, precision)).memory
    assert memory.total == pytest.approx(max(moment.total for moment in memory.moments))
    assert memory.total == pytest.approx(sum(memory.parts.values()))
    assert memory.low <= memory.total <= memory.high
    assert all(value >= 0 for moment in memory.moments for value in moment.parts.values())


@settings(max_examples=40, deadline=None)
@given(small_models(), st.sampled_from(["eager", "flash"]))
def test_more_recomputation_costs_more_flops_and_keeps_less(model: ModelSpec, attention: str) -> None:
    how = training("megatron", attention=attention)
    results = [
        estimate(model, Layout(seq_len=512, recompute=RecomputePolicy.parse(mode)), how)
        for mode in ("none", "full:every=2", "full")
    ]
    flops = [result.flops.hardware for result in results]
    kept = [max(moment.parts["activations"] for moment in result.memory.moments) for result in results]
    assert flops == sorted(flops)
    assert kept == sorted(kept, reverse=True)
    assert len({result.flops.model for result in results}) == 1


@given(small_models(), st.integers(1, 8), st.integers(1, 4))
def test_flops_are_linear_in_sequences(model: ModelSpec, batch: int, many: int) -> None:
    one = microbatch_flops(model, View.of(128, batch)).hardware
    assert microbatch_flops(model, View.of(128, many * batch)).hardware == many * one


@settings(max_examples=30, deadline=None)
@given(small_models())
def test_zero_3_counts_the_gradient_of_a_layer_once(model: ModelSpec) -> None:
    how = training("torchtitan", "bf16")
    layout = Layout(dp=4, zero=3, global_batch=4, seq_len=256)
    layer = block_layer(model.blocks[0], model.hidden_size, view_of(layout, how))
    last = model.num_hidden_layers - 1
    moments = {moment.name: moment.parts for moment in estimate(model, layout, how).memory.moments}
    first, second = (moments[f"backward of layer {number}"] for number in (last, last - 1))
    for parts in (first, second):
        assert parts["transient"] == backward_peak(layer, 2) - layer.saved(), "one in bfloat16, as it comes"
    assert second["gathered"] - first["gathered"] == 4 * layer.params, "the one before in float32, on its way"
