"""verl: its PPO / GRPO trainers, whose actor's update is read here and the step around it in `verl_step`, and its SFT trainer.

Each engine has a section of its own (`actor.veomni`, `engine` of the SFT trainer); they are read under the names of two: those that
shard with FSDP as `actor.fsdp_config`, those of Megatron-Core as `actor.megatron`.
"""

import math
from typing import Any

from loadgauge.job_files.ideas import (
    ATTENTION,
    BITSANDBYTES,
    IDLE,
    STAYS,
    TRANSFORMER_ENGINE,
    Dialect,
    Facts,
    Keys,
    Named,
    Unknown,
    answered,
    fitted,
    layers,
    names_in,
    reads,
    row,
    split_of,
)
from loadgauge.job_files.pre_training.automodel import LEFT
from loadgauge.job_files.pre_training.bridge import TARGETS, grouped, groups
from loadgauge.job_files.pre_training.megatron import AWARE, STRATEGIES, machines, offload, recompute, remaindered
from loadgauge.job_files.pre_training.megatron_model import UNEVEN, uneven
from loadgauge.job_files.rollouts import verl_step
from loadgauge.job_files.rollouts.verl_loss import liger, loss, next_tokens
from loadgauge.job_files.rollouts.verl_names import (
    DENSE,
    OVER,
    SIZES,
    A,
    F,
    M,
    O,
    R,
    T,
    W,
    engine_of,
    has_actor,
    variant,
)
from loadgauge.job_files.rollouts.verl_step import on_its_own, sharing, ulysses

EACH, NODES, STARTED = "trainer.n_gpus_per_node", "trainer.nnodes", ("nproc_per_node", "nnodes")
APART = (("rollout.n_gpus_per_node", "rollout.nnodes"), (f"{R}n_gpus_per_node", f"{R}nnodes"))
"""GPUs of the rollout's own: of a fully asynchronous or one-step-off trainer, and of v1's `separate_async`."""


def _pools(keys: Keys) -> tuple[int, int, int, int]:
    """GPUs of a node and nodes, of the trainer and of the rollout's own."""
    separate = on_its_own(keys)
    width, nodes = APART[not separate]
    count = keys.whole(nodes, minimum=0)
    per_node = keys.whole(EACH) or 8
    count = int(bool(separate)) if count is None else count
    return per_node, keys.whole(NODES) or 1, keys.whole(width) or (8 if separate else per_node), count


def _gpus_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    if not has_actor(keys) and not keys.has(EACH) and keys.document.syntax == "argv":
        return dict(zip(STARTED, machines(facts, keys.whole(STARTED[0])), strict=True))
    split, usual = split_of(facts.get("placement")), keys.whole(EACH) if keys.has(EACH) else None
    own = facts if split is None else {"gpus": split[0]}
    apart = APART[not on_its_own(keys)]
    sizes = {} if split is None else zip(apart, machines({"gpus": split[1]}, keys.whole(apart[0])), strict=True)
    return dict(zip((EACH, NODES), machines(own, usual), strict=True)) | dict(sizes)


@reads(EACH, NODES, *STARTED, *APART[0], *APART[1], facts="gpus gpus_per_node nodes", write=_gpus_written, needs="gpus")
def _gpus(keys: Keys) -> Facts:
    """GPUs of all; what torchrun starts of an SFT trainer."""
    if not has_actor(keys):
        names = STARTED if keys.has(*STARTED) and keys.document.syntax == "argv" else (EACH, NODES)
        sizes = {"gpus_per_node": keys.whole(names[0]) or 1, "nodes": keys.whole(names[1]) or 1}
        return sizes if keys.has(*names) else {}
    per_node, count, width, others = _pools(keys)
    if not others:
        return {"gpus_per_node": per_node, "nodes": count}
    return {"gpus_per_node": max(per_node, width), "gpus": per_node * count + width * others}


@reads(
    "async_training.staleness_threshold",
    "async_training.trigger_parameter_sync_step",
    facts="placement staleness",
    when=has_actor,
)
def _placement(keys: Keys) -> Facts:
    """Return whether the rollout has GPUs of its own, and how many updates its answers may be behind."""
    if not on_its_own(keys) and not keys.whole(APART[1][1], minimum=0):
        return {}
    per_node, count, width, others = _pools(keys)
    if not others:
        return {}
    # As many prompts between two hand-overs (`set_max_required_samples`).
    late = math.ceil(verl_step.ahead(keys) - 1 - 1e-9) if on_its_own(keys) == "async" else 1
    return {"placement": f"split:{per_node * count}+{width * others}", "staleness": max(1, late)}


LAYOUT_SIZES = {axis: f"{M}{name}" for axis, name in SIZES.items() if axis != "etp"}
LAYOUT_ETP, LAYOUT_SP, LAYOUT_DISTRIBUTED = (
    f"{M}{SIZES['etp']}",
    f"{M}sequence_parallel",
    f"{M}use_distributed_optimizer",
)
LAYOUT_SHARDS, LAYOUT_HOW = f"{M}use_megatron_fsdp", f"{M}override_ddp_config.data_parallel_sharding_strategy"
LAYOUT_LITE, LAYOUT_AGAIN = (
    f"{M}impl_cfg.optimizer",
    {axis: f"{T}{name}" for axis, name in SIZES.items() if axis != "vpp"},
)
LAYOUT_MEGATRON = (
    *LAYOUT_SIZES.values(),
    LAYOUT_ETP,
    LAYOUT_SP,
    LAYOUT_DISTRIBUTED,
    LAYOUT_SHARDS,
    LAYOUT_HOW,
    LAYOUT_LITE,
    *LAYOUT_AGAIN.values(),
    f"{T}sequence_parallel",
    *(f"{T}{name}" for name in ("pipeline_model_parallel_layout", *UNEVEN)),
)
LAYOUT_FACTS = names_in(
    "etp sequence_parallel schedule stage_layers layers_per_stage zero cp_comm offload shards framework replicas gradient_sync"
)


def _of_megatron(keys: Keys) -> Facts:
    facts: Facts = {name: keys.whole(key) or 1 for name, key in LAYOUT_SIZES.items()}
    stages = facts["pp"] > 1
    alone = 0 if keys.flag(LAYOUT_DISTRIBUTED) is False else 1
    sharded = keys.flag(LAYOUT_SHARDS)
    stated = keys.choice(LAYOUT_HOW, STRATEGIES) if sharded else None
    lite = keys.word(LAYOUT_LITE) == "fsdp2"
    keys.note(
        LAYOUT_LITE,
        "PyTorch's FSDP2 with weights in float32, counted as Megatron's FSDP",
        "either",
        "weights gradients optimizer gathered",
        0.5,
        when=lite,
    )
    facts["etp"] = keys.whole(LAYOUT_ETP) or (facts["tp"] if facts["ep"] > 1 else 1)
    for axis, key in LAYOUT_AGAIN.items():  # what is overridden goes to the model after its own section
        keys.refuse(
            key,
            f"contradicts {LAYOUT_SIZES.get(axis, LAYOUT_ETP)} = {facts[axis]}",
            when=keys.has(key) and (keys.whole(key) or 1) != facts[axis],
        )
    overridden = keys.flag(f"{T}sequence_parallel")
    return facts | {
        "framework": "megatron",
        "sequence_parallel": (keys.flag(LAYOUT_SP) if overridden is None else overridden) is not False
        and facts["tp"] > 1,
        "vpp": facts["vpp"] if stages else 1,
        "schedule": ("interleaved" if facts["vpp"] > 1 else "1f1b") if stages else None,
        "zero": 3 if lite or (sharded and stated is None) else stated if sharded else alone,
        **uneven(keys, T, facts["pp"], facts["vpp"]),
    }


def _layout_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    stage, ranks = facts.get("zero") or 0, facts.get("cp") or 1
    megatron = facts.get("framework") == "megatron" or any((facts.get(axis) or 1) > 1 for axis in ("tp", "pp", "ep"))
    if engine_of(keys) in ("torchtitan", "automodel", "veomni") or not (megatron or stage):
        return {}
    if megatron:
        virtual, within = facts.get("vpp") or 1, facts.get("etp") or 1
        return {
            **dict.fromkeys((at.newer, at.older, at.group, at.reshard, at.policy, at.once)),
            at.strategy: "megatron",
            **{key: facts.get(name) or 1 for name, key in LAYOUT_SIZES.items() if name != "vpp"},
            LAYOUT_SIZES["vpp"]: virtual if virtual > 1 else None,
            LAYOUT_SP: bool(facts.get("sequence_parallel")) if (facts.get("tp") or 1) > 1 else None,
            LAYOUT_ETP: within if (facts.get("ep") or 1) > 1 or within > 1 else None,
            LAYOUT_DISTRIBUTED: bool(stage),
            LAYOUT_SHARDS: True if stage > 1 else False if keys.has(LAYOUT_SHARDS) else None,
            LAYOUT_HOW: {number: word for word, number in STRATEGIES.items()}[stage] if stage > 1 else None,
        }
    moved, pieces = facts.get("offload") or "none", facts.get("shards")
    stated = keys.word(at.strategy) in ("fsdp", "fsdp2") and moved == "none"
    replicated = (facts.get("replicas") or 1) > 1 or keys.has(at.group)
    return dict.fromkeys(LAYOUT_MEGATRON) | {
        at.strategy: keys.document.get(at.strategy) if stated else "fsdp2",
        at.older: ranks,
        at.newer: ranks if keys.has(at.newer) else None,
        at.policy: True if moved == "all" else False if keys.has(at.policy) else None,
        at.once: True if facts.get("gradient_sync") == "last" else False if keys.has(at.once) else None,
        at.reshard: stage == 3,
        at.group: pieces * ranks if replicated and pieces is not None else None,
    }


@reads(
    *LAYOUT_MEGATRON,
    *DENSE.values(),
    facts=(*LAYOUT_SIZES, *LAYOUT_FACTS),
    write=_layout_written,
    ring=f"{F}context_parallel_size",
    shared=f"{F}sequence_parallel",
    copies=f"{F}data_parallel_replicate_size",
    parts=f"{F}data_parallel_shard_size",
    kind=f"{F}distributed_strategy",
    experts=f"{F}moe_config.reshard_after_forward",
    kept=f"{F}backend_config.enable_fsdp_optimizations",
    older=f"{A}ulysses_sequence_parallel_size",
    newer=f"{F}ulysses_sequence_parallel_size",
    group=f"{F}fsdp_size",
    reshard=f"{F}reshard_after_forward",
    policy=f"{F}offload_policy",
    once=f"{F}use_no_sync_for_gradient_accumulation",
    strategy=f"{A}strategy",
    also=(
        "model_engine",
        "config_name",
        "actor@actor_rollout_ref.actor",
        f"{F}strategy",
    ),
)
def _layout(keys: Keys, at: Named) -> Facts:
    engine = engine_of(keys)
    if engine == "megatron":
        return _of_megatron(keys)
    keys.refuse(
        at.strategy,
        "lays out the model by turbo_config, which is not read; fsdp2 is",
        when=keys.word(at.strategy) == "fsdp_turbo",
    )
    own = engine in ("torchtitan", "automodel")
    ranks = keys.whole(at.ring) or 1 if own else ulysses(keys)
    # Its configuration has gradients reduced with every micro-batch; before 0.9 there is nothing to choose.
    # param_offload and optimizer_offload move only between the updates; this is FSDP2's own offload.
    facts: Facts = {axis: keys.whole(key) or 1 for axis, key in DENSE.items()}
    whole = engine == "automodel" and facts["ep"] > 1 and not keys.flag(at.experts)
    stage = 2 if whole or str(keys.raw(at.reshard)).lower() in ("false", "never") else 3
    stays = engine == "automodel" and stage == 3 and keys.flag(at.kept)
    keys.note(at.kept, LEFT, "saves", "gathered", when=stays)
    stage = 0 if own and keys.word(at.kind) == "ddp" else 2 if stays else stage
    facts |= {
        "framework": "torchtitan" if own or facts["ep"] > 1 else "huggingface",
        "cp": ranks,
        "cp_comm": None if ranks == 1 else "ring" if own else "all_to_all",
        "offload": "all" if keys.flag(at.policy) else "none",
        "zero": stage,
        "sequence_parallel": own and facts["tp"] > 1 and (engine == "torchtitan" or bool(keys.flag(at.shared))),
        "gradient_sync": "last" if keys.flag(at.once) or (engine == "automodel" and not keys.has(at.once)) else "each",
    }
    if own:
        return facts | ({"replicas": keys.whole(at.copies)} if (keys.whole(at.copies) or 1) > 1 else {})
    size, total = keys.whole(at.group, minimum=-1), _known_gpus(keys)
    if size is not None and size > 0 and (total is None or size < total):
        # A group of the device mesh counts Ulysses' ranks among its own; VeOmni's does not.
        whole, left = divmod(size, 1 if engine == "veomni" else ranks)
        keys.refuse(
            at.group, f"{size} cannot be split over {keys.document.shown(at.newer)} = {ranks}", when=left or not whole
        )
        facts["shards"] = whole
    return facts


def _known_gpus(keys: Keys) -> int | None:
    """GPUs of the trainer, where they are known: a flag's, or the file's."""
    try:
        facts = _gpus.read(keys)
        split = split_of(_placement.read(keys).get("placement"))
    except Unknown:
        facts, split = {}, None
    if split is not None:
        return split[0]
    return keys.given.get("gpus") or (facts["gpus_per_node"] * facts["nodes"] if "nodes" in facts else None)


@reads(
    inner=offload(OVER),
    aware=f"{OVER}{AWARE}",
    when=lambda keys: engine_of(keys) == "megatron",
    write=lambda facts, keys, at: (
        at.inner.write(facts, keys)
        if keys.has(*at.inner.keys)
        or (facts.get("framework") == "megatron" and str(facts.get("offload")).startswith("optim"))
        else {}
    ),
)
def _host(keys: Keys, at: Named) -> Facts:
    """The optimizer of Megatron in host memory."""
    facts = at.inner.read(keys)
    remaindered(keys, at.aware, away=facts["offload"] != "none")
    return facts


OPTIMIZERS = {
    "torch.optim.AdamW": "adamw", "torch.optim.Adam": "adamw", "torch.optim.SGD": "sgd", **BITSANDBYTES,
    "bitsandbytes.optim.AdamW": "adamw-bnb-32bit", "torchao.optim.AdamW8bit": "adamw-torchao-8bit",
    "torchao.optim.AdamW4bit": "adamw-4bit", "torchao.optim.AdamWFp8": "adamw-fp8",
    "adam": "adamw", "adamw": "adamw", "sgd": "sgd-momentum", "muon": "muon", "anyprecision_adamw": "adamw-anyprecision",
}  # fmt: skip
"""Classes of FSDP's engines, with their modules, and names of Megatron's and VeOmni's."""


def _optimizer_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    wanted = facts.get("optimizer") or "adamw"
    plain = wanted.startswith("adamw") and wanted not in OPTIMIZERS.values()
    if plain or wanted == "adamw":
        return dict.fromkeys((at.name, at.module))
    full = next((word for word, ours in OPTIMIZERS.items() if ours == wanted), "")
    where, _, meaning = full.rpartition(".")
    return {at.name: meaning, at.module: where or None} if full else {}


@reads(facts="optimizer", write=_optimizer_written, name=f"{O}optimizer", module=f"{O}optimizer_impl", own=f"{O}name")
def _optimizer(keys: Keys, at: Named) -> Facts:
    word = keys.word(at.name) or keys.word(at.own)
    if word is None:
        return {}
    full = f"{keys.word(at.module) or 'torch.optim'}.{word}"
    matches = OPTIMIZERS.get(full) or (None if keys.has(at.module) else OPTIMIZERS.get(word.lower()))
    keys.note(
        at.name,
        "another optimizer, counted as AdamW with states in float32",
        "either",
        "optimizer",
        when=matches is None,
    )
    return {"optimizer": None if matches == "adamw" else matches}


def _attention_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    wanted = facts.get("attention") or "flash"
    megatron = facts.get("framework") == "megatron" or engine_of(keys) == "megatron"
    key, words = (at.theirs, TRANSFORMER_ENGINE) if megatron else (at.ours, ATTENTION)
    named = next((word for word, kind in words.items() if kind == wanted), None)
    # verl removes padding, which PyTorch's own attention cannot: without a word it has one that can.
    return {key: None if wanted == "flash" and not keys.has(key) else named} if named else {}


@reads(
    facts="attention",
    write=_attention_written,
    ours=f"{W}override_config.attn_implementation",
    theirs=f"{T}attention_backend",
    engine=f"{F}attn_implementation",
)
def _attention(keys: Keys, at: Named) -> Facts:
    """transformers' `attn_implementation`, or Megatron's backend."""
    if engine_of(keys) == "megatron":
        return {"attention": keys.choice(at.theirs, TRANSFORMER_ENGINE)}
    return {"attention": keys.choice(at.engine if keys.has(at.engine) else at.ours, {**ATTENTION, "te": "cudnn"})}


def _batch_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    batch, samples = facts.get("global_batch"), facts.get("samples") or keys.whole(at.count) or 1
    answers = "prompts" in facts
    if not has_actor(keys) and not answers:
        return {at.step: batch} if batch else {}
    batch = batch or (facts["prompts"] * samples if answers else None)
    whole = batch and batch % samples == 0
    return {
        at.step: facts["prompts"] if answers else STAYS,
        at.count: 1 if batch and not whole else samples if answers else STAYS,
        at.epochs: facts.get("epochs") if answers else STAYS,
        at.mini: (batch // samples if whole else batch) if batch else STAYS,
    }


@reads(
    facts="global_batch prompts samples epochs",
    write=_batch_written,
    mini=f"{A}ppo_mini_batch_size",
    count=verl_step.COUNT,
    step="data.train_batch_size",
    epochs=f"{A}ppo_epochs",
    batches="async_training.require_batches",
)
def _batch(keys: Keys, at: Named) -> Facts:
    """Sequences of an optimizer step. The mini-batch counts prompts, each with `rollout.n` answers: verl multiplies
    (`ppo_mini_batch_size * rollout.n`, trainer/ppo/ray_trainer.py; workers/fsdp_workers.py until 0.6).

    A fully asynchronous trainer takes as many prompts as it trains on, `require_batches` mini-batches.
    """
    if not has_actor(keys):
        return {"global_batch": keys.whole(at.step) or 256}
    samples, prompts = keys.whole(at.count) or 1, keys.whole(at.mini) or 256
    late = on_its_own(keys) == "async"
    whole = (prompts * (keys.whole(at.batches) or 1) if late else keys.whole(at.step, minimum=0)) or 1024
    if keys.has(at.step) and whole % prompts and verl_step.trains_answers(keys):
        # v1 fills the batch up with sequences of one token (`upsample_batch_to_divisible_size`).
        rounded = max(1, whole // prompts) * prompts
        keys.note(at.step, f"{whole} prompts are no whole mini-batches of {prompts}; {rounded} are counted", "either")
        whole = rounded
    facts = {"global_batch": prompts * samples}
    if not verl_step.trains_answers(keys):
        return facts
    return facts | {"prompts": whole, "samples": samples, "epochs": keys.whole(at.epochs) or 1}


def _micro_batch_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    each, dynamic, _ = at.actor if has_actor(keys) else at.sft
    values: dict[str, Any] = {dynamic: False} if not has_actor(keys) or keys.has(dynamic) else {}
    return values | {each: facts.get("micro_batch") or 1}


@reads(
    facts="micro_batch",
    write=_micro_batch_written,
    actor=(f"{A}ppo_micro_batch_size_per_gpu", f"{A}use_dynamic_bsz", f"{A}ppo_max_token_len_per_gpu"),
    sft=("data.micro_batch_size_per_gpu", "data.use_dynamic_bsz", "data.max_token_len_per_gpu"),
)
def _micro_batch(keys: Keys, at: Named) -> Facts:
    """Sequences of a micro-batch; with a dynamic one as many as fit into a number of tokens, Ulysses' ranks together.

    They are balanced (`rearrange_micro_batches`).
    """
    of_actor = has_actor(keys)
    each, dynamic, tokens = at.actor if of_actor else at.sft
    if "micro_batch" in keys.given:
        return {"micro_batch": keys.given["micro_batch"]}
    length = _seq_len.read(keys)["seq_len"]
    asked = keys.flag(dynamic) if keys.has(dynamic) else not of_actor
    most = (keys.whole(tokens) or (16_384 if of_actor else 8192)) * sharing(keys)
    keys.refuse(
        tokens,
        f"{most} tokens are fewer than a sequence has ({length}), which verl refuses",
        when=asked and most < length,
    )
    stated = keys.whole(each) or (None if of_actor else 4)
    if not asked and stated is None:
        return {}
    rows = most / length if asked else float(stated or 1)
    layout, gpus = _layout.read(keys), _known_gpus(keys)
    ranks = None if gpus is None else gpus // (layout["tp"] * layout["pp"] * layout["cp"])
    batch = keys.given.get("global_batch") or _batch.read(keys)["global_batch"]
    own = batch // ranks if ranks and batch % ranks == 0 else None
    groups = layout["pp"] if (layout.get("vpp") or 1) > 1 else 1
    said_in = f"up to {most} tokens a micro-batch" if asked else "no whole micro-batches of a rank"
    return {"micro_batch": fitted(keys, tokens if asked else each, rows, own, length, said_in, groups)}


def _seq_len_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    if "prompt_len" in facts:
        # The longest is all that it says of the answers.
        values = {at.prompt: facts["prompt_len"], **answered(facts, at.answer)}
        own = [at.longest[name == at.answer] for name in values]
        return values | dict.fromkeys(filter(keys.has, own))
    length = facts.get("seq_len") or 0
    first = min(keys.whole(at.prompt) or 512, length // 2)
    if length and (keys.has(at.sft) or not has_actor(keys)):
        return {at.sft: length}
    return {at.prompt: first, at.answer: length - first} if first else {}


@reads(
    facts="seq_len prompt_len answers",
    write=_seq_len_written,
    prompt="data.max_prompt_length",
    answer="data.max_response_length",
    sft="data.max_length",
    longest=(f"{R}prompt_length", f"{R}response_length"),
)
def _seq_len(keys: Keys, at: Named) -> Facts:
    if not has_actor(keys) or keys.has(at.sft):
        return {"seq_len": keys.whole(at.sft) or 1024}
    # What generation is told goes before what it is told by default.
    first, rest = (
        next((size for key in pair if (size := keys.whole(key))), 512)
        for pair in zip(at.longest, (at.prompt, at.answer), strict=True)
    )
    whole: Facts = {"seq_len": first + rest}
    return whole | ({"prompt_len": first, "answers": str(rest)} if verl_step.trains_answers(keys) else {})


def _recompute_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    engine, word = engine_of(keys), facts.get("recompute") or "none"
    if engine == "megatron":
        return {**at.inner.write(facts, keys)}
    sayable = word in ("none", "full") and engine != "torchtitan"
    return {at.automodel if engine == "automodel" else at.ours: word == "full"} if sayable else {}


@reads(
    facts="recompute",
    write=_recompute_written,
    ours=f"{W}enable_gradient_checkpointing",
    automodel=f"{F}activation_checkpointing",
    titan=f"{F}activation_checkpoint",
    lite=f"{M}impl_cfg.recompute",
    inner=recompute(T, usual="group"),
)
def _recompute(keys: Keys, at: Named) -> Facts:
    engine = engine_of(keys)
    if engine == "megatron":
        return {"recompute": "full"} if "full" in (keys.words(at.lite) or []) else at.inner.read(keys)
    if engine == "torchtitan":
        return {"recompute": {"full": "full", "none": "none"}.get(keys.word(at.titan) or "", "per-op")}
    if engine == "automodel":
        return {"recompute": "full" if keys.flag(at.automodel) else "none"}
    return {"recompute": "none" if keys.flag(at.ours) is False else "full"}


def _lora_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    bridge: dict[str, Any] = dict.fromkeys(at.of_bridge)
    if not facts.get("lora_rank"):
        off = {key: 0 if keys.has(key) else None for key in (at.rank, at.of_bridge[0])}
        return {**bridge, **off, at.modules: None}
    if facts.get("framework") == "megatron" or engine_of(keys) == "megatron":
        own = (facts["lora_rank"], groups(facts.get("lora_targets") or "all") or None, facts.get("lora_dropout"))
        return {**dict(zip(at.of_bridge, own, strict=True)), at.rank: None, at.modules: None}
    return {at.rank: facts["lora_rank"], **layers(at.modules).write(facts, keys), **bridge}


@reads(
    facts="lora_rank lora_targets lora_dropout weights precision",
    write=_lora_written,
    rank=f"{W}lora_rank",
    modules=f"{W}target_modules",
    of_bridge=(f"{W}lora.rank", f"{W}lora.target_modules", f"{W}lora.dropout"),
)
def _lora(keys: Keys, at: Named) -> Facts:
    """PEFT's adapters under FSDP, Megatron-Bridge's on Megatron's layers."""
    megatron = engine_of(keys) == "megatron"
    number = keys.whole(at.of_bridge[0] if megatron else at.rank, minimum=0) or 0
    if not number:
        return {"lora_rank": 0}
    if megatron:
        return {
            "lora_rank": number,
            "lora_targets": grouped(word for word in keys.words(at.of_bridge[1]) or TARGETS if word in TARGETS),
            "lora_dropout": keys.real(at.of_bridge[2]) or None,
        }
    # What is trained is loaded in float32 before it is given adapters (`workers/engine/fsdp/transformer_impl.py`).
    wide = keys.word(f"{F}model_dtype") not in ("bf16", "bfloat16")
    loaded = {"precision": "bf16", "weights": "float32"} if wide else {}
    return {"lora_rank": number, **layers(at.modules).read(keys), **loaded}


PRECISION_WORDS = {"fp32": "bf16", "float32": "bf16", "bf16": "bf16-pure", "bfloat16": "bf16-pure"}


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    spelled = {"bf16": "fp32", "bf16-pure": "bf16"}.get(facts.get("precision") or "")
    return {at.dtype: spelled} if spelled and engine_of(keys) != "megatron" else {}


@reads(
    facts="precision",
    write=_precision_written,
    dtype=f"{F}model_dtype",
    mixed=f"{F}mixed_precision",
    half=(f"{F}dtype", f"{M}dtype", f"{F}mixed_precision.reduce_dtype"),
)
def _precision(keys: Keys, at: Named) -> Facts:
    """Weights are sharded in float32 unless they are loaded in 16 bits, and gradients reduced so (`_build_fsdp_module`)."""
    engine = engine_of(keys)
    if keys.word(at.half[engine == "megatron"]) in ("fp16", "float16"):
        return {"precision": "fp16"}
    if engine == "megatron":
        return {}
    if engine == "veomni":
        return {"precision": "bf16-pure" if keys.flag(at.mixed) is False else "bf16"}
    chosen = keys.choice(at.dtype, PRECISION_WORDS)
    narrow = engine != "fsdp" or keys.whole(f"{W}lora_rank", minimum=0) or keys.word(at.half[2]) in ("bf16", "bfloat16")
    return {"precision": chosen if narrow else "bf16-pure-32" if chosen == "bf16-pure" else "bf16-fsdp-16-32"}


VERL = Dialect(
    name="verl",
    title="verl",
    versions="verl 0.4 - 0.9",
    syntaxes=("argv", "yaml"),
    style="hydra",
    blank={
        "argv": f"python3 -m verl.trainer.main_ppo \\\n    {A}use_dynamic_bsz=False\n",
        "yaml": "actor_rollout_ref:\n  actor:\n    use_dynamic_bsz: false\n",
    },
    renames=variant,
    programs={r"\bmain_gen(?:eration)?\w*\b|\bmain_eval\b": IDLE},
    ideas=(
        row("model", f"{W}path", kind="model"),
        _gpus,
        _placement,
        _layout,
        _batch,
        _micro_batch,
        _seq_len,
        loss,
        liger,
        _recompute,
        _lora,
        _attention,
        verl_step.task,
        verl_step.engine,
        verl_step.log_probs,
        verl_step.moved,
        verl_step.critic_batch,
        _precision,
        _host,
        _optimizer,
        next_tokens,
    ),
)
