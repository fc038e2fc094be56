"""axolotl's `rl`: preferences, and answers that are generated (`core/builders/rl.py`, `core/trainers/grpo` of 0.19; TRL 1.9)."""

from __future__ import annotations

from typing import Any

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.hugging_face.trl_tasks import colocated, old_logprobs
from loadgauge.job_files.ideas.table import Facts, Idea, Keys, names_in

PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")
GROUPS = ("grpo", "gdpo")
"""`rl`: those that generate nothing, and those that do; gdpo differs in how rewards are added up."""
LOGPROBS = ("dpo", "ipo", "kto", *GROUPS)
"""Those whose log-probabilities are not of slices of the logits."""
T, V = "trl.", "vllm."
COUNT, LONGEST, TIMES, BETA = f"{T}num_generations", f"{T}max_completion_length", f"{T}num_iterations", f"{T}beta"
SWITCH, MODE, ASLEEP = f"{T}use_vllm", f"{T}vllm_mode", f"{T}vllm_enable_sleep_mode"
SHARE, WIDTH, PROMPT, REWARDS = (
    f"{V}gpu_memory_utilization",
    f"{V}tensor_parallel_size",
    "max_prompt_len",
    f"{T}reward_funcs",
)
STOPS = {
    f"{T}async_prefetch": "generates while it trains, which is not counted",
    f"{T}use_data_producer": "generates while it trains, which is not counted",
    f"{T}sync_ref_model": "copies the policy into the reference now and then, which is not counted",
    f"{T}entropy_coef": "keeps the entropy of each token for backward, which is not counted",
    f"{T}use_adaptive_entropy": "keeps the entropy of each token for backward, which is not counted",
    f"{T}use_liger_loss": "is not read",
    f"{T}streaming_partial_batch": "scores answers while others are generated, which is not counted",
    f"{T}replay_buffer_size": "trains again on answers that it keeps, which is not counted",
    f"{T}vllm_lora_sync": "hands over adapters alone, to a server",
    "batch_flattening": "trains on answers without padding, which is not read of a file: --padding free with a MODEL",
    f"{T}rollout_func": "is a program that generates answers, which is not run",
    f"{T}generation_kwargs": "changes how answers are generated in a way that is not read",
    f"{T}generation_batch_size": "counts the sequences of all GPUs; those of gradient_accumulation_steps are read",
}
"""Keys of answers that stop, unless they are off."""
PAIRS = {
    "dpo_use_liger_kernel": "makes log-probabilities in a way that is not read",
    "dpo_generate_during_eval": "generates answers between the steps, which is not counted",
}
"""The same of preferences."""


def preference() -> Idea:
    """Return what is trained for. Raises `ConfigError` for answers of a server, whose GPUs the file does not say."""
    likelihood, chosen = "cpo_alpha", "precompute_ref_log_probs"

    def read(keys: Keys) -> Facts:
        word = keys.word("rl")
        if word in GROUPS:
            return _of_answers(keys)
        if word not in (None, *PREFERENCES):
            raise keys.wrong("rl", f"{word!r} is not read; {', '.join((*PREFERENCES, *GROUPS))} are")
        for key, what in PAIRS.items():
            if word is not None and keys.flag(key):
                raise keys.wrong(key, what)
        facts: Facts = {"task": word}
        if word == "simpo" and keys.real(likelihood) == 0:
            facts["loss_terms"] = "no-nll"
        if word in ("dpo", "ipo", "kto") and keys.flag(chosen):
            facts["reference"] = "precomputed"
        return facts

    def _of_answers(keys: Keys) -> Facts:
        for key, what in STOPS.items():
            if keys.raw(key) not in (None, False, 0, 0.0, {}, "{}"):
                raise keys.wrong(key, what)
        longest = keys.whole(LONGEST)
        if longest is None:
            raise keys.wrong("rl", f"'grpo' generates answers, and only {LONGEST} says how long they get")
        scores = [one for one in keys.words(REWARDS) or [] if "/" in one]
        if len(scores) > 1:
            raise keys.wrong(REWARDS, "names several reward models; one is read")
        rounds, weight = keys.whole("gradient_accumulation_steps") or 1, keys.real(BETA)
        weight = keys.real("rl_beta") if weight is None else weight
        at_once, again = (keys.whole("micro_batch_size") or 1) * rounds, keys.whole(TIMES) or 1
        corrected = keys.flag(SWITCH) and keys.flag(f"{T}vllm_importance_sampling_correction") is not False
        facts: Facts = {
            "task": "grpo",
            "samples": keys.whole(COUNT) or 8,
            "generated": at_once,
            "epochs": again,
            "answers": str(longest),
            "prompt_len": keys.whole(PROMPT),
            "reward_model": scores[0] if scores else None,
            "reference": None if weight else "none",
            "old_logprobs": None if old_logprobs(rounds, rounds * again, bool(corrected)) else "none",
        }
        if not keys.flag(SWITCH):
            return facts | {"rollout": f"hf:batch={at_once}"}
        if (keys.choice(MODE, {"colocate": "colocate", "server": "server"}) or "server") == "server":
            raise keys.wrong(
                MODE if keys.has(MODE) else SWITCH,
                "'server' has GPUs of its own, which the file does not say: --placement split: with a MODEL",
            )
        used = keys.real(SHARE)
        return facts | {
            "rollout": colocated(
                keys.whole(WIDTH) or 1, 0.9 if used is None else used, at_once, bool(keys.flag(ASLEEP))
            )
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        task = facts.get("task")
        if task in PREFERENCES:
            return {
                "rl": task,
                likelihood: 0.0 if facts.get("loss_terms") == "no-nll" else keys.real(likelihood) or None,
                chosen: True if facts.get("reference") == "precomputed" else None,
            }
        if task != "grpo":
            return {}
        length, engine = str(facts.get("answers") or ""), Engine.parse(facts.get("rollout") or "hf")
        own = keys.real(BETA)
        values: dict[str, Any] = {
            "rl": keys.word("rl") if keys.word("rl") in GROUPS else "grpo",
            COUNT: facts.get("samples"),
            TIMES: facts.get("epochs"),
            PROMPT: facts.get("prompt_len"),
            BETA: 0.0 if facts.get("reference") == "none" else own or 0.04,
        }
        if facts.get("reward_model") is not None:
            values[REWARDS] = [facts["reward_model"]]
        if length.isdecimal():
            values[LONGEST] = int(length)
        if engine.kind != "vllm":
            return values | ({SWITCH: None} if engine.inside else {})
        return values | {
            SWITCH: True,
            MODE: "colocate",
            SHARE: engine.utilization,
            WIDTH: engine.tp,
            ASLEEP: True if engine.sleep else None,
        }

    keys = (
        "rl",
        "rl_beta",
        likelihood,
        chosen,
        COUNT,
        LONGEST,
        TIMES,
        BETA,
        SWITCH,
        MODE,
        ASLEEP,
        SHARE,
        WIDTH,
        PROMPT,
        REWARDS,
        f"{T}vllm_importance_sampling_correction",
        *STOPS,
        *PAIRS,
    )
    facts = names_in(
        "task loss_terms reference samples prompts generated epochs answers prompt_len reward_model rollout old_logprobs"
    )
    return Idea(keys=keys, facts=facts, read=read, write=write)
