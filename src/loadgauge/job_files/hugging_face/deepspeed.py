"""DeepSpeed's JSON. `auto` is left to the trainer's own arguments, as in transformers and accelerate."""

from typing import Any

from loadgauge.core.definitions.layout.zero_engine import SETTINGS
from loadgauge.job_files.ideas import (
    CPU,
    NEAREST,
    NOWHERE,
    STAYS,
    Dialect,
    Document,
    Facts,
    Idea,
    Keys,
    Named,
    degree,
    in_part,
    reads,
    saving,
)

OPTIMIZERS = {
    "AdamW": "adamw", "Adam": "adamw", "CPUAdam": "adamw", "Lion": "lion", "Muon": "muon", "Adafactor": "adafactor",
    "SGD": "sgd", "fusedadam": "adamw", "Lamb": "adamw", "OneBitAdam": "adamw", "OneBitLamb": "adamw", "ZeroOneAdam": "adamw",
}  # fmt: skip
COMPRESSED = {"onebitadam": 1, "onebitlamb": 2, "zerooneadam": 2}
"""Tensors of 4 bytes that one-bit optimizers keep for a parameter beside Adam's, up to release 0.17."""
UNSTAGED = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
"""Names of fields whose other name begins with `stage3_`, as both are taken (`DeepSpeedZeroConfig`, `populate_by_name`)."""


def other_names(document: Document) -> tuple[str, list[tuple[str, str]]]:
    """Return the pairs of a file's names and of those that are read, for the dialect's `renames`."""
    section, held = "zero_optimization.", {*document.names()}
    return "", [(section + name, f"{section}stage3_{name}") for name in UNSTAGED if section + name in held]


GATHERS = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
"""Switches by which a checkpoint holds whole weights, now and before 0.6."""
AUTO_TP = ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size")
OVERLAPS = {True: "cp,dp,pp,prefetch", False: "cp,pp,prefetch"}
"""What `overlap_comm` hides; what ZeRO 3 gathers ahead and what other axes send has no switch there."""


def _batch_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    # What another file says of it, this one need not repeat.
    left = [key for key in (at.whole, at.micro, at.count) if keys.document.get(key) == "auto"]
    whole = {at.whole: facts["global_batch"]} if "global_batch" in facts and "gpus" in facts else {}
    values = {at.micro: facts.get("micro_batch") or 1, at.count: facts.get("accumulation") or 1, **whole}
    return {key: value for key, value in values.items() if key not in left or len(left) < 3}


def _batch_read(keys: Keys, at: Named) -> Facts:
    whole, micro, count = (keys.whole(key) for key in (at.whole, at.micro, at.count))
    usual = 1 if micro and not whole and at.count not in keys.left else None
    return {"global_batch": whole, "micro_batch": micro, "accumulation": count or usual}


def batch(prefix: str = "") -> Idea:
    """The idea of the batch: sequences of a step and of a micro-batch, and micro-batches per step (B = b a d)."""
    return reads(
        facts="global_batch micro_batch accumulation",
        write=_batch_written,
        whole=f"{prefix}train_batch_size",
        micro=f"{prefix}train_micro_batch_size_per_gpu",
        count=f"{prefix}gradient_accumulation_steps",
    )(_batch_read)


def _sharded(keys: Keys, at: Named) -> Facts:
    number = keys.whole(at.stage, minimum=0)
    keys.refuse(at.stage, f"must be 0, 1, 2 or 3, got {number}", when=number is not None and number > 3)
    moved = keys.choice(at.state, at.spelled) or keys.flag(at.old)
    if keys.choice(at.param, at.spelled) or keys.flag(at.older):
        if number == 3:
            return {"zero": number, "offload": "all", **_beside(keys, at)}
        keys.remark(f"{keys.document.shown(at.param)} does nothing below ZeRO 3 (DeepSpeed 0.19, engine.py)")
    keys.refuse(at.state, "needs stages 1 to 3", when=moved and not number)
    word = in_part(keys, at.share) if moved else "none"
    keys.refuse(at.share, f"needs stage 3, not {number}", when=":" in word and number != 3)
    return {"zero": number or 0, "offload": word, **(_beside(keys, at) if word != "none" else {})}


def _beside(keys: Keys, at: Named) -> Facts:
    nvme = [keys.raw(key) == "nvme" for key in (at.state, at.param) if keys.raw(key) in CPU]
    keys.refuse(
        at.param,
        f"{keys.raw(at.param)!r} with the optimizer on {keys.raw(at.state)!r} is not read; the same is",
        when=len(set(nvme)) > 1,
    )
    plain = any(keys.flag(key) is False for key in at.pins)
    return {"offload_to": "nvme" if any(nvme) else None, "pin_memory": False if plain else None}


def _zero_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    moved, _, part = (facts.get("offload") or "none").partition(":")
    device = "nvme" if facts.get("offload_to") == "nvme" else "cpu"
    hidden = facts.get("overlap")
    locked = facts.get("pin_memory") is not False
    away = {at.param: moved == "all", at.state: moved != "none"}
    pinned = [key for key in at.pins if moved != "none" and (keys.has(key) or (not locked and key == at.pins[1]))]
    return {
        at.stage: facts.get("zero") or 0,
        **{key: device if on else "none" for key, on in away.items() if on or keys.has(key)},
        **dict.fromkeys(pinned, locked),
        **dict.fromkeys(filter(keys.has, (at.old, at.older))),
        at.share: float(part or 1) if part or keys.has(at.share) else STAYS,
        at.comm: hidden == OVERLAPS[True] if hidden in OVERLAPS.values() else STAYS,
    }


def _zero_read(keys: Keys, at: Named) -> Facts:
    hidden = None if keys.raw(at.comm) in (None, "auto") else keys.flag(at.comm)
    return _sharded(keys, at) | ({} if hidden is None else {"overlap": OVERLAPS[hidden]})


def zero(prefix: str = "") -> Idea:
    """The idea of the ZeRO stage, of what is offloaded to host memory, and of whether gradients are reduced beside backward."""
    spelled = dict.fromkeys(CPU, True) | dict.fromkeys(NOWHERE, False)
    return reads(
        facts="zero offload offload_to pin_memory overlap",
        write=_zero_written,
        options={"spelled": spelled},
        stage=f"{prefix}zero_optimization.stage",
        param=f"{prefix}zero_optimization.offload_param.device",
        state=f"{prefix}zero_optimization.offload_optimizer.device",
        share=f"{prefix}zero_optimization.offload_optimizer.ratio",
        old=f"{prefix}zero_optimization.cpu_offload",
        older=f"{prefix}zero_optimization.cpu_offload_param",
        comm=f"{prefix}zero_optimization.overlap_comm",
        pins=tuple(f"{prefix}zero_optimization.{where}.pin_memory" for where in ("offload_param", "offload_optimizer")),
    )(_zero_read)


def _said(keys: Keys, key: str, at: Named) -> str | None:
    if str(keys.document.get(key)).lower() == "auto":
        return "auto"
    if at.named[key] == "overlap_comm":
        on = keys.flag(key)
        return None if on is None else str(on).lower()
    number = keys.real(key)
    if number is not None and (number < 0 or not number.is_integer()):
        raise keys.wrong(key, f"must be a whole number of elements, got {number:g}")
    return None if number is None else f"{number:.0f}"


def _engine_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    told = dict(word.split("=") for word in filter(None, str(facts.get("engine") or "").split(",")))
    changed = {key: told.get(name) for key, name in at.named.items() if told.get(name) != _said(keys, key, at)}
    words = {"true": True, "false": False, "auto": "auto", None: None}
    return {key: words[value] if value in words else int(float(str(value))) for key, value in changed.items()}


def _engine_read(keys: Keys, at: Named) -> Facts:
    if not keys.whole(at.stage, minimum=0):
        return {}
    words = [f"{name}={value}" for key, name in at.named.items() if (value := _said(keys, key, at)) is not None]
    return {"engine": ",".join(words) or None}


def engine(prefix: str = "") -> Idea:
    """The idea of the engine's buckets and of how far it gathers weights ahead, as one text (`Job.engine`)."""
    named = {f"{prefix}zero_optimization.{name}": name for name in SETTINGS}
    stage = f"{prefix}zero_optimization.stage"
    return reads(*tuple(named), facts="engine", write=_engine_written, options={"named": named, "stage": stage})(
        _engine_read
    )


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name, _, recipe = facts["precision"].partition("-")
    if name not in ("bf16", "fp16", "fp32") or recipe not in ("", "mixed-16", "mixed-18"):
        return {}
    there = {key: keys.document.get(key) is True or keys.document.get(key) == "auto" for key in (at.bf16, at.fp16)}
    return {
        at.grads: {"mixed-18": "fp32", "mixed-16": name}.get(recipe),
        at.bf16: name == "bf16" if name == "bf16" or there[at.bf16] else STAYS,
        at.fp16: name == "fp16" if name == "fp16" or there[at.fp16] else STAYS,
    }


def _precision_read(keys: Keys, at: Named) -> Facts:
    half = {"bf16": keys.flag(at.bf16), "fp16": keys.flag(at.fp16)}
    keys.refuse(at.fp16, f"contradicts {keys.document.shown(at.bf16)}", when=all(half.values()))
    name = next((word for word, on in half.items() if on), None)
    if name is None:
        return {} if {at.bf16, at.fp16} & set(keys.left) else {"precision": "fp32"}
    wide = keys.choice(at.grads, {"fp32": True, "bf16": False, "fp16": False})
    return {"precision": f"{name}-mixed-18" if wide else f"{name}-mixed-16" if wide is False else name}


def precision(prefix: str = "") -> Idea:
    """The idea of the precision: `bf16` or `fp16` enabled, and the format of gradients (`grad_accum_dtype`)."""
    return reads(
        facts="precision",
        write=_precision_written,
        bf16=f"{prefix}bf16.enabled",
        fp16=f"{prefix}fp16.enabled",
        grads=f"{prefix}data_types.grad_accum_dtype",
    )(_precision_read)


def _optimizer_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name = facts["optimizer"]
    spelled = {ours: theirs for theirs, ours in reversed(OPTIMIZERS.items())} | {"adamw": "AdamW"}
    theirs = spelled.get(name.removesuffix("-momentum"))
    return {at.kind: theirs, at.momentum: 0.9 if name == "sgd-momentum" else None} if theirs else {}


@reads(facts="optimizer", write=_optimizer_written, kind="optimizer.type", momentum="optimizer.params.momentum")
def _optimizer(keys: Keys, at: Named) -> Facts:
    name = keys.choice(at.kind, OPTIMIZERS, NEAREST["optimizer"])
    more = COMPRESSED.get(str(keys.raw(at.kind)).lower(), 0)
    keys.note(at.kind, "keeps errors of what it sends compressed", "costs", "optimizer", more / 2, when=more)
    return {"optimizer": "sgd-momentum" if name == "sgd" and keys.real(at.momentum) else name}


def _context_parallel_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    ranks = facts.get("cp") or 1
    return {at.key: ranks if ranks > 1 or keys.has(at.key) else None} | dict.fromkeys(at.also)


def _context_parallel_read(keys: Keys, at: Named) -> Facts:
    ranks = keys.agreed((at.key, *at.also), keys.whole) or 1
    return {"cp": ranks, "cp_comm": "all_to_all" if ranks > 1 else None}


def context_parallel(key: str, *also: str) -> Idea:
    """The idea of context parallelism as Ulysses does it, by an all-to-all that exchanges heads for tokens; `also`: other keys."""
    return reads(facts="cp cp_comm", write=_context_parallel_written, key=key, also=also)(_context_parallel_read)


DEEPSPEED = Dialect(
    name="deepspeed",
    renames=other_names,
    trainers="trl",
    title="DeepSpeed configuration",
    versions="DeepSpeed 0.9 - 0.19",
    syntaxes=("json",),
    framework="deepspeed",
    auto=True,
    blank={"json": "{\n    \n}\n"},
    ideas=(
        Idea(
            keys=AUTO_TP,
            facts=("tp",),
            read=lambda keys: {"tp": keys.agreed(AUTO_TP, lambda key: keys.whole(key, minimum=0) or None) or 1},
            write=degree("tp", *AUTO_TP).write,
        ),
        context_parallel("sequence_parallel_size"),
        batch(),
        zero(),
        engine(),
        precision(),
        _optimizer,
        saving(switches=tuple(f"zero_optimization.{name}" for name in GATHERS)),
    ),
)
