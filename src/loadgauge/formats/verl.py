"""verl: the actor's update of its PPO / GRPO trainer, and its SFT trainer; YAML or Hydra's overrides.

What is read is the training of the actor. Reference, critic and rollout, which share the GPUs, are not.
"""

from __future__ import annotations

from typing import Any

from loadgauge.formats.megatron import MODULES, machines
from loadgauge.formats.table import Dialect, Facts, Idea, Keys, row

A = "actor_rollout_ref.actor."
F, M = f"{A}fsdp_config.", f"{A}megatron."
T = f"{M}override_transformer_config."


def _engine(keys: Keys) -> str:
    """`fsdp` or `megatron`."""
    said = keys.choice(f"{A}strategy", {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"})
    if said is not None:
        return str(said)
    inside = any(key.startswith(M) for key in keys.document.names())
    return "megatron" if inside else "fsdp"


def _gpus() -> Idea:
    each, nodes = "trainer.n_gpus_per_node", "trainer.nnodes"

    def read(keys: Keys) -> Facts:
        if not keys.has(each):
            return {}
        return {"gpus_per_node": keys.whole(each), "nodes": keys.whole(nodes) or 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if "gpus" not in facts:
            return {}
        return dict(zip((each, nodes), machines(facts, keys.whole(each) if keys.has(each) else None), strict=True))

    return Idea(keys=(each, nodes), facts=("gpus", "gpus_per_node", "nodes"), read=read, write=write)


def _layout() -> Idea:
    sizes = {
        "tp": f"{M}tensor_model_parallel_size", "pp": f"{M}pipeline_model_parallel_size",
        "vpp": f"{M}virtual_pipeline_model_parallel_size", "cp": f"{M}context_parallel_size",
        "ep": f"{M}expert_model_parallel_size",
    }  # fmt: skip
    etp, sp, distributed = f"{M}expert_tensor_parallel_size", f"{M}sequence_parallel", f"{M}use_distributed_optimizer"
    ulysses, group, reshard = f"{A}ulysses_sequence_parallel_size", f"{F}fsdp_size", f"{F}reshard_after_forward"
    param, state, policy = (f"{F}{name}" for name in ("param_offload", "optimizer_offload", "offload_policy"))
    strategy, mparam, mstate = f"{A}strategy", f"{M}param_offload", f"{M}optimizer_offload"
    owned = (
        *sizes.values(),
        etp,
        sp,
        distributed,
        ulysses,
        group,
        reshard,
        param,
        state,
        policy,
        strategy,
        mparam,
        mstate,
    )

    def read(keys: Keys) -> Facts:
        if _engine(keys) == "megatron":
            found: Facts = {name: keys.whole(key) or 1 for name, key in sizes.items()}
            shared = keys.flag(sp) is not False
            stages = found["pp"] > 1
            return found | {
                "framework": "megatron", "sequence_parallel": shared and found["tp"] > 1,
                "etp": keys.whole(etp) or (found["tp"] if found["ep"] > 1 else 1), "vpp": found["vpp"] if stages else 1,
                "schedule": ("interleaved" if found["vpp"] > 1 else "1f1b") if stages else None,
                "zero": 0 if keys.flag(distributed) is False else 1,
            }  # fmt: skip
        ranks = keys.whole(ulysses) or 1
        moved = "all" if keys.flag(param) or keys.flag(policy) else "optimizer" if keys.flag(state) else "none"
        size = keys.whole(group, minimum=-1)
        found = {
            "framework": "huggingface", "cp": ranks, "cp_comm": "all_to_all" if ranks > 1 else None, "offload": moved,
            "zero": 2 if keys.flag(reshard) is False else 3, "tp": 1, "pp": 1,
        }  # fmt: skip
        if size is not None and size > 0:
            # A group of the device mesh counts Ulysses' ranks among its own.
            whole, left = divmod(size, ranks)
            if left or not whole:
                raise keys.wrong(group, f"{size} does not share out over {keys.document.shown(ulysses)} = {ranks}")
            found["shards"] = whole
        return found

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wide = (facts.get("tp") or 1, facts.get("pp") or 1, facts.get("ep") or 1) != (1, 1, 1)
        if facts.get("framework") == "megatron" or wide:
            said: dict[str, Any] = dict.fromkeys((ulysses, group, reshard, param, state, policy)) | {
                strategy: "megatron"
            }
            said |= {key: facts.get(name) or 1 for name, key in sizes.items() if name != "vpp"}
            virtual, ranks = facts.get("vpp") or 1, facts.get("tp") or 1
            within = facts.get("etp") or 1
            shared = bool(facts.get("sequence_parallel"))
            return said | {
                sizes["vpp"]: virtual if virtual > 1 else None, sp: shared if ranks > 1 else None,
                etp: within if (facts.get("ep") or 1) > 1 or within > 1 else None, distributed: bool(facts.get("zero")),
            }  # fmt: skip
        ranks, moved, shards = facts.get("cp") or 1, facts.get("offload") or "none", facts.get("shards")
        if not facts.get("zero"):
            return {}
        replicated = (facts.get("replicas") or 1) > 1 or keys.has(group)
        megatron = (*sizes.values(), etp, sp, distributed, mparam, mstate)
        return dict.fromkeys(megatron) | {
            strategy: keys.document.get(strategy) if keys.word(strategy) in ("fsdp", "fsdp2") else "fsdp2", ulysses: ranks,
            param: moved == "all", state: moved != "none", policy: False if keys.has(policy) else None,
            reshard: (facts.get("zero") or 0) == 3, group: shards * ranks if replicated and shards is not None else None,
        }  # fmt: skip

    facts = (
        *sizes,
        "etp",
        "sequence_parallel",
        "schedule",
        "zero",
        "cp_comm",
        "offload",
        "shards",
        "framework",
        "replicas",
    )
    return Idea(keys=owned, facts=facts, read=read, write=write)


def _batch() -> Idea:
    whole, each, dynamic = f"{A}ppo_mini_batch_size", f"{A}ppo_micro_batch_size_per_gpu", f"{A}use_dynamic_bsz"
    sft = ("data.train_batch_size", "data.micro_batch_size_per_gpu", "data.use_dynamic_bsz")

    def read(keys: Keys) -> Facts:
        actor = any(key.startswith("actor_rollout_ref.") for key in keys.document.names())
        total, micro, packed = (whole, each, dynamic) if actor else sft
        if keys.flag(packed) if keys.has(packed) else not actor:
            raise keys.wrong(packed, "micro-batches of as many tokens as fit are not read; give use_dynamic_bsz=False")
        return {"global_batch": keys.whole(total) or 256, "micro_batch": keys.whole(micro) or (None if actor else 4)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        actor = any(key.startswith("actor_rollout_ref.") for key in keys.document.names())
        total, micro, packed = (whole, each, dynamic) if actor else sft
        said: dict[str, Any] = {packed: False} if not actor or keys.has(packed) else {}
        if facts.get("global_batch"):
            said[total] = facts["global_batch"]
        return said | {micro: facts.get("micro_batch") or 1}

    return Idea(keys=(whole, each, dynamic, *sft[1:]), facts=("global_batch", "micro_batch"), read=read, write=write)


def _seq_len() -> Idea:
    prompt, answer, sft = "data.max_prompt_length", "data.max_response_length", "data.max_length"

    def read(keys: Keys) -> Facts:
        if keys.has(sft):
            return {"seq_len": keys.whole(sft)}
        return {"seq_len": (keys.whole(prompt) or 512) + (keys.whole(answer) or 512)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if keys.has(sft):
            return {sft: facts["seq_len"]}
        first = min(keys.whole(prompt) or 512, facts["seq_len"] // 2)
        return {prompt: first, answer: facts["seq_len"] - first} if first else {}

    return Idea(keys=(prompt, answer, sft), facts=("seq_len",), read=read, write=write)


def _recompute() -> Idea:
    switch = "actor_rollout_ref.model.enable_gradient_checkpointing"
    what, how, count, modules = (f"{T}recompute_{word}" for word in ("granularity", "method", "num_layers", "modules"))

    def read(keys: Keys) -> Facts:
        if _engine(keys) == "fsdp":
            return {"recompute": "none" if keys.flag(switch) is False else "full"}
        kind = keys.choice(what, {"full": "full", "selective": "selective", "none": "none"}) or "none"
        if kind == "selective":
            chosen = keys.words(modules) or ["core_attn"]
            if any(name not in MODULES for name in chosen):
                raise keys.wrong(modules, f"read: {', '.join(MODULES)}")
            return {"recompute": "selective" if chosen == ["core_attn"] else f"modules:{','.join(sorted(chosen))}"}
        if kind == "none":
            return {"recompute": "none"}
        method, number = keys.choice(how, {"uniform": "group", "block": "layers"}) or "group", keys.whole(count) or 1
        return {"recompute": "full" if (method, number) == ("group", 1) else f"full:{method}={number}"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        kind, _, option = word.partition(":")
        if _engine(keys) == "fsdp":
            return {switch: word == "full"} if word in ("none", "full") else {}
        said: dict[str, Any] = dict.fromkeys((what, how, count, modules))
        if kind == "none":
            return said
        if kind in ("selective", "modules"):
            return said | {what: "selective", modules: option.split(",") if option else None}
        key, _, number = option.partition("=")
        if kind != "full" or key == "every":
            return {}
        return said | {what: "full", how: "block" if key == "layers" else "uniform", count: int(number or 1)}

    return Idea(keys=(switch, what, how, count, modules), facts=("recompute",), read=read, write=write)


def _lora() -> Idea:
    rank, modules = "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.target_modules"

    def read(keys: Keys) -> Facts:
        number = keys.whole(rank, minimum=0)
        if not number:
            return {"lora_rank": 0}
        chosen = keys.words(modules) or ["all-linear"]
        return {"lora_rank": number, "lora_targets": "all" if chosen == ["all-linear"] else ",".join(chosen)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        words = facts.get("lora_targets") or "all"
        if words == "attention":
            words = "q_proj,k_proj,v_proj,o_proj"
        if not facts.get("lora_rank"):
            return {rank: 0 if keys.has(rank) else None, modules: None}
        return {rank: facts["lora_rank"], modules: "all-linear" if words == "all" else words.split(",")}

    return Idea(keys=(rank, modules), facts=("lora_rank", "lora_targets"), read=read, write=write)


VERL = Dialect(
    name="verl",
    title="verl (training of the actor)",
    versions="verl 0.4 - 0.9",
    syntaxes=("argv", "yaml"),
    style="hydra",
    marks=frozenset(
        {
            *("actor_rollout_ref.model.path", f"{A}ppo_mini_batch_size", f"{A}ppo_micro_batch_size_per_gpu"),
            *("trainer.n_gpus_per_node", "trainer.nnodes", "data.max_prompt_length", "actor_rollout_ref.rollout.name"),
            *("algorithm.adv_estimator", "data.train_batch_size", f"{A}strategy"),
        }
    ),
    blank={
        "argv": f"python3 -m verl.trainer.main_ppo \\\n    {A}use_dynamic_bsz=False\n",
        "yaml": "actor_rollout_ref:\n  actor:\n    use_dynamic_bsz: false\n",
    },
    ideas=(
        row("model", "actor_rollout_ref.model.path", "model.path", kind="word"),
        _gpus(),
        _layout(),
        _batch(),
        _seq_len(),
        _recompute(),
        _lora(),
        row(
            "precision",
            f"{F}model_dtype",
            words={"fp32": "bf16-autocast", "bf16": "bf16-pure", "bfloat16": "bf16-pure"},
        ),
    ),
)
