"""LLaMA-Factory's YAML, which is TrainingArguments with words of its own."""

from __future__ import annotations

from typing import Any

from loadgauge.job_files.fine_tuning.started import started
from loadgauge.job_files.hugging_face.huggingface import (
    BATCH,
    OPTIMIZER,
    SAVING,
    SHARED,
    TORCH_COMPILE,
    dropout,
    half,
    liger,
    targets,
)
from loadgauge.job_files.ideas.evaluation import evaluation
from loadgauge.job_files.ideas.partial import freeze, tower
from loadgauge.job_files.ideas.table import IDLE, Dialect, Facts, Idea, Keys, names_in, row
from loadgauge.job_files.ideas.words import stored


def _checkpointing() -> Idea:
    key, trainers = "disable_gradient_checkpointing", ("gradient_checkpointing", "activation_checkpointing")

    def read(keys: Keys) -> Facts:
        asked = any(keys.flag(name) for name in trainers)
        if asked and keys.flag(key):
            raise keys.wrong(key, "contradicts the trainer's own switch")
        return {"recompute": "none" if keys.flag(key) else "full"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        if word not in ("none", "full"):
            return {}
        off: dict[str, Any] = {name: None for name in trainers if keys.has(name)} if word == "none" else {}
        return off | {key: True if word == "none" else False if keys.has(key) else None}

    return Idea(keys=(key, *trainers), facts=("recompute",), read=read, write=write)


OFT = ("oft_target", "oft_block_size", "oft_rank", "module_dropout")
"""Keys of `finetuning_type: oft` (`model/adapter.py`)."""


def _adapter() -> Idea:
    inner = targets("lora_rank", "lora_target", ("finetuning_type", "full", "lora"), 8, "all")
    bits, kind, nested, method = "quantization_bit", "quantization_type", "double_quantization", "quantization_method"

    def read(keys: Keys) -> Facts:
        how = keys.choice("finetuning_type", METHODS) or "lora"
        number = keys.whole(bits)
        if how == "full":
            if number is not None:
                raise keys.wrong(bits, "goes with finetuning_type lora, not with full")
            return {"lora_rank": 0, "qlora": False}
        if number not in (None, 4, 8):
            keys.note(bits, "is counted in 4 bits up to 4, and in 8 above", parts="weights", share=0.5)
            number = 4 if number < 4 else 8
        fours = keys.choice(kind, {"nf4": "nf4", "fp4": "fp4"}) or "nf4"
        library = keys.choice(method, {"bnb": "bnb", "bitsandbytes": "bnb", "hqq": "hqq"}) or "bnb"
        facts = {"lora_rank": keys.whole("lora_rank") or 8, "lora_targets": inner.read(keys).get("lora_targets")}
        facts["lora_targets"] = facts.get("lora_targets") or "all"
        base = "nf4-single" if keys.flag(nested) is False else "nf4"
        own = stored(keys.word("model_name_or_path"))
        if library == "hqq":
            base = "hqq"  # its 8 bits are as bitsandbytes'
        elif fours == "fp4" and number == 4:
            if keys.flag(nested) is not False:
                keys.note(
                    kind, "has quantised scales, of which there are fewer than are counted", "saves", "weights", 0.1
                )
            base = "fp4"
        if how == "oft":
            if keys.whole("oft_rank", minimum=0):
                keys.note(
                    "oft_rank",
                    "says how many blocks there are, whose size is counted as usual",
                    parts="optimizer gradients",
                )
            if keys.real("module_dropout"):
                keys.note("module_dropout", "leaves out OFT's rotations at random", "costs", "activations transient")
            chosen = keys.words("oft_target")
            size = keys.whole("oft_block_size") or 32
            named = None if chosen in (None, ["all"]) else ",".join(chosen or [])
            facts = {"adapter": "oft", "lora_rank": size, "lora_targets": named or "all"}
        upcast = "norms" if keys.flag("upcast_layernorm") else "none" if number is not None else None
        save = keys.words("additional_target")
        return facts | {
            "qlora": number is not None or own in ("gptq", "awq"),
            "base": (own if own != "aqlm" else None) if number is None else "int8" if number == 8 else base,
            "kbit_upcast": upcast,
            "use_dora": keys.flag("use_dora") or None,
            "modules_to_save": ",".join(save) if save else None,
            # PEFT makes adapters float32 beside 16-bit weights, with pure_bf16 too (get_peft_model's autocast_adapter_dtype).
            "lora_dtype": "float32" if keys.flag("pure_bf16") else None,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values = inner.write(facts, keys)
        other = facts.get("adapter") or "lora"
        if other not in ("lora", "oft"):
            return {}
        if other == "oft":
            words = facts.get("lora_targets") or "all"
            if words == "attention":
                return {}
            values = dict.fromkeys(inner.keys) | {
                "finetuning_type": "oft",
                "oft_target": words,
                "oft_block_size": facts.get("lora_rank"),
            }
        else:
            values |= dict.fromkeys(OFT)
        if isinstance(values.get("lora_target"), list):
            values["lora_target"] = ",".join(values["lora_target"])
        base, quantised = facts.get("base") or "nf4", bool(facts.get("qlora"))
        if quantised and base not in ("nf4", "nf4-single", "int8", "hqq", "fp4"):
            return {}
        single = quantised and base in ("nf4-single", "fp4")
        turned = base == "hqq" and quantised
        return values | {
            bits: (8 if base == "int8" else 4) if quantised else None,
            "upcast_layernorm": True if facts.get("kbit_upcast") == "norms" else None,
            "use_dora": True if facts.get("use_dora") else None,
            "additional_target": facts.get("modules_to_save"),
            nested: False if single else True if keys.has(nested) else None,
            method: "hqq" if turned else "bnb" if keys.has(method) and quantised else None,
            kind: "fp4" if quantised and base == "fp4" else "nf4" if keys.has(kind) and quantised else None,
        }

    return Idea(
        keys=(*inner.keys, bits, kind, nested, method, "upcast_layernorm", "use_dora", "additional_target", *OFT),
        facts=(
            "adapter",
            "lora_rank",
            "lora_targets",
            "qlora",
            "base",
            "kbit_upcast",
            "use_dora",
            "modules_to_save",
            "lora_dtype",
        ),
        read=read,
        write=write,
    )


METHODS = {"lora": "lora", "full": "full", "freeze": "full", "oft": "oft"}
"""`finetuning_type`: whole weights are trained, all of them or some (`partial.freeze`), or adapters."""
OWN_OPTIMIZERS = (
    "use_muon", "use_galore", "galore_rank", "galore_update_interval", "galore_layerwise", "galore_target", "use_apollo",
    "apollo_rank", "apollo_update_interval", "apollo_layerwise", "apollo_target", "use_badam", "badam_mode", "use_adam_mini",
)  # fmt: skip
"""Keys of the optimizers that LLaMA-Factory builds itself (`train/trainer_utils.py`)."""


def _optimizer() -> Idea:
    def read(keys: Keys) -> Facts:
        if keys.flag("use_muon"):
            return {"optimizer": "muon"}
        for name, rank, interval in (
            ("galore", "galore_rank", "galore_update_interval"),
            ("apollo", "apollo_rank", "apollo_update_interval"),
        ):
            if keys.flag(f"use_{name}"):
                layerwise = "-layerwise" if keys.flag(f"{name}_layerwise") else ""
                if str(keys.raw(f"{name}_target") or "all") != "all":
                    keys.note(f"{name}_target", "projects gradients of some layers alone", "costs", "optimizer", 4)
                every = keys.whole(interval) or 200
                return {"optimizer": f"{name}{layerwise}:rank={keys.whole(rank) or 16},every={every}"}
        if keys.flag("use_badam"):
            if str(keys.raw("badam_mode") or "layer") != "layer":
                keys.note(
                    "badam_mode",
                    "trains a share of each matrix, counted as one layer at a time",
                    parts="gradients optimizer",
                )
            return {"optimizer": "badam"}
        return {"optimizer": "adam-mini"} if keys.flag("use_adam_mini") else OPTIMIZER.read(keys)

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        whole = facts["optimizer"]
        name = {"muon": "muon", "badam": "badam", "adam-mini": "adam_mini"}.get(whole)
        switches: dict[str, Any] = {
            f"use_{each}": True if each == name else None for each in ("muon", "badam", "adam_mini", "galore", "apollo")
        }
        return (dict.fromkeys(OPTIMIZER.keys) if name else OPTIMIZER.write(facts, keys)) | switches

    return Idea(keys=(*OPTIMIZER.keys, *OWN_OPTIMIZERS), facts=("optimizer",), read=read, write=write)


def _precision() -> Idea:
    """What is trained is made float32 unless `pure_bf16` is on (`cast_trainable_params_to_fp32` of its adapter.py); a reference
    stays in the dtype that is computed in (`create_ref_model` of its trainer_utils.py, `load_model` where nothing is trained)."""
    inner = half(pure="pure_bf16")

    def read(keys: Keys) -> Facts:
        facts = inner.read(keys)
        whole = keys.choice("finetuning_type", METHODS) == "full"
        if whole and keys.flag("use_badam"):  # which leaves what it trains in the checkpoint's 16 bits
            half_of = {"bf16": "bfloat16", "fp16": "float16"}.get(facts["precision"])
            return {"precision": facts["precision"] if half_of else "bf16-pure", "weights": half_of}
        # Under adapters the base is in the checkpoint's dtype (`infer_optim_dtype` of its misc.py).
        usual = "auto" if facts["precision"] == "fp32" and not whole else None
        computed = HALVES.get(facts["precision"]) if whole else None
        return facts | {
            "weights": "float32" if computed else usual,
            "frozen_weights": computed if _refers(keys) else None,
        }

    return Idea(keys=inner.keys, facts=("precision", "weights", "frozen_weights"), read=read, write=inner.write)


HALVES = {"bf16": "bfloat16", "fp16": "float16"}
"""Dtypes of 16 bits by the precision that computes in them."""


STAGES = {"sft": None, "pt": None, "rm": "rm", "dpo": "dpo", "kto": "kto", "ppo": "ppo"}
PREFERENCES = {"sigmoid": "dpo", "hinge": "dpo", "kto_pair": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
"""`pref_loss`, of stage dpo."""


REFERENCE = ("ref_model", "ref_model_adapters", "ref_model_quantization_bit")
ADAPTERS = "adapter"
"""`reward_model_type: lora`, the usual one, as `--reward-model` says it: adapters of the trained model that score."""


def _refers(keys: Keys) -> bool:
    """Return whether a file's task compares with a reference."""
    stage = keys.word("stage")
    return stage in ("kto", "ppo") or (stage == "dpo" and keys.word("pref_loss") not in ("orpo", "simpo"))


def _reference() -> Idea:
    """Where a reference comes from: beside LoRA the model without its adapters, unless one is named; beside anything else a copy
    (`create_ref_model` of `train/trainer_utils.py`)."""
    named, adapted, quantised = REFERENCE
    trained = "model_name_or_path"

    def read(keys: Keys) -> Facts:
        if not _refers(keys):
            return {}
        for key, what in (
            (adapted, "gives the reference adapters of its own, which are not counted"),
            (quantised, "quantises the reference, which is counted in 16 bits"),
        ):
            if keys.raw(key) not in (None, False, 0, "0"):
                keys.note(key, what, "either", "weights gathered", 0.5)
        if keys.has(named):
            if keys.word(named) != keys.word(trained):
                keys.note(named, "is counted as a copy of the model that is trained", "either", "weights gathered", 0.5)
            return {"reference": "model"}
        return {"reference": None if keys.choice("finetuning_type", METHODS) in (None, "lora", "full") else "model"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        whole = facts.get("adapter") == "oft" or not facts.get("lora_rank")
        second = facts.get("reference") == "model" and not whole
        return {named: facts.get("model") if second else None}

    return Idea(keys=REFERENCE, facts=("reference",), read=read, write=write)


def _stage() -> Idea:
    """Return what is trained for: `stage`, and of preferences the loss."""
    stage, loss = "stage", "pref_loss"
    buffer, epochs, longest = "ppo_buffer_size", "ppo_epochs", "max_new_tokens"
    scores, how, bits = "reward_model", "reward_model_type", "reward_model_quantization_bit"
    adapted = "reward_model_adapters"

    def answers(keys: Keys) -> Facts:
        """PPO: answers of a mini-batch at a time, by `generate`; the critic is a value of each token beside the actor's logits,
        the reference the model without its adapters, or a second one (`train/ppo/trainer.py`, `train/ppo/workflow.py`)."""
        named, kind = keys.word(scores), keys.word(how) or "lora"
        if named is None:
            raise keys.wrong(stage, f"'ppo' needs a reward model ({scores})")
        if kind not in ("lora", "full", "api"):
            raise keys.wrong(how, f"{kind!r} is not read; lora, full and api are")
        if kind == "lora" and (keys.choice("finetuning_type", METHODS) or "lora") != "lora":
            raise keys.wrong(
                how if keys.has(how) else scores,
                "scores by adapters (reward_model_type: lora), which go with finetuning_type lora",
            )
        if keys.whole(bits, minimum=0):
            keys.note(bits, "quantises the reward model, which is counted whole", "saves", "weights", 0.5)
        if keys.has(adapted):
            keys.note(adapted, "adds adapters to the reward model, which are not counted", "costs", "weights", 0.1)
        each, rounds = keys.whole("per_device_train_batch_size") or 8, keys.whole("gradient_accumulation_steps") or 1
        return {
            "task": "ppo",
            "samples": 1,
            "generated": each * rounds * (keys.whole(buffer) or 1),
            "epochs": keys.whole(epochs) or 4,
            "answers": str(keys.whole(longest) or 1024),
            "prompt_len": keys.whole("cutoff_len") or 2048,
            "critic": "shared",
            "reward_model": {"full": named, "lora": ADAPTERS}.get(kind),
            "rollout": f"hf:batch={each}",
        }

    def read(keys: Keys) -> Facts:
        task = keys.choice(stage, STAGES)
        if task == "ppo":
            return answers(keys)
        return {"task": (keys.choice(loss, PREFERENCES) or "dpo") if task == "dpo" else task}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        task = facts.get("task")
        if task in PREFERENCES:
            usual = task == "dpo" and not keys.has(loss)
            return {stage: "dpo", loss: None if usual else "sigmoid" if task == "dpo" else task}
        if task == "ppo":
            length, own = str(facts.get("answers") or ""), keys.word(how)
            named = facts.get("reward_model")
            values: dict[str, Any] = {stage: "ppo", loss: None, epochs: facts.get("epochs")}
            values |= {longest: int(length)} if length.isdecimal() else {}
            if named == ADAPTERS:
                return values | {scores: keys.word(scores), how: "lora" if keys.has(how) else None}
            return values | ({scores: named, how: "full"} if named is not None else {how: own or "api"})
        if task not in (None, "sft", *STAGES):
            return {}
        own = keys.raw(stage)
        return {
            stage: task if task is not None and task != "sft" else own if own in ("sft", "pt") else "sft",
            loss: None,
        }

    owned = (stage, loss, buffer, epochs, longest, scores, how, bits, adapted)
    facts = names_in("task samples generated prompts epochs answers prompt_len critic reward_model rollout")
    return Idea(keys=owned, facts=facts, read=read, write=write)


def _trains() -> Idea:
    """Return whether a file trains at all: one that writes a model, predicts or starts a server does not (`do_train`, `cli.py`)."""
    train, predict, export = "do_train", "do_predict", "export_dir"
    usual = ("dataset", "per_device_train_batch_size", "learning_rate", "output_dir", "cutoff_len")

    def read(keys: Keys) -> Facts:
        if keys.has(export) and not keys.flag(train):
            raise keys.idle(export, "writes a model with its adapters; the file trains nothing")
        for key in (predict, "do_eval"):
            if keys.flag(key) and not keys.flag(train):
                raise keys.idle(key, f"without {train} trains nothing; the file is no training job")
        if keys.has("infer_backend") and not keys.has(train, *usual):
            raise keys.wrong("infer_backend", "says how answers are generated; the file is no training job")
        return {}

    return Idea(keys=(), facts=(), read=read, write=lambda facts, keys: {})


LOSSES = ("use_dft_loss", "use_eaft_loss", "use_asft_loss")


def _losses() -> Idea:
    """Other losses than cross-entropy's mean, of float32 logits (`train/trainer_utils.py`)."""
    _, entropic, anchored = LOSSES

    def read(keys: Keys) -> Facts:
        if not any(keys.flag(name) for name in LOSSES):
            return {}
        if keys.flag(entropic):
            keys.note(entropic, "copies the logits once more for their entropy", "costs", "loss", 0.5)
        if keys.flag(anchored):
            why = "compares with a frozen copy of the model, whose logits are kept too"
            keys.note(anchored, why, "costs", "weights gathered loss transient", 2.0)
        return {"loss": "float32"}

    return Idea(
        keys=LOSSES,
        facts=("loss",),
        read=read,
        write=lambda facts, keys: {} if facts.get("loss") == "float32" else dict.fromkeys(LOSSES),
    )


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
        _trains(),
        *SHARED,
        started("ray_num_workers"),
        _stage(),
        _reference(),
        row("seq_len", "cutoff_len", default=2048),
        *BATCH,
        _optimizer(),
        _adapter(),
        freeze(),
        tower("freeze_vision_tower", "freeze_multi_modal_projector", "image_max_pixels"),
        _checkpointing(),
        _precision(),
        row("attention", "flash_attn", words=ATTENTION, default="flash"),
        liger("enable_liger_kernel", "use_liger_kernel"),
        _losses(),
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
    ),
    programs={r"\bllamafactory-cli (?:export|chat|webchat|webui|api|eval)\b": IDLE},
)
