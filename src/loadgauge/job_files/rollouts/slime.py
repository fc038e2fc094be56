"""slime: a command line of Megatron's arguments, of its own for the rollout, and of SGLang's with `sglang_` before them.

Defaults are those of 0.3 (`slime/utils/arguments.py`). Weights of a reference, and of the trainer while answers are generated, are
in host memory.
"""

from typing import Any

from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.fine_tuning.started import variable
from loadgauge.job_files.ideas import (
    STAYS,
    Dialect,
    Facts,
    Idea,
    Keys,
    Named,
    Unknown,
    engine,
    fitted,
    fixed,
    lengths,
    reads,
    refers,
    row,
    split_of,
    writes,
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


@reads(facts="model", write=lambda facts, keys, at: {at.key: facts.get("model")}, key="hf_checkpoint")
def _model(keys: Keys, at: Named) -> Facts:
    """The model by the last part of its checkpoint's path; its sizes are in a script of slime's that names it too."""
    value = keys.raw(at.key)
    name = str(value[0] if isinstance(value, list) and value else value or "").rstrip("/")
    last = name.rpartition("/")[2]
    if name and "$" in last:
        raise Unknown(f"{last[:40]!r} comes from outside the file", key=keys.document.shown(at.key), file=keys.file)
    if not name.startswith(("/", ".", "~", "$")):
        return {"model": name or None}  # on the hub
    for ending in (*FORMATS, "-NVFP4"):
        last = last.removesuffix(ending)
    size = next((size for size in SIZED if last.startswith("GLM-") and last.endswith(size)), "")
    return {"model": f"{last.removesuffix(size)}{SIZED.get(size, '')}" or None}


def _gpus_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    split = split_of(facts.get("placement"))
    own = facts if "nodes" in facts and split is None else {"gpus": split[0] if split else facts["gpus"]}
    return dict(zip((at.each, at.nodes), machines(own, facts.get("gpus_per_node")), strict=True))


@reads(
    facts="gpus gpus_per_node nodes",
    write=_gpus_written,
    needs="gpus",
    each="actor_num_gpus_per_node",
    nodes="actor_num_nodes",
)
def _gpus(keys: Keys, at: Named) -> Facts:
    rollout = 0 if keys.flag("colocate") or _supervised(keys) else _of_rollout(keys)
    per_node, count = keys.whole(at.each) or 8, keys.whole(at.nodes) or 1
    if not rollout:
        return {"gpus_per_node": per_node, "nodes": count}
    total = per_node * count + rollout
    return {"gpus": total, "gpus_per_node": next(size for size in (8, 4, 2, 1) if total % size == 0)}


def _of_rollout(keys: Keys) -> int:
    """GPUs that generate on their own."""
    count = keys.whole("rollout_num_gpus", minimum=0)
    if not count:
        raise keys.wrong("rollout_num_gpus", "says how many GPUs generate, without --colocate")
    return count


EVERY = "update_weights_interval"


def _every(keys: Keys) -> int | None:
    """Updates between two hand-overs of train_async.py, where they are several; a batch is generated meanwhile."""
    number = keys.whole(EVERY) or 1
    return number if "train_async.py" in keys.program and number > 1 else None


def _placement_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    split, moved = split_of(facts.get("placement")), facts.get("rollout_offload")
    if bool(facts.get("staleness")) != ("train_async.py" in keys.program):
        return {}
    stays = split is None and moved in (None, "none")
    off = {f"no_{at.train}": True} if stays else {at.train: None, f"no_{at.train}": None}
    own = {} if moved in ("weights", "optimizer") else off
    return {at.together: split is None, at.count: None if split is None else split[1]} | own


@reads(
    facts="placement staleness rollout_offload task",
    write=_placement_written,
    when=lambda keys: not _supervised(keys),
    needs="task",
    together="colocate",
    count="rollout_num_gpus",
    all_off="offload",
    train="offload_train",
    rollout="offload_rollout",
    per_node="num_gpus_per_node",
)
def _placement(keys: Keys, at: Named) -> Facts:
    late = "train_async.py" in keys.program
    if keys.flag(at.together):
        keys.refuse(at.together, "train_async.py generates beside the update, on GPUs of its own", when=late)
        return {"placement": "colocated", "rollout_offload": "none" if keys.flag(at.train) is False else "all"}
    own = (keys.whole("actor_num_gpus_per_node") or 8) * (keys.whole("actor_num_nodes") or 1)
    return {"placement": f"split:{own}+{_of_rollout(keys)}", "staleness": keys.whole(EVERY) or 1 if late else None}


def _task_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    task = facts["task"]
    name = keys.word(at.kind)
    same = name is not None and ESTIMATORS.get(name) == task
    already = bool(keys.flag(at.switch) or keys.real(at.weight))
    return {
        at.kind: name if same else {"dapo": "grpo"}.get(task, task),
        at.switch: STAYS if refers(facts) == already else refers(facts),
        at.weight: STAYS if refers(facts) == already else None,
        at.engine_s: facts.get("old_logprobs") == "none",
    }


@reads(
    facts="task reference frozen_offload old_logprobs",
    write=_task_written,
    needs="task",
    can={"task": ("grpo", "gspo", "ppo", "dapo")},
    kind="advantage_estimator",
    switch="use_kl_loss",
    weight="kl_coef",
    loss="loss_type",
    engine_s="use_rollout_logprobs",
)
def _task(keys: Keys, at: Named) -> Facts:
    """The task by its estimator of advantages; a reference is loaded where its weight or its switch is there, on the host."""
    if _supervised(keys):
        return {"task": None}
    keys.choice(at.loss, {"policy_loss": 1, "sft_loss": 1})
    refers = bool(keys.flag(at.switch) or keys.real(at.weight))
    return {
        "task": keys.choice(at.kind, ESTIMATORS) or "grpo",
        "reference": "model" if refers else "none",
        "frozen_offload": True if refers else None,
        "old_logprobs": "none" if keys.flag(at.engine_s) else None,
    }


LENGTHS_PACKED = "max_tokens_per_gpu"


def _lengths_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    if "prompt_len" not in facts:
        return {LENGTHS_PACKED: facts["seq_len"] // (facts.get("cp") or 1)} if facts.get("seq_len") else {}
    longest = str(facts.get("answers") or "")
    total = facts["prompt_len"] + int(longest) if longest.isdecimal() else None
    return {
        at.prompt: facts["prompt_len"],
        at.answer: STAYS if total is None else int(longest),
        at.both: STAYS if total is None else total if keys.has(at.both) else None,
    }


@reads(
    facts="seq_len prompt_len answers cp",
    write=_lengths_written,
    prompt="rollout_max_prompt_len",
    answer="rollout_max_response_len",
    both="rollout_max_context_len",
)
def _lengths(keys: Keys, at: Named) -> Facts:
    """Tokens of prompt and answer; of supervised training, those that a GPU's micro-batch is packed to."""
    if _supervised(keys):
        tokens = keys.whole(LENGTHS_PACKED) or keys.whole("seq_length")
        return {"seq_len": None if tokens is None else tokens * (keys.whole("context_parallel_size") or 1)}
    most, whole, first = keys.whole(at.answer), keys.whole(at.both), keys.whole(at.prompt)
    keys.refuse(at.answer, "says how many tokens an answer has at most", when=most is None and whole is None)
    if most is None:
        most = (whole or 2) - (first or min(PROMPT, (whole or 2) // 2))
    keys.refuse(
        at.answer,
        f"{most} tokens of an answer are not fewer than the {whole} of prompt and answer",
        when=whole is not None and most >= whole,
    )
    unsaid = not first and (whole is None or keys.whole(at.answer) is None)
    first = first or (PROMPT if whole is None else max(1, whole - most))
    return lengths(keys, first, most, taken=unsaid)


def _own_batch(keys: Keys, batch: int) -> int:
    """Sequences of an update on one data-parallel rank."""
    try:
        gpus = (keys.whole("actor_num_gpus_per_node") or 8) * (keys.whole("actor_num_nodes") or 1)
    except Unknown:
        split = split_of(keys.given.get("placement"))
        gpus = split[0] if split else keys.given.get("gpus") or 8
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        gpus = max(1, gpus // (keys.whole(name) or 1))
    return min(1024, max(1, batch // gpus))


def _batch_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    prompts = facts.get("prompts") or 0
    samples = facts.get("samples")
    batch = facts.get("global_batch") or prompts * (samples or 1) or None
    micro, tokens, longest = facts.get("micro_batch") or 1, facts.get("logprob_tokens"), str(facts.get("answers") or "")
    values: dict[str, Any] = {
        at.whole: batch,
        at.steps: None,
        at.prompts: facts.get("prompts", batch or STAYS),
        at.samples: samples if "prompts" in facts else None if batch else STAYS,
    }
    if tokens is not None and longest.isdecimal() and facts.get("prompt_len"):
        ranks = facts.get("cp") or 1
        trained = micro * (facts["prompt_len"] + int(longest))
        if trained % ranks == tokens % ranks == 0:
            return values | {at.dynamic: True, at.most: trained // ranks, at.scored: tokens // ranks, at.micro: None}
    if "prompts" not in facts and micro == 1:
        return values | {at.dynamic: True}
    return values | {at.dynamic: False, at.most: None, at.scored: None, at.micro: micro}


@reads(
    facts="global_batch micro_batch prompts samples logprob_tokens cp",
    write=_batch_written,
    prompts="rollout_batch_size",
    samples="n_samples_per_prompt",
    steps="num_steps_per_rollout",
    whole="global_batch_size",
    micro="micro_batch_size",
    dynamic="use_dynamic_batch_size",
    most="max_tokens_per_gpu",
    scored="log_probs_max_tokens_per_gpu",
)
def _batch(keys: Keys, at: Named) -> Facts:
    """Sequences of an update and of a micro-batch; with a dynamic one as many as fill a number of tokens of each GPU."""
    first, each = keys.whole(at.prompts), keys.whole(at.samples) or 1
    if first is None and _supervised(keys):
        first, each = keys.whole(at.whole) or 1, 1
    if first is None:
        raise keys.wrong(at.prompts, "says how many prompts a step has")
    count, batch = keys.whole(at.steps), keys.whole(at.whole)
    if count is not None:
        sequences, left = divmod(first * each, count)
        keys.refuse(
            at.steps,
            f"{count} updates of {first} x {each} sequences are not of {batch or sequences} each",
            when=left or batch not in (None, sequences),
        )
        batch = sequences
    micro = keys.whole(at.micro) or 1
    dynamic = keys.flag(at.dynamic)
    if _supervised(keys):
        return {"global_batch": batch, "micro_batch": 1 if dynamic else micro}
    facts: Facts = {"global_batch": batch, "micro_batch": micro, "prompts": first, "samples": each}
    if not dynamic:
        return facts
    tokens = keys.whole(at.most)
    if tokens is None:
        raise keys.wrong(at.most, "says how many tokens a dynamic micro-batch has")
    ranks = keys.whole("context_parallel_size") or 1
    both = _lengths.read(keys)
    longest = both["prompt_len"] + int(both["answers"])
    own = _own_batch(keys, batch or first * each)
    filled = max(1.0, tokens * ranks / longest)
    return facts | {
        # A sequence that is longer makes a micro-batch of its own.
        "logprob_tokens": max((keys.whole(at.scored) or tokens) * ranks, longest),
        "micro_batch": fitted(keys, at.most, filled, own, longest, f"{tokens * ranks} tokens of a micro-batch"),
    }


WIDTH, STAGES, EXPERTS = "rollout_num_gpus_per_engine", "sglang_pp_size", "sglang_ep_size"
GROUPS, JOINED = "sglang_dp_size", "sglang_enable_dp_attention"
OLDER = {
    STAGES: "sglang_pipeline_parallel_size",
    EXPERTS: "sglang_expert_parallel_size",
    GROUPS: "sglang_data_parallel_size",
}
MOST = {"max_num_seqs": "sglang_max_running_requests", "max_batched_tokens": "sglang_chunked_prefill_size"}


def _ranks_written(facts: Facts, keys: Keys) -> dict[str, Any]:
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


@reads(
    WIDTH,
    STAGES,
    EXPERTS,
    GROUPS,
    JOINED,
    *MOST.values(),
    *OLDER.values(),
    facts=("tp", "pp", "ep", *MOST),
    write=_ranks_written,
)
def _ranks(keys: Keys) -> Facts:
    """Ranks of an engine, whose attention may be data-parallel, and what all of these groups have together."""
    gpus = keys.whole(WIDTH) or 1
    stages, ranks, groups = (keys.agreed((key, OLDER[key]), keys.whole) or 1 for key in (STAGES, EXPERTS, GROUPS))
    keys.refuse(STAGES, f"{stages} stages do not divide {gpus} GPUs of an engine", when=gpus % stages)
    tp = gpus // stages
    keys.refuse(GROUPS, f"is read with {keys.document.shown(JOINED)}", when=groups > 1 and not keys.flag(JOINED))
    keys.refuse(GROUPS, f"{groups} does not divide {tp} ranks of an engine", when=tp % groups)
    most = {name: size and max(1, size // groups) for name, key in MOST.items() for size in [keys.whole(key)]}
    # Experts are on all ranks, whole ones or parts of each.
    return {"tp": tp // groups, "pp": stages, "ep": tp if groups > 1 else ranks} | most


def _checkpoint(keys: Keys) -> str:
    """The format of the checkpoint that SGLang loads."""
    loaded = keys.raw("hf_checkpoint") or ""
    name = str(loaded[0] if isinstance(loaded, list) and loaded else loaded).rstrip("/")
    return next((word for ending, word in FORMATS.items() if name.endswith(ending)), "bf16")


HANDED = ("update_weight_mode", "update_weight_transport")
FILES = {("delta", "disk"): "delta-disk", ("full", "disk"): "disk", (None, "disk"): "disk"}
"""`sync` by the words of both; a trainer that leaves the card destroys its process groups (`megatron_utils/actor.py`, `sleep`)."""
CACHES = {"auto": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "bfloat16": "bf16", "bf16": "bf16"}


@writes(
    engine(
        "sglang",
        _ranks,
        row("static_fraction", "sglang_mem_fraction_static", kind="real", default=0.85),
        row("context", "sglang_context_length"),
        row("kv", "sglang_kv_cache_dtype", words=CACHES, default="bf16", off="bf16"),
        row("graphs", "sglang_disable_cuda_graph", words={"true": False, "false": True}, default=True),
        row("prefix", "sglang_disable_radix_cache", words={"true": False, "false": True}, default=True),
        fixed(
            EVERY,
            *HANDED,
            every=_every,
            sync=lambda keys: FILES.get((keys.word(HANDED[0]), keys.word(HANDED[1]))),
            suspend=lambda keys: keys.flag("colocate") and keys.flag("offload_train") is not False,
            inflight=lambda keys: (
                _every(keys) and (keys.whole("rollout_batch_size") or 1) * (keys.whole("n_samples_per_prompt") or 1)
            ),
            sleep=lambda keys: 2 if keys.flag("colocate") and keys.flag("offload_rollout") is not False else 0,
            weights=_checkpoint,
        ),
        test=lambda keys: not _supervised(keys),
        plain=("bf16",),
    )
)
def _rollout(facts: Facts, keys: Keys, inner: Idea) -> dict[str, Any]:
    """SGLang's engines; on the trainer's GPUs they keep nothing meanwhile. Attention may be data-parallel within an engine."""
    wanted = Engine.parse(facts.get("rollout") or "sglang")
    if wanted.kind != "sglang" or wanted.weights != "bf16" or wanted.accepted or wanted.turns > 1:
        return {}
    stays = split_of(facts.get("placement")) is None and not wanted.sleep
    return inner.write(facts, keys) | {"no_offload_rollout": True if stays else None}


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name, _, kind = (facts.get("precision") or "bf16").partition("-")
    sayable = name in ("bf16", "fp16") and kind in ("", "mixed-18")
    return {at.half: name == "fp16", at.wide: True, **dict.fromkeys(at.eight)} if sayable else {}


ROUNDED = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"
"""The variable that slime's patch of Megatron asks (`TEGroupedLinear._get_weight_tensors`)."""


@reads(
    facts="precision",
    write=_precision_written,
    wide="accumulate_allreduce_grads_in_fp32",
    half="fp16",
    plain="bf16",
    eight=("fp8_format", "fp8_recipe", "fp8_param_gather"),
)
def _precision(keys: Keys, at: Named) -> Facts:
    """16-bit weights, whose gradients are summed in float32 where that is asked for."""
    if variable(keys, ROUNDED) == "1":
        keys.add(
            Uncounted(
                f"{ROUNDED}: rounds experts' weights to 4 bits in each product (QAT), in copies beside the others",
                ROUNDED,
                effect="costs",
                parts=("weights", "transient", "activations"),
                share=0.5,
            )
        )
    if keys.has(at.eight[0]):
        name = keys.choice(at.eight[1], FP8) or "fp8-delayed"
        return {"precision": f"{name}-primary" if keys.flag(at.eight[2]) else name}
    name = "fp16" if keys.flag(at.half) else "bf16"
    return {"precision": name if keys.flag(at.wide) is not False else f"{name}-mixed-16"}


LOSS_CHUNK = "log_probs_chunk_size"
LOSS_WRITTEN: dict[Any, dict[str, Any]] = {
    "chunked": {LOSS_CHUNK: 1024},
    "auto": {LOSS_CHUNK: None},
    "inplace": {LOSS_CHUNK: None},
}


@reads(LOSS_CHUNK, facts="loss", write=lambda facts, keys: LOSS_WRITTEN.get(facts["loss"], {}))
def _loss(keys: Keys) -> Facts:
    """Log-probabilities of float32 logits, all at once or some rows at a time."""
    size = keys.whole(LOSS_CHUNK, minimum=-1)
    return {"loss": "chunked" if size is not None and size > 0 else None}


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
        _model,
        *LAYOUT,
        _gpus,
        _placement,
        _task,
        _lengths,
        _batch,
        _rollout,
        # slime always distributes the optimizer (`set_default_megatron_args`).
        fixed("use_distributed_optimizer", framework="megatron", zero=1),
        recompute(switch="recompute_activations"),
        _precision,
        optimizer,
        overlap(),
        offload(),
        ATTENTION,
        _loss,
    ),
)  # fmt: skip
