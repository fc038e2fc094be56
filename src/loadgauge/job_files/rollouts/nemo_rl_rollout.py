"""Tells which part of a NeMo-RL recipe is read, and the engine that generates."""

from __future__ import annotations

from typing import Any

from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.ideas.table import MISSING, Facts, Idea, Keys, names_in

P, D, M, G = "policy.", "policy.dtensor_cfg.", "policy.megatron_cfg.", "policy.generation."
V = f"{G}vllm_cfg."
ALGORITHMS = ("ppo", "grpo", "dpo", "sft", "rm", "distillation")
"""Sections, of which a recipe has one."""
BACKENDS = ("vllm", "sglang", "megatron", "trtllm", "dynamo")
"""Engines that generate; those beside vLLM and SGLang are counted as vLLM, and the answer says so."""


def algorithm_of(keys: Keys) -> str:
    """The section of `ALGORITHMS` that a recipe has, `sft` where it has none; a list of `teachers` is off-policy."""
    if keys.document.get("teachers") is not MISSING:
        return "off-policy"
    present = {name.split(".")[0] for name in keys.document.names()}
    matches = [name for name in ALGORITHMS if name in present]
    return matches[0] if matches else "sft"


def generates(keys: Keys) -> bool:
    """Return whether a step has answers."""
    return algorithm_of(keys) in ("grpo", "distillation", "ppo")


def megatron_trains(keys: Keys) -> bool:
    """Return whether Megatron trains; both sections may be there, one of them on."""
    on = keys.flag(f"{M}enabled")
    if on and keys.flag(f"{D}enabled"):
        raise keys.wrong(f"{M}enabled", f"contradicts {D}enabled")
    return bool(on)


SIZES = dict(
    zip(MODEL_PARALLEL, names_in("tensor_model pipeline_model context expert_model expert_tensor"), strict=True)
)
"""What Megatron-Core calls the axes."""


def backend_of(keys: Keys) -> str:
    """The engine that generates."""
    return str(keys.choice(f"{G}backend", {name: name for name in BACKENDS}) or "vllm")


def _of_sglang(keys: Keys, asleep: bool) -> dict[str, Any]:
    """Options of SGLang's servers, by its own names."""
    own = f"{G}sglang_cfg."
    used, graphs = keys.real(f"{own}mem_fraction_static"), not keys.flag(f"{own}disable_cuda_graph")
    options: dict[str, Any] = {
        "tp": keys.whole(f"{own}sglang_server_config.num_gpus_per_engine") or 1,
        "static_fraction": 0.85 if used is None else used,
        "graphs": str(graphs).lower(),
        "sleep": 2 if asleep else 0,
    }
    named = {
        "context": "context_length",
        "max_num_seqs": "max_running_requests",
        "max_batched_tokens": "chunked_prefill_size",
    }
    return options | {name: size for name, key in named.items() if (size := keys.whole(f"{own}{key}"))}


def _of_others(keys: Keys, megatron: bool) -> dict[str, Any]:
    """Ranks of an engine of Megatron's own, which are the trainer's unless it is told otherwise, or of TensorRT-LLM's."""
    if not megatron:
        used = keys.real(f"{G}trtllm_cfg.gpu_memory_utilization")
        return {"tp": keys.whole(f"{G}trtllm_cfg.tensor_parallel_size") or 1} | ({"utilization": used} if used else {})
    own = f"{G}mcore_generation_config."
    sizes = {axis: f"{name}_parallel_size" for axis, name in SIZES.items() if axis in ("tp", "pp", "ep")}
    ranks = {axis: keys.whole(f"{own}{name}") or keys.whole(f"{M}{name}") or 1 for axis, name in sizes.items()}
    return ranks if ranks["ep"] % ranks["tp"] == 0 else ranks | {"ep": 1}


def rollout() -> Idea:
    """vLLM, which sleeps at level 1 where it is on the trainer's GPUs; the trainer moves everything to the host meanwhile
    (`models/generation/vllm/vllm_worker.py`, `offload_after_refit`)."""
    sizes = {"tp": f"{V}tensor_parallel_size", "pp": f"{V}pipeline_parallel_size", "ep": f"{V}expert_parallel_size"}
    share, eager, longest, prefixes = (
        f"{V}{name}" for name in ("gpu_memory_utilization", "enforce_eager", "max_model_len", "enable_prefix_caching")
    )
    most = {
        "max_num_seqs": f"{G}vllm_kwargs.max_num_seqs",
        "max_batched_tokens": f"{G}vllm_kwargs.max_num_batched_tokens",
    }
    backend, dtype, cache, together = f"{G}backend", f"{V}precision", f"{V}kv_cache_dtype", f"{G}colocated.enabled"
    formats = {"bfloat16": "bf16", "fp8": "fp8", "float32": None, "float16": "bf16"}
    caches = {"auto": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8", "bfloat16": "bf16"}

    def read(keys: Keys) -> Facts:
        if not generates(keys):
            return {}
        engine, asleep = backend_of(keys), keys.flag(together) is not False
        if engine == "sglang":
            text = ",".join(f"{name}={value}" for name, value in _of_sglang(keys, asleep).items())
            return {"rollout": Engine.parse(f"sglang:{text}").text(), "rollout_offload": "all" if asleep else None}
        options: dict[str, Any] = {name: keys.whole(key) or 1 for name, key in sizes.items()}
        used, context = keys.real(share), keys.whole(longest)
        weights = keys.choice(dtype, formats)
        if keys.has(dtype) and weights is None:
            raise keys.wrong(dtype, "weights of float32 are not read")
        options |= {
            "utilization": 0.6 if used is None else used,
            "graphs": "false" if keys.flag(eager) else "true",
            "prefix": "false" if keys.flag(prefixes) is False else "true",
            "sleep": int(asleep),
            "weights": weights or "bf16",
            "kv": keys.choice(cache, caches) or "bf16",
        } | ({"context": context} if context else {})
        options |= {name: value for name, key in most.items() if (value := keys.whole(key)) is not None}
        if engine in ("megatron", "trtllm"):
            options |= _of_others(keys, engine == "megatron")
        if options["ep"] > 1 and options["ep"] % options["tp"]:
            raise keys.wrong(sizes["ep"], f"{options['ep']} is no multiple of tensor_parallel_size = {options['tp']}")
        text = "vllm:" + ",".join(f"{name}={value}" for name, value in options.items())
        return {"rollout": Engine.parse(text).text(), "rollout_offload": "all" if asleep else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        engine = Engine.parse(facts.get("rollout") or "vllm")
        if not generates(keys) or engine.kind != "vllm" or engine.weights not in ("bf16", "fp8"):
            return {}
        plain, values = Engine.parse("vllm"), {key: getattr(engine, name) for name, key in sizes.items()}
        for name, key in most.items():
            usual = getattr(engine, name) == getattr(plain, name)
            values[key] = None if usual and not keys.has(key) else getattr(engine, name)
        return values | {
            **({backend: "vllm"} if keys.has(backend) else {}),
            share: engine.utilization,
            eager: not engine.graphs,
            longest: engine.context,
            prefixes: None if engine.prefix else False,
            dtype: "fp8" if engine.weights == "fp8" else "bfloat16",
            cache: "fp8" if engine.kv == "fp8" else "auto",
        }

    owned = (*sizes.values(), *most.values(), share, eager, longest, prefixes, dtype, cache)
    return Idea(keys=owned, facts=("rollout", "rollout_offload"), read=read, write=write)
