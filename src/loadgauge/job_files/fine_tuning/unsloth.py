"""Unsloth's scripts and notebooks: the keyword arguments of its calls, and of TRL's SFTConfig beside them. Nothing is run."""

from __future__ import annotations

from typing import Any

from loadgauge.job_files.ideas.evaluation import evaluation
from loadgauge.job_files.ideas.optimizers import optimizer
from loadgauge.job_files.ideas.partial import adapted_layers
from loadgauge.job_files.ideas.table import Dialect, Facts, Idea, Keys, names_in, row
from loadgauge.job_files.ideas.words import TORCH_OPTIMIZERS
from loadgauge.job_files.reading.calls import Calls

LOADERS = ("FastLanguageModel", "FastModel", "FastVisionModel", "FastQwen2Model", "FastLlamaModel", "FastMistralModel")
SECTIONS = {f"{name}.from_pretrained": "model" for name in LOADERS} | {
    **{f"{name}.get_peft_model": "peft" for name in LOADERS},
    "SFTConfig": "args", "TrainingArguments": "args", "UnslothTrainingArguments": "args",
    "trl.SFTConfig": "args", "transformers.TrainingArguments": "args",
    "SFTTrainer": "trainer", "UnslothTrainer": "trainer", "trl.SFTTrainer": "trainer",
}  # fmt: skip
"""Calls that are read, and the section of a key that each of their arguments gets."""
FIRST = {"model": "model_name", "peft": "model"}
"""What the first argument without a name is."""
ONCE = frozenset({"model"})
"""Sections of which the first call counts: a model that is loaded again at the end is the one that was trained."""
WHOLE = ("embed_tokens", "lm_head")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TELLS = ("is_bfloat16_supported", "is_bf16_supported")
"""Calls that ask the GPU for bfloat16, which those since Ampere have."""
OTHER_TRAINERS = {
    r"\b(GRPO|DPO|KTO|ORPO|PPO|RLOO|CPO|Reward)(Trainer|Config)\b": "uses another trainer than SFT",
    r"\bFastVisionModel\b": "trains a vision model",
    r"\bSentenceTransformerTrainer\b": "trains a model of embeddings",
}


def _own(keys: Keys) -> bool:
    """Whether the arguments are SFTConfig's, which Unsloth gives defaults of its own; TrainingArguments' stay as they are."""
    return any(name.endswith("SFTConfig") for name in getattr(keys.document, "program", ()))


def _asks(keys: Keys, key: str) -> bool | None:
    """The value of `bf16` or `fp16`, where it may be a question to the GPU."""
    value = keys.raw(key)
    if isinstance(value, str) and any(name in value for name in TELLS):
        return "not " not in value
    return keys.flag(key)


def _adapter() -> Idea:
    rank, modules, dropped, save = "peft.r", "peft.target_modules", "peft.lora_dropout", "peft.modules_to_save"
    dora = "peft.use_dora"
    four, eight, half, whole = (
        f"model.{name}" for name in ("load_in_4bit", "load_in_8bit", "load_in_16bit", "full_finetuning")
    )

    def read(keys: Keys) -> Facts:
        adapters = any(name.startswith("peft.") for name in keys.document.names())
        if keys.flag(whole):
            if adapters:
                raise keys.wrong(whole, "contradicts get_peft_model")
            return {"lora_rank": 0, "qlora": False}
        if not adapters:
            raise keys.wrong(
                rank, "get_peft_model is not called, nor is full_finetuning=True given; nothing would be trained"
            )
        chosen = keys.words(modules)
        # As targets they are trained whole too (`_redirect_embedding_targets` of models/llama.py).
        named = [*(keys.words(save) or ()), *(chosen or ())]
        saved = [name for name in WHOLE if name in named]
        other = [name for name in keys.words(save) or () if name not in WHOLE]
        if other:
            raise keys.wrong(save, f"{other[0]!r} is not read; {' and '.join(WHOLE)} are")
        chosen = None if chosen is None else [name for name in chosen if name not in WHOLE]
        everything = not chosen or chosen == ["all-linear"] or set(chosen) == set(LINEAR)
        bits = "int8" if keys.flag(eight) else "nf4" if keys.flag(four) is not False and not keys.flag(half) else None
        return {
            "lora_rank": keys.whole(rank) or 16,
            "lora_targets": "all" if everything else ",".join(chosen or ()),
            "lora_dropout": keys.real(dropped) or 0.0,
            "qlora": bits is not None,
            "base": bits,
            "modules_to_save": ",".join(saved) or None,
            "use_dora": keys.flag(dora) or None,
            # Adapters are float32, and nothing that is frozen is (unsloth_zoo's `prepare_model_for_training`).
            "kbit_upcast": "none" if bits else None,
            "lora_dtype": "float32",
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if not facts.get("lora_rank"):
            return {}
        quantised = bool(facts.get("qlora"))
        base, whole_ones = facts.get("base") or "nf4", facts.get("modules_to_save")
        if quantised and base not in ("nf4", "int8"):
            return {}
        words_of = facts.get("lora_targets") or "all"
        listed = {"all": list(LINEAR), "attention": list(LINEAR[:4])}.get(words_of) or words_of.split(",")
        return {
            rank: facts["lora_rank"],
            modules: listed,
            dropped: facts.get("lora_dropout") or 0,
            four: quantised and base == "nf4",
            eight: True if quantised and base == "int8" else None,
            save: whole_ones.split(",") if whole_ones else None,
            dora: True if facts.get("use_dora") else None,
        }

    return Idea(
        keys=(rank, modules, dropped, save, dora, four, eight, half, whole),
        facts=names_in(
            "lora_rank lora_targets qlora base lora_dropout modules_to_save use_dora kbit_upcast lora_dtype"
        ),
        read=read,
        write=write,
    )


def _checkpointing() -> Idea:
    key, other, trainers = (
        "peft.use_gradient_checkpointing",
        "model.use_gradient_checkpointing",
        "args.gradient_checkpointing",
    )

    def read(keys: Keys) -> Facts:
        word = next((value for name in (key, other) if (value := keys.raw(name)) is not None), "unsloth")
        off = word is False or str(word).lower() == "false"
        # With its own word the inputs of layers go to the host (unsloth_zoo's `Unsloth_Offloaded_Gradient_Checkpointer`).
        moved = "checkpoints" if word == "unsloth" else "none"
        return {"recompute": "full" if not off or keys.flag(trainers) else "none", "activation_offload": moved}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        if word not in ("none", "full"):
            return {}
        moved = facts.get("activation_offload") or "none"
        if moved == "all" or (moved == "checkpoints" and word == "none"):
            return {}
        values: dict[str, Any] = {key: "unsloth" if moved == "checkpoints" else word == "full"}
        return values | ({trainers: word == "full"} if keys.has(trainers) else {})

    return Idea(keys=(key, other, trainers), facts=("recompute", "activation_offload"), read=read, write=write)


def _precision() -> Idea:
    bf16, fp16, loaded = "args.bf16", "args.fp16", "model.dtype"

    def read(keys: Keys) -> Facts:
        half = {"bf16": _asks(keys, bf16), "fp16": _asks(keys, fp16)}
        if half["bf16"] and half["fp16"]:
            raise keys.wrong(fp16, "contradicts bf16")
        dtype = str(keys.raw(loaded) or "").removeprefix("$torch.")
        facts: Facts = {"precision": "fp16" if half["fp16"] or dtype == "float16" else "bf16"}
        # Whole models are loaded in bfloat16 too, and trained so.
        return facts | {"weights": "bfloat16" if facts["precision"] == "bf16" else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name = facts["precision"]
        return {bf16: name == "bf16", fp16: name == "fp16"} if name in ("bf16", "fp16") else {}

    return Idea(keys=(bf16, fp16, loaded), facts=("precision", "weights"), read=read, write=write)


def _length() -> Idea:
    names = ("model.max_seq_length", "args.max_length", "args.max_seq_length", "trainer.max_seq_length")

    def read(keys: Keys) -> Facts:
        lengths = [length for name in names if (length := keys.whole(name)) is not None]
        return {"seq_len": min(lengths) if lengths else 2048}  # the trainer truncates to the shorter one

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        present = [name for name in names if keys.has(name)] or [names[0]]
        return dict.fromkeys(present, facts["seq_len"])

    return Idea(keys=names, facts=("seq_len",), read=read, write=write)


def script(text: str) -> Calls:
    """The calls of a script or a notebook; those of trainers count where the model is Unsloth's."""
    return Calls(text, SECTIONS.get, FIRST, ONCE)


SCRIPT = """from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained(
    max_seq_length=2048,
)
model = FastLanguageModel.get_peft_model(
    model,
    lora_alpha=16,
)
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=dataset,
    args=SFTConfig(
        output_dir="outputs",
    ),
)
trainer.train()
"""

UNSLOTH = Dialect(
    name="unsloth",
    title="Unsloth script",
    versions="Unsloth 2024.8 - 2026.10",
    syntaxes=("python",),
    framework="unsloth",
    sections=SECTIONS,
    blank={"python": SCRIPT},
    ideas=(
        row("model", "model.model_name", kind="word"),
        _adapter(),
        adapted_layers("peft.layers_to_transform", "peft.finetune_last_n_layers"),
        _length(),
        row("micro_batch", "args.per_device_train_batch_size", default=lambda keys: 4 if _own(keys) else 8),
        row("accumulation", "args.gradient_accumulation_steps", default=lambda keys: 2 if _own(keys) else 1),
        optimizer("args.optim", TORCH_OPTIMIZERS, default=lambda keys: "adamw-8bit" if _own(keys) else "adamw"),
        _checkpointing(),
        _precision(),
        Idea(
            keys=(),
            facts=("loss", "zero", "offload"),
            write=lambda facts, keys: {},
            read=lambda keys: {"loss": "chunked", "zero": 0, "offload": "none"},
        ),
        evaluation("args.", lambda keys: 4 if _own(keys) else 8),
    ),
    programs=OTHER_TRAINERS,
)
