"""OpenRLHF's options by name: with sections since 0.10, such as `--ds.zero_stage`, and without them before."""

from __future__ import annotations

import re

from loadgauge.job_files.ideas.table import Keys

OLD = {
    "model": "pretrain", "actor.num_nodes": "actor_num_nodes", "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    "ref.num_nodes": "ref_num_nodes", "ref.num_gpus_per_node": "ref_num_gpus_per_node",
    "critic.num_nodes": "critic_num_nodes", "critic.num_gpus_per_node": "critic_num_gpus_per_node",
    "reward.num_nodes": "reward_num_nodes", "reward.num_gpus_per_node": "reward_num_gpus_per_node",
    "train.colocate_all": "colocate_all_models", "train.colocate_actor_ref": "colocate_actor_ref",
    "train.colocate_critic_reward": "colocate_critic_reward", "vllm.num_engines": "vllm_num_engines",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size", "vllm.enable_prefix_caching": "enable_prefix_caching",
    "vllm.enforce_eager": "enforce_eager", "vllm.enable_sleep": "vllm_enable_sleep",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization", "train.async_enable": "async_train",
    "train.async_queue_size": "async_queue_size", "ds.zero_stage": "zero_stage", "ds.adam_offload": "adam_offload",
    "ds.param_dtype": "param_dtype", "ds.attn_implementation": "attn_implementation",
    "ds.use_liger_kernel": "use_liger_kernel", "ds.overlap_comm": "overlap_comm",
    "ds.enable_sleep": "deepspeed_enable_sleep", "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "ds.packing_samples": "packing_samples", "ds.ring_attn_size": "ring_attn_size",
    "train.dynamic_batch_enable": "use_dynamic_batch", "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu", "ds.load_in_4bit": "load_in_4bit",
    "ds.lora.rank": "lora_rank", "ds.lora.target_modules": "target_modules", "ds.lora.dropout": "lora_dropout",
    "rollout.batch_size": "rollout_batch_size", "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt", "rollout.max_new_tokens": "max_new_tokens",
    "train.micro_batch_size": "micro_train_batch_size", "train.batch_size": "train_batch_size",
    "train.max_epochs": "max_epochs", "data.max_len": "max_len", "algo.kl.init_coef": "init_kl_coef",
    "algo.advantage.estimator": "advantage_estimator", "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url", "critic.model_name_or_path": "critic_pretrain",
    "train.agent_func_path": "agent_func_path", "ref.offload": "ref_offload", "reward.offload": "ref_reward_offload",
    "ref.model_name_or_path": "ref_pretrain", "model.ipo_enable": "ipo",
    "actor.policy_loss_type": "policy_loss_type", "checkpointing": "gradient_checkpointing", "actor.optim": "optim",
}  # fmt: skip
"""Options with sections, and what they were called before."""
STARTED = re.compile(r"\bopenrlhf(?:\.|/)cli(?:\.|/)train_(\w+)|\btrain_(ppo_ray)\b")
OF_SECTIONS = re.compile(
    r"(?:actor|critic|ref|reward|vllm|train|ds|rollout|data|algo|model|adam|muon|ckpt|logger|eval)\."
)


def trainer_of(keys: Keys) -> str:
    """The trainer of a command line: `ppo_ray`, `dpo`, ...; by the options where the program is not named."""
    match = STARTED.search(" ".join(getattr(keys.document, "program", ())))
    if match is not None:
        return match[1] or match[2]
    return "ppo_ray" if keys.has(*both("vllm.num_engines"), *both("rollout.batch_size")) else "sft"


def both(name: str) -> tuple[str, ...]:
    """Every spelling of an option: with its section, of one trainer or of another, and without."""
    tails = {"model": "model_name_or_path", "checkpointing": "gradient_checkpointing_enable"}
    new = tuple(f"{part}.{tails[name]}" for part in ("actor", "model")) if name in tails else (name,)
    return (*new, OLD[name]) if name in OLD else new


def at(keys: Keys, name: str) -> str:
    """The option of a name as this command line spells its options; a name of no section is its own spelling."""
    if name not in OLD:
        return name
    new, old = both(name)[:-1], OLD[name]
    if keys.document.get(old) is not None and keys.has(old):
        return old
    sections = any(OF_SECTIONS.match(one) for one in keys.document.names())
    if not sections and keys.document.names() and any(one in OLD.values() for one in keys.document.names()):
        return old
    return new[0] if len(new) == 1 or trainer_of(keys) == "ppo_ray" else new[1]
