"""DeepSpeed-Chat's three steps: supervised fine-tuning, a reward model or DPO, and PPO. Command lines of `deepspeed main.py`.

Other programs that take `--deepspeed_config`, as DeepSpeed's own examples do, are read too: the engine's configuration decides.
"""

import json
from pathlib import Path
from typing import Any

from loadgauge.job_files.hugging_face.huggingface import attention, processes
from loadgauge.job_files.hugging_face.trl_tasks import words_of_path
from loadgauge.job_files.ideas import Dialect, Facts, Keys, Named, Unknown, fixed, names_in, reads, row, short
from loadgauge.job_files.pre_training.megatron import launched
from loadgauge.job_files.reading.known_files import beside

ACTOR, CRITIC = "actor_model_name_or_path", "critic_model_name_or_path"
EACH, STEP = "per_device_generation_batch_size", "per_device_training_batch_size"
STAGES = ("zero_stage", "actor_zero_stage")
DIMS = ("lora_dim", "actor_lora_dim")
OF_PPO = (
    CRITIC, EACH, STEP,
    *names_in("generation_batches ppo_epochs max_prompt_seq_len max_answer_seq_len offload_reference_model"),
)  # fmt: skip

CONFIG, SIZES = "deepspeed_config", "cf"
"""The engine's configuration, and bing_bert's file with the sizes of the model."""
NAMED = ("model_name_or_path", ACTOR, "lm_model_name_or_path", "model_name", "bert_model")
BATCHES = ("per_device_train_batch_size", "train_batch_size", "batch_size")
HALF = {"fp16": "fp16", "bf16": "bf16"}
DROPOUTS = ("dropout", "actor_dropout")
MOST = 64
"""Sequences of a micro-batch that nothing says, at the most."""
HEAD = 2
"""Columns of the head of BERT's scripts with `--bert_model`: an answer's two ends, or a sentence's class."""


def _own(keys: Keys) -> bool:
    """Return whether a program of its own is started, which has none of DeepSpeed-Chat's defaults."""
    return keys.has(CONFIG, SIZES, *NAMED[3:])


def _told(keys: Keys) -> bool:
    """Return whether the engine's configuration is there to be read; what only it says is noted where it is not. Raises
    `ConfigError` where nothing says the model."""
    name = keys.raw(CONFIG)
    if not isinstance(name, str) or keys.alone or beside(name, keys) is not None:
        return isinstance(name, str)
    keys.refuse(
        CONFIG,
        f"names {short(name)}, which is not there, nor is the model's own file; give --model NAME",
        when="model" not in keys.given and not keys.has(*NAMED) and not _sizes(keys),
    )
    batch = {"micro_batch", "global_batch"} & keys.given.keys() or keys.has(*BATCHES)
    exact = "precision" in keys.given or keys.has("dtype", *HALF)
    keys.note(
        CONFIG,
        f"is not there, and only it says the micro-batch: 1 is counted, and the range has up to {MOST}",
        "costs",
        "activations transient loss",
        MOST - 1,
        when=not batch,
    )
    keys.note(
        CONFIG,
        "is not there, and only it says the precision",
        "either",
        "weights gradients activations loss",
        when=not exact,
    )
    # A one-bit optimizer holds up to 8 bytes of a parameter beside the 12 of AdamW and of Lamb.
    keys.note(
        CONFIG,
        "is not there, and only it says the optimizer: AdamW's states are counted",
        "either",
        "optimizer",
        0.67,
        when="optimizer" not in keys.given,
    )
    return False


def _batch_of(keys: Keys) -> int | None:
    """Return the sequences of a micro-batch; of a step of one GPU, which the scripts themselves divide, its share."""
    whole: int | None = keys.agreed(BATCHES[1:], keys.whole)
    return whole and max(1, whole // (keys.whole("gradient_accumulation_steps") or 1))


def _outside(keys: Keys) -> int | None:
    """Return one sequence for a batch that the script takes from whoever starts it, with a range of more; None for another."""
    key = next((key for key in BATCHES[1:] if "$" in str(keys.raw(key))), None)
    if key is None or {"micro_batch", "global_batch"} & keys.given.keys():
        return None
    keys.note(
        key,
        f"comes from outside the file: 1 is counted, and the range has up to {MOST} (--micro-batch says how many)",
        "costs",
        "activations transient loss",
        MOST - 1,
    )
    return 1


@reads(*BATCHES, inner=row("micro_batch", BATCHES[0]))
def _micro(keys: Keys, at: Named) -> Facts:
    number, told = keys.whole(BATCHES[0]), _told(keys)
    if number is None and not told and _own(keys):
        number = _outside(keys) or _batch_of(keys)
    return {"micro_batch": 16 if number is None and not _own(keys) and not keys.has(ACTOR, STEP) else number}


@reads(inner=row("accumulation", "gradient_accumulation_steps", default=1), when=lambda keys: not _told(keys))
def _accumulation(keys: Keys, at: Named) -> Facts:
    return at.inner.read(keys)


@reads(inner=row("precision", "dtype", words=HALF, default=lambda keys: None if _own(keys) else "fp16"), half=(*HALF,))
def _precision(keys: Keys, at: Named) -> Facts:
    half = [word for word in HALF if keys.flag(word)]
    return {"precision": half[0]} if half and not keys.has("dtype") and not _told(keys) else at.inner.read(keys)


@reads(
    *OF_PPO,
    facts="task reference critic reward_model samples generated micro_batch epochs answers prompt_len rollout frozen_offload",
)
def _task(keys: Keys) -> Facts:
    """The step: PPO's by its actor, the others by the folder of the script."""
    if not keys.has(ACTOR, *OF_PPO):
        words = words_of_path(keys.file, 8)
        task = "rm" if "reward" in words else "dpo" if "dpo" in words else None
        keys.remark(
            f"it is the step of {'a reward model' if task == 'rm' else 'DPO'}, as its folder says",
            when=task is not None,
        )
        # DPO's is a model of its own beside adapters too (step2_dpo_finetuning/main.py).
        return {"task": task, "reference": "model" if task == "dpo" else None}
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


def _scorers(keys: Keys) -> Facts:
    """The critic and the reward model, which begin as the same one; of the actor's size where the script does not say which."""
    named = keys.raw(CRITIC)
    if isinstance(named, str) and "$" not in named:
        return {"critic": named, "reward_model": named}
    keys.remark(
        f"{keys.document.shown(CRITIC)} does not say which model: the critic and the reward model are as the actor"
    )
    return {}


@reads(*NAMED, SIZES, facts="model config head", write=lambda facts, keys: {NAMED[0]: facts.get("model")})
def _model(keys: Keys) -> Facts:
    """The model that is trained. Raises `ConfigError` where a script leaves it to a variable without a value."""
    key = next((key for key in NAMED if keys.has(key)), NAMED[0])
    value = keys.raw(key)
    if value is True:
        raise Unknown("is empty", key=keys.document.shown(key), file=keys.file)
    bert = {"head": HEAD} if keys.has("bert_model") else {}
    return bert | ({"model": keys.word(key)} if keys.has(*NAMED) else _sizes(keys))


def _sizes(keys: Keys) -> Facts:
    """The model of bing_bert's file, whose vocabulary its tokenizer has, in whole eights (`turing/models.py`)."""
    text = beside(name, keys) if isinstance(name := keys.raw(SIZES), str) else None
    try:
        config = json.loads(text or "{}").get("bert_model_config")
    except (ValueError, AttributeError):
        config = None
    if not isinstance(config, dict):
        stem = Path(str(name)).stem.lower().replace("_", "-")
        size = next((size for size in ("bert-large", "bert-base") if stem.startswith(size)), None)
        keys.remark(f"{name} is not there, and is taken for {size}, as its name says", when=size is not None)
        return {} if size is None else {"model": size}
    keys.note(SIZES, "logits are made of masked tokens alone", effect="saves", parts="loss transient")
    return {"config": {"model_type": "bert", "tie_word_embeddings": True, **config, "vocab_size": 30528}}


def _engine_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    moved = (facts.get("offload") or "none") != "none"
    present = next((key for key in STAGES if keys.has(key)), STAGES[0])
    return {present: facts.get("zero") or 0, "offload": True if moved else None}


@reads(*STAGES, "offload", facts="zero offload", write=_engine_written)
def _engine(keys: Keys) -> Facts:
    """ZeRO's stage; `--offload` moves the optimizer, and in stage 3 the weights too (`get_train_ds_config`)."""
    if _own(keys) and not keys.has(*STAGES):
        return {}
    stage = next((number for key in STAGES if (number := keys.whole(key, minimum=0)) is not None), 0)
    moved = keys.flag("offload") and stage > 0
    return {"zero": stage, "offload": ("all" if stage == 3 else "optimizer") if moved else "none"}


def _adapters_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    rank = facts.get("lora_rank")
    present = next((key for key in DIMS if keys.has(key)), DIMS[0])
    return {present: rank or None, at.alone: True if rank and not facts.get("modules_to_save") else None}


@reads(
    *DIMS, facts=("lora_rank", "lora_targets", "modules_to_save"), write=_adapters_written, alone="only_optimize_lora"
)
def _adapters(keys: Keys, at: Named) -> Facts:
    """Its own adapters, of the linear layers of all blocks, whose weights they freeze (`dschat/utils/module/lora.py`).

    Without `--only_optimize_lora` what lies outside the blocks is trained as before: embedding and head; norms too, which are
    left out.
    """
    rank = next((number for key in DIMS if (number := keys.whole(key, minimum=0)) is not None), 0)
    whole = None if keys.flag(at.alone) else "embed_tokens,lm_head"
    return {"lora_rank": rank, "lora_targets": "all", "modules_to_save": whole} if rank else {"lora_rank": 0}


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
        _model,
        row(
            "seq_len", "max_seq_len", "max_seq_length", "max_length", "seq_length", "block_size",
            default=lambda keys: None if keys.has(ACTOR) or _own(keys) else 512, add=False,
        ),
        attention(),
        _micro,
        _accumulation,
        _task,
        _engine,
        _adapters,
        fixed(*DROPOUTS, undropped=lambda keys: 0 in [*map(keys.real, DROPOUTS)] or None),
        _precision,
        row(
            "recompute", "gradient_checkpointing", "actor_gradient_checkpointing", "activation_checkpointing",
            words={"true": "full", "false": "none"}, default="none", off="none",
        ),
    ),
)  # fmt: skip
