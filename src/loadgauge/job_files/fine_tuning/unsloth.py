"""Unsloth's scripts and notebooks: the keyword arguments of its calls, and of TRL's SFTConfig beside them. Nothing is run."""

import re
from collections.abc import Mapping
from typing import Any

from loadgauge.job_files.hugging_face import trl_tasks
from loadgauge.job_files.hugging_face.programs import kind_of
from loadgauge.job_files.ideas import (
    STAYS,
    TORCH_OPTIMIZERS,
    Dialect,
    Facts,
    Idea,
    Keys,
    Named,
    Spelled,
    adapted_layers,
    evaluation,
    fixed,
    optimizer,
    reads,
    row,
    stored,
)
from loadgauge.job_files.reading.calls import Calls

LOADER = re.compile(r"Fast\w*(?:Model|Transformer)\.(from_pretrained|get_peft_model)$")
FIRST = {"model": "model_name", "peft": "model"}
"""What the first argument without a name is."""
ONCE = frozenset({"model", "args", "trainer"})
"""Sections of which the first call counts: a model that is loaded again at the end is the one that was trained."""
ANSWERS, LOSS = "args.max_completion_length", "args.loss_type"
WHOLE = ("embed_tokens", "lm_head")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _own(keys: Keys) -> bool:
    """Return whether the arguments are of a class of TRL's, which Unsloth gives defaults of its own."""
    return any(name.endswith("Config") and kind_of(name) for name in getattr(keys.document, "program", ()))


def _texts(keys: Keys) -> int:
    """Return how many sequences a row has: of texts that are embedded and compared at least two (sentence-transformers)."""
    return 2 if any("SentenceTransformer" in name for name in getattr(keys.document, "program", ())) else 1


FOUR, EIGHT, HALF, FULL = (
    f"model.{name}" for name in ("load_in_4bit", "load_in_8bit", "load_in_16bit", "full_finetuning")
)


def _quantised_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    quantised, base = bool(facts.get("qlora")), facts.get("base") or "nf4"
    if not facts.get("lora_rank") or (quantised and base not in ("nf4", "int8")):
        return {}
    return {FOUR: quantised and base == "nf4", EIGHT: True if quantised and base == "int8" else None}


@reads(FOUR, EIGHT, HALF, facts="qlora base kbit_upcast", write=_quantised_written)
def _quantised(keys: Keys) -> Facts:
    if keys.flag(FULL):
        return {"qlora": False}
    four = keys.flag(FOUR) if keys.has(FOUR) else _texts(keys) == 1  # `FastSentenceTransformer` loads 16 bits
    bits = "int8" if keys.flag(EIGHT) else "nf4" if four and not keys.flag(HALF) else None
    # Such a checkpoint stays as it is stored (models/loader_utils.py).
    bits = "nvfp4" if stored(keys.word("model.model_name")) == "nvfp4" else bits
    # Adapters are float32, and nothing that is frozen is (unsloth_zoo's `prepare_model_for_training`).
    return {"qlora": bits is not None, "base": bits, "kbit_upcast": "none" if bits else None}


def _adapter_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    if not facts.get("lora_rank"):
        return {FULL: True} if facts.get("lora_rank") == 0 else {}
    words_of, whole_ones = facts.get("lora_targets") or "all", facts.get("modules_to_save")
    listed = {"all": "all-linear", "attention": list(LINEAR[:4])}.get(words_of) or words_of.split(",")
    return {
        at.rank: facts["lora_rank"],
        at.modules: listed,
        at.dropped: facts.get("lora_dropout") or 0,
        at.save: whole_ones.split(",") if whole_ones else None,
        at.dora: True if facts.get("use_dora") else None,
        FULL: False if keys.has(FULL) else None,
    }


@reads(
    facts="lora_rank lora_targets lora_dropout modules_to_save use_dora lora_dtype tower",
    write=_adapter_written,
    bases=("nf4", "int8"),
    rank="peft.r",
    modules="peft.target_modules",
    dropped="peft.lora_dropout",
    save="peft.modules_to_save",
    dora="peft.use_dora",
    seen="peft.finetune_vision_layers",
    also=(FULL,),
)
def _adapter(keys: Keys, at: Named) -> Facts:
    adapters = any(name.startswith("peft.") for name in keys.document.names())
    if keys.flag(FULL):  # and get_peft_model does nothing
        return {"lora_rank": 0}
    keys.refuse(
        at.rank,
        "get_peft_model is not called, nor is full_finetuning=True given; nothing would be trained",
        when=not adapters,
    )
    chosen = keys.words(at.modules)
    # As targets they are trained whole too (`_redirect_embedding_targets` of models/llama.py).
    named = [*(keys.words(at.save) or ()), *(chosen or ())]
    saved = [name for name in WHOLE if name in named]
    for name in keys.words(at.save) or ():
        keys.refuse(at.save, f"{name!r} is not read; {' and '.join(WHOLE)} are", when=name not in WHOLE)
    chosen = None if chosen is None else [name for name in chosen if name not in WHOLE]
    everything = not chosen or chosen == ["all-linear"]
    return {
        "lora_rank": keys.whole(at.rank) or 16,
        "lora_targets": "all" if everything else ",".join(chosen or ()),
        "lora_dropout": keys.real(at.dropped) or 0.0,
        "modules_to_save": ",".join(saved) or None,
        "use_dora": keys.flag(at.dora) or None,
        "lora_dtype": "float32",
        "tower": None if (seen := keys.flag(at.seen)) is None else "adapters" if seen else "frozen",
    }


def _checkpointing_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    word = facts.get("recompute") or "none"
    moved = facts.get("activation_offload") or "none"
    if moved == "all" or (moved == "checkpoints" and word == "none"):
        return {}
    own = "unsloth" if moved == "checkpoints" else word == "full"
    return {at.key: own, at.trainers: word == "full" if keys.has(at.trainers) else STAYS}


@reads(
    facts="recompute activation_offload",
    write=_checkpointing_written,
    can={"recompute": ("none", "full")},
    key="peft.use_gradient_checkpointing",
    other="model.use_gradient_checkpointing",
    trainers="args.gradient_checkpointing",
)
def _checkpointing(keys: Keys, at: Named) -> Facts:
    usual = "unsloth" if _texts(keys) == 1 else False
    word = next((value for name in (at.key, at.other) if (value := keys.raw(name)) is not None), usual)
    off = word is False or str(word).lower() == "false"
    # With its own word the inputs of layers go to the host (unsloth_zoo's `Unsloth_Offloaded_Gradient_Checkpointer`).
    moved = "checkpoints" if word == "unsloth" else "none"
    return {"recompute": "full" if not off or keys.flag(at.trainers) else "none", "activation_offload": moved}


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name = facts["precision"]
    return {at.bf16: name == "bf16", at.fp16: name == "fp16"} if name in ("bf16", "fp16") else {}


@reads(
    facts="precision weights",
    write=_precision_written,
    bf16="args.bf16",
    fp16="args.fp16",
    loaded="model.dtype",
    kept="model.float32_mixed_precision",
)
def _precision(keys: Keys, at: Named) -> Facts:
    half = {"bf16": keys.flag(at.bf16), "fp16": keys.flag(at.fp16)}
    keys.refuse(at.fp16, "contradicts bf16", when=half["bf16"] and half["fp16"])
    dtype = str(keys.raw(at.loaded) or "").removeprefix("$torch.")
    facts: Facts = {"precision": "fp16" if half["fp16"] or dtype == "float16" else "bf16"}
    # Whole models are loaded in bfloat16 too, and trained so, unless float32 is asked for (models/vision.py).
    if facts["precision"] == "bf16" and (
        dtype == "float32" or (keys.flag(at.kept) and keys.flag("model.full_finetuning"))
    ):
        return {"precision": "fp32" if half["bf16"] is False else "bf16-autocast", "weights": None}
    return facts | {"weights": "bfloat16" if facts["precision"] == "bf16" else None}


def _length_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    return dict.fromkeys([name for name in at.names if keys.has(name)] or [at.names[0]], facts["seq_len"])


@reads(
    facts="seq_len",
    write=_length_written,
    names=(
        "model.max_seq_length",
        "args.max_length",
        "args.max_seq_length",
        "trainer.max_seq_length",
        "trainer.max_length",
    ),
)
def _length(keys: Keys, at: Named) -> Facts:
    lengths = [length for name in at.names if (length := keys.whole(name)) is not None]
    return {"seq_len": min(lengths) if lengths else 2048}  # the trainer truncates to the shorter one


def script(text: str) -> Calls:
    """The calls of a script or a notebook: the model's, and those of its trainer; of several trainers another than SFT counts."""
    program = Calls(text, lambda name: None, FIRST).program
    sorts = [kind for name in program if name.endswith("Trainer") and (kind := kind_of(name)) is not None]
    wanted = next((kind for kind in sorts if kind not in ("", "sft")), None)

    def section(name: str) -> str | None:
        if (loader := LOADER.search(name)) is not None:
            return "model" if loader[1] == "from_pretrained" else "peft"
        kind = kind_of(name)
        if kind is None or (wanted is not None and kind != wanted):
            return None
        return "trainer" if name.endswith("Trainer") else "args"

    return Calls(text, section, FIRST, ONCE)


def _program(keys: Keys) -> str:
    """The command of TRL's that runs the same trainer."""
    sorts = [kind_of(name) for name in getattr(keys.document, "program", ()) if name.endswith("Trainer")]
    return f"trl {next((kind for kind in sorts if kind not in (None, '', 'sft')), 'sft')}"


def _arguments(keys: Keys, over: Mapping[str, Any]) -> Keys:
    r"""The trainer's arguments by their names; some have values of another place.

    >>> keys = Keys(script("FastModel.from_pretrained('m')\nSFTTrainer(args=SFTConfig(max_length=8))"))
    >>> _arguments(keys, {"packing": True}).whole("max_length")
    8
    """
    own = tuple(key.removeprefix("args.") for key in keys.document.names() if key.startswith("args."))
    return Spelled(keys, lambda _, name: f"args.{name}", over, names=lambda: own, program=(_program(keys),))


def _batch(keys: Keys) -> tuple[int, int]:
    """Sequences of a micro-batch, and micro-batches of a step. Of answers, groups that are not whole make a batch of one group
    (`models/rl.py`)."""
    micro = keys.whole("args.per_device_train_batch_size") or (4 if _own(keys) else 8)
    count = keys.whole("args.gradient_accumulation_steps") or (2 if _own(keys) else 1)
    if not keys.has("args.num_generations", "args.max_completion_length"):
        return micro * _texts(keys), count
    group = keys.whole("args.num_generations") or 8
    ranks = int(keys.given.get("gpus") or 1)
    stated = keys.has("args.steps_per_generation", "args.generation_batch_size")
    return (micro if stated or micro * count * ranks % group == 0 else group), count


ROWS = ("args.per_device_train_batch_size", "args.gradient_accumulation_steps")


def _batches_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    return {ROWS[0]: (facts.get("micro_batch") or 1) // _texts(keys), ROWS[1]: facts.get("accumulation") or 1}


@reads(*ROWS, facts="micro_batch accumulation", write=_batches_written)
def _batches(keys: Keys) -> Facts:
    return dict(zip(("micro_batch", "accumulation"), _batch(keys), strict=True))


TASK_NAMES = tuple(f"args.{key}" for key in trl_tasks.task.keys)


@reads(*TASK_NAMES, LOSS, "model.gpu_memory_utilization", facts=trl_tasks.task.facts)
def _task(keys: Keys) -> Facts:
    """TRL's other trainers; vLLM, where the model is loaded with it, has the model's weights too."""
    over: dict[str, Any] = {}
    longest = None
    if _program(keys) == "trl sft":
        if keys.raw(LOSS) not in (None, "nll"):
            keys.note(LOSS, "is another loss", "either", "loss")
            over["loss_type"] = None
    else:
        over = {key.removeprefix("args."): value for key, value in zip(ROWS, _batch(keys), strict=True)}
        longest = keys.whole("model.max_seq_length")
    over |= {"use_vllm": False}
    if keys.flag("model.fast_inference"):
        over |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": keys.real("model.gpu_memory_utilization", 0.5),
        }
    if longest is not None and str(keys.plain(ANSWERS)).startswith("$"):
        over |= {"max_completion_length": longest - 1, "max_prompt_length": 1}
        keys.note(
            ANSWERS, "is what prompts leave of max_seq_length, and is counted as all of it", "saves", "loss transient"
        )
    facts = trl_tasks.task.read(_arguments(keys, over))
    if "answers" in facts and facts.get("prompt_len") is None and longest is not None:
        facts["prompt_len"] = max(1, longest - int(facts["answers"]))
    return facts


RETURNED = "UNSLOTH_RETURN_LOGITS"


def _loss(keys: Keys) -> Facts:
    """The loss in pieces, without logits; where the environment asks for those, its gradient is written over them
    (`kernels/cross_entropy_loss.py`), and accelerate returns a copy in float32."""
    whole = getattr(keys.document, "environment", {}).get(RETURNED) == "1"
    keys.note(
        RETURNED, "returns the logits, of which accelerate makes a copy in float32", "costs", "loss", 2.0, when=whole
    )
    return {"loss": "fused" if whole else "chunked", "zero": 0, "offload": "none"}


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

REWARDS = "trainer.reward_funcs"


def _rewards(keys: Keys) -> Facts:
    """Names a reward model; functions, which scripts have without quotes, run on the host."""
    keys.note(
        REWARDS,
        "is a reward model, which is not counted",
        "costs",
        "weights transient",
        when=not str(keys.plain(REWARDS) or "$").startswith("$"),
    )
    return {}


UNSLOTH = Dialect(
    name="unsloth",
    title="Unsloth script",
    versions="Unsloth 2024.8 - 2026.10",
    syntaxes=("python",),
    framework="unsloth",
    blank={"python": SCRIPT},
    ideas=(
        row("model", "model.model_name", kind="word"),
        fixed(
            "model.num_labels", head=lambda keys: keys.whole("model.num_labels") or (1 if _texts(keys) > 1 else None)
        ),
        _quantised,
        _adapter,
        adapted_layers("peft.layers_to_transform", "peft.finetune_last_n_layers"),
        _length,
        _batches,
        _task,
        optimizer("args.optim", TORCH_OPTIMIZERS, default=lambda keys: "adamw-8bit" if _own(keys) else "adamw"),
        _checkpointing,
        _precision,
        Idea(keys=(), facts=("loss", "zero", "offload"), read=_loss),
        Idea(keys=(REWARDS,), facts=(), read=_rewards),
        evaluation("args.", lambda keys: 4 if _own(keys) else 8),
    ),
    programs=trl_tasks.OTHERS,
)
