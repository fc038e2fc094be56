"""Micro-batches of answers as a distribution: without padding they hold what their sequences hold, not the longest of all."""

from __future__ import annotations

import random
import statistics

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.post_training.memory import filled, memory
from loadgauge.core.post_training.step import step_time
from loadgauge.core.resolve.posttrain import resolve_posttrain


def job(**more: object) -> Job:
    given = {
        "answers": "uniform:1000",
        "micro_batch": 8,
        "global_batch": 64,
        "prompts": 16,
        "samples": 4,
        "prompt_len": 100,
    }
    return Job("qwen2.5-0.5b", task="grpo", gpu="h100-sxm5-80gb", recompute="full", loss="fused",
               rollout="vllm:utilization=0.5,sleep=1", **(given | more))  # type: ignore[arg-type]  # fmt: skip


def update(one: Job) -> float:
    return next(phase.total for phase in memory(resolve_posttrain(one)[0]).phases if phase.name == "update")


def test_the_fullest_of_many_micro_batches_is_that_of_a_simulation() -> None:
    """As many batches as the distribution has sequences for: 125 of 8, each sequence a prompt of 100 and 1 to 1000 tokens."""
    run, setup = resolve_posttrain(job(padding="free"))
    draw = random.Random(1)
    largest = [max(sum(draw.randint(101, 1100) for _ in range(8)) for _ in range(125)) for _ in range(200)]
    assert filled(run, run.trained, setup.layout).tokens == pytest.approx(statistics.median(largest), rel=0.01)


def test_a_trainer_of_transformers_pads_and_others_do_not() -> None:
    longest = update(job(answers="1000"))
    assert update(job()) == update(job(padding="dynamic")) == pytest.approx(longest, rel=1e-3)
    free = update(job(padding="free"))
    assert free < longest
    assert update(job(framework="megatron")) < update(job(framework="megatron", answers="1000"))
    assert update(job(framework="megatron", padding="max-length")) == pytest.approx(
        update(job(framework="megatron", answers="1000")), rel=1e-3
    )


def test_all_answers_as_long_fill_every_micro_batch() -> None:
    assert update(job(answers="1000", padding="free")) == update(job(answers="1000"))


def test_time_does_not_pad_either() -> None:
    padded, free = (step_time(resolve_posttrain(job(padding=how))[0], None) for how in ("dynamic", "free"))
    of = [next(one.seconds for one in found.phases if one.name == "update") for found in (padded, free)]
    assert of[1] < 0.8 * of[0]


def test_eager_attention_needs_padding() -> None:
    with pytest.raises(ConfigError, match="eager attention pads"):
        resolve_posttrain(job(padding="free", attention="eager"))
