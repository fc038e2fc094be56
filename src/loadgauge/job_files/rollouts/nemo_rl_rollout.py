"""Tells which part of a NeMo-RL recipe is read, the engine that generates, and how long answers are."""

from pathlib import Path
from typing import Any

from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.dialects import of_text
from loadgauge.job_files.ideas import (
    MISSING,
    Facts,
    Idea,
    Keys,
    Named,
    engine,
    fixed,
    lengths,
    names_in,
    product,
    reads,
    row,
    served,
)

P, D, M, G = "policy.", "policy.dtensor_cfg.", "policy.megatron_cfg.", "policy.generation."
V = f"{G}vllm_cfg."
ALGORITHMS = ("ppo", "grpo", "dpo", "sft", "rm", "distillation")
"""Sections, of which a recipe has one."""
CACHES = {"auto": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8", "bfloat16": "bf16"}
PROMPT_SHARE = 8
"""One of so many tokens of the longest sequence is the prompt's, where the file says only how long both are together."""
BACKENDS = ("vllm", "sglang", "megatron", "trtllm", "dynamo")
"""Engines that generate; those beside vLLM and SGLang are counted as vLLM, and the answer says so."""


def algorithm_of(keys: Keys) -> str:
    """The section of `ALGORITHMS` that a recipe has, `sft` where it has none; a list of `teachers` is off-policy."""
    if keys.document.get("teachers") is not MISSING:
        return "off-policy"
    present = {name.split(".")[0] for name in keys.document.names()}
    matches = [name for name in ALGORITHMS if name in present]
    return matches[0] if matches else "sft"


def generates(keys: Keys) -> bool:
    """Return whether a step has answers."""
    return algorithm_of(keys) in ("grpo", "distillation", "ppo")


def megatron_trains(keys: Keys) -> bool:
    """Return whether Megatron trains; both sections may be there, one of them on."""
    on = keys.flag(f"{M}enabled")
    keys.refuse(f"{M}enabled", f"contradicts {D}enabled", when=on and keys.flag(f"{D}enabled"))
    return bool(on)


SIZES = dict(
    zip(MODEL_PARALLEL, names_in("tensor_model pipeline_model context expert_model expert_tensor"), strict=True)
)
"""What Megatron-Core calls the axes."""


def backend_of(keys: Keys) -> str:
    """The engine that generates."""
    return str(keys.choice(f"{G}backend", {name: name for name in BACKENDS}) or "vllm")


def _of_others(keys: Keys) -> Facts:
    """Ranks of an engine of Megatron's own, which are the trainer's unless it is told otherwise, or of TensorRT-LLM's."""
    backend = backend_of(keys)
    if backend == "trtllm":
        return {"tp": keys.whole(f"{G}trtllm_cfg.tensor_parallel_size") or 1,
                "utilization": keys.real(f"{G}trtllm_cfg.gpu_memory_utilization") or None}  # fmt: skip
    if backend != "megatron":
        return {}
    own = f"{G}mcore_generation_config."
    sizes = {axis: f"{name}_parallel_size" for axis, name in SIZES.items() if axis in ("tp", "pp", "ep")}
    ranks = {axis: keys.whole(f"{own}{name}") or keys.whole(f"{M}{name}") or 1 for axis, name in sizes.items()}
    return ranks if ranks["ep"] % ranks["tp"] == 0 else ranks | {"ep": 1}


def teachers_nodes(keys: Keys) -> int:
    """Nodes of teachers whose scores stand for rewards, each with its own (`policy/teacher_worker_group.py`)."""
    start, own = "on_policy_distillation.", "on_policy_distillation.non_colocated_teachers."
    if not (keys.flag(f"{start}enabled") and keys.flag(f"{own}enabled")):
        return 0
    each = f"{start}teacher_model_by_agent_name."
    agents = {key.removeprefix(each): keys.word(key) for key in keys.document.names() if key.startswith(each)}
    if keys.flag(f"{start}deduplicate_shared_teacher_checkpoints") is not False:
        firsts = {name: agent for agent, name in reversed(agents.items())}
        agents = {agent: name for name, agent in firsts.items()}
    sizes = [keys.whole(f"{own}teacher_overrides.{agent}.num_nodes") for agent in agents]
    return sum(size or keys.whole(f"{own}default_teacher_cfg.num_nodes") or 1 for size in sizes)


def _asleep(keys: Keys) -> bool:
    return keys.flag(f"{G}colocated.enabled") is not False


S = f"{G}sglang_cfg."
OF_SGLANG = product(
    row("tp", f"{S}sglang_server_config.num_gpus_per_engine", default=1),
    row("static_fraction", f"{S}mem_fraction_static", kind="real", default=0.85),
    row("graphs", f"{S}disable_cuda_graph", words={"true": False, "false": True}, default=True),
    row("context", f"{S}context_length"),
    row("max_num_seqs", f"{S}max_running_requests"),
    row("max_batched_tokens", f"{S}chunked_prefill_size"),
    fixed(sleep=lambda keys: 2 if _asleep(keys) else 0),
)
"""Options of SGLang's servers, by its own names."""
AWAY = "policy.offload_optimizer_for_logprob"
IN_FLIGHT = ("grpo.async_grpo.in_flight_weight_updates", "ppo.async_ppo.in_flight_weight_updates")
"""The switch, by algorithm, by which answers go on at a refit, which else waits for all that were asked for
(`trajectory_collector.py`)."""
ROLLOUT_BACKEND, ROLLOUT_PLAIN = f"{G}backend", Engine.parse("vllm")


def _rollout_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    values = at.inner.write(facts, keys) | ({AWAY: True} if facts.get("rollout_offload") == "states" else {})
    return {**values, ROLLOUT_BACKEND: "vllm"} if values and keys.has(ROLLOUT_BACKEND) else values


@reads(
    AWAY,
    facts="rollout rollout_offload",
    write=_rollout_written,
    inner=engine(
        "vllm",
        row("tp", f"{V}tensor_parallel_size", default=1),
        row("pp", f"{V}pipeline_parallel_size", default=1),
        row("ep", f"{V}expert_parallel_size", default=1),
        row("max_num_seqs", f"{G}vllm_kwargs.max_num_seqs", quiet=ROLLOUT_PLAIN.max_num_seqs),
        row("max_batched_tokens", f"{G}vllm_kwargs.max_num_batched_tokens", quiet=ROLLOUT_PLAIN.max_batched_tokens),
        row("utilization", f"{V}gpu_memory_utilization", kind="real", default=0.6),
        row("graphs", f"{V}enforce_eager", words={"true": False, "false": True}, default=True),
        row("context", f"{V}max_model_len"),
        row("prefix", f"{V}enable_prefix_caching", words={"true": True, "false": False}, default=True, off=True),
        row("weights", f"{V}precision", words={"bfloat16": "bf16", "fp8": "fp8", "float16": "bf16"}, default="bf16"),
        row("kv", f"{V}kv_cache_dtype", words=CACHES, default="bf16"),
        row(
            "partial",
            *IN_FLIGHT,
            words={"true": True, "false": False},
            add=False,
            default=lambda keys: (
                False
                if any(keys.flag(name.replace("in_flight_weight_updates", "enabled")) for name in IN_FLIGHT)
                else None
            ),
        ),
        fixed(sleep=lambda keys: int(_asleep(keys))),
        Idea(keys=(), facts=(), read=_of_others),
        test=generates,
    ),
)
def rollout(keys: Keys, at: Named) -> Facts:
    """vLLM, which sleeps at level 1 where it is on the trainer's GPUs; the trainer moves everything to the host meanwhile, a
    reference takes the place of its weights, and the optimizer's states come back for the update alone
    (`policy/workers/dtensor_policy_worker_v2.py`, `offload_before_refit`, `use_reference_model`, `prepare_for_training`)."""
    away = "idle" if _asleep(keys) else "states" if keys.flag(AWAY) else None
    moved = {"rollout_offload": away if generates(keys) else None}
    if not generates(keys) or backend_of(keys) != "sglang":
        return at.inner.read(keys) | moved
    return {"rollout": served("sglang", OF_SGLANG.read(keys))} | moved


def by_name(file: str) -> str | None:
    """Return the model in the name of one of NeMo-RL's recipes, which are called after algorithm, model, GPUs and layout.

    >>> by_name("recipes/vlm_grpo-qwen2.5-vl-3b-instruct-clevr-1n8g-dtensor2tp1.v1.yaml"), by_name("run.yaml")
    ('qwen2.5-vl-3b', None)
    """
    words = Path(file).stem.split("-")[1:]
    words = [] if "to" in words else words  # a teacher and its student
    return next((name for end in range(1, len(words) + 1) if of_text(name := "-".join(words[:end]))), None)


def _lengths_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    if not generates(keys):
        return {at.whole: facts["seq_len"]} if facts.get("seq_len") else {}
    longest = str(facts.get("answers") or "")
    if not longest.isdecimal() or facts.get("prompt_len") is None:
        return {}
    return {at.whole: facts["prompt_len"] + int(longest), at.answer: int(longest)}


@reads(
    facts="seq_len prompt_len answers",
    write=_lengths_written,
    whole=f"{P}max_total_sequence_length",
    answer=f"{G}max_new_tokens",
    prompt="data.max_input_seq_length",
)
def answers_lengths(keys: Keys, at: Named) -> Facts:
    """`max_total_sequence_length` is that of prompt and answer; `max_new_tokens` and `max_input_seq_length` are often the same."""
    length = keys.whole(at.whole) or 512
    if not generates(keys):
        return {"seq_len": length}
    first, rest = keys.whole(at.prompt), keys.whole(at.answer)
    keys.refuse(
        at.answer,
        f"{rest} tokens of an answer are more than the {length} of prompt and answer",
        when=rest is not None and rest > length,
    )
    unsaid = rest in (None, length) and (first is None or first >= length)
    if rest is None or rest == length:
        rest = length - (max(1, length // PROMPT_SHARE) if unsaid else first or 0)
    return lengths(keys, length - rest, rest, taken=unsaid)
