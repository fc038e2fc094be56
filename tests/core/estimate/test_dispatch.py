"""A dispatcher that sends each domain one copy of a token: against dice."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from command_line import document
from loadgauge.core.definitions.hardware.calibration import Wire, efficiencies
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.time.collectives import Fabric, Group, adapter_bytes, seconds, single_copies
from loadgauge.core.families.catalogue import model
from loadgauge.core.layers import View, block_layer
from loadgauge.core.resolve.resolve import resolve_job

FABRIC = Fabric(domain=8, inner_bandwidth=1e15, outer_bandwidth=50e9, inner_latency=0, outer_latency=0)


@pytest.mark.parametrize(("copies", "domains"), [(1, 4), (2, 2), (8, 4), (8, 16)])
def test_copies_that_leave_a_domain(copies: int, domains: int):
    dice = random.Random(copies * domains)
    tokens = 20_000
    drawn = [[dice.randrange(domains) for _ in range(copies)] for _ in range(tokens)]
    all_copies = sum(place != 0 for places in drawn for place in places)
    distinct = sum(len(set(places) - {0}) for places in drawn)
    assert single_copies(copies, domains) == pytest.approx(distinct / all_copies, rel=0.02)


def test_adapters_carry_less_and_the_time_follows():
    group = Group("ep", 32, 1)
    plain, few = (adapter_bytes("all_to_all", 32_000, group, FABRIC, copies) for copies in (1, 8))
    assert plain == 24_000  # 24 of the 32 parts are for other nodes
    assert few == pytest.approx(plain * 4 * (1 - 0.75**8) / 8)
    assert seconds("all_to_all", 32e9, group, FABRIC) == pytest.approx(24e9 / 50e9)
    assert seconds("all_to_all", 32e9, group, FABRIC, copies=8) == pytest.approx(24e9 / 50e9 * single_copies(8, 4))


def test_inside_a_domain_each_rank_is_sent_one_copy():
    inner = msgspec.structs.replace(FABRIC, inner_bandwidth=450e9)
    group = Group("ep", 8, 1)
    plain, few = (seconds("all_to_all", 8e9, group, inner, copies=copies) for copies in (1, 8))
    assert few == pytest.approx(plain * 8 * (1 - 0.875**8) / 8)


def test_tokens_and_copies_take_time_of_their_own():
    wire = Wire(start=1.0, step=1e-3, share=1.0, root=1e-4)
    fabric = msgspec.structs.replace(FABRIC, wires={"dispatch": wire})
    took = seconds("all_to_all", 8e3, Group("ep", 8, 1), fabric, copies=2, rows=2000)
    assert took == pytest.approx(1.0 + 1000 * 1e-3 + 1000 * 8 * (1 - 0.875**2) * 1e-4)


def test_both_ways_hide_together():
    """What forward cannot hide, backward can, as one half of the batch computes either while the other half is sent."""
    step = "estimate qwen3-30b-a3b --gpu h100-sxm5-80gb --gpus 16 --ep 16 --framework megatron --seq-len 4096 --global-batch 64"
    apart, beside = (
        document(f"{step} --micro-batch 1 --overlap {words}")["time"]["parts"] for words in ("dp,pp", "dp,pp,ep")
    )
    computed = apart["forward"] + apart["backward"]
    contention = efficiencies("h100-sxm5-80gb").contention
    assert apart["ep"] > 0.2 * computed
    seen = max(apart["ep"] - computed, 0)
    assert beside["ep"] == pytest.approx(seen + contention * (apart["ep"] - seen), rel=0.02)


def test_layers_without_a_backward_send_one_way():
    step = "estimate qwen3-30b-a3b --gpu h100-sxm5-80gb --gpus 16 --ep 8 --framework megatron --micro-batch 1 --train layers.-2:"
    parts = [document(f"{step} --overlap {words}")["time"]["parts"] for words in ("dp,pp", "dp,pp,ep")]
    assert parts[1]["ep"] < parts[0]["ep"]


def test_the_kernels_choose():
    block, kernels = model("mixtral-8x7b").blocks[0], training("megatron").kernels
    for dispatch, copies in (("all_to_all", 1), ("deduplicated", 2)):
        chosen = msgspec.structs.replace(kernels, dispatch=dispatch)
        layer = block_layer(block, 4096, View.of(4096, 1, ep=8, kernels=chosen))
        assert {one.copies for op in layer for one in op.forward_comm if one.axis == "ep"} == {copies}


@pytest.mark.parametrize(("domains", "count", "chosen"), [(8, 8, 4), (2, 8, 4), (4, 8, 3), (16, 8, 4), (8, 1, 1)])
def test_domains_that_node_limited_routing_reaches(domains: int, count: int, chosen: int) -> None:
    """Tokens routed as DeepSeek-V3 does (deepseek2024v3, 2.1.2): some groups of experts, of these so many experts."""
    draw, experts, copies = random.Random(1), 256, 8
    each, trials = experts // count, 20_000
    total = 0
    for _ in range(trials):
        groups = draw.sample(range(count), chosen if count > 1 else 1)
        allowed = [group * each + place for group in groups for place in range(each)]
        total += len({expert * domains // experts for expert in draw.sample(allowed, copies)})
    # Experts are drawn with putting back: a little low where few are left.
    assert single_copies(copies, domains, (count, chosen)) * copies == pytest.approx(total / trials, rel=0.02)


def test_a_schedule_of_deepseek_sends_tokens_in_eight_bits_and_sums_in_sixteen() -> None:
    words = {"gpus": 128, "pp": 2, "ep": 64, "global_batch": 512, "schedule": "dualpipe", "precision": "fp8-blockwise"}
    setup = resolve_job(Job("deepseek-v3", framework="megatron", **words))  # type: ignore[arg-type]
    layer = next(
        facts.layer for facts in setup.estimate().workings.memory.facts.values() if "mlp.dispatch" in facts.layer.names
    )
    dispatch, back_again = (
        next(operation for operation in layer if operation.name == name) for name in ("mlp.dispatch", "mlp.return")
    )

    def sent(collectives: Any) -> list[float]:
        return [each.nbytes for each in collectives if each.axis == "ep"]

    (out,), (back,) = sent(dispatch.forward_comm), sent(dispatch.backward_comm)
    assert out / back == pytest.approx((1 + 4 / 128) / 2, rel=1e-9)
    assert (sent(back_again.forward_comm), sent(back_again.backward_comm)) == ([back], [out])
    assert {each.groups for each in dispatch.forward_comm if each.axis == "ep"} == {(8, 4)}


@pytest.mark.parametrize(("ep", "sorts"), [(4, 2), (8, 0)])
def test_rows_of_several_experts_are_sorted_before_and_after_them(ep: int, sorts: int) -> None:
    """Each sort reads and writes every row once, forward and backward; one expert a rank needs none
    (source: megatron-core 0.16, `token_dispatcher.py`, `sort_chunks_by_idxs`)."""
    words = {"gpus": 8, "ep": ep, "zero": 1, "seq_len": 1024}
    setup = resolve_job(Job("mixtral-8x7b", framework="megatron", gpu="h100", **words))  # type: ignore[arg-type]
    layer = next(
        facts.layer for facts in setup.estimate().workings.memory.facts.values() if "mlp.return" in facts.layer.names
    )
    back = next(operation for operation in layer if operation.name == "mlp.return")
    rows = 1024 * 2 * setup.layout.expert_imbalance
    assert back.moves == pytest.approx((sorts * 2 * rows * 4096 * 2,) * 2, rel=1e-9)
