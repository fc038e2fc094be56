"""axolotl's `rl`: preferences, and answers that are generated (`core/builders/rl.py`, `core/trainers/grpo` of 0.19; TRL 1.9)."""

from typing import Any

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.hugging_face.trl_tasks import colocated, old_logprobs
from loadgauge.job_files.ideas import STAYS, Facts, Keys, Named, answered, reads, served

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
EAGER, PREFIXES = f"{V}enforce_eager", f"{V}enable_prefix_caching"
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


@reads(
    "sequence_len",
    facts="seq_len",
    write=lambda facts, keys: {} if _strided(keys) else {"sequence_len": facts.get("seq_len")},
)
def length(keys: Keys) -> Facts:
    """The longest sequence that is trained on, with the blocks that are generated behind a text."""
    whole = keys.whole("sequence_len") or 512
    return {"seq_len": whole + (_blocks(keys, whole) if _strided(keys) else 0)}


def _of_answers(keys: Keys) -> Facts:
    longest = keys.whole(LONGEST) or 512  # TRL's own
    scores = [word for word in keys.words(REWARDS) or [] if "/" in word]
    keys.note(
        REWARDS, "names several reward models, of which the first is counted", "costs", "weights", when=len(scores) > 1
    )
    rounds, weight = keys.whole("gradient_accumulation_steps") or 1, keys.real(BETA, keys.real("rl_beta"))
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
        keys.note(
            late, "generates while it trains, on the same GPUs; one after the other is counted", when=keys.flag(late)
        )
    if not keys.flag(SWITCH):
        return facts | {"rollout": f"hf:batch={at_once}"}
    return facts | {
        "rollout": colocated(keys.whole(WIDTH) or 1, keys.real(SHARE, 0.9) or 0.0, at_once, bool(keys.flag(ASLEEP)))
    }


def _served(keys: Keys) -> Facts:
    """Of `axolotl vllm-serve` with the same file, beside the trainer's GPUs."""
    own = (keys.whole(WIDTH) or 1) * (keys.whole(COPIES) or 1)
    everything = keys.given.get("gpus") or own + 1
    keys.refuse(
        MODE if keys.has(MODE) else SWITCH,
        f"'server' has {own} of the GPUs, so --gpus {own + 1} or more",
        when=everything <= own,
    )
    options = {
        "tp": keys.whole(WIDTH) or 1,
        "utilization": keys.real(SHARE, 0.9),
        "context": keys.whole(f"{V}max_model_len"),
        "graphs": not keys.flag(EAGER),
        "prefix": keys.flag(PREFIXES) is not False,
    }
    keys.remark(f"vLLM's server is taken to have {own} of the {everything} GPUs")
    return {
        "gpus": everything,
        "placement": f"split:{everything - own}+{own}",
        "staleness": 1 if any(map(keys.flag, EARLY)) else None,
        "rollout": served("vllm", options),
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


def _preference_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    task, scores = facts.get("task"), facts.get("reward_model")
    if keys.word("rl") == "ebft" or task not in ("rm", "grpo", *PREFERENCES):
        return {}
    if task == "rm":
        return {SCORES: True}
    if task in PREFERENCES:
        return {
            "rl": task,
            at.likelihood: 0.0 if facts.get("loss_terms") == "no-nll" else keys.real(at.likelihood) or None,
            at.chosen: True if facts.get("reference") == "precomputed" else None,
        }
    engine = Engine.parse(facts.get("rollout") or "hf")
    served = {
        SWITCH: True,
        MODE: "colocate",
        SHARE: engine.utilization,
        WIDTH: engine.tp,
        ASLEEP: True if engine.sleep else None,
    }
    return {
        "rl": keys.word("rl") if keys.word("rl") in GROUPS else "grpo",
        COUNT: facts.get("samples"),
        TIMES: facts.get("epochs"),
        PROMPT: facts.get("prompt_len"),
        BETA: 0.0 if facts.get("reference") == "none" else keys.real(BETA) or 0.04,
        REWARDS: STAYS if scores is None else [scores],
        **answered(facts, LONGEST),
        **(served if engine.kind == "vllm" else {SWITCH: None} if engine.inside else {}),
    }


@reads(
    "rl",
    "rl_beta",
    facts="task loss_terms reference samples prompts generated epochs answers prompt_len reward_model rollout old_logprobs"
    " placement staleness gpus",
    write=_preference_written,
    likelihood="cpo_alpha",
    chosen="precompute_ref_log_probs",
    also=(
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
        COPIES,
        EAGER,
        PREFIXES,
        f"{V}max_model_len",
        f"{T}generation_batch_size",
        *EARLY,
        f"{E}mode",
        STRIDE,
        CONTEXT,
        EACH,
        MANY,
        SCORES,
        STEPS,
        LABELS,
    ),
)
def preference(keys: Keys, at: Named) -> Facts:
    """Return what is trained for. Raises `ConfigError` for answers of a server, whose GPUs the file does not say."""
    word = keys.word("rl")
    keys.note(
        "rl",
        "rewards by what a frozen copy makes of the answers; a reference's pass is counted",
        parts=RUNS,
        share=0.3,
        when=word == "ebft",
    )
    if _strided(keys):
        return _of_blocks(keys)
    if word in (*GROUPS, "ebft"):
        return _of_answers(keys)
    keys.refuse(
        "rl",
        f"{word!r} is not read; {', '.join((*PREFERENCES, *GROUPS, 'ebft'))} are",
        when=word not in (None, *PREFERENCES),
    )
    scored = next((key for key in (SCORES, STEPS) if word is None and keys.flag(key)), None)
    keys.note(
        LABELS,
        "gives the head so many outputs, where no reward model is trained",
        parts="loss",
        when=keys.has(LABELS) and not scored,
    )
    keys.note(
        STEPS, "scores the steps of one answer, where pairs are counted", "saves", RUNS, 0.5, when=scored == STEPS
    )
    return {
        "task": "rm" if scored else word,
        "loss_terms": "no-nll" if word == "simpo" and keys.real(at.likelihood) == 0 else None,
        "reference": "precomputed" if word in ("dpo", "ipo", "kto") and keys.flag(at.chosen) else None,
    }
