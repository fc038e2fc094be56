"""Training a part of a model, or adapters in some layers, as the fine-tuning tools say it."""

import re
from collections.abc import Mapping
from typing import Any

from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.definitions.model.own_code import DROPS
from loadgauge.job_files.ideas.coverage import words
from loadgauge.job_files.ideas.lenses import Named, reads
from loadgauge.job_files.ideas.table import Facts, Idea, Keys


def unfrozen(key: str) -> Idea:
    """The idea of a list of regular expressions on the names of parameters, which are trained (axolotl)."""

    def read(keys: Keys) -> Facts:
        words = _listed(keys, key)
        keys.note(
            key,
            "has names that transformers 5 changed (block_sparse_moe is mlp), with which nothing of them is trained",
            "saves",
            "gradients optimizer",
            when="block_sparse_moe" in str(words),
            bare=True,
        )
        return {"train": ",".join(words) if words else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        trained = facts.get("train")
        if trained is None:
            return {key: None}
        # Ranges and shares are words of loadgauge's own.
        return {} if re.search(r"(^|\.)-?\d*:|frozen:|^tower", trained) else {key: trained.split(",")}

    return Idea(keys=(key,), facts=("train",), read=read, write=write)


def tower(
    tunes: str,
    joins: str,
    pixels: str,
    *others: str,
    adapters: str = "adapters",
    usual: bool = True,
    body: str = "freeze_llm",
) -> Idea:
    """Return the idea of a tower of pictures: the keys that freeze it and its projection, and the largest size of a picture.

    others: further keys of that size; usual: whether both are frozen unless said
    adapters: what a tower that is not frozen has beside adapters of the language model; body: the key that freezes the latter
    The size is also that of the variable `MAX_PIXELS`, which `qwen_vl_utils` and ms-swift's templates read.
    """

    def read(keys: Keys) -> Facts:
        variables: Mapping[str, str] = getattr(keys.document, "variables", {})
        told, seen = str(variables.get("MAX_PIXELS", "")), bool(SEEN & keys.given.keys())
        keyed = [name.lower() for name in BOUNDS if name not in variables and keys.has(name.lower())]
        for name in sorted({*(BOUNDS & variables.keys()), *map(keys.document.shown, keyed)}):
            keys.add(
                Uncounted(
                    f"{name}: makes pictures or videos smaller, which are counted as they are given",
                    name,
                    effect="saves" if seen else "",
                    parts=("activations", "transient"),
                    share=0.5,
                )
            )
        if usual and not (keys.has(tunes, joins, pixels, body, *others) or told or seen):
            return {}
        still, joined = (usual if (flag := keys.flag(name)) is None else flag for name in (tunes, joins))
        how = "frozen" if joined else "projector"
        method = next((keys.word(name) for name in METHODS if keys.has(name)), "lora")
        whole = method == "full" or (adapters == "trained" and not keys.flag("lora_enable"))
        if not still:
            how = "trained" if whole else adapters
        alone = keys.flag(body) and seen and whole and how != "frozen"
        why = "freezes the language model, which is counted as if it were trained"
        keys.note(body, why, "saves", "gradients optimizer activations", when=keys.flag(body) and not alone, bare=True)
        return {
            **({"train": "tower"} if alone else {}),
            "tower": how,
            "max_pixels": keys.agreed((pixels, *others), keys.whole) or (int(told) if told.isdecimal() else None),
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        how, most = facts.get("tower"), facts.get("max_pixels")
        told = {tunes: how in ("frozen", "projector"), joins: how == "frozen"} if how else {tunes: None, joins: None}
        return {**told, pixels: most, body: True if facts.get("train") == "tower" else None}

    return Idea(keys=(tunes, joins, pixels, body, *others), facts=("tower", "max_pixels"), read=read, write=write)


BOUNDS = words(
    """
    VIDEO_MAX_PIXELS VIDEO_TOTAL_PIXELS FPS FPS_MAX_FRAMES NFRAMES IMAGE_MAX_TOKEN_NUM VIDEO_MAX_TOKEN_NUM VIDEO_FPS
    VIDEO_MAXLEN MAX_NUM VIDEO_MAX_NUM MAX_SLICE_NUMS VIDEO_MAX_SLICE_NUMS VIDEO_SEGMENTS MAX_NUM_FRAMES
    """
)
"""Other variables that `qwen_vl_utils` and ms-swift's templates read, of videos and of a picture's tiles; and, in small letters,
keys of other tools."""
SEEN = frozenset({"pictures", "video", "audio"})
"""Flags that say what a tower gets."""
METHODS = ("finetuning_type", "tuner_type", "train_type", "sft_type")
"""Keys that say whether adapters are trained (LLaMA-Factory, ms-swift), which is their default."""


def adapted_layers(key: str, last: str = "") -> Idea:
    """The idea of the layers that have adapters: their numbers, or (`last`) how many of the last."""

    def read(keys: Keys) -> Facts:
        value = keys.raw(key)
        if isinstance(value, str):
            value = value.strip("[] ").split(",")
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        texts = [str(number).strip() for number in numbers]
        keys.refuse(
            key, "must be numbers of layers", when=not all(text.isascii() and text.isdecimal() for text in texts)
        )
        if texts:
            return {"lora_layers": ",".join(texts)}
        many = keys.whole(last) if last else None
        return {"lora_layers": None if many is None else f"-{many}:"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        layers = facts.get("lora_layers")
        words = (layers or "").split(",")
        upper = re.fullmatch(r"-(\d+):", layers or "") if last else None
        numbers = [int(word) for word in words if word.strip().isdecimal()]
        if layers is not None and upper is None and len(numbers) < len(words):
            return {}
        return ({last: int(upper[1]) if upper else None} if last else {}) | {key: numbers or None}

    return Idea(keys=(key, last) if last else (key,), facts=("lora_layers",), read=read, write=write)


def _frozen_share_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    kind, _, share = (facts.get("train") or "").partition(":")
    values: dict[str, Any] = dict.fromkeys((at.share, at.names, at.pattern, at.frozen, at.frozen_pattern))
    values |= {at.share: float(share) if kind == "frozen" and share else None}
    return values if kind in ("", "frozen") else {}


@reads(
    facts="train",
    write=_frozen_share_written,
    share="freeze_parameters_ratio",
    names="trainable_parameters",
    pattern="trainable_parameters_regex",
    frozen="freeze_parameters",
    frozen_pattern="freeze_parameters_regex",
)
def frozen_share(keys: Keys, at: Named) -> Facts:
    """The idea of ms-swift's frozen parameters: a share of all from the bottom, or all but those whose names begin so."""
    part = keys.real(at.share) or 0.0
    keys.refuse(at.share, f"must be between 0 and 1, got {part:g}", when=not 0 <= part <= 1)
    trained = [f"^{re.escape(name)}" for name in _listed(keys, at.names)]
    trained += _listed(keys, at.pattern)
    # Prefixes of parameters' names, and a pattern that is looked for anywhere in them.
    apart = [f"but:{re.escape(name)}" for name in _listed(keys, at.frozen)]
    apart += [f"but:.*(?:{word})" for word in _listed(keys, at.frozen_pattern)]
    keys.refuse(
        at.frozen if keys.has(at.frozen) else at.frozen_pattern,
        f"is read without {at.share} and {at.names}",
        when=apart and (part or trained),
    )
    if apart:
        return {"train": ",".join(apart)}
    if not part:
        return {"train": None}  # what is named is trained in any case
    keys.refuse(at.names, f"is read where {at.share} is 1, so that nothing else is trained", when=part < 1 and trained)
    keys.refuse(at.share, f"freezes everything; {at.names} says what is trained", when=part == 1 and not trained)
    return {"train": ",".join(trained) or f"frozen:{part:g}"}


FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "use_llama_pro")


def freeze(method: str = "finetuning_type", prefix: str = "") -> Idea:
    """The idea of LLaMA-Factory's `finetuning_type: freeze`: the last layers (the first, where negative), modules in them, and
    others (`model/adapter.py`, `_setup_freeze_tuning`); with LLaMA Pro as many, from the first part to the last."""
    layers, modules, others, spread = (f"{prefix}{name}" for name in FREEZE)

    def read(keys: Keys) -> Facts:
        if str(keys.raw(method) or "").lower() != "freeze":
            return {"train": None}
        keys.note(
            method,
            "keeps what is frozen in 16 bits, which is counted in 32",
            "saves",
            "weights gathered",
            0.5,
            when=not keys.flag("pure_bf16"),
        )
        count = keys.whole(layers, minimum=-(10**6))
        count = 2 if count is None else count
        keys.note(
            spread,
            "trains layers from all over the model, which are counted as its first",
            "saves",
            "activations",
            0.5,
            when=keys.flag(spread),
        )
        count = -abs(count) if keys.flag(spread) else count
        where = f"-{count}:" if count > 0 else f":{-count}"
        inside = [name for name in keys.words(modules) or ["all"] if name]
        trained = [f"layers.{where}" if name == "all" else f"layers.{where}.{name}" for name in inside] if count else []
        return {"train": ",".join([*trained, *(keys.words(others) or [])])}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        trained = facts.get("train")
        if trained is None:
            return dict.fromkeys((layers, modules, others, spread))
        matches = [re.fullmatch(r"layers\.(-\d+:|:\d+)(?:\.(\w+))?", word) for word in trained.split(",")]
        ranges = {match[1] for match in matches if match}
        inside = [match[2] or "all" for match in matches if match]
        extra = [word for word, match in zip(trained.split(","), matches, strict=True) if not match]
        if len(ranges) != 1 or not all(re.fullmatch(r"\w+", word) for word in extra):
            return {}
        count = -int(ranges.pop().strip(":"))
        return {
            method: "freeze",
            layers: count,
            modules: None if inside == ["all"] else ",".join(inside),
            others: ",".join(extra) or None,
        }

    return Idea(keys=(layers, modules, others, spread), facts=("train",), read=read, write=write)


DROPOUT = ("hidden_dropout", "attention_dropout")
RATES = {
    "gpt2": ("resid_pdrop embd_pdrop", "attn_pdrop"), "starcoder2": ("residual_dropout embedding_dropout", "attention_dropout"),
    "stablelm": ("hidden_dropout", "attention_dropout"), "gpt_neox": ("hidden_dropout", "attention_dropout"),
}  # fmt: skip
"""Names of the two rates of dropout by family; others have none of the first (`DROPS`)."""


def dropped(keys: Keys, config: dict[str, Any], usual: float = 0.0) -> dict[str, Any]:
    """A model's config with the dropout that Megatron's words say; `usual`: the rate that a tool has where a file says none.

    Megatron-Core drops of the embedding and of each half of a layer whatever the family (`language_model_embedding.py`,
    `fused_bias_dropout.py`).
    """
    outputs, scores = (usual if (rate := keys.real(key)) is None else rate for key in DROPOUT)
    names, inner = RATES.get(config["model_type"], (DROPS, "attention_dropout"))
    return config | dict.fromkeys(names.split(), outputs) | {inner: scores}


def _listed(keys: Keys, key: str) -> list[str]:
    value = keys.raw(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    keys.refuse(key, "must be a list of names", when=not all(isinstance(word, str) for word in values))
    return [str(word).strip() for word in values if str(word).strip()]
