"""OpenRLHF's trainers (`openrlhf.cli.train_*`): command lines with sections (`--ds.zero_stage`, of 0.11) or without.

Defaults are those of 0.11 (`cli/train_ppo_ray.py`, `train_dpo.py`, `train_rm.py`, `train_sft.py`), of distillation and KTO those of
0.8, which still had them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.hugging_face.huggingface import processes
from loadgauge.job_files.ideas.table import IDLE, Dialect, Facts, Idea, Keys, names_in
from loadgauge.job_files.ideas.words import ATTENTION
from loadgauge.job_files.pre_training.megatron import launched
from loadgauge.job_files.rollouts.openrlhf_options import OLD, at, both, trainer_of

ESTIMATORS = {
    "gae": "ppo", "rloo": "rloo", **dict.fromkeys(("reinforce", "reinforce_baseline", "group_norm", "dr_grpo"), "grpo"),
}  # fmt: skip
TRAINERS = {"ppo_ray": "", "dpo": "dpo", "rm": "rm", "sft": "", "kd": "gkd", "kto": "kto"}
"""Programs, and the task of those that have one of their own."""


def _owned(*names: str) -> tuple[str, ...]:
    return tuple(key for name in names for key in both(name))


def _generates(keys: Keys) -> bool:
    return trainer_of(keys) == "ppo_ray"


def _gpus() -> Idea:
    """GPUs of the trainer and of the rollout: all models on one set, or actor and reference on one and vLLM on another.

    Critic, reward model or reference on GPUs of their own, a third set, are counted on the actor's, and the answer says so.
    """
    names = [
        f"{role}.num_{meaning}"
        for role in ("actor", "ref", "critic", "reward")
        for meaning in ("nodes", "gpus_per_node")
    ]
    engines, width = "vllm.num_engines", "vllm.tensor_parallel_size"
    everything, pair, late = "train.colocate_all", "train.colocate_actor_ref", "train.async_enable"
    others, queue = "train.colocate_critic_reward", "train.async_queue_size"

    def read(keys: Keys) -> Facts:
        if not _generates(keys):
            return {}
        nodes, each = (keys.whole(at(keys, name)) or usual for name, usual in zip(names[:2], (1, 8), strict=True))
        trainer = nodes * each
        count = keys.whole(at(keys, engines), minimum=0)
        if not count:
            raise keys.wrong(at(keys, engines), "is the number of vLLM's engines, without which it does not generate")
        rollout = count * (keys.whole(at(keys, width)) or 1)
        together, waits = keys.flag(at(keys, everything)), not keys.flag(at(keys, late))
        _same_gpus(keys, trainer)
        if together and waits:
            if rollout != trainer:
                raise keys.wrong(at(keys, engines), f"{rollout} GPUs of the engines are not the {trainer} of the actor")
            return {"gpus": trainer, "gpus_per_node": each, "nodes": nodes, "placement": "colocated"}
        total = trainer + rollout
        node = min(8, max(each, 1)) if total > 8 else total
        return {
            "gpus": total,
            "gpus_per_node": node if total % node == 0 else None,
            "placement": f"split:{trainer}+{rollout}",
            "staleness": None if waits else keys.whole(at(keys, queue)) or 1,
        }

    def _roles(keys: Keys) -> tuple[str, ...]:
        """The models beside the actor."""
        present = {"ref": not _off(keys), "critic": _estimator(keys) == "gae", "reward": _rewards(keys) is not None}
        return tuple(role for role, there in present.items() if there)

    def _shares(keys: Keys, role: str) -> bool:
        """Return whether a model is on the actor's GPUs."""
        return bool(keys.flag(at(keys, everything)) or (role == "ref" and keys.flag(at(keys, pair))))

    def _same_gpus(keys: Keys, trainer: int) -> None:
        """Refuses a model on other GPUs than the actor's where they share them; one on its own is counted on the actor's."""
        alone = [_said(role) for role in _roles(keys) if not _shares(keys, role)]
        if alone:
            stated = f"without it {', '.join(alone)} have GPUs of their own, and are counted on the actor's"
            keys.note(at(keys, everything), stated, "saves", "weights gradients optimizer", 0.7)
        for role in _roles(keys):
            where = [keys.whole(at(keys, f"{role}.num_{meaning}")) for meaning in ("nodes", "gpus_per_node")]
            beside = _shares(keys, role)
            if beside and (where[0] or 1) * (where[1] or 8) != trainer and any(item is not None for item in where):
                raise keys.wrong(
                    at(keys, f"{role}.num_gpus_per_node"), f"is read where it is the actor's {trainer} GPUs"
                )

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if not _generates(keys) or "gpus" not in facts:
            return {}
        engine = Engine.parse(facts.get("rollout") or "vllm")
        placement = facts.get("placement") or "colocated"
        trainer, rollout = facts["gpus"], facts["gpus"]
        if placement != "colocated":
            trainer, rollout = map(int, placement.removeprefix("split:").split("+"))
        each = min(facts.get("gpus_per_node") or 8, trainer)
        if trainer % each or rollout % engine.replica:
            return {}
        values: dict[str, Any] = {at(keys, engines): rollout // engine.replica, at(keys, width): engine.replica}
        values[at(keys, everything)] = placement == "colocated"
        values[at(keys, pair)] = placement != "colocated" and facts.get("reference") not in (
            None,
            "none",
            "precomputed",
        )
        late_by = facts.get("staleness")
        values[at(keys, late)], values[at(keys, queue)] = bool(late_by), late_by or None
        # What has no key says the default, 8 GPUs; so the actor's are said of each.
        refers = facts.get("reference") not in (None, "none", "precomputed")
        there = {
            "actor": True,
            "ref": refers,
            "critic": facts.get("task") == "ppo",
            "reward": bool(facts.get("reward_model")),
        }
        for role in (role for role, present in there.items() if present):
            values[at(keys, f"{role}.num_nodes")] = trainer // each
            values[at(keys, f"{role}.num_gpus_per_node")] = each
        return values

    owned = _owned(*names, engines, width, everything, pair, late, others, queue)
    return Idea(keys=owned, facts=names_in("gpus gpus_per_node nodes placement staleness"), read=read, write=write)


def _launched() -> Idea:
    """The launcher of a trainer; of one on Ray the models' own GPUs are said, and machines are those of the whole Ray cluster."""
    own = launched()
    return msgspec.structs.replace(
        own, read=lambda keys: {} if _generates(keys) else own.read(keys), write=lambda facts, keys: {}
    )


def _said(role: str) -> str:
    return {"ref": "reference", "reward": "reward model"}.get(role, role)


def _off(keys: Keys) -> bool:
    return keys.real(at(keys, "algo.kl.init_coef")) == 0


def _estimator(keys: Keys) -> str:
    name = at(keys, "algo.advantage.estimator")
    keys.choice(name, ESTIMATORS)
    return keys.word(name) or "gae"


def _rewards(keys: Keys) -> str | None:
    """The reward model, where no server and no function of yours scores."""
    if keys.has(at(keys, "reward.remote_url")) or keys.has(at(keys, "train.agent_func_path")):
        return None
    return keys.word(at(keys, "reward.model_name_or_path"))


def _task() -> Idea:
    """The task by the program; PPO's by its estimator of advantages, and the models beside the actor."""
    kl, estimator, reward = "algo.kl.init_coef", "algo.advantage.estimator", "reward.model_name_or_path"
    remote, agent, critic = "reward.remote_url", "train.agent_func_path", "critic.model_name_or_path"
    frozen, scored, base, ipo = "ref.offload", "reward.offload", "ref.model_name_or_path", "model.ipo_enable"
    teacher, hidden, actor_loss = "teacher_model", "teacher_offload", "actor.policy_loss_type"

    def read(keys: Keys) -> Facts:
        trainer = trainer_of(keys)
        if trainer not in TRAINERS:
            raise keys.wrong(at(keys, "model"), f"train_{trainer} is not read (read: {', '.join(TRAINERS)})")
        own = keys.word(at(keys, "model"))
        if trainer == "ppo_ray":
            return _of_answers(keys, own)
        if trainer in ("dpo", "kto"):
            other = keys.word(at(keys, base))
            if other not in (None, own):
                raise keys.wrong(at(keys, base), "is read where it is the model that is trained")
            task = "ipo" if trainer == "dpo" and keys.flag(at(keys, ipo)) else trainer
            # A reference is loaded whole, beside adapters too.
            return {"task": task, "reference": "model", "frozen_offload": keys.flag(at(keys, frozen)) or None}
        if trainer == "kd":
            return {"task": "gkd", "teacher": keys.word(teacher), "frozen_offload": keys.flag(hidden) or None}
        return {"task": TRAINERS[trainer] or None}

    def _of_answers(keys: Keys, own: str | None) -> Facts:
        task = ESTIMATORS[_estimator(keys)]
        if task == "grpo" and keys.choice(at(keys, actor_loss), {"ppo": "ppo", "gspo": "gspo"}) == "gspo":
            task = "gspo"
        score, value = _rewards(keys), keys.word(at(keys, critic))
        if score is not None and "," in score:
            raise keys.wrong(at(keys, reward), "several reward models are not read; one is")
        value = value or score or own
        moved = [keys.flag(at(keys, name)) for name in (frozen, scored)]
        refers = not _off(keys)
        there = [flag for flag, each in zip(moved, (refers, score is not None), strict=True) if each]
        if len({bool(flag) for flag in there}) > 1:
            raise keys.wrong(
                at(keys, frozen), "is read where reference and reward model are both on the host, or neither"
            )
        return {
            "task": task,
            "reference": "model" if refers else "none",
            "reward_model": score,
            "critic": value if task == "ppo" and value != own else None,
            "frozen_offload": any(there) or None,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        task, trainer = facts.get("task"), trainer_of(keys)
        if trainer == "ppo_ray":
            kind = {"ppo": "gae", "rloo": "rloo", "grpo": "group_norm", "dapo": "group_norm", "gspo": "group_norm"}.get(
                task or ""
            )
            if kind is None:
                return {}
            present = keys.word(at(keys, estimator))
            kind = present if present and ESTIMATORS.get(present) == ESTIMATORS[kind] else kind
            refers, score = facts.get("reference") not in (None, "none", "precomputed"), facts.get("reward_model")
            weight = keys.real(at(keys, kl))
            away = bool(facts.get("frozen_offload"))
            scripted = keys.has(at(keys, remote)) or keys.has(at(keys, agent))
            return {
                at(keys, estimator): kind,
                at(keys, kl): (weight or 0.01) if refers else 0,
                at(keys, reward): score,
                at(keys, critic): facts.get("critic") or (facts.get("model") if score and task == "ppo" else None),
                at(keys, remote): None
                if score
                else keys.word(at(keys, remote)) or (None if scripted else "reward_func.py"),
                at(keys, frozen): away and refers,
                at(keys, scored): away and score is not None,
                at(keys, actor_loss): "gspo" if task == "gspo" else None,
            }
        if trainer in ("dpo", "kto"):
            return {
                at(keys, ipo): task == "ipo" or (None if not keys.has(at(keys, ipo)) else False),
                at(keys, frozen): bool(facts.get("frozen_offload")),
            }
        if trainer == "kd":
            return {teacher: facts.get("teacher"), hidden: bool(facts.get("frozen_offload"))}
        return {}

    owned = _owned(kl, estimator, reward, remote, agent, critic, frozen, scored, base, ipo, actor_loss)
    facts = names_in("task reference reward_model critic teacher frozen_offload")
    return Idea(keys=(*owned, teacher, hidden), facts=facts, read=read, write=write)


def _rollout() -> Idea:
    """vLLM's engines, which sleep at level 1, and what DeepSpeed moves meanwhile: everything but the 16-bit weights."""
    share, eager, sleeps = "vllm.gpu_memory_utilization", "vllm.enforce_eager", "vllm.enable_sleep"
    prefix, width, moved, everything = (
        "vllm.enable_prefix_caching",
        "vllm.tensor_parallel_size",
        "ds.enable_sleep",
        "train.colocate_all",
    )

    def read(keys: Keys) -> Facts:
        if not _generates(keys):
            return {}
        used = keys.real(at(keys, share))
        together = keys.flag(at(keys, everything)) and not keys.flag(at(keys, "train.async_enable"))
        options = {
            "tp": keys.whole(at(keys, width)) or 1,
            "utilization": 0.95 if used is None else used,
            "graphs": "false" if keys.flag(at(keys, eager)) else "true",
            "prefix": "true" if keys.flag(at(keys, prefix)) else "false",
            "sleep": 1 if together and keys.flag(at(keys, sleeps)) else 0,
            "context": _longest(keys),
        }
        host = keys.flag(at(keys, moved)) and not keys.flag(at(keys, "ds.adam_offload"))
        return {
            "rollout": Engine.parse("vllm:" + ",".join(f"{key}={each}" for key, each in options.items())).text(),
            "rollout_offload": "optimizer" if host else "none",
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        engine = Engine.parse(facts.get("rollout") or "vllm")
        if not _generates(keys) or engine.kind != "vllm" or engine.sleep > 1:
            engine = Engine.parse("vllm") if engine.kind != "vllm" else engine
        if not _generates(keys):
            return {}
        return {
            at(keys, share): engine.utilization,
            at(keys, eager): not engine.graphs,
            at(keys, prefix): engine.prefix,
            at(keys, sleeps): engine.sleep > 0,
            at(keys, moved): facts.get("rollout_offload") in ("optimizer", "all"),
        }

    owned = _owned(share, eager, sleeps, prefix, moved)
    return Idea(keys=owned, facts=("rollout", "rollout_offload"), read=read, write=write)


def _longest(keys: Keys) -> int:
    """Tokens of the longest sequence."""
    if keys.has("prompt_max_len", "generate_max_len"):
        return (keys.whole("prompt_max_len") or 1024) + (keys.whole("generate_max_len") or 1024)
    usual = {"ppo_ray": 2048, "sft": 2048, "kd": 2048}.get(trainer_of(keys), 512)
    return keys.whole(at(keys, "data.max_len")) or usual


def _lengths() -> Idea:
    """A sequence has `max_len` tokens, the prompt among them; where nothing says how long an answer is, half of them."""
    longest, answer, prompt, older = "data.max_len", "rollout.max_new_tokens", "prompt_max_len", "generate_max_len"

    def read(keys: Keys) -> Facts:
        whole = _longest(keys)
        if not _generates(keys):
            return {"seq_len": whole}
        stated = keys.whole(older) if keys.has(prompt, older) else keys.whole(at(keys, answer))
        if stated is not None and stated >= whole:
            raise keys.wrong(
                older if keys.has(older) else at(keys, answer),
                f"{stated} tokens of an answer are not fewer than the {whole} of prompt and answer",
            )
        each = stated or (1024 if keys.has(prompt, older) else whole // 2)
        return {"prompt_len": whole - each, "answers": str(each)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if not _generates(keys):
            return {at(keys, longest): facts["seq_len"]} if facts.get("seq_len") else {}
        length, first = str(facts.get("answers") or ""), facts.get("prompt_len")
        if not length.isdecimal() or first is None:
            return {}
        if keys.has(prompt, older):
            return {prompt: first, older: int(length)}
        return {at(keys, longest): first + int(length), at(keys, answer): int(length)}

    owned = (*_owned(longest, answer), prompt, older)
    return Idea(keys=owned, facts=names_in("seq_len prompt_len answers"), read=read, write=write)


def _batch() -> Idea:
    """Prompts of a step, sequences of an update and of a pass; with a dynamic batch as many as fill a number of tokens."""
    prompts, samples, whole, epochs = (
        "rollout.batch_size",
        "rollout.n_samples_per_prompt",
        "train.batch_size",
        "train.max_epochs",
    )
    micro, scored = "train.micro_batch_size", "rollout.micro_batch_size"
    dynamic, most, scored_most = "train.dynamic_batch_enable", "train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu"

    def usual(keys: Keys, name: str) -> int:
        flat = at(keys, name) == OLD[name]
        if name == scored:
            return 8 if flat else 1
        return {"ppo_ray": 4 if flat else 1, "rm": 1}.get(trainer_of(keys), 8)

    def read(keys: Keys) -> Facts:
        facts: Facts = {
            "global_batch": keys.whole(at(keys, whole)) or 128,
            "micro_batch": keys.whole(at(keys, micro)) or usual(keys, micro),
        }
        if not _generates(keys):
            return facts
        facts |= {
            "prompts": keys.whole(at(keys, prompts)) or 1024,
            "samples": keys.whole(at(keys, samples)) or 1,
            "epochs": keys.whole(at(keys, epochs)) or 1,
            "logprob_batch": keys.whole(at(keys, scored)) or usual(keys, scored),
        }
        if keys.flag(at(keys, dynamic)):
            tokens = keys.whole(at(keys, most)) or 16_192
            # At least one sequence is in a micro-batch, however long it is.
            facts["micro_batch"] = _filled(keys, tokens, facts["global_batch"])
            facts["logprob_batch"] = None
            # A sequence that is longer makes a micro-batch of its own.
            facts["logprob_tokens"] = max(keys.whole(at(keys, scored_most)) or tokens, _longest(keys))
        return facts

    def _filled(keys: Keys, tokens: int, batch: int) -> int:
        """Sequences of the longest kind that fill a micro-batch best, of those that divide the batch of a rank."""
        nodes, each = keys.whole(at(keys, "actor.num_nodes")) or 1, keys.whole(at(keys, "actor.num_gpus_per_node")) or 8
        shares = (keys.whole(at(keys, "ds.ring_attn_size")) or 1) * (
            keys.whole(at(keys, "ds.tensor_parallel_size")) or 1
        )
        own = max(1, batch * shares // (nodes * each))
        fits = max(1.0, tokens * (keys.whole(at(keys, "ds.ring_attn_size")) or 1) / _longest(keys))
        return min((rows for rows in range(1, own + 1) if own % rows == 0), key=lambda rows: abs(rows - fits))

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {at(keys, micro): facts.get("micro_batch") or 1}
        if facts.get("global_batch"):
            values[at(keys, whole)] = facts["global_batch"]
        if not _generates(keys):
            return values
        if keys.flag(at(keys, dynamic)) is not None:
            values |= {at(keys, dynamic): False, at(keys, most): None, at(keys, scored_most): None}
        for name, fact in ((prompts, "prompts"), (samples, "samples"), (epochs, "epochs"), (scored, "logprob_batch")):
            values[at(keys, name)] = facts.get(fact)
        if not facts.get("global_batch") and facts.get("prompts"):
            values[at(keys, whole)] = facts["prompts"] * (facts.get("samples") or 1)
        return values

    owned = _owned(prompts, samples, whole, epochs, micro, scored, dynamic, most, scored_most)
    facts = names_in("global_batch micro_batch prompts samples epochs logprob_batch logprob_tokens")
    return Idea(keys=owned, facts=facts, read=read, write=write)


def _deepspeed() -> Idea:
    """DeepSpeed: the ZeRO stage, the optimizer's states on the host, tensor parallelism, ring attention, and 16 bits."""
    stage, moved, tp, ring = "ds.zero_stage", "ds.adam_offload", "ds.tensor_parallel_size", "ds.ring_attn_size"
    dtype, overlap, older = "ds.param_dtype", "ds.overlap_comm", "bf16"

    def read(keys: Keys) -> Facts:
        number = keys.whole(at(keys, stage), minimum=0)
        if number is not None and number > 3:
            raise keys.wrong(at(keys, stage), f"must be 0, 1, 2 or 3, got {number}")
        ranks = keys.whole(at(keys, ring)) or 1
        hidden = keys.flag(at(keys, overlap))
        return {
            "framework": "deepspeed",
            "zero": 2 if number is None else number,
            "tp": keys.whole(at(keys, tp)) or 1,
            "offload": "optimizer" if keys.flag(at(keys, moved)) else "none",
            "cp": ranks,
            "cp_comm": "ring" if ranks > 1 else None,
            "precision": keys.choice(at(keys, dtype), {"bf16": "bf16", "fp16": "fp16"}) or "bf16",
            "overlap": "cp,dp,pp,prefetch" if hidden else None,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wide = (facts.get("pp") or 1, facts.get("ep") or 1) != (1, 1)
        out, name = facts.get("offload") or "none", (facts.get("precision") or "bf16")[:4]
        if wide or out == "all" or name not in ("bf16", "fp16"):
            return {}
        values: dict[str, Any] = {
            at(keys, stage): facts.get("zero") or 0,
            at(keys, moved): out == "optimizer",
            at(keys, dtype): name,
        }
        for key, axis in ((tp, "tp"), (ring, "cp")):
            size = facts.get(axis) or 1
            values[at(keys, key)] = size if size > 1 or keys.has(at(keys, key)) else None
        if (facts.get("cp") or 1) > 1:
            values[at(keys, "ds.packing_samples")] = True
        if facts.get("overlap"):
            values[at(keys, overlap)] = "dp" in facts["overlap"].split(",")
        return values

    owned = (*_owned(stage, moved, tp, ring, dtype, overlap, "ds.packing_samples"), older)
    facts = names_in("framework zero offload tp cp cp_comm precision overlap")
    return Idea(keys=owned, facts=facts, read=read, write=write)


def _adapter() -> Idea:
    rank, modules, dropped, quantised = "ds.lora.rank", "ds.lora.target_modules", "ds.lora.dropout", "ds.load_in_4bit"

    def read(keys: Keys) -> Facts:
        number, four = keys.whole(at(keys, rank), minimum=0) or 0, bool(keys.flag(at(keys, quantised)))
        if not number:
            if four:
                raise keys.wrong(at(keys, quantised), "says a quantised base, and no adapter trains on it")
            return {"lora_rank": 0, "qlora": False}
        chosen = keys.words(at(keys, modules)) or ["all-linear"]
        share = keys.real(at(keys, dropped))
        return {
            "lora_rank": number,
            "lora_targets": "all" if chosen == ["all-linear"] else ",".join(chosen),
            "qlora": four,
            "base": "nf4" if four else None,
            "lora_dropout": share or None,
            "kbit_upcast": "norms" if four else None,
            "lora_dtype": "bfloat16" if four else None,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if (facts.get("adapter") or "lora") != "lora" or (facts.get("base") or "nf4") != "nf4":
            return {}
        if not facts.get("lora_rank"):
            return {at(keys, name): None for name in (rank, modules, dropped)} | {at(keys, quantised): False}
        chosen = facts.get("lora_targets") or "all"
        if chosen == "attention":
            chosen = "q_proj,k_proj,v_proj,o_proj"
        return {
            at(keys, rank): facts["lora_rank"],
            at(keys, modules): ["all-linear"] if chosen == "all" else chosen.split(","),
            at(keys, dropped): facts.get("lora_dropout"),
            at(keys, quantised): bool(facts.get("qlora")),
        }

    facts = names_in("adapter lora_rank lora_targets qlora base lora_dropout kbit_upcast lora_dtype")
    return Idea(keys=_owned(rank, modules, dropped, quantised), facts=facts, read=read, write=write)


def _kernels() -> Idea:
    """Attention, recomputation, Liger's kernels, and logits that are upcast to float32 (`models/actor.py`)."""
    attention, again, liger = "ds.attn_implementation", "checkpointing", "ds.use_liger_kernel"
    older = "flash_attn"

    def read(keys: Keys) -> Facts:
        return {
            "attention": keys.choice(at(keys, attention), ATTENTION) or "fa2",
            "recompute": "full" if keys.flag(at(keys, again)) else "none",
            "kernels": "liger" if keys.flag(at(keys, liger)) else "native",
            "loss": None if trainer_of(keys) == "rm" else "float32",
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        kind = facts.get("attention") or "flash"
        named = next((word for word, ours in ATTENTION.items() if ours == kind), None)
        word = facts.get("recompute") or "none"
        values: dict[str, Any] = {at(keys, liger): facts.get("kernels") == "liger"}
        if kind not in ("fa2", "flash") or keys.has(at(keys, attention)):
            values[at(keys, attention)] = named
        return values | ({at(keys, again): word == "full"} if word in ("none", "full") else {})

    owned = (*_owned(attention, again, liger), older)
    return Idea(keys=owned, facts=names_in("attention recompute kernels loss"), read=read, write=write)


def _optimizer() -> Idea:
    kind, of_critic = "actor.optim", "critic.optim"
    sorts = {"adam": "adamw", "muon": "muon"}

    def named(keys: Keys) -> str:
        return kind if _generates(keys) else OLD[kind]

    def read(keys: Keys) -> Facts:
        own = keys.choice(named(keys), sorts) or "adamw"
        if _generates(keys) and _estimator(keys) == "gae" and (keys.choice(of_critic, sorts) or "adamw") != own:
            raise keys.wrong(of_critic, "is read where it is the actor's")
        return {"optimizer": own}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = facts["optimizer"].partition("-")[0]
        if wanted not in sorts.values():
            return {}
        word = "muon" if wanted == "muon" else "adam" if keys.has(named(keys)) else None
        return {named(keys): word, of_critic: word if _generates(keys) else None}

    return Idea(keys=(*_owned(kind), of_critic), facts=("optimizer",), read=read, write=write)


def _begin(program: str) -> str:
    return f"{program} \\\n   --ds.packing_samples\n"


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
    ideas=(
        _launched(),
        processes(),
        Idea(
            keys=_owned("model"),
            facts=("model",),
            read=lambda keys: {"model": keys.word(at(keys, "model"))},
            write=lambda facts, keys: {at(keys, "model"): facts.get("model")},
        ),
        _gpus(),
        _task(),
        _rollout(),
        _lengths(),
        _batch(),
        _deepspeed(),
        _adapter(),
        _kernels(),
        _optimizer(),
    ),
)
