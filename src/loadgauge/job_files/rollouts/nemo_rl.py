"""NeMo-RL's recipes (YAML): GRPO, DPO, SFT, reward models and distillation, on FSDP2 (`dtensor_cfg`) or Megatron (`megatron_cfg`).

A recipe names those that it is built on as `defaults:`; of NeMo-RL's own, `data/nemo_rl_recipes.toml` has what is read here.
"""

from typing import Any

from loadgauge.job_files.ideas import (
    STAYS,
    TRANSFORMER_ENGINE,
    Dialect,
    Facts,
    Keys,
    Named,
    in_part,
    instantiated,
    layers,
    reads,
    refers,
    row,
    split_of,
    when,
)
from loadgauge.job_files.pre_training.megatron import machines, overlap
from loadgauge.job_files.pre_training.megatron_model import UNEVEN, uneven
from loadgauge.job_files.rollouts.nemo_rl_rollout import (
    SIZES,
    D,
    G,
    M,
    P,
    algorithm_of,
    answers_lengths,
    backend_of,
    by_name,
    generates,
    megatron_trains,
    rollout,
    teachers_nodes,
)

BEGUN = {"grpo": "grpo_math_1B", "gspo": "grpo_math_1B", "dapo": "grpo_math_1B", "dpo": "dpo", "sft": "sft", "rm": "rm",
         "opd": "distillation_math"}  # fmt: skip
"""The recipe that an export of a task is built on."""
FUSED = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
EIGHT_BITS = {"tensorwise": "fp8-tensorwise", "blockwise": "fp8-blockwise", "delayed": "fp8-delayed", "mxfp8": "mxfp8"}
"""`fp8_recipe`."""
DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def _assumed(keys: Keys, key: str) -> bool | None:
    """None for a switch that only a recipe in a missing one's place says, so that the layout has what it needs; else False."""
    document: Any = keys.document
    return None if getattr(document, "absent", None) and key not in document.own.names() else False


@reads(inner=row("model", f"{P}model_name", kind="word"))
def _model(keys: Keys, at: Named) -> Facts:
    """The model; that of a recipe in a missing one's place is not this file's, whose name may say its own."""
    name = by_name(keys.file) if _assumed(keys, f"{P}model_name") is None else None
    keys.remark(f"its model is {name}, as the name of the file says", when=name is not None)
    return {"model": name} if name else at.inner.read(keys)


def _on_megatron(facts: Facts, keys: Keys) -> bool:
    """Return whether facts are written for Megatron: as they say, else as the file has it."""
    return facts.get("framework") == "megatron" or (megatron_trains(keys) and "framework" not in facts)


def _recomputed(keys: Keys, megatron: bool, at: Named) -> str:
    if not keys.flag(at.again[0 if megatron else 1]):
        return "none"
    kind = (keys.choice(at.what, {"full": "full", "selective": "selective"}) if megatron else None) or "full"
    if kind == "full":
        return "full"
    chosen = keys.words(at.modules) or ["core_attn"]
    return "selective" if chosen == ["core_attn"] else f"modules:{','.join(sorted(chosen))}"


def _layout_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    stage, word, out = facts.get("zero") or 0, facts.get("recompute") or "none", facts.get("offload") or "none"
    kind, _, option = word.partition(":")
    moved, _, some = out.partition(":")
    wide = (facts.get("pp") or 1, facts.get("vpp") or 1) != (1, 1)
    split = (facts.get("ep") or 1) > 1
    megatron = facts.get("framework") == "megatron" or wide or (megatron_trains(keys) and stage < 2)
    sayable = word in ("none", "full") or (megatron and kind in ("selective", "modules"))
    values: dict[str, Any] = {
        at.switches[0]: megatron,
        at.switches[1]: not megatron,
        **{key: facts.get(axis) or 1 for axis, key in (at.of_megatron if megatron else at.of_dtensor).items()},
    }
    again = {at.again[0 if megatron else 1]: kind != "none" if sayable else STAYS}
    shared = bool(facts.get("sequence_parallel"))
    if not megatron:
        copies = facts.get("replicas")
        return values | {
            f"{D}expert_parallel_size": facts["ep"] if split else None,
            at.stays: stage == 3 if split else None,
            at.copies: copies if (copies or 1) > 1 or keys.has(at.copies) else None,
            at.other: shared,
            **again,
            at.moved: out == "all" if out in ("none", "all") else STAYS,
        }
    return {
        **values,
        at.shared: shared,
        **again,
        at.what: "full" if kind in ("none", "full") else "selective",
        at.modules: option.split(",") if kind == "modules" else None,
        at.distributed: stage > 0,
        at.host: moved == "optimizer",
        at.part: float(some or moved == "optimizer"),
    }


@reads(
    facts="tp pp cp ep etp framework zero replicas sequence_parallel cp_comm schedule recompute offload vpp stage_layers"
    " layers_per_stage",
    write=_layout_written,
    copies=f"{D}dp_replicate_size",
    of_megatron={axis: f"{M}{name}_parallel_size" for axis, name in SIZES.items()},
    of_dtensor={"tp": f"{D}tensor_parallel_size", "cp": f"{D}context_parallel_size", "ep": f"{D}expert_parallel_size"},
    shared=f"{M}sequence_parallel",
    other=f"{D}sequence_parallel",
    switches=(f"{M}enabled", f"{D}enabled"),
    moved=f"{D}cpu_offload",
    stays=f"{D}moe_parallelizer.reshard_after_forward",
    again=(f"{M}activation_checkpointing", f"{D}activation_checkpointing"),
    what=f"{M}recompute_granularity",
    modules=f"{M}recompute_modules",
    distributed=f"{M}optimizer.use_distributed_optimizer",
    host=f"{M}optimizer.optimizer_cpu_offload",
    part=f"{M}optimizer.optimizer_offload_fraction",
    shares=tuple(f"{M}{name}" for name in ("pipeline_model_parallel_layout", *UNEVEN)),
)
def _layout(keys: Keys, at: Named) -> Facts:
    megatron = megatron_trains(keys)
    sizes = at.of_megatron if megatron else at.of_dtensor
    facts: Facts = {axis: keys.whole(key) or 1 for axis, key in sizes.items()}
    facts["recompute"] = _recomputed(keys, megatron, at)
    if not megatron:
        return facts | {
            "framework": "torchtitan",
            # Experts' layers stay gathered (AutoModel's `MoEParallelizerConfig`).
            "zero": 2 if facts["ep"] > 1 and not keys.flag(at.stays) else 3,
            "pp": 1,
            "replicas": keys.whole(at.copies) if keys.has(at.copies) else None,
            "offload": "all" if keys.flag(at.moved) else "none",
            "sequence_parallel": bool(keys.flag(at.other)) and facts["tp"] > 1,
            "cp_comm": "ring" if facts["cp"] > 1 else None,
        }
    return facts | {
        "framework": "megatron",
        "zero": 0 if keys.flag(at.distributed) is False else 1,
        "sequence_parallel": (bool(keys.flag(at.shared)) or _assumed(keys, at.shared)) and facts["tp"] > 1,
        "schedule": "1f1b" if facts["pp"] > 1 else None,
        **uneven(keys, M, facts["pp"]),
        "offload": in_part(keys, at.part) if keys.flag(at.host) else "none",
    }


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    asked = facts.get("precision") or "bf16"
    spelled = {ours: theirs for theirs, ours in DTYPES.items()}
    plain = asked.removesuffix("-primary")
    if plain in EIGHT_BITS.values():
        return {
            at.dtype: "bfloat16",
            at.eight: True,
            at.recipe: plain.removeprefix("fp8-"),
            at.primary: asked.endswith("-primary"),
        }
    name, _, kind = asked.partition("-")
    if name not in spelled or kind not in ("", "mixed-16", "mixed-18"):
        return {}
    return {
        at.dtype: spelled[name],
        at.eight: False if keys.has(at.eight) else STAYS,
        at.wide: kind != "mixed-16" if _on_megatron(facts, keys) else STAYS,
    }


@reads(
    facts="precision",
    write=_precision_written,
    dtype=f"{P}precision",
    wide=f"{M}distributed_data_parallel_config.grad_reduce_in_fp32",
    eight=f"{M}fp8_cfg.enabled",
    recipe=f"{M}fp8_cfg.fp8_recipe",
    primary=f"{M}fp8_cfg.fp8_param",
)
def _precision(keys: Keys, at: Named) -> Facts:
    """FSDP2 shards float32 weights and gathers them in 16 bits; Megatron keeps 16-bit weights, and gradients in 16 bits unless
    they are reduced in float32."""
    name = keys.choice(at.dtype, DTYPES) or "bf16"
    if not megatron_trains(keys):
        return {"precision": name}
    if keys.flag(at.eight):
        why, unsaid = "gradients are kept in 16 bits, and counted in 32", keys.flag(at.wide) is False
        keys.note(at.wide, why, "saves", "gradients transient", 0.5, when=unsaid)
        chosen = keys.choice(at.recipe, EIGHT_BITS) or "fp8-delayed"
        return {"precision": f"{chosen}-primary" if keys.flag(at.primary) else chosen}
    if name == "fp32":
        return {"precision": "fp32"}
    return {"precision": name if keys.flag(at.wide) else f"{name}-mixed-16"}


def _gpus_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    sizes = machines(facts, keys.whole(at.each) if keys.has(at.each) and keys.whole(at.each) != 1 else None)
    values: dict[str, Any] = dict(zip((at.each, at.nodes), sizes, strict=True))
    if not generates(keys):
        return values
    split = split_of(facts.get("placement"))
    behind = facts.get("staleness")
    of_grpo = algorithm_of(keys) == "grpo"
    each, nodes = (None, None) if split is None else (split[1], None) if sizes[1] == 1 else (STAYS, STAYS)
    if split is not None and sizes[1] != 1 and split[1] % sizes[0] == 0:
        each, nodes = sizes[0], split[1] // sizes[0]
    return values | {
        at.together: split is None,
        at.late: bool(behind) if of_grpo else STAYS,
        at.age: behind or 1 if of_grpo else STAYS,
        at.own_each: each,
        at.own_nodes: nodes,
    }


@reads(
    facts="gpus gpus_per_node nodes placement staleness",
    write=_gpus_written,
    needs="gpus",
    each="cluster.gpus_per_node",
    nodes="cluster.num_nodes",
    together=f"{G}colocated.enabled",
    own_each=f"{G}colocated.resources.gpus_per_node",
    own_nodes=f"{G}colocated.resources.num_nodes",
    late="grpo.async_grpo.enabled",
    age="grpo.async_grpo.max_trajectory_age_steps",
    of_ppo=("ppo.async_ppo.enabled", "ppo.async_ppo.max_trajectory_age_steps"),
    scores=tuple(f"env.reward_model.resources.{name}" for name in ("gpus_per_node", "num_nodes")),
)
def _gpus(keys: Keys, at: Named) -> Facts:
    """GPUs of the cluster, and those of them that generate where they are not the trainer's."""
    count = keys.whole(at.nodes) or 1
    if taught := teachers_nodes(keys):
        keys.remark(f"{taught} of its {count} nodes are its teachers'")
        keys.refuse(at.nodes, "leaves no nodes beside the teachers'", when=taught >= count)
        count -= taught
    # On several nodes those that generate are whole ones (`algorithms/grpo.py`, `setup`).
    single = count == 1
    apart = generates(keys) and keys.flag(at.together) is False
    per_node = (keys.whole(at.own_each) if apart and not single else None) or keys.whole(at.each) or 1
    if keys.flag("env.reward_model.enabled"):
        # Its GPUs are of the cluster, and of nobody else (`algorithms/grpo.py`, `setup`).
        per_node -= (keys.whole(at.scores[0]) or 0) if single else 0
        count -= 0 if single else keys.whole(at.scores[1]) or 1
        keys.refuse(
            at.scores[0 if single else 1],
            "leaves no GPUs for the model that is trained",
            when=per_node < 1 or count < 1,
        )
    facts: Facts = {"gpus_per_node": per_node, "nodes": count}
    if not generates(keys):
        return facts
    names = at.of_ppo if algorithm_of(keys) == "ppo" else (at.late, at.age)
    waits = not keys.flag(names[0])
    within = f"needs GPUs for generation of its own ({at.together}: false)"
    if not apart:
        keys.refuse(names[0], within, when=not waits and backend_of(keys) != "megatron")
        return facts | {"placement": "colocated"}
    single = count == 1
    total = per_node * count
    own = keys.whole(at.own_each) if single else (keys.whole(at.own_nodes) or 1) * (keys.whole(at.own_each) or per_node)
    if own is None or own >= total:
        raise keys.wrong(
            at.own_each if single else at.own_nodes,
            f"says how many of the cluster's {total} GPUs generate, and leaves some for the trainer",
        )
    return facts | {
        "placement": f"split:{total - own}+{own}",
        "staleness": None if waits else keys.whole(names[1]) or 1,
    }


def _task_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    task, algorithm = facts.get("task"), algorithm_of(keys)
    if algorithm == "dpo":
        stated = None if keys.word(at.preference) == "ipo" else keys.raw(at.preference)
        return {at.preference: "ipo" if task == "ipo" else stated}
    if algorithm in ("distillation", "ppo"):
        own = facts.get("critic") or facts.get("model")
        return {at.teacher: facts.get("teacher")} if algorithm == "distillation" else {at.critic: own}
    if algorithm != "grpo" or task not in ("grpo", "gspo", "dapo"):
        return {}
    forced = facts.get("old_logprobs") == "none"
    return {
        at.whole: task == "gspo" if task == "gspo" or keys.has(at.whole) else STAYS,
        at.forced: forced if forced or keys.has(at.forced) else STAYS,
        at.compared: None if forced else STAYS,
        at.weight: (keys.real(at.weight) or 0.01) if refers(facts) else 0,
    }


@reads(
    facts="task reference teacher critic frozen_offload old_logprobs",
    write=_task_written,
    weight="loss_fn.reference_policy_kl_penalty",
    of_dpo="dpo.reference_policy_kl_penalty",
    kind="grpo.adv_estimator.name",
    whole="loss_fn.sequence_level_importance_ratios",
    preference="dpo.preference_loss",
    teacher="teacher.model_name",
    critic="value.model_name",
    also=("teachers",),
    skipped=tuple(f"{name}.skip_reference_policy_logprobs_calculation" for name in ("grpo", "ppo")),
    forced="loss_fn.force_on_policy_ratio",
    compared="grpo.seq_logprob_error_threshold",
)
def _task(keys: Keys, at: Named) -> Facts:
    """The task by its section, the reference by its weight: it is on the host, and changes places with the policy. Answers whose
    ratio is 1 by force need no pass of their own before the update (`algorithms/opd.py`, `_skip_prev_logprobs`)."""
    algorithm = algorithm_of(keys)
    if algorithm in ("sft", "rm"):
        return {"task": None if algorithm == "sft" else "rm"}
    if algorithm == "off-policy":
        listed = keys.raw("teachers")
        first = listed[0] if isinstance(listed, list) and listed else None
        name = first.get("model_name") if isinstance(first, dict) else None
        keys.refuse(
            "teachers", "must say the model_name of each; give --teacher", when=not isinstance(name, str) or "$" in name
        )
        keys.note(
            "teachers",
            "the first teacher and its distance is counted, not further ones nor what vocabularies are matched by",
            "costs",
            "weights loss transient",
        )
        return {"task": "gkd", "teacher": name}
    if algorithm == "dpo":
        loss = keys.word(at.preference) or "dpo"
        return {"task": "ipo" if loss == "ipo" else "dpo", "reference": "model", "frozen_offload": True}
    if algorithm == "distillation":
        return {"task": "opd", "teacher": keys.word(at.teacher), "frozen_offload": True}
    weighs = 0.01 if keys.real(at.weight) is None else keys.real(at.weight)
    if algorithm == "ppo":
        refers = bool(weighs) and keys.flag(at.skipped[1]) is False
        value = keys.word(at.critic)
        own = {"task": "ppo", "critic": None if value == keys.word(f"{P}model_name") else value}
        return own | {"reference": "model" if refers else "none", "frozen_offload": True if refers else None}
    kind = keys.choice(at.kind, {name: name for name in ("grpo", "reinforce_plus_plus", "gdpo", "rloo", "opd")})
    keys.note(
        at.kind,
        "advantages are those of teachers, whose passes on GPUs of their own are not counted",
        "costs",
        "",
        when=kind == "opd",
    )
    refers = bool(weighs) and not keys.flag(at.skipped[0])
    return {
        "task": "gspo" if keys.flag(at.whole) else "grpo",
        "reference": "model" if refers else "none",
        "frozen_offload": True if refers else None,
        "old_logprobs": "none" if keys.flag(at.forced) and keys.real(at.compared) is None else None,
    }


BATCH_LONGEST = f"{P}max_total_sequence_length"
BATCH_JOINED = {
    name: tuple(f"{P}{name}.{key}" for key in ("enabled", "train_mb_tokens", "logprob_mb_tokens"))
    for name in ("sequence_packing", "dynamic_batching")
}


def _batch_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    micro = facts.get("micro_batch") or 1
    samples = facts.get("samples") or 1
    name = algorithm_of(keys)
    prompts = facts.get("prompts")
    batch = facts.get("global_batch")
    longest = str(facts.get("answers") or "")
    length = (facts.get("prompt_len") or 0) + int(longest) if longest.isdecimal() else 0
    length = length or facts.get("seq_len") or keys.whole(BATCH_LONGEST) or 512
    rows = facts.get("logprob_batch")
    tokens = facts.get("logprob_tokens")
    answers = generates(keys)
    on = [names for names in BATCH_JOINED.values() if keys.flag(names[0])]
    scored = tokens or (rows or micro) * length if answers else STAYS
    values: dict[str, Any] = {at.micro: micro, at.whole: batch or STAYS}
    for _, trained, passed in on:
        values |= {trained: micro * length, passed: scored}
    if not answers:
        return values
    if tokens is not None and not on:
        values |= dict(zip(BATCH_JOINED["sequence_packing"], (True, micro * length, tokens), strict=True))
    elif rows is not None:
        values |= {names[0]: False for names in on}
    return {
        **values,
        at.whole: batch or (prompts * samples if prompts else STAYS),
        at.passes: facts.get("epochs") if name == "ppo" else STAYS,
        at.of_critic: facts.get("critic_batch") if name == "ppo" else STAYS,
        at.prompts[name]: prompts,
        at.samples[name]: facts.get("samples"),
        at.scored: rows or STAYS,
    }


@reads(
    facts="global_batch micro_batch prompts samples logprob_batch logprob_tokens epochs critic_batch",
    write=_batch_written,
    whole=f"{P}train_global_batch_size",
    micro=f"{P}train_micro_batch_size",
    scored=f"{P}logprob_batch_size",
    passes="ppo.ppo_epochs",
    of_critic="value.train_micro_batch_size",
    prompts={name: f"{name}.num_prompts_per_step" for name in ("grpo", "distillation", "ppo")},
    samples={name: f"{name}.num_generations_per_prompt" for name in ("grpo", "distillation", "ppo")},
    also=(key for names in BATCH_JOINED.values() for key in names),
)
def _batch(keys: Keys, at: Named) -> Facts:
    """Sequences (of DPO pairs) of an update; packed or dynamic, a micro-batch has so many tokens."""
    batch = keys.whole(at.whole) or 512
    rows = keys.whole(at.micro) or 1
    length = keys.whole(BATCH_LONGEST) or 512
    on = next((names for names in BATCH_JOINED.values() if keys.flag(names[0])), None)
    if on is not None and keys.raw(on[1]) is not None:
        tokens = keys.whole(on[1]) or 1
        rows = max(1, round(tokens / length))
        keys.note(
            on[1],
            f"a pack of so many tokens is no whole number of sequences of {length}, and counted as {rows}",
            parts="activations loss transient",
            when=tokens != rows * length,
        )
    if not generates(keys):
        return {"global_batch": batch, "micro_batch": rows}
    name = algorithm_of(keys)
    prompts = keys.whole(at.prompts[name]) or 32
    samples = keys.whole(at.samples[name]) or 1
    guessed = bool(getattr(keys.document, "absent", {}))  # of which the batch may be that of another recipe
    packed = on is not None and keys.raw(on[2]) is not None
    ppo = name == "ppo"
    return {
        "global_batch": min(batch, prompts * samples) if guessed else batch,
        "micro_batch": rows,
        "prompts": prompts,
        "samples": samples,
        "epochs": keys.whole(at.passes) or 4 if ppo else None,
        "critic_batch": keys.whole(at.of_critic) if ppo else None,
        "logprob_tokens": max(keys.whole(on[2]) or 1, length) if on is not None and packed else None,
        "logprob_batch": None if packed else keys.whole(at.scored),
    }


ADAPTER_NAMES = ("enabled", "dim", "target_modules", "dropout")
ADAPTER_BOTH = {
    False: [f"{D}lora_cfg.{name}" for name in ADAPTER_NAMES],
    True: [f"{M}peft.{name}" for name in ADAPTER_NAMES],
}


def _adapter_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    megatron = _on_megatron(facts, keys)
    switch, rank, modules, dropped = ADAPTER_BOTH[megatron]
    if not facts.get("lora_rank"):
        return {switch: False if keys.has(switch) else None}
    return {
        at.every: STAYS if megatron else (facts.get("lora_targets") or "all") == "all",
        **layers(modules, []).write(facts, keys),
        switch: True,
        rank: facts["lora_rank"],
        dropped: facts.get("lora_dropout") or 0.0,
    }


@reads(
    *ADAPTER_BOTH[False],
    *ADAPTER_BOTH[True],
    facts="adapter qlora lora_rank lora_targets lora_dropout",
    write=_adapter_written,
    can={"adapter": ("lora",), "qlora": (False,)},
    every=f"{D}lora_cfg.match_all_linear",
)
def _adapter(keys: Keys, at: Named) -> Facts:
    """LoRA, of every linear layer unless modules are named."""
    switch, rank, modules, dropped = ADAPTER_BOTH[megatron_trains(keys)]
    if not keys.flag(switch):
        return {"lora_rank": 0}
    chosen = keys.words(modules) or []
    everything = not chosen or (not megatron_trains(keys) and keys.flag(at.every) is not False)
    return {
        "lora_rank": keys.whole(rank) or 8,
        "lora_targets": "all" if everything else ",".join(chosen),
        "lora_dropout": keys.real(dropped) or None,
    }


OPTIMIZER_THEIRS = {"adam": "adamw", "sgd": "sgd-momentum", "muon": "muon", "dist_muon": "muon"}
OPTIMIZER_CLASSES = {
    "torch.optim.AdamW": "adamw",
    "torch.optim.Adam": "adamw",
    "torch.optim.SGD": "sgd",
    FUSED: "adamw",
}
OPTIMIZER_MEGATRON = row("optimizer", f"{M}optimizer.optimizer", words=OPTIMIZER_THEIRS, default="adamw")
OPTIMIZER_TORCH = instantiated(f"{P}optimizer.name", OPTIMIZER_CLASSES, arguments=f"{P}optimizer.kwargs")


def _optimizer_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    name = facts["optimizer"]
    if not _on_megatron(facts, keys):
        return OPTIMIZER_TORCH.write(facts, keys)
    named = name if name in OPTIMIZER_THEIRS.values() else name.partition("-")[0]
    return OPTIMIZER_MEGATRON.write({"optimizer": named}, keys)


@reads(*OPTIMIZER_TORCH.keys, *OPTIMIZER_MEGATRON.keys, facts="optimizer", write=_optimizer_written)
def _optimizer(keys: Keys) -> Facts:
    if megatron_trains(keys):
        return OPTIMIZER_MEGATRON.read(keys)
    return {"optimizer": "adamw-fused"} if keys.word(OPTIMIZER_TORCH.keys[0]) == FUSED else OPTIMIZER_TORCH.read(keys)


def _loss_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    if not (megatron_trains(keys) or facts.get("framework") == "megatron"):
        return {}
    pieces = facts.get("loss") == "compiled"
    return {
        at.chunk: (keys.whole(at.chunk) or 1024) if pieces else None if keys.has(at.chunk) else STAYS,
        at.fused: facts.get("loss") == "chunked",
        at.deferred: True if pieces else STAYS,
    }


@reads(
    facts="loss",
    write=_loss_written,
    fused=f"{M}use_fused_linear_logprobs",
    chunk=f"{P}logprob_chunk_size",
    deferred=f"{M}defer_fp32_logits",
)
def _loss(keys: Keys, at: Named) -> Facts:
    """Log-probabilities of float32 logits; with Megatron's fused ones of a chunk of hidden states at a time, and in pieces from
    logits that stay in 16 bits, whose gradient is made from them (`distributed/model_utils.py`, `ChunkedDistributedLogprob`)."""
    if algorithm_of(keys) == "rm":
        return {}
    pieces = keys.whole(at.chunk, minimum=0)
    if not megatron_trains(keys):
        keys.note(
            at.chunk,
            "passes before an update make log-probabilities so many tokens at a time, which are counted all at once",
            "saves",
            when=pieces,
        )
        return {"loss": "float32"}
    keys.note(
        at.deferred,
        "float32 logits are made in parts, which holds less for a moment",
        "saves",
        when=keys.flag(at.deferred) and not pieces,
    )
    return {"loss": "chunked" if keys.flag(at.fused) else "compiled" if pieces else None}


NEMO_RL = Dialect(
    name="nemo-rl",
    title="NeMo-RL",
    versions="NeMo-RL 0.4 - 0.6",
    syntaxes=("yaml",),
    framework="torchtitan",
    layers="nemo_rl_recipes.toml",
    asleep=lambda keys: (D,) if megatron_trains(keys) else (M,),
    blank={"yaml": "defaults: sft.yaml\npolicy:\n  sequence_packing:\n    enabled: false\n"},
    blanks={task: f"defaults: {name}.yaml\npolicy:\n  sequence_packing:\n    enabled: false\n"
            "  dynamic_batching:\n    enabled: false\n"
            for task, name in BEGUN.items()},
    ideas=(
        _model,
        _gpus,
        _layout,
        _precision,
        _task,
        _batch,
        answers_lengths,
        rollout,
        _adapter,
        _optimizer,
        _loss,
        when(megatron_trains, row("attention", f"{M}attention_backend", words=TRANSFORMER_ENGINE, add=False)),
        when(
            megatron_trains,
            overlap(
                dict.fromkeys(
                    ("overlap_grad_reduce", "overlap_param_gather"), f"{P}megatron_cfg.distributed_data_parallel_config."
                )
                | dict.fromkeys(
                    ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "overlap_p2p_comm"), f"{P}megatron_cfg."
                )
            ),
        ),
    ),
)  # fmt: skip
