"""Megatron-LM's arguments for number formats, sharded states, the optimizer, overlap and offload."""

from __future__ import annotations

from typing import Any

from loadgauge.formats.table import Facts, Idea, Keys

FP8 = {"delayed": "fp8-delayed", "tensorwise": "fp8-tensorwise", "blockwise": "fp8-blockwise", "mxfp8": "mxfp8"}
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def precision() -> Idea:
    """16 bits, and 8 or 4 bits for the matrix products."""
    owned: tuple[str, ...] = (
        "bf16",
        "fp16",
        "grad_reduce_in_bf16",
        "fp8_format",
        "fp8_recipe",
        "fp4_format",
        "fp4_recipe",
    )
    owned += ("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "fp8_hybrid", "fp8_e4m3")
    owned += ("accumulate_allreduce_grads_in_fp32", "fp8", "fp4")

    def read(keys: Keys) -> Facts:
        half = "bf16" if keys.flag("bf16") else "fp16" if keys.flag("fp16") else ""
        if keys.flag("bf16") and keys.flag("fp16"):
            raise keys.wrong("fp16", f"contradicts {keys.document.shown('bf16')}")
        eight = keys.has("fp8_format", "fp8") or keys.flag("fp8_hybrid") or keys.flag("fp8_e4m3")
        if eight or keys.has("fp4_format", "fp4"):
            if not eight:
                keys.choice("fp4_recipe", {"nvfp4": "nvfp4"})
            name = (keys.choice("fp8_recipe", FP8) or "fp8-delayed") if eight else "nvfp4"
            primary = keys.flag("fp8_param_gather" if eight else "fp4_param_gather")
            return {"precision": f"{name}-primary" if primary else name}
        if half and keys.flag("grad_reduce_in_bf16") and half == "bf16":
            return {"precision": "bf16-mixed-16"}
        return {"precision": half or "fp32"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        said: dict[str, Any] = dict.fromkeys(owned)
        asked: str = facts["precision"]
        name = {"bf16-mixed-18": "bf16", "fp16-mixed-18": "fp16", "fp8": "fp8-tensorwise"}.get(asked, asked)
        plain, primary = name.removesuffix("-primary"), name.endswith("-primary")
        backward = {ours: theirs for theirs, ours in FP8.items()}
        if name in ("bf16", "fp16"):
            return said | {name: True}
        if name == "bf16-mixed-16":
            return said | {"bf16": True, "grad_reduce_in_bf16": True}
        if name == "fp32":
            return said
        if plain == "nvfp4":
            return said | {
                "bf16": True,
                "fp4_format": "e2m1",
                "fp4_recipe": "nvfp4",
                "fp4_param_gather": primary or None,
            }
        if plain not in backward:
            return {}
        reuse = True if primary and plain == "mxfp8" else None
        shape = "e4m3" if plain == "mxfp8" else "hybrid"
        return said | {
            "bf16": True, "fp8_format": shape, "fp8_recipe": backward[plain], "fp8_param_gather": primary or None,
            "reuse_grad_buf_for_mxfp8_param_ag": reuse,
        }  # fmt: skip

    return Idea(keys=owned, facts=("precision",), read=read, write=write)


def zero() -> Idea:
    """The distributed optimizer is ZeRO-1; Megatron's and PyTorch's FSDP say their stage."""
    owned: tuple[str, ...] = (
        "use_distributed_optimizer",
        "use_megatron_fsdp",
        "use_custom_fsdp",
        "data_parallel_sharding_strategy",
    )
    owned += ("use_torch_fsdp2", "torch_fsdp2_no_reshard_after_forward", "num_distributed_optimizer_instances")

    def read(keys: Keys) -> Facts:
        replicas = keys.whole("num_distributed_optimizer_instances") or 1
        torch = keys.flag("use_torch_fsdp2")
        fsdp = keys.flag("use_megatron_fsdp") or keys.flag("use_custom_fsdp")
        if torch and fsdp:
            raise keys.wrong("use_torch_fsdp2", f"contradicts {keys.document.shown('use_megatron_fsdp')}")
        if torch:
            return {"zero": 2 if keys.flag("torch_fsdp2_no_reshard_after_forward") else 3, "replicas": replicas}
        if fsdp:
            stage = keys.choice("data_parallel_sharding_strategy", STRATEGIES)
            return {"zero": 3 if stage is None else stage, "replicas": replicas if stage != 0 else 1}
        stage = 1 if keys.flag("use_distributed_optimizer") else 0
        return {"zero": stage, "replicas": replicas if stage else 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stage, replicas = facts.get("zero") or 0, facts.get("replicas") or 1
        said: dict[str, Any] = dict.fromkeys(owned)
        if stage:
            said["use_distributed_optimizer"] = True
            said["num_distributed_optimizer_instances"] = replicas if replicas > 1 else None
        if stage > 1:
            word = {number: name for name, number in STRATEGIES.items()}[stage]
            said |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": word}
        return said

    return Idea(keys=owned, facts=("zero", "replicas"), read=read, write=write)


def overlap() -> Idea:
    """Communication under compute; the ring of context parallelism and FSDP's prefetch have no switch."""
    grads, params, tensor, experts_too = (
        *("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "overlap_moe_expert_parallel_comm"),
    )
    stages, switched_off = "overlap_p2p_comm", "no_overlap_p2p_communication"
    owned: tuple[str, ...] = (grads, params, tensor, experts_too, stages, switched_off)

    def read(keys: Keys) -> Facts:
        if not keys.has(*owned):
            return {}
        hidden = {"cp", "prefetch"}
        hidden |= {name for name, key in (("dp", grads), ("tp", tensor), ("ep", experts_too)) if keys.flag(key)}
        hidden |= {"pp"} if keys.flag(stages) is not False and not keys.flag(switched_off) else set()
        return {"overlap": ",".join(sorted(hidden))}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        hidden = {name.strip() for name in facts["overlap"].split(",")}
        if not hidden >= {"cp", "prefetch"} or hidden & {"launch"}:
            return {}
        said: dict[str, Any] = {
            grads: "dp" in hidden,
            params: "dp" in hidden and bool(facts.get("zero")),
            tensor: "tp" in hidden,
        }
        said |= {experts_too: "ep" in hidden, stages: None}
        if keys.document.syntax == "argv":
            return {key: value or None for key, value in said.items()} | {
                switched_off: None if "pp" in hidden else True
            }
        return {key: value or None for key, value in said.items()} | {stages: None if "pp" in hidden else False}

    return Idea(keys=owned, facts=("overlap",), read=read, write=write)


def optimizer() -> Idea:
    """`adam` is AdamW, as weight decay is decoupled."""
    names = {
        "adam": "adamw",
        "adamw": "adamw",
        "sgd": "sgd-momentum",
        "muon": "muon",
        "dist_muon": "muon",
        "lion": "lion",
    }
    owned: tuple[str, ...] = (
        "optimizer",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "use_precision_aware_optimizer",
        "sgd_momentum",
    )

    def read(keys: Keys) -> Facts:
        name = keys.choice("optimizer", names) or "adamw"
        moments = {keys.word("exp_avg_dtype") or "fp32", keys.word("exp_avg_sq_dtype") or "fp32"}
        if moments != {"fp32"}:
            key = "exp_avg_dtype" if keys.has("exp_avg_dtype") else "exp_avg_sq_dtype"
            raise keys.wrong(key, "moments other than fp32 are not read")
        if name == "sgd-momentum" and keys.real("sgd_momentum") == 0:
            name = "sgd"
        return {"optimizer": name}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name = facts["optimizer"]
        theirs = {"adamw": "adam", "sgd-momentum": "sgd", "sgd": "sgd", "muon": "muon", "lion": "lion"}.get(name)
        if theirs is None:
            return {}
        said: dict[str, Any] = {"optimizer": theirs}
        if theirs == "sgd" and (name == "sgd" or keys.has("sgd_momentum")):
            said["sgd_momentum"] = 0.0 if name == "sgd" else 0.9
        return said

    return Idea(keys=owned, facts=("optimizer",), read=read, write=write)


def loss(prefix: str = "") -> Idea:
    """The fused forms of the vocabulary-parallel loss: Megatron's own, and Transformer Engine's."""
    switch, kind = f"{prefix}cross_entropy_loss_fusion", f"{prefix}cross_entropy_fusion_impl"
    forms = {"native": "jit", "te": "fused"}

    def read(keys: Keys) -> Facts:
        chosen = keys.choice(kind, forms) if keys.flag(switch) else None
        return {"loss": (chosen or "jit") if keys.flag(switch) else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = facts["loss"]
        backward = {ours: theirs for theirs, ours in forms.items()}
        if wanted in backward:
            return {switch: True, kind: backward[wanted]}
        return {switch: None, kind: None} if wanted in ("auto", "inplace") else {}

    return Idea(keys=(switch, kind), facts=("loss",), read=read, write=write)


def offload() -> Idea:
    """The optimizer in host memory, all of it or nothing."""
    owned: tuple[str, ...] = ("optimizer_cpu_offload", "optimizer_offload_fraction")

    def read(keys: Keys) -> Facts:
        share = keys.real("optimizer_offload_fraction")
        if not keys.flag("optimizer_cpu_offload") or share == 0:
            return {"offload": "none"}
        if share not in (None, 1.0):
            raise keys.wrong("optimizer_offload_fraction", f"a part ({share}) is not read; 0 or 1 is")
        return {"offload": "optimizer"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if facts["offload"] == "optimizer":
            return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": None}
        return dict.fromkeys(owned) if facts["offload"] == "none" else {}

    return Idea(keys=owned, facts=("offload",), read=read, write=write)
