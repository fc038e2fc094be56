"""verl's step around the actor's update: the task, its other models, the rollout's engine, log-probs and what is moved meanwhile.

Defaults are those of 0.9 (`trainer/config/ppo_trainer.yaml`, `rollout/rollout.yaml`, `ref/ref.yaml`).
"""

from typing import Any

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.ideas import STAYS, Facts, Keys, Named, product, reads, refers, row, served

A = "actor_rollout_ref.actor."
R, REF, C = "actor_rollout_ref.rollout.", "actor_rollout_ref.ref.", "critic."
COUNT = f"{R}n"
ADVANTAGES = {
    "gae": "ppo", "rloo": "rloo", "rloo_vectorized": "rloo",
    **dict.fromkeys(
        ("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "opo", "gpg", "reinforce_plus_plus",
         "reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline", "remax"), "grpo"),
}  # fmt: skip
"""`algorithm.adv_estimator` by its roles and passes: with gae a critic is trained beside the actor; grpo's are those of all that
compare the answers to a prompt."""
ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf": "hf"}


def trains_answers(keys: Keys) -> bool:
    """Return whether a file says what is around the actor's update: an estimator of advantages, a rollout's engine or a critic."""
    return any(
        key == "algorithm.adv_estimator" or key.startswith(C) or (key.startswith(R) and key != COUNT)
        for key in keys.document.names()
    )


def on_its_own(keys: Keys) -> str:
    """Return whether the rollout has GPUs of its own in `rollout.nnodes`: `async` of a fully asynchronous trainer, `late` of one
    that is a step off, else nothing."""
    if "fully_async" in keys.program or any(key.startswith("async_training.") for key in keys.document.names()):
        return "async"
    return "late" if "one_step_off" in keys.program or keys.has("rollout.nnodes", "rollout.n_gpus_per_node") else ""


LATE = "async_training."
"""Options of a fully asynchronous trainer, whose own defaults are in `fully_async_ppo_trainer.yaml`."""
PARTIAL, EVERY, THRESHOLD = f"{LATE}partial_rollout", f"{LATE}trigger_parameter_sync_step", f"{LATE}staleness_threshold"


def ahead(keys: Keys) -> float:
    """Steps' worth of answers that a fully asynchronous trainer asks for between two hand-overs (`set_max_required_samples`)."""
    threshold = keys.real(THRESHOLD)
    return (keys.whole(EVERY) or 4) * (1 + (0.1 if threshold is None else threshold))


HANDED = f"{R}checkpoint_engine.backend"
SYNCS = {
    **dict.fromkeys(("nccl", "hccl", "nixl", "mooncake", "kimi_ckpt_engine"), "nccl"),
    "delta_sharded": "delta",
    "naive": None,
}


LOOP = f"{R}multi_turn."
SAID = tuple(f"{LOOP}{name}" for name in ("enable", "max_assistant_turns", "max_tool_response_length"))
CHARACTERS = 4
"""Characters of a token of text, in which verl limits what a tool says."""


def _turns(keys: Keys) -> Facts:
    """Turns of an answer at the most, and tokens that a tool says between two, which are among those of the answer."""
    turns = keys.whole(SAID[1]) if keys.flag(SAID[0]) else None
    if turns is None or turns < 2:
        return {}
    each = -(-(keys.whole(SAID[2]) or 256) // CHARACTERS)
    fits = (turns - 1) * each < (keys.whole("data.max_response_length") or 512) / 2
    return {"turns": turns, "observed": each if fits else None}


def _late(keys: Keys, servers: int) -> Facts:
    """How weights come, and answers are asked for beside a trainer: 16 prompts a server at the most (`max_concurrent_samples`)."""
    sent = {"sync": keys.choice(HANDED, SYNCS) if on_its_own(keys) else None}
    if on_its_own(keys) != "async":
        return sent
    return sent | {
        "partial": keys.flag(PARTIAL) is not False,
        "every": keys.whole(EVERY) or 4,
        "inflight": 16 * servers * (keys.whole(COUNT) or 1) if servers else None,
    }


def _task_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    wanted = {"ppo": "gae", "grpo": "grpo", "rloo": "rloo", "dapo": "grpo", "gspo": "grpo"}.get(facts.get("task") or "")
    if wanted is None:
        return {}
    same = keys.has(at.estimator) and ADVANTAGES.get(keys.word(at.estimator) or "") == ADVANTAGES[wanted]
    wrong = refers(facts) != bool(keys.flag(at.kl) or keys.flag(at.in_reward))
    in_reward = None if refers(facts) or not keys.has(at.in_reward) else False
    scores = facts.get("reward_model")
    return {
        at.estimator: keys.word(at.estimator) if same else wanted,
        at.critic: facts.get("critic") or keys.word(at.critic),
        at.bypassed: True if facts.get("old_logprobs") == "none" else False if keys.has(at.bypassed) else None,
        **dict(zip(at.scored, (scores, None), strict=True)),
        **dict(zip(at.switch, (True if scores else None, None), strict=True)),
        at.kl: refers(facts) if wrong else STAYS,
        at.in_reward: in_reward if wrong else STAYS,
    }


def adapts(keys: Keys) -> bool:
    """Return whether adapters are trained: PEFT's, or Megatron-Bridge's (`ref_in_actor` of trainer/ppo/ray_trainer.py)."""
    return any(keys.whole(f"actor_rollout_ref.model.{name}", minimum=0) for name in ("lora.rank", "lora_rank"))


@reads(
    facts="task reference critic reward_model old_logprobs",
    write=_task_written,
    when=trains_answers,
    estimator="algorithm.adv_estimator",
    kl=f"{A}use_kl_loss",
    in_reward="algorithm.use_kl_in_reward",
    critic=f"{C}model.path",
    bypassed="algorithm.rollout_correction.bypass_mode",
    scored=("reward.reward_model.model_path", "reward_model.model.path"),
    switch=("reward.reward_model.enable", "reward_model.enable"),
    trained=f"{C}enable",
    apart=("reward.reward_model.enable_resource_pool", "reward_model.enable_resource_pool"),
    teaches=("distillation.enabled", "distillation.enable"),
    loss="distillation.distillation_loss.loss_mode",
)
def task(keys: Keys, at: Named) -> Facts:
    """The task by its estimator of advantages, and the models beside the actor.

    A teacher (`distillation`) has GPUs of its own, where an engine scores what the actor has answered.
    """
    word = keys.word(at.estimator) or "gae"
    chosen = ADVANTAGES.get(word)
    keys.note(at.estimator, "advantages made in a way of its own, counted as GRPO's", "either", when=chosen is None)
    keys.note(at.estimator, "one more answer to each prompt, which is not trained on", "costs", when=word == "remax")
    # `need_critic` of trainer/ppo/utils.py
    asked = keys.flag(at.trained)
    chosen = "ppo" if asked else "grpo" if chosen is None or (asked is False and chosen == "ppo") else chosen
    refers = keys.flag(at.kl) or keys.flag(at.in_reward)
    for name, on in zip(at.scored, at.switch, strict=True):
        keys.refuse(
            on, f"is on, and {name} does not say which model scores", when=keys.flag(on) and keys.word(name) is None
        )
    if any(keys.flag(key) for key in at.teaches):
        keys.note(
            at.teaches[keys.has(at.teaches[1])], "a teacher scores on GPUs of its own, which are not counted", "either"
        )
        keys.note(
            at.loss,
            "logarithms of all probabilities in float32",
            "costs",
            "loss",
            3.0,
            when="topk" in (keys.word(at.loss) or ""),
        )
    apart = list(filter(keys.flag, at.apart))
    keys.note((apart or at.apart)[0], "a reward model on GPUs of its own, which are not counted", "either", when=apart)
    of_critic = keys.model(at.critic) if chosen == "ppo" else None
    return {
        "task": chosen,
        "reference": ("adapter-off" if adapts(keys) else "model") if refers else "none",
        "critic": None if of_critic == keys.model("actor_rollout_ref.model.path") else of_critic,
        "old_logprobs": "none" if keys.flag(at.bypassed) else None,
        # On GPUs of its own it is not counted.
        "reward_model": next(
            (keys.model(name) for name, on in zip(at.scored, at.switch, strict=True) if keys.flag(on)), None
        )
        if not apart
        else None,
    }


RANKS = product(
    row("tp", f"{R}tensor_model_parallel_size", default=2),
    row("pp", f"{R}pipeline_model_parallel_size", default=1),
    row("ep", f"{R}expert_parallel_size", default=1),
    row("max_num_seqs", f"{R}max_num_seqs", default=lambda keys: 256 if keys.since(0, 6) else 1024),
    row("max_batched_tokens", f"{R}max_num_batched_tokens", default=8192),
)
OPTIONS = product(
    row("graphs", f"{R}enforce_eager", words={"true": False, "false": True}, default=True),
    row("context", f"{R}max_model_len"),
    row("prefix", f"{R}enable_prefix_caching", words={"true": True, "false": False}, default=True, off=True),
)


def _engine_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    wanted = Engine.parse(facts["rollout"])
    if wanted.kv not in ("bf16", "fp8") or wanted.accepted or wanted.turns > 1 or wanted.weights not in ("bf16", "fp8"):
        return {}
    if wanted.kind == "hf":
        return {at.name: "hf", at.micro: wanted.batch}
    options = {name: getattr(wanted, name) for name in (*RANKS.facts, *OPTIONS.facts)}
    return {
        **RANKS.write(options, keys),
        at.name: wanted.kind,
        at.share: wanted.utilization if wanted.kind == "vllm" else wanted.static_fraction,
        at.freed: wanted.sleep > 0,
        **OPTIONS.write(options, keys),
        at.quantised: "fp8" if wanted.weights == "fp8" else None,
        at.data: wanted.ep // wanted.tp if wanted.ep > wanted.tp else None,
        at.held[wanted.kind == "sglang"]: "fp8" if wanted.kv == "fp8" else None,
    }


@reads(
    *RANKS.keys,
    PARTIAL,
    HANDED,
    *SAID,
    facts="rollout",
    write=_engine_written,
    when=trains_answers,
    name=f"{R}name",
    share=f"{R}gpu_memory_utilization",
    freed=f"{R}free_cache_engine",
    merged="actor_rollout_ref.model.lora.merge",
    more=OPTIONS.keys[:2],
    quantised=f"{R}quantization",
    prefixes=OPTIONS.keys[2],
    data=f"{R}data_parallel_size",
    micro=f"{R}micro_batch_size",
    held=tuple(f"{R}engine_kwargs.{kind}.kv_cache_dtype" for kind in ("vllm", "sglang")),
)
def engine(keys: Keys, at: Named) -> Facts:
    """The rollout's engine: its ranks, its share of the card, and whether it sleeps meanwhile.

    vLLM sleeps at level 2, with adapters at 1 (`_resolve_sleep_level` of workers/rollout/vllm_rollout); for SGLang the same share
    is `mem_fraction_static`.
    """
    kind = keys.choice(at.name, ENGINES) or "vllm"
    if kind == "hf":
        return {"rollout": served("hf", {"batch": keys.whole(at.micro)})}
    options, ranks = RANKS.read(keys) | OPTIONS.read(keys), keys.whole(at.data) or 1
    served_apart = adapts(keys) and not keys.flag(at.merged)
    keys.note(
        at.name,
        "the engine's weights stay on the card beside the trainer's where it serves adapters, and are counted as given back",
        "costs",
        "weights",
        2.0,
        when=served_apart and kind != "vllm",
        bare=True,
    )
    free = keys.flag(at.freed) if keys.has(at.freed) else not on_its_own(keys)  # its trainers' own defaults
    word = keys.word(at.quantised) or "none"
    keys.note(
        at.quantised,
        "the engine's weights are quantised, and counted in 16 bits",
        "either",
        when=word.lower() not in ("fp8", "none", "null"),
    )
    keys.refuse(
        RANKS.keys[2],
        f"{options['ep']} is not tensor x data parallel ranks of the engine",
        when=options["ep"] > 1 and options["ep"] != options["tp"] * ranks,
    )
    keys.note(
        at.data, "ranks of one engine, counted as engines of their own", "either", when=ranks > 1 and options["ep"] == 1
    )
    share = {"utilization" if kind == "vllm" else "static_fraction": keys.real(at.share, 0.5)}
    formats = {
        "weights": "fp8" if word == "fp8" else None,
        "kv": "fp8" if any(str(keys.raw(key)).startswith("fp8") for key in at.held) else None,
        "sleep": 0 if not free else 1 if served_apart and kind == "vllm" else 2,
    }
    width, count = keys.whole("rollout.n_gpus_per_node") or 8, keys.whole("rollout.nnodes", minimum=0)
    replica = max(options["tp"], options["ep"]) * options["pp"]
    servers = width * (1 if count is None else count) // replica
    return {"rollout": served(kind, options | share | formats | _turns(keys) | _late(keys, servers))}


def sharing(keys: Keys) -> int:
    """Ranks whose tokens count together in a dynamic micro-batch (`sp_size` of workers/engine): those of Ulysses, of Megatron's
    context parallelism, and with torchtitan of tensor parallelism."""
    engine = str(getattr(keys.document, "variant", "rl fsdp")).partition(" ")[2]
    name = {"megatron": "megatron.context_parallel_size", "mlite": "megatron.context_parallel_size",
            "torchtitan": "fsdp_config.tensor_parallel_size"}.get(engine)  # fmt: skip
    if engine == "automodel":
        return 1
    return keys.whole(f"{A}{name}") or 1 if name else ulysses(keys)


def ulysses(keys: Keys) -> int:
    """Ranks of a sequence: the older key goes before the engine's where it is more than 1 (`FSDPActorConfig`)."""
    older = keys.whole(f"{A}ulysses_sequence_parallel_size") or 1
    return older if older > 1 else keys.whole(f"{A}fsdp_config.ulysses_sequence_parallel_size") or 1


LOG_PROBS_NAMES = ("log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu")
LOG_PROBS_BOTH = [tuple(f"{section}{name}" for name in LOG_PROBS_NAMES) for section in (R, REF)]


def _log_probs_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    rows, tokens = facts.get("logprob_batch"), facts.get("logprob_tokens")
    most, left = divmod(tokens or 0, sharing(keys))
    values = (rows, tokens is not None, None if tokens is None else most)
    return {} if left else {key: value for names in LOG_PROBS_BOTH for key, value in zip(names, values, strict=True)}


@reads(
    *tuple(key for section in LOG_PROBS_BOTH for key in section),
    facts="logprob_tokens logprob_batch",
    write=_log_probs_written,
    when=trains_answers,
)
def log_probs(keys: Keys) -> Facts:
    """Sequences, or tokens, of a forward pass that scores; of the old log-probs' and the reference's the larger."""
    refers = keys.flag(f"{A}use_kl_loss") or keys.flag("algorithm.use_kl_in_reward")
    rows: list[int] = []
    tokens: list[int] = []
    for each, dynamic, most in LOG_PROBS_BOTH if refers else LOG_PROBS_BOTH[:1]:
        if keys.flag(dynamic, keys.flag(f"{A}use_dynamic_bsz")):
            number = keys.whole(most) or keys.whole(f"{A}ppo_max_token_len_per_gpu") or 16_384
            tokens.append(number * sharing(keys))
        elif (rows_each := keys.whole(each)) is not None:
            rows.append(rows_each)
    if tokens and rows:
        length = sum(keys.whole(f"data.max_{part}_length") or 512 for part in ("prompt", "response"))
        tokens, rows = [*tokens, *(each * length for each in rows)], []
    return {"logprob_tokens": max(tokens, default=None), "logprob_batch": max(rows, default=None)}


MOVED_INNER = {
    word: (f"{A}fsdp_config.{word}_offload", f"{A}megatron.{word}_offload") for word in ("param", "optimizer")
}


def _megatron(keys: Keys) -> bool:
    return str(getattr(keys.document, "variant", "")).endswith((" megatron", " mlite"))


def _moved_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    which, out = int(_megatron(keys)), facts.get("rollout_offload") or "none"
    loaded = {"float32": "fp32", "bfloat16": "bf16"}.get(facts.get("frozen_weights") or "")
    moves = {"param": out in ("weights", "all", "idle"), "optimizer": out in ("optimizer", "states", "all", "idle")}
    return {
        **{
            key: on or (False if keys.has(key) else None)
            for on, key in ((moves[w], MOVED_INNER[w][which]) for w in moves)
        },
        at.frozen[which]: bool(facts["frozen_offload"]) if facts.get("frozen_offload") is not None else None,
        at.dtype: loaded if not which else None,
    }


@reads(
    *MOVED_INNER["param"],
    *MOVED_INNER["optimizer"],
    facts="rollout_offload frozen_offload frozen_weights",
    write=_moved_written,
    when=trains_answers,
    frozen=(f"{REF}fsdp_config.param_offload", f"{REF}megatron.param_offload"),
    gradients=f"{A}megatron.grad_offload",
    dtype=f"{REF}fsdp_config.model_dtype",
)
def moved(keys: Keys, at: Named) -> Facts:
    """Return what is on the host between its phases: the actor's states, and a reference, which FSDP always offloads
    (`_build_fsdp_module` of workers/engine/fsdp/transformer_impl.py)."""
    which = int(_megatron(keys))
    weights, states = (bool(keys.flag(MOVED_INNER[word][which])) for word in ("param", "optimizer"))
    keys.note(
        at.gradients,
        "gradients alone are moved to the host between their updates",
        "saves",
        "gradients",
        when=keys.flag(at.gradients) and not weights,
    )
    held = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    # The engines of 0.9 load a reference as the actor is loaded; before, in bfloat16 (workers/fsdp_workers.py).
    usual = "float32" if keys.since(0, 9) else "bfloat16"
    refers = keys.flag(f"{A}use_kl_loss") or keys.flag("algorithm.use_kl_in_reward")
    offloaded = True if not which else bool(keys.flag(at.frozen[1]) or (not keys.has(at.frozen[1]) and weights))
    return {
        "rollout_offload": ("idle" if weights else "states") if states else "weights" if weights else "none",
        "frozen_offload": offloaded if refers else None,
        "frozen_weights": None if which or not refers else keys.choice(at.dtype, held) or usual,
    }


@reads(
    facts="critic_batch",
    write=lambda facts, keys, at: {
        at.each: facts.get("critic_batch"),
        at.dynamic: False if keys.has(at.dynamic) else None,
    },
    each=f"{C}ppo_micro_batch_size_per_gpu",
    dynamic=f"{C}use_dynamic_bsz",
    most=f"{C}ppo_max_token_len_per_gpu",
    forward=f"{C}forward_micro_batch_size_per_gpu",
)
def critic_batch(keys: Keys, at: Named) -> Facts:
    """Sequences of the critic's micro-batch."""
    if not trains_answers(keys) or (keys.word("algorithm.adv_estimator") or "gae") != "gae":
        return {}
    if not keys.flag(at.dynamic, keys.flag(f"{A}use_dynamic_bsz")):
        return {"critic_batch": keys.whole(at.each)}
    length = (keys.whole("data.max_prompt_length") or 512) + (keys.whole("data.max_response_length") or 512)
    tokens = (keys.whole(at.most) or 32_768) * (keys.whole(f"{C}ulysses_sequence_parallel_size") or 1)
    keys.refuse(
        at.most, f"{tokens} tokens are fewer than a sequence has ({length}), which verl refuses", when=tokens < length
    )
    return {"critic_batch": tokens // length}
