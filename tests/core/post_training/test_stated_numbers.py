"""Numbers that sources state, as they come out of a run: what is held, moved and left behind."""

from __future__ import annotations

import pytest

from loadgauge.core.base.units import GIB, MIB
from loadgauge.core.definitions.hardware.host import HOST_LINK
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.post_training.memory import memory
from loadgauge.core.post_training.step import packed, step_time, timed
from loadgauge.core.post_training.sync import sync, transfer
from loadgauge.core.resolve.posttrain import resolve_posttrain

JOB = Job(
    "qwen2.5-7b", task="grpo", gpu="h100-sxm5-80gb", gpus=4, zero=3, prompts=32, samples=8, prompt_len=512, answers="1536",
    rollout="vllm:tp=2,utilization=0.6,max_num_seqs=64,sleep=1", rollout_offload="all",
)  # fmt: skip
PARAMS = 7_615_616_512


def resident(job: Job, phase: str, role: str, part: str) -> float:
    found = next(one for one in memory(resolve_posttrain(job)[0]).phases if one.name == phase)
    return sum(one.nbytes for one in found.residents if (one.role, one.part) == (role, part))


def test_what_a_step_holds_of_each_token() -> None:
    """Six numbers of 4 bytes on the card of a quarter of 256 sequences of 2,048 tokens, forty bytes on the host of all."""
    tokens = 256 * 2048
    assert resident(JOB, "update", "actor", "held") == pytest.approx(24 * tokens / 4)
    host = memory(resolve_posttrain(JOB)[0]).host
    # Ids, mask and positions in 64 bits, and four log-probs in 32.
    assert host["object store"] == pytest.approx((3 * 8 + 4 * 4) * tokens)
    assert host["engine asleep"] == pytest.approx(4 * 2 * PARAMS / 2, rel=0.001)


def test_a_hand_over_has_a_bucket_of_two_gib() -> None:
    """verl: `update_weights_bucket_megabytes` 2048; never more than the weights."""
    assert resident(JOB, "weight sync", "engine", "bucket") == 2 * GIB
    small = JOB.replace(model="qwen2.5-0.5b", rollout="vllm:tp=2,utilization=0.3,sleep=1")
    assert resident(small, "weight sync", "engine", "bucket") == pytest.approx(494_032_768, rel=0.001)


def test_an_engine_leaves_700_mib_asleep_and_its_communicator() -> None:
    alone = JOB.replace(model="qwen2.5-0.5b", gpus=1, zero=0, rollout="vllm:utilization=0.3,sleep=1")
    assert resident(alone, "update", "engine", "asleep") == 700 * MIB
    assert resident(JOB, "update", "engine", "asleep") == 700 * MIB + 0.25 * GIB


def test_graphs_take_one_to_three_gib_of_all_sizes() -> None:
    """vLLM's own warning, of 67 sizes; of 64 sequences it captures 19."""
    assert resident(JOB.replace(rollout="vllm:tp=2,utilization=0.6"), "generate", "engine", "graphs") == 67 * 16 * MIB
    assert resident(JOB, "generate", "engine", "graphs") == 19 * 16 * MIB


def test_the_sampler_has_logits_in_float32_and_probabilities() -> None:
    """Each of so many more sequences takes its row of both from what the profile leaves to the cache."""
    few, many = (
        JOB.replace(rollout=f"vllm:tp=2,utilization=0.6,max_num_seqs={most},graphs=false,sleep=1") for most in (64, 128)
    )
    less = resident(few, "generate", "engine", "cache") - resident(many, "generate", "engine", "cache")
    assert less == pytest.approx(64 * 2 * 4 * 152_064 / 2, rel=1e-6)


def test_seconds_of_a_weight_sync() -> None:
    """33 s of 32B parameters (SkyRL), 1.7 s to sleep and 0.28 to wake (NeMo-RL #1137), copies over the host's link."""
    run, _ = resolve_posttrain(JOB)
    parts = sync(run).parts
    assert parts["changing sides"] == pytest.approx(33 * PARAMS / 32e9, rel=1e-6)
    assert parts["sleep and wake"] == pytest.approx(1.98)
    assert parts["sleep's copy of the weights"] == pytest.approx(2 * PARAMS / 2 / HOST_LINK, rel=1e-6)
    # Two bytes of weights and twelve of states of a quarter, there and back.
    assert parts["offload and reload"] == pytest.approx(2 * (2 + 12) * PARAMS / 4 / HOST_LINK, rel=1e-6)
    assert parts["transfer"] == pytest.approx(2 * PARAMS / 3.7e9, rel=1e-6)


def test_packed_micro_batches_are_filled_to_95_percent() -> None:
    run, setup = resolve_posttrain(
        JOB.replace(framework="megatron", zero=1, prompts=2000, samples=100, answers="uniform:1000")
    )
    layout, _ = packed(run, run.trained, 8192, (500.5, 0.0), updates=False)
    assert float(layout.tokens or 0) == pytest.approx(0.95 * 8192, rel=1e-3)
    assert setup.layout.dp == 4


def test_what_no_phase_counts_is_a_twentieth() -> None:
    found = step_time(resolve_posttrain(JOB)[0], None)
    rest = next(one.seconds for one in found.phases if one.name == "rest")
    assert rest / (found.step - rest) == pytest.approx(0.05)


@pytest.mark.parametrize(("sides", "rate"), [("4+4", 450e9), ("8+8", 50e9), ("8+4", 50e9), ("16+16", 50e9)])
def test_sides_on_nodes_of_their_own_are_joined_by_the_network(sides: str, rate: float) -> None:
    job = JOB.replace(gpus=None, framework="megatron", zero=1, placement=f"split:{sides}", rollout_offload=None)
    assert transfer(resolve_posttrain(job)[0], "shard to shard").rate == pytest.approx(0.4 * rate, rel=0.01)


@pytest.mark.parametrize(("network", "rate"), [("100GB/s", 100e9), (None, 50e9)])
def test_a_network_that_is_given_joins_the_sides(network: str | None, rate: float) -> None:
    """Both sides of 64 of a rack's GPUs, each in one domain of NVLink: 400 Gbit/s as NVIDIA's own racks have it, or as said."""
    job = Job(
        "qwen3-30b-a3b", task="grpo", gpu="gb200-nvl72", gpus=128, tp=2, zero=1, framework="megatron", nic_bandwidth=network,
        sequence_parallel=True, placement="split:64+64", rollout="vllm:tp=2",
    )  # fmt: skip
    found = transfer(resolve_posttrain(job)[0], "shard to shard")
    assert found.rate == pytest.approx(0.4 * rate)


def test_sides_that_nobody_says_how_to_join_are_joined_by_the_usual_network() -> None:
    job = Job(
        "qwen2.5-7b", task="grpo", gpu="h800-sxm5-80gb", gpus=16, tp=2, framework="megatron", placement="split:8+8"
    )
    run, _ = resolve_posttrain(job)
    assert memory(run).phases
    assert (
        timed(run, memory(run))[0]
        == timed(resolve_posttrain(job.replace(nic_bandwidth="400Gbit/s"))[0], memory(run))[0]
    )
