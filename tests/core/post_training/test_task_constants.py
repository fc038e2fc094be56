"""What the sources state in numbers, by hand: each is part of an answer that moves with it."""

from __future__ import annotations

import pytest

from loadgauge import posttrain
from loadgauge.core.post_training.engine import captured
from loadgauge.core.post_training.memory import PhaseMemory, PostMemory
from loadgauge.core.post_training.roles import Run
from loadgauge.core.post_training.sync import moved_states, sync, transfer

GIB, MIB = 2**30, 2**20
TOKENS, VOCABULARY, WEIGHTS = 64 * 8 * 2048, 128_256, 2 * 8_030_261_248
"""Of a step; of Llama 3.1 8B, its weights in 16 bits."""
GRPO = {
    "task": "grpo", "gpu": "h100-sxm5-80gb", "gpus": 8, "zero": 3, "recompute": "full", "prompts": 64, "samples": 8,
    "prompt_len": 512, "answers": "1536",
}  # fmt: skip


def of(rollout: str = "vllm:utilization=0.5,sleep=1", **flags: object) -> PostMemory:
    return posttrain("llama-3.1-8b", **GRPO | {"rollout": rollout} | flags).memory  # type: ignore[arg-type]


def part(phase: PhaseMemory, role: str, name: str) -> float:
    return sum(one.nbytes for one in phase.residents if (one.role, one.part) == (role, name))


def named(found: PostMemory, name: str) -> PhaseMemory:
    return next(one for one in found.phases if one.name == name)


def test_a_bucket_of_verls_and_what_a_step_holds_of_a_token() -> None:
    found = of()
    assert part(named(found, "weight sync"), "engine", "bucket") == 2048 * MIB
    assert found.host["object store"] == 40 * TOKENS
    held = [one.nbytes for phase in found.phases for one in phase.residents if one.part == "held"]
    assert held
    assert set(held) == {6 * 4 * TOKENS / 8}


def test_an_engine_asleep_keeps_what_agilerl_measured() -> None:
    """700 MiB, from 300 to 1,400."""
    asleep = of().engine
    assert asleep is not None
    assert [one / MIB for one in (asleep.asleep.value, asleep.asleep.low, asleep.asleep.high)] == [700, 300, 1400]
    # Awake, the context of an H100 beside it.
    assert asleep.outside.value > asleep.asleep.value
    assert asleep.outside.high - asleep.outside.value >= 700 * MIB


@pytest.mark.parametrize(("sequences", "sizes"), [(256, 67), (4, 4)])
def test_a_graph_of_each_size_of_batch(sequences: int, sizes: int) -> None:
    """67 of them take 1 to 3 GiB, by vLLM's warning: 16 MiB each."""
    told = f"vllm:utilization=0.5,max_num_seqs={sequences}"
    graphs, eager = of(told).engine, of(f"{told},graphs=false").engine
    assert graphs is not None
    assert eager is not None
    assert (graphs.graphs, eager.graphs) == (16 * MIB * sizes, 0)
    if sizes == 67:
        assert 1 * GIB <= graphs.graphs <= 3 * GIB


def test_a_sampler_has_two_columns_of_logits_in_float32() -> None:
    few, many = (of(f"vllm:utilization=0.5,max_num_seqs={number}").engine for number in (16, 64))
    assert few is not None
    assert many is not None
    assert many.profile - few.profile == 2 * 4 * (64 - 16) * VOCABULARY
    assert many.pool == pytest.approx(few.pool - (many.profile - few.profile))


def test_a_whole_unit_is_gathered_and_copied_out() -> None:
    """DPO's reference under FSDP: its weights twice."""
    memory = posttrain(
        "llama-3.1-8b", task="dpo", gpu="h100-sxm5-80gb", gpus=8, zero=3, micro_batch=1, recompute="full"
    ).memory
    found = [
        one for phase in memory.phases for one in phase.residents if one.role == "reference" and one.part == "gathered"
    ]
    assert found
    assert max(one.nbytes for one in found) == pytest.approx(2 * WEIGHTS, rel=2e-3)


def run_of(model: str = "llama-3.1-8b", **flags: object) -> Run:
    return posttrain(model, **GRPO | {"rollout": "vllm:tp=2,utilization=0.5,sleep=1"} | flags).run  # type: ignore[arg-type]


def test_seconds_of_a_weight_sync_by_hand() -> None:
    run = run_of(rollout_offload="all")
    parts = sync(run).parts
    assert parts["transfer"] == pytest.approx(WEIGHTS / 3.7e9)
    assert parts["changing sides"] == pytest.approx(33 * WEIGHTS / 2 / 32e9)
    assert parts["sleep and wake"] == pytest.approx(1.7 + 0.28)
    assert moved_states(run) == pytest.approx((2 + 12) * WEIGHTS / 2 / 8)
    # For the hand-over, old log-probabilities and the update, which has the states.
    assert moved_states(run_of(rollout_offload="idle")) == pytest.approx((3 * 2 + 12) * WEIGHTS / 2 / 8)
    shards = transfer(run, "shard to shard")
    bandwidth = shards.rate / 0.4
    assert shards.parts["transfer"] == pytest.approx(0.4 + WEIGHTS / 2 / shards.rate)
    assert run.trained.cluster is not None
    assert bandwidth in [pytest.approx(link.bandwidth) for link in run.trained.cluster.links]
    experts = run_of("qwen3-30b-a3b")
    assert sync(experts).parts["transfer"] == pytest.approx(2 * experts.trained.params / 1.85e9)


def test_no_graph_is_of_more_than_512_sequences() -> None:
    """1, 2, 4 and the 64 multiples of 8."""
    assert captured(4096) == captured(256) == 3 + 64
