"""ms-swift's trainers that generate their answers: `rlhf_type` grpo, ppo and gkd.

Defaults are those of 4.6 (`arguments/rlhf_args.py`, `rlhf_trainers/args_mixin.py`). Generation without vLLM is transformers'.
"""

from __future__ import annotations

from typing import Any

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.ideas.table import Facts, Idea, Keys, names_in

GENERATING = ("grpo", "ppo", "gkd")
MICRO, ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
LONGEST = "max_completion_length"
V = "vllm_"
DISTANCES: dict[float | None, str] = {0.0: "forward-kl", 1.0: "reverse-kl"}
"""`beta` of GKD at which it is one divergence, as in TRL."""
LIKELIEST = 64
"""Tokens that a new file says of those that a teacher finds likeliest; the memory of a few is not counted."""


def generating(keys: Keys) -> str | None:
    """The `rlhf_type` of a file that generates its answers; None of another."""
    kind = keys.word("rlhf_type")
    return kind if kind in GENERATING else None


def _each(keys: Keys) -> int:
    return keys.whole(MICRO) or 1


def answers() -> Idea:
    """Return what a step generates, with what, and which other models there are."""
    count, steps, times, weight = "num_generations", "steps_per_generation", "num_iterations", "beta"
    reward, teacher, share, sequences = "reward_model", "teacher_model", "lmbda", "seq_kd"
    epochs, parts, forward, response = (
        "num_ppo_epochs",
        "num_mini_batches",
        "local_rollout_forward_batch_size",
        "response_length",
    )
    switch, mode, asleep = "use_vllm", "vllm_mode", "sleep_level"
    used, width, stages, length, most, eager, prefixes = (
        f"{V}{name}"
        for name in (
            "gpu_memory_utilization",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "max_model_len",
            "max_num_seqs",
            "enforce_eager",
            "enable_prefix_caching",
        )
    )
    moved = ("offload_model", "offload_optimizer")
    away, server, batch = "offload_teacher_model", "teacher_model_server", "generation_batch_size"
    of_prompt, likeliest = "max_length", "gkd_logits_topk"

    def one_of(keys: Keys, name: str) -> str | None:
        """The model of a key that may be a list of one."""
        named = keys.words(name) or []
        if len(named) > 1:
            raise keys.wrong(name, "several reward models are not read; one is")
        return named[0] if named else None

    def engine(keys: Keys, at_once: int) -> Facts:
        if not keys.flag(switch):
            return {"rollout": f"hf:batch={at_once}", "rollout_offload": None}
        if (keys.choice(mode, {"colocate": "colocate", "server": "server"}) or "colocate") == "server":
            raise keys.wrong(
                mode, "'server' has GPUs of its own, which the file does not say: --placement split: with a MODEL"
            )
        ranks, filled = keys.whole(width) or 1, keys.real(used)
        options: dict[str, Any] = {
            "tp": ranks,
            "pp": keys.whole(stages) or 1,
            "utilization": 0.9 if filled is None else filled,
            "max_num_seqs": keys.whole(most) or at_once * ranks,
            "graphs": "false" if keys.flag(eager) else "true",
            "prefix": "false" if keys.flag(prefixes) is False else "true",
            "sleep": keys.whole(asleep, minimum=0) or 0,
        } | ({"context": context} if (context := keys.whole(length)) else {})
        out = [bool(keys.flag(name)) for name in moved]
        return {
            "rollout": Engine.parse("vllm:" + ",".join(f"{key}={one}" for key, one in options.items())).text(),
            "rollout_offload": "all" if all(out) else "weights" if out[0] else "optimizer" if out[1] else "none",
        }

    def read(keys: Keys) -> Facts:
        kind = generating(keys)
        if kind is None:
            other = next((key for key in (count, reward, teacher) if keys.has(key)), None)
            if other is not None:
                raise keys.wrong(other, "is of a trainer that generates its answers (rlhf_type grpo, ppo, gkd)")
            return {}
        if keys.has(batch):
            raise keys.wrong(batch, "counts the sequences of all GPUs; steps_per_generation, of one, is read")
        longest, first = str(keys.whole(response) or keys.whole(LONGEST) or 512), keys.whole(of_prompt)
        rounds = keys.whole(ACCUMULATED) or 1
        facts: Facts = {"answers": longest, "prompt_len": first, "samples": 1}
        if kind == "grpo":
            factor = keys.real(weight)
            every = keys.whole(steps) or rounds
            again = (keys.whole(times) or 1) > 1 or rounds % every != 0
            at_once = _each(keys) * every
            return (
                facts
                | engine(keys, at_once)
                | {
                    "task": "grpo",
                    "samples": keys.whole(count) or 8,
                    "generated": at_once,
                    "epochs": keys.whole(times) or 1,
                    "reference": "none" if factor == 0 else None,
                    "reward_model": one_of(keys, reward),
                    "old_logprobs": None if again else "none",
                }
            )
        if kind == "ppo":
            if (keys.whole(parts) or 1) > 1:
                raise keys.wrong(parts, "is read where a step is one mini-batch")
            scores, at_once = one_of(keys, reward), _each(keys) * rounds
            if scores is None:
                raise keys.wrong("rlhf_type", "'ppo' needs a reward model (reward_model)")
            rows = min(keys.whole(forward) or 64, at_once)
            return facts | {
                "task": "ppo",
                "generated": at_once,
                "epochs": keys.whole(epochs) or 4,
                "reward_model": scores,
                "critic": scores,
                "logprob_batch": rows,
                "rollout": f"hf:batch={rows}",
            }
        return _distilled(keys, facts, rounds)

    def _distilled(keys: Keys, facts: Facts, rounds: int) -> Facts:
        if keys.has(server):
            raise keys.wrong(server, "is a teacher on GPUs of its own, which the file does not say")
        if keys.flag(sequences):
            raise keys.wrong(sequences, "generates answers of the teacher, which is not counted")
        part = keys.real(share)
        part = 0.5 if part is None else part
        if not 0 <= part <= 1:
            raise keys.wrong(share, "is a share, from 0 to 1")
        alone = DISTANCES.get(keys.real(weight))
        own = {"teacher": keys.word(teacher), "frozen_offload": keys.flag(away) or None, "loss_terms": alone}
        if not part:
            if keys.has(likeliest):
                raise keys.wrong(likeliest, f"is read of answers that the student generates ({share})")
            return {"task": "gkd", **own}
        own["loss_terms"] = "top-k" if keys.has(likeliest) else alone or "jsd"
        generated = {"task": "opd", "generated": _each(keys) * rounds, "on_policy": None if part == 1 else part}
        return facts | engine(keys, _each(keys)) | own | generated

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        task = facts.get("task")
        if task in ("gkd", "opd"):
            values: dict[str, Any] = {
                teacher: facts.get("teacher"),
                share: (facts.get("on_policy") or 1.0) if task == "opd" else 0.0,
            }
            values[away] = True if facts.get("frozen_offload") else None
            form = facts.get("loss_terms")
            same = next((value for value, name in DISTANCES.items() if name == form), None)
            factor = keys.real(weight)
            values[weight] = same if same is not None else None if factor in DISTANCES else factor
            values[likeliest] = keys.whole(likeliest) or LIKELIEST if form == "top-k" else None
            return values | (lengths(facts) | engines(facts) if task == "opd" else {})
        if task == "ppo":
            return lengths(facts) | {
                epochs: facts.get("epochs"),
                reward: facts.get("reward_model"),
                forward: facts.get("logprob_batch"),
            }
        if task != "grpo":
            return {}
        factor = keys.real(weight)
        number, left = divmod(
            (facts.get("prompts") or 0) * (facts.get("samples") or 1),
            (facts.get("micro_batch") or 1) * (facts.get("dp") or 1),
        )
        return (
            lengths(facts)
            | engines(facts)
            | ({steps: number} if number and not left else {})
            | {
                count: facts.get("samples"),
                times: facts.get("epochs"),
                reward: facts.get("reward_model"),
                weight: 0.0 if facts.get("reference") == "none" else factor or None,
            }
        )

    def lengths(facts: Facts) -> dict[str, Any]:
        longest = str(facts.get("answers") or "")
        return {of_prompt: facts.get("prompt_len")} | ({LONGEST: int(longest)} if longest.isdecimal() else {})

    def engines(facts: Facts) -> dict[str, Any]:
        found = Engine.parse(facts.get("rollout") or "hf")
        if found.kind != "vllm":
            return {switch: None} if found.kind == "hf" else {}
        out = facts.get("rollout_offload") or "none"
        return {
            switch: True,
            mode: "colocate",
            used: found.utilization,
            width: found.tp,
            length: found.context,
            asleep: found.sleep or None,
            most: found.max_num_seqs,
            eager: True if not found.graphs else None,
            prefixes: None if found.prefix else False,
            stages: found.pp if found.pp > 1 else None,
            moved[0]: True if out in ("weights", "all") else None,
            moved[1]: True if out in ("optimizer", "all") else None,
        }

    owned = (
        count,
        steps,
        times,
        reward,
        teacher,
        share,
        sequences,
        epochs,
        parts,
        forward,
        response,
        switch,
        mode,
        asleep,
        used,
        width,
        stages,
        length,
        most,
        eager,
        prefixes,
        *moved,
        away,
        server,
        batch,
        LONGEST,
        likeliest,
    )
    facts = names_in(
        "task samples generated prompts epochs answers prompt_len reward_model critic teacher reference rollout rollout_offload"
        " old_logprobs logprob_batch frozen_offload on_policy loss_terms"
    )
    return Idea(keys=owned, facts=facts, read=read, write=write)
