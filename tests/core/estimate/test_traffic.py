"""The traffic of a step against the counts of the papers that introduced each kind of parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgauge.core.base.errors import ConfigError, LayoutError
from loadgauge.core.definitions.layout.axes import RANK_ORDER
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.training import Training, training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.estimate.time.collectives import Fabric, Group
from loadgauge.core.estimate.time.traffic import Traffic, expose, layout_groups, stage_traffic
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.families.reference import gpt_model, llama_model
from loadgauge.core.layers import block_layer

FABRIC = Fabric(domain=8, inner_bandwidth=400e9, outer_bandwidth=50e9, inner_latency=3e-6, outer_latency=14e-6)
GPT, LLAMA = gpt_model(24, 1024, 16, 51200, positions=2048), llama_model(24, 1024, 16, 32000)
MEGATRON = training("megatron")
SEQ, LAYERS, HIDDEN = 2048, 24, 1024


def every(model: ModelSpec, how: Training = MEGATRON, **layout: Any) -> list[tuple[Traffic, ...]]:
    """The rows of each pipeline stage."""
    chosen = Layout(**{"seq_len": SEQ, "global_batch": layout.get("dp", 1), **layout})
    chosen.check(model)
    memory = MemoryModel(model, chosen, how, view_of(chosen, how))
    return [stage_traffic(memory, FABRIC, stage) for stage in stages(model, chosen)]


def rows(model: ModelSpec, how: Training = MEGATRON, **layout: Any) -> tuple[Traffic, ...]:
    """The rows of the only stage."""
    (found,) = every(model, how, **layout)
    return found


def only(found: Sequence[Traffic], axis: str, kind: str, what: str = "") -> list[Traffic]:
    return [row for row in found if (row.axis, row.collective) == (axis, kind) and what in row.what]


def calls(found: Sequence[Traffic], axis: str, kind: str, what: str = "") -> int:
    """Calls of one micro-batch."""
    return sum(row.calls_per_microbatch for row in only(found, axis, kind, what))


# -- tensor and sequence parallelism ----------------------------------------------------------------------------------


def test_four_all_reduces_a_layer() -> None:
    # Shoeybi et al. 2019, figure 4; Narayanan et al. 2021, section 3.2: 2 forward, 2 backward, of b s h.
    found = [row for row in rows(GPT, tp=4) if row.what.startswith("activations")]
    assert {row.collective for row in found} == {"all_reduce"}
    assert calls(found, "tp", "all_reduce", "forward") == calls(found, "tp", "all_reduce", "backward") == 2 * LAYERS
    assert {row.payload for row in found} == {2 * SEQ * HIDDEN}
    # "8 b s h (t - 1)/t elements a layer".
    assert sum(row.sent for row in found) == LAYERS * 2 * 8 * SEQ * HIDDEN * 3 / 4


def test_six_all_reduces_a_layer_where_all_runs_again() -> None:
    found = rows(GPT, tp=4, recompute=RecomputePolicy(mode="full"))
    assert calls(found, "tp", "all_reduce", "activations") == 6 * LAYERS
    assert calls(found, "tp", "all_reduce", "recomputed") == 2 * LAYERS
    # Running the core of attention again sends nothing.
    selective = rows(GPT, tp=4, recompute=RecomputePolicy(mode="selective"))
    assert calls(selective, "tp", "all_reduce", "activations") == 4 * LAYERS


def test_sequence_parallelism_sends_the_same_and_gathers_twice_more() -> None:
    # Korthikanti et al. 2022, section 4.2.2: 4 gathers and 4 scatters a layer, and the inputs of both column-parallel
    # matrices, of which each rank keeps its part only, are gathered again in backward.
    plain, found = rows(GPT, tp=4), rows(GPT, tp=4, sequence_parallel=True)
    assert calls(found, "tp", "all_gather", "activations") == (4 + 2) * LAYERS
    assert calls(found, "tp", "reduce_scatter", "activations") == 4 * LAYERS
    assert calls(found, "tp", "all_gather", "activations, backward") == (2 + 2) * LAYERS
    sent = {name: sum(row.sent for row in each if row.what.startswith("activations"))
            for name, each in (("plain", plain), ("shared", found))}  # fmt: skip
    assert sent["shared"] == sent["plain"] * 10 / 8
    # A framework that keeps the gathered input does not gather it again.
    kept = rows(GPT, training("torchtitan"), tp=4, sequence_parallel=True)
    assert calls(kept, "tp", "all_gather", "activations") == 4 * LAYERS


def test_embedding_and_head_over_the_vocabulary() -> None:
    # Shoeybi et al. 2019, section 3: one all-reduce of b s h for each end, and b s scalars instead of logits: the largest,
    # the target's and the sum.
    found = rows(GPT, tp=4)
    (embedding,) = [row for row in found if row.what == "embedding"]
    assert (embedding.calls_per_microbatch, embedding.payload) == (1, 2 * SEQ * HIDDEN)
    head = {row.payload: row.calls_per_microbatch for row in found if row.what == "head"}
    assert head == {2 * SEQ * HIDDEN: 1, 4 * SEQ: 3}


def test_gradients_of_norms_under_sequence_parallelism() -> None:
    # Every rank holds them whole and sees a part of the tokens: 2 RMSNorms a layer and the last one, once a step.
    (found,) = only(rows(LLAMA, tp=4, dp=2, global_batch=8, sequence_parallel=True), "tp", "all_reduce", "shared")
    assert (found.payload, found.calls_per_step) == (4 * (2 * LAYERS + 1) * HIDDEN, 1)
    assert not only(rows(LLAMA, tp=4), "tp", "all_reduce", "shared")


# -- pipelines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_pipeline_hands_every_chunk_on(chunks: int) -> None:
    more = {"vpp": chunks, "schedule": "interleaved"} if chunks > 1 else {}
    stages_, batches = 4, 8
    found = every(LLAMA, pp=stages_, global_batch=batches, **more)
    # By hand: chunk c is on stage c mod p; c hands activations to c + 1, which hands gradients back.
    forward, backward = [0] * stages_, [0] * stages_
    for chunk in range(stages_ * chunks - 1):
        forward[chunk % stages_] += 1
        backward[(chunk + 1) % stages_] += 1
    for stage, each in enumerate(found):
        assert calls(each, "pp", "send_recv", "activations, forward") == forward[stage]
        assert calls(each, "pp", "send_recv", "gradients of activations") == backward[stage]
        assert sum(row.sent for row in only(each, "pp", "send_recv")) == (
            batches * (forward[stage] + backward[stage]) * 2 * SEQ * HIDDEN
        )


def test_a_pipeline_in_a_v_turns_without_sending() -> None:
    # Down through all stages and up again: each border is crossed twice in each direction, the turn is on one stage.
    for stage, found in enumerate(every(LLAMA, pp=4, global_batch=8, schedule="zb-v")):
        borders = (stage > 0) + (stage < 3)
        assert calls(found, "pp", "send_recv", "activations, forward") == borders
        assert calls(found, "pp", "send_recv", "gradients of activations") == borders


def test_two_pipelines_in_opposite_directions() -> None:
    # Half of the micro-batches go each way; every border is crossed once a micro-batch, and both copies of the weights
    # get the same gradient.
    for stage, found in enumerate(every(LLAMA, pp=4, global_batch=8, schedule="dualpipe")):
        borders = (stage > 0) + (stage < 3)
        assert sum(row.calls_per_step for row in only(found, "pp", "send_recv", "activations, forward")) == 4 * borders
        (both,) = only(found, "pp", "all_reduce")
        (held,) = (each for each in (only(found, "dp", "all_reduce"),))
        assert not held
        assert both.ranks == 2
    pairs = [only(found, "pp", "all_reduce")[0].payload for found in every(LLAMA, pp=4, global_batch=8,
                                                                           schedule="dualpipe")]  # fmt: skip
    assert sum(pairs) == 2 * 4 * parameters(LLAMA).total


def test_sequence_parallel_stages_hand_over_their_part() -> None:
    whole, part = rows_of_first(tp=4), rows_of_first(tp=4, sequence_parallel=True)
    assert part.payload == whole.payload / 4


def rows_of_first(**layout: Any) -> Traffic:
    return only(every(LLAMA, pp=2, **layout)[0], "pp", "send_recv")[0]


def test_a_tied_table_has_its_gradient_summed_over_both_ends() -> None:
    first, *middle, last = every(GPT, pp=4, tp=2)
    padded = 51200  # a multiple of 128 x tp
    for stage in (first, last):
        (row,) = only(stage, "pp", "all_reduce")
        assert (row.payload, row.ranks, row.calls_per_step) == (4 * padded * HIDDEN / 2, 2, 1)
        assert row.link == "inner"
    others = (*middle, *every(LLAMA, pp=4), *every(GPT, pp=4, schedule="zb-v"))
    assert not any(only(stage, "pp", "all_reduce") for stage in others)


# -- context parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallelism(cp: int) -> None:
    own = 2 * 2 * SEQ // cp * HIDDEN  # 16-bit keys and values of one rank
    for way in ("ring", "all_gather"):
        found = [row for row in rows(LLAMA, cp=cp, cp_comm=way) if row.axis == "cp"]
        # Liu et al. 2023: keys and values go round once forward, and with their gradients once more backward.
        assert sum(row.sent for row in found) == LAYERS * 3 * (cp - 1) * own
    # Jacobs et al. 2023: queries, keys, values there and the context back, each 1/c of the sequence, in both passes.
    found = [row for row in rows(LLAMA, cp=cp, cp_comm="all_to_all") if row.axis == "cp"]
    assert {row.collective for row in found} == {"all_to_all"}
    assert sum(row.sent for row in found) == LAYERS * 2 * 4 * (cp - 1) / cp * (own / 2)


# -- experts ----------------------------------------------------------------------------------------------------------


def test_experts_get_their_tokens_and_send_them_back() -> None:
    mixtral = find_model("mixtral-8x7b")
    found = rows(mixtral, dp=8, ep=8)
    # Two of eight experts see each token: dispatch and combine, forward and backward, (n - 1)/n of 2 T h each.
    exchanged = only(found, "ep", "all_to_all")
    assert sum(row.calls_per_microbatch for row in exchanged) == 4 * 32
    assert sum(row.sent for row in exchanged) == 32 * 4 * 7 / 8 * 2 * (2 * SEQ) * 4096
    # Each expert is on one rank: nothing to reduce; the rest of the model is on all eight.
    assert not only(found, "dp", "all_reduce", "experts")
    (dense,) = only(found, "dp", "all_reduce", "gradients")
    assert dense.payload == 4 * (parameters(mixtral).total - 32 * 8 * 3 * 4096 * 14336)
    (spread,) = only(rows(mixtral, dp=16, ep=8), "dp", "all_reduce", "experts")
    assert (spread.ranks, spread.payload) == (2, 4 * 32 * 3 * 4096 * 14336)


def test_tensor_parallel_experts() -> None:
    mixtral = find_model("mixtral-8x7b")
    found = rows(mixtral, dp=4, tp=4, sequence_parallel=True, ep=4, etp=2, global_batch=4)
    gathered, scattered = (only(found, "etp", kind) for kind in ("all_gather", "reduce_scatter"))
    assert sum(r.calls_per_microbatch for r in gathered) == sum(r.calls_per_microbatch for r in scattered) == 2 * 32
    assert {row.lane for row in (*gathered, *scattered)} == {"ep"}
    # A quarter of the tokens, two copies of each, from both ranks of an expert.
    assert {row.payload for row in gathered} == {2 * (2 * SEQ / 4) * 4096 * 2}


# -- data parallelism -------------------------------------------------------------------------------------------------

SIXTEEN = training("deepspeed")
"""16-bit gradients, as in the ZeRO paper."""


def data_bytes(**layout: Any) -> float:
    """Bytes one rank sends along dp in a step, in units of 16-bit parameters."""
    found = rows(LLAMA, SIXTEEN, **layout)
    return sum(row.sent for row in found if row.axis == "dp") / (2 * parameters(LLAMA).total)


def test_zero_sends_what_its_paper_says() -> None:
    # Rajbhandari et al. 2019, section 7: 2 psi for data parallelism and stages 1 and 2; their 3 psi for stage 3 gather
    # all weights twice. Embedding and head (2 x 32000 x 1024) stay gathered here, so are gathered once.
    d = 8
    ends = (2 * 32000 * HIDDEN + HIDDEN) / parameters(LLAMA).total
    for zero in (0, 1, 2):
        assert data_bytes(dp=d, zero=zero) == pytest.approx(2 * (d - 1) / d)
    assert data_bytes(dp=d, zero=3) == pytest.approx((3 - ends) * (d - 1) / d)


def test_accumulation() -> None:
    one = {zero: data_bytes(dp=4, zero=zero) for zero in range(4)}
    four = {zero: data_bytes(dp=4, zero=zero, global_batch=16) for zero in range(4)}
    assert four[0] == one[0]
    assert four[1] == one[1]
    # Stage 2 reduces with every micro-batch and gathers once (DeepSpeed issue 2252); stage 3 does all of it each time.
    assert four[2] == pytest.approx(one[2] * (4 + 1) / 2)
    assert four[3] == pytest.approx(one[3] * 4)


def test_the_gradients_format_is_what_is_reduced() -> None:
    for precision, itemsize in (("bf16-mixed-16", 2), ("bf16-mixed-18", 4), ("bf16-autocast", 4), ("bf16-pure", 2)):
        how = training("megatron", precision)
        (row,) = only(rows(LLAMA, how, dp=4), "dp", "all_reduce")
        assert row.payload == itemsize * parameters(LLAMA).total


def test_weights_are_gathered_as_they_are_computed_with() -> None:
    # Megatron-LM's distributed optimizer: gradients in float32, weights in 16 bits.
    for zero in (1, 2):
        found = rows(LLAMA, dp=4, zero=zero)
        (scattered,), (gathered,) = only(found, "dp", "reduce_scatter"), only(found, "dp", "all_gather")
        assert scattered.payload == 2 * gathered.payload == 4 * parameters(LLAMA).total


def test_every_parameter_is_reduced_once() -> None:
    for model in (find_model("llama-3.1-8b"), find_model("qwen3-8b"), GPT):
        found = every(model, dp=2, pp=2, tp=1)
        gradients = sum(row.payload for stage in found for row in only(stage, "dp", "all_reduce", "gradients")) / 4
        table = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
        padding = -model.vocab_size % 128 * model.hidden_size * 2
        assert gradients == parameters(model).total + table + padding
        # Sequence parallelism shares norms: each tensor-parallel rank reduces its own copy of them.
        halves = every(model, dp=2, pp=2, tp=2)
        shared = sum(row.payload for stage in halves for row in only(stage, "dp", "all_reduce", "gradients")) / 4
        assert gradients / 2 <= shared < gradients / 2 * 1.01


def test_context_parallel_ranks_reduce_gradients_too() -> None:
    (row,) = only(rows(LLAMA, dp=4, cp=2), "dp", "all_reduce", "gradients")
    assert row.ranks == 8


def test_shards_within_replicas() -> None:
    # HSDP: 32 ranks, shards over 8, 4 replicas: each shard of the gradients is summed over its replicas.
    chosen = {"dp": 32, "zero": 3, "global_batch": 64}
    (found,) = every(LLAMA, SIXTEEN, replicas=4, **chosen)
    (whole,) = every(LLAMA, SIXTEEN, **chosen)
    scattered, summed = only(found, "dp", "reduce_scatter"), only(found, "dp", "all_reduce")
    assert {row.ranks for row in (*scattered, *only(found, "dp", "all_gather"))} == {8}
    assert {row.link for row in scattered} == {"inner"}
    assert [row.payload for row in summed] == [row.payload / 8 for row in scattered]
    assert {(row.ranks, row.link) for row in summed} == {(4, "outer")}
    assert sum(row.sent for row in summed) == pytest.approx(2 * 2 * 3 / 4 * parameters(LLAMA).total * 2 / 8), (
        "2 micro-batches of 2(r - 1)/r of a shard"
    )

    # The adapters carry less than with shards over all ranks.
    def network(rows: Sequence[Traffic]) -> float:
        return sum(row.calls_per_step * row.adapter for row in rows)

    assert network(found) < network(whole)


def test_replicas_hold_what_fewer_ranks_hold() -> None:
    def states(model: ModelSpec, **layout: Any) -> float:
        chosen = Layout(zero=3, seq_len=SEQ, global_batch=layout["dp"], **layout)
        memory = MemoryModel(model, chosen, SIXTEEN, view_of(chosen, SIXTEEN))
        (stage,) = stages(model, chosen)
        counts = memory.counts(stage, stage.start, stage.stop)
        return memory.states(memory.weights(counts) + memory.ends(stage)).total

    for model, ranks in ((LLAMA, {}), (find_model("mixtral-8x7b"), {"ep": 2})):
        assert states(model, dp=32, replicas=4, **ranks) == states(model, dp=8, **ranks)


def test_experts_have_replicas_too() -> None:
    (found,) = every(find_model("mixtral-8x7b"), SIXTEEN, replicas=2, dp=16, ep=4, zero=3)
    scattered, summed = (only(found, "dp", kind, "experts") for kind in ("reduce_scatter", "all_reduce"))
    assert [(row.ranks, row.link) for row in scattered] == [(2, "inner")]
    assert [(row.ranks, row.link) for row in summed] == [(2, "outer")]
    with pytest.raises(LayoutError, match="data-parallel ranks over replicas = 8 cannot be divided over 3"):
        layout_groups(Layout(dp=8, replicas=3, seq_len=1))


def test_adapters_alone_are_trained() -> None:
    how = training("huggingface", lora=Lora(rank=16))
    (row,) = only(rows(LLAMA, how, dp=8), "dp", "all_reduce")
    trained = sum(
        w.numel for w in block_layer(LLAMA.blocks[0], HIDDEN, view_of(Layout(seq_len=1), how)).weights if w.trainable
    )
    assert row.payload == 2 * LAYERS * trained
    # The frozen weights are gathered all the same, 4 bits of each where they are stored so.
    plain, quantised = (
        sum(row.sent for row in rows(LLAMA, each, dp=8, zero=3) if row.collective == "all_gather")
        for each in (how, training("huggingface", lora=Lora(rank=16, quantised=True)))
    )
    assert 0.25 < quantised / plain < 0.5


# -- all of it --------------------------------------------------------------------------------------------------------


def test_one_gpu_sends_nothing() -> None:
    for model in (GPT, LLAMA, find_model("mixtral-8x7b")):
        for zero in range(4):
            assert rows(model, zero=zero, global_batch=4) == ()


def test_seconds_add_up_and_are_shared_out() -> None:
    found = rows(LLAMA, dp=4, tp=4, global_batch=16, zero=1)
    for row in found:
        assert row.seconds > 0
        assert row.exposed_seconds == row.seconds
        assert row.to_dict().keys() >= {
            "axis", "collective", "calls_per_step", "payload", "wire", "link", "seconds", "exposed_seconds"
        }  # fmt: skip
    seen = expose(found, {"tp": 1.0, "dp": 0.25})
    assert sum(row.exposed_seconds for row in seen if row.lane == "tp") == pytest.approx(1.0)
    assert sum(row.exposed_seconds for row in seen if row.lane == "dp") == pytest.approx(0.25)
    ratio = {row.exposed_seconds / row.seconds for row in seen if row.lane == "dp"}
    assert max(ratio) == pytest.approx(min(ratio))


def test_overlapped_axes_are_not_exposed() -> None:
    hidden = msgspec.structs.replace(MEGATRON.overlap, tp=True, dp=True)
    found = rows(LLAMA, msgspec.structs.replace(MEGATRON, overlap=hidden), dp=4, tp=4)
    assert {row.axis for row in found if not row.exposed_seconds} == {"tp", "dp"}


def test_the_order_of_the_axes_decides_the_links() -> None:
    chosen = Layout(dp=8, tp=4, pp=4, seq_len=1)
    pipelined = ("tp", "cp", "ep", "pp", "dp")
    usual, other = layout_groups(chosen), layout_groups(Layout(dp=8, tp=4, pp=4, order=pipelined, seq_len=1))
    assert [(usual[axis].stride, other[axis].stride) for axis in ("tp", "dp", "pp")] == [(1, 1), (4, 16), (32, 4)]
    assert (usual["pp"].link(16), other["pp"].link(16)) == ("outer", "inner")
    with pytest.raises(ConfigError, match="order: must name each of tp, cp, ep, dp, pp once"):
        layout_groups(Layout(order=("tp", "dp"), seq_len=1))
    with pytest.raises(LayoutError, match="experts need ep x etp = tp x cp"):
        layout_groups(Layout(dp=8, tp=2, pp=2, ep=4, order=pipelined, seq_len=1))


def test_groups_of_arrays_are_those_of_their_elements() -> None:
    tp, dp = np.array([1.0, 2.0, 8.0]), np.array([16.0, 8.0, 2.0])
    many = layout_groups(Layout(tp=tp, dp=dp, seq_len=1))
    for index in range(3):
        one = layout_groups(Layout(tp=int(tp[index]), dp=int(dp[index]), seq_len=1))
        for name in ("tp", "dp", "zero", "pp"):
            for field in ("ranks", "stride"):
                assert np.broadcast_to(getattr(many[name], field), 3)[index] == getattr(one[name], field)
    assert isinstance(many["zero"], Group)
    assert set(many) >= set(RANK_ORDER)
