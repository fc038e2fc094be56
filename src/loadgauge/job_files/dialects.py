"""The dialects by name. A dialect's module is imported when it is needed."""

import re
from functools import cache
from importlib import import_module

from loadgauge.core.base import ConfigError, read_table, suggest
from loadgauge.core.families.catalogue import find_model
from loadgauge.job_files.ideas.table import Dialect, Document

FILES = {
    "megatron": "pre_training.megatron",
    "megatron-bridge": "pre_training.bridge",
    "torchtitan": "pre_training.torchtitan",
    "deepspeed": "hugging_face.deepspeed",
    "accelerate": "hugging_face.accelerate",
    "transformers": "hugging_face.huggingface",
    "trl": "hugging_face.huggingface",
    "axolotl": "fine_tuning.axolotl",
    "llamafactory": "fine_tuning.llamafactory",
    "verl": "rollouts.verl",
    "torchtune": "fine_tuning.torchtune",
    "litgpt": "fine_tuning.litgpt",
    "ms-swift": "fine_tuning.swift",
    "megatron-swift": "fine_tuning.swift_megatron",
    "llamafactory-v1": "fine_tuning.llamafactory_v1",
    "llamafactory-megatron": "fine_tuning.llamafactory_megatron",
    "automodel": "pre_training.automodel",
    "unsloth": "fine_tuning.unsloth",
    "peft": "hugging_face.peft",
    "openrlhf": "rollouts.openrlhf",
    "nemo-rl": "rollouts.nemo_rl",
    "slime": "rollouts.slime",
    "prime-rl": "rollouts.prime_rl",
    "nanotron": "pre_training.nanotron",
    "gpt-neox": "pre_training.gpt_neox",
    "llm-foundry": "pre_training.llm_foundry",
    "maxtext": "pre_training.maxtext",
    "roll": "rollouts.roll",
    "open-instruct": "hugging_face.open_instruct",
    "lmflow": "hugging_face.lmflow",
    "qwen-vl-finetune": "hugging_face.qwen_vl",
    "deepspeed-chat": "hugging_face.deepspeed_chat",
    "areal": "rollouts.areal",
    "primus": "pre_training.primus",
    "olmo-core": "pre_training.olmo_core",
    "xtuner": "pre_training.xtuner",
    "diffusers": "hugging_face.diffusers",
    "finetrainers": "hugging_face.diffusers",
    "musubi-tuner": "hugging_face.diffusion_tuners",
    "simpletuner": "hugging_face.diffusion_tuners",
}
"""Dialects, and the modules of this room that have them, each under its name in capitals."""
BUILT_ON = {
    "trl": "transformers", "llamafactory": "transformers", "ms-swift": "transformers", "slime": "megatron",
    "megatron-swift": "megatron", "llamafactory-megatron": "llamafactory", "open-instruct": "transformers",
    "lmflow": "transformers", "qwen-vl-finetune": "transformers", "deepspeed-chat": "transformers",
}  # fmt: skip
"""Tools whose files have another's keys too: those of the other mark them as well."""
CONSTANTS = {"megatron-bridge": "BRIDGE", "ms-swift": "SWIFT", "llamafactory-v1": "V1", "qwen-vl-finetune": "QWEN_VL"}
"""Dialects whose constant is not named as they are."""
ALIASES = {
    "hf": "transformers", "fsdp": "accelerate", "llama-factory": "llamafactory", "bridge": "megatron-bridge",
    "lit-gpt": "litgpt", "swift": "ms-swift", "nemo": "automodel", "nemo-automodel": "automodel", "tune": "torchtune",
}  # fmt: skip
OF_PICTURES = ("diffusers", "finetrainers", "musubi-tuner", "simpletuner")
"""Tools that train diffusion models alone."""
OF_TEXT = tuple(name for name in FILES if name not in OF_PICTURES)
"""Tools as whose files the job of a language model is written."""
MARK = 10
STARTED = {
    "musubi-tuner": re.compile(
        r"\b(?:hv|hv_1_5|wan|fpack|flux_kontext|flux_2|qwen_image|zimage|kandinsky5|krea2|hidream_o1|ideogram4)_train\w*\.py\b"
    ),
    "diffusers": re.compile(
        r"\btrain_(?:dreambooth|text_to_image|control|custom_diffusion|unconditional|instruct_pix2pix|lcm|t2i_adapter|sd|cogvideox"
        r"|diffusion_dpo)\w*\.py\b"
    ),
    "xtuner": re.compile(r"\bxtuner[./]v1[./]train[./]cli[./](?:sft|rl)\b"),
    "megatron-bridge": re.compile(r"\brun_recipe\.py\b"),
    "litgpt": re.compile(r"(?:^|\s)litgpt [a-z]|\blitgpt/\w+/\w+\.py\b"),
    "trl": re.compile(r"(?:^|\s)trl (?:sft|dpo|kto|reward|grpo|rloo|orpo|cpo|gkd|\w+)(?:\s|$)|\btrl[./]scripts[./]\w"),
    "ms-swift": re.compile(
        r"/cli/(?:sft|pt|rlhf)\.py|\bswift (?:sft|pt|rlhf|infer|deploy|rollout|sample|eval|app|export|merge-lora)\b"
    ),
    "megatron-swift": re.compile(r"\bmegatron (?:sft|pt|rlhf|export)\b|\b_megatron[./](?:sft|pt|rlhf)\b"),
    "open-instruct": re.compile(r"\bopen_instruct/(?:finetune|dpo_tune\w*)\.py"),
    "qwen-vl-finetune": re.compile(r"\bsrc/train(?:ing)?/train_(?:sft|dpo|grpo|cls)\.py"),
    "llamafactory": re.compile(r"\bllamafactory-cli (?:export|chat|webchat|webui|api|eval)\b"),
    "llamafactory-v1": re.compile(r"\bllamafactory-cli sft\b|\bllamafactory/v1/launcher\.py sft\b"),
    "verl": re.compile(r"\bverl\.(?:trainer|experimental|recipe)\.\w|\brecipe\.\w+\.(?:main|\w*trainer)"),
    "openrlhf": re.compile(r"\bopenrlhf[./]cli[./]train_|\btrain_ppo_ray\b"),
}
"""Command lines that say whose they are."""
SCRIPT = re.compile(
    r"(?i)(?:^|[\s/])(?:\w*_)?(?:dpo|kto|reward|grpo|rloo|orpo|cpo|gkd|nash_md|xpo|bco|prm|ppo|gold|sdpo)(?:v\d)?(?:_\w+)?\.py\b"
)
"""Scripts with transformers' arguments that start one of TRL's trainers."""

EXAMPLE = re.compile(
    r"\brun_(?:clm|fim|mlm|plm|glue|xnli|classification|ner|(?:seq2seq_)?qa\w*|summarization|translation|swag)\w*\.py\b"
)
"""Scripts of transformers' own examples, whatever their options are like."""
ANYBODYS = frozenset(
    {"dataset_name", "max_seq_length", "max_length", "label_smoothing", "max_new_tokens", "repetition_penalty"}
)
TRLS = re.compile(r"(?i)sft|\btrl\b")
"""Options of TRL's that any script may have, and names of scripts that are TRL's."""


@cache
def _marks() -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """The syntaxes and the marks of every dialect (`data/marks.toml`): only those that a file has marks of are imported."""
    table = read_table("marks.toml")
    return {name: (frozenset(table[name]["syntaxes"]), frozenset(table[name]["marks"].split())) for name in FILES}


def of_text(model: str) -> bool:
    """Return whether a name is that of a language model.

    >>> of_text("Qwen/Qwen3-8B"), of_text("flux.1-dev"), of_text("")
    (True, False, False)
    """
    try:
        return bool(model) and find_model(model) is not None
    except ConfigError:
        return False


def dialect(name: str) -> Dialect:
    """The dialect of a name or an alias. Raises `ConfigError` for an unknown one.

    >>> dialect("megatron").title
    'Megatron-LM arguments'
    >>> dialect("megatron-ml")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    loadgauge.core.base.errors.ConfigError: unknown dialect 'megatron-ml' (known: megatron, ...); did you mean megatron?
    """
    wanted = ALIASES.get(name.lower(), name.lower())
    if wanted not in FILES:
        raise ConfigError(f"unknown dialect {name!r} (known: {', '.join(FILES)}){suggest(wanted, FILES)}")
    return _constant(wanted, CONSTANTS.get(wanted, wanted.upper().replace("-", "_")))


def _constant(name: str, constant: str) -> Dialect:
    chosen: Dialect = getattr(import_module(f"loadgauge.job_files.{FILES[name]}"), constant)
    return chosen


IMAGES = re.compile(r"\S*(?:imagenet|cifar|mnist|resnet)\S*|\bgan_\w+\.py\b")
"""Words of a command that trains on images alone."""
IN_GENERAL = "`loadgauge capture FILE.py:function` works out the training of any module from its own code"


def _knows(name: str, keys: set[str]) -> bool:
    """Return whether every key is one of the dialect's tool."""
    return all(map(dialect(name).kinds, keys))


def recognise(document: Document, file: str = "") -> Dialect | None:
    """The dialect that has most of a document's keys, where keys of one dialect alone count most; None where none has any.

    Raises `ConfigError` for a script that trains another kind of model.
    """
    program = " ".join(getattr(document, "program", ()))
    for name, pattern in STARTED.items():
        if pattern.search(program):
            return dialect(name)
    if getattr(document, "looped", False):
        return _constant("transformers", "TRAINED")
    present, marks = set(document.names()), _marks()
    present |= {name.replace("-", "_") for name in present} if document.syntax == "yaml" else set()
    scores: dict[str, int] = {}
    for name, (syntaxes, own) in marks.items():
        if {document.syntax, getattr(document, "inner", "")} & syntaxes and present & own:
            also = marks[BUILT_ON[name]][1] if name in BUILT_ON else frozenset()
            scores[name] = MARK * len(present & (own | also)) + len(present & dialect(name).known)
    best = max(scores, key=lambda name: scores[name], default=None)
    if best in ("transformers", "trl") and not _knows(best, present):
        best = max((name for name in scores if _knows(name, present)), key=lambda name: scores[name], default=best)
    if best in ("transformers", "trl") and "deepspeed_config" in present:
        best = "deepspeed-chat"  # whose engine has a file of its own, and not transformers' trainer
    if best in (None, "deepspeed-chat") and (word := IMAGES.search(program)) is not None:
        raise ConfigError(f"trains a model of images, and no language model; {IN_GENERAL}", key=word[0], file=file)
    if best is None and document.syntax == "argv" and "model_name_or_path" in present:
        best = "transformers"  # whose word it is
    if best is None:
        # A file that says little of its own, over one of NeMo-RL's.
        over = document.syntax == "yaml" and re.search(r"\.ya?ml\b", str(document.get("defaults")))
        return dialect("nemo-rl") if over else None
    of_trl = document.syntax != "argv" or present & marks["trl"][1] - ANYBODYS - marks["transformers"][1]
    if (best == "trl" and not of_trl and not TRLS.search(program)) or (
        best in ("trl", "lmflow") and EXAMPLE.search(program)
    ):
        best = "transformers"
    if best == "trl" and getattr(document, "trainer", None) == "":
        return _constant("transformers", "TRAINED")
    return dialect("trl" if best == "transformers" and SCRIPT.search(program) else best)
