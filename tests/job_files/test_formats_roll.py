"""ROLL: roles with strategies and devices of their own (roll/configs, roll/pipeline)."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import document
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.exchange import read, write

RLVR = """
pretrain: Qwen/Qwen2.5-7B
reward_pretrain: Qwen/Qwen2.5-7B
num_gpus_per_node: 8
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 1024
response_length: 3072
adv_estimator: reinforce
init_kl_coef: 0.0
actor_train:
  model_args: {dtype: bf16}
  training_args: {per_device_train_batch_size: 2, gradient_accumulation_steps: 16}
  strategy_args:
    strategy_name: megatron_train
    strategy_config: {tensor_model_parallel_size: 2, use_distributed_optimizer: true, recompute_granularity: full}
  device_mapping: list(range(0,16))
actor_infer:
  strategy_args:
    strategy_name: vllm
    strategy_config: {tensor_parallel_size: 2, gpu_memory_utilization: 0.8}
  device_mapping: list(range(0,16))
"""


def run_of(text: str) -> Job:
    return read(text, file="run.yaml").job


def test_a_pipeline_of_rewards() -> None:
    """8 data-parallel ranks of 2 x 16 sequences are 256 of the step's 512."""
    run = run_of(RLVR)
    assert (run.model, run.framework, run.tp, run.zero, run.gpus) == ("Qwen/Qwen2.5-7B", "megatron", 2, 1, 16)
    assert (run.task, run.reference, run.prompts, run.samples, run.global_batch, run.micro_batch) == (
        "grpo",
        "none",
        64,
        8,
        256,
        2,
    )
    assert (run.prompt_len, run.answers, run.recompute) == (1024, "3072", "full")
    assert run.rollout == "vllm:tp=2,utilization=0.8,sleep=1"
    assert run_of(RLVR.replace("init_kl_coef: 0.0\n", "")).reference == "model"  # 0.2 by default
    assert run_of(RLVR.replace("adv_estimator: reinforce\n", "")).task == "ppo"  # gae by default


def test_devices_are_read_and_never_evaluated() -> None:
    apart = RLVR.replace(
        "  device_mapping: list(range(0,16))\n", "  device_mapping: list(range(16, 24)) + [24, 25]\n"
    ).replace("list(range(16, 24)) + [24, 25]", "list(range(0,16))", 1)
    run = run_of(apart)
    assert (run.placement, run.gpus) == ("split:16+10", 26)
    with pytest.raises(ConfigError, match=r"is read where it is list\(range\(0, 8\)\), or a list of numbers"):
        run_of(RLVR.replace("list(range(0,16))", "__import__('os').getpid()"))


def test_fsdp2_shards_over_groups() -> None:
    """`fsdp_size` counts Ulysses' ranks; weights are float32 unless `param_dtype` says otherwise (fsdp2_strategy.py)."""
    text = RLVR.replace("megatron_train", "fsdp2_train").replace(
        "tensor_model_parallel_size: 2, use_distributed_optimizer: true, recompute_granularity: full", "fsdp_size: 8"
    )
    run = run_of(text.replace("dtype: bf16}", "dtype: bf16, ulysses_size: 2}"))
    assert (run.framework, run.cp, run.zero, run.replicas, run.precision) == ("huggingface", 2, 3, 2, "bf16")
    # Gradients are summed in float32 unless `reduce_dtype` says otherwise.
    narrow = text.replace("fsdp_size: 8", "fsdp_size: 8, param_dtype: bf16")
    assert run_of(narrow).precision == "bf16-pure-32"
    assert run_of(narrow.replace("param_dtype", "reduce_dtype: bf16, param_dtype")).precision == "bf16-pure"


def test_fine_tuning() -> None:
    text = "pretrain: Qwen/Qwen2.5-7B\nsequence_length: 2048\nsft_train:\n  training_args: {per_device_train_batch_size: 2,"
    text += " gradient_accumulation_steps: 16}\n  strategy_args: {strategy_name: megatron_train, strategy_config:"
    text += " {tensor_model_parallel_size: 2, context_parallel_size: 2}}\n  device_mapping: list(range(0,8))\n"
    run = run_of(text)
    assert (run.task, run.tp, run.cp, run.gpus, run.seq_len, run.micro_batch, run.global_batch) == (
        None,
        2,
        2,
        8,
        2048,
        2,
        64,
    )


def test_a_task_without_the_length_of_its_prompts_is_written() -> None:
    text = write(Job(model="qwen2.5-7b", task="grpo", prompts=64, samples=8, gpus=8), "roll").text
    assert "rollout_batch_size: 64" in text
    assert "prompt_length" not in text


def test_tokens_of_a_micro_batch_are_those_of_whole_sequences() -> None:
    """`dynamic_batching.py` adds up whole sequences, before context parallelism shares each of them out: 8192 tokens are two of
    4096 with any number of ranks; 512 sequences over 16 / (2 x 2) ranks are 128 of each."""
    most = "\n  use_dynamic_batching_in_train: true\n  max_tokens_per_microbatch_in_train: 8192"
    text = RLVR.replace("actor_train:", f"actor_train:{most}")
    wide = text.replace("{tensor_model_parallel_size: 2,", "{tensor_model_parallel_size: 2, context_parallel_size: 2,")
    assert [run_of(each).micro_batch for each in (text, wide)] == [2, 2]


def test_a_turn_has_at_most_the_tokens_of_one_answer() -> None:
    """Of 3072 tokens five turns make 5 x 512, by the lesser of both limits; the rest is seen between them, in four parts."""
    text = RLVR.replace("response_length: 3072", "sequence_length: 4096\nmax_actions_per_traj: 5")
    answers = "actor_infer:\n  generating_args: {max_new_tokens: 512}"
    run = run_of(text.replace("actor_infer:", answers))
    assert (run.answers, Engine.parse(run.rollout or "").turns, Engine.parse(run.rollout or "").observed) == (
        "3072",
        5,
        (3072 - 5 * 512) // 4,
    )
    shorter = run_of(text.replace("actor_infer:", f"max_tokens_per_step: 256\n{answers}"))
    assert Engine.parse(shorter.rollout or "").observed == (3072 - 5 * 256) // 4


def test_packed_rows_are_named_where_nothing_spreads_them() -> None:
    packs = "actor_train:\n  use_sequence_packing: true"
    spread = f"{packs}\n  sequence_packing_args: {{algorithm: load_balance, max_packed_sequence_length_train: 8192}}"
    for text, there in ((RLVR.replace("actor_train:", packs), True), (RLVR.replace("actor_train:", spread), False)):
        named = {item.key for item in read(text, file="run.yaml").uncounted}
        assert ("actor_train.use_sequence_packing" in named) is there


def test_adapters_of_the_engine_are_named() -> None:
    text = RLVR.replace("actor_infer:", "actor_infer:\n  model_args: {lora_target: all-linear, lora_rank: 32}")
    named = {item.key for item in read(text, file="run.yaml").uncounted}
    assert "actor_infer.model_args.lora_rank" in named
    assert "actor_infer.model_args.lora_rank" not in {item.key for item in read(RLVR, file="run.yaml").uncounted}


def test_answers_are_made_on_some_of_the_trainer_s_gpus(tmp_path: Path) -> None:
    """12 of 16 GPUs are six engines of two, each with a sixth of the 64 prompts."""
    engines = {}
    for last in (16, 12):
        place = tmp_path / f"{last}.yaml"
        ends = RLVR.rindex("list(range(0,16))")
        place.write_text(f"{RLVR[:ends]}list(range(0,{last}))\n")
        engines[last] = document(f"estimate {place} --gpu h100-sxm5-80gb")["rollout"]
    assert (engines[16]["replicas"], engines[12]["replicas"]) == (8, 6)
    assert (engines[16]["asked"], engines[12]["asked"]) == (64 // 8 * 8, 11 * 8)  # of 64 prompts, 8 answers each
