"""Names of keys in the variants of verl's configuration."""

from loadgauge.job_files.ideas.table import Document, Keys

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
F, M, O, W = f"{A}fsdp_config.", f"{A}megatron.", f"{A}optim.", "actor_rollout_ref.model."
T, OVER = f"{M}override_transformer_config.", f"{O}override_optimizer_config."

ENGINES = {
    "dp": "fsdp", "fsdp": "fsdp", "fsdp2": "fsdp", "fsdp_turbo": "fsdp", "megatron": "megatron", "mindspeed": "megatron",
    "mlite": "mlite", "veomni": "veomni", "torchtitan": "torchtitan", "automodel": "automodel",
}  # fmt: skip
OWN = {
    "fsdp": f"{A}fsdp_config.", "megatron": M, "mlite": f"{A}engine.", "veomni": f"{A}veomni.", "torchtitan": f"{A}torchtitan.",
    "automodel": f"{A}automodel.",
}  # fmt: skip
"""Sections of engines."""
SIZES = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size", "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size",
}  # fmt: skip
ALSO = {
    "mlite": SIZES,
    "veomni": {
        "ulysses_parallel_size": "ulysses_sequence_parallel_size", "enable_full_shard": "reshard_after_forward",
        "enable_fsdp_offload": "offload_policy",
    },
    "automodel": {
        "tp_size": "tensor_parallel_size", "cp_size": "context_parallel_size", "ep_size": "expert_parallel_size",
        "pp_size": "pipeline_parallel_size", "dp_replicate_size": "data_parallel_replicate_size",
        "defer_fsdp_grad_sync": "use_no_sync_for_gradient_accumulation",
    },
}  # fmt: skip
"""Holds what engines call the same (`workers/config/engine.py`, and Megatron Lite's `verl_mlite`)."""
DENSE = {
    axis: f"{F}{name}_parallel_size"
    for axis, name in zip(("tp", "pp", "ep"), ("tensor", "pipeline", "expert"), strict=True)
}


def variant(document: Document) -> tuple[str, list[tuple[str, str]]]:
    """The trainer (`sft` or `rl`) and the engine of a document, as one word, and the names of its keys."""
    names = document.names()
    trainer = "rl" if any(name.startswith("actor_rollout_ref.") for name in names) else "sft"
    words = [str(document.get(key)) for key in (f"{A}strategy", "model_engine", "engine") if key in names]
    words += [
        str(document.get(key)).partition("_actor")[0] for key in ("actor@actor_rollout_ref.actor",) if key in names
    ]
    named = "megatron" if "megatron" in str(document.get("config_name")) else None
    engine = next((ENGINES[word] for word in words if word in ENGINES), named)
    if engine is None:
        inside = [name for name, section in OWN.items() if any(key.startswith(section) for key in names)]
        engine = next((name for name in inside if name != "fsdp"), "fsdp")
    section = M if engine in ("megatron", "mlite") else F
    own = "engine." if trainer == "sft" else OWN[engine]
    pairs = [(f"{own}{theirs}", f"{section}{ours}") for theirs, ours in ALSO.get(engine, {}).items()]
    pairs += [(own, section)] if own != section else []
    if trainer == "sft":
        pairs += [("model.partial_pretrain", f"{W}path"), ("model.", W), ("optim.", O), ("engine", "model_engine")]
    return f"{trainer} {engine}", pairs


def engine_of(keys: Keys) -> str:
    """`fsdp`, `veomni`, `torchtitan`, `automodel` or `megatron`."""
    engine = str(getattr(keys.document, "variant", "rl fsdp")).partition(" ")[2]
    return "megatron" if engine == "mlite" else engine


def has_actor(keys: Keys) -> bool:
    """Return whether a file is one of PPO's or GRPO's trainer, and not of SFT's."""
    return not str(getattr(keys.document, "variant", "rl")).startswith("sft")
