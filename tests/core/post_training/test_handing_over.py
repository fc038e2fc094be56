"""Weights handed over: bytes of a delta, seconds beside verl's table, buckets, copies on the host, communicators given back."""

from __future__ import annotations

import pytest

from loadgauge import ConfigError, posttrain
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.estimate.states.overhead import communication
from loadgauge.core.post_training.roles import Run
from loadgauge.core.post_training.sync import expert_matrices, sync, transfer
from loadgauge.job_files.exchange import read

MIB = 2**20
SPLIT = {
    "task": "grpo",
    "gpu": "h100-sxm5-80gb",
    "gpus": 16,
    "placement": "split:8+8",
    "zero": 3,
    "recompute": "full",
    "prompts": 64,
    "samples": 8,
    "prompt_len": 512,
    "answers": "1536",
}
WEIGHTS = 2 * 8_030_261_248
"""Of Llama 3.1 8B in 16 bits."""


def of(rollout: str, model: str = "llama-3.1-8b", **flags: object):  # type: ignore[no-untyped-def]
    return posttrain(model, **SPLIT | {"rollout": f"vllm:tp=2,utilization=0.5{rollout}"} | flags)  # type: ignore[arg-type]


def run_of(rollout: str, model: str = "llama-3.1-8b", **flags: object) -> Run:
    run: Run = of(rollout, model, **flags).run
    return run


@pytest.mark.parametrize("changed", [0.001, 0.01, 0.03, 1.0])
def test_a_delta_is_what_changed_with_where_it_is(changed: float) -> None:
    """Two bytes of a value and four of its place; by files too (verl, delta_sync/encode.py; slime, disk_delta.py)."""
    for word in ("delta", "delta-disk"):
        found = sync(run_of(f",sync={word},changed={changed}"))
        assert found.received == pytest.approx(WEIGHTS * changed * 3)
    assert sync(run_of(",sync=nccl")).received == pytest.approx(WEIGHTS / 2)


@pytest.mark.parametrize(
    ("model", "changed", "printed"),
    [
        ("qwen2.5-32b", 0.01, 6.2), ("qwen2.5-72b", 0.01, 12.5), ("qwen3-30b-a3b", 0.0005, 7.1),
        ("qwen3-235b-a22b", 0.0003, 13.2), ("qwen3-8b", 0.00884, 3.34), ("qwen3-8b", 0.00895, 2.41), ("qwen3-8b", 0.00893, 2.24),
    ],
)  # fmt: skip
def test_seconds_of_a_delta_are_those_of_verl_s_table(model: str, changed: float, printed: float) -> None:
    """docs/advance/delta_weight_sync.md, without offload, by the shares it states (of the 30B none: its default)."""
    found = transfer(
        run_of(f",sync=delta,changed={changed}", model, gpus=128, placement="split:64+64"), "delta"
    ).seconds
    assert printed / 1.34 < found < printed * 1.34


def test_a_delta_of_experts_takes_longer_by_their_matrices() -> None:
    run = run_of(",sync=delta", "qwen3-30b-a3b")
    assert expert_matrices(run.trained.model) == 48 * 128 * 3
    assert sync(run).parts["matrices of experts"] == pytest.approx(48 * 128 * 3 * 0.31e-3)
    assert "matrices of experts" not in sync(run_of(",sync=delta")).parts


def test_files_are_written_and_read() -> None:
    parts = sync(run_of(",sync=disk,disk=5GB/s")).parts
    assert parts["written"] == parts["read"] == pytest.approx(WEIGHTS / 5e9)
    assert parts["transfer"] == pytest.approx(WEIGHTS / 3.7e9)
    less = sync(run_of(",sync=delta-disk,disk=5GB/s,changed=0.02")).parts
    assert less["written"] == pytest.approx(0.06 * WEIGHTS / 5e9)
    assert less["put in place"] == pytest.approx(WEIGHTS / 2e9)


def test_what_each_way_takes_in_memory() -> None:
    """A delta's trainer: two buckets, and a copy of each shard on the host (here all 8 on one node); files: all weights there."""
    plain, delta, disk = (of(f",sync={word}").memory for word in ("nccl", "delta", "disk"))
    buckets = [
        sum(one.nbytes for one in found.phases[-1].residents if one.part == "bucket") for found in (plain, delta, disk)
    ]
    assert buckets == [2048 * MIB, 2 * 2048 * MIB, 0]
    assert delta.host["weights to hand over"] == disk.host["weights to hand over"] == pytest.approx(WEIGHTS)
    assert "weights to hand over" not in plain.host
    wide = of(",sync=delta", gpus=24, placement="split:16+8").memory
    assert wide.host["weights to hand over"] == pytest.approx(WEIGHTS / 2)


def test_communicators_of_the_side_that_rests_are_given_back() -> None:
    flags = {"gpus": 8, "placement": None}
    kept, given = (of(f",sleep=1{word}", **flags).memory for word in ("", ",suspend=true"))
    layout = run_of("", **flags).trained.layout
    by_name = [{phase.name: phase.total for phase in found.phases} for found in (kept, given)]
    less = {name: by_name[0][name] - by_name[1][name] for name in by_name[0]}
    assert less["generate"] == pytest.approx(communication(layout, gpu("h100-sxm5-80gb")).value)
    assert less["update"] == pytest.approx(0.25 * 2**30)  # the engine's group of tp=2
    apart = [of(word).memory.total for word in ("", ",suspend=true")]
    assert apart[0] == apart[1]


@pytest.mark.parametrize(
    ("rollout", "flags", "words"),
    [
        (",changed=0.1", {}, "changed= needs sync=delta or sync=delta-disk"),
        (",sync=delta,disk=5GB/s", {}, "disk= needs sync=disk or sync=delta-disk"),
        (",sync=ipc", {}, "sync=ipc needs the same GPUs"),
        (",sync=delta", {"gpus": 8, "placement": None}, "sync=delta needs GPUs of each side"),
        (",sync=rdma", {}, "sync"),
    ],
)
def test_ways_that_do_not_fit_are_refused(rollout: str, flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of(rollout, **flags)


VERL = (
    "python3 -m verl.experimental.one_step_off_policy.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64"
    " actor_rollout_ref.model.path=Qwen/Qwen3-8B data.max_prompt_length=512 data.max_response_length=1024"
    " actor_rollout_ref.actor.ppo_mini_batch_size=64 rollout.nnodes=1 rollout.n_gpus_per_node=4"
    " actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.checkpoint_engine.backend="
)
SLIME = (
    "python3 train.py --hf-checkpoint Qwen/Qwen3-4B --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8"
    " --rollout-num-gpus-per-engine 2 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192"
    " --global-batch-size 256 --advantage-estimator grpo --micro-batch-size 1 "
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"{VERL}delta_sharded", "sync=delta"),
        (f"{VERL}nixl", "sync=nccl"),
        (f"{SLIME}--update-weight-transport disk", "sync=disk"),
        (f"{SLIME}--update-weight-transport disk --update-weight-mode delta", "sync=delta-disk"),
        (SLIME.replace("--rollout-num-gpus 8", "--colocate"), "suspend=true"),
    ],
)
def test_the_words_of_tools(text: str, word: str) -> None:
    assert word in (read(text, file="run.sh").job.rollout or "").partition(":")[2].split(",")
