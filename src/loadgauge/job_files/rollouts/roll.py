"""ROLL: pipelines of YAML in which each role has a strategy and devices of its own; RLVR, agentic, SFT, DPO and distillation.

Nothing of a file is evaluated: devices are read where they are ranges or lists of numbers.
"""

import math
import re
from typing import Any

from loadgauge.job_files.ideas import (
    ATTENTION,
    STAYS,
    Dialect,
    Document,
    Facts,
    Keys,
    Named,
    fitted,
    lengths,
    names_in,
    product,
    reads,
    row,
    served,
)
from loadgauge.job_files.pre_training.megatron import (
    context,
    experts,
    loss,
    offload,
    pipeline,
    recompute,
    tensor_parallel,
)

A, G, REF = "actor_train.", "actor_infer.", "reference."
S, E = f"{A}strategy_args.strategy_config.", f"{G}strategy_args.strategy_config."
ROLES = {"sft_train.": A, "student_train.": A, "student.": A, "student_infer.": G, "student_pretrain": "pretrain"}
RANGE = re.compile(r"(?:list\()?range\(\s*(?:(\d{1,6})\s*,\s*)?(\d{1,6})\s*(?:,\s*(\d{1,6})\s*)?\)\)?|\[([\d\s,]*)\]")
MEGATRON = product(
    tensor_parallel(f"{S}tensor_model_parallel_size", f"{S}sequence_parallel"),
    pipeline({
        "pp": f"{S}pipeline_model_parallel_size", "chunks": f"{S}virtual_pipeline_model_parallel_size", "layers": f"{S}num_layers",
        "chunk_layers": f"{S}num_layers_per_virtual_pipeline_stage", "first": f"{S}num_layers_in_first_pipeline_stage",
        "last": f"{S}num_layers_in_last_pipeline_stage",
    }),
    context(f"{S}context_parallel_size", f"{S}cp_comm_type"),
    experts(f"{S}expert_model_parallel_size", f"{S}expert_tensor_parallel_size", f"{S}tensor_model_parallel_size"),
    recompute(S, usual="group"),
    offload(S),
    loss(S),
)  # fmt: skip


def variant(document: Document) -> tuple[str, list[tuple[str, str]]]:
    """The pipeline of a document and the names of its roles: the student and the only role of SFT are actors."""
    names = document.names()
    inside = {name.partition(".")[0] for name in names}
    if "student" in inside:
        return "distill", list(ROLES.items())
    kind = (
        "sft"
        if "sft_train" in inside
        else "rl"
        if inside & {"actor_infer", "student_infer", "adv_estimator"}
        else "dpo"
    )
    return kind, list(ROLES.items())


def _kind(keys: Keys) -> str:
    return str(getattr(keys.document, "variant", "rl"))


def devices(keys: Keys, key: str) -> set[int] | None:
    """Return the numbers of a role's devices, None where it has none. Raises `ConfigError` for what is no range or list.

    `list(range(0,8)) + list(range(12,16))` are twelve.
    """
    value = keys.raw(key)
    if isinstance(value, list):
        value = str([int(device) for device in value if str(device).isdecimal()])
    if value is None:
        return None
    text, numbers = str(value), set[int]()
    for match in RANGE.finditer(text):
        start, end, step, listed = match.groups()
        words = [word for word in (listed or "").replace(" ", "").split(",") if word]
        numbers |= set(map(int, words)) if end is None else set(range(int(start or 0), int(end), int(step or 1) or 1))
    keys.refuse(
        key,
        f"{text[:40]!r} is read where it is list(range(0, 8)), or a list of numbers",
        when=RANGE.sub("", text).strip(" +") or not numbers,
    )
    return numbers


PENALTY, SWITCHES, ESTIMATOR = "init_kl_coef", ("use_kl_loss", "enable_reference"), "adv_estimator"


def refers(keys: Keys) -> bool:
    """Return whether there is a reference: a penalty, which there is where nothing is said, or a switch."""
    penalty = keys.real(PENALTY)
    return any(keys.flag(name) for name in SWITCHES) or (0.2 if penalty is None else penalty) > 0


def values(keys: Keys) -> bool:
    """Return whether there is a critic, whose values the estimator takes."""
    return (keys.word(ESTIMATOR) or "gae") == "gae"


def _split(facts: Facts) -> bool:
    """Return whether answers are made on GPUs of their own."""
    return str(facts.get("placement")).startswith("split")


@reads(
    facts="gpus gpus_per_node placement staleness",
    write=lambda facts, keys, at: (
        {at.own: f"list(range(0,{facts['gpus']}))"} if "gpus" in facts and not facts.get("placement") else {}
    ),
    own=f"{A}device_mapping",
    theirs=f"{G}device_mapping",
    each="num_gpus_per_node",
    late="async_generation_ratio",
    adapts=f"{A}model_args.lora_target",
    others=(f"{REF}device_mapping", "critic.device_mapping"),
)
def _gpus(keys: Keys, at: Named) -> Facts:
    trains, generates = devices(keys, at.own), devices(keys, at.theirs) or set[int]()
    if trains is None:
        return {"gpus_per_node": keys.whole(at.each)}
    apart = generates and not trains & generates
    gpus = len(trains | generates) if apart else len(trains)
    placement = f"split:{len(trains)}+{len(generates)}" if apart else None
    keys.note(
        at.theirs,
        f"answers are made on {len(generates)} GPUs, and counted as on the trainer's",
        "either",
        when=not apart and not generates <= trains,
    )
    busy, used = trains | generates, _kind(keys) == "rl"
    there = {"reference": used and refers(keys) and not keys.words(at.adapts), "critic": used and values(keys)}
    for (name, present), key in zip(there.items(), at.others, strict=True):
        own = devices(keys, key) if present else None
        if own is not None and not own & busy:
            gpus, placement = gpus + len(own), f"{placement or 'colocated'},{name}={len(own)}"
    late = keys.real(at.late) or 0
    per_node = keys.whole(at.each) or 8
    return {
        "gpus": gpus,
        "placement": placement,
        "staleness": math.ceil(late) if late and str(placement).startswith("split") else None,
        "gpus_per_node": per_node if gpus % per_node == 0 else None,
    }


LAYOUT_FACTS = names_in("framework precision zero shards replicas offload gradient_sync")


def _layout_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    if facts.get("framework") == "megatron":
        wanted = {**dict.fromkeys(MEGATRON.facts), "offload": "none", **facts}
        return {**MEGATRON.write(wanted, keys), at.strategy: "megatron_train", at.distributed: bool(facts.get("zero"))}
    return {
        at.strategy: "fsdp2_train",
        at.reshard: (facts.get("zero") or 0) == 3,
        at.ranks: facts.get("cp") or 1,
    }


@reads(
    facts=(*LAYOUT_FACTS, *MEGATRON.facts),
    write=_layout_written,
    strategy=f"{A}strategy_args.strategy_name",
    distributed=f"{S}use_distributed_optimizer",
    ranks=f"{A}model_args.ulysses_size",
    group=f"{S}fsdp_size",
    reshard=f"{S}reshard_after_forward",
    policy=f"{S}offload_policy",
    ep=f"{S}ep_size",
    once=f"{S}reduce_scatter_during_grad_accumulation",
    narrow=f"{S}param_dtype",
    sums=f"{S}reduce_dtype",
    off=f"{A}model_args.disable_gradient_checkpointing",
    stage=f"{S}zero_optimization.stage",
    dtype=f"{A}model_args.dtype",
    also=MEGATRON.keys,
)
def _layout(keys: Keys, at: Named) -> Facts:
    """Megatron-Core's arguments, or FSDP2 with Ulysses (`roll/distributed/strategy`), whose groups are of one GPU by default."""
    engine = keys.choice(
        at.strategy, {"megatron_train": "megatron", "fsdp2_train": "huggingface", "deepspeed_train": "deepspeed"}
    )
    word = {"fp32": "fp32", "fp16": "fp16"}.get(keys.word(at.dtype) or "", "bf16")
    if engine == "megatron":
        shared = 1 if keys.flag(at.distributed) else 0
        return {"framework": engine, "precision": word, "zero": shared, **MEGATRON.read(keys)}
    full = "none" if keys.flag(at.off) else "full"
    if engine == "deepspeed":
        return {"framework": engine, "zero": keys.whole(at.stage, minimum=0), "recompute": full, "precision": word}
    size, cp, split = keys.whole(at.group, minimum=-1) or 1, keys.whole(at.ranks) or 1, keys.whole(at.ep) or 1
    trains = devices(keys, f"{A}device_mapping") or set()
    half, sums = (keys.word(key) in ("bf16", "bfloat16") for key in (at.narrow, at.sums))
    loaded = {"float16": "fp16", "fp16": "fp16"}.get(keys.word(at.narrow) or "", "bf16")
    keys.note(
        at.sums,
        "reduces gradients in another format than float32",
        "saves",
        "gradients transient",
        when=sums and not half,
    )
    return {
        "framework": "torchtitan" if split > 1 else "huggingface",
        "zero": 2 if keys.flag(at.reshard) is False else 3,
        "shards": None if size < 0 or size >= len(trains) else max(1, size // cp),
        "cp": cp,
        "ep": split,
        "cp_comm": "all_to_all" if cp > 1 else None,
        "offload": "all" if keys.flag(at.policy) else "none",
        "gradient_sync": "last" if keys.flag(at.once) is False else "each",
        "recompute": full,
        "precision": ("bf16-pure" if sums else "bf16-pure-32") if half else loaded,
    }


def _sequences_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    generated = {at.prompts: "prompts", at.count: "samples", at.epochs: "epochs", at.first: "prompt_len"}
    return {
        at.micro: facts.get("micro_batch") or 1,
        at.steps: facts.get("accumulation") or 1,
        **{key: facts.get(name) for key, name in generated.items() if "prompts" in facts},
        at.longest: facts.get("seq_len") or STAYS,
    }


@reads(
    facts="seq_len micro_batch accumulation prompt_len answers prompts samples global_batch epochs",
    write=_sequences_written,
    prompts="rollout_batch_size",
    count="num_return_sequences_in_group",
    epochs="ppo_epochs",
    group="train_env_manager.group_size",
    longest="sequence_length",
    first="prompt_length",
    rest="response_length",
    micro=f"{A}training_args.per_device_train_batch_size",
    steps=f"{A}training_args.gradient_accumulation_steps",
    dynamic=f"{A}use_dynamic_batching_in_train",
    most=f"{A}max_tokens_per_microbatch_in_train",
    packs=f"{A}use_sequence_packing",
    packed=f"{A}sequence_packing_args.max_packed_sequence_length_train",
    algorithm=f"{A}sequence_packing_args.algorithm",
)
def _sequences(keys: Keys, at: Named) -> Facts:
    """Prompts with their answers, and the batches that they are trained in; an agentic pipeline counts whole trajectories."""
    length = keys.whole(at.longest) or (keys.whole(at.first) or 1024) + (keys.whole(at.rest) or 1024)
    rows, accumulated = keys.whole(at.micro) or 8, keys.whole(at.steps) or 1
    layout = _layout.read(keys)
    packs = keys.flag(at.packs) and layout["framework"] == "megatron"  # no other strategy packs
    spread = keys.word(at.algorithm) == "load_balance"  # else the rows of a micro-batch are packed as they are
    keys.note(
        at.packs,
        "packs the sequences of a micro-batch, so that none is padded",
        "saves",
        "activations loss transient",
        when=packs and not spread,
    )
    if _kind(keys) != "rl":
        return {"seq_len": length, "micro_batch": rows, "accumulation": accumulated}
    trains = devices(keys, f"{A}device_mapping")
    split = (layout.get("tp") or 1) * (layout.get("pp") or 1) * (layout.get("cp") or 1)
    samples = keys.whole(at.count) or keys.whole(at.group) or 1
    whole = keys.whole(at.prompts) or 128
    whole = whole if keys.has(at.count) or not keys.has(at.group) else max(1, whole // samples)
    ranks = max(1, len(trains or ()) // split)
    batch = min(rows * accumulated * ranks, whole * samples)
    if whole * samples % batch:  # `adjust_batch` adds to a batch or takes from it
        keys.note(
            at.prompts,
            f"{whole * samples} answers are no whole batches of {batch}, and counted as one batch",
            "either",
        )
        batch = whole * samples
    prompt = keys.whole(at.first) or 1024
    first_part = prompt if prompt < length else max(1, length // 8)
    facts = {
        "seq_len": length,
        **lengths(keys, first_part, length - first_part, taken=prompt >= length),
        "prompts": whole,
        "samples": samples,
    }
    own = batch // ranks if batch % ranks == 0 else None
    key = at.packed if packs and spread else at.most
    tokens = keys.whole(key, minimum=0) if (packs and spread) or keys.flag(at.dynamic) else None
    if tokens:
        # Of whole sequences, of which context parallelism takes shares (`dynamic_batching.py`, `sequence_packing.py`).
        tokens = max(tokens, length)
        rows = fitted(keys, key, tokens / length, own, length, f"up to {tokens} tokens a micro-batch")
    elif own is not None and own % rows:
        rows = fitted(keys, at.micro, float(rows), own, length, "no whole micro-batches of a rank")
    return facts | {"global_batch": batch, "micro_batch": rows, "epochs": keys.whole(at.epochs) or 1}


TASK_NAMES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "utilization": "gpu_memory_utilization",
    "static_fraction": "mem_fraction_static",
    "context": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "sleep": "sleep_level",
}


def _task_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    rank = facts.get("lora_rank") or 0
    return {
        at.lora[1]: rank or None,
        at.lora[0]: (facts.get("lora_targets") or "all-linear").replace("all", "all-linear") if rank else None,
    }


@reads(
    facts="task reference critic teacher rollout rollout_offload frozen_offload old_logprobs logprob_batch loss_terms"
    " lora_rank lora_targets",
    write=_task_written,
    also_of=(ESTIMATOR, PENALTY, *SWITCHES),
    reward="reward_pretrain",
    teacher=("teacher_pretrain", "teacher.model_args.model_name_or_path"),
    ipo="ipo",
    switches=("is_pure_opd", "use_opd"),
    lora=(f"{A}model_args.lora_target", f"{A}model_args.lora_rank"),
    engine=f"{G}strategy_args.strategy_name",
    scored=(f"{A}infer_batch_size", f"{REF}infer_batch_size"),
    again="enable_old_logprobs_recompute",
    never="force_disable_old_logprobs_recompute",
    eager=f"{E}enforce_eager",
    prefix=f"{E}enable_prefix_caching",
    served=f"{E}enable_expert_parallel",
    likeliest="logits_topk",
    idle=f"{A}offload_nccl",
    turns="max_actions_per_traj",
    each=("max_tokens_per_step", f"{G}generating_args.max_new_tokens"),
    also=(f"{E}{name}" for name in TASK_NAMES.values()),
)
def _task(keys: Keys, at: Named) -> Facts:
    """The task, its other models and the engine; with devices in common everything else leaves them in between."""
    pipeline_of, apart = _kind(keys), _split(_gpus.read(keys))
    adapts = keys.words(at.lora[0]) or []
    facts: Facts = {"lora_rank": 0}
    if adapts:
        every = set(adapts) & {"all-linear", "all", "all-experts", "all-router"}
        facts = {"lora_rank": keys.whole(at.lora[1]) or 8, "lora_targets": "all" if every else ",".join(adapts)}
    if pipeline_of == "sft":
        return facts
    held = not any(f"{name}=" in str(_gpus.read(keys).get("placement")) for name in ("reference", "critic"))
    beside = {"reference": "adapter-off" if adapts else "model", "frozen_offload": not adapts and held}
    if pipeline_of == "dpo":
        return facts | beside | {"task": "ipo" if keys.flag(at.ipo) else "dpo"}
    if pipeline_of == "distill":
        keys.note(
            at.likeliest,
            "keeps the teacher's likeliest tokens only; all are counted",
            "saves",
            "loss",
            when=keys.whole(at.likeliest, minimum=0) != 0,
        )
        return facts | {
            "task": "gkd",
            "loss_terms": "forward-kl",
            "teacher": keys.agreed(at.teacher, keys.word),
            "on_policy": None,
        }
    task = "ppo" if values(keys) else "grpo"
    facts |= beside if refers(keys) else {"reference": "none"}
    if any(keys.flag(name) for name in at.switches):
        task, facts = (
            "opd",
            {**facts, "teacher": keys.agreed(at.teacher, keys.word), "reference": None, "frozen_offload": True},
        )
    chosen = keys.choice(at.engine, {"vllm": "vllm", "sglang": "sglang"}) or "vllm"
    options: dict[str, Any] = {
        option: value
        for option, name in TASK_NAMES.items()
        if (
            value := keys.real(f"{E}{name}")
            if option in ("utilization", "static_fraction")
            else keys.whole(f"{E}{name}")
        )
    }
    options.pop("static_fraction" if chosen == "vllm" else "utilization", None)
    if options.get("context", length := _sequences.read(keys)["seq_len"]) < length:
        keys.note(f"{E}max_model_len", f"answers end at it, and are counted up to {length} tokens", "saves")
        del options["context"]
    wide = options.get("tp", 1) if keys.flag(at.served) else 1
    generates, trains = (devices(keys, f"{role}device_mapping") or set() for role in (G, A))
    copies = max(1, len(generates) // (options.get("tp", 1) * options.get("pp", 1)))
    options |= {
        "dp": copies
        if generates < trains and generates
        else None,  # the others have a reward's model, or nothing to do
        # Requests are cut off, and go on after the hand-over (`router.py`, `suspend`).
        "partial": True if apart and keys.real("async_generation_ratio") else None,
        "suspend": True if keys.flag(at.idle) and not apart else None,
    }
    if (turns := keys.whole(at.turns) or 1) > 1:
        # What is left of a trajectory beside what its turns may make is what the environment says.
        most = min(filter(None, (*map(keys.whole, at.each), length)))  # `env_manager/*.py` take the least
        rest = int(_sequences.read(keys)["answers"]) - turns * most
        options |= {"turns": turns, "observed": rest // (turns - 1) or None if rest > 0 else None}
    options = {"sleep": 1} | options | {"graphs": not keys.flag(at.eager), "prefix": keys.flag(at.prefix) is not False}
    return facts | {
        "task": task,
        "critic": keys.word(at.reward) if task == "ppo" and keys.word(at.reward) != keys.word("pretrain") else None,
        "rollout": served(chosen, options | {"ep": wide if wide > 1 else None}),
        "rollout_offload": "none" if apart else "idle",
        "old_logprobs": "none" if keys.flag(at.never) and task != "opd" else None,
        "logprob_batch": max((keys.whole(name) or 1 for name in at.scored), default=None),
    }


ROLL = Dialect(
    name="roll",
    title="ROLL",
    versions="ROLL 0.2",
    syntaxes=("yaml",),
    layers="roll.toml",
    renames=variant,
    blank={"yaml": "num_gpus_per_node: 8\nsft_train:\n  strategy_args:\n    strategy_name: megatron_train\n"},
    ideas=(
        row("model", "pretrain", f"{A}model_args.model_name_or_path", kind="model"),
        _gpus,
        _layout,
        _sequences,
        _task,
        row(
            "attention",
            f"{A}model_args.attn_implementation",
            f"{A}model_args.flash_attn",
            words={"fa2": "fa2", **ATTENTION, "auto": "flash"},
        ),
    ),
)
