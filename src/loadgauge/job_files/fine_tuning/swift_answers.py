"""ms-swift's trainers that generate their answers: `rlhf_type` grpo, ppo and gkd.

Defaults are those of 4.6 (`arguments/rlhf_args.py`, `rlhf_trainers/args_mixin.py`). Generation without vLLM is transformers'.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.fine_tuning.started import world
from loadgauge.job_files.hugging_face.trl_tasks import DISTANCES, distance_written, on_policy
from loadgauge.job_files.ideas import STAYS, Facts, Idea, Keys, Named, answered, reads, served

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
        keys.refuse(BATCH, f"{whole} are no whole micro-batches of {each} on {ranks} GPUs", when=left or not every)
    again = (keys.whole("num_iterations") or 1) > 1 or rounds % every != 0
    return Batches({"generated": each * (every if every % rounds == 0 else rounds)}, each * every, again)


def of_all(keys: Keys, samples: int) -> Batches:
    """Batches by the sequences of all GPUs, as Megatron counts (`resolve_generation_batch_size`); the old log-probabilities are
    worked out in any case (`_maybe_compute_logps`)."""
    number, ranks = keys.whole(BATCH), world(keys)
    if number is None:
        number = (keys.whole("global_batch_size") or 16) * (keys.whole(STEPS) or 1)
    keys.refuse(
        "num_generations", f"{samples} do not divide the {number} sequences of a generation", when=number % samples
    )
    return Batches({"prompts": number // samples}, None if ranks is None else max(1, number // ranks), True)


def _each(keys: Keys) -> int:
    return keys.whole(MICRO) or 1


def _distilled(keys: Keys, facts: Facts, at: Named) -> Facts:
    keys.refuse(at.server, "is a teacher on GPUs of its own, which the file does not say", when=keys.has(at.server))
    keys.note(
        at.sequences,
        "generates answers of the teacher, which is not counted",
        "costs",
        "activations transient",
        when=keys.flag(at.sequences),
    )
    part = on_policy(keys, at.share)
    alone = DISTANCES.get(keys.real(at.weight))
    own = {"teacher": keys.word(at.teacher), "frozen_offload": keys.flag(at.away) or None, "loss_terms": alone}
    if not part:
        keys.note(
            at.likeliest,
            "keeps the likeliest tokens of the teacher alone",
            "saves",
            "loss transient",
            when=keys.has(at.likeliest),
        )
        return {"task": "gkd", **own}
    own["loss_terms"] = "top-k" if keys.has(at.likeliest) else alone or "jsd"
    step: Batches = at.batches(keys, 1)
    if "generated" in step.facts:  # a micro-batch at a time
        step = Batches({"generated": _each(keys) * (keys.whole(ACCUMULATED) or 1)}, _each(keys), False)
    return (
        facts
        | _engine(keys, step.at_once, at)
        | own
        | step.facts
        | {"task": "opd", "on_policy": None if part == 1 else part}
    )


def _lengths(facts: Facts, at: Named) -> dict[str, Any]:
    return {at.of_prompt: facts.get("prompt_len"), **answered(facts, LONGEST)}


def _engine(keys: Keys, at_once: int | None, at: Named) -> Facts:
    if not keys.flag(at.switch, at.on):
        return {"rollout": f"hf:batch={at_once}", "rollout_offload": None}
    apart = (keys.choice(at.mode, {"colocate": "colocate", "server": "server"}) or "colocate") == "server"
    ranks = keys.whole(at.width) or 1
    options: dict[str, Any] = {
        "tp": ranks,
        "pp": keys.whole(at.stages) or 1,
        "utilization": keys.real(at.used, 0.9),
        "graphs": not keys.flag(at.eager),
        "prefix": keys.flag(at.prefixes) is not False,
        "sleep": keys.whole(at.asleep, minimum=0) or 0,
        "turns": (keys.whole(at.turns) or 1) if keys.has(at.scheduler) else 1,
        "context": keys.whole(at.length),
        "max_num_seqs": keys.whole(at.most) or (None if at_once is None or apart else at_once * ranks),
    }
    out = [bool(keys.flag(name)) for name in at.moved]
    return {
        "rollout": served("vllm", options),
        "rollout_offload": "all" if all(out) else "weights" if out[0] else "optimizer" if out[1] else "none",
    }


def _one_of(keys: Keys, name: str) -> str | None:
    """The model of a key that may be a list of one."""
    named = keys.words(name) or []
    keys.note(name, "names several models, of which the first is counted", "costs", "weights", when=len(named) > 1)
    return named[0] if named else None


def _lengths_of(keys: Keys, at: Named) -> Facts:
    """The longest prompt and answer: together no longer than vLLM's context, to which it cuts answers
    (`set_default_max_tokens`); of several turns all that the context holds."""
    longest, first = keys.whole(at.response) or keys.whole(LONGEST) or 512, keys.whole(at.of_prompt)
    context = keys.whole(at.length) if keys.flag(at.switch) or at.on else None
    if keys.has(at.scheduler):
        if context is not None and first is not None and first < context:
            longest = context - first
        else:
            longest *= keys.whole(at.turns) or 1
    if context is not None and (first or 0) + longest > context and longest < context:
        first = context - longest
    return {"answers": str(longest), "prompt_len": first}


def _engines(facts: Facts, at: Named) -> dict[str, Any]:
    engine = Engine.parse(facts.get("rollout") or "hf")
    if engine.kind != "vllm":
        return {at.switch: None} if engine.kind == "hf" else {}
    out = facts.get("rollout_offload") or "none"
    return {
        at.switch: True,
        at.mode: "colocate",
        at.used: engine.utilization,
        at.width: engine.tp,
        at.length: engine.context,
        at.asleep: engine.sleep or None,
        at.most: engine.max_num_seqs,
        at.eager: True if not engine.graphs else None,
        at.prefixes: None if engine.prefix else False,
        at.stages: engine.pp if engine.pp > 1 else None,
        at.moved[0]: True if out in ("weights", "all") else None,
        at.moved[1]: True if out in ("optimizer", "states", "all") else None,
    }


def _answers_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    task = facts.get("task")
    together = (facts.get("micro_batch") or 1) * (facts.get("dp") or 1)
    if task in ("gkd", "opd"):
        top = facts.get("loss_terms") == "top-k"
        return {
            at.teacher: facts.get("teacher"),
            **distance_written(facts, keys, at.weight, at.share),
            at.away: True if facts.get("frozen_offload") else None,
            at.likeliest: keys.whole(at.likeliest) or LIKELIEST if top else None,
            **(_lengths(facts, at) | _engines(facts, at) if task == "opd" else {}),
        }
    if task == "ppo":
        return _lengths(facts, at) | {
            at.epochs: facts.get("epochs"),
            at.reward: facts.get("reward_model"),
            at.forward: facts.get("logprob_batch"),
        }
    if task != "grpo":
        return {}
    together = facts.get("global_batch") or 16 if at.batches is of_all else together
    number, left = divmod((facts.get("prompts") or 0) * (facts.get("samples") or 1), together)
    return {
        **_lengths(facts, at),
        **_engines(facts, at),
        at.steps: number if number and not left else STAYS,
        at.samples_of: facts.get("samples"),
        at.times: facts.get("epochs"),
        at.reward: facts.get("reward_model"),
        at.weight: 0.0 if facts.get("reference") == "none" else keys.real(at.weight) or None,
    }


def _answers_read(keys: Keys, at: Named) -> Facts:
    kind = generating(keys)
    if kind is None:
        for other in filter(keys.has, (at.samples_of, at.reward, at.teacher)):
            raise keys.wrong(other, "needs a trainer that generates its answers (rlhf_type grpo, ppo, gkd)")
        return {}
    rounds = keys.whole(ACCUMULATED) or 1
    facts: Facts = _lengths_of(keys, at) | {"samples": 1}
    if kind == "grpo":
        keys.note(
            at.teacher if keys.has(at.teacher) else at.server,
            "compares with a teacher too, which is not counted",
            "costs",
            "weights transient loss",
            when=keys.has(at.teacher, at.server),
        )
        factor, samples = keys.real(at.weight), keys.whole(at.samples_of) or 8
        step: Batches = at.batches(keys, samples)
        return (
            facts
            | _engine(keys, step.at_once, at)
            | step.facts
            | {
                "task": "grpo",
                "samples": samples,
                "epochs": keys.whole(at.times) or 1,
                "reference": "none" if factor == 0 else None,
                "reward_model": _one_of(keys, at.reward),
                "old_logprobs": None if step.again else "none",
            }
        )
    if kind == "ppo":
        keys.note(
            at.parts,
            "makes several steps of the optimizer of one, which is counted",
            "either",
            when=(keys.whole(at.parts) or 1) > 1,
        )
        scores, at_once = _one_of(keys, at.reward), _each(keys) * rounds
        keys.refuse("rlhf_type", "'ppo' needs a reward model (reward_model)", when=scores is None)
        rows = min(keys.whole(at.forward) or 64, at_once)
        return facts | {
            "task": "ppo",
            "generated": at_once,
            "epochs": keys.whole(at.epochs) or 4,
            "reward_model": scores,
            "critic": scores,
            "logprob_batch": rows,
            "rollout": f"hf:batch={rows}",
        }
    return _distilled(keys, facts, at)


def answers(batches: Callable[[Keys, int], Batches] = of_ranks, *, on: bool = False) -> Idea:
    """Return what a step generates, with what, and which other models there are. `on`: vLLM is used unless it is said."""
    return reads(
        facts="task samples generated prompts epochs answers prompt_len reward_model critic teacher reference rollout"
        " rollout_offload old_logprobs logprob_batch frozen_offload on_policy loss_terms",
        write=_answers_written,
        options={"weight": "beta", "of_prompt": "max_length", "batches": batches, "on": on},
        samples_of="num_generations",
        steps=STEPS,
        times="num_iterations",
        reward="reward_model",
        teacher="teacher_model",
        share="lmbda",
        sequences="seq_kd",
        epochs="num_ppo_epochs",
        parts="num_mini_batches",
        forward="local_rollout_forward_batch_size",
        response="response_length",
        switch="use_vllm",
        mode="vllm_mode",
        asleep="sleep_level",
        used=f"{V}gpu_memory_utilization",
        width=f"{V}tensor_parallel_size",
        stages=f"{V}pipeline_parallel_size",
        length=f"{V}max_model_len",
        most=f"{V}max_num_seqs",
        eager=f"{V}enforce_eager",
        prefixes=f"{V}enable_prefix_caching",
        moved=("offload_model", "offload_optimizer"),
        away="offload_teacher_model",
        server="teacher_model_server",
        whole=BATCH,
        scheduler="multi_turn_scheduler",
        turns="max_turns",
        longest=LONGEST,
        likeliest="gkd_logits_topk",
    )(_answers_read)
