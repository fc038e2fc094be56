"""Plans of rollout tools' files: the fastest of all single estimates of the file, and the same bytes and seconds as its command."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from command_line import document, typed
from loadgauge.core.answers.plan.task import planned
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan.posttrain import opened, plain, plan_task
from loadgauge.core.plan.space.task_space import Space
from loadgauge.job_files.job_file import from_job_file

VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 data.max_prompt_length=512 \\
 data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen3-1.7B actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \\
 actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.55 \\
 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=4 trainer.nnodes=1
"""
NEMO = """policy:
  model_name: Qwen/Qwen3-1.7B
  train_global_batch_size: 64
  train_micro_batch_size: 1
  logprob_batch_size: 2
  max_total_sequence_length: 2048
  dtensor_cfg: {enabled: true, activation_checkpointing: true}
  generation: {backend: vllm, colocated: {enabled: true}, vllm_cfg: {tensor_parallel_size: 1, gpu_memory_utilization: 0.6}}
grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 4}
cluster: {gpus_per_node: 4, num_nodes: 1}
"""
OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.num_gpus_per_node 4 --ref.num_nodes 1 \\
   --ref.num_gpus_per_node 4 --vllm.num_engines 2 --vllm.tensor_parallel_size 2 --train.colocate_all \\
   --vllm.gpu_memory_utilization 0.6 --algo.advantage.estimator group_norm --actor.model_name_or_path Qwen/Qwen3-1.7B \\
   --reward.remote_url reward_func.py --train.micro_batch_size 2 --train.batch_size 64 --rollout.micro_batch_size 4 \\
   --rollout.batch_size 16 --rollout.n_samples_per_prompt 4 --data.max_len 2048 --ds.zero_stage 3 --vllm.enable_sleep
"""
SLIME = """python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate --hf-checkpoint Qwen/Qwen3-1.7B \\
   --rollout-batch-size 16 --n-samples-per-prompt 4 --global-batch-size 64 --rollout-max-response-len 1024 \\
   --use-dynamic-batch-size --max-tokens-per-gpu 4096 --advantage-estimator grpo --rollout-num-gpus-per-engine 2 \\
   --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform \\
   --recompute-num-layers 1 --sglang-mem-fraction-static 0.7
"""
LATE = VERL.replace("trainer.main_ppo", "experimental.one_step_off_policy.main_ppo").replace(
    "trainer.nnodes=1", "trainer.nnodes=1 rollout.nnodes=1 rollout.n_gpus_per_node=4"
)
FILES = {"verl.sh": VERL, "nemo.yaml": NEMO, "openrlhf.sh": OPENRLHF, "slime.sh": SLIME, "late.sh": LATE}
NARROW = {"recompute": ("none", "full"), "pp": (1,), "zero": (1, 3)}


@pytest.fixture(params=FILES)
def asked(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    file = tmp_path / request.param
    file.write_text(FILES[request.param])
    return Job(str(file), gpu="h100-sxm5-80gb", task="grpo")


def smaller(space: Space) -> Space:
    """A space with at most two values an axis, the file's own among them, so that each may be estimated by itself."""
    values = {name: getattr(space, name) for name in space.__struct_fields__ if name != "wider"}
    return msgspec.structs.replace(
        space, **{name: tuple({every[0]: 0, every[-1]: 0}) for name, every in values.items()}
    )


def test_a_plan_of_a_file_is_the_best_of_single_estimates_of_it(asked: Job) -> None:
    reading = from_job_file(asked)
    job, space = opened(asked, reading.job, NARROW)
    space = smaller(space)
    found, single = plan_task(job, space, reading=reading).best, plain(job, space, reading)
    assert found is not None
    assert single is not None
    assert (found.time.step, found.memory.total) == (single.time.step, single.memory.total)


def test_the_command_of_a_plan_is_an_estimate_of_the_file_with_the_same_bytes_and_seconds(asked: Job) -> None:
    answer = planned(asked, NARROW)
    plan = answer.document()
    again = document(plan["best"]["command"].removeprefix("loadgauge "))
    assert Path(asked.model).name in plan["best"]["command"]
    assert again["memory"]["total"] == plan["best"]["memory"]["total"]
    assert again["time"]["step"] == pytest.approx(plan["best"]["time"]["step"], rel=1e-12)
    whole = document(f"estimate {asked.model} --gpu h100-sxm5-80gb")
    assert plan["best"]["time"]["step"] <= whole["time"]["step"] * (1 + 1e-9)


def test_a_rollout_file_without_a_task_is_planned_as_its_own(tmp_path: Path) -> None:
    """What only a training run has is answered of the update alone, and said in a line."""
    file = tmp_path / "verl.sh"
    file.write_text(VERL)
    line = f"plan {file} --gpu h100-sxm5-80gb --tp 1 --pp 1 --zero 3 --recompute full --micro-batch 4"
    assert document(line)["best"] == document(f"{line} --task grpo")["best"]
    alone = typed(f"{line} --objective money --json")
    assert "--objective is of a training run: the actor's update alone is planned" in alone.err
    assert json.loads(alone.out)["layouts"]
