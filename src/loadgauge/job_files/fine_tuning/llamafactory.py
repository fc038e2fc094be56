"""LLaMA-Factory's YAML, which is TrainingArguments with words of its own."""

from typing import Any

import msgspec

from loadgauge.job_files.fine_tuning.started import started
from loadgauge.job_files.hugging_face.huggingface import (
    BATCH,
    DETERMINISM,
    OPTIMIZER,
    SAVING,
    SHARED,
    TORCH_COMPILE,
    dropout,
    half,
    liger,
)
from loadgauge.job_files.ideas import (
    IDLE,
    SAYABLE,
    Dialect,
    Facts,
    Keys,
    Named,
    answered,
    dora,
    evaluation,
    fixed,
    freeze,
    layers,
    product,
    quantised,
    reads,
    row,
    sayable,
    tower,
)


def _checkpointing_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    word = facts.get("recompute") or "none"
    off: dict[str, Any] = {name: None for name in at.trainers if keys.has(name)} if word == "none" else {}
    return off | {at.key: True if word == "none" else False if keys.has(at.key) else None}


@reads(
    facts="recompute",
    write=_checkpointing_written,
    can={"recompute": ("none", "full")},
    key="disable_gradient_checkpointing",
    trainers=("gradient_checkpointing", "activation_checkpointing"),
)
def _checkpointing(keys: Keys, at: Named) -> Facts:
    asked = any(keys.flag(name) for name in at.trainers)
    keys.refuse(at.key, "contradicts the trainer's own switch", when=asked and keys.flag(at.key))
    return {"recompute": "none" if keys.flag(at.key) else "full"}


OFT = ("oft_target", "oft_block_size", "oft_rank", "module_dropout")
"""Keys of `finetuning_type: oft` (`model/adapter.py`)."""


def _saved(keys: Keys) -> Facts:
    return {"modules_to_save": keys.joined("additional_target")}


ADAPTER_BITS = "quantization_bit"
ADAPTER_SIZE = "oft_rank"
ADAPTER_LORA = product(row("lora_rank", "lora_rank", default=8), layers("lora_target", "all", joined=True))
ADAPTER_OFT = product(row("lora_rank", OFT[1], default=32), layers(OFT[0], "all", joined=True), fixed(adapter="oft"))
ADAPTER_BESIDE = product(
    quantised(
        bits=(ADAPTER_BITS,),
        kind="quantization_type",
        nested="double_quantization",
        method=("quantization_method", {"bnb": "", "bitsandbytes": "", "hqq": "hqq", "eetq": "int8"}),
        model=("model_name_or_path",),
        upcast="none",
    ),
    row("kbit_upcast", "upcast_layernorm", words={"true": "norms", "false": None}),
    dora("use_dora"),
    msgspec.structs.replace(row("modules_to_save", "additional_target", kind="word"), read=_saved),
    # PEFT makes adapters float32 beside 16-bit weights, with pure_bf16 too (get_peft_model's autocast_adapter_dtype).
    fixed(lora_dtype=lambda keys: "float32" if keys.flag("pure_bf16") else None),
)


def _adapter_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    other = facts.get("adapter") or "lora"
    by_name = other == "oft" and facts.get("lora_targets") == "attention"
    if by_name or other not in ("lora", "oft") or not sayable(facts, (*SAYABLE, "hqq")):
        return {}
    there, inner = facts.get("lora_rank") or other == "oft", ADAPTER_OFT if other == "oft" else ADAPTER_LORA
    return {
        **dict.fromkeys((*ADAPTER_LORA.keys, *OFT)),
        at.kind: other if there else "full",
        **(inner.write(facts, keys) if there else {}),
        **ADAPTER_BESIDE.write(facts, keys),
    }


@reads(
    *ADAPTER_LORA.keys,
    facts=("adapter", *ADAPTER_LORA.facts, *ADAPTER_BESIDE.facts),
    write=_adapter_written,
    kind="finetuning_type",
    also=(
        *ADAPTER_BESIDE.keys,
        *OFT,
    ),
)
def _adapter(keys: Keys, at: Named) -> Facts:
    how = keys.choice(at.kind, METHODS) or "lora"
    keys.refuse(
        ADAPTER_BITS,
        "needs finetuning_type lora, not full",
        when=how == "full" and keys.whole(ADAPTER_BITS) is not None,
    )
    if how == "full":
        return {"lora_rank": 0, "qlora": False}
    keys.note(
        ADAPTER_SIZE,
        "says how many blocks there are, whose size is counted as usual",
        parts="optimizer gradients",
        when=how == "oft" and keys.whole(ADAPTER_SIZE, minimum=0),
    )
    keys.note(
        "module_dropout",
        "leaves out OFT's rotations at random",
        "costs",
        "activations transient",
        when=how == "oft" and keys.real("module_dropout"),
    )
    return (ADAPTER_OFT if how == "oft" else ADAPTER_LORA).read(keys) | ADAPTER_BESIDE.read(keys)


METHODS = {"lora": "lora", "full": "full", "freeze": "full", "oft": "oft"}
"""`finetuning_type`: whole weights are trained, all of them or some (`partial.freeze`), or adapters."""
OWN_OPTIMIZERS = (
    "use_muon", "use_galore", "galore_rank", "galore_update_interval", "galore_layerwise", "galore_target", "use_apollo",
    "apollo_rank", "apollo_update_interval", "apollo_layerwise", "apollo_target", "use_badam", "badam_mode", "use_adam_mini",
)  # fmt: skip
"""Keys of the optimizers that LLaMA-Factory builds itself (`train/trainer_utils.py`)."""


def _optimizer_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    name = {"muon": "muon", "badam": "badam", "adam-mini": "adam_mini"}.get(facts["optimizer"])
    switches: dict[str, Any] = {
        f"use_{each}": True if each == name else None for each in ("muon", "badam", "adam_mini", "galore", "apollo")
    }
    return (dict.fromkeys(OPTIMIZER.keys) if name else OPTIMIZER.write(facts, keys)) | switches


@reads(*OPTIMIZER.keys, *OWN_OPTIMIZERS, facts="optimizer", write=_optimizer_written)
def _optimizer(keys: Keys) -> Facts:
    if keys.flag("use_muon"):
        return {"optimizer": "muon"}
    for name, rank, interval in (
        ("galore", "galore_rank", "galore_update_interval"),
        ("apollo", "apollo_rank", "apollo_update_interval"),
    ):
        if keys.flag(f"use_{name}"):
            layerwise = "-layerwise" if keys.flag(f"{name}_layerwise") else ""
            keys.note(
                f"{name}_target",
                "projects gradients of some layers alone",
                "costs",
                "optimizer",
                4,
                when=str(keys.raw(f"{name}_target") or "all") != "all",
            )
            return {
                "optimizer": f"{name}{layerwise}:rank={keys.whole(rank) or 16},every={(keys.whole(interval) or 200)}"
            }
    if keys.flag("use_badam"):
        keys.note(
            "badam_mode",
            "trains a share of each matrix, counted as one layer at a time",
            parts="gradients optimizer",
            when=str(keys.raw("badam_mode") or "layer") != "layer",
        )
        return {"optimizer": "badam"}
    return {"optimizer": "adam-mini"} if keys.flag("use_adam_mini") else OPTIMIZER.read(keys)


@reads(facts="weights frozen_weights", inner=half(pure="pure_bf16"))
def _precision(keys: Keys, at: Named) -> Facts:
    """What is trained is made float32 unless `pure_bf16` is on (`cast_trainable_params_to_fp32` of its adapter.py); a reference
    stays in the dtype that is computed in (`create_ref_model` of its trainer_utils.py, `load_model` where nothing is trained)."""
    facts = at.inner.read(keys)
    whole = keys.choice("finetuning_type", METHODS) == "full"
    if whole and keys.flag("use_badam"):  # which leaves what it trains in the checkpoint's 16 bits
        half_of = HALVES.get(facts["precision"])
        return {"precision": facts["precision"] if half_of else "bf16-pure", "weights": half_of}
    # Under adapters the base is in the checkpoint's dtype (`infer_optim_dtype` of its misc.py).
    usual = "auto" if facts["precision"] == "fp32" and not whole else None
    computed = HALVES.get(facts["precision"]) if whole else None
    return facts | {
        "weights": "float32" if computed else usual,
        "frozen_weights": computed if _refers(keys) else None,
    }


HALVES = {"bf16": "bfloat16", "fp16": "float16"}
"""Dtypes of 16 bits by the precision that computes in them."""


STAGES = {"sft": None, "pt": None, "rm": "rm", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}
PREFERENCES = {"sigmoid": "dpo", "hinge": "dpo", "kto_pair": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
"""`pref_loss`, of stage dpo."""


ADAPTERS = "adapter"
"""`reward_model_type: lora`, the usual one, as `--reward-model` says it: adapters of the trained model that score."""


def _refers(keys: Keys) -> bool:
    """Return whether a file's task compares with a reference."""
    stage = keys.word("stage")
    return stage in ("kto", "ppo") or (stage == "dpo" and keys.word("pref_loss") not in ("orpo", "simpo"))


@reads(
    facts="reference",
    when=_refers,
    write=lambda facts, keys, at: {
        at.named: facts.get("model")
        if facts.get("reference") == "model" and facts.get("lora_rank") and facts.get("adapter") != "oft"
        else None
    },
    named="ref_model",
    adapted="ref_model_adapters",
    quantised="ref_model_quantization_bit",
)
def _reference(keys: Keys, at: Named) -> Facts:
    """Where a reference comes from: beside LoRA the model without its adapters, unless one is named; beside anything else a copy
    (`create_ref_model` of `train/trainer_utils.py`)."""
    for key, remark in (
        (at.adapted, "gives the reference adapters of its own, which are not counted"),
        (at.quantised, "quantises the reference, which is counted in 16 bits"),
    ):
        keys.note(key, remark, "either", "weights gathered", 0.5, when=keys.raw(key) not in (None, False, 0, "0"))
    if not keys.has(at.named):
        return {"reference": None if keys.choice("finetuning_type", METHODS) in (None, "lora", "full") else "model"}
    keys.note(
        at.named,
        "is counted as a copy of the model that is trained",
        "either",
        "weights gathered",
        0.5,
        when=keys.word(at.named) != keys.word("model_name_or_path"),
    )
    return {"reference": "model"}


def _answers(keys: Keys, at: Named) -> Facts:
    """PPO: answers of a mini-batch at a time, by `generate`; the critic is a value of each token beside the actor's logits,
    the reference the model without its adapters, or a second one (`train/ppo/trainer.py`, `train/ppo/workflow.py`)."""
    named, kind = keys.word(at.scores), keys.word(at.how) or "lora"
    keys.refuse(at.stage, f"'ppo' needs a reward model ({at.scores})", when=named is None)
    keys.refuse(at.how, f"{kind!r} is not read; lora, full and api are", when=kind not in ("lora", "full", "api"))
    keys.refuse(
        at.how if keys.has(at.how) else at.scores,
        "scores by adapters (reward_model_type: lora), which need finetuning_type lora",
        when=kind == "lora" and (keys.choice("finetuning_type", METHODS) or "lora") != "lora",
    )
    keys.note(
        at.bits,
        "quantises the reward model, which is counted whole",
        "saves",
        "weights",
        0.5,
        when=keys.whole(at.bits, minimum=0),
    )
    keys.note(
        at.adapted,
        "adds adapters to the reward model, which are not counted",
        "costs",
        "weights",
        0.1,
        when=keys.has(at.adapted),
    )
    each, rounds = keys.whole("per_device_train_batch_size") or 8, keys.whole("gradient_accumulation_steps") or 1
    return {
        "task": "ppo",
        "samples": 1,
        "generated": each * rounds * (keys.whole(at.buffer) or 1),
        "epochs": keys.whole(at.epochs) or 4,
        "answers": str(keys.whole(at.longest) or 1024),
        "prompt_len": keys.whole("cutoff_len") or 2048,
        "critic": "shared",
        "reward_model": {"full": named, "lora": ADAPTERS}.get(kind),
        "rollout": f"hf:batch={each}",
    }


def _stage_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    task = facts.get("task") or "sft"
    named = facts.get("reward_model")
    stated = keys.raw(at.stage)
    if task in PREFERENCES:
        usual = task == "dpo" and not keys.has(at.loss)
        return {at.stage: "dpo", at.loss: None if usual else "sigmoid" if task == "dpo" else task}
    if task == "ppo":
        scores = {at.how: keys.word(at.how) or "api"} if named is None else {at.scores: named, at.how: "full"}
        if named == ADAPTERS:
            scores = {at.scores: keys.word(at.scores), at.how: "lora" if keys.has(at.how) else None}
        own = {at.epochs: facts.get("epochs"), **answered(facts, at.longest)}
        return {at.stage: "ppo", at.loss: None, **own, **scores}
    kept = stated if task == "sft" and stated in ("sft", "pt") else task
    return {at.stage: kept, at.loss: None} if task in STAGES else {}


@reads(
    facts="task samples generated prompts epochs answers prompt_len critic reward_model rollout",
    write=_stage_written,
    stage="stage",
    loss="pref_loss",
    buffer="ppo_buffer_size",
    epochs="ppo_epochs",
    longest="max_new_tokens",
    scores="reward_model",
    how="reward_model_type",
    bits="reward_model_quantization_bit",
    adapted="reward_model_adapters",
)
def _stage(keys: Keys, at: Named) -> Facts:
    """Return what is trained for: `stage`, and of preferences the loss."""
    task = keys.choice(at.stage, STAGES)
    if task == "ppo":
        return _answers(keys, at)
    return {"task": (keys.choice(at.loss, PREFERENCES) or "dpo") if task == "dpo" else task}


@reads()
def _trains(keys: Keys) -> Facts:
    """Return whether a file trains at all: one that writes a model, predicts or starts a server does not (`do_train`, `cli.py`)."""
    train, predict, export = "do_train", "do_predict", "export_dir"
    usual = ("dataset", "per_device_train_batch_size", "learning_rate", "output_dir", "cutoff_len")
    if keys.has(export) and not keys.flag(train):
        raise keys.idle(export, "writes a model with its adapters; the file trains nothing")
    for key in (predict, "do_eval"):
        if keys.flag(key) and not keys.flag(train):
            raise keys.idle(key, f"without {train} trains nothing; the file is no training job")
    keys.refuse(
        "infer_backend",
        "says how answers are generated; the file is no training job",
        when=keys.has("infer_backend") and not keys.has(train, *usual),
    )
    return {}


LOSSES = ("use_dft_loss", "use_eaft_loss", "use_asft_loss")


@reads(*LOSSES, facts="loss", write=lambda facts, keys: {} if facts.get("loss") == "float32" else dict.fromkeys(LOSSES))
def _losses(keys: Keys) -> Facts:
    """Other losses than cross-entropy's mean, of float32 logits (`train/trainer_utils.py`)."""
    _, entropic, anchored = LOSSES
    if not any(keys.flag(name) for name in LOSSES):
        return {}
    keys.note(entropic, "copies the logits once more for their entropy", "costs", "loss", 0.5, when=keys.flag(entropic))
    keys.note(
        anchored,
        "compares with a frozen copy of the model, whose logits are kept too",
        "costs",
        "weights gathered loss transient",
        2.0,
        when=keys.flag(anchored),
    )
    return {"loss": "float32"}


ATTENTION = {"auto": "flash", "sdpa": "flash", "fa2": "fa2", "fa3": "fa3", "disabled": "eager"}
"""`flash_attn`."""

LLAMAFACTORY = Dialect(
    name="llamafactory",
    trainers="softmax",
    title="LLaMA-Factory",
    versions="LLaMA-Factory 0.9",
    syntaxes=("yaml", "json", "argv"),
    auto=True,
    objects=frozenset({"fsdp_config", "deepspeed"}),
    blank={
        "yaml": "stage: sft\ndo_train: true\noutput_dir: output\n",
        "json": '{\n  "stage": "sft",\n  "do_train": true,\n  "output_dir": "output"\n}\n',
        "argv": "torchrun src/train.py --stage sft --do_train True --output_dir output\n",
    },
    ideas=(
        _trains,
        *SHARED,
        started("ray_num_workers"),
        _stage,
        _reference,
        row("seq_len", "cutoff_len", default=2048),
        *BATCH,
        _optimizer,
        _adapter,
        freeze(),
        tower("freeze_vision_tower", "freeze_multi_modal_projector", "image_max_pixels", body="freeze_language_model"),
        _checkpointing,
        _precision,
        row("attention", "flash_attn", words=ATTENTION, default="flash"),
        liger("enable_liger_kernel", "use_liger_kernel"),
        _losses,
        dropout("lora_dropout"),
        row(
            "activation_offload",
            "use_unsloth_gc",
            words={"true": "checkpoints", "false": "none"},
            default="none",
            off="none",
        ),
        evaluation(),
        SAVING,
        TORCH_COMPILE,
        DETERMINISM,
    ),
    programs={r"\bllamafactory-cli (?:export|chat|webchat|webui|api|eval)\b": IDLE},
)
