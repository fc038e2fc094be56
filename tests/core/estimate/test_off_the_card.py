"""Activations in host memory by module, host memory of sharded checkpoints, and the moment of loading: sums by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.command_line import typed

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.states.host import activations
from loadgauge.core.resolve.resolve import resolve_job

MIB = 2**20
LAYERS = 32
WORKED = {"model": "llama-3.1-8b", "framework": "megatron", "gpu": "h100-sxm5-80gb", "seq_len": 4096, "micro_batch": 1}
"""Of a layer and 4,096 tokens in 16 bits: 32 MiB of hidden width, queries 32, keys and values 8 each, lse of 32 heads 0.5; gate, up
and their product 112 each."""


def run(**job: Any) -> Any:
    return resolve_job(Job(**{**WORKED, **job})).estimate()


def kept(result: Any) -> float:
    return next(iter(result.workings.memory.facts.values())).kept


@pytest.mark.parametrize(
    ("words", "off", "host"),
    [
        # The output of attention stays, as the projection keeps it; with both it leaves.
        ("core_attn", 32 + 8 + 8 + 0.5, 32 + 8 + 8 + 32 + 0.5),
        ("core_attn,attn_proj", 80.5, 80.5),
        ("attn_norm", 32 + 1 / 64, 32 + 1 / 64),
        ("mlp.down", 112, 112),
        ("moe_act", 0, 0),  # no experts here
    ],
)
def test_what_modules_keep_leaves_the_card(words: str, off: float, host: float) -> None:
    before, after = run(), run(activation_offload=words)
    assert kept(before) - kept(after) == pytest.approx(off * MIB, rel=1e-4)
    assert after.memory.host == pytest.approx(LAYERS * host * MIB, rel=1e-4)
    carried = after.memory.host / LAYERS / after.workings.training.host.link
    assert after.time.step >= before.time.step
    assert carried < 0.01 or after.time.step > before.time.step
    assert sum(after.memory.parts.values()) == pytest.approx(after.memory.total)


def test_modules_of_experts() -> None:
    job = {"model": "mixtral-8x7b", "seq_len": 4096}
    before, after = run(**job), run(**job, activation_offload="moe_act,expert_fc1")
    # Two experts a token: 2 x 4,096 tokens of width 4,096 that are dispatched, and gate and up of 14,336 each.
    off = 2 * 4096 * (4096 + 2 * 14336) * 2
    assert kept(before) - kept(after) == pytest.approx(off, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "job", "why"),
    [
        ("attn", {}, "no module or operation 'attn'"),
        ("checkpoints,core_attn", {}, "needs --recompute full"),
        ("all", {"gpus": 2, "pp": 2, "schedule": "zb-h1"}, "--schedule zb-h1"),
    ],
)
def test_what_cannot_leave_is_refused(words: str, job: dict[str, Any], why: str) -> None:
    with pytest.raises((ConfigError, NotModelled), match=why):
        run(activation_offload=words, **job)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_in_a_pipeline_every_micro_batch_in_flight_is_on_the_host(schedule: str) -> None:
    """The first stage of p holds p micro-batches in 1F1B; interleaved v chunks, (p - 1) (1 + v) / v and more (narayanan2021)."""
    job = {"gpus": 4, "pp": 4, "global_batch": 32, "recompute": "full", "activation_offload": "checkpoints", "zero": 0}
    more = {"schedule": schedule, **({"vpp": 2} if schedule == "interleaved" else {})}
    result = run(**job, **more)
    work = result.workings
    of_layer = 32 * MIB
    first = activations(work.memory, work.stages[0])
    in_flight = 4 if schedule == "1f1b" else (2 * 4 - 2 + 4 * 1 + 1) / 2
    assert first == pytest.approx(8 * of_layer * in_flight)
    assert activations(work.memory, work.stages[-1]) < first


def test_a_sharded_checkpoint_is_a_copy_of_each_ranks_shards() -> None:
    """Weights and two moments in float32, over 8 ranks, and all of it on a node (pytorch#118520's LLaMA 7B)."""
    given = resolve_job(Job("llama-7b", gpu="a100-sxm4-80gb", gpus=8, zero=3, save="sharded"))
    result = given.estimate()
    assert result.memory.saving == pytest.approx(12 * 6_738_415_616 / 8)
    assert given.on_host(result) == pytest.approx(12 * 6_738_415_616)
    assert result.memory.total == resolve_job(given.job.replace(save=None)).estimate().memory.total


def test_while_it_is_loaded_a_rank_has_its_shard_and_one_whole_weight() -> None:
    """accelerate sends weight after weight to all ranks: of LLaMA 7B the largest is the embedding, 32,000 x 4,096."""
    found = typed("estimate llama-7b --gpu a100-sxm4-80gb --gpus 8 --zero 3 --at setup --explain gathered")
    assert f"{4 * 32000 * 4096:,} byte" in found.out
    assert "loading" in found.out
