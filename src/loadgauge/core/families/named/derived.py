"""Names of models on the Hugging Face hub that have the sizes of a shipped one: fine-tunes, chat models, quantised copies.

Only names are read here. The table of those that their name does not say is `data/models/DERIVED.toml`.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from loadgauge.core.base.package_data import read_table

# How a copy is stored, by the end of its name; the words are those of `quantization_config.quant_method` and of file formats.
_STORED = {
    "nf4": r"(unsloth-)?(dynamic-)?bnb-4bit|(bnb-)?nf4(-bf16)?|qlora-4bit|4bit-bnb|4bits",
    "gptq": r"gptq(-\w?int[2348])?|gptq-?\d?bit|int4-gptq|w4a16|int4",
    "int8": r"bnb-8bit|8bits?|int8|w8a8|w8a16",
    "awq": r"awq(-int4)?|awq-?\d?bit|int4-awq",
    "hqq": r"hqq(-\dbit)?|\dbit-hqq",
    "fp8": r"fp8(-dynamic|-kv|-block)?|block-fp8",
    "nvfp4": r"nvfp4|fp4",
    "gguf": r"(imatrix-|i1-)?gguf|ggml",
    "aqlm": r"aqlm(-[\w.-]+)?",
    "mlx": r"mlx(-\dbit)?|4bit|[368]bit-mlx|4bit-dwq",
    "exl2": r"exl[23]|\d\.\dbpw(-\w+)?",
}
# A file of llama.cpp, or a part of a repository of them, with its type: model.Q4_K_M.gguf, model-GGUF:UD-Q4_K_XL, llama3.1:8b-q4_0.
_GGUF = re.compile(
    r"([-.:](imatrix-|i1-)?(gguf|ggml))?[-.:](ud-|i1-)?(?P<type>i?q[1-8][-.]([01]|k(-(s|m|l|xl))?|xxs|xs|s|m|nl))(\.gguf)?$"
)
_LIKE = {
    "q4_k_xl": "q4_k_m",
    "q4_k": "q4_k_m",
    "q5_k_xl": "q5_k_m",
    "q5_k": "q5_k_m",
    "q3_k": "q3_k_m",
    "q2_k_xl": "q2_k",
    "q6_k_xl": "q6_k",
}
"""Types that are, or have about the bits of, another."""
_QUANTISED = [(stored, re.compile(rf"-({pattern})$")) for stored, pattern in _STORED.items()]
# What a name may say beside the model: who published it, how it was tuned; then also its version and when it came out.
_BESIDE = (
    r"^(meta|unsloth|official|nvidia)-|-(hf|instruct|chat|it|pt|base|sft|dpo|orpo|kto|ppo|grpo|rlhf|rm(-\d+k)?|lora|merged|bf16|fp16|16bit"
    r"|unsloth|preview|think|thinking|nonthinking|reasoning|uncensored|abliterated|finetuned?|latest|deduped|fft|qat|rl|tuned|linearized"
    r"|torch-dist|mcore|slime|1m|\d+k|intermediate-step-\w+-\d+t{more})(?=-|$)"
)
_TUNED = re.compile(_BESIDE.replace("{more}", ""))
_NOTHING = re.compile(r"(?!)")
_VERSIONED = re.compile(_BESIDE.replace("{more}", r"|coder|math|\d{2}-\d{4}|\d{4}|v\d+\.\d+"))
# Words beside a model's name of copies that have other sizes.
_OTHER_SIZES = re.compile(
    r"(^|-)(moe|\d+x\d+(\.\d+)?b|\d+(\.\d+)?[bm]|pruned|sheared|minitron|eagle\d?|medusa|draft|speculator|adapter|embed\w*"
    r"|deep|assistant|sparse|aqlm|\d-?bits|ovis\S*|mplug\S*|llava\w*|vlm?|vision|audio|omni|speech|tts|asr|ocr|clip|tiny|mini"
    r"|\w*blip\d?|col(pali|qwen|smol)\S*|\w*flamingo|video\w*|florence)(-|$)"
)


class Derived(msgspec.Struct, frozen=True):
    """A name read as a shipped model: `base`, with `changes` of its config, and how the copy is `stored` (empty: in 16 bits)."""

    base: str
    changes: Mapping[str, Any] = {}
    stored: str = ""


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    base: str
    changes: dict[str, Any] = {}
    source: str = ""


@functools.cache
def _table() -> dict[str, _Rule]:
    return msgspec.convert(read_table("models/DERIVED.toml"), dict[str, _Rule])


def split_stored(name: str) -> tuple[str, str]:
    """Return the last part of a name, in small letters with hyphens, without how it is stored, and that.

    >>> split_stored("unsloth/Meta-Llama-3.1-8B-bnb-4bit"), split_stored("TheBloke/Llama-2-13B-chat-GPTQ")
    (('meta-llama-3.1-8b', 'nf4'), ('llama-2-13b-chat', 'gptq'))
    >>> split_stored("mistral-7b-instruct-v0.2.Q4_K_M.gguf"), split_stored("llama3.1:8b-instruct-q8_0")
    (('mistral-7b-instruct-v0.2', 'q4_k_m'), ('llama3.1-8b-instruct', 'q8_0'))
    """
    words, stored_as = _plain(name.rstrip("/").rpartition("/")[2]), ""
    if match := _GGUF.search(words):
        stored_as = re.sub("[-.]", "_", match["type"])
        return words[: match.start()].replace(":", "-"), _LIKE.get(stored_as, stored_as)
    words = words.removesuffix(".gguf").replace(":", "-")
    for stored, pattern in _QUANTISED:
        if match := pattern.search(words):
            words, stored_as = words[: match.start()], stored
            break
    if stored_as == "mlx":
        bits = re.search(r"(\d)bit", match[0]) if match else None
        stored_as = (
            f"mlx{bits[1] if bits else 4}" if "mlx" in name.lower() else "nf4"
        )  # bitsandbytes calls its 4 bits so as well
    return words, stored_as


def derive(name: str, repositories: Mapping[str, str]) -> Derived | None:
    """Return the shipped model that a name on the hub has the sizes of, or None where its name does not say.

    repositories: the repositories of each model, with spaces between them, by its name

    >>> known = {"llama-3.1-8b": "meta-llama/Llama-3.1-8B", "qwen2.5-7b": "Qwen/Qwen2.5-7B"}
    >>> derive("NousResearch/Hermes-3-Llama-3.1-8B", known), derive("Qwen/Qwen2.5-7B-Instruct-AWQ", known)
    (Derived(base='llama-3.1-8b', changes={}, stored=''), Derived(base='qwen2.5-7b', changes={}, stored='awq'))
    >>> derive("someone/my-model", known)
    """
    words, stored = split_stored(name)
    words = _spelt(words)
    for pattern, rule in _table().items():
        if re.search(rf"(^|-)({pattern})(-|$)", words) and rule.base in repositories:
            return Derived(rule.base, rule.changes, stored)
    for beside in (_NOTHING, _TUNED, _VERSIONED):
        own = _bare(words, beside)
        first = own.partition("-")[0]  # most names are told from it by their first word
        for id, repository in repositories.items():
            if beside is not _NOTHING and not re.search(r"\d", own) and _versions(words) != _versions(id):
                continue  # only its version says which model it is
            spelt = (id, *(_spelt(_plain(spelling)) for spelling in repository.split() if first in spelling.lower()))
            if any(own == _bare(spelling, beside) for spelling in spelt if first in spelling):
                return Derived(id, {}, stored)
    within = _longest(own, repositories)
    return None if within is None else Derived(within, {}, stored)


def goes_on(text: str, repositories: Mapping[str, str]) -> tuple[str, ...]:
    """Return the models whose names go on from that of a text.

    >>> goes_on("Qwen/Qwen3.5-397B", {"qwen3.5-397b-a17b": "", "qwen3.5-27b": ""})
    ('qwen3.5-397b-a17b',)
    >>> goes_on("qwen", {"qwen3.5-27b": ""})
    ()
    """
    own = _bare(_spelt(split_stored(text)[0]), _TUNED)
    if len(own) < 3:
        return ()
    going = [name for name in repositories if name.startswith(f"{own}-")]
    going += [
        name
        for name, hubs in repositories.items()
        if name not in going and any(f"{_hub(hub)}-".startswith(f"{own}-") for hub in hubs.split())
    ]
    return tuple(going)


def of_size(text: str, repositories: Mapping[str, str]) -> tuple[str, ...]:
    """Return up to four models of the size that a name states, those with a word of it first.

    >>> of_size("katanemo/Router-4B", {"qwen3-4b": "", "gemma-3-4b": "", "qwen3-8b": ""})
    ('qwen3-4b', 'gemma-3-4b')
    """
    words = split_stored(text)[0]
    sizes = _SIZE.findall(words)
    if not sizes:
        return ()
    alike = [name for name in repositories if _SIZE.findall(name)[:1] == sizes[:1]]
    own = {word for word in re.split(r"[-\d.]+", words) if len(word) > 2}
    return tuple(sorted(alike, key=lambda name: not own & set(re.split(r"[-\d.]+", name)))[:4])


_SIZE = re.compile(r"(?<![a-z\d.])\d+(?:\.\d+)?[bm](?![a-z\d])")
"""A size in a name, without that of the experts."""


def _plain(name: str) -> str:
    """A name in small letters with hyphens; what stands between digits where it has hyphens too is a point: 1_8b."""
    last = name.rpartition("/")[2].lower().replace(" ", "-")
    return (re.sub(r"(?<=\d)_(?=\d)", ".", last) if "-" in last else last).replace("_", "-")


def _spelt(words: str) -> str:
    """A name as the catalogue writes it: llama-3, qwen2.5."""
    words = re.sub(r"(^|-)(llama|gemma|phi)(?=\d)", r"\1\2-", words)
    return re.sub(r"(^|-)qwen-(?=\d(\.\d)?-\d)", r"\1qwen", words)


@functools.cache
def _hub(repository: str) -> str:
    """A repository of the catalogue, as the catalogue would write its name."""
    return _spelt(_plain(repository))


def _versions(words: str) -> list[str]:
    return re.findall(r"v\d+\.\d+", words)


@functools.cache
def _bare(words: str, beside: re.Pattern[str]) -> str:
    before = ""
    while before != words:
        before, words = words, beside.sub("", words)
    return words


def _longest(words: str, names: Iterable[str]) -> str | None:
    """The longest name with a size in it that stands within the words, from hyphen to hyphen; None where another word says
    that the sizes are others."""
    fitting = [
        name
        for name in names
        if name.partition("-")[0] in words
        and re.search(r"\d[mb]\b", name)
        and f"-{_bare(name, _VERSIONED)}-" in f"-{words}-"
    ]
    best = max(fitting, key=lambda name: (len(_bare(name, _VERSIONED)), -len(name)), default=None)
    if best is None or words.endswith("b-pro"):  # LLaMA Pro has more layers
        return None
    if _OTHER_SIZES.search(f"-{words}-".replace(f"-{_bare(best, _VERSIONED)}-", "-")):
        return None
    return best
