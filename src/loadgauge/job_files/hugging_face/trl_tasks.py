"""TRL's other trainers than SFT's: which one a file is of, and what it says around the update.

Defaults are those of 1.16 (`trainer/*_config.py`, `experimental/*/*_config.py`).
"""

import re
from pathlib import PurePath
from typing import Any

from loadgauge.core.base.errors import ConfigError, refuse
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.families.catalogue import config, find
from loadgauge.core.families.named.listed import changed
from loadgauge.core.families.reader import class_defaults
from loadgauge.job_files.ideas import STAYS, Facts, Keys, answered, reads, served
from loadgauge.job_files.ideas.coverage import key_lists, words

PAIRS = words(
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft sigmoid_norm"
)
LOSSES: dict[str, frozenset[str]] = {
    "dpo": PAIRS, "kto": words("kto apo_zero_unpaired"), "cpo": words("sigmoid hinge ipo simpo"),
    "grpo": words("grpo dapo dr_grpo bnpo cispo sapo luspo vespo"),
}  # fmt: skip
"""`loss_type` by trainer: sums of the same log-probabilities."""
ROLLOUT = words(
    """
    num_generations num_generations_eval max_completion_length max_prompt_length ds3_gather_for_generation
    generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
    repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
    vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
    vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon
    epsilon_high reward_weights mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    log_completions log_multimodal num_completions_to_print log_unique_prompts use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged reward_funcs reward_model_name_or_path
    """
)
REFERRED = words(
    "beta precompute_ref_log_probs precompute_ref_batch_size sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
    " max_prompt_length max_completion_length generate_during_eval"
)
ALONE = words("beta max_prompt_length max_completion_length generate_during_eval")
OWN: dict[str, frozenset[str]] = {
    "dpo": REFERRED | words(
        "loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef label_smoothing use_weighting discopop_tau"
    ),
    "kto": REFERRED | words("desirable_weight undesirable_weight"),
    "orpo": ALONE,
    "cpo": ALONE | words("label_smoothing cpo_alpha simpo_gamma"),
    "reward": words("center_rewards_coefficient"),
    "gkd": words("beta temperature lmbda max_new_tokens teacher_model_name_or_path seq_kd"),
    "grpo": ROLLOUT | words(
        """
        cast_lm_head_to_fp32 delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
        vespo_lambda_neg importance_sampling_level multi_objective_aggregation scale_rewards top_entropy_quantile entropy_coef
        use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
        vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
        vllm_importance_sampling_clip_min vllm_importance_sampling_cap off_policy_mask_threshold use_bias_correction_kl
        log_completions_hub_repo
        """
    ),
    "rloo": ROLLOUT | words("normalize_advantages reward_clip_range"),
}  # fmt: skip
"""Keys of each trainer that SFT's has none of."""
EVERY = tuple(sorted(frozenset[str]().union(*OWN.values())))
UNIQUE: dict[str, tuple[str, Any]] = {
    "dpo": ("f_divergence_type", "reverse_kl"), "kto": ("desirable_weight", 1.0), "cpo": ("cpo_alpha", 1.0),
    "reward": ("center_rewards_coefficient", 0.0), "gkd": ("lmbda", 0.0), "grpo": ("scale_rewards", "group"),
    "rloo": ("normalize_advantages", False),
}  # fmt: skip
"""A key that one trainer alone has, and a value that changes nothing here, by which a file says whose it is."""
GENERATES = ("grpo", "rloo")
DISTANCES: dict[float | None, str] = {0.0: "forward-kl", 1.0: "reverse-kl"}
"""`beta` of GKD at which it is one divergence."""
UNCOMPARED = "apo_zero_unpaired"
"""KTO's `loss_type` that estimates no KL."""
TASKS = {"ipo": "dpo", "simpo": "cpo", "rm": "reward", "opd": "gkd", **{name: name for name in OWN if name != "reward"}}
"""Trainers by task."""
STARTED = (
    re.compile(rf"\btrl ({'|'.join(OWN)})\b"),
    re.compile(rf"(?i)(?:^|[\s/])(?:\w*_)?({'|'.join(OWN)})(?:v\d)?(?:_\w+)?\.py\b"),
)
"""Command lines that start one of them."""
OTHERS = {
    r"\btrl (ppo|online_dpo|nash_md|xpo|bco|prm|distillation|vllm-serve)\b": "starts a trainer that is not read",
    r"(?i)(?:^|[\s/])\w*(?:ppo|online_dpo|nash_md|xpo|bco|prm|async|distillation|gold|sdpo)\w*\.py\b":
        "starts a trainer that is not read",
}  # fmt: skip
"""Command lines of those that are not."""


def trainer_of(keys: Keys) -> str | None:
    """The trainer of a file: by the command line, `--task`, or the keys; None where it is SFT's.

    Raises `ConfigError` where a key is of another trainer, or of several and nothing says which.
    """
    started = next((match[1].lower() for pattern in STARTED if (match := pattern.search(keys.program))), None)
    named = started or TASKS.get(str(keys.given.get("task")))
    present = [key for key in keys.document.names() if key.split(".")[0] in EVERY]
    ours = [word.strip("[]'\"") for word in (keys.words("loss_type") or [])]
    chosen = [trainer for trainer in OWN if set(ours) & LOSSES.get(trainer, frozenset())]
    among = [trainer for trainer in chosen or OWN if {key.split(".")[0] for key in present} <= OWN[trainer]]
    of_path = [trainer for trainer in among if trainer in words_of_path(keys.file)]
    if present and started is None and len(among) > 1 and len(of_path) == 1 and named in (None, of_path[0]):
        keys.remark(f"its trainer is {of_path[0]}'s, as the name of the file or of its folder says")
        among = of_path
    if named is not None:
        for key in present:
            keys.refuse(key, f"is no argument of TRL's {named}", when=key.split(".")[0] not in OWN[named])
        return named
    if not present and not chosen:
        return None
    if len(among) != 1:
        first = present[0] if present else "loss_type"
        tasks = ", ".join("rm" if trainer == "reward" else trainer for trainer in among or OWN)
        raise keys.wrong(first, f"is an argument of another trainer than SFT; say which with --task ({tasks})")
    return among[0]


def longest(keys: Keys) -> int | None:
    """Return TRL's own `max_length`; None where a file has none, as `max_length: null` says, and nothing is cut."""
    if keys.document.get("max_length") is not None:
        return 1024
    keys.note(
        "max_length",
        "is None, so nothing is cut; add --seq-len",
        "either",
        "activations loss",
        when="seq_len" not in keys.given,
    )
    return None


def cut_by_program(keys: Keys) -> None:
    """Notes a length that a program works out for its texts, which transformers' own trainer leaves to it; there is no default."""
    if (source := getattr(keys.document, "cut", "")) and "seq_len" not in keys.given:
        keys.note("max_length", f"{source} is not known here; add --seq-len", "either", "activations loss")


def words_of_path(file: str, names: int = 3) -> frozenset[str]:
    """The words in the names of a file and of the folders around it, as many as asked for.

    >>> sorted(words_of_path("recipes/zephyr/dpo/config_full.yaml"))
    ['config', 'dpo', 'full', 'yaml', 'zephyr']
    """
    parts = PurePath(file).parts[-names:]
    return frozenset(word for part in parts for word in re.split(r"[^a-z0-9]+", part.lower()) if word)


LAST: dict[str, tuple[int, ...]] = {
    "torch_dtype": (0, 26), "max_seq_length": (0, 19), "use_liger": (0, 17), "chars_per_token": (0, 17), "use_liger_loss": (0, 27),
    "num_of_sequences": (0, 17), "rpo_alpha": (0, 28), "reference_free": (0, 28), "force_use_ref_model": (0, 28),
    "use_logits_to_keep": (0, 28), "wandb_log_unique_prompts": (0, 26), "vllm_guided_decoding_regex": (0, 27),
    "vllm_device": (0, 17), "vllm_dtype": (0, 17), "vllm_max_model_len": (0, 17), "model_adapter_name": (0, 28),
}  # fmt: skip
"""Keys that TRL has no more, and the last release that had them."""
LAST_OF: dict[str, dict[str, tuple[int, ...]]] = {
    "max_prompt_length": {"dpo": (0, 28), "orpo": (0, 27), "cpo": (0, 27), "kto": (0, 26), "grpo": (0, 27), "rloo": (0, 28)},
    "generate_during_eval": {"dpo": (0, 28), "kto": (1, 0)}, "max_completion_length": {"dpo": (0, 28), "kto": (0, 26)},
}  # fmt: skip
"""The same of keys that trainers lost one after another."""


def last(keys: Keys) -> tuple[tuple[int, ...], str] | None:
    """The newest release that has all keys of a file, and the key that decides; None where the newest of all has."""
    names = keys.document.names()
    # A trainer that is read as another has keys of its own, which the newest release may have (trl.experimental).
    alike = any(name.startswith("trainer.") for name in names)
    present = [key for key in names if key in LAST or (key in LAST_OF and not alike)]
    trainer = trainer_of(keys) if present else None
    ends = {key: LAST.get(key) or LAST_OF[key].get(trainer or "") for key in present}
    return min(((end, key) for key, end in ends.items() if end is not None), default=None)


def colocated(ranks: int, share: float, at_once: int, asleep: bool, context: int | None = None) -> str:
    """The vLLM that TRL's trainers have on their GPUs (`generation/vllm_generation.py`). at_once: sequences of a card

    >>> colocated(2, 0.3, 8, asleep=False)
    'vllm:tp=2,utilization=0.3,max_num_seqs=16,max_batched_tokens=4096'
    """
    sizes = {"max_num_seqs": at_once * ranks, "max_batched_tokens": 4096, "context": context or None}
    return served("vllm", {"tp": ranks, "utilization": share, "sleep": 2 if asleep else 0, **sizes})


def gpus_of(keys: Keys) -> int:
    """The GPUs of a job, where a key counts what all of them do. Raises `ConfigError` where neither the file nor a flag says it."""
    number = keys.given.get("gpus") or (keys.whole("num_processes") if keys.document.syntax != "yaml" else None)
    if number is None:
        raise ConfigError("says what all GPUs do together, and not how many there are; give --gpus", file=keys.file)
    return int(number)


def old_logprobs(accumulated: int, every: int, corrected: bool) -> bool:
    """Whether GRPO makes old log-probs: it leaves them out where whole generations, of `every` micro-batches, are trained on before
    a step of the optimizer, unless vLLM's are corrected (`_generate_and_score_completions` of trainer/grpo_trainer.py)."""
    return accumulated % every != 0 or corrected


def on_policy(keys: Keys, share: str) -> float:
    """The share of GKD's steps whose answers the student generates. Raises `ConfigError` for one that is none."""
    part = keys.real(share, 0.5) or 0.0
    keys.refuse(share, "is a share, from 0 to 1", when=not 0 <= part <= 1)
    return part


def distance_written(facts: Facts, keys: Keys, weight: str, share: str) -> dict[str, Any]:
    """The divergence of GKD, and the share of its steps that generate, by their keys."""
    own, ends = keys.real(weight), {word: number for number, word in DISTANCES.items()}
    return {
        weight: ends.get(facts.get("loss_terms") or "", None if own in DISTANCES else own),
        share: (facts.get("on_policy") or 1.0) if facts.get("task") == "opd" else 0.0,
    }


TASK_MICRO, TASK_ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
TASK_PRECOMPUTE, TASK_BETA, TASK_SHARE = "precompute_ref_log_probs", "beta", "vllm_gpu_memory_utilization"
TASK_LIKELIHOOD, TASK_SHARE_S, TASK_LONGEST_S, TASK_TEACHER = (
    "cpo_alpha",
    "lmbda",
    "max_new_tokens",
    "teacher_model_name_or_path",
)
TASK_RANKS, TASK_LONGEST, TASK_STEPS = "vllm_tensor_parallel_size", "vllm_max_model_length", "steps_per_generation"
TASK_BATCH = "generation_batch_size"
TASK_UNREAD = key_lists("trl").stops


def _of_answers(keys: Keys, trainer: str) -> Facts:
    each = keys.whole(TASK_MICRO) or 8
    at_once = each * (keys.whole(TASK_STEPS) or keys.whole(TASK_ACCUMULATION) or 1)
    if (whole := keys.whole(TASK_BATCH)) is not None:
        ranks_all = gpus_of(keys)
        keys.refuse(TASK_BATCH, f"{whole} cannot be split over {ranks_all} GPUs", when=whole % ranks_all)
        at_once = whole // ranks_all
    refers = keys.real(TASK_BETA, 0.05 if trainer == "rloo" else 0.0 if keys.since(0, 19) else 0.04)
    facts: Facts = {
        "task": trainer,
        "samples": keys.whole("num_generations") or (2 if trainer == "rloo" else 8),
        # Fewer micro-batches at once than a step has are several generations of it.
        "generated": max(at_once, each * (keys.whole(TASK_ACCUMULATION) or 1)),
        "epochs": keys.whole("num_iterations") or 1,
        "answers": str(keys.whole("max_completion_length") or (512 if keys.since(1, 10) else 256)),
        "prompt_len": keys.whole("max_prompt_length") or (None if keys.since(0, 26) else 512),
        "reward_model": keys.word("reward_model_name_or_path"),
        "reference": None if refers else "none",
        "old_logprobs": None if _passes_twice(keys, trainer) else "none",
    }
    if not keys.flag("use_vllm"):
        return facts | {"rollout": f"hf:batch={at_once}"}
    mode = keys.choice("vllm_mode", {"colocate": "colocate", "server": "server"})
    if (mode or ("colocate" if keys.since(1, 0) else "server")) == "server":
        several = gpus_of(keys)
        own = next((ranks for ranks in range(several - 1, 0, -1) if at_once * ranks % facts["samples"] == 0), 0)
        keys.refuse("vllm_mode", "'server' has GPUs of its own; give --gpus with those too", when=not own)
        keys.remark(f"vLLM's server is taken to have {several - own} of the {several} GPUs")
        return facts | {"placement": f"split:{own}+{several - own}", "rollout": "vllm:tp=1"}
    keys.remark(
        "vLLM's weights are taken to be whole, and not of bitsandbytes",
        when=keys.flag("load_in_4bit") or keys.flag("load_in_8bit"),
    )
    asleep = bool(keys.flag("vllm_enable_sleep_mode"))
    text = colocated(
        keys.whole(TASK_RANKS) or 1, keys.real(TASK_SHARE, 0.3) or 0.0, at_once, asleep, keys.whole(TASK_LONGEST)
    )
    return facts | {"rollout": text}


def _passes_twice(keys: Keys, trainer: str) -> bool:
    """Return whether old log-probs are made."""
    count = keys.whole(TASK_ACCUMULATION) or 1
    every = (keys.whole(TASK_STEPS) or count) * (keys.whole("num_iterations") or 1)
    corrected = keys.flag("use_vllm") and keys.flag("vllm_importance_sampling_correction") is not False
    return trainer != "grpo" or old_logprobs(count, every, bool(corrected))


def _answers_written(facts: Facts, keys: Keys, trainer: str) -> dict[str, Any]:
    refers, weight = facts.get("reference") != "none", keys.real(TASK_BETA)
    at_once = (facts.get("prompts") or 0) * (facts.get("samples") or 1)
    engine = Engine.parse(facts.get("rollout") or "hf")
    count, left = divmod(at_once, (facts.get("micro_batch") or 1) * (facts.get("dp") or 1))
    values: dict[str, Any] = {
        "num_generations": facts.get("samples"),
        "num_iterations": facts.get("epochs"),
        "reward_model_name_or_path": facts.get("reward_model"),
        TASK_BETA: (weight or 0.04 if trainer == "grpo" else weight or 0.05) if refers else 0.0,
        **answered(facts, "max_completion_length"),
        TASK_STEPS: count if at_once and not left else STAYS,
    }
    if engine.kind != "vllm":
        return values | {"use_vllm": None if engine.kind == "hf" else STAYS}
    return values | {
        "use_vllm": True,
        TASK_SHARE: engine.utilization,
        TASK_RANKS: engine.tp,
        TASK_LONGEST: engine.context,
        "vllm_enable_sleep_mode": True if engine.sleep else None,
    }


def _distilled(keys: Keys) -> Facts:
    """Of data, or (in a share of the steps) of answers that the student generates, each micro-batch its own."""
    facts: Facts = {"teacher": keys.word(TASK_TEACHER), "loss_terms": DISTANCES.get(keys.real(TASK_BETA))}
    part = on_policy(keys, TASK_SHARE_S)
    if not part:
        return facts | {"task": "gkd"}
    each, whole = keys.whole(TASK_MICRO) or 8, keys.whole("max_length") or 1024
    new = keys.whole(TASK_LONGEST_S) or 128
    keys.refuse(TASK_LONGEST_S, f"leaves nothing of max_length ({whole}) for a prompt", when=new >= whole)
    return facts | {
        "task": "opd",
        "loss_terms": facts["loss_terms"] or "jsd",
        "on_policy": None if part == 1 else part,
        "samples": 1,
        "answers": str(new),
        "prompt_len": whole - new,
        "rollout": f"hf:batch={each}",
        "generated": each * (keys.whole(TASK_ACCUMULATION) or 1),
    }


def _task_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    wanted = facts.get("task")
    objective = facts.get("loss_terms")
    trainer = TASKS.get(wanted or "")
    if trainer is None or trainer not in UNIQUE:
        return {}
    mark, usual = UNIQUE[trainer]
    own: dict[str, Any] = _answers_written(facts, keys, trainer) if trainer in GENERATES else {}
    if trainer in ("dpo", "kto"):
        own = {TASK_PRECOMPUTE: True if facts.get("reference") == "precomputed" else None}
    elif trainer == "cpo":
        own = {TASK_LIKELIHOOD: 0.0 if objective == "no-nll" else keys.real(TASK_LIKELIHOOD) or usual}
    elif trainer == "gkd":
        length = str(facts.get("answers") or "")
        counts = wanted == "opd" and length.isdecimal()
        own = {
            TASK_TEACHER: facts.get("teacher"),
            **distance_written(facts, keys, TASK_BETA, TASK_SHARE_S),
            TASK_LONGEST_S: int(length) if counts else STAYS,
            "max_length": int(length) + (facts.get("prompt_len") or 0) if counts else STAYS,
        }
    compared = (UNCOMPARED if objective == "no-kl" else None) if trainer == "kto" else STAYS
    return {
        mark: STAYS if keys.has(mark) else usual,
        "loss_type": wanted if wanted in ("ipo", "simpo") else compared,
        **own,
    }


@reads(
    *tuple(key for key in EVERY if key not in TASK_UNREAD),
    facts="task reference loss_terms on_policy teacher samples prompts generated epochs answers prompt_len reward_model rollout"
    " old_logprobs placement",
    write=_task_written,
)
def task(keys: Keys) -> Facts:
    """The trainer's task, its reference, its other models and its answers."""
    trainer = trainer_of(keys)
    if trainer is None:
        return {}
    refuse(not keys.since(0, 15), f"TRL's {trainer} is read from release 0.15 on; name a newer release", key="version")
    if trainer in GENERATES:
        return _of_answers(keys, trainer)
    if trainer == "reward":
        return {"task": "rm"}
    losses = [word.strip("[]'\"") for word in keys.words("loss_type") or []]
    for word in losses:
        keys.refuse(
            "loss_type", f"{word!r} is no loss of TRL's {trainer}", when=word not in LOSSES.get(trainer, frozenset())
        )
    if trainer == "gkd":
        return _distilled(keys)
    if trainer in ("orpo", "cpo"):
        alone = trainer == "cpo" and keys.real(TASK_LIKELIHOOD) == 0
        return {"task": "simpo" if losses == ["simpo"] else trainer, "loss_terms": "no-nll" if alone else None}
    return {
        "task": "ipo" if losses == ["ipo"] else trainer,
        "loss_terms": "no-kl" if losses == [UNCOMPARED] else None,
        "reference": "precomputed" if keys.flag(TASK_PRECOMPUTE) else None,
    }


@reads("own_sizes", "model_type", "config_overrides", "config_name", facts="config weights")
def own_sizes(keys: Keys) -> Facts:
    """Read the sizes of a model that a program makes itself, or that `run_clm.py` makes of a type and changes of its sizes."""
    if keys.word("own_sizes"):
        return {"config": keys.document.sizes}  # type: ignore[attr-defined]
    kind, base = keys.word("model_type"), keys.word("config_name")
    if kind is None or keys.has("model_name_or_path"):
        return {}
    start = config(find(base).spec.name) if base is not None else {"model_type": kind, **class_defaults(kind)}
    pairs = re.findall(r"(\w+)=(\d+)(?=,|$)", keys.word("config_overrides") or "")
    return {"config": changed(start, {name: int(number) for name, number in pairs}), "weights": "float32"}
