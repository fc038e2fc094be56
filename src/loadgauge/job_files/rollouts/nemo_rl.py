"""NeMo-RL's recipes (YAML): GRPO, DPO, SFT, reward models and distillation, on FSDP2 (`dtensor_cfg`) or Megatron (`megatron_cfg`).

A recipe names those that it is built on as `defaults:`; of NeMo-RL's own, `data/nemo_rl_recipes.toml` has what is read here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.job_files.ideas import (
    TRANSFORMER_ENGINE,
    Dialect,
    Facts,
    Idea,
    Keys,
    instantiated,
    layers,
    lengths,
    names_in,
    row,
    split_of,
)
from loadgauge.job_files.pre_training.megatron import machines, overlap
from loadgauge.job_files.rollouts.nemo_rl_rollout import (
    SIZES,
    D,
    G,
    M,
    P,
    algorithm_of,
    backend_of,
    generates,
    megatron_trains,
    rollout,
)

BEGUN = {"grpo": "grpo_math_1B", "gspo": "grpo_math_1B", "dapo": "grpo_math_1B", "dpo": "dpo", "sft": "sft", "rm": "rm",
         "opd": "distillation_math"}  # fmt: skip
"""The recipe that an export of a task is built on."""
PROMPT_SHARE = 8
"""One of so many tokens of the longest sequence is the prompt's, where the file says only how long both are together."""
FUSED = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def _assumed(keys: Keys, key: str) -> bool | None:
    """None for a switch that only a recipe in a missing one's place says, so that the layout has what it needs; else False."""
    document: Any = keys.document
    return None if getattr(document, "absent", None) and key not in document.own.names() else False


def _layout() -> Idea:
    of_megatron = {axis: f"{M}{name}_parallel_size" for axis, name in SIZES.items()}
    of_dtensor = {"tp": f"{D}tensor_parallel_size", "cp": f"{D}context_parallel_size", "ep": f"{D}expert_parallel_size"}
    shared, other = f"{M}sequence_parallel", f"{D}sequence_parallel"
    switches = (f"{M}enabled", f"{D}enabled")
    moved, again = f"{D}cpu_offload", (f"{M}activation_checkpointing", f"{D}activation_checkpointing")
    stays = f"{D}moe_parallelizer.reshard_after_forward"
    what, modules = f"{M}recompute_granularity", f"{M}recompute_modules"
    distributed, host, part = (
        f"{M}optimizer.{name}"
        for name in ("use_distributed_optimizer", "optimizer_cpu_offload", "optimizer_offload_fraction")
    )

    def recomputed(keys: Keys, megatron: bool) -> str:
        if not keys.flag(again[0 if megatron else 1]):
            return "none"
        kind = (keys.choice(what, {"full": "full", "selective": "selective"}) if megatron else None) or "full"
        if kind == "full":
            return "full"
        chosen = keys.words(modules) or ["core_attn"]
        return "selective" if chosen == ["core_attn"] else f"modules:{','.join(sorted(chosen))}"

    def read(keys: Keys) -> Facts:
        megatron = megatron_trains(keys)
        sizes = of_megatron if megatron else of_dtensor
        facts: Facts = {axis: keys.whole(key) or 1 for axis, key in sizes.items()}
        facts["recompute"] = recomputed(keys, megatron)
        if not megatron:
            facts |= {
                "framework": "torchtitan",
                # Experts' layers stay gathered (AutoModel's `MoEParallelizerConfig`).
                "zero": 2 if facts["ep"] > 1 and not keys.flag(stays) else 3,
                "pp": 1,
                "offload": "all" if keys.flag(moved) else "none",
                "sequence_parallel": bool(keys.flag(other)) and facts["tp"] > 1,
                "cp_comm": "ring" if facts["cp"] > 1 else None,
            }
            return facts
        passed = keys.real(part)
        if keys.flag(host) and passed not in (None, 0.0, 1.0):
            raise keys.wrong(part, f"a part ({passed}) is not read; 0 or 1 is")
        return facts | {
            "framework": "megatron",
            "zero": 0 if keys.flag(distributed) is False else 1,
            "sequence_parallel": (bool(keys.flag(shared)) or _assumed(keys, shared)) and facts["tp"] > 1,
            "schedule": "1f1b" if facts["pp"] > 1 else None,
            "offload": "optimizer" if keys.flag(host) and passed != 0 else "none",
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stage, word, out = facts.get("zero") or 0, facts.get("recompute") or "none", facts.get("offload") or "none"
        kind, _, option = word.partition(":")
        wide = (facts.get("pp") or 1, facts.get("vpp") or 1) != (1, 1)
        megatron = facts.get("framework") == "megatron" or wide or (megatron_trains(keys) and stage < 2)
        values: dict[str, Any] = {switches[0]: megatron, switches[1]: not megatron}
        values |= {key: facts.get(axis) or 1 for axis, key in (of_megatron if megatron else of_dtensor).items()}
        if not megatron:
            wide = (facts.get("ep") or 1) > 1
            values |= {f"{D}expert_parallel_size": facts["ep"] if wide else None, stays: stage == 3 if wide else None}
        values[shared if megatron else other] = bool(facts.get("sequence_parallel"))
        if word in ("none", "full") or (megatron and kind in ("selective", "modules")):
            values[again[0 if megatron else 1]] = kind != "none"
        if not megatron:
            return values | ({moved: out == "all"} if out in ("none", "all") else {})
        values |= {
            what: "full" if kind in ("none", "full") else "selective",
            modules: option.split(",") if kind == "modules" else None,
        }
        values |= {distributed: stage > 0, host: out == "optimizer", part: 1.0 if out == "optimizer" else 0.0}
        return values

    return Idea(
        keys=(
            *of_megatron.values(),
            *of_dtensor.values(),
            shared,
            other,
            *switches,
            moved,
            stays,
            *again,
            what,
            modules,
            distributed,
            host,
            part,
        ),
        facts=names_in("tp pp cp ep etp framework zero sequence_parallel cp_comm schedule recompute offload vpp"),
        read=read,
        write=write,
    )


def _precision() -> Idea:
    """FSDP2 shards float32 weights and gathers them in 16 bits; Megatron keeps 16-bit weights, and gradients in 16 bits unless
    they are reduced in float32."""
    dtype, wide = f"{P}precision", f"{M}distributed_data_parallel_config.grad_reduce_in_fp32"
    eight, recipe, primary = (f"{M}fp8_cfg.{name}" for name in ("enabled", "fp8_recipe", "fp8_param"))

    def read(keys: Keys) -> Facts:
        name = keys.choice(dtype, DTYPES) or "bf16"
        if not megatron_trains(keys):
            return {"precision": name}
        if keys.flag(eight):
            sorts = {
                "tensorwise": "fp8-tensorwise",
                "blockwise": "fp8-blockwise",
                "delayed": "fp8-delayed",
                "mxfp8": "mxfp8",
            }
            chosen = keys.choice(recipe, sorts) or "fp8-delayed"
            return {"precision": f"{chosen}-primary" if keys.flag(primary) else chosen}
        if name == "fp32":
            return {"precision": "fp32"}
        return {"precision": name if keys.flag(wide) else f"{name}-mixed-16"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        asked = facts.get("precision") or "bf16"
        spelled = {ours: theirs for theirs, ours in DTYPES.items()}
        plain = asked.removesuffix("-primary")
        if plain in ("fp8-tensorwise", "fp8-blockwise", "fp8-delayed", "mxfp8"):
            return {
                dtype: "bfloat16",
                eight: True,
                recipe: plain.removeprefix("fp8-"),
                primary: asked.endswith("-primary"),
            }
        name, _, kind = asked.partition("-")
        if name not in spelled or kind not in ("", "mixed-16", "mixed-18"):
            return {}
        values: dict[str, Any] = {dtype: spelled[name]} | ({eight: False} if keys.has(eight) else {})
        megatron = facts.get("framework") == "megatron" or (megatron_trains(keys) and "framework" not in facts)
        return values | ({wide: kind != "mixed-16"} if megatron else {})

    return Idea(keys=(dtype, wide, eight, recipe, primary), facts=("precision",), read=read, write=write)


def _gpus() -> Idea:
    """GPUs of the cluster, and those of them that generate where they are not the trainer's."""
    each, nodes, together = "cluster.gpus_per_node", "cluster.num_nodes", f"{G}colocated.enabled"
    own_each, own_nodes = (f"{G}colocated.resources.{name}" for name in ("gpus_per_node", "num_nodes"))
    late, age = "grpo.async_grpo.enabled", "grpo.async_grpo.max_trajectory_age_steps"
    of_ppo = ("ppo.async_ppo.enabled", "ppo.async_ppo.max_trajectory_age_steps")
    scores = tuple(f"env.reward_model.resources.{name}" for name in ("gpus_per_node", "num_nodes"))

    def read(keys: Keys) -> Facts:
        count = keys.whole(nodes) or 1
        # On several nodes those that generate are whole ones (`algorithms/grpo.py`, `setup`).
        whole = count > 1 and generates(keys) and keys.flag(together) is False
        per_node = (keys.whole(own_each) if whole else None) or keys.whole(each) or 1
        if keys.flag("env.reward_model.enabled"):
            # Its GPUs are of the cluster, and of nobody else (`algorithms/grpo.py`, `setup`).
            if count == 1:
                per_node -= keys.whole(scores[0]) or 0
            else:
                count -= keys.whole(scores[1]) or 1
            if per_node < 1 or count < 1:
                raise keys.wrong(scores[0 if count == 1 else 1], "leaves no GPUs for the model that is trained")
        facts: Facts = {"gpus_per_node": per_node, "nodes": count}
        if not generates(keys):
            return facts
        names = of_ppo if algorithm_of(keys) == "ppo" else (late, age)
        waits = not keys.flag(names[0])
        if keys.flag(together) is not False:
            if not waits and backend_of(keys) != "megatron":
                raise keys.wrong(names[0], f"needs GPUs for generation of its own ({together}: false)")
            return facts | {"placement": "colocated"}
        total = per_node * count
        own = keys.whole(own_each) if count == 1 else (keys.whole(own_nodes) or 1) * (keys.whole(own_each) or per_node)
        if own is None or own >= total:
            where = own_each if count == 1 else own_nodes
            raise keys.wrong(
                where, f"says how many of the cluster's {total} GPUs generate, and leaves some for the trainer"
            )
        return facts | {
            "placement": f"split:{total - own}+{own}",
            "staleness": None if waits else keys.whole(names[1]) or 1,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if "gpus" not in facts:
            return {}
        sizes = machines(facts, keys.whole(each) if keys.has(each) and keys.whole(each) != 1 else None)
        values: dict[str, Any] = dict(zip((each, nodes), sizes, strict=True))
        if not generates(keys):
            return values
        split, behind = split_of(facts.get("placement")), facts.get("staleness")
        values[together] = split is None
        if algorithm_of(keys) == "grpo":
            values |= {late: bool(behind), age: behind or 1}
        if split is None:
            return values | {own_each: None, own_nodes: None}
        if sizes[1] == 1:
            return values | {own_each: split[1], own_nodes: None}
        return values | ({own_each: sizes[0], own_nodes: split[1] // sizes[0]} if split[1] % sizes[0] == 0 else {})

    return Idea(
        keys=(each, nodes, together, own_each, own_nodes, late, age, *of_ppo, *scores),
        facts=names_in("gpus gpus_per_node nodes placement staleness"),
        read=read,
        write=write,
    )


def _task() -> Idea:
    """The task by its section, the reference by its weight: it is on the host, and changes places with the policy."""
    weight, of_dpo = "loss_fn.reference_policy_kl_penalty", "dpo.reference_policy_kl_penalty"
    kind, whole, preference = (
        "grpo.adv_estimator.name",
        "loss_fn.sequence_level_importance_ratios",
        "dpo.preference_loss",
    )
    teacher, critic = "teacher.model_name", "value.model_name"
    skipped = tuple(f"{name}.skip_reference_policy_logprobs_calculation" for name in ("grpo", "ppo"))

    def read(keys: Keys) -> Facts:
        algorithm = algorithm_of(keys)
        if algorithm in ("sft", "rm"):
            return {"task": None if algorithm == "sft" else "rm"}
        if algorithm == "off-policy":
            listed = keys.raw("teachers")
            first = listed[0] if isinstance(listed, list) and listed else None
            name = first.get("model_name") if isinstance(first, dict) else None
            if not isinstance(name, str) or "$" in name:
                raise keys.wrong("teachers", "must say the model_name of each; give --teacher")
            stated = (
                "the first teacher and its distance is counted, not further ones nor what vocabularies are matched by"
            )
            keys.note("teachers", stated, "costs", "weights loss transient")
            return {"task": "gkd", "teacher": name}
        if algorithm == "dpo":
            loss = keys.word(preference) or "dpo"
            return {"task": "ipo" if loss == "ipo" else "dpo", "reference": "model", "frozen_offload": True}
        if algorithm == "distillation":
            return {"task": "opd", "teacher": keys.word(teacher), "frozen_offload": True}
        weighs = 0.01 if keys.real(weight) is None else keys.real(weight)
        if algorithm == "ppo":
            refers = bool(weighs) and keys.flag(skipped[1]) is False
            value = keys.word(critic)
            own = {"task": "ppo", "critic": None if value == keys.word(f"{P}model_name") else value}
            return own | {"reference": "model" if refers else "none", "frozen_offload": True if refers else None}
        keys.choice(kind, dict.fromkeys(("grpo", "reinforce_plus_plus", "gdpo", "rloo"), 1))
        refers = bool(weighs) and not keys.flag(skipped[0])
        return {
            "task": "gspo" if keys.flag(whole) else "grpo",
            "reference": "model" if refers else "none",
            "frozen_offload": True if refers else None,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        task, algorithm = facts.get("task"), algorithm_of(keys)
        if algorithm == "dpo":
            return (
                {preference: "ipo"}
                if task == "ipo"
                else {preference: None if keys.word(preference) == "ipo" else keys.raw(preference)}
            )
        if algorithm in ("distillation", "ppo"):
            own = facts.get("critic") or facts.get("model")
            return {teacher: facts.get("teacher")} if algorithm == "distillation" else {critic: own}
        if algorithm != "grpo" or task not in ("grpo", "gspo", "dapo"):
            return {}
        refers, stated = facts.get("reference") not in (None, "none", "precomputed"), keys.real(weight)
        switch = {whole: task == "gspo"} if task == "gspo" or keys.has(whole) else {}
        return switch | {weight: (stated or 0.01) if refers else 0}

    return Idea(
        keys=(weight, of_dpo, kind, whole, preference, teacher, critic, "teachers", *skipped),
        facts=names_in("task reference teacher critic frozen_offload"),
        read=read,
        write=write,
    )


def _batch() -> Idea:
    """Sequences (of DPO pairs) of an update; packed or dynamic, a micro-batch has so many tokens."""
    whole, micro, scored = f"{P}train_global_batch_size", f"{P}train_micro_batch_size", f"{P}logprob_batch_size"
    prompts = {name: f"{name}.num_prompts_per_step" for name in ("grpo", "distillation", "ppo")}
    samples = {name: f"{name}.num_generations_per_prompt" for name in ("grpo", "distillation", "ppo")}
    passes, of_critic = "ppo.ppo_epochs", "value.train_micro_batch_size"
    longest = f"{P}max_total_sequence_length"
    joined = {
        name: tuple(f"{P}{name}.{key}" for key in ("enabled", "train_mb_tokens", "logprob_mb_tokens"))
        for name in ("sequence_packing", "dynamic_batching")
    }

    def read(keys: Keys) -> Facts:
        facts: Facts = {"global_batch": keys.whole(whole) or 512, "micro_batch": keys.whole(micro) or 1}
        length = keys.whole(longest) or 512
        on = next((names for names in joined.values() if keys.flag(names[0])), None)
        if on is not None and keys.raw(on[1]) is not None:
            tokens = keys.whole(on[1]) or 1
            if tokens < length:
                raise keys.wrong(on[1], f"{tokens} tokens are fewer than a sequence has ({length})")
            rows, left = divmod(tokens, length)
            if left:
                raise keys.wrong(on[1], f"{tokens} tokens are no whole number of sequences of {length}")
            facts["micro_batch"] = rows
        if not generates(keys):
            return facts
        name = algorithm_of(keys)
        facts |= {"prompts": keys.whole(prompts[name]) or 32, "samples": keys.whole(samples[name]) or 1}
        if name == "ppo":
            facts |= {"epochs": keys.whole(passes) or 4, "critic_batch": keys.whole(of_critic)}
        if on is not None and keys.raw(on[2]) is not None:
            return facts | {"logprob_tokens": max(keys.whole(on[2]) or 1, length)}
        return facts | {"logprob_batch": keys.whole(scored)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {micro: facts.get("micro_batch") or 1}
        if facts.get("global_batch"):
            values[whole] = facts["global_batch"]
        length = (
            (facts.get("prompt_len") or 0) + int(facts["answers"])
            if str(facts.get("answers") or "").isdecimal()
            else None
        )
        length = length or facts.get("seq_len") or keys.whole(longest) or 512
        rows, tokens = facts.get("logprob_batch"), facts.get("logprob_tokens")
        for names in joined.values():
            if keys.flag(names[0]):
                values[names[1]] = (facts.get("micro_batch") or 1) * length
                if generates(keys):
                    values[names[2]] = tokens or (rows or facts.get("micro_batch") or 1) * length
        if not generates(keys):
            return values
        name = algorithm_of(keys)
        if tokens is not None and not any(keys.flag(names[0]) for names in joined.values()):
            names = joined["sequence_packing"]
            values |= {names[0]: True, names[1]: (facts.get("micro_batch") or 1) * length, names[2]: tokens}
        elif rows is not None:
            for names in joined.values():
                values |= {names[0]: False} if keys.flag(names[0]) else {}
        if not facts.get("global_batch") and facts.get("prompts"):
            values[whole] = facts["prompts"] * (facts.get("samples") or 1)
        return (
            values
            | ({passes: facts.get("epochs"), of_critic: facts.get("critic_batch")} if name == "ppo" else {})
            | {prompts[name]: facts.get("prompts"), samples[name]: facts.get("samples")}
            | ({scored: rows} if rows else {})
        )

    return Idea(
        keys=(
            whole,
            micro,
            scored,
            passes,
            of_critic,
            *prompts.values(),
            *samples.values(),
            *(key for names in joined.values() for key in names),
        ),
        facts=names_in("global_batch micro_batch prompts samples logprob_batch logprob_tokens epochs critic_batch"),
        read=read,
        write=write,
    )


def _lengths() -> Idea:
    """`max_total_sequence_length` is that of prompt and answer; `max_new_tokens` and `max_input_seq_length` are often the same."""
    whole, answer, prompt = f"{P}max_total_sequence_length", f"{G}max_new_tokens", "data.max_input_seq_length"

    def read(keys: Keys) -> Facts:
        length = keys.whole(whole) or 512
        if not generates(keys):
            return {"seq_len": length}
        first, rest = keys.whole(prompt), keys.whole(answer)
        if rest is not None and rest > length:
            raise keys.wrong(answer, f"{rest} tokens of an answer are more than the {length} of prompt and answer")
        unsaid = rest in (None, length) and (first is None or first >= length)
        if rest is None or rest == length:
            rest = length - (max(1, length // PROMPT_SHARE) if unsaid else first or 0)
        return lengths(keys, length - rest, rest, taken=unsaid)

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if not generates(keys):
            return {whole: facts["seq_len"]} if facts.get("seq_len") else {}
        longest, first = str(facts.get("answers") or ""), facts.get("prompt_len")
        if not longest.isdecimal() or first is None:
            return {}
        return {whole: first + int(longest), answer: int(longest)}

    return Idea(keys=(whole, answer, prompt), facts=names_in("seq_len prompt_len answers"), read=read, write=write)


def _adapter() -> Idea:
    """LoRA, of every linear layer unless modules are named."""
    names = ("enabled", "dim", "target_modules", "dropout")
    both = {False: [f"{D}lora_cfg.{name}" for name in names], True: [f"{M}peft.{name}" for name in names]}
    every = f"{D}lora_cfg.match_all_linear"

    def read(keys: Keys) -> Facts:
        switch, rank, modules, dropped = both[megatron_trains(keys)]
        if not keys.flag(switch):
            return {"lora_rank": 0}
        chosen = keys.words(modules) or []
        everything = not chosen or (not megatron_trains(keys) and keys.flag(every) is not False)
        return {
            "lora_rank": keys.whole(rank) or 8,
            "lora_targets": "all" if everything else ",".join(chosen),
            "lora_dropout": keys.real(dropped) or None,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        megatron = facts.get("framework") == "megatron" or (megatron_trains(keys) and "framework" not in facts)
        switch, rank, modules, dropped = both[megatron]
        if (facts.get("adapter") or "lora") != "lora" or facts.get("qlora"):
            return {}
        if not facts.get("lora_rank"):
            return {switch: False if keys.has(switch) else None}
        values: dict[str, Any] = {} if megatron else {every: (facts.get("lora_targets") or "all") == "all"}
        return (
            values
            | layers(modules, []).write(facts, keys)
            | {
                switch: True,
                rank: facts["lora_rank"],
                dropped: facts.get("lora_dropout") or 0.0,
            }
        )

    return Idea(
        keys=(*both[False], *both[True], every),
        facts=names_in("adapter qlora lora_rank lora_targets lora_dropout"),
        read=read,
        write=write,
    )


def _optimizer() -> Idea:
    theirs = {"adam": "adamw", "sgd": "sgd-momentum", "muon": "muon", "dist_muon": "muon"}
    classes = {"torch.optim.AdamW": "adamw", "torch.optim.Adam": "adamw", "torch.optim.SGD": "sgd", FUSED: "adamw"}
    megatron = row("optimizer", f"{M}optimizer.optimizer", words=theirs, default="adamw")
    torch = instantiated(f"{P}optimizer.name", classes, arguments=f"{P}optimizer.kwargs")

    def read(keys: Keys) -> Facts:
        if megatron_trains(keys):
            return megatron.read(keys)
        return {"optimizer": "adamw-fused"} if keys.word(torch.keys[0]) == FUSED else torch.read(keys)

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name = facts["optimizer"]
        if facts.get("framework") == "megatron" or (megatron_trains(keys) and "framework" not in facts):
            return megatron.write({"optimizer": name if name in theirs.values() else name.partition("-")[0]}, keys)
        return torch.write(facts, keys)

    return Idea(keys=(*torch.keys, *megatron.keys), facts=("optimizer",), read=read, write=write)


def _loss() -> Idea:
    """Log-probabilities of float32 logits; with Megatron's fused ones of a chunk of hidden states at a time."""
    fused, chunk = f"{M}use_fused_linear_logprobs", f"{P}logprob_chunk_size"

    def read(keys: Keys) -> Facts:
        if algorithm_of(keys) == "rm":
            return {}
        return {
            "loss": "chunked"
            if megatron_trains(keys) and keys.flag(fused)
            else "float32"
            if not megatron_trains(keys)
            else None
        }

    return Idea(
        keys=(fused, chunk),
        facts=("loss",),
        read=read,
        write=lambda facts, keys: (
            {fused: facts.get("loss") == "chunked"}
            if megatron_trains(keys) or facts.get("framework") == "megatron"
            else {}
        ),
    )


def _attention() -> Idea:
    """Megatron's kernel of attention."""
    key = f"{M}attention_backend"
    inner = row("attention", key, words=TRANSFORMER_ENGINE, add=False)
    return msgspec.structs.replace(
        inner,
        read=lambda keys: inner.read(keys) if megatron_trains(keys) else {},
        write=lambda facts, keys: inner.write(facts, keys) if keys.has(key) else {},
    )


def _overlap() -> Idea:
    """The idea of gradients that Megatron sums beside compute (`distributed_data_parallel_config`)."""
    buckets = dict.fromkeys(
        ("overlap_grad_reduce", "overlap_param_gather"), f"{P}megatron_cfg.distributed_data_parallel_config."
    )
    others = ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "overlap_p2p_comm")
    inner = overlap(buckets | dict.fromkeys(others, f"{P}megatron_cfg."))
    return msgspec.structs.replace(
        inner,
        read=lambda keys: inner.read(keys) if megatron_trains(keys) else {},
        write=lambda facts, keys: inner.write(facts, keys) if megatron_trains(keys) else {},
    )


NEMO_RL = Dialect(
    name="nemo-rl",
    title="NeMo-RL",
    versions="NeMo-RL 0.4 - 0.6",
    syntaxes=("yaml",),
    framework="torchtitan",
    layers="nemo_rl_recipes.toml",
    blank={"yaml": "defaults: sft.yaml\npolicy:\n  sequence_packing:\n    enabled: false\n"},
    blanks={task: f"defaults: {name}.yaml\npolicy:\n  sequence_packing:\n    enabled: false\n"
            "  dynamic_batching:\n    enabled: false\n"
            for task, name in BEGUN.items()},
    ideas=(
        row("model", f"{P}model_name", kind="word"),
        _gpus(),
        _layout(),
        _precision(),
        _task(),
        _batch(),
        _lengths(),
        rollout(),
        _adapter(),
        _optimizer(),
        _loss(),
        _attention(),
        _overlap(),
    ),
)  # fmt: skip
