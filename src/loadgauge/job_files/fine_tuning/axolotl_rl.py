"""axolotl's `rl`: preferences, and answers that are generated (`core/builders/rl.py`, `core/trainers/grpo` of 0.19; TRL 1.9)."""

from __future__ import annotations

from typing import Any

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.hugging_face.trl_tasks import colocated, old_logprobs
from loadgauge.job_files.ideas.table import Facts, Idea, Keys, names_in

RUNS = "activations loss transient"
SCORES, STEPS, LABELS = "reward_model", "process_reward_model", "num_labels"
PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")
GROUPS = ("grpo", "gdpo")
"""`rl`: those that generate nothing, and those that do; gdpo differs in how rewards are added up."""
LOGPROBS = ("dpo", "ipo", "kto", *GROUPS)
"""Those whose log-probabilities are not of slices of the logits."""
T, V = "trl.", "vllm."
COUNT, LONGEST, TIMES, BETA = f"{T}num_generations", f"{T}max_completion_length", f"{T}num_iterations", f"{T}beta"
EARLY = (f"{T}async_prefetch", f"{T}use_data_producer")
"""Answers that are made before the trainer asks for them."""
SWITCH, MODE, ASLEEP = f"{T}use_vllm", f"{T}vllm_mode", f"{T}vllm_enable_sleep_mode"
SHARE, WIDTH, PROMPT, REWARDS = (
    f"{V}gpu_memory_utilization",
    f"{V}tensor_parallel_size",
    "max_prompt_len",
    f"{T}reward_funcs",
)
COPIES = f"{V}data_parallel_size"
E = "ebft."
STRIDE, CONTEXT, EACH, MANY = f"{E}stride", f"{E}context_length", f"{E}generate_max_len", f"{E}n_samples_per_prompt"


def _strided(keys: Keys) -> bool:
    """Return whether answers are short blocks that start all over a text (`core/trainers/ebft/strided.py`)."""
    return keys.word("rl") == "ebft" and keys.word(f"{E}mode") == "strided"


def completions(keys: Keys) -> int:
    """Return how many sequences are trained on for one of a micro-batch."""
    return (keys.whole(MANY) or 4) if _strided(keys) else 1


def _blocks(keys: Keys, whole: int) -> int:
    """Tokens that are generated for a text of so many."""
    stride, context, each = (keys.whole(key) or 8 for key in (STRIDE, CONTEXT, EACH))
    return max(0, (whole - each - context) // stride + 1) * each


def length(key: str) -> Idea:
    """Return the idea of the longest sequence that is trained on, with the blocks that are generated behind a text."""

    def read(keys: Keys) -> Facts:
        whole = keys.whole(key) or 512
        return {"seq_len": whole + (_blocks(keys, whole) if _strided(keys) else 0)}

    return Idea(
        keys=(key,),
        facts=("seq_len",),
        read=read,
        write=lambda facts, keys: {} if _strided(keys) else {key: facts.get("seq_len")},
    )


def preference() -> Idea:
    """Return what is trained for. Raises `ConfigError` for answers of a server, whose GPUs the file does not say."""
    likelihood, chosen = "cpo_alpha", "precompute_ref_log_probs"

    def read(keys: Keys) -> Facts:
        word = keys.word("rl")
        if word == "ebft":
            keys.note(
                "rl",
                "rewards by what a frozen copy makes of the answers; a reference's pass is counted",
                parts=RUNS,
                share=0.3,
            )
        if _strided(keys):
            return _of_blocks(keys)
        if word in (*GROUPS, "ebft"):
            return _of_answers(keys)
        if word not in (None, *PREFERENCES):
            raise keys.wrong("rl", f"{word!r} is not read; {', '.join((*PREFERENCES, *GROUPS, 'ebft'))} are")
        scored = next((key for key in (SCORES, STEPS) if word is None and keys.flag(key)), None)
        if keys.has(LABELS) and not scored:
            keys.note(LABELS, "gives the head so many outputs, where no reward model is trained", parts="loss")
        if scored == STEPS:
            keys.note(STEPS, "scores the steps of one answer, where pairs are counted", "saves", RUNS, 0.5)
        facts: Facts = {"task": "rm" if scored else word}
        if word == "simpo" and keys.real(likelihood) == 0:
            facts["loss_terms"] = "no-nll"
        if word in ("dpo", "ipo", "kto") and keys.flag(chosen):
            facts["reference"] = "precomputed"
        return facts

    def _of_answers(keys: Keys) -> Facts:
        longest = keys.whole(LONGEST) or 512  # TRL's own
        scores = [one for one in keys.words(REWARDS) or [] if "/" in one]
        if len(scores) > 1:
            keys.note(REWARDS, "names several reward models, of which the first is counted", "costs", "weights")
        rounds, weight = keys.whole("gradient_accumulation_steps") or 1, keys.real(BETA)
        weight = keys.real("rl_beta") if weight is None else weight
        at_once, again = (keys.whole("micro_batch_size") or 1) * rounds, keys.whole(TIMES) or 1
        if (whole := keys.whole(f"{T}generation_batch_size")) is not None:  # of all GPUs
            at_once = max(1, whole // (keys.given.get("gpus") or 1))
        corrected = keys.flag(SWITCH) and keys.flag(f"{T}vllm_importance_sampling_correction") is not False
        facts: Facts = {
            "task": "grpo",
            "samples": keys.whole(COUNT) or 8,
            "generated": at_once,
            "epochs": again,
            "answers": str(longest),
            "prompt_len": keys.whole(PROMPT),
            "reward_model": scores[0] if scores else None,
            "reference": None if weight or keys.word("rl") == "ebft" else "none",
            "old_logprobs": None if old_logprobs(rounds, rounds * again, bool(corrected)) else "none",
        }
        mode = keys.choice(MODE, {"colocate": "colocate", "server": "server"}) or "server"
        if keys.flag(SWITCH) and mode == "server":
            return facts | _served(keys)
        for late in EARLY:
            if keys.flag(late):
                keys.note(late, "generates while it trains, on the same GPUs; one after the other is counted")
        if not keys.flag(SWITCH):
            return facts | {"rollout": f"hf:batch={at_once}"}
        used = keys.real(SHARE)
        return facts | {
            "rollout": colocated(
                keys.whole(WIDTH) or 1, 0.9 if used is None else used, at_once, bool(keys.flag(ASLEEP))
            )
        }

    def _served(keys: Keys) -> Facts:
        """Of `axolotl vllm-serve` with the same file, beside the trainer's GPUs."""
        own = (keys.whole(WIDTH) or 1) * (keys.whole(COPIES) or 1)
        everything = keys.given.get("gpus") or own + 1
        if everything <= own:
            raise keys.wrong(
                MODE if keys.has(MODE) else SWITCH, f"'server' has {own} of the GPUs, so --gpus {own + 1} or more"
            )
        used, longest = keys.real(SHARE), keys.whole(f"{V}max_model_len")
        words = {"tp": keys.whole(WIDTH) or 1, "utilization": 0.9 if used is None else used, "context": longest}
        keys.remarks[f"vLLM's server is taken to have {own} of the {everything} GPUs"] = None
        late = any(keys.flag(key) for key in EARLY)
        return {
            "gpus": everything,
            "placement": f"split:{everything - own}+{own}",
            "staleness": 1 if late else None,
            "rollout": Engine.parse("vllm:" + ",".join(f"{key}={one}" for key, one in words.items() if one)).text(),
        }

    def _of_blocks(keys: Keys) -> Facts:
        """Of blocks that start all over a text: each token of all of them is one more pass over the whole."""
        whole, many = keys.whole("sequence_len") or 512, completions(keys)
        at_once = (keys.whole("micro_batch_size") or 1) * many * (keys.whole("gradient_accumulation_steps") or 1)
        keys.note(f"{E}mode", "generates blocks side by side in passes over the whole text, where answers one after the other"
                   " are counted", parts=RUNS, share=0.3)  # fmt: skip
        return {
            "task": "grpo", "samples": many, "generated": at_once, "epochs": 1, "prompt_len": whole,
            "answers": str(max(1, _blocks(keys, whole))), "rollout": f"hf:batch={at_once}", "old_logprobs": "none",
        }  # fmt: skip

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        task = facts.get("task")
        if keys.word("rl") == "ebft":
            return {}
        if task == "rm":
            return {SCORES: True}
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
        COPIES, f"{V}max_model_len", f"{T}generation_batch_size", *EARLY,
        f"{E}mode", STRIDE, CONTEXT, EACH, MANY, SCORES, STEPS, LABELS,
    )  # fmt: skip
    return Idea(
        keys=keys,
        facts=names_in(
            "task loss_terms reference samples prompts generated epochs answers prompt_len reward_model rollout old_logprobs"
            " placement staleness gpus"
        ),
        read=read,
        write=write,
    )
