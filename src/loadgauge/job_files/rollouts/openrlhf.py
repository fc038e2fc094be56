"""OpenRLHF's trainers (`openrlhf.cli.train_*`): command lines with sections (`--ds.zero_stage`, of 0.11) or without.

Defaults are those of 0.11 (`cli/train_ppo_ray.py`, `train_dpo.py`, `train_rm.py`, `train_sft.py`), of distillation and KTO those of
0.8, which still had them.
"""

import re
from typing import Any

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.hugging_face.huggingface import dropout, processes
from loadgauge.job_files.ideas import (
    ATTENTION,
    IDLE,
    STAYS,
    Dialect,
    Facts,
    Idea,
    Keys,
    Named,
    adapters,
    fixed,
    layers,
    lengths,
    lenses,
    product,
    reads,
    refers,
    row,
    spelled,
    split_of,
    when,
    writes,
)
from loadgauge.job_files.pre_training.megatron import launched

OLD = {
    "model": "pretrain", "actor.num_nodes": "actor_num_nodes", "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    "ref.num_nodes": "ref_num_nodes", "ref.num_gpus_per_node": "ref_num_gpus_per_node",
    "critic.num_nodes": "critic_num_nodes", "critic.num_gpus_per_node": "critic_num_gpus_per_node",
    "reward.num_nodes": "reward_num_nodes", "reward.num_gpus_per_node": "reward_num_gpus_per_node",
    "train.colocate_all": "colocate_all_models", "train.colocate_actor_ref": "colocate_actor_ref",
    "train.colocate_critic_reward": "colocate_critic_reward", "vllm.num_engines": "vllm_num_engines",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size", "vllm.enable_prefix_caching": "enable_prefix_caching",
    "vllm.enforce_eager": "enforce_eager", "vllm.enable_sleep": "vllm_enable_sleep",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization", "train.async_enable": "async_train",
    "train.async_queue_size": "async_queue_size", "train.partial_rollout_enable": "partial_rollout",
    "ds.zero_stage": "zero_stage", "ds.adam_offload": "adam_offload",
    "ds.param_dtype": "param_dtype", "ds.attn_implementation": "attn_implementation",
    "ds.use_liger_kernel": "use_liger_kernel", "ds.overlap_comm": "overlap_comm",
    "ds.enable_sleep": "deepspeed_enable_sleep", "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "ds.packing_samples": "packing_samples", "ds.ring_attn_size": "ring_attn_size",
    "train.dynamic_batch_enable": "use_dynamic_batch", "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu", "ds.load_in_4bit": "load_in_4bit",
    "ds.lora.rank": "lora_rank", "ds.lora.target_modules": "target_modules", "ds.lora.dropout": "lora_dropout",
    "rollout.batch_size": "rollout_batch_size", "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt", "rollout.max_new_tokens": "max_new_tokens",
    "train.micro_batch_size": "micro_train_batch_size", "train.batch_size": "train_batch_size",
    "train.max_epochs": "max_epochs", "data.max_len": "max_len", "algo.kl.init_coef": "init_kl_coef",
    "algo.advantage.estimator": "advantage_estimator", "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url", "critic.model_name_or_path": "critic_pretrain",
    "train.agent_func_path": "agent_func_path", "ref.offload": "ref_offload", "reward.offload": "ref_reward_offload",
    "ref.model_name_or_path": "ref_pretrain", "model.ipo_enable": "ipo",
    "actor.policy_loss_type": "policy_loss_type", "checkpointing": "gradient_checkpointing", "actor.optim": "optim",
}  # fmt: skip
"""Options with sections, and what they were called before."""
STARTED = re.compile(r"\bopenrlhf(?:\.|/)cli(?:\.|/)train_(\w+)|\btrain_(ppo_ray)\b")
OF_SECTIONS = re.compile(
    r"(?:actor|critic|ref|reward|vllm|train|ds|rollout|data|algo|model|adam|muon|ckpt|logger|eval)\."
)


def trainer_of(keys: Keys) -> str:
    """The trainer of a command line: `ppo_ray`, `dpo`, ...; by the options where the program is not named."""
    if (match := STARTED.search(keys.program)) is not None:
        return match[1] or match[2]
    return "ppo_ray" if keys.has(*both("vllm.num_engines"), *both("rollout.batch_size")) else "sft"


def both(name: str) -> tuple[str, ...]:
    """Every spelling of an option: with its section, of one trainer or of another, and without."""
    tails = {"model": "model_name_or_path", "checkpointing": "gradient_checkpointing_enable"}
    new = tuple(f"{part}.{tails[name]}" for part in ("actor", "model")) if name in tails else (name,)
    return (*new, OLD[name]) if name in OLD else new


def at(keys: Keys, name: str) -> str:
    """The option of a name as this command line spells its options; a name of no section is its own spelling."""
    if name not in OLD:
        return name
    new, old = both(name)[:-1], OLD[name]
    if keys.document.get(old) is not None and keys.has(old):
        return old
    sections = any(OF_SECTIONS.match(name_in_file) for name_in_file in keys.document.names())
    if not sections and keys.document.names() and any(key in OLD.values() for key in keys.document.names()):
        return old
    return new[0] if len(new) == 1 or trainer_of(keys) == "ppo_ray" else new[1]


ESTIMATORS = {
    "gae": "ppo", "rloo": "rloo", **dict.fromkeys(("reinforce", "reinforce_baseline", "group_norm", "dr_grpo"), "grpo"),
}  # fmt: skip
TRAINERS = {"ppo_ray": "", "dpo": "dpo", "rm": "rm", "sft": "", "kd": "gkd", "kto": "kto"}
"""Programs, and the task of those that have one of their own."""


def _generates(keys: Keys) -> bool:
    return trainer_of(keys) == "ppo_ray"


def _apart(keys: Keys, trainer: int, at: Named) -> dict[str, int]:
    """GPUs of the models that have their own, by their words in `--placement`; one on the actor's has as many as that."""
    there = {"ref": not _off(keys), "critic": _estimator(keys) == "gae", "reward": _rewards(keys) is not None}
    pair = keys.flag(at.others) and there["critic"] and there["reward"]
    alone: dict[str, int] = {}
    for role in (role for role in there if there[role]):
        where = [keys.whole(f"{role}.num_{meaning}") for meaning in ("nodes", "gpus_per_node")]
        count = (where[0] or 1) * (where[1] or 8)
        if not (keys.flag(at.everything) or (role == "ref" and keys.flag(at.pair))):
            word = "critic+reward" if pair and role != "ref" else {"ref": "reference"}.get(role, role)
            alone[word] = max(count, alone.get(word, 0))
        else:
            other = count != trainer and where != [None, None]
            keys.refuse(f"{role}.num_gpus_per_node", f"is read where it is the actor's {trainer} GPUs", when=other)
    return alone


def _gpus_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    _, *others = str(facts.get("placement") or "").split(",")
    engine, split = Engine.parse(facts.get("rollout") or "vllm"), split_of(facts.get("placement"))
    counts = (other.replace("reference", "ref").partition("=") for other in others)
    own = {name: int(number) for names, _, number in counts for name in names.split("+")}
    trainer, rollout = split or (facts["gpus"], facts["gpus"])
    each, late_by = min(facts.get("gpus_per_node") or 8, trainer), facts.get("staleness")
    if trainer % each or rollout % engine.replica:
        return {}
    # What has no key says the default, 8 GPUs; so the actor's are said of each.
    there = {
        "actor": True,
        "ref": refers(facts),
        "critic": facts.get("task") == "ppo",
        "reward": bool(facts.get("reward_model")),
    }
    present = [role for role in there if there[role]]
    return {
        at.engines: rollout // engine.replica,
        at.width: engine.replica,
        at.everything: split is None,
        at.pair: split is not None and refers(facts) and "ref" not in own,
        at.others: True if any("+" in other for other in others) else None,
        at.late: bool(late_by),
        at.queue: late_by or None,
        **{
            f"{role}.{name}": size
            for role in present
            for number in (own.get(role, trainer),)
            for name, size in (("num_nodes", max(1, number // each)), ("num_gpus_per_node", min(each, number)))
        },
    }


@reads(
    facts="gpus gpus_per_node nodes placement staleness",
    write=_gpus_written,
    needs="gpus",
    sizes=tuple(
        f"{role}.num_{meaning}"
        for role in ("actor", "ref", "critic", "reward")
        for meaning in ("nodes", "gpus_per_node")
    ),
    engines="vllm.num_engines",
    width="vllm.tensor_parallel_size",
    everything="train.colocate_all",
    pair="train.colocate_actor_ref",
    late="train.async_enable",
    others="train.colocate_critic_reward",
    queue="train.async_queue_size",
)
def _gpus(keys: Keys, at: Named) -> Facts:
    """GPUs of the trainer and of the rollout: all models on one set, or actor and reference on one and vLLM on another.

    Critic, reward model or reference may have GPUs of their own beside these.
    """
    nodes, each = (keys.whole(name) or usual for name, usual in zip(at.sizes[:2], (1, 8), strict=True))
    trainer = nodes * each
    count = keys.whole(at.engines, minimum=0)
    if not count:
        raise keys.wrong(at.engines, "is the number of vLLM's engines, without which it does not generate")
    rollout = count * (keys.whole(at.width) or 1)
    waits = not keys.flag(at.late)
    alone = _apart(keys, trainer, at)
    if keys.flag(at.everything) and waits:
        keys.refuse(
            at.engines, f"{rollout} GPUs of the engines are not the {trainer} of the actor", when=rollout != trainer
        )
        return {"gpus": trainer, "gpus_per_node": each, "nodes": nodes, "placement": "colocated"}
    total = trainer + rollout + sum(alone.values())
    node = min(8, max(each, 1)) if total > 8 else total
    return {
        "gpus": total,
        "gpus_per_node": node if total % node == 0 else None,
        "placement": ",".join((f"split:{trainer}+{rollout}", *(f"{name}={count}" for name, count in alone.items()))),
        "staleness": None if waits else keys.whole(at.queue) or 1,
    }


LAUNCHED = when(lambda keys: not _generates(keys), launched())
"""The launcher of a trainer; of one on Ray the models' own GPUs are said, and machines are those of the whole Ray cluster."""


def _off(keys: Keys) -> bool:
    return keys.real("algo.kl.init_coef") == 0


def _estimator(keys: Keys) -> str:
    name = "algo.advantage.estimator"
    keys.choice(name, ESTIMATORS)
    return keys.word(name) or "gae"


def _rewards(keys: Keys) -> str | None:
    """The reward model, where no server and no function of yours scores."""
    return None if keys.has(*SCRIPTED) else keys.word("reward.model_name_or_path")


SCRIPTED = ("reward.remote_url", "train.agent_func_path")
"""Keys of a server or a function that scores in the place of a model."""
KINDS = {"ppo": "gae", "rloo": "rloo", "grpo": "group_norm", "dapo": "group_norm", "gspo": "group_norm"}
"""The estimator that a new file has for a task."""


TASK_REMOTE = SCRIPTED[0]


def _of_answers(keys: Keys, own: str | None, at: Named) -> Facts:
    task = ESTIMATORS[_estimator(keys)]
    whole = task == "grpo" and keys.choice(at.actor_loss, {"ppo": "ppo", "gspo": "gspo"}) == "gspo"
    score, value = _rewards(keys), keys.word(at.critic)
    keys.refuse(at.reward, "several reward models are not read; one is", when=score is not None and "," in score)
    value = value or score or own
    moved, beside = [keys.flag(name) for name in (at.frozen, at.scored)], not _off(keys)
    there = [flag for flag, each in zip(moved, (beside, score is not None), strict=True) if each]
    keys.refuse(
        at.frozen,
        "is read where reference and reward model are both on the host, or neither",
        when=len({bool(flag) for flag in there}) > 1,
    )
    return {
        "task": "gspo" if whole else task,
        "reference": "model" if beside else "none",
        "reward_model": score,
        "critic": value if task == "ppo" and value != own else None,
        "frozen_offload": any(there) or None,
    }


def _task_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    task, trainer, away = facts.get("task"), trainer_of(keys), bool(facts.get("frozen_offload"))
    if trainer in ("dpo", "kto"):
        return {at.ipo: task == "ipo" or (False if keys.has(at.ipo) else None), at.frozen: away}
    if trainer == "kd":
        return {at.teacher: facts.get("teacher"), at.hidden: away}
    if trainer != "ppo_ray" or task not in KINDS:
        return {}
    present, score = keys.word(at.estimator), facts.get("reward_model")
    script = keys.word(TASK_REMOTE) or (None if keys.has(*SCRIPTED) else "reward_func.py")
    alike = present and ESTIMATORS.get(present) == ESTIMATORS[KINDS[task]]
    return {
        at.estimator: present if alike else KINDS[task],
        at.kl: (keys.real(at.kl) or 0.01) if refers(facts) else 0,
        at.reward: score,
        at.critic: facts.get("critic") or (facts.get("model") if score and task == "ppo" else None),
        TASK_REMOTE: None if score else script,
        at.frozen: away and refers(facts),
        at.scored: away and score is not None,
        at.actor_loss: "gspo" if task == "gspo" else None,
    }


@reads(
    facts="task reference reward_model critic teacher frozen_offload",
    write=_task_written,
    kl="algo.kl.init_coef",
    estimator="algo.advantage.estimator",
    reward="reward.model_name_or_path",
    also=SCRIPTED,
    critic="critic.model_name_or_path",
    frozen="ref.offload",
    scored="reward.offload",
    base="ref.model_name_or_path",
    ipo="model.ipo_enable",
    actor_loss="actor.policy_loss_type",
    teacher="teacher_model",
    hidden="teacher_offload",
)
def _task(keys: Keys, at: Named) -> Facts:
    """The task by the program; PPO's by its estimator of advantages, and the models beside the actor."""
    trainer = trainer_of(keys)
    keys.refuse("model", f"train_{trainer} is not read (read: {', '.join(TRAINERS)})", when=trainer not in TRAINERS)
    own = keys.word("model")
    if trainer == "ppo_ray":
        return _of_answers(keys, own, at)
    if trainer in ("dpo", "kto"):
        keys.refuse(
            at.base, "is read where it is the model that is trained", when=keys.word(at.base) not in (None, own)
        )
        task = "ipo" if trainer == "dpo" and keys.flag(at.ipo) else trainer
        # A reference is loaded whole, beside adapters too.
        return {"task": task, "reference": "model", "frozen_offload": keys.flag(at.frozen) or None}
    if trainer == "kd":
        return {"task": "gkd", "teacher": keys.word(at.teacher), "frozen_offload": keys.flag(at.hidden) or None}
    return {"task": TRAINERS[trainer] or None}


def _sleeps(keys: Keys) -> bool:
    together = keys.flag("train.colocate_all") and not keys.flag("train.async_enable")
    return bool(together and keys.flag(ASLEEP))


"""The switch by which answers go on at a hand-over of weights, which else waits for the batch (`ppo_trainer_async.py`)."""
ASLEEP, MOVED = "vllm.enable_sleep", "ds.enable_sleep"


@writes(
    lenses.engine(
        "vllm",
        fixed(tp=lambda keys: keys.whole("vllm.tensor_parallel_size") or 1),
        row("utilization", "vllm.gpu_memory_utilization", kind="real", default=0.95),
        row("graphs", "vllm.enforce_eager", words={"true": False, "false": True}, default=True),
        row("prefix", "vllm.enable_prefix_caching", words={"true": True, "false": False}, default=False),
        row(
            "partial",
            "train.partial_rollout_enable",
            words={"true": True, "false": False},
            off=False,
            default=lambda keys: False if keys.flag("train.async_enable") else None,
            add=False,
        ),
        fixed(ASLEEP, sleep=lambda keys: int(_sleeps(keys)), context=lambda keys: _longest(keys)),
    )
)
def _engine(facts: Facts, keys: Keys, inner: Idea) -> dict[str, Any]:
    """vLLM's engines, which sleep at level 1."""
    wanted = Engine.parse(facts.get("rollout") or "vllm")
    wanted = wanted if wanted.kind == "vllm" else Engine.parse("vllm")
    return inner.write({"rollout": wanted.text()}, keys) | {ASLEEP: wanted.sleep > 0}


@reads(
    MOVED,
    facts="rollout_offload",
    write=lambda facts, keys: {MOVED: facts.get("rollout_offload") in ("optimizer", "states", "all")},
)
def _moved(keys: Keys) -> Facts:
    """The idea of what DeepSpeed moves but for an update: everything but the 16-bit weights (`ppo_trainer.py`, `_run_sleep`)."""
    return {"rollout_offload": "states" if (keys.flag(MOVED) and not keys.flag("ds.adam_offload")) else "none"}


def _longest(keys: Keys) -> int:
    """Tokens of the longest sequence."""
    if keys.has("prompt_max_len", "generate_max_len"):
        return (keys.whole("prompt_max_len") or 1024) + (keys.whole("generate_max_len") or 1024)
    usual = {"ppo_ray": 2048, "sft": 2048, "kd": 2048}.get(trainer_of(keys), 512)
    return keys.whole("data.max_len") or usual


def _lengths_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    if not _generates(keys):
        return {at.longest: facts["seq_len"]} if facts.get("seq_len") else {}
    length, first = str(facts.get("answers") or ""), facts.get("prompt_len")
    if not length.isdecimal() or first is None:
        return {}
    if keys.has(at.prompt, at.older):
        return {at.prompt: first, at.older: int(length)}
    return {at.longest: first + int(length), at.answer: int(length)}


@reads(
    facts="seq_len prompt_len answers",
    write=_lengths_written,
    longest="data.max_len",
    answer="rollout.max_new_tokens",
    prompt="prompt_max_len",
    older="generate_max_len",
)
def _lengths(keys: Keys, at: Named) -> Facts:
    """A sequence has `max_len` tokens, the prompt among them; where nothing says how long an answer is, half of them."""
    whole = _longest(keys)
    if not _generates(keys):
        return {"seq_len": whole}
    stated = keys.whole(at.older) if keys.has(at.prompt, at.older) else keys.whole(at.answer)
    keys.refuse(
        at.older if keys.has(at.older) else at.answer,
        f"{stated} tokens of an answer are not fewer than the {whole} of prompt and answer",
        when=stated is not None and stated >= whole,
    )
    each = stated or (1024 if keys.has(at.prompt, at.older) else whole // 2)
    return lengths(keys, whole - each, each, taken=not stated and not keys.has(at.prompt, at.older))


WHOLE, MICRO, SCORED = "train.batch_size", "train.micro_batch_size", "rollout.micro_batch_size"
DYNAMIC, MOST, SCORED_MOST = "train.dynamic_batch_enable", "train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"


def _usual(keys: Keys) -> int:
    """Sequences of a micro-batch where nothing is said."""
    older = at(keys, MICRO) == OLD[MICRO]
    return {"ppo_ray": 4 if older else 1, "rm": 1}.get(trainer_of(keys), 8)


def _filled(keys: Keys, tokens: int, batch: int) -> int:
    """Sequences of the longest kind that fill a micro-batch best, of those that divide the batch of a rank."""
    ring, tp = (keys.whole(f"ds.{name}") or 1 for name in ("ring_attn_size", "tensor_parallel_size"))
    gpus = (keys.whole("actor.num_nodes") or 1) * (keys.whole("actor.num_gpus_per_node") or 8)
    own = max(1, batch * ring * tp // gpus)
    fits = max(1.0, tokens * ring / _longest(keys))
    return min((rows for rows in range(1, own + 1) if own % rows == 0), key=lambda rows: abs(rows - fits))


BATCH_ALWAYS = product(row("global_batch", WHOLE, default=128), row("micro_batch", MICRO, default=_usual))
BATCH_GENERATED = product(
    row("prompts", "rollout.batch_size", default=1024),
    row("samples", "rollout.n_samples_per_prompt", default=1),
    row("epochs", "train.max_epochs", default=1),
    row("logprob_batch", SCORED, default=lambda keys: 8 if at(keys, SCORED) == OLD[SCORED] else 1),
)
BATCH_OWNED = dict.fromkeys(
    (*BATCH_GENERATED.keys[:2], WHOLE, *BATCH_GENERATED.keys[2:3], MICRO, SCORED, DYNAMIC, MOST, SCORED_MOST)
)


def _batch_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    generates = _generates(keys)
    prompts = (facts.get("prompts") or 0) if generates else 0
    stated = generates and keys.flag(DYNAMIC) is not None
    return {
        MICRO: facts.get("micro_batch") or 1,
        WHOLE: facts.get("global_batch") or prompts * (facts.get("samples") or 1) or STAYS,
        DYNAMIC: False if stated else STAYS,
        MOST: None if stated else STAYS,
        SCORED_MOST: None if stated else STAYS,
        **(BATCH_GENERATED.write(facts, keys) if generates else {}),
    }


@reads(*tuple(BATCH_OWNED), facts=(*BATCH_ALWAYS.facts, *BATCH_GENERATED.facts, "logprob_tokens"), write=_batch_written)
def _batch(keys: Keys) -> Facts:
    """Prompts of a step, sequences of an update and of a pass; with a dynamic batch as many as fill a number of tokens."""
    facts = BATCH_ALWAYS.read(keys)
    if not _generates(keys):
        return facts
    facts |= BATCH_GENERATED.read(keys)
    if keys.flag(DYNAMIC):
        tokens = keys.whole(MOST) or 16_192
        facts |= {
            # At least one sequence is in a micro-batch, however long it is.
            "micro_batch": _filled(keys, tokens, facts["global_batch"]),
            "logprob_batch": None,
            # A sequence that is longer makes a micro-batch of its own.
            "logprob_tokens": max(keys.whole(SCORED_MOST) or tokens, _longest(keys)),
        }
    return facts


DEEPSPEED_STAGE = "ds.zero_stage"


def _deepspeed_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    wide = (facts.get("pp") or 1, facts.get("ep") or 1) != (1, 1)
    name, out = (facts.get("precision") or "bf16")[:4], facts.get("offload") or "none"
    if wide or out == "all" or name not in ("bf16", "fp16"):
        return {}
    return {
        **at.inner.write(facts | {"precision": name, "offload": out, "zero": facts.get("zero") or 0}, keys),
        "ds.packing_samples": True if (facts.get("cp") or 1) > 1 else STAYS,
        at.overlap: "dp" in facts["overlap"].split(",") if facts.get("overlap") else STAYS,
    }


@reads(
    facts="framework zero offload tp cp cp_comm precision overlap",
    write=_deepspeed_written,
    inner=product(
        row("zero", DEEPSPEED_STAGE, minimum=0, default=2),
        row("offload", "ds.adam_offload", words={"true": "optimizer", "false": "none"}, default="none"),
        row("tp", "ds.tensor_parallel_size", default=1, quiet=1),
        row("cp", "ds.ring_attn_size", default=1, quiet=1),
        row("precision", "ds.param_dtype", words={"bf16": "bf16", "fp16": "fp16"}, default="bf16"),
    ),
    overlap="ds.overlap_comm",
    also=(
        "ds.packing_samples",
        "bf16",
    ),
)
def _deepspeed(keys: Keys, at: Named) -> Facts:
    """DeepSpeed: the ZeRO stage, the optimizer's states on the host, tensor parallelism, ring attention, and 16 bits."""
    facts = {"framework": "deepspeed", **at.inner.read(keys)}
    keys.refuse(DEEPSPEED_STAGE, f"must be 0, 1, 2 or 3, got {facts['zero']}", when=facts["zero"] > 3)
    beside = {"overlap": "cp,dp,pp,prefetch" if keys.flag(at.overlap) else None}
    return facts | {"cp_comm": "ring" if facts["cp"] > 1 else None} | beside


RANK, FOUR = "ds.lora.rank", "ds.load_in_4bit"


def _adapts(keys: Keys) -> bool:
    number = keys.whole(RANK, minimum=0)
    keys.refuse(FOUR, "says a quantised base, and no adapter trains on it", when=not number and keys.flag(FOUR))
    return bool(number)


ADAPTER = adapters(
    _adapts,
    row("lora_rank", RANK),
    layers("ds.lora.target_modules", ["all-linear"]),
    dropout("ds.lora.dropout"),
    row("qlora", FOUR, kind="flag", default=False),
    when(lambda keys: keys.flag(FOUR), fixed(FOUR, base="nf4", kbit_upcast="norms", lora_dtype="bfloat16")),
    off=lambda keys: {FOUR: False},
    bases=("nf4",),
    alone=True,
)


@writes(
    product(
        row("attention", "ds.attn_implementation", words=ATTENTION, default="fa2"),
        row("recompute", "checkpointing", words={"true": "full", "false": "none"}, default="none"),
        row("kernels", "ds.use_liger_kernel", words={"true": "liger", "false": "native"}, default="native"),
        fixed("flash_attn", loss=lambda keys: None if trainer_of(keys) == "rm" else "float32"),
    )
)
def _kernels(facts: Facts, keys: Keys, inner: Idea) -> dict[str, Any]:
    """Attention, recomputation, Liger's kernels, and logits that are upcast to float32 (`models/actor.py`)."""
    usual = {"attention": "flash", "recompute": "none", "kernels": "native"}
    values = inner.write(usual | {name: value for name, value in facts.items() if value is not None}, keys)
    # It runs FlashAttention-2 where nothing is said.
    stated = facts.get("attention") not in ("fa2", "flash", None) or keys.has("ds.attn_implementation")
    return values if stated else {key: value for key, value in values.items() if key != "ds.attn_implementation"}


OPTIMIZER_KIND = "actor.optim"
OPTIMIZER_SORTS = {"adam": "adamw", "muon": "muon"}


def _named(keys: Keys) -> str:
    return OPTIMIZER_KIND if _generates(keys) else OLD[OPTIMIZER_KIND]


def _optimizer_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    wanted = facts["optimizer"].partition("-")[0]
    if wanted not in OPTIMIZER_SORTS.values():
        return {}
    word = "muon" if wanted == "muon" else "adam" if keys.has(_named(keys)) else None
    return {_named(keys): word, at.of_critic: word if _generates(keys) else None}


@reads(OPTIMIZER_KIND, OLD[OPTIMIZER_KIND], facts="optimizer", write=_optimizer_written, of_critic="critic.optim")
def _optimizer(keys: Keys, at: Named) -> Facts:
    own = keys.choice(_named(keys), OPTIMIZER_SORTS) or "adamw"
    keys.refuse(
        at.of_critic,
        "is read where it is the actor's",
        when=_generates(keys)
        and _estimator(keys) == "gae"
        and (keys.choice(at.of_critic, OPTIMIZER_SORTS) or "adamw") != own,
    )
    return {"optimizer": own}


def _begin(program: str) -> str:
    return f"{program} \\\n   --ds.packing_samples\n"


IDEAS = (
    row("model", "model", kind="word"),
    when(_generates, _gpus),
    _task,
    when(_generates, product(_engine, _moved)),
    _lengths,
    _batch,
    _deepspeed,
    ADAPTER,
    _kernels,
    _optimizer,
)
OPENRLHF = Dialect(
    name="openrlhf",
    title="OpenRLHF",
    versions="OpenRLHF 0.6 - 0.11",
    syntaxes=("argv",),
    style="flags",
    framework="deepspeed",
    programs={
        r"openrlhf[./]cli[./](?:serve_rm|batch_inference|interactive_chat|lora_combiner)": IDLE,
    },
    blank={"argv": _begin("deepspeed --num_gpus 1 --num_nodes 1 --module openrlhf.cli.train_sft")},
    blanks={
        **{
            task: _begin(f"deepspeed --num_gpus 1 --num_nodes 1 --module openrlhf.cli.train_{task}")
            for task in ("dpo", "rm", "kto")
        },
        "ipo": _begin("deepspeed --num_gpus 1 --num_nodes 1 --module openrlhf.cli.train_dpo"),
        "gkd": _begin("deepspeed --num_gpus 1 --num_nodes 1 --module openrlhf.cli.train_kd"),
        **{task: _begin("python3 -m openrlhf.cli.train_ppo_ray") for task in ("ppo", "grpo", "rloo", "dapo", "gspo")},
    },
    ideas=(LAUNCHED, processes(), *(spelled(idea, at, both) for idea in IDEAS)),
)
