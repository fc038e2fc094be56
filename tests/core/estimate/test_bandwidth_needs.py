"""`loadgauge network`: what it says holds together, and agrees with the article it comes from."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.hardware.calibration import efficiencies
from loadgauge.core.definitions.hardware.cluster import cluster, evenly
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.kernels import PAPER
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.estimate import estimate, view_of
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.estimate.time.bandwidth_needs import (
    Need,
    NetworkCase,
    Purpose,
    bandwidth_needed,
    largest_tp,
    smallest_batch,
    what_if,
)
from loadgauge.core.estimate.time.collectives import Fabric
from loadgauge.core.estimate.time.flops import step_flops
from loadgauge.core.estimate.time.traffic import Carries, stage_traffic
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.families.reference import gpt_model

H100 = gpu("h100-sxm5-80gb")


def setup(name: str = "llama-3.1-8b", framework: str = "megatron", overlap: Any = None, **layout: Any) -> NetworkCase:
    how = {key: layout.pop(key) for key in ("share", "achieved", "oversubscription", "rails", "pod") if key in layout}
    chosen = Layout(**{"seq_len": 4096, "global_batch": layout.get("dp", 1), **layout})
    training_ = training(framework)
    if overlap is not None:
        training_ = msgspec.structs.replace(training_, overlap=msgspec.structs.replace(training_.overlap, **overlap))
    found = cluster(H100, chosen.gpus)
    return NetworkCase.of(find_model(name), chosen, training_, found, efficiencies(H100.id), **how)


# -- what a need is ---------------------------------------------------------------------------------------------------


def need(**fields: Any) -> Need:
    plain = {
        "axis": "dp", "what": "gradients", "link": "outer", "stage": 0, "ranks": 8, "carried": 10e9, "seconds": 0.5,
        "overlapped": False, "beside": 0.0, "allowed": 0.2, "bandwidth": 50e9,
    }  # fmt: skip
    return Need(**{**plain, **fields})


def test_what_is_not_hidden_may_take_its_share() -> None:
    found = need()
    assert (found.needed, found.reached, found.enough, found.hidden) == (50e9, 20e9, False, False)
    assert need(seconds=0.2).enough
    assert not need(seconds=0.201).enough
    assert need(seconds=0.2).reached == need(seconds=0.2).needed, "just enough"


def test_what_is_overlapped_must_be_hidden_but_for_its_share() -> None:
    found = need(overlapped=True, beside=0.4)
    assert found.needed == pytest.approx(10e9 / (0.4 + 0.2))
    assert found.enough == (found.reached >= found.needed)
    assert found.shown == pytest.approx(0.1)
    assert found.enough
    assert not found.hidden
    assert need(overlapped=True, beside=0.5).hidden
    assert not need(overlapped=True, beside=0.29).enough


def test_nothing_needs_nothing() -> None:
    assert bandwidth_needed(0, 1, 0.05) == 0
    assert need(carried=0, seconds=0).reached == 0


# -- against the article ----------------------------------------------------------------------------------------------


def test_the_articles_largest_cluster_through_the_whole_command() -> None:
    # Article 3 of tests/core/paper, set S3: 377 GB/s of tensor and 115 Gbit/s of data parallelism (6 FLOPs a parameter). Here
    # FLOPs are counted, which are 1 + s/6h + V/12lh times as many, and the last stage has a head besides its layers.
    model = gpt_model(96, 12288, 96, 51200)
    layout = Layout(tp=8, pp=8, dp=18, micro_batch=1, global_batch=1152, seq_len=2048)
    how = msgspec.structs.replace(training("megatron", "fp16-mixed-20"), kernels=PAPER)
    a100 = gpu("a100-sxm4-80gb")
    asked = NetworkCase.of(
        model, layout, how, cluster(a100, layout.gpus), efficiencies(a100.id), share=0.05, achieved=150e12
    )
    found = asked.answer()
    flops = step_flops(model, layout, PAPER, view_of(layout, how)).hardware
    assert found.compute.total == pytest.approx(flops / (1152 * 150e12))
    counted = 1 + 2048 / (6 * 12288) + 51200 / (12 * 96 * 12288)
    by_axis = {each.axis: each for each in found.needs if each.what in ("activations", "gradients")}
    assert by_axis["tp"].needed / 1e9 * counted == pytest.approx(377, rel=0.03)
    assert by_axis["dp"].needed * 8 / 1e9 * counted == pytest.approx(115, rel=0.05)
    assert [by_axis[axis].link for axis in ("tp", "pp", "dp")] == ["inner", "outer", "outer"]


# -- compute and time -------------------------------------------------------------------------------------------------


def test_it_says_what_estimate_says() -> None:
    asked = setup(tp=4, dp=4, pp=2, global_batch=32)
    found = asked.answer()
    whole = estimate(asked.model, asked.layout, asked.training, cluster=cluster(H100, 32))
    assert whole.time is not None
    assert found.step == whole.time.step
    assert found.traffic == whole.network
    compute = [whole.time.parts[lane] for lane in ("forward", "backward", "recompute", "loss")]
    assert found.compute.total == pytest.approx(sum(compute))
    micro = found.compute.forward + found.compute.backward
    assert 8 * micro == pytest.approx(found.compute.total)
    assert found.compute.forward == pytest.approx((compute[0] + compute[3] / 3) / 8)
    assert {each.allowed for each in found.needs} == {0.05 * found.compute.total}
    assert 0 < found.compute.attention < found.compute.total
    assert found.efficiency == pytest.approx(found.compute.total / (found.compute.total + found.exposed))


def test_attention_runs_again_where_layers_do() -> None:
    none, full = (
        setup(dp=8, recompute=RecomputePolicy(mode=mode)).answer().compute.attention for mode in ("none", "full")
    )
    # A forward more, beside a forward and a backward of more than twice its work (and slower at it).
    assert 1.1 * none < full < 1.34 * none


PIPELINES: list[dict[str, Any]] = [
    {"pp": 4},
    {"pp": 8, "tp": 2, "sequence_parallel": True},
    {"pp": 4, "vpp": 2, "schedule": "interleaved"},
    {"pp": 4, "schedule": "zb-v"},
    {"pp": 4, "schedule": "dualpipe"},
]


@pytest.mark.parametrize("layout", PIPELINES)
def test_a_pipeline_is_shown_where_it_sends_most(layout: dict[str, Any]) -> None:
    # What goes over a hop forward comes back over it backward: both are sent, each by one of its two stages.
    asked = setup(dp=2, global_batch=32, **layout)
    memory = MemoryModel(asked.model, asked.layout, asked.training, view_of(asked.layout, asked.training))
    by_stage = [
        sum(row.sent for row in stage_traffic(memory, asked.fabric, stage)
            if row.axis == "pp" and row.kind is Carries.ACTIVATIONS)
        for stage in stages(asked.model, asked.layout)
    ]  # fmt: skip
    nbytes = 2 * 4096 * asked.model.hidden_size / (asked.layout.tp if asked.layout.sequence_parallel else 1)
    chunks = asked.layout.vpp if asked.layout.schedule == "interleaved" else 2 if asked.layout.schedule == "zb-v" else 1
    # Round and round, the last stage sends to the first one; at the turn of a V nothing is sent.
    hops = chunks * (asked.layout.pp - 1) + (chunks - 1 if asked.layout.schedule == "interleaved" else 0)
    assert sum(by_stage) == 2 * hops * nbytes * asked.layout.num_microbatches
    found = asked.answer()
    (need,) = (each for each in found.needs if (each.axis, each.what) == ("pp", Purpose.ACTIVATIONS))
    rows = [row for row in found.traffic if row.axis == "pp" and row.kind is Carries.ACTIVATIONS]
    assert sum(row.sent for row in rows) == max(by_stage) == by_stage[need.stage]
    assert {row.stage for row in rows} == {need.stage}
    if layout == {"pp": 4}:
        assert need.carried == 2 * nbytes * 16 == 2 * by_stage[0] == 2 * by_stage[3]
        assert (need.stage, found.stage) == (1, 3), "inner stages send both ways, the one with the head is the slowest"


@pytest.mark.parametrize("layout", [*PIPELINES, {"tp": 4, "dp": 4}, {"pp": 4, "dp": 4, "zero": 1}])
def test_what_sticks_out_is_what_the_step_waits_for(layout: dict[str, Any]) -> None:
    # Whichever stages the rows are of.
    asked = setup("llama-3.2-1b", **{"dp": 2, "global_batch": 32, **layout})
    found = asked.answer()
    time = estimate(asked.model, asked.layout, asked.training, cluster=cluster(H100, asked.layout.gpus)).time
    assert time is not None
    for lane in {row.lane for row in found.traffic}:
        shown = sum(row.exposed_seconds for row in found.traffic if row.lane == lane)
        assert shown == pytest.approx(time.parts[lane])


def test_every_byte_of_the_table_is_in_a_need() -> None:
    for asked in (
        setup(tp=4, dp=4, pp=2),
        setup("mixtral-8x7b", dp=16, ep=8),
        setup("gpt2", pp=2, dp=8, zero=2, seq_len=1024),
    ):
        found = asked.answer()
        assert sum(each.seconds for each in found.needs) == pytest.approx(sum(row.seconds for row in found.traffic))
        outer = sum(row.calls_per_step * row.adapter for row in found.traffic if row.link == "outer")
        inner = sum(row.sent for row in found.traffic if row.link == "inner")
        assert sum(each.carried for each in found.needs) == pytest.approx(outer + inner)


def test_what_runs_beside_what() -> None:
    by_name = {
        (each.axis, each.what): each
        for each in setup(tp=4, cp=2, dp=4, pp=2, global_batch=32, sequence_parallel=True, zero=1,
                          overlap={"dp": True, "tp": False, "cp": True, "pp": True}).answer().needs
    }  # fmt: skip
    compute = setup(tp=4, cp=2, dp=4, pp=2, global_batch=32, sequence_parallel=True, zero=1).answer().compute
    assert {name: each.overlapped for name, each in by_name.items()} == {
        ("tp", "activations"): False, ("tp", "shared weights"): False, ("cp", "keys and values"): True,
        ("pp", "activations"): True, ("dp", "gradients"): True, ("dp", "updated weights"): True,
    }  # fmt: skip
    # Gradients once a step hide under the last backward, new weights under the next forward, a ring under attention.
    assert by_name["dp", "gradients"].beside == pytest.approx(compute.backward)
    assert by_name["dp", "updated weights"].beside == pytest.approx(compute.forward)
    assert by_name["cp", "keys and values"].beside == pytest.approx(compute.attention / 2)
    assert by_name["pp", "activations"].beside == pytest.approx(compute.total)
    # Reduced with each of 8 micro-batches, under each backward.
    (each_time,) = (
        each for each in setup(dp=4, zero=2, global_batch=32, overlap={"dp": True}).answer().needs
        if each.what == "gradients"
    )  # fmt: skip
    whole = setup(dp=4, zero=2, global_batch=32).answer().compute
    assert each_time.beside == pytest.approx(8 * whole.backward)


def test_the_rate_a_user_gives() -> None:
    slow, fast = (setup(dp=16, achieved=rate).answer() for rate in (200e12, 400e12))
    assert slow.compute.total == pytest.approx(2 * fast.compute.total)
    assert slow.step > fast.step
    for name, found in (("slow", slow), ("fast", fast)):
        assert found.step >= found.compute.total, name


def test_a_share_is_a_share() -> None:
    with pytest.raises(ConfigError, match="share: must be between 0 and 1"):
        setup(dp=8, share=5.0)
    with pytest.raises(ConfigError, match="oversubscription: must be at least 1"):
        setup(dp=16, oversubscription=0.5)


# -- other clusters ---------------------------------------------------------------------------------------------------


def test_what_if() -> None:
    asked = setup(tp=4, dp=16, global_batch=64)
    found = asked.answer()
    other = {change.name: change.result for change in what_if(asked, found)}
    assert set(other) == {
        "node link x 2", "node link x 0.5", "network x 2", "network x 0.5", "racks of 64", "oversubscription 2",
        "oversubscription 4",
    }  # fmt: skip
    for link in ("node link", "network"):
        assert other[f"{link} x 2"].step < found.step < other[f"{link} x 0.5"].step
    assert found.step < other["oversubscription 2"].step < other["oversubscription 4"].step
    # Everybody sends at half the speed, which is what an oversubscription of 2 comes to.
    assert other["oversubscription 2"].step == pytest.approx(other["network x 0.5"].step)
    assert {row.link for row in other["racks of 64"].traffic} == {"inner"}
    assert other["racks of 64"].step < found.step


def test_links_nobody_uses_are_not_varied() -> None:
    asked = setup(dp=8)
    assert {change.name for change in what_if(asked, asked.answer())} == {"node link x 2", "node link x 0.5"}


def test_replicas_take_time() -> None:
    # Weights are gathered in the node; only the sums over replicas leave it, and wait for the network.
    asked = setup(framework="torchtitan", dp=64, zero=3, replicas=8, overlap={"prefetch": False})
    slow = msgspec.structs.replace(asked.fabric, outer_bandwidth=asked.fabric.outer_bandwidth / 2)
    usual, slowed = asked.answer(), msgspec.structs.replace(asked, fabric=slow).answer()
    sums = [sum(row.seconds for row in each.traffic if row.link == "outer") for each in (usual, slowed)]
    assert sums[1] > sums[0] > 0
    # A layer is not as large as the rest of the weights, and a message of half the size takes a little more than half the time.
    assert slowed.exposed - usual.exposed == pytest.approx(sums[1] - sums[0], rel=5e-3)


@pytest.mark.parametrize("gpus", [424, 1040, 1680, 1696, 2048])
def test_tensor_parallel_groups_stay_in_a_rack(gpus: int) -> None:
    # 1,696 GPUs are 32 x 53, but no rack is given 53 of 72 GPUs where 8 work together on every layer.
    asked = setup(tp=8, dp=gpus // 8, global_batch=gpus // 8, sequence_parallel=True)
    found = asked.answer()
    (racks,) = (change for change in what_if(asked, found) if change.name.startswith("racks"))
    assert racks.fabric.domain % 8 == 0
    assert {row.link for row in racks.result.traffic if row.axis == "tp"} == {"inner"}
    # More GPUs on the fast link can not make it slower.
    assert racks.result.step <= found.step


def test_groups_larger_than_a_node_are_said_to_leave_it() -> None:
    asked = setup(tp=16, dp=16, sequence_parallel=True)
    wide = msgspec.structs.replace(asked, fabric=msgspec.structs.replace(asked.fabric, domain=64))
    assert "nodes of 8, tp over 2" in {change.name for change in what_if(wide, wide.answer())}


def test_racks_are_filled_alike() -> None:
    assert [evenly(gpus, 72) for gpus in (8, 72, 144, 128, 256, 2048, 100, 73)] == [8, 72, 72, 64, 64, 64, 50, 72]


def test_rails_keep_oversubscription_away() -> None:
    plain, crowded, railed = (
        setup(dp=8, tp=8, **how).answer().step
        for how in ({}, {"oversubscription": 4.0}, {"oversubscription": 4.0, "rails": True})
    )
    assert crowded > plain == railed
    assert isinstance(setup(dp=8, tp=8, rails=True).fabric, Fabric)


# -- the inverse ------------------------------------------------------------------------------------------------------


def test_tp_that_cannot_be() -> None:
    assert largest_tp(setup(dp=1)) is None
    assert largest_tp(setup("mixtral-8x7b", dp=8, ep=8, share=0.9)) == 8, (
        "with sequence parallelism, which experts need"
    )


def allowed(asked: NetworkCase, axis: str) -> bool:
    return all(each.enough for each in asked.answer().needs if each.axis == axis)


@pytest.mark.parametrize("overlapped", [False, True])
def test_the_smallest_batch_is_the_smallest(overlapped: bool) -> None:
    asked = setup(dp=8, tp=8, overlap={"dp": overlapped}, share=0.05)
    batch = smallest_batch(asked)
    assert batch is not None
    batches = batch.global_batch // 8
    assert batches > 1

    def at(count: int) -> NetworkCase:
        return msgspec.structs.replace(asked, layout=msgspec.structs.replace(asked.layout, global_batch=8 * count))

    assert allowed(at(batches), "dp")
    assert not allowed(at(batches - 1), "dp")


def test_interleaved_batches_come_in_whole_rounds() -> None:
    asked = setup(dp=8, tp=2, pp=4, vpp=2, schedule="interleaved", global_batch=32, overlap={"dp": False})
    batch = smallest_batch(asked)
    assert batch is not None
    assert batch.global_batch % 32 == 0


def test_two_directions_take_two_batches_at_a_time() -> None:
    asked = setup(dp=8, pp=4, schedule="dualpipe", global_batch=64, overlap={"dp": False})
    batch = smallest_batch(asked)
    assert batch is not None
    assert batch.global_batch % 16 == 0
    assert batch.global_batch >= 8 * 2 * 4


def test_fully_sharded_ranks_need_larger_micro_batches() -> None:
    asked = setup(framework="torchtitan", dp=64, zero=3, seq_len=1024)
    batch = smallest_batch(asked)
    assert batch is not None
    assert batch.micro_batch > 1
    half = msgspec.structs.replace(
        asked.layout, micro_batch=batch.micro_batch // 2, global_batch=batch.global_batch // 2
    )
    assert not allowed(msgspec.structs.replace(asked, layout=half), "dp")


def test_no_batch_is_large_enough_for_a_slow_network() -> None:
    asked = setup(dp=16, overlap={"dp": False})
    slow = msgspec.structs.replace(asked.fabric, outer_bandwidth=1e6)
    assert smallest_batch(msgspec.structs.replace(asked, fabric=slow), most=64) is None


def test_the_largest_tp_is_the_largest() -> None:
    asked = setup("llama-3.1-70b", tp=8, dp=4, global_batch=64, share=0.25)
    best = largest_tp(asked)
    assert best in (2, 4, 8, 16)

    def at(tp: int) -> NetworkCase:
        return msgspec.structs.replace(asked, layout=msgspec.structs.replace(asked.layout, tp=tp, dp=32 // tp))

    assert allowed(at(best), "tp")
    assert not any(allowed(at(tp), "tp") for tp in (2, 4, 8, 16, 32) if tp > best)
    # The network between nodes carries less than NVLink.
    slow = msgspec.structs.replace(asked, fabric=msgspec.structs.replace(asked.fabric, inner_bandwidth=1e9))
    assert largest_tp(slow) == 1
