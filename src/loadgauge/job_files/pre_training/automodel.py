"""NeMo AutoModel's recipes (YAML): Hugging Face models on FSDP2."""

from __future__ import annotations

from typing import Any

from loadgauge.job_files.hugging_face.huggingface import compiled, liger
from loadgauge.job_files.ideas.optimizers import instantiated
from loadgauge.job_files.ideas.partial import frozen_embeddings
from loadgauge.job_files.ideas.table import Dialect, Facts, Idea, Keys, row
from loadgauge.job_files.ideas.words import ATTENTION, BITSANDBYTES

DTYPES = {"bf16": "bf16-pure", "bfloat16": "bf16-pure", "torch.bfloat16": "bf16-pure", "auto": "bf16-pure"}
DTYPES |= {"float32": "bf16-autocast", "fp32": "bf16-autocast", "torch.float32": "bf16-autocast"}
"""`model.torch_dtype`: what the weights are trained in; `auto` is the checkpoint's. FSDP2 casts float32 ones to bfloat16."""
OPTIMIZERS = {
    "torch.optim.AdamW": "adamw", "torch.optim.Adam": "adamw", "torch.optim.SGD": "sgd", "dion.Muon": "muon", **BITSANDBYTES,
}  # fmt: skip
LOSSES = "nemo_automodel.components.loss."
LOSSES_OF = {
    f"{LOSSES}masked_ce.MaskedCrossEntropy": "float32", f"{LOSSES}chunked_ce.ChunkedCrossEntropy": "chunked",
    f"{LOSSES}linear_ce.FusedLinearCrossEntropy": "chunked", f"{LOSSES}te_parallel_ce.TEParallelCrossEntropy": "fused",
}  # fmt: skip
SCHEDULES = {"1f1b": "1f1b", "interleaved1f1b": "interleaved", "gpipe": "gpipe", "zbvzerobubble": "zb-v"}
D = "distributed."


def _size(keys: Keys, name: str) -> int | None:
    """A size of `distributed`; `none` is worked out from the number of GPUs."""
    if str(keys.raw(name)).lower() in ("none", "null"):
        return None
    return keys.whole(name)


def _degrees() -> Idea:
    tp, cp = f"{D}tp_size", f"{D}cp_size"
    pp, ep = f"{D}pp_size", f"{D}ep_size"
    whole, copies = f"{D}dp_size", f"{D}dp_replicate_size"
    shared, strategy, offload = f"{D}sequence_parallel", f"{D}strategy", f"{D}offload_policy"
    reshard, later = f"{D}reshard_after_forward", f"{D}defer_fsdp_grad_sync"
    owned = (tp, cp, pp, ep, whole, copies, shared, strategy, reshard, later)

    def read(keys: Keys) -> Facts:
        kind = keys.choice(strategy, {"fsdp2": 3, "ddp": 0})
        if keys.has(offload):
            raise keys.wrong(offload, "a policy of offloading is not read")
        if kind is None or kind == 3:
            kind = 2 if keys.flag(reshard) is False else 3
        ranks = _size(keys, tp) or 1
        facts: Facts = {
            "tp": ranks,
            "cp": _size(keys, cp) or 1,
            "pp": _size(keys, pp) or 1,
            "ep": _size(keys, ep) or 1,
            "zero": kind,
            "sequence_parallel": bool(keys.flag(shared)) and ranks > 1,
            # As `FSDP2Config` has it, unless it is told otherwise (`components/distributed/utils.py`, `get_sync_ctx`).
            "gradient_sync": "each" if keys.flag(later) is False else "last",
        }
        if keys.given.get("gpus") == 1:
            facts["zero"] = 0
        replicas, ranks_of_data = _size(keys, copies), _size(keys, whole)
        if replicas is not None:
            facts["replicas"] = replicas
        if ranks_of_data is not None:
            facts["dp"] = ranks_of_data
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stage = facts.get("zero") or 0
        if stage == 1:
            return {}
        values: dict[str, Any] = {strategy: "fsdp2" if stage else "ddp"}
        values[later] = False if facts.get("gradient_sync") == "each" else True if keys.has(later) else None
        values[reshard] = False if stage == 2 else True if keys.has(reshard) and stage else None
        for key, axis in ((tp, "tp"), (cp, "cp"), (pp, "pp"), (ep, "ep")):
            size = facts.get(axis) or 1
            values[key] = size if size > 1 or keys.document.get(key) not in (None, 1) else None
            if keys.has(key):
                values[key] = size
        replicas = facts.get("replicas") or 1
        values[copies] = replicas if replicas > 1 else 1 if _size(keys, copies) else None
        if _size(keys, whole) is not None:
            values[whole] = facts.get("dp") if "gpus" in facts else None
        values[shared] = (
            bool(facts.get("sequence_parallel")) if keys.has(shared) or facts.get("sequence_parallel") else None
        )
        return values

    return Idea(
        keys=owned,
        facts=("tp", "cp", "pp", "ep", "zero", "replicas", "dp", "sequence_parallel", "gradient_sync"),
        read=read,
        write=write,
    )


def _pipeline() -> Idea:
    schedule, micro = f"{D}pipeline.pp_schedule", f"{D}pipeline.pp_microbatch_size"
    whole, local = "step_scheduler.global_batch_size", "step_scheduler.local_batch_size"

    def read(keys: Keys) -> Facts:
        facts: Facts = {"global_batch": keys.whole(whole) or 32, "micro_batch": keys.whole(local) or 1}
        if (_size(keys, f"{D}pp_size") or 1) > 1:
            facts["micro_batch"] = keys.whole(micro) or 1
            facts["schedule"] = keys.choice(schedule, SCHEDULES) or "1f1b"
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        sequences, stages = facts.get("micro_batch") or 1, facts.get("pp") or 1
        values: dict[str, Any] = {whole: facts["global_batch"]} if facts.get("global_batch") else {}
        if stages == 1:
            return values | {local: sequences, micro: None, schedule: None}
        spelled = {ours: theirs for theirs, ours in SCHEDULES.items()}.get(facts.get("schedule") or "1f1b")
        accumulation = facts.get("accumulation") or 1
        return values | {local: sequences * accumulation, micro: sequences, schedule: spelled}

    return Idea(
        keys=(schedule, micro, whole, local), facts=("global_batch", "micro_batch", "schedule"), read=read, write=write
    )


def _adapter() -> Idea:
    target, rank, modules, every, dropped = (
        f"peft.{name}" for name in ("_target_", "dim", "target_modules", "match_all_linear", "dropout")
    )
    four, eight, nested = (
        f"quantization.{name}" for name in ("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant")
    )
    kind = "quantization.bnb_4bit_quant_type"

    def read(keys: Keys) -> Facts:
        if not keys.has(target, rank, modules, every):
            if keys.flag(four) or keys.flag(eight):
                raise keys.wrong(
                    four if keys.flag(four) else eight, "says a quantised base, and no adapter trains on it"
                )
            return {"lora_rank": 0, "qlora": False}
        chosen = keys.words(modules) or []
        everything = bool(keys.flag(every)) or not chosen or set(chosen) & {"*_proj", "*", "all-linear"}
        names = [name.rpartition(".")[2].lstrip("*") for name in chosen]
        if not everything and any("*" in name for name in names):
            raise keys.wrong(modules, "a pattern of names is not read; *_proj and names of layers are")
        quantised = bool(keys.flag(four))
        base = keys.choice(kind, {"nf4": "nf4-single", "fp4": "fp4"}) or "nf4-single"
        if quantised and keys.flag(nested):
            if base == "fp4":
                raise keys.wrong(nested, "quantised scales of fp4 are not read; those of nf4 are")
            base = "nf4"
        if keys.flag(eight):
            quantised, base = True, "int8"
        return {
            "lora_rank": keys.whole(rank) or 8,
            "lora_targets": "all" if everything else ",".join(names),
            "lora_dropout": keys.real(dropped) or 0.0,
            "qlora": quantised,
            "base": base if quantised else None,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if not facts.get("lora_rank"):
            return dict.fromkeys((target, rank, modules, every, dropped, four, eight, nested, kind))
        base = facts.get("base") or "nf4"
        if facts.get("qlora") and base not in ("nf4", "nf4-single", "fp4", "int8"):
            return {}
        chosen = facts.get("lora_targets") or "all"
        listed = {"all": "*_proj", "attention": ["*q_proj", "*k_proj", "*v_proj", "*o_proj"]}.get(chosen)
        quantised = True if facts.get("qlora") and base != "int8" else None
        return {
            target: "nemo_automodel.components._peft.lora.PeftConfig",
            rank: facts["lora_rank"],
            every: None,
            modules: [f"*{name}" for name in chosen.split(",")] if listed is None else listed,
            dropped: facts.get("lora_dropout") or (0.0 if keys.has(dropped) else None),
            four: quantised,
            nested: (base == "nf4") if quantised else None,
            kind: "fp4" if quantised and base == "fp4" else None,
            eight: True if facts.get("qlora") and base == "int8" else None,
        }

    return Idea(
        keys=(target, rank, modules, every, dropped, four, eight, nested, kind),
        facts=("lora_rank", "lora_targets", "qlora", "base", "lora_dropout"),
        read=read,
        write=write,
    )


def _checkpointing() -> Idea:
    key = f"{D}activation_checkpointing"

    def read(keys: Keys) -> Facts:
        if keys.raw(key) == "selective":
            raise keys.wrong(key, "operations that are kept are not read; true, full and false are")
        return {"recompute": "full" if keys.raw(key) == "full" or (keys.has(key) and keys.flag(key)) else "none"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        return {key: word == "full"} if word in ("none", "full") else {}

    return Idea(keys=(key,), facts=("recompute",), read=read, write=write)


def _length() -> Idea:
    """Tokens of a packed sequence (0: not packed), or those that the data set pads or cuts its samples to."""
    packed, names = "packed_sequence.packed_sequence_size", ("dataset.seq_length", "dataset.seq_len")
    images = "packed_sequence.pack_size"  # the same in recipes of vision

    def read(keys: Keys) -> Facts:
        whole = keys.whole(packed, minimum=0) or keys.whole(images, minimum=0)
        return {"seq_len": whole or keys.agreed(names, keys.whole)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        used = next((name for name in (packed, images) if keys.whole(name, minimum=0)), None)
        present = [] if used else [name for name in names if keys.has(name)]
        return dict.fromkeys(present or [used or packed], facts["seq_len"])

    return Idea(keys=(packed, images, *names), facts=("seq_len",), read=read, write=write)


AUTOMODEL = Dialect(
    name="automodel",
    title="NeMo AutoModel recipe",
    versions="NeMo AutoModel 0.2 - 0.7",
    syntaxes=("yaml",),
    framework="torchtitan",
    blank={"yaml": "recipe: TrainFinetuneRecipeForNextTokenPrediction\n"},
    ideas=(
        row("model", "model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path", kind="word"),
        _degrees(),
        _pipeline(),
        _length(),
        _adapter(),
        frozen_embeddings("freeze_config"),
        _checkpointing(),
        row("precision", "model.torch_dtype", "model.dtype", words=DTYPES, default="bf16-pure"),
        instantiated("optimizer._target_", OPTIMIZERS),
        liger("model.use_liger_kernel"),
        row("loss", "loss_fn._target_", words=LOSSES_OF, default="float32"),
        row("attention", "model.attn_implementation", words=ATTENTION),
        compiled("compile.enabled"),
    ),
)
