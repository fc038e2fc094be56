"""A layout that cannot exist says which constraint fails; each constraint alone, and the layout beside it that can."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from loadgauge import Layout, estimate, model
from loadgauge.core.base.errors import ConfigError, LayoutError
from loadgauge.core.definitions.layout.layout import SCHEDULES, V_SHAPED, RecomputePolicy
from loadgauge.core.definitions.model.model import Mamba2, ModelSpec, Norm, ShortConvolution
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.schedule.simulate import simulate, violation
from loadgauge.core.families.reference import deepseek_block, gpt_model, llama_model, mixtral_block
from loadgauge.core.resolve.recompute_words import resolve_recompute
from orders import most_in_flight


def of_blocks(*blocks: Any) -> ModelSpec:
    return ModelSpec(
        name="made", model_type="made", hidden_size=512, vocab_size=1000, blocks=blocks,
        pattern=tuple(range(len(blocks))) * 4, final_norm=Norm("rmsnorm"),
    )  # fmt: skip


def with_mixer(mixer: Any) -> ModelSpec:
    return of_blocks(msgspec.structs.replace(DENSE.blocks[0], attention=mixer))


DENSE = llama_model(8, 768, 12, 1000, num_key_value_heads=6, intermediate_size=1024)
MIXTRAL = of_blocks(mixtral_block(512, 8, 4, 64, num_experts=12, num_experts_per_tok=2, moe_intermediate_size=90))
DEEPSEEK = of_blocks(deepseek_block(512, 8, 64, 64, 32, 32, 32, 8, 2, 64, 90))
MAMBA = with_mixer(Mamba2(num_heads=8, head_dim=64, state_size=16, n_groups=2))
MIXTURE_RANKS = {"dp": 4, "tp": 2, "sequence_parallel": True, "global_batch": 4, "seq_len": 8}
PIPELINE = {"pp": 4, "global_batch": 8}
CONSTRAINTS: dict[str, tuple[ModelSpec, dict[str, Any], dict[str, Any], str]] = {
    # what is asked of which model, what is changed so that it cannot be, and why
    "whole degree": (DENSE, {}, {"tp": 0}, "tp must be a whole number of at least 1, got 0"),
    "whole batch": (DENSE, {}, {"micro_batch": 1.5}, "micro_batch must be a whole number of at least 1, got 1.5"),
    "zero": (DENSE, {}, {"zero": 4}, "zero must be 0, 1, 2 or 3, got 4"),
    "layers over stages": (DENSE, {"pp": 4}, {"pp": 3}, "num_hidden_layers over pp x vpp"),
    "layers over chunks": (
        DENSE, {**PIPELINE, "schedule": "interleaved", "vpp": 2}, {"vpp": 3}, "num_hidden_layers over pp x vpp",
    ),
    "layers over a V": (DENSE, {"pp": 4, "schedule": "zb-v"}, {"pp": 8}, "num_hidden_layers over 2 pp"),
    "count of stages": (DENSE, {"pp": 2, "stage_layers": (3, 5)}, {"stage_layers": (3, 3, 2)}, "must be 2 counts"),
    "sum of stages": (DENSE, {"pp": 2, "stage_layers": (3, 5)}, {"stage_layers": (3, 6)}, "that add up to 8"),
    "layers below zero": (DENSE, {"pp": 2, "stage_layers": (0, 8)}, {"stage_layers": (-1, 9)}, "counts that add up"),
    "one set of weights": (
        model("albert-base-v2"), {}, {"pp": 2}, "pp = 2: the layers share one set of weights",
    ),
    "recomputed layers": (
        DENSE, {}, {"recompute": RecomputePolicy(mode="full", layers=9)}, "recompute asks for 9 layers of 8",
    ),
    "heads": (DENSE, {"tp": 2}, {"tp": 8}, "num_attention_heads over tp: 12 over 8 leaves 4"),
    "latent heads": (
        DEEPSEEK, {"tp": 2, "dp": 3, "global_batch": 3, "sequence_parallel": True, "seq_len": 6},
        {"tp": 3}, "num_attention_heads over tp: 8 over 3 leaves 2",
    ),
    "heads of Mamba": (MAMBA, {"tp": 2}, {"tp": 16}, "num_heads over tp: 8 over 16 leaves 8"),
    "groups of Mamba": (MAMBA, {"tp": 2}, {"tp": 4}, "--zero 3 or --pp shares such a model out): 2 over 4 leaves 2"),
    "heads of a delta net": (
        model("qwen3-next-80b-a3b"), {"tp": 2, "sequence_parallel": True, "seq_len": 96}, {"tp": 3},
        "linear_num_value_heads over tp: 32 over 3 leaves 2",
    ),
    "key heads of a delta net": (
        model("qwen3-next-80b-a3b"), {"tp": 2, "sequence_parallel": True, "seq_len": 96}, {"tp": 32},
        "linear_num_key_heads over tp: 16 over 32 leaves 16",
    ),
    "a mixer over tp": (
        with_mixer(ShortConvolution()), {"tp": 2}, {"tp": 5}, "channels of the convolution over tp: 512 over 5 leaves 2",
    ),
    "a mixer over cp": (
        with_mixer(ShortConvolution()), {}, {"cp": 2},
        "cp = 2: ShortConvolution over cp is not modelled; --recompute full makes room for long sequences",
    ),
    "key-value heads": (DENSE, {"tp": 2}, {"tp": 4}, "num_key_value_heads and tp must divide one another: 6 and 4"),
    "MLP": (DENSE, {"tp": 2}, {"tp": 3}, "intermediate_size over tp: 1024 over 3 leaves 1"),
    "no experts": (DENSE, {"dp": 2, "global_batch": 2}, {"ep": 2}, "ep = 2, etp = 1: the model has no experts"),
    "no experts to cut": (DENSE, {"dp": 2, "global_batch": 2}, {"etp": 2}, "ep = 1, etp = 2: the model has no experts"),
    "experts": (MIXTRAL, {**MIXTURE_RANKS, "ep": 4}, {"ep": 8}, "num_experts over ep: 12 over 8 leaves 4"),
    "width of experts": (
        MIXTRAL, {**MIXTURE_RANKS, "etp": 2}, {"etp": 4}, "moe_intermediate_size over etp: 90 over 4 leaves 2",
    ),
    "shared experts": (
        DEEPSEEK, {**MIXTURE_RANKS}, {"tp": 4}, "width of the shared experts over tp: 90 over 4 leaves 2",
    ),
    "experts and tp": (
        MIXTRAL, MIXTURE_RANKS, {"sequence_parallel": False}, "experts with tp above 1 need sequence parallelism",
    ),
    "ranks of experts": (MIXTRAL, {**MIXTURE_RANKS, "ep": 4}, {"ep": 3}, "dp x cp x tp over ep x etp: 8 over 3 leaves 2"),
    "imbalance below 1": (MIXTRAL, {}, {"expert_imbalance": 0.5}, "expert_imbalance must be from 1, balanced, to 1"),
    "imbalance": (
        MIXTRAL, {**MIXTURE_RANKS, "ep": 4, "expert_imbalance": 4.0}, {"expert_imbalance": 4.5}, "balanced, to 4,",
    ),
    "imbalance of none": (DENSE, {}, {"expert_imbalance": 2}, "expert_imbalance must be from 1, balanced, to 1,"),
    "exchange": (DENSE, {"cp": 2, "seq_len": 8}, {"cp_comm": "tree"}, "unknown cp_comm 'tree' (known: ring, all_gather"),
    "ring": (DENSE, {"cp": 2, "seq_len": 8}, {"seq_len": 6}, "seq_len over 2 cp: 6 over 4 leaves 2"),
    "heads for tokens": (
        DENSE, {"cp": 2, "seq_len": 6, "cp_comm": "all_to_all"}, {"seq_len": 7}, "seq_len over cp: 7 over 2 leaves 1",
    ),
    "heads over both": (
        DENSE, {"cp": 4, "seq_len": 40, "cp_comm": "all_to_all"}, {"cp": 5},
        "num_attention_heads over tp x cp: 12 over 5 leaves 2",
    ),
    "sequence parallelism": (
        DENSE, {"tp": 2, "sequence_parallel": True, "seq_len": 8}, {"tp": 1}, "shards over tp, which is 1",
    ),
    "shared tokens": (
        DENSE, {"tp": 2, "sequence_parallel": True, "seq_len": 8}, {"seq_len": 7},
        "seq_len over tp x cp (sequence parallelism): 7 over 2 leaves 1",
    ),
    "positions": (
        model("gpt2"), {"seq_len": 1024}, {"seq_len": 1025}, "seq_len 1025 is longer than the model's table of 1024",
    ),
    "batch": (DENSE, {"dp": 2, "global_batch": 4}, {"global_batch": 5}, "global_batch over dp x micro_batch: 5 over 2"),
    "schedule": (DENSE, {}, {"schedule": "2f2b"}, "unknown schedule '2f2b' (known: 1f1b, gpipe, interleaved, zb-h1"),
    "stages to interleave": (
        DENSE, {**PIPELINE, "schedule": "interleaved", "vpp": 2}, {"pp": 1}, "needs pp > 1 and vpp > 1",
    ),
    "chunks to interleave": (
        DENSE, {**PIPELINE, "schedule": "interleaved", "vpp": 2}, {"vpp": 1}, "needs pp > 1 and vpp > 1",
    ),
    "groups to interleave": (
        DENSE, {**PIPELINE, "schedule": "interleaved", "vpp": 2}, {"global_batch": 3}, "needs at least 4 micro-batches",
    ),
    "chunks of others": (DENSE, PIPELINE, {"vpp": 2}, "vpp = 2 needs the interleaved schedule, not 1f1b"),
    "stages of both ways": (
        llama_model(12, 768, 12, 1000), {**PIPELINE, "schedule": "dualpipe"}, {"pp": 3}, "an even number of stages",
    ),
    "batches of both ways": (
        DENSE, {**PIPELINE, "schedule": "dualpipe"}, {"global_batch": 9}, "an even number of stages and of micro-batches",
    ),
    "enough for both ways": (
        DENSE, {**PIPELINE, "schedule": "dualpipe"}, {"global_batch": 6}, "at least 2 micro-batches a stage: 8, got 6",
    ),
    "enough for a V": (
        DENSE, {**PIPELINE, "schedule": "dualpipev"}, {"global_batch": 7}, "at least 2 micro-batches a stage: 8, got 7",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_each_constraint_is_named(name: str) -> None:
    chosen, good, change, message = CONSTRAINTS[name]
    assert Layout(**{"seq_len": 1, **good}).valid(chosen) == []
    layout = Layout(**{"seq_len": 1, **good, **change})
    problems = layout.valid(chosen)
    assert any(message in problem for problem in problems), problems
    assert not any("\n" in problem for problem in problems)
    with pytest.raises(LayoutError) as caught:
        estimate(chosen, layout)
    assert str(caught.value) == "; ".join(problems)


def test_every_problem_is_named_once() -> None:
    """All of them, so that nobody fixes one to find the next."""
    problems = Layout(tp=5, pp=3, global_batch=1, dp=2, zero=7, seq_len=1).valid(DENSE)
    assert len(problems) == len(set(problems)) >= 6


# -- schedules ---------------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 8), st.integers(1, 40), st.integers(1, 4))
def test_a_schedule_exists_where_it_can_be_simulated(schedule: str, stages: int, batches: int, chunks: int) -> None:
    chosen = gpt_model(stages * 12, 64, 4, 100)
    vpp = chunks if schedule == "interleaved" else 1
    layout = Layout(pp=stages, vpp=vpp, global_batch=batches, schedule=schedule, seq_len=1)  # type: ignore[arg-type]
    impossible = violation(schedule, stages, batches, vpp if schedule == "interleaved" else None)
    assert bool(layout.valid(chosen)) == bool(impossible)
    if not impossible:
        given_chunks = {"chunks": vpp} if schedule == "interleaved" else {}
        played = simulate(schedule, stages, batches, forward=1, backward=1, weight=1, **given_chunks)
        assert tuple(layout.in_flight(stage) for stage in range(stages)) == most_in_flight(played.order)
        assert layout.chunks == played.order.chunks
        assert layout.chunks // layout.copies == played.order.split


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 4), st.integers(1, 3), st.data())
def test_the_stages_hold_the_model_in_the_order_of_the_routes(
    schedule: str, half: int, chunks: int, data: st.DataObject
) -> None:
    """Along each way that a micro-batch takes through stages and chunks it meets every layer once, in order."""
    stages = 2 * half
    vpp = chunks + 1 if schedule == "interleaved" else 1
    parts = {"interleaved": vpp}.get(schedule, 2 if schedule in V_SHAPED else 1)
    layers = tuple(parts * count for count in data.draw(st.lists(st.integers(0, 4), min_size=stages, max_size=stages)))
    batches = 4 * stages
    chosen = gpt_model(sum(layers), 64, 4, 100)
    layout = Layout(
        pp=stages,
        vpp=vpp,
        global_batch=batches,
        schedule=schedule,
        stage_layers=layers,  # type: ignore[arg-type]
        seq_len=1,
    )
    layout.check(chosen)
    held = layout.chunks_of(chosen)
    played = simulate(schedule, stages, batches, forward=1, backward=1, chunks=vpp if vpp > 1 else None)
    for route in played.order.routes:
        met = [position for stage, chunk in route for position in range(*held[stage][chunk])]
        assert met == list(range(sum(layers)))
    total = sum(stop - start for stage in held for start, stop in stage)
    assert total == layout.copies * sum(layers)


def test_dualpipe_holds_two_copies_and_one_micro_batch_more() -> None:
    """DeepSeek-V3's table 2: parameters twice, activations of PP + 1 micro-batches; 1F1B and ZB1P: once, and PP."""
    for schedule, copies, batches in (("1f1b", 1, 8), ("zb-h1", 1, 8), ("dualpipe", 2, 9)):
        layout = Layout(pp=8, global_batch=32, schedule=schedule, seq_len=1)  # type: ignore[arg-type]
        assert (layout.copies, max(layout.in_flight(stage) for stage in range(8))) == (copies, batches)


# -- experts -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_the_worst_routing(ep: int, each: int, data: st.DataObject) -> None:
    """Tokens routed one by one to the first ranks' experts first: nobody can send more to one rank."""
    experts = ep * each
    chosen = data.draw(st.integers(1, experts))
    block = mixtral_block(512, 8, 4, 64, experts, chosen, 64)
    rows = [0] * ep
    for _ in range(12):  # tokens
        for expert in range(chosen):
            rows[expert // each] += 1
    worst = Layout(dp=ep, ep=ep, seq_len=1).worst_imbalance(of_blocks(block))
    assert max(rows) == pytest.approx(worst * sum(rows) / ep)
    layout = Layout(dp=ep, ep=ep, global_batch=ep, expert_imbalance=float(worst), seq_len=1)
    assert layout.valid(of_blocks(block)) == []


def test_uneven_chunks_hold_every_layer_once():
    """Megatron's layouts put the embedding and the head in chunks of their own, which leaves 15 layers for 4 chunks."""
    layout = Layout(pp=2, vpp=2, schedule="interleaved", stage_layers=(3, 5), global_batch=2, seq_len=1)
    assert layout.valid(DENSE) == []
    held = [layer for stage in layout.chunks_of(DENSE) for start, stop in stage for layer in range(start, stop)]
    assert sorted(held) == list(range(8))
    assert [[stop - start for start, stop in stage] for stage in layout.chunks_of(DENSE)] == [[2, 1], [3, 2]]


# -- operations that run again -----------------------------------------------------------------------------------------


def test_an_operation_of_some_blocks_only_may_run_again() -> None:
    """Dispatch is in the layers with experts, `mlp.gate` in the dense ones; what no layer has is refused."""
    mixed, saved = model("deepseek-v2-lite"), {}
    for ops in ("none", "mlp.gate", "mlp.dispatch", "mlp.gate,mlp.dispatch"):
        memory = estimate(mixed, Layout(seq_len=512, recompute=RecomputePolicy.parse(ops))).memory
        saved[ops] = next(moment.parts["activations"] for moment in memory.moments if moment.name == "loss")
    dense, sparse = (saved["none"] - saved[ops] for ops in ("mlp.gate", "mlp.dispatch"))
    assert 0 < dense < sparse
    assert saved["none"] - saved["mlp.gate,mlp.dispatch"] == dense + sparse
    with pytest.raises(ConfigError, match=r"recompute: no operation 'mlp.gates' in this model's layers \(known: .*mlp"):
        estimate(mixed, Layout(seq_len=512, recompute=RecomputePolicy.parse("mlp.gate,mlp.gates")))
    with pytest.raises(ConfigError, match=r"no operation 'mlp\.dispatch'"):
        estimate(DENSE, Layout(seq_len=512, recompute=RecomputePolicy.parse("mlp.dispatch")))


def test_a_name_that_both_kinds_of_layers_have_may_mean_one_of_them() -> None:
    """Megatron's module `mlp` is that of dense layers, `moe` that of layers with experts: both have a `mlp.down`."""
    mixed, saved = model("deepseek-v2-lite"), {}
    for ops in ("none", "mlp.down", "mlp.down@dense", "mlp.down@experts"):
        memory = estimate(mixed, Layout(seq_len=512, recompute=RecomputePolicy.parse(ops))).memory
        saved[ops] = next(moment.parts["activations"] for moment in memory.moments if moment.name == "loss")
    dense, sparse = (saved["none"] - saved[f"mlp.down@{kind}"] for kind in ("dense", "experts"))
    assert dense + sparse == saved["none"] - saved["mlp.down"]
    assert sparse > dense >= 0
    words = resolve_recompute("modules:mlp", mixed, training("megatron")).split(",")
    assert "mlp.down@dense" in words
    assert not any(word.endswith("@experts") for word in words)
    with pytest.raises(ConfigError, match="known: none, selective, full"):
        RecomputePolicy.parse("mlp.down@expert")


def kept_with(layout: Layout, imbalance: float) -> int:
    """Bytes that one layer with experts keeps on the busiest rank."""
    how = training("megatron")
    view = msgspec.structs.replace(view_of(layout, how), imbalance=imbalance)
    return int(MemoryModel(MIXTRAL, layout, how, view).facts[0, False].kept)


def test_the_busiest_rank_keeps_its_rows_as_many_times() -> None:
    """Of each row: what came, gate and up, the activation's output, in 16 bits, and the weight of the row in 32."""
    layout = Layout(dp=6, ep=6, global_batch=6, seq_len=64)
    rows, each = 64 * 2, 2 * (512 + 3 * 90) + 4
    worst = layout.worst_imbalance(MIXTRAL)
    assert worst == 6
    assert kept_with(layout, worst) - kept_with(layout, 1) == (worst - 1) * rows * each
    assert Layout(dp=6, seq_len=1).worst_imbalance(MIXTRAL) == 1, "one rank has all experts, and all rows"
