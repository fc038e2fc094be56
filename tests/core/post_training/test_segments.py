"""Segments that are not full, beside the trace's allocator, which serves one request after another as PyTorch's does."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from loadgauge.core.base.units import MIB
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.phases import Phase
from loadgauge.core.post_training.memory import memory
from loadgauge.core.post_training.segments import ends_of, segments, tensors, unshared
from loadgauge.core.resolve.posttrain import resolve_posttrain
from loadgauge.pytorch.record.caching_allocator import Allocator

ADAPTERS = {
    "lora_rank": 64,
    "lora_targets": "all",
    "lora_dtype": "float32",
    "precision": "bf16-pure",
    "recompute": "full",
}


def trained(name: str, **more: object):  # type: ignore[no-untyped-def]
    job = Job(name, task="grpo", prompts=1, samples=4, prompt_len=128, answers="384", gpu="a100-sxm4-40gb",
              rollout="vllm:utilization=0.3,sleep=1", rollout_offload="all", **(ADAPTERS | more))  # type: ignore[arg-type]  # fmt: skip
    return resolve_posttrain(job)


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "smollm2-1.7b"])
def test_ends_of_segments_are_those_of_the_allocator(name: str) -> None:
    rank = trained(name)[1].estimate().workings.worst.rank
    sizes = [nbytes for nbytes, count, trains in tensors(rank, 2.0) if not trains for _ in range(count)]
    random.Random(0).shuffle(sizes)
    allocator = Allocator()
    for number, size in enumerate(sizes):
        allocator.allocate(number, int(size))
    assert segments(rank, 2.0).ends == pytest.approx(allocator.result().reserved - sum(sizes), rel=0.1)


def test_ends_of_a_few_tensors() -> None:
    """Two of 9 MiB leave 2 of 20, which one of 2 fills; 11 MiB have a segment of 12."""
    assert ends_of({9 * MIB: 2}) == 2 * MIB
    assert ends_of({9 * MIB: 2, 2 * MIB: 1}) == 0
    assert ends_of({11 * MIB: 3, MIB // 2: 99}) == 3 * MIB


def test_both_kinds_of_segments_at_their_peaks() -> None:
    """Activations are gone when the optimizer steps: with all of the adapters small, what the step adds comes on top."""
    run, setup = trained("qwen2.5-0.5b", lora_rank=16, micro_batch=4, optimizer="adamw-foreach")
    moments = setup.estimate().memory.moments
    step = next(one for one in moments if one.phase.value == "step").parts
    grown = float(step["gradients"] + step["transient"])
    whole = unshared(moments, 1.0, 0.0, 0.0)
    peak = max(float(one.total) for one in moments)
    rest = max(
        float(one.total - one.parts["gradients"] - one.parts["optimizer"])
        for one in moments
        if one.phase.value != "step"
    )
    assert whole == pytest.approx(rest + grown + float(step["optimizer"]) - peak, rel=1e-6)
    assert unshared(moments, 0.0, 0.0, 0.0) == 0
    assert unshared(moments, 0.0, peak + 3e8, 0.0) == pytest.approx(3e8)
    found = memory(run)
    update = next(one for one in found.phases if one.name == "update")
    idle = next(one.nbytes for one in update.residents if one.part == "idle segments")
    assert update.device.value == pytest.approx(update.total, rel=1e-9)
    assert 0 < idle <= grown
    assert update.low < update.total - idle


def test_none_where_weights_are_shared_out_or_trained_whole() -> None:
    for more in ({"gpus": 4, "zero": 3}, {"lora_rank": None, "lora_targets": None, "lora_dtype": None}):
        run, _ = trained("qwen2.5-0.5b", **more)
        assert not any("segments" in one.part for phase in memory(run).phases for one in phase.residents)


def test_small_segments_of_states_are_there_before_the_update() -> None:
    """The passes before it had their peak in large segments beside the small ones of the states, which are there already."""
    parts = {"gradients": 0.0, "optimizer": 100.0, "transient": 0.0}
    moment = SimpleNamespace(parts=parts, total=1000.0, phase=Phase.FORWARD)
    found = unshared([moment], small=0.5, forwards=2000.0, beside=0.0)  # type: ignore[list-item]
    assert found == pytest.approx((2000 - 50) + 50 - 1000)
