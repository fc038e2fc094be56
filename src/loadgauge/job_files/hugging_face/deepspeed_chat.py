"""DeepSpeed-Chat's three steps: supervised fine-tuning, a reward model or DPO, and PPO. Command lines of `deepspeed main.py`."""

from __future__ import annotations

from typing import Any

from loadgauge.job_files.hugging_face.huggingface import BATCH, processes
from loadgauge.job_files.hugging_face.trl_tasks import words_of_path
from loadgauge.job_files.ideas.table import Dialect, Facts, Idea, Keys, Unknown, names_in, row
from loadgauge.job_files.pre_training.megatron import launched

ACTOR, CRITIC = "actor_model_name_or_path", "critic_model_name_or_path"
EACH, STEP = "per_device_generation_batch_size", "per_device_training_batch_size"
STAGES = ("zero_stage", "actor_zero_stage")
DIMS = ("lora_dim", "actor_lora_dim")
OF_PPO = (
    CRITIC, EACH, STEP,
    *names_in("generation_batches ppo_epochs max_prompt_seq_len max_answer_seq_len offload_reference_model"),
)  # fmt: skip


def _task() -> Idea:
    """The step: PPO's by its actor, the others by the folder of the script."""

    def read(keys: Keys) -> Facts:
        if not keys.has(ACTOR, *OF_PPO):
            words = words_of_path(keys.file, 8)
            task = "rm" if "reward" in words else "dpo" if "dpo" in words else None
            if task is not None:
                keys.remarks[f"it is the step of {'a reward model' if task == 'rm' else 'DPO'}, as its folder says"] = (
                    None
                )
            return {"task": task}
        each = keys.whole(EACH) or 16
        frozen = bool(keys.flag("offload_reference_model"))
        return {
            "task": "ppo",
            **_scorers(keys),
            "samples": 1,
            "generated": each * (keys.whole("generation_batches") or 1),
            "micro_batch": keys.whole(STEP) or 16,
            "epochs": keys.whole("ppo_epochs") or 1,
            "answers": str(keys.whole("max_answer_seq_len") or 256),
            "prompt_len": keys.whole("max_prompt_seq_len") or 256,
            "rollout": f"hf:batch={each}",
            "frozen_offload": frozen or None,
        }

    facts = names_in(
        "task critic reward_model samples generated micro_batch epochs answers prompt_len rollout frozen_offload"
    )
    return Idea(keys=OF_PPO, facts=facts, read=read, write=lambda facts, keys: {})


def _scorers(keys: Keys) -> Facts:
    """The critic and the reward model, which begin as the same one; of the actor's size where the script does not say which."""
    named = keys.raw(CRITIC)
    if isinstance(named, str) and "$" not in named:
        return {"critic": named, "reward_model": named}
    keys.remarks[
        f"{keys.document.shown(CRITIC)} does not say which model: the critic and the reward model are as the actor"
    ] = None
    return {}


def _model() -> Idea:
    """The model that is trained. Raises `ConfigError` where a script leaves it to a variable without a value."""
    names = ("model_name_or_path", ACTOR)

    def read(keys: Keys) -> Facts:
        key = next((key for key in names if keys.has(key)), names[0])
        value = keys.raw(key)
        if value is True:
            raise Unknown("is empty", key=keys.document.shown(key), file=keys.file)
        return {"model": keys.word(key)}

    return Idea(keys=names, facts=("model",), read=read, write=lambda facts, keys: {names[0]: facts.get("model")})


def _engine() -> Idea:
    """ZeRO's stage; `--offload` moves the optimizer, and in stage 3 the weights too (`get_train_ds_config`)."""

    def read(keys: Keys) -> Facts:
        stage = next((number for key in STAGES if (number := keys.whole(key, minimum=0)) is not None), 0)
        moved = keys.flag("offload") and stage > 0
        return {"zero": stage, "offload": ("all" if stage == 3 else "optimizer") if moved else "none"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        moved = (facts.get("offload") or "none") != "none"
        present = next((key for key in STAGES if keys.has(key)), STAGES[0])
        return {present: facts.get("zero") or 0, "offload": True if moved else None}

    return Idea(keys=(*STAGES, "offload"), facts=("zero", "offload"), read=read, write=write)


def _adapters() -> Idea:
    """Its own adapters, of the linear layers of all blocks; with `--only_optimize_lora` they alone are trained."""
    alone = "only_optimize_lora"

    def read(keys: Keys) -> Facts:
        rank = next((number for key in DIMS if (number := keys.whole(key, minimum=0)) is not None), 0)
        if rank and not keys.flag(alone):
            keys.remarks[f"adapters of rank {rank} are trained beside all weights, and not counted"] = None
            rank = 0
        return {"lora_rank": rank, "lora_targets": "all"} if rank else {"lora_rank": 0}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        rank = facts.get("lora_rank")
        present = next((key for key in DIMS if keys.has(key)), DIMS[0])
        return {present: rank or None, alone: True if rank else None}

    return Idea(keys=(*DIMS, alone), facts=("lora_rank", "lora_targets"), read=read, write=write)


DEEPSPEED_CHAT = Dialect(
    name="deepspeed-chat",
    title="DeepSpeed-Chat",
    versions="DeepSpeed-Chat 2023.4 - 2026.6",
    syntaxes=("argv",),
    style="flags",
    framework="deepspeed",
    trainers="softmax",
    blank={"argv": "torchrun main.py --max_seq_len 512\n"},
    ideas=(
        launched(),
        processes(),
        _model(),
        row("seq_len", "max_seq_len", default=lambda keys: None if keys.has(ACTOR) else 512, add=False),
        row("micro_batch", "per_device_train_batch_size", default=lambda keys: None if keys.has(ACTOR, STEP) else 16),
        BATCH[1],
        _task(),
        _engine(),
        _adapters(),
        row("precision", "dtype", words={"fp16": "fp16", "bf16": "bf16"}, default="fp16"),
        row(
            "recompute", "gradient_checkpointing", "actor_gradient_checkpointing", words={"true": "full", "false": "none"},
            default="none", off="none",
        ),
    ),
)  # fmt: skip
