"""AReaL's YAML: SFT, reward models, DPO and RL, in which one word lays out each engine (`megatron:d4t2p2`).

Defaults are those of 1.0 (`areal/api/cli_args.py`); `allocation_mode`, the older word for all engines together, is read too.
"""

import math
import re

from loadgauge.job_files.ideas import (
    ATTENTION,
    Dialect,
    Facts,
    Idea,
    Keys,
    adapters,
    engine,
    fitted,
    fixed,
    layers,
    names_in,
    row,
    trainer_gpus,
)

A, G, M, V, S = "actor.", "gconfig.", "actor.megatron.", "vllm.", "sglang."
OWN, THEIRS, OLD = f"{A}backend", "rollout.backend", "allocation_mode"
COLOCATED = ("rollout.scheduling_strategy.type", f"{A}scheduling_strategy.type")
LEFT = (f"{A}offload", "ref.offload", "enable_offload")
"""Roles that leave the GPUs between their passes, and the switch without which nothing does."""
COMPONENT = re.compile(r"[+|](?![^(]*\))")
"""Between engines of `allocation_mode`, and not between attention and experts of one."""
FRAMEWORKS = {"megatron": "megatron", "archon": "torchtitan"}
SAVED = {"full": "full", "selective": "selective"}
ARCHON = {"none": "none", "full": "full", "selective": "per-op", "memory_budget": "memory_budget"}
OFF = {"true": False, "false": True}


def _rl(keys: Keys) -> bool:
    """Return whether answers are generated and trained on."""
    return any(name.startswith((G, "rollout.")) for name in keys.document.names())


def _engines(keys: Keys) -> tuple[str, str]:
    """The words for the trainer and for what generates, without the names of roles."""
    words = [re.sub(r"\[\w*\]", "", word) for word in COMPONENT.split(keys.word(OLD) or "")]
    serving = [word for word in words if word.startswith(("sglang", "vllm"))]
    trains = [word for word in words if word not in serving]
    return keys.word(OWN) or "".join(trains[:1]), keys.word(THEIRS) or "".join(serving[:1])


def _degrees(word: str) -> dict[str, int]:
    """The degrees of a word, those of experts in capitals.

    >>> _degrees("megatron:(attn:d4t2|ffn:e4t1)"), _degrees("d8")
    ({'d': 4, 't': 2, 'E': 4, 'T': 1}, {'d': 8})
    """
    layout, _, experts = word.partition("ffn:")
    pairs = re.findall(r"([dtpce])(\d{1,5})", layout) + re.findall(r"([DTPE])(\d{1,5})", experts.upper())
    return {axis: int(size) for axis, size in pairs}


def _kind(keys: Keys) -> str:
    return _engines(keys)[0].partition(":")[0]


def _together(keys: Keys) -> bool:
    """Return whether the trainer and what generates take turns on the same GPUs (`RLTrainer._is_actor_rollout_colocated`)."""
    if keys.has(OWN):
        return "colocation" in map(keys.word, COLOCATED)
    return "+" not in (keys.word(OLD) or "")


def _layout(keys: Keys) -> Facts:
    own, size, kind = _engines(keys)[0], _degrees(_engines(keys)[0]), _kind(keys)
    t, p, c = (size.get(axis, 1) for axis in "tpc")
    trainer = size.get("d", 1) * t * p * c
    rollout = math.prod(_degrees(_engines(keys)[1]).values())
    facts: Facts = {
        "framework": FRAMEWORKS.get(kind, "huggingface"),
        "tp": t,
        "pp": p,
        "cp": c,
        "ep": size.get("E", size.get("e", 1)),
        "etp": size.get("T"),
        "sequence_parallel": t > 1,
        "gpus": trainer if own else None,
        "zero": 3 if kind != "megatron" else 0 if keys.flag(f"{M}ddp.use_distributed_optimizer") is False else 1,
        "cp_comm": "all_to_all" if c > 1 and kind != "megatron" else None,
        "gradient_sync": None if kind == "megatron" else "each",
    }
    for role in ("ref", "critic"):
        keys.note(
            f"{role}.backend",
            "is another layout than the actor's, as which it is counted",
            when=(keys.word(f"{role}.backend") or own) != own,
        )
    if _engines(keys)[1] and not _together(keys):
        late = keys.whole("rollout.max_head_offpolicyness", minimum=0) or None
        facts |= {"gpus": trainer + rollout, "placement": f"split:{trainer}+{rollout}", "staleness": late}
    each = keys.whole("cluster.n_gpus_per_node") or 8
    return facts | {"gpus_per_node": None if (facts["gpus"] or 1) % each else each}


BATCH = ("train_dataset.batch_size", "train_dataset.max_length", f"{A}mb_spec.max_tokens_per_mb", f"{A}mb_spec.n_mbs")
ANSWERS = {f"{G}max_tokens": 32_768, f"{G}max_new_tokens": 16_384, f"{G}n_samples": 1, f"{A}ppo_n_minibatches": 4}


def _batch(keys: Keys) -> Facts:
    """Prompts with their answers, or texts, in micro-batches of so many tokens, or in a number of them."""
    rows, longest, most, count = (keys.whole(key) for key in BATCH)
    every, written, copies, parts = (keys.whole(key) or usual for key, usual in ANSWERS.items())
    length, facts = longest or most or 1024, Facts()
    if _rl(keys):
        prompt = longest or max(1, min(1024, every - written))
        length = prompt + written
        facts = {"prompts": rows or 1, "samples": copies, "prompt_len": prompt, "answers": str(written), "epochs": 1}
    layout = _layout(keys)
    within = layout["tp"] * layout["pp"] * layout["cp"]
    ranks = max(1, trainer_gpus(layout["gpus"] or 1, layout.get("placement")) // within)
    own = max(1, (rows or 1) * copies // (parts if _rl(keys) else 1) // ranks)
    wanted = max(1.0, most / length if most else own / (count or 1))
    micro = fitted(keys, BATCH[2 if most else 3], wanted, own, length, "what a micro-batch has at the most")
    return facts | {"seq_len": None if _rl(keys) else length, "global_batch": own * ranks, "micro_batch": micro}


TASK = ("kl_ctl", "is_critic", "loss_type", "use_decoupled_loss", "recompute_logprob", "prox_logp_method")


def _task(keys: Keys) -> Facts:
    reference = "adapter-off" if keys.flag(f"{A}use_lora") else "model"
    if not _rl(keys) and not keys.has("ref.path"):
        return {"task": "reward"} if keys.flag(f"{A}is_critic") else {}
    if not _rl(keys):
        return {"task": "ipo" if keys.word(f"{A}loss_type") == "ipo" else "dpo", "reference": reference}
    keys.note(
        "teacher.path", "scores the answers on GPUs of its own, which are not counted", when=keys.has("teacher.path")
    )
    leaves = keys.flag(LEFT[2])
    again = (keys.word(f"{A}prox_logp_method") or "recompute") in ("recompute", "metrics")
    recomputed = again if keys.flag(f"{A}use_decoupled_loss") else keys.flag(f"{A}recompute_logprob")
    return {
        "task": "ppo" if keys.has("critic.path") else "grpo",
        "old_logprobs": None if recomputed else "none",
        "reference": reference if keys.has("ref.path") and keys.real(f"{A}kl_ctl") != 0 else "none",
        "rollout_offload": "all" if leaves and (_together(keys) or keys.flag(LEFT[0])) else "none",
        "frozen_offload": True if leaves and keys.flag(LEFT[1]) else None,
    }


LATE = ("rollout.max_concurrent_rollouts", "rollout.consumer_batch_size", "rollout.max_head_offpolicyness")


HANDED = f"{A}weight_update_mode"


def _late(keys: Keys) -> bool:
    return not _together(keys) and bool(keys.whole(LATE[2], minimum=0))


def _inflight(keys: Keys) -> int | None:
    """Answers that are asked for at once, a prompt's together (`InferenceEngineConfig`); they go on at an update of the weights."""
    prompts = keys.whole(LATE[0]) or keys.whole(LATE[1]) or keys.whole(BATCH[0])
    return prompts * (keys.whole(f"{G}n_samples") or 1) if prompts and _late(keys) else None


MADE = ("gradient_checkpointing", "megatron.recompute_granularity", "archon.ac_mode", "archon.ac_memory_budget")
SELECTIVE = tuple(f"{A}{name}" for name in MADE)


def _recompute(keys: Keys) -> str:
    """Names what is made again, where `gradient_checkpointing` is on; each engine has words of its own."""
    kind, share = _kind(keys), keys.real(SELECTIVE[3])
    word = keys.choice(SELECTIVE[2], ARCHON) or "per-op" if kind == "archon" else "full"
    word = keys.choice(SELECTIVE[1], SAVED) or "full" if kind == "megatron" else word
    word = f"{word}={0.5 if share is None else share:g}" if word == "memory_budget" else word
    return str(word) if keys.flag(SELECTIVE[0]) else "none"


def _precision(keys: Keys) -> str:
    """Weights are in the format of the products but with Megatron and, in newer releases, FSDP, which has a word for them
    (`FSDPEngine._create_llm_actor_or_critic`); gradients are reduced in float32."""
    dtypes = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "float32": "fp32", "fp32": "fp32"}
    word, held = keys.choice(f"{A}dtype", dtypes) or "bf16", keys.choice(f"{A}optimizer_dtype", dtypes)
    wide = _kind(keys) == "megatron" or (_kind(keys) == "fsdp" and keys.since(1, 0, 4) and held != "bf16")
    return "bf16-pure" if word == "bf16" and not wide else str(word)


def _served(kind: str, *options: Idea) -> Idea:
    """The idea of an engine that generates, whose ranks its word says."""
    size = {name: lambda keys, axis=name[0]: _degrees(_engines(keys)[1]).get(axis, 1) for name in ("tp", "pp")}
    late = fixed(
        *LATE[:2],
        HANDED,
        sync=lambda keys: "disk" if keys.word(HANDED) == "disk" else None,
        partial=lambda keys: True if _late(keys) else None,
        inflight=_inflight,
    )
    return engine(
        kind, fixed(**size), late, *options, test=lambda keys: _rl(keys) and _engines(keys)[1].startswith(kind)
    )


AREAL = Dialect(
    name="areal", title="AReaL", versions="AReaL 0.5 - 1.0", syntaxes=("yaml",), layers="keys/areal.toml", zero_stages=(1, 3),
    blank={"yaml": "cluster:\n  n_gpus_per_node: 8\n"},
    ideas=(
        row("model", f"{A}path", kind="model"),
        Idea(keys=(OWN, THEIRS, OLD, *COLOCATED, f"{M}ddp.use_distributed_optimizer", "cluster.n_gpus_per_node",
                   "rollout.max_head_offpolicyness", "ref.backend", "critic.backend"), read=_layout,
             facts=names_in("framework tp pp cp ep etp sequence_parallel zero cp_comm gradient_sync gpus placement staleness"
                            " gpus_per_node")),
        Idea(keys=(*BATCH, *ANSWERS), facts=names_in("seq_len prompts samples prompt_len answers epochs global_batch micro_batch"),
             read=_batch, write=lambda facts, keys: {} if _rl(keys) else {
                 BATCH[0]: facts.get("global_batch"), BATCH[1]: facts.get("seq_len"),
                 BATCH[2]: (facts.get("micro_batch") or 1) * (facts.get("seq_len") or 1024)}),
        fixed(*(f"{A}{name}" for name in TASK), "ref.path", "critic.path", "teacher.path", *LEFT),
        Idea(keys=(), facts=names_in("task reference old_logprobs rollout_offload frozen_offload"), read=_task),
        Idea(keys=SELECTIVE, facts=("recompute",), read=lambda keys: {"recompute": _recompute(keys)},
             write=lambda facts, keys: {SELECTIVE[0]: facts.get("recompute") != "none"}),
        row("optimizer", f"{A}optimizer.type", default="adamw",
            words={"adam": "adamw", "adam_bf16": "adamw-anyprecision", "sgd": "sgd"}),
        fixed(f"{A}dtype", f"{A}optimizer_dtype", precision=_precision,
              weights=lambda keys: "float32" if _kind(keys) == "fsdp" and _precision(keys) == "bf16" else None),
        row("attention", f"{A}attn_impl", words=ATTENTION, default="fa2"),
        row("offload", f"{A}fsdp.offload_params", words={"true": "all", "false": "none"}, default="none"),
        adapters(lambda keys: keys.flag(f"{A}use_lora"), row("lora_rank", f"{A}lora_rank", default=32),
                 layers(f"{A}target_modules"), switch={f"{A}use_lora": True}),
        _served("vllm", row("utilization", f"{V}gpu_memory_utilization", kind="real", default=0.9),
                row("context", f"{V}max_model_len", default=32_768), row("max_num_seqs", f"{V}max_num_seqs", default=256),
                row("graphs", f"{V}enforce_eager", words=OFF, default=True),
                row("prefix", f"{V}no_enable_prefix_caching", words=OFF, default=False)),
        _served("sglang", row("static_fraction", f"{S}mem_fraction_static", kind="real", default=0.9),
                row("context", f"{S}context_length", default=32_768), row("max_num_seqs", f"{S}max_running_requests"),
                row("graphs", f"{S}disable_cuda_graph", words=OFF, default=True),
                row("prefix", f"{S}disable_radix_cache", words=OFF, default=False)),
    ),
)  # fmt: skip
