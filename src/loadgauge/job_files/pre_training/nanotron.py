"""nanotron's YAML: the sizes of the model, `parallelism`, `tokens` and `optimizer`."""

import math
from typing import Any

from loadgauge.job_files.ideas import STAYS, Dialect, Facts, Idea, Keys, Named, degree, names_in, product, reads, row

M, P, T, OPTIMIZER = "model.model_config.", "parallelism.", "tokens.", "optimizer."
SIZES = names_in(
    """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size tie_word_embeddings
    max_position_embeddings attention_bias hidden_act
    """
)
DEFAULTS: dict[str, dict[str, Any]] = {
    "is_llama_config": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32_000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    },
    "is_starcoder2_config": {
        "model_type": "starcoder2", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
        "vocab_size": 49_280, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    },
}  # fmt: skip
DEFAULTS["is_qwen2_config"] = DEFAULTS["is_llama_config"] | {"model_type": "qwen2"}
DEFAULTS["is_llamoe_config"] = DEFAULTS["is_llama_config"] | {"model_type": "mixtral"}
"""Holds what the classes of the model's configuration have where a file leaves it out, by the key that says which."""
EXPERTS = ("moe_config.num_experts", "moe_config.top_k", "moe_config.moe_intermediate_size")
OLDER = ("moe_num_experts", "num_experts_per_tok", "num_kv_heads")
MAMBA = {
    "d_model": "hidden_size", "num_hidden_layers": "num_hidden_layers", "residual_in_fp32": "residual_in_fp32",
    "ssm_cfg.d_state": "state_size", "ssm_cfg.d_conv": "conv_kernel", "ssm_cfg.expand": "expand", "ssm_cfg.bias": "use_bias",
    "ssm_cfg.dt_rank": "time_step_rank", "ssm_cfg.conv_bias": "use_conv_bias",
}  # fmt: skip
"""Keys of a Mamba model, and transformers' names of them."""
ROUNDED = "pad_vocab_size_multiple"
NAME = "optimizer.optimizer_factory.name"


def _mamba(keys: Keys) -> Facts:
    config = {name: value for key, name in MAMBA.items() if (value := keys.raw(f"{M}{key}")) is not None}
    step, words = keys.whole(f"{M}{ROUNDED}") or 1, keys.whole(f"{M}vocab_size")
    rounded = {} if words is None else {"vocab_size": -(-words // step) * step}
    return {"config": {"model_type": "mamba", "tie_word_embeddings": False, **config, **rounded}}


def _read(keys: Keys) -> Facts:
    if keys.flag(f"{M}is_mamba_config"):
        return _mamba(keys)
    # Without a switch it is LlamaConfig, whose own is on by itself (`config/models_config.py`).
    usual = "is_llama_config" if keys.has(f"{M}num_hidden_layers") else None
    which = next((name for name in DEFAULTS if keys.raw(f"{M}{name}") is True), usual)
    if which is None:
        return {}
    usual_sizes = DEFAULTS[which]
    config = usual_sizes | {
        name: value
        for name in SIZES
        if (value := (keys.whole if type(usual_sizes.get(name)) is int else keys.raw)(f"{M}{name}")) is not None
    }
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = keys.whole(f"{M}num_key_value_heads") or keys.whole(f"{M}num_kv_heads") or heads
    config.setdefault("intermediate_size", 4 * config["hidden_size"])
    config["vocab_size"] = -(-config["vocab_size"] // (step := keys.whole(STEP) or 1)) * step
    if which == "is_qwen2_config" and not config.pop("attention_bias", False):
        config["model_type"] = "llama"
    count = keys.whole(f"{M}{OLDER[0]}")
    if count is not None:
        config |= {"num_local_experts": count, "num_experts_per_tok": keys.whole(f"{M}{OLDER[1]}") or 1}
    elif keys.has(*(f"{M}{name}" for name in EXPERTS)):
        count, top, width = (
            keys.whole(f"{M}{name}") or usual for name, usual in zip(EXPERTS, (8, 2, 1408), strict=True)
        )
        config |= {
            "model_type": "mixtral",
            "num_local_experts": count,
            "num_experts_per_tok": top,
            "intermediate_size": width,
        }
    return {"config": config}


STEP = "model.make_vocab_size_divisible_by"
MODEL = Idea(
    keys=(*(f"{M}{name}" for name in (*DEFAULTS, *SIZES, *EXPERTS, *OLDER, *MAMBA, "is_mamba_config", ROUNDED)), STEP),
    facts=("config",),
    read=_read,
)


LAYOUT_DEGREES = {"dp": "dp", "tp": "tp", "pp": "pp", "cp": "context_parallel_size", "ep": "expert_parallel_size"}


def _layout_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    size = {axis: facts.get(axis) or 1 for axis in ("tp", "pp", "cp", "ep")}
    split = product(*(degree(axis, f"{P}{LAYOUT_DEGREES[axis]}") for axis in ("cp", "ep")))
    mode = "REDUCE_SCATTER" if facts.get("sequence_parallel") else "ALL_REDUCE"
    return {
        **split.write(size, keys),
        **{f"{P}{axis}": size[axis] for axis in ("tp", "pp")},
        f"{P}dp": max(1, facts["gpus"] // math.prod(size.values())) if "gpus" in facts else STAYS,
        at.mode: mode if size["tp"] > 1 or keys.has(at.mode) else STAYS,
    }


@reads(
    *(f"{P}{key}" for key in LAYOUT_DEGREES.values()),
    facts="gpus tp pp cp ep etp sequence_parallel",
    write=_layout_written,
    engine=f"{P}pp_engine",
    mode=f"{P}tp_mode",
)
def _layout(keys: Keys, at: Named) -> Facts:
    size = {axis: keys.whole(f"{P}{key}") or 1 for axis, key in LAYOUT_DEGREES.items()}
    gpus = size["dp"] * size["tp"] * size["pp"] * size["cp"] * size["ep"]
    first = size["pp"] > 1 and keys.choice(at.engine, {"1f1b": "", "afab": "afab"}) == "afab"
    keys.note(
        at.engine, "all forwards come first, whose activations are kept", "costs", "activations", when=first, bare=True
    )
    if size["ep"] > 1:  # which lies beside dp (`ParallelContext._init_parallel_groups`), by whose ranks data are read
        same = f"the {size['ep']} ranks that share experts read the same sequences, and each is counted with its own"
        keys.remark(f"{same}: a step trains one in {size['ep']} of those that are shown")
    facts: Facts = {axis: size[axis] for axis in ("tp", "pp", "cp", "ep")} | {"gpus": gpus, "etp": 1}
    shared = str(keys.raw(at.mode) or "").upper() == "REDUCE_SCATTER"
    whole = not shared and size["tp"] > 1 and keys.raw(f"{M}is_llamoe_config")
    keys.note(
        at.mode,
        "experts whose tokens each rank of a layer has, where a share of them is counted",
        "costs",
        "activations transient",
        bare=True,
        when=whole,
    )
    return facts | {"sequence_parallel": bool(shared or whole) and size["tp"] > 1}


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name, _, form = str(facts["precision"]).partition("-")
    if name not in ("bf16", "fp16", "fp32") or form not in ("", "mixed-18", "pure"):
        return {}
    return {at.kind: {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[name], at.summed: form != "pure"}


@reads(facts="precision", write=_precision_written, kind="model.dtype", summed=f"{OPTIMIZER}accumulate_grad_in_fp32")
def _precision(keys: Keys, at: Named) -> Facts:
    name = keys.choice(at.kind, {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}) or "fp32"
    if name == "fp32":
        return {"precision": "fp32"}
    return {"precision": f"{name}-mixed-18" if keys.flag(at.summed) else f"{name}-pure"}


NANOTRON = Dialect(
    name="nanotron",
    title="nanotron's YAML",
    versions="nanotron 0.4 - 0.5",
    syntaxes=("yaml",),
    framework="megatron",
    blank={"yaml": ""},
    zero_stages=(0, 1),
    ideas=(
        _layout,
        row("micro_batch", f"{T}micro_batch_size"),
        row("accumulation", f"{T}batch_accumulation_per_replica"),
        row("seq_len", f"{T}sequence_length"),
        row("zero", f"{OPTIMIZER}zero_stage", minimum=0, default=0),
        row("recompute", f"{P}recompute_layer", words={"true": "full", "false": "none"}, default="none"),
        row("optimizer", NAME, words={"adamW": "adamw", "sgd": "sgd"}, default="adamw"),
        _precision,
        MODEL,
    ),
)
