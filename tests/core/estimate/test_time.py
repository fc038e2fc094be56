"""The time of a step: lanes that add up, and what must be true of any of them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from command_line import document, typed
from loadgauge import Layout, cluster, estimate, gpu, model, training
from loadgauge.core.base.errors import ConfigError, NotStated
from loadgauge.core.definitions.hardware.calibration import efficiencies
from loadgauge.core.definitions.layout.layout import RecomputePolicy
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.definitions.training.software import factor
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.time.collectives import Group, seconds
from loadgauge.core.estimate.time.traffic import Carries

H100 = "h100-sxm5-80gb"
LLAMA = "llama-3.1-8b"


def timed(
    name: str = LLAMA,
    framework: str = "megatron",
    overlap: Overlap | None = None,
    nodes_of: int | None = None,
    latency: float | None = None,
    **given: Any,
) -> Estimate:
    layout = Layout(**{"seq_len": 4096, **given})
    kind = training(framework)
    if overlap is not None:
        kind = msgspec.structs.replace(kind, overlap=overlap)
    machines = cluster(gpu(H100), layout.gpus, nodes_of)
    if latency is not None:
        links = tuple(msgspec.structs.replace(link, latency=latency) for link in machines.links)
        machines = msgspec.structs.replace(machines, links=links)
    return estimate(model(name), layout, kind, cluster=machines, efficiencies=efficiencies(""))


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"dp": 8, "zero": 3, "global_batch": 16},
    {"dp": 8, "zero": 1, "global_batch": 64, "micro_batch": 2},
    {"tp": 8, "sequence_parallel": True, "dp": 4, "zero": 1, "global_batch": 32},
    {"tp": 4, "pp": 4, "sequence_parallel": True, "global_batch": 16},
    {"tp": 2, "pp": 4, "vpp": 2, "schedule": "interleaved", "global_batch": 16},
    {"cp": 4, "tp": 2, "sequence_parallel": True, "global_batch": 4, "seq_len": 32768},
    {"pp": 8, "global_batch": 32, "schedule": "gpipe", "recompute": RecomputePolicy(mode="full")},
]


def test_each_bucket_of_the_two_directions_of_dualpipe_has_its_latency():
    # Two stages with the same layers add up their gradients, bucket by bucket, whatever the data-parallel ranks.
    given: dict[str, Any] = {"pp": 2, "schedule": "dualpipe", "global_batch": 8}
    short, long = (timed(latency=latency, overlap=Overlap.parse("none"), **given) for latency in (1e-6, 1e-3))
    assert short.time is not None
    assert long.time is not None
    (row,) = (row for row in long.network if row.kind is Carries.GRADIENTS)
    buckets = math.ceil(row.payload / (40e6 * 4))
    assert buckets > 10
    each = [seconds("all_reduce", 0, Group("dp", 2, 1), found.workings.step.fabric) for found in (short, long)]
    assert each[1] == pytest.approx(1000 * each[0])
    assert long.time.parts["dp"] - short.time.parts["dp"] == pytest.approx(buckets * (each[1] - each[0]))


@pytest.mark.parametrize("given", LAYOUTS)
def test_lanes_add_up_to_the_step(given: dict[str, Any]):
    time = timed(**given).time
    assert time is not None
    assert sum(time.parts.values()) == pytest.approx(time.step, rel=1e-12)
    assert min(time.parts.values()) >= -1e-12
    assert time.low < time.step < time.high
    assert time.tokens == given.get("global_batch", 1) * given.get("seq_len", 4096)
    assert 0 < time.mfu <= time.hfu < 1


@pytest.mark.parametrize("given", LAYOUTS)
def test_less_overlap_is_never_faster(given: dict[str, Any]):
    everything = Overlap(tp=True, dp=True, prefetch=True, cp=True, ep=True, pp=True)
    nothing = Overlap(tp=False, dp=False, prefetch=False, cp=False, ep=False, pp=False)
    fast, slow = timed(overlap=everything, **given).time, timed(overlap=nothing, **given).time
    assert fast is not None
    assert slow is not None
    assert fast.step <= slow.step * (1 + 1e-12)


def test_one_gpu_sends_nothing():
    time = timed().time
    assert time is not None
    assert all(time.parts[lane] == 0 for lane in ("tp", "cp", "ep", "pp", "zero", "bubble", "dp"))


def test_recomputing_all_adds_one_forward():
    none, full = timed().time, timed(recompute=RecomputePolicy(mode="full")).time
    assert none is not None
    assert full is not None
    assert full.parts["recompute"] == pytest.approx(none.parts["forward"])
    assert full.parts["backward"] == none.parts["backward"]


def test_the_bubble_is_narayanans():
    """(p - 1) micro-batches of a stage where all stages are alike: here the head is one stage's own."""
    even = timed("gpt2-xl", pp=4, global_batch=32, seq_len=1024).time
    assert even is not None
    stage = (even.parts["forward"] + even.parts["backward"]) / 32
    assert 0.7 * 3 * stage < even.parts["bubble"] < 3 * (stage + even.parts["loss"] / 32)


def test_tensor_parallel_traffic_crosses_the_slower_link_on_small_nodes():
    whole, split = (timed(tp=8, sequence_parallel=True, nodes_of=n).time for n in (8, 4))
    assert whole is not None
    assert split is not None
    assert split.parts["tp"] > 1.5 * whole.parts["tp"]


def test_communication_at_the_links_own_rate():
    """Unoverlapped gradients: 2 (n-1)/n of 4 bytes a parameter over the link, and nothing else."""
    found = timed(dp=8, global_batch=8, overlap=Overlap(dp=False), latency=0.0)
    assert found.time is not None
    carried = 2 * 7 / 8 * 4 * found.params / (450e9 * efficiencies("").inner_link)
    assert found.time.parts["dp"] == pytest.approx(carried, rel=0.01)


def test_a_measured_run_rescales():
    line = f"estimate {LLAMA} --gpu {H100} --gpus 8 --zero 3"
    plain = document(line)["time"]
    scaled = document(f"{line} --measured step={plain['step'] * 1.25!r}s")["time"]
    assert scaled["step"] == pytest.approx(plain["step"] * 1.25)
    assert scaled["scale"] == pytest.approx(1.25)
    shares = [(time["high"] - time["low"]) / time["step"] for time in (scaled, plain)]
    assert shares[0] < shares[1]
    assert sum(scaled["parts"].values()) == pytest.approx(scaled["step"])
    other = document(f"{line} --seq-len 8192 --measured step={plain['step'] * 1.25!r}s,seq_len=4096")["time"]
    there = document(f"{line} --seq-len 8192")["time"]
    assert other["step"] == pytest.approx(there["step"] * 1.25)
    by_mfu = document(f"{line} --measured mfu={plain['mfu'] / 2!r}")["time"]
    assert by_mfu["step"] == pytest.approx(2 * plain["step"])


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--measured step=12", "step"),
        ("--measured speed=12s", "step"),
        ("--measured step=12s,colour=3", "colour"),
        ("--measured step=12s,tp=3", "GPUs"),
        ("--measured mfu=-1", "mfu"),
        ("--days 2", "tokens"),
        ("--tokens many", "count"),
        ("--tokens 1T --checkpoint-seconds 3", "mtbf"),
        ("--nic-bandwidth fast", "unit"),
        ("--nic-bandwidth 5GiB", "bandwidth"),
        ("--overlap dp,zp", "zp"),
        ("--gpus-per-node 3", "nodes"),
        ("--cp-comm ring", "cp"),
    ],
)
def test_what_is_wrong_is_one_line(flags: str, word: str):
    found = typed(f"estimate {LLAMA} --gpu {H100} --gpus 8 --zero 3 {flags}")
    assert found.code == 2
    assert word in found.err
    assert found.err.count("\n") == 1


def test_flags_of_a_cluster_need_a_gpu():
    for flags in ("--tokens 1T", "--nic-bandwidth 50GB/s", "--measured step=1s", "--overlap none"):
        found = typed(f"estimate {LLAMA} {flags}")
        assert found.code == 2
        assert "--gpu" in found.err


def test_an_unstated_network_is_the_usual_one_and_said_and_can_be_given():
    line = "estimate llama-3.1-70b --gpu h800-sxm5-80gb --gpus 16 --zero 3 --global-batch 16"
    found = document(line)
    assert "400Gbit/s" in found["assumed"]["--nic-bandwidth"]
    assert document(f"{line} --nic-bandwidth 400Gbit/s")["time"]["step"] == found["time"]["step"]
    assert document(f"{line} --nic-bandwidth 100Gbit/s")["time"]["step"] > found["time"]["step"]
    with pytest.raises(NotStated, match="nic"):
        cluster(gpu("h800-sxm5-80gb"), 16)


def test_the_report_says_the_time_and_the_money():
    found = typed(f"estimate {LLAMA} --gpu {H100} --gpus 8 --zero 3 --tokens 1T --price 2 --days 30 --mtbf-hours 20000")
    time = document(f"estimate {LLAMA} --gpu {H100} --gpus 8 --zero 3 --tokens 1T --price 2")["time"]
    text = " ".join(found.out.split())
    assert "A step takes" in text
    assert f"MFU {time['mfu']:.1%}" in text
    assert "Where the time of a step goes" in text
    assert "GPU-hours" in text
    assert time["cost"] == pytest.approx(2 * time["gpu_hours"])
    assert time["days"] == pytest.approx(1e12 / time["tokens_per_step"] * time["step"] / 86400)
    assert time["model_tflops_per_gpu"] == pytest.approx(time["mfu"] * 989)


def test_the_layout_and_the_cluster_agree():
    with pytest.raises(ConfigError, match="8 GPUs and the cluster has 16"):
        estimate(model(LLAMA), Layout(dp=8, global_batch=8, seq_len=128), cluster=cluster(gpu(H100), 16))


def test_gradients_of_micro_batches_are_added_up() -> None:
    """Each micro-batch after the first reads its gradients and those before, and writes their sum; Megatron's products do it."""
    rate = efficiencies(H100).memory["elementwise"].forward * gpu(H100).memory_bandwidth
    for framework, moved in (("huggingface", 3 * 4 * 8_030_261_248), ("megatron", 0)):
        first, four = (
            document(
                f"estimate {LLAMA} --gpu {H100} --framework {framework} --micro-batch 1 --global-batch {batch} --seq-len 512"
                f" --precision {'fp32' if framework == 'huggingface' else 'bf16'}"
            )["time"]["parts"]["optimizer"]
            for batch in (1, 4)
        )
        slower = factor(experts=False, low_precision=False, graphs=False).factor
        assert four - first == pytest.approx(3 * moved * slower / rate, rel=1e-3, abs=1e-9)
