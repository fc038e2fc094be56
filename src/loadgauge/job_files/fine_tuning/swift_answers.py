"""ms-swift's trainers that generate their answers: `rlhf_type` grpo, ppo and gkd.

Defaults are those of 4.6 (`arguments/rlhf_args.py`, `rlhf_trainers/args_mixin.py`). Generation without vLLM is transformers'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.fine_tuning.started import world
from loadgauge.job_files.hugging_face.trl_tasks import DISTANCES, distance_written, on_policy
from loadgauge.job_files.ideas.table import Facts, Idea, Keys, names_in

GENERATING = ("grpo", "ppo", "gkd")
MICRO, ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
LONGEST = "max_completion_length"
STEPS, BATCH = "steps_per_generation", "generation_batch_size"
V = "vllm_"
LIKELIEST = 64
"""Tokens that a new file says of those that a teacher finds likeliest; the memory of a few is not counted."""


def generating(keys: Keys) -> str | None:
    """The `rlhf_type` of a file that generates its answers; None of another."""
    kind = keys.word("rlhf_type")
    return kind if kind in GENERATING else None


class Batches(NamedTuple):
    """How many sequences are generated at a time: `facts` of the step, `at_once` on a GPU (None: where GPUs are unknown), and
    `again`, whether a sequence is trained on after an update, so that its old log-probabilities are kept."""

    facts: Facts
    at_once: int | None
    again: bool


def of_ranks(keys: Keys, samples: int) -> Batches:
    """Batches by the sequences of a rank (`rlhf_trainers/args_mixin.py`, `grpo_trainer.py`)."""
    each, rounds, whole = _each(keys), keys.whole(ACCUMULATED) or 1, keys.whole(BATCH)
    every = keys.whole(STEPS) or rounds
    if whole is not None:
        ranks = world(keys)
        if ranks is None:
            raise keys.wrong(BATCH, "counts the sequences of all GPUs, which the file does not say; give --gpus")
        every, left = divmod(whole, each * ranks)
        if left or not every:
            raise keys.wrong(BATCH, f"{whole} are no whole micro-batches of {each} on {ranks} GPUs")
    again = (keys.whole("num_iterations") or 1) > 1 or rounds % every != 0
    return Batches({"generated": each * (every if every % rounds == 0 else rounds)}, each * every, again)


def of_all(keys: Keys, samples: int) -> Batches:
    """Batches by the sequences of all GPUs, as Megatron counts (`resolve_generation_batch_size`); the old log-probabilities are
    worked out in any case (`_maybe_compute_logps`)."""
    number, ranks = keys.whole(BATCH), world(keys)
    if number is None:
        number = (keys.whole("global_batch_size") or 16) * (keys.whole(STEPS) or 1)
    if number % samples:
        raise keys.wrong("num_generations", f"{samples} do not divide the {number} sequences of a generation")
    return Batches({"prompts": number // samples}, None if ranks is None else max(1, number // ranks), True)


def _each(keys: Keys) -> int:
    return keys.whole(MICRO) or 1


def answers(batches: Callable[[Keys, int], Batches] = of_ranks, *, on: bool = False) -> Idea:
    """Return what a step generates, with what, and which other models there are. `on`: vLLM is used unless it is said."""
    samples_of, steps, times, weight = "num_generations", STEPS, "num_iterations", "beta"
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
    away, server = "offload_teacher_model", "teacher_model_server"
    of_prompt, likeliest, scheduler, turns = "max_length", "gkd_logits_topk", "multi_turn_scheduler", "max_turns"

    def lengths_of(keys: Keys) -> Facts:
        """The longest prompt and answer: together no longer than vLLM's context, to which it cuts answers
        (`set_default_max_tokens`); of several turns all that the context holds."""
        longest, first = keys.whole(response) or keys.whole(LONGEST) or 512, keys.whole(of_prompt)
        context = keys.whole(length) if keys.flag(switch) or on else None
        if keys.has(scheduler):
            if context is not None and first is not None and first < context:
                longest = context - first
            else:
                longest *= keys.whole(turns) or 1
        if context is not None and (first or 0) + longest > context and longest < context:
            first = context - longest
        return {"answers": str(longest), "prompt_len": first}

    def one_of(keys: Keys, name: str) -> str | None:
        """The model of a key that may be a list of one."""
        named = keys.words(name) or []
        if len(named) > 1:
            keys.note(name, "names several models, of which the first is counted", "costs", "weights")
        return named[0] if named else None

    def engine(keys: Keys, at_once: int | None) -> Facts:
        flag = keys.flag(switch)
        if not (on if flag is None else flag):
            return {"rollout": f"hf:batch={at_once}", "rollout_offload": None}
        apart = (keys.choice(mode, {"colocate": "colocate", "server": "server"}) or "colocate") == "server"
        ranks, filled = keys.whole(width) or 1, keys.real(used)
        options: dict[str, Any] = {
            "tp": ranks,
            "pp": keys.whole(stages) or 1,
            "utilization": 0.9 if filled is None else filled,
            "graphs": "false" if keys.flag(eager) else "true",
            "prefix": "false" if keys.flag(prefixes) is False else "true",
            "sleep": keys.whole(asleep, minimum=0) or 0,
            "turns": (keys.whole(turns) or 1) if keys.has(scheduler) else 1,
        } | ({"context": context} if (context := keys.whole(length)) else {})
        if (at_most := keys.whole(most) or (None if at_once is None or apart else at_once * ranks)) is not None:
            options["max_num_seqs"] = at_most
        out = [bool(keys.flag(name)) for name in moved]
        return {
            "rollout": Engine.parse("vllm:" + ",".join(f"{key}={one}" for key, one in options.items())).text(),
            "rollout_offload": "all" if all(out) else "weights" if out[0] else "optimizer" if out[1] else "none",
        }

    def read(keys: Keys) -> Facts:
        kind = generating(keys)
        if kind is None:
            other = next((key for key in (samples_of, reward, teacher) if keys.has(key)), None)
            if other is not None:
                raise keys.wrong(other, "needs a trainer that generates its answers (rlhf_type grpo, ppo, gkd)")
            return {}
        rounds = keys.whole(ACCUMULATED) or 1
        facts: Facts = lengths_of(keys) | {"samples": 1}
        if kind == "grpo":
            if keys.has(teacher, server):
                name = teacher if keys.has(teacher) else server
                keys.note(name, "compares with a teacher too, which is not counted", "costs", "weights transient loss")
            factor, samples = keys.real(weight), keys.whole(samples_of) or 8
            step = batches(keys, samples)
            return (
                facts
                | engine(keys, step.at_once)
                | step.facts
                | {
                    "task": "grpo",
                    "samples": samples,
                    "epochs": keys.whole(times) or 1,
                    "reference": "none" if factor == 0 else None,
                    "reward_model": one_of(keys, reward),
                    "old_logprobs": None if step.again else "none",
                }
            )
        if kind == "ppo":
            if (keys.whole(parts) or 1) > 1:
                keys.note(parts, "makes several steps of the optimizer of one, which is counted", "either")
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
        return distilled(keys, facts)

    def distilled(keys: Keys, facts: Facts) -> Facts:
        if keys.has(server):
            raise keys.wrong(server, "is a teacher on GPUs of its own, which the file does not say")
        if keys.flag(sequences):
            keys.note(
                sequences, "generates answers of the teacher, which is not counted", "costs", "activations transient"
            )
        part = on_policy(keys, share)
        alone = DISTANCES.get(keys.real(weight))
        own = {"teacher": keys.word(teacher), "frozen_offload": keys.flag(away) or None, "loss_terms": alone}
        if not part:
            if keys.has(likeliest):
                keys.note(likeliest, "keeps the likeliest tokens of the teacher alone", "saves", "loss transient")
            return {"task": "gkd", **own}
        own["loss_terms"] = "top-k" if keys.has(likeliest) else alone or "jsd"
        step = batches(keys, 1)
        if "generated" in step.facts:  # a micro-batch at a time
            step = Batches({"generated": _each(keys) * (keys.whole(ACCUMULATED) or 1)}, _each(keys), False)
        return (
            facts
            | engine(keys, step.at_once)
            | own
            | step.facts
            | {"task": "opd", "on_policy": None if part == 1 else part}
        )

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        task = facts.get("task")
        if task in ("gkd", "opd"):
            values = {teacher: facts.get("teacher"), **distance_written(facts, keys, weight, share)}
            values[away] = True if facts.get("frozen_offload") else None
            values[likeliest] = keys.whole(likeliest) or LIKELIEST if facts.get("loss_terms") == "top-k" else None
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
        together = (facts.get("micro_batch") or 1) * (facts.get("dp") or 1)
        if batches is of_all:
            together = facts.get("global_batch") or 16
        number, left = divmod((facts.get("prompts") or 0) * (facts.get("samples") or 1), together)
        return (
            lengths(facts)
            | engines(facts)
            | ({steps: number} if number and not left else {})
            | {
                samples_of: facts.get("samples"),
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

    return Idea(
        keys=(
            samples_of,
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
            BATCH,
            scheduler,
            turns,
            LONGEST,
            likeliest,
        ),
        facts=names_in(
            "task samples generated prompts epochs answers prompt_len reward_model critic teacher reference rollout rollout_offload"
            " old_logprobs logprob_batch frozen_offload on_policy loss_terms"
        ),
        read=read,
        write=write,
    )
