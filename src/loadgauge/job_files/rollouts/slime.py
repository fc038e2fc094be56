"""slime: a command line of Megatron's arguments, of its own for the rollout, and of SGLang's with `sglang_` before them.

Defaults are those of 0.3 (`slime/utils/arguments.py`). Weights of a reference, and of the trainer while answers are generated, are
in host memory.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.ideas import (
    Dialect,
    Facts,
    Idea,
    Keys,
    Unknown,
    engine,
    fitted,
    fixed,
    lengths,
    names_in,
    row,
    split_of,
)
from loadgauge.job_files.pre_training.megatron import (
    ATTENTION,
    FP8,
    LAYOUT,
    machines,
    offload,
    optimizer,
    overlap,
    recompute,
)

ESTIMATORS = {
    "grpo": "grpo", "gspo": "gspo", "ppo": "ppo",
    **dict.fromkeys(("reinforce_plus_plus", "reinforce_plus_plus_baseline", "cispo", "dapo"), "grpo"),
}  # fmt: skip
FORMATS = {"-FP8": "fp8", "-INT4": "gptq", "-bf16": "bf16", "_bf16": "bf16", "-BF16": "bf16"}
"""Endings of a checkpoint's name, which SGLang loads, and the format of its matrices."""
SIZED = {"-355B-A32B": "", "-744B-A40B": "", "-106B-A12B": "-Air", "-30B-A3B": "-Flash"}
"""Sizes that slime's scripts put after the names of GLM's checkpoints, and what the models are called."""
PROMPT = 1024
"""Tokens of a prompt, where nothing says how many."""


def _supervised(keys: Keys) -> bool:
    return keys.word("loss_type") == "sft_loss"


def _model() -> Idea:
    """The model by the last part of its checkpoint's path; its sizes are in a script of slime's that names it too."""
    key = "hf_checkpoint"

    def read(keys: Keys) -> Facts:
        value = keys.raw(key)
        name = str(value[0] if isinstance(value, list) and value else value or "").rstrip("/")
        last = name.rpartition("/")[2]
        if name and "$" in last:
            raise Unknown(f"{last[:40]!r} comes from outside the file", key=keys.document.shown(key), file=keys.file)
        if not name.startswith(("/", ".", "~", "$")):
            return {"model": name or None}  # on the hub
        for ending in (*FORMATS, "-NVFP4"):
            last = last.removesuffix(ending)
        size = next((size for size in SIZED if last.startswith("GLM-") and last.endswith(size)), "")
        return {"model": f"{last.removesuffix(size)}{SIZED.get(size, '')}" or None}

    return Idea(keys=(key,), facts=("model",), read=read, write=lambda facts, keys: {key: facts.get("model")})


def _gpus() -> Idea:
    each, nodes, together = "actor_num_gpus_per_node", "actor_num_nodes", "colocate"

    def read(keys: Keys) -> Facts:
        rollout = 0 if keys.flag(together) or _supervised(keys) else _of_rollout(keys)
        per_node, count = keys.whole(each) or 8, keys.whole(nodes) or 1
        if not rollout:
            return {"gpus_per_node": per_node, "nodes": count}
        total = per_node * count + rollout
        return {"gpus": total, "gpus_per_node": next(size for size in (8, 4, 2, 1) if total % size == 0)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if "gpus" not in facts:
            return {}
        split = split_of(facts.get("placement"))
        trainer = facts["gpus"] if split is None else split[0]
        whole = "nodes" in facts and split is None
        sizes = machines(facts if whole else {"gpus": trainer}, facts.get("gpus_per_node"))
        return {each: sizes[0], nodes: sizes[1]}

    return Idea(keys=(each, nodes), facts=names_in("gpus gpus_per_node nodes"), read=read, write=write)


def _of_rollout(keys: Keys) -> int:
    """GPUs that generate on their own."""
    count = keys.whole("rollout_num_gpus", minimum=0)
    if not count:
        raise keys.wrong("rollout_num_gpus", "says how many GPUs generate, without --colocate")
    return count


def _placement() -> Idea:
    together, count, all_off = "colocate", "rollout_num_gpus", "offload"
    train, rollout, per_node = "offload_train", "offload_rollout", "num_gpus_per_node"

    def read(keys: Keys) -> Facts:
        if _supervised(keys):
            return {}
        late = "train_async.py" in " ".join(getattr(keys.document, "program", ()))
        if keys.flag(together):
            if late:
                raise keys.wrong(together, "train_async.py generates beside the update, on GPUs of its own")
            moved = keys.flag(train) is not False
            return {"placement": "colocated", "rollout_offload": "all" if moved else "none"}
        own = (keys.whole("actor_num_gpus_per_node") or 8) * (keys.whole("actor_num_nodes") or 1)
        return {"placement": f"split:{own}+{_of_rollout(keys)}", "staleness": 1 if late else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if "task" not in facts:
            return {}
        split, program = split_of(facts.get("placement")), " ".join(getattr(keys.document, "program", ()))
        if bool(facts.get("staleness")) != ("train_async.py" in program):
            return {}
        if facts.get("rollout_offload") in ("weights", "optimizer"):
            return {together: split is None, count: None if split is None else split[1]}
        stays = split is None and facts.get("rollout_offload") in (None, "none")
        off = {f"no_{train}": True} if stays else {train: None, f"no_{train}": None}
        return {together: split is None, count: None if split is None else split[1]} | off

    return Idea(
        keys=(together, count, all_off, train, rollout, per_node),
        facts=names_in("placement staleness rollout_offload task"),
        read=read,
        write=write,
    )


def _task() -> Idea:
    """The task by its estimator of advantages; a reference is loaded where its weight or its switch is there, on the host."""
    kind, switch, weight, loss = "advantage_estimator", "use_kl_loss", "kl_coef", "loss_type"
    engine_s = "use_rollout_logprobs"

    def read(keys: Keys) -> Facts:
        if _supervised(keys):
            return {"task": None}
        keys.choice(loss, {"policy_loss": 1, "sft_loss": 1})
        refers = bool(keys.flag(switch) or keys.real(weight))
        return {
            "task": keys.choice(kind, ESTIMATORS) or "grpo",
            "reference": "model" if refers else "none",
            "frozen_offload": True if refers else None,
            "old_logprobs": "none" if keys.flag(engine_s) else None,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        task = facts.get("task")
        if task not in ("grpo", "gspo", "ppo", "dapo"):
            return {}
        name = keys.word(kind)
        same = name is not None and ESTIMATORS.get(name) == task
        refers = facts.get("reference") not in (None, "none", "precomputed")
        already = bool(keys.flag(switch) or keys.real(weight))
        kept = {} if refers == already else {switch: refers, weight: None}
        said = {engine_s: facts.get("old_logprobs") == "none"}
        return {kind: name if same else {"dapo": "grpo"}.get(task, task)} | kept | said

    return Idea(
        keys=(kind, switch, weight, loss, engine_s),
        facts=names_in("task reference frozen_offload old_logprobs"),
        read=read,
        write=write,
    )


def _lengths() -> Idea:
    """Tokens of prompt and answer; of supervised training, those that a GPU's micro-batch is packed to."""
    prompt, answer, both, packed = (
        "rollout_max_prompt_len",
        "rollout_max_response_len",
        "rollout_max_context_len",
        "max_tokens_per_gpu",
    )

    def read(keys: Keys) -> Facts:
        if _supervised(keys):
            tokens = keys.whole(packed) or keys.whole("seq_length")
            return {"seq_len": None if tokens is None else tokens * (keys.whole("context_parallel_size") or 1)}
        most, whole, first = keys.whole(answer), keys.whole(both), keys.whole(prompt)
        if most is None and whole is None:
            raise keys.wrong(answer, "says how many tokens an answer has at most")
        if most is None:
            most = (whole or 2) - (first or min(PROMPT, (whole or 2) // 2))
        if whole is not None and most >= whole:
            raise keys.wrong(answer, f"{most} tokens of an answer are not fewer than the {whole} of prompt and answer")
        unsaid = not first and (whole is None or keys.whole(answer) is None)
        first = first or (PROMPT if whole is None else max(1, whole - most))
        return lengths(keys, first, most, taken=unsaid)

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if "prompt_len" not in facts:
            return {packed: facts["seq_len"] // (facts.get("cp") or 1)} if facts.get("seq_len") else {}
        longest = str(facts.get("answers") or "")
        if not longest.isdecimal():
            return {prompt: facts["prompt_len"]}
        total = facts["prompt_len"] + int(longest)
        return {prompt: facts["prompt_len"], answer: int(longest), both: total if keys.has(both) else None}

    return Idea(keys=(prompt, answer, both), facts=names_in("seq_len prompt_len answers cp"), read=read, write=write)


def _batch() -> Idea:
    """Sequences of an update and of a micro-batch; with a dynamic one as many as fill a number of tokens of each GPU."""
    prompts, samples, steps, whole = (
        "rollout_batch_size",
        "n_samples_per_prompt",
        "num_steps_per_rollout",
        "global_batch_size",
    )
    micro, dynamic, most, scored = (
        "micro_batch_size",
        "use_dynamic_batch_size",
        "max_tokens_per_gpu",
        "log_probs_max_tokens_per_gpu",
    )

    def read(keys: Keys) -> Facts:
        first, each = keys.whole(prompts), keys.whole(samples) or 1
        if first is None and _supervised(keys):
            first, each = keys.whole(whole) or 1, 1
        if first is None:
            raise keys.wrong(prompts, "says how many prompts a step has")
        count, batch = keys.whole(steps), keys.whole(whole)
        if count is not None:
            found, left = divmod(first * each, count)
            if left or (batch is not None and batch != found):
                raise keys.wrong(
                    steps, f"{count} updates of {first} x {each} sequences are not of {batch or found} each"
                )
            batch = found
        facts: Facts = {"global_batch": batch, "micro_batch": keys.whole(micro) or 1}
        if _supervised(keys):
            return facts | ({"micro_batch": 1} if keys.flag(dynamic) else {})
        facts |= {"prompts": first, "samples": each}
        if not keys.flag(dynamic):
            return facts
        tokens = keys.whole(most)
        if tokens is None:
            raise keys.wrong(most, "says how many tokens a dynamic micro-batch has")
        ranks = keys.whole("context_parallel_size") or 1
        both = _lengths().read(keys)
        longest = both["prompt_len"] + int(both["answers"])
        # A sequence that is longer makes a micro-batch of its own.
        facts["logprob_tokens"] = max((keys.whole(scored) or tokens) * ranks, longest)
        said = f"{tokens * ranks} tokens of a micro-batch"
        own = _own_batch(keys, batch or first * each)
        facts["micro_batch"] = fitted(keys, most, max(1.0, tokens * ranks / longest), own, longest, said)
        return facts

    def _own_batch(keys: Keys, batch: int) -> int:
        """Sequences of an update on one data-parallel rank."""
        try:
            gpus = (keys.whole("actor_num_gpus_per_node") or 8) * (keys.whole("actor_num_nodes") or 1)
        except Unknown:
            split = split_of(keys.given.get("placement"))
            gpus = split[0] if split else keys.given.get("gpus") or 8
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        for name in sizes:
            gpus = max(1, gpus // (keys.whole(name) or 1))
        return min(1024, max(1, batch // gpus))

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        number = (facts.get("prompts") or 0) * (facts.get("samples") or 1)
        batch = facts.get("global_batch") or number or None
        values: dict[str, Any] = {whole: batch, steps: None}
        if "prompts" in facts:
            values |= {prompts: facts["prompts"], samples: facts.get("samples")}
        elif batch:
            values |= {prompts: batch, samples: None}
        tokens, longest = facts.get("logprob_tokens"), str(facts.get("answers") or "")
        if tokens is not None and longest.isdecimal() and facts.get("prompt_len"):
            ranks, length = facts.get("cp") or 1, facts["prompt_len"] + int(longest)
            both = (facts.get("micro_batch") or 1) * length, tokens
            if all(one % ranks == 0 for one in both):
                return values | {dynamic: True, most: both[0] // ranks, scored: both[1] // ranks, micro: None}
        if "prompts" not in facts and (facts.get("micro_batch") or 1) == 1:
            return values | {dynamic: True}
        return values | {dynamic: False, most: None, scored: None, micro: facts.get("micro_batch") or 1}

    return Idea(
        keys=(prompts, samples, steps, whole, micro, dynamic, most, scored),
        facts=names_in("global_batch micro_batch prompts samples logprob_tokens cp"),
        read=read,
        write=write,
    )


WIDTH, STAGES, EXPERTS = "rollout_num_gpus_per_engine", "sglang_pp_size", "sglang_ep_size"
GROUPS, JOINED = "sglang_dp_size", "sglang_enable_dp_attention"
OLDER = {
    STAGES: "sglang_pipeline_parallel_size",
    EXPERTS: "sglang_expert_parallel_size",
    GROUPS: "sglang_data_parallel_size",
}
MOST = {"max_num_seqs": "sglang_max_running_requests", "max_batched_tokens": "sglang_chunked_prefill_size"}


def _ranks() -> Idea:
    """Ranks of an engine, whose attention may be data-parallel, and what all of these groups have together."""

    def read(keys: Keys) -> Facts:
        gpus = keys.whole(WIDTH) or 1
        stages, ranks, groups = (keys.agreed((key, OLDER[key]), keys.whole) or 1 for key in (STAGES, EXPERTS, GROUPS))
        if gpus % stages:
            raise keys.wrong(STAGES, f"{stages} stages do not divide {gpus} GPUs of an engine")
        tp = gpus // stages
        if groups > 1 and not keys.flag(JOINED):
            raise keys.wrong(GROUPS, f"is read with {keys.document.shown(JOINED)}")
        if tp % groups:
            raise keys.wrong(GROUPS, f"{groups} does not divide {tp} ranks of an engine")
        most = {name: size and max(1, size // groups) for name, key in MOST.items() for size in [keys.whole(key)]}
        # Experts are on all ranks, whole ones or parts of each.
        return {"tp": tp // groups, "pp": stages, "ep": tp if groups > 1 else ranks} | most

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        tp, pp, ep = facts["tp"], facts["pp"], facts["ep"]
        groups, plain = ep // tp if ep > tp else 1, Engine.parse("sglang")
        most = {key: facts[name] for name, key in MOST.items() if facts[name] != getattr(plain, name)}
        return {
            WIDTH: max(tp, ep) * pp,
            STAGES: pp if pp > 1 else None,
            EXPERTS: ep if ep > 1 else None,
            GROUPS: groups if groups > 1 else None,
            JOINED: groups > 1,
            **dict.fromkeys(MOST.values()),
            **{key: size * groups for key, size in most.items()},
        }

    return Idea(
        keys=(WIDTH, STAGES, EXPERTS, GROUPS, JOINED, *MOST.values(), *OLDER.values()),
        facts=("tp", "pp", "ep", *MOST),
        read=read,
        write=write,
    )


def _checkpoint(keys: Keys) -> str:
    """The format of the checkpoint that SGLang loads."""
    loaded = keys.raw("hf_checkpoint") or ""
    name = str(loaded[0] if isinstance(loaded, list) and loaded else loaded).rstrip("/")
    return next((word for ending, word in FORMATS.items() if name.endswith(ending)), "bf16")


def _rollout() -> Idea:
    """SGLang's engines; on the trainer's GPUs they keep nothing meanwhile. Attention may be data-parallel within an engine."""
    caches = {"auto": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "bf16", "bf16": "bf16"}
    inner = engine(
        "sglang",
        _ranks(),
        row("static_fraction", "sglang_mem_fraction_static", kind="real", default=0.85),
        row("context", "sglang_context_length"),
        row("kv", "sglang_kv_cache_dtype", words=caches, default="bf16", off="bf16"),
        row("graphs", "sglang_disable_cuda_graph", words={"true": False, "false": True}, default=True),
        row("prefix", "sglang_disable_radix_cache", words={"true": False, "false": True}, default=True),
        fixed(
            sleep=lambda keys: 2 if keys.flag("colocate") and keys.flag("offload_rollout") is not False else 0,
            weights=_checkpoint,
        ),
        test=lambda keys: not _supervised(keys),
        plain=("bf16",),
    )

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = Engine.parse(facts.get("rollout") or "sglang")
        if wanted.kind != "sglang" or wanted.weights != "bf16" or wanted.accepted or wanted.turns > 1:
            return {}
        stays = split_of(facts.get("placement")) is None and not wanted.sleep
        return inner.write(facts, keys) | {"no_offload_rollout": True if stays else None}

    return msgspec.structs.replace(inner, write=write)


def _precision() -> Idea:
    """16-bit weights, whose gradients are summed in float32 where that is asked for."""
    wide, half, plain = "accumulate_allreduce_grads_in_fp32", "fp16", "bf16"
    eight = ("fp8_format", "fp8_recipe", "fp8_param_gather")

    def read(keys: Keys) -> Facts:
        if keys.has(eight[0]):
            name = keys.choice(eight[1], FP8) or "fp8-delayed"
            return {"precision": f"{name}-primary" if keys.flag(eight[2]) else name}
        name = "fp16" if keys.flag(half) else "bf16"
        return {"precision": name if keys.flag(wide) is not False else f"{name}-mixed-16"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        asked = facts.get("precision") or "bf16"
        name, _, kind = asked.partition("-")
        if name in ("bf16", "fp16") and kind in ("", "mixed-18"):
            return {half: name == "fp16", wide: True, **dict.fromkeys(eight)}
        return {}

    return Idea(keys=(wide, half, plain, *eight), facts=("precision",), read=read, write=write)


def _loss() -> Idea:
    """Log-probabilities of float32 logits, all at once or some rows at a time."""
    chunk = "log_probs_chunk_size"

    def read(keys: Keys) -> Facts:
        size = keys.whole(chunk, minimum=-1)
        return {"loss": "chunked" if size is not None and size > 0 else None}

    written: dict[Any, dict[str, Any]] = {"chunked": {chunk: 1024}, "auto": {chunk: None}, "inplace": {chunk: None}}
    return Idea(keys=(chunk,), facts=("loss",), read=read, write=lambda facts, keys: written.get(facts["loss"], {}))


SLIME = Dialect(
    name="slime",
    title="slime",
    versions="slime 0.2 - 0.3",
    syntaxes=("argv",),
    framework="megatron",
    zero_stages=(1,),
    style="switch",
    blank={
        "argv": "python3 train.py \\\n   --loss-type sft_loss \\\n"
                "   --rollout-function-path slime.rollout.sft_rollout.generate_rollout \\\n"
                "   --disable-compute-advantages-and-returns \\\n   --debug-train-only\n",
    },
    blanks=dict.fromkeys(("grpo", "gspo", "ppo", "dapo"), "python3 train.py \\\n   --attention-dropout 0.0 --hidden-dropout 0.0\n"),
    ideas=(
        _model(),
        *LAYOUT,
        _gpus(),
        _placement(),
        _task(),
        _lengths(),
        _batch(),
        _rollout(),
        # slime always distributes the optimizer (`set_default_megatron_args`).
        fixed("use_distributed_optimizer", framework="megatron", zero=1),
        recompute(switch="recompute_activations"),
        _precision(),
        optimizer(),
        overlap(),
        offload(),
        ATTENTION,
        _loss(),
    ),
)  # fmt: skip
