"""Keys that no idea of a dialect reads. No key is ignored silently; each is one of

harmless: it changes neither memory nor the time of a step (logging, saving, data paths, learning efficiencies)
stops: it changes the answer in a way that is not modelled (`Stop`); with an effect that has a bound the answer names it and its
range has it, without one there is no answer
bounded: it changes the answer by no more than is known (`Bound`): the range is widened by that, and says so
unknown: no list has it. Where its name suggests memory or time the answer depends on it; where name and value say a size or
another model or task, there is none (`primary`)

The lists are `data/keys/<dialect>.toml`. A group that names the files of the tool that were `read` is proven; the others are
known by their names alone, so a pattern there (`logger.*`) covers no key whose name suggests memory or time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal

import msgspec

from loadgauge.core.base.package_data import read_table

Kind = Literal["modelled", "harmless", "stops", "bounded", "unknown"]
OFF: tuple[Any, ...] = (False, None, 0, "", "none", "no", "off", "null", "disabled")
"""Values of a switch that is off."""


def words(text: str, prefix: str = "") -> frozenset[str]:
    """The names in a text, separated by spaces, as a set; `prefix` is put before each."""
    return frozenset(f"{prefix}{word}" for word in text.split())


SUSPECT = words(
    """
    dtype dtypes precision fp8 fp16 bf16 fp4 fp32 tf32 int8 half float16 bfloat16 quant quantize quantization quantized
    bit bits bnb gptq awq hqq optim optimizer optimizers adam muon galore apollo badam lion offload offloading swap cpu
    nvme lora dora peft adapter adapters rank dropout checkpointing recompute recomputation remat batch bsz microbatch
    minibatch accumulation len length lengths seq seqlen sequence context cutoff stage zero fsdp ddp shard sharded
    sharding parallel parallelism tp pp cp ep dp rl dpo ppo grpo kto orpo reward critic ref reference ema teacher
    student distill distillation freeze frozen unfreeze unfrozen trainable tokens packing pack padding pad gpus nodes
    devices layers hidden heads vocab experts moe attention attn kernel kernels liger fused compile overlap memory
    bucket buckets loss embedding embeddings resize mtp speculative generations rollout schedule pipeline interleave
    """
)
"""Parts of names that suggest memory or time. The list is reviewed by hand: it may stop too often, not too seldom."""
STEMS = ("optim", "quant", "offload", "recomput", "checkpointing", "parallel", "shard", "precision", "dtype", "seq")
"""Beginnings of such parts."""
ASIDE = words(
    """
    steps interval intervals freq frequency every path paths dir directory folder file files schedule scheduler schedules logger
    loggers log logs logging seed seeds name names url urls id ids tag tags project entity timeout retries warmup lr beta betas eps
    decay momentum coef coefficient temperature prefix suffix verbose debug format style
    """
)
"""Last parts of names that say how often, where or how fast, and so neither memory nor time, whatever comes before them."""
SIZES = re.compile(
    r"(.*_)?(seq|sequence|context|ctx|prompt|response|completion|answer|cutoff|model_max|max|block)_?(len|length|size)(_\w*)?"
    r"|(.*_)?max_(seq_?len|tokens|new_tokens|position_embeddings)(_\w*)?|n_?ctx|seq_?len(gth)?"
    r"|(.*_)?(batch_?size|bsz|micro_?batch(es|_size)?|mini_?batch(_size)?|global_?batch(_size)?|mbs|gbs)(_\w*)?"
    r"|(.*_)?accum(ulat\w*)?(_steps)?|(.*_)?acc_steps"
    r"|(.*_)?(num|n)_(hidden_)?layers?|(.*_)?hidden_(size|dim)|(.*_)?(ffn|intermediate)_(hidden_)?(size|dim)|d_model|n_embd?"
    r"|(.*_)?vocab(ulary)?_size|(.*_)?(num|n)_(\w+_)?experts|(.*_)?(num|n)_(\w+_)?heads"
    r"|(.*_)?parallel(ism)?(_(size|degree|dim|world_size))?|(tp|pp|cp|ep|dp|sp|fsdp|ulysses\w*)(_(size|degree|shard\w*|replicate\w*))?"
    r"|(.*_)?shard(ing)?_(size|degree|group_size)|num_shards|zero_stage"
    r"|(.*_)?(num_|n_)?(gpus?|nodes|nnodes|devices|workers_per_node|nproc)(_per_\w+)?|world_size|num_processes"
    r"|(.*_)?(lora|adapter|peft)_?(r|rank|dim)",
)
"""Names that say a size of the run: of a sequence, a batch, the model, the GPUs and how they share the work, or adapters."""
UNTRAINED = words(
    "eval evaluation val valid validation test dev log logging save saving map preprocess preprocessing tokenize upload download"
    " writer infer inference buffer filter min dataset cache"
)
"""Parts of names of sizes that no training step has."""
OTHERS = re.compile(
    r"(use_|enable_|do_|is_|run_)?(distill(ation)?|teacher|student|reward|critic|dpo|kto|orpo|ppo|grpo|rlhf)"
    r"(_model|_training|_mode)?(_name)?(_or)?(_path)?(_enabled?|_name)?"
)
"""Names that say another model or another task."""
TASKS = words("dpo ipo kto orpo simpo cpo ppo grpo rloo gkd rlhf reward rm distill distillation", "")
"""Values of a `task`, `stage` or `method` that say so."""


SUGGESTED = "is not known here, and its name suggests that it changes memory or time"
Effect = Literal["", "saves", "costs", "either"]


class Stop(msgspec.Struct, frozen=True):
    """A key that is not modelled.

    why: what it does, after its value; off: values at which it does nothing
    effect: what it can do to the memory or the time of a step; with one there is an answer that names the key and whose range
        has it, without one there is none
    parts: of the memory that it can change, as an estimate names them; empty where it changes the time of a step alone
    share: of these parts, at the most; idle: whether a file with it trains nothing
    several: whether it does nothing where a job has one GPU, as it has unless something says otherwise
    """

    why: str
    off: tuple[Any, ...] = OFF
    effect: Effect = ""
    parts: tuple[str, ...] = ()
    share: float = 1.0
    idle: bool = False
    several: bool = False


class Bound(msgspec.Struct, frozen=True):
    """A key whose effect is bounded.

    why: what it does
    off: values at which it does nothing
    each, usual: a unit of its value [bytes], and the value that is counted already
    parameter: what it may hold of each parameter of the model, split over all GPUs [bytes]
    kernels: `Kernels` that a part of the model may run in, whose tensors are fewer or more than those that are counted
    """

    why: str
    off: tuple[Any, ...] = OFF
    each: float = 0.0
    usual: float = 0.0
    parameter: float = 0.0
    kernels: Mapping[str, str] = {}

    def extra(self, value: Any) -> tuple[float, float]:
        """How much lower and higher the memory of a GPU may be than counted, at a value of the key [bytes]."""
        if not self.each:
            return 0.0, 0.0
        try:
            number = 0.0 if str(value).lower() == "auto" else float(value)
        except (TypeError, ValueError, OverflowError):
            number = self.usual
        change = max(-1e15, min(1e15, (number - self.usual) * self.each))
        return max(0.0, -change), max(0.0, change)


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for the keys of a dialect that no idea reads. A name that ends in `.*` matches a whole section, one that
    ends in `_*` all names that begin so.

    source: the documentation of the keys
    proven: of the harmless, those that the tool's source was read for
    """

    harmless: frozenset[str] = frozenset()
    proven: frozenset[str] = frozenset()
    stops: Mapping[str, Stop] = {}
    bounded: Mapping[str, Bound] = {}
    source: str = ""

    def kinds(self, key: str) -> tuple[Kind, ...]:
        """The lists that contain a key; the most exact pattern counts, so `a.b` goes before `a.*`. Empty where none does."""
        for name in _names(key):
            lists: dict[Kind, Iterable[str]] = {
                "harmless": self.harmless,
                "stops": self.stops,
                "bounded": self.bounded,
            }
            matches = tuple(kind for kind, names in lists.items() if name in names)
            guessed = name.endswith("*") and matches == ("harmless",) and name not in self.proven
            if guessed and suspect(key[len(name) - 1 :]):
                continue
            if matches:
                return matches
        return ()

    def stop(self, key: str, value: Any) -> Stop | None:
        """The rule of what a key changes at this value that is not modelled, or None; of a key in no list, by its name."""
        kind: Kind = next(iter(self.kinds(key)), "unknown")
        if kind == "stops":
            rule = next(self.stops[name] for name in _names(key) if name in self.stops)
            return None if value is None or _among(value, rule.off) else rule
        if kind == "unknown" and not _among(value, OFF):
            if primary(key, value):
                return Stop("is not known here, and says a size, a model or a task that the run would have")
            if suspect(key):
                return Stop(SUGGESTED, effect="either")
        return None

    def bound(self, key: str, value: Any) -> tuple[str, Bound] | None:
        """The pattern that matches a key and its rule, where the effect of this value is bounded; else None."""
        if next(iter(self.kinds(key)), None) != "bounded":
            return None
        name = next(name for name in _names(key) if name in self.bounded)
        rule = self.bounded[name]
        return None if value is None or _among(value, rule.off) else (name, rule)

    def prefixed(self, prefix: str) -> Coverage:
        """The same lists with `prefix` before each key, for a section of another file."""
        return Coverage(
            harmless=frozenset(f"{prefix}{key}" for key in self.harmless),
            proven=frozenset(f"{prefix}{key}" for key in self.proven),
            stops={f"{prefix}{key}": rule for key, rule in self.stops.items()},
            bounded={f"{prefix}{key}": rule for key, rule in self.bounded.items()},
            source=self.source,
        )

    def joined(self, other: Coverage) -> Coverage:
        """Merges in the lists of a tool that this one is built on; where both have a key, this one's rule counts."""
        own = {*self.harmless, *self.stops, *self.bounded}
        return Coverage(
            harmless=self.harmless | (other.harmless - own),
            proven=self.proven | (other.proven - own),
            stops={key: rule for key, rule in other.stops.items() if key not in own} | dict(self.stops),
            bounded={key: rule for key, rule in other.bounded.items() if key not in own} | dict(self.bounded),
            source="; ".join(text for text in (self.source, other.source) if text),
        )


def _names(key: str) -> list[str]:
    """A key, and the patterns that stand for it, the most exact first.

    >>> _names("a.b_c")
    ['a.b_c', 'a.b_*', 'a.*']
    """
    ends = [end for end, letter in enumerate(key) if letter in "._"]
    return [key, *(f"{key[: end + 1]}*" for end in reversed(ends[:50]))]


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether a value is one of several; `"False"`, `false` and False are the same, and so are 1 and `"1"` and 1.0."""
    if isinstance(value, str) and value.startswith("${oc.select:"):
        return True  # Hydra's words for the value of another key, which is looked at itself
    off = {_plain(other) for other in values}
    if isinstance(value, list | tuple) and 0 < len(value) < 100:
        return all(_plain(part) in off for part in value)
    return _plain(value) in off


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list | tuple | dict):
        return "several values" if len(value) else ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = str(value).strip().lower()[:200] if not isinstance(value, int) or abs(value) < 1e15 else "a huge number"
    try:
        number = float(text)
        text = str(int(number)) if number.is_integer() else str(number)
    except (ValueError, OverflowError):
        pass
    return {"no": "false", "off": "false", "yes": "true", "on": "true", "none": "null"}.get(text, text)


def _parts(name: str) -> list[str]:
    """The words of a name. ``_parts("weightQuantBits") == ["weight", "quant", "bits"]``"""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[-500:])
    return [part for part in re.split(r"[^a-z0-9]+", spaced.lower()) if part]


def suspect(key: str) -> bool:
    """Return whether the name of an unknown key suggests that it affects memory or time.

    >>> [suspect(key) for key in ("model.weightQuantBits", "project_title", "checkpointing_steps")]
    [True, False, False]
    """
    parts = _parts(key)
    return bool(parts) and parts[-1] not in ASIDE and any(part in SUSPECT or part.startswith(STEMS) for part in parts)


def primary(key: str, value: Any) -> bool:
    """Return whether the last part of an unknown name and its value say a size of the run, another model or another task.

    >>> pairs = (("tp_size", 4), ("tp_size", 1), ("eval_batch_size", 8), ("use_teacher", True), ("stage", "dpo"))
    >>> [primary(*pair) for pair in pairs]
    [True, False, False, True, True]
    """
    *before, last = [part for part in re.split(r"[.\s]", key.strip("-+~")[-500:]) if part] or [""]
    if last in ("enable", "enabled", "name", "path", "value") and before:
        last = before[-1]
    parts = _parts(last)
    name = "_".join(parts)
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool):
        return value and OTHERS.fullmatch(name) is not None
    try:
        number = float(str(value).replace("_", "")) if len(str(value)) < 30 else 0.0
    except ValueError:
        text = str(value).strip().lower()
        if name in ("task", "stage", "method", "algorithm", "trainer", "task_type", "training_type", "train_type"):
            return bool(TASKS & set(_parts(text)))
        if "$" in text:
            return SIZES.fullmatch(name) is not None and not UNTRAINED & set(parts)
        return bool(text) and OTHERS.fullmatch(name) is not None
    return number > 1 and SIZES.fullmatch(name) is not None and not UNTRAINED & {*parts, *before}


class _Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lists that others are built on; `prefix` goes before each of their keys."""

    file: str
    prefix: str = ""


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys with one rule, separated by spaces, each after `prefix`. `off`: in the place of the usual values of a switch
    that is off; `also_off`: more of them; `read`: the files of the tool that say so."""

    keys: str
    prefix: str = ""
    read: str = ""
    why: str = ""
    off: tuple[Any, ...] | None = None
    also_off: tuple[Any, ...] = ()
    each: float = 0.0
    usual: float = 0.0
    parameter: float = 0.0
    kernels: dict[str, str] = {}
    effect: Effect = ""
    parts: str = ""
    share: float = 1.0
    idle: bool = False
    several: bool = False

    def names(self) -> frozenset[str]:
        return words(self.keys, self.prefix)

    def values_off(self) -> tuple[Any, ...]:
        return (*OFF, *self.also_off) if self.off is None else self.off


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of `data/keys`. `proven`: the release whose source was read."""

    source: str
    proven: str
    built_on: tuple[_Base, ...] = ()
    harmless: tuple[_Group, ...] = ()
    stops: tuple[_Group, ...] = ()
    bounded: tuple[_Group, ...] = ()


@cache
def key_lists(name: str) -> Coverage:
    """Reads the lists of `data/keys/<name>.toml`, merged with those of the files that it is built on.

    >>> key_lists("accelerate").kinds("machine_rank")
    ('harmless',)
    """
    file = msgspec.convert(read_table(f"keys/{name}.toml"), _KeyFile)
    lists = Coverage(
        harmless=frozenset[str]().union(*(group.names() for group in file.harmless)),
        proven=frozenset[str]().union(*(group.names() for group in file.harmless if group.read)),
        stops={
            key: Stop(
                group.why,
                group.values_off(),
                group.effect,
                tuple(group.parts.split()),
                group.share,
                group.idle,
                group.several,
            )
            for group in file.stops
            for key in group.names()
        },
        bounded={
            key: Bound(group.why, group.values_off(), group.each, group.usual, group.parameter, group.kernels)
            for group in file.bounded
            for key in group.names()
        },
        source=file.source,
    )
    for base in file.built_on:
        lists = lists.joined(key_lists(base.file).prefixed(base.prefix))
    return lists
