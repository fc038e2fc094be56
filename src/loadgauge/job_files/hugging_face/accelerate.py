"""accelerate's YAML or JSON (`accelerate config`). Each section repeats its name in its keys."""

from typing import Any

from loadgauge.job_files.hugging_face.huggingface import processes
from loadgauge.job_files.ideas import (
    CPU,
    NOWHERE,
    RESHARDED,
    SHARDING,
    Dialect,
    Facts,
    Idea,
    Keys,
    Named,
    reads,
    row,
    saving,
)

P, M, D, F = (
    "parallelism_config.parallelism_config_",
    "megatron_lm_config.megatron_lm_",
    "deepspeed_config.",
    "fsdp_config.fsdp_",
)
KINDS = {
    **dict.fromkeys(("NO", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU"), ""),
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
    "MEGATRON_LM": "megatron",
}
SPELLED = dict.fromkeys(CPU, True) | dict.fromkeys(NOWHERE, False)


def _kind(keys: Keys) -> str:
    """Return which of its engines a file asks for."""
    kind = keys.choice("distributed_type", KINDS)
    if kind is not None:
        return str(kind)
    return "fsdp" if keys.has(f"{F}version") else "deepspeed" if keys.has(f"{D}zero_stage") else ""


def _degrees_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    ranks, context, replicas = (facts.get(name) or 1 for name in ("tp", "cp", "replicas"))
    if facts.get("framework") == "megatron" and _kind(keys) in ("megatron", ""):
        return {
            at.other["tp"]: ranks,
            at.other["pp"]: facts.get("pp") or 1,
            at.other["sp"]: bool(facts.get("sequence_parallel")) if ranks > 1 else None,
            at.other["ep"]: facts.get("ep") if (facts.get("ep") or 1) > 1 else None,
        }
    if facts.get("zero") not in (2, 3) or facts.get("framework") == "deepspeed" or facts.get("offload") == "optimizer":
        return dict.fromkeys(("use_parallelism_config", at.tp, at.cp, at.copies, at.shards))
    whole, plain = facts.get("shards"), ranks == context == 1 and not keys.has(at.copies, at.shards, at.tp, at.cp)
    if plain and (replicas == 1 or whole == 1):
        return {}
    split = {at.copies: replicas, at.shards: whole} if whole is not None and "gpus" in facts else {}
    return {at.tp: ranks, at.cp: context, **split}


@reads(
    "use_parallelism_config",
    facts="tp cp pp ep sequence_parallel replicas dp",
    write=_degrees_written,
    tp=f"{P}tp_size",
    cp=f"{P}cp_size",
    copies=f"{P}dp_replicate_size",
    shards=f"{P}dp_shard_size",
    also=f"{P}sp_size",
    other={
        "tp": f"{M}tp_degree", "pp": f"{M}pp_degree", "sp": f"{M}sequence_parallelism", "ep": f"{M}expert_model_parallel_size",
    },
)  # fmt: skip
def _degrees(keys: Keys, at: Named) -> Facts:
    if _kind(keys) == "megatron":
        tensor = keys.whole(at.other["tp"]) or 1
        return {
            "tp": tensor,
            "pp": keys.whole(at.other["pp"]) or 1,
            "ep": keys.whole(at.other["ep"]) or 1,
            "sequence_parallel": bool(keys.flag(at.other["sp"])) and tensor > 1,
            "cp": 1,
        }
    ranks, parts = keys.whole(at.copies) or 1, keys.whole(at.shards)
    return {
        "tp": keys.whole(at.tp) or 1,
        "cp": keys.whole(at.cp) or keys.whole(f"{P}sp_size") or 1,
        "pp": 1,
        "ep": 1,
        "dp": parts and ranks * parts,
        "replicas": None if parts is None else ranks if parts > 1 else 1,
    }


ENGINE_VERSION, ENGINE_STRATEGY, ENGINE_RESHARD = f"{F}version", f"{F}sharding_strategy", f"{F}reshard_after_forward"
ENGINE_OFFLOAD, ENGINE_AGAIN = f"{F}offload_params", f"{F}activation_checkpointing"
ENGINE_STAGE, ENGINE_PARAM, ENGINE_STATE = (
    f"{D}{name}" for name in ("zero_stage", "offload_param_device", "offload_optimizer_device")
)
ENGINE_DISTRIBUTED, ENGINE_WHAT = f"{M}use_distributed_optimizer", f"{M}recompute_activations"
ENGINE_OWNED = (
    "distributed_type",
    ENGINE_VERSION,
    ENGINE_STRATEGY,
    ENGINE_RESHARD,
    ENGINE_OFFLOAD,
    ENGINE_AGAIN,
    ENGINE_STAGE,
    ENGINE_PARAM,
    ENGINE_STATE,
    ENGINE_DISTRIBUTED,
    ENGINE_WHAT,
)


def _of_fsdp(keys: Keys) -> Facts:
    number = keys.whole(ENGINE_VERSION) or 1
    strategy = keys.has(ENGINE_STRATEGY)
    keys.refuse(
        ENGINE_STRATEGY,
        f"contradicts {keys.document.shown(ENGINE_VERSION)} = 2, which has {ENGINE_RESHARD}",
        when=number == 2 and strategy,
    )
    zero = keys.choice(ENGINE_STRATEGY if strategy else ENGINE_RESHARD, RESHARDED if number == 2 else SHARDING)
    word = str(keys.raw(ENGINE_STRATEGY) or keys.raw(ENGINE_RESHARD) or "").upper()
    within = number == 1 and (word.startswith("HYBRID") or word in ("4", "5"))
    return {
        "framework": "huggingface",
        "zero": 3 if zero is None else zero,
        "offload": "all" if keys.flag(ENGINE_OFFLOAD) else "none",
        # Sharded within a machine, and as many replicas as machines.
        "replicas": keys.whole("num_machines") or 1 if within else None,
        "recompute": "full" if keys.flag(ENGINE_AGAIN) else None,
    }


def _engine_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    zero, moved, word = facts.get("zero") or 0, facts.get("offload") or "none", facts.get("recompute") or "none"
    values: dict[str, Any] = dict.fromkeys(ENGINE_OWNED)
    if facts.get("framework") == "megatron":
        own = {ENGINE_DISTRIBUTED: zero > 0, ENGINE_WHAT: word == "selective"}
        return values | {"distributed_type": "MEGATRON_LM", **own}
    if facts.get("framework") == "deepspeed" or zero == 1 or moved == "optimizer":
        devices = {ENGINE_PARAM: moved == "all", ENGINE_STATE: moved != "none"} if zero else {}
        spelled = {key: "cpu" if away else "none" for key, away in devices.items()}
        return values | {"distributed_type": "DEEPSPEED", ENGINE_STAGE: zero} | spelled
    if zero == 0:
        return values | {"distributed_type": "MULTI_GPU" if (facts.get("gpus") or 1) > 1 else "NO"}
    number = keys.whole(ENGINE_VERSION)
    old = keys.has(ENGINE_VERSION, ENGINE_STRATEGY) and (number or 1) == 1
    return values | {
        "distributed_type": "FSDP",
        ENGINE_OFFLOAD: moved == "all",
        ENGINE_AGAIN: word == "full",
        ENGINE_VERSION: number if old else 2,
        **({ENGINE_STRATEGY: "FULL_SHARD" if zero == 3 else "SHARD_GRAD_OP"} if old else {ENGINE_RESHARD: zero == 3}),
    }


@reads(*ENGINE_OWNED, facts="framework zero offload recompute replicas", write=_engine_written)
def _engine(keys: Keys) -> Facts:
    kind = _kind(keys)
    if kind == "fsdp":
        return _of_fsdp(keys)
    if kind == "megatron":
        again = "selective" if keys.flag(ENGINE_WHAT) else "none"
        return {"framework": "megatron", "zero": 1 if keys.flag(ENGINE_DISTRIBUTED) else 0, "recompute": again}
    if kind != "deepspeed" or keys.has(f"{D}deepspeed_config_file"):
        return {"framework": "deepspeed"} if kind == "deepspeed" else {"framework": "huggingface", "zero": 0}
    states = "optimizer" if keys.choice(ENGINE_STATE, SPELLED) else "none"
    moved = "all" if keys.choice(ENGINE_PARAM, SPELLED) else states
    number = keys.whole(ENGINE_STAGE, minimum=0)
    return {"framework": "deepspeed", "zero": 2 if number is None else number, "offload": moved}


def _accumulation_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    # Only DeepSpeed's section has a place for it; elsewhere it is an argument of the trainer.
    present = [key for key in at.names if keys.has(key)] or ([at.names[0]] if _kind(keys) == "deepspeed" else [])
    return dict.fromkeys(present, facts.get("accumulation") or 1)


@reads(
    facts="accumulation",
    write=_accumulation_written,
    names=(f"{D}gradient_accumulation_steps", "gradient_accumulation_steps", f"{M}num_micro_batches"),
)
def _accumulation(keys: Keys, at: Named) -> Facts:
    return {"accumulation": keys.agreed(at.names, keys.whole)}


ACCELERATE = Dialect(
    name="accelerate",
    trainers="trl",
    title="accelerate configuration",
    versions="accelerate 0.20 - 1.15",
    syntaxes=("yaml", "json"),
    auto=True,
    blank={
        "yaml": "compute_environment: LOCAL_MACHINE\nmachine_rank: 0\nmain_training_function: main\n",
        "json": '{\n  "compute_environment": "LOCAL_MACHINE",\n  "machine_rank": 0,\n  "main_training_function": "main"\n}\n',
    },
    ideas=(
        processes(argv=False),
        _engine,
        _degrees,
        _accumulation,
        # DeepSpeed's configuration in a file of its own, which is read alongside this one.
        Idea(keys=(f"{D}deepspeed_config_file",), facts=(), read=lambda keys: {}),
        saving(f"{F}state_dict_type", switches=(f"{D}zero3_save_16bit_model",)),
        row("precision", "mixed_precision", words={"bf16": "bf16", "fp16": "fp16", "no": "fp32"}),
    ),
)
