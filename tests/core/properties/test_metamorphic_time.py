"""What must be true of the time of any run, whatever its model, framework and parallelism: no reference is needed for it."""

from __future__ import annotations

import math
import random
import shlex
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings

from command_line import document
from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.estimate.result import Time
from loadgauge.core.resolve.resolve import resolve_job
from strategies import runs

few = settings(
    max_examples=30, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
ROUNDING = 1 + 1e-12
"""What the order of a sum may change."""


def time_of(job: Job) -> Time:
    """The time of a run that is known to have one."""
    time = resolve_job(job).estimate().time
    assert time is not None
    return time


def changed(job: Job, **fields: Any) -> Time:
    """The time with other flags; drops the case where those cannot be."""
    try:
        return time_of(msgspec.structs.replace(job, **fields))
    except Error:
        assume(False)
        raise AssertionError from None


def numbers(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a JSON document, with its place."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, f"{where}.{name}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from numbers(inner, f"{where}[{place}]")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield where, value


@few
@given(runs())
def test_the_time_holds_together(job: Job) -> None:
    result = resolve_job(job).estimate()
    time = result.time
    assert time is not None
    assert sum(time.parts.values()) == pytest.approx(time.step, rel=1e-12)
    assert time.low <= time.step <= time.high
    assert 0 < time.mfu <= time.hfu * ROUNDING
    assert time.hfu <= 1
    assert job.pp != 1 or time.parts["bubble"] <= 1e-9 * time.step, "one stage waits for nobody"
    for row in result.network:
        # What a lane shows is the sum of its rows; each row shows no less than nothing.
        assert row.exposed_seconds >= 0
    for lane in {row.lane for row in result.network}:
        shown = sum(row.exposed_seconds for row in result.network if row.lane == lane)
        assert shown == pytest.approx(time.parts[lane], rel=1e-9, abs=1e-15)
    for where, number in numbers(result.to_dict()):
        assert math.isfinite(number), where
        assert number >= 0, where


@few
@given(runs())
def test_a_run_twice_as_long_takes_twice_the_days_and_the_money(job: Job) -> None:
    short, long = (
        resolve_job(msgspec.structs.replace(job, tokens=tokens, price=2.5, days=30)) for tokens in ("300B", "600B")
    )
    found = short.estimate()
    once, twice = short.budget(found), long.budget(found)
    assert once is not None
    assert twice is not None
    assert twice.days == pytest.approx(2 * once.days)
    assert twice.gpu_hours == pytest.approx(2 * once.gpu_hours)
    assert once.cost is not None
    assert twice.cost == pytest.approx(2 * once.cost)


@few
@given(runs())
def test_a_faster_network_makes_no_step_slower(job: Job) -> None:
    slow, fast = (changed(job, nic_bandwidth=speed) for speed in ("25GB/s", "100GB/s"))
    assert fast.step <= slow.step * ROUNDING
    slow, fast = (changed(job, link_bandwidth=speed) for speed in ("300GB/s", "900GB/s"))
    assert fast.step <= slow.step * ROUNDING


@settings(few, max_examples=15)
@given(runs())
def test_overlap_makes_no_step_slower(job: Job) -> None:
    # One switch at a time, as each is to pay for itself.
    none = changed(job, overlap="none")
    for switch in (*Overlap.__struct_fields__, "all"):
        assert changed(job, overlap=switch).step <= none.step * ROUNDING, switch


@few
@given(runs())
def test_recomputing_makes_no_step_faster(job: Job) -> None:
    kept = changed(job, recompute="none")
    for policy in ("selective", "full", "full:every=2"):
        again = changed(job, recompute=policy)
        assert kept.step <= again.step * ROUNDING, policy
        assert kept.hfu * kept.step <= again.hfu * again.step * ROUNDING, policy
        # Adapters under recomputation make the first layer's input gradient, which they leave out otherwise.
        more = 1 + 1 / resolve_job(job).model.num_hidden_layers if job.adapts else 1
        assert kept.model_flops <= again.model_flops <= kept.model_flops * more, policy


@few
@given(runs())
def test_twice_the_batch_makes_no_step_shorter(job: Job) -> None:
    assert job.global_batch is not None
    assert job.micro_batch is not None
    once = time_of(job)
    more = changed(job, global_batch=2 * job.global_batch)
    assert once.step <= more.step * ROUNDING
    assert more.tokens == 2 * once.tokens
    if job.zero != 3 and job.offload != "all":
        # Else a step may consist of fetching weights, and more compute beside it may fill the bubble of a split backward.
        larger = changed(job, global_batch=2 * job.global_batch, micro_batch=2 * job.micro_batch)
        assert once.step <= larger.step * ROUNDING


@few
@given(runs())
def test_more_gpus_with_the_same_work_each_make_no_step_faster(job: Job) -> None:
    # Without ZeRO, which would leave each rank less to update, and without a switch that sums (NVLS), which from 5 ranks on
    # is faster than fewer ranks without it. Megatron's buckets grow from 40 ranks on, see below.
    assert job.gpus is not None
    assert job.global_batch is not None
    # What hides is said: from 64 GPUs on more of it is assumed to, see `resolve/large_runs.py`.
    plain = msgspec.structs.replace(
        job, zero=0, replicas=1, gpus_per_node=min(4, job.gpus_per_node or 4), overlap=job.overlap or "none,cp,pp"
    )
    few_gpus = changed(plain)
    more = changed(plain, gpus=2 * job.gpus, global_batch=2 * job.global_batch)
    assert few_gpus.step <= more.step * ROUNDING
    assert few_gpus.parts["optimizer"] == more.parts["optimizer"] or job.offload != "none"


def test_only_larger_buckets_make_a_step_with_more_gpus_faster() -> None:
    # Megatron-LM's buckets have 40 million elements or a million for each rank: from 64 ranks to 128 there are half as
    # many, each of which waits for the latency of its all-reduce.
    def run(dp: int, framework: str) -> Time:
        given = Job(
            model="ernie-4.5-300b-a47b", framework=framework, gpu="h100-sxm5-80gb", gpus=24 * dp, tp=8, pp=3, etp=1, zero=0,
            micro_batch=1, global_batch=3 * dp, seq_len=4096, sequence_parallel=True, overlap="none",
        )  # fmt: skip
        return time_of(given)

    few_ranks, many = run(64, "megatron"), run(128, "megatron")
    assert many.step < few_ranks.step
    assert {lane for lane, seconds in many.parts.items() if seconds < few_ranks.parts[lane] / ROUNDING} == {"dp"}
    assert run(20, "megatron").step < run(40, "megatron").step
    assert run(64, "huggingface").step < run(128, "huggingface").step


@settings(few, max_examples=15)
@given(runs())
def test_the_order_of_flags_changes_nothing(job: Job) -> None:
    words = shlex.split(job.flags())
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    flags = [words[begin:end] for begin, end in zip(starts, [*starts[1:], len(words)], strict=True)]
    random.Random(str(flags)).shuffle(flags)
    shuffled = [word for flag in flags for word in flag]
    usual = document(f"estimate {job.model} {job.flags()}")
    assert document(f"estimate {shlex.join(shuffled)} {job.model}") == usual


def test_what_goes_over_several_groups_hides_under_one_backward() -> None:
    """Shares within a group and sums over its copies: together they cannot hide under more compute than there is."""
    job = Job(
        model="llama-3.1-8b", gpu="a100-pcie-40gb", gpus=4, zero=2, replicas=2, micro_batch=1, global_batch=8, seq_len=256,
        framework="torchtitan", recompute="none", gpus_per_node=4, link_bandwidth="300GB/s",
    )  # fmt: skip
    result = resolve_job(job).estimate()
    assert result.time is not None
    rows = [row for row in result.network if row.lane == "dp"]
    assert {row.ranks for row in rows} == {2}
    assert len(rows) == 3
    hidden = sum(row.seconds for row in rows) - result.time.parts["dp"]
    assert 0 < hidden <= result.time.parts["forward"] + result.time.parts["backward"]
