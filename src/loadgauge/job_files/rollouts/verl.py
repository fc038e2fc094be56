"""verl: its PPO / GRPO trainers, whose actor's update is read here and the step around it in `verl_step`, and its SFT trainer; YAML
or Hydra's overrides.

Each engine has a section of its own (`actor.veomni`, `engine` of the SFT trainer); they are read under the names of two: those that
shard with FSDP as `actor.fsdp_config`, those of Megatron-Core as `actor.megatron`.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from loadgauge.job_files.ideas import (
    ATTENTION,
    BITSANDBYTES,
    IDLE,
    TRANSFORMER_ENGINE,
    Dialect,
    Facts,
    Idea,
    Keys,
    Unknown,
    fitted,
    layers,
    names_in,
    reads,
    row,
    split_of,
)
from loadgauge.job_files.pre_training.automodel import LEFT
from loadgauge.job_files.pre_training.bridge import TARGETS, grouped, groups
from loadgauge.job_files.pre_training.megatron import STRATEGIES, machines, offload, recompute
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


def _gpus() -> Idea:
    """GPUs of all; what torchrun starts of an SFT trainer."""

    def read(keys: Keys) -> Facts:
        if not has_actor(keys):
            names = STARTED if keys.has(*STARTED) and keys.document.syntax == "argv" else (EACH, NODES)
            sizes = {"gpus_per_node": keys.whole(names[0]) or 1, "nodes": keys.whole(names[1]) or 1}
            return sizes if keys.has(*names) else {}
        per_node, count, width, others = _pools(keys)
        if not others:
            return {"gpus_per_node": per_node, "nodes": count}
        return {"gpus_per_node": max(per_node, width), "gpus": per_node * count + width * others}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if "gpus" not in facts:
            return {}
        if not has_actor(keys) and not keys.has(EACH) and keys.document.syntax == "argv":
            return dict(zip(STARTED, machines(facts, keys.whole(STARTED[0])), strict=True))
        split, usual = split_of(facts.get("placement")), keys.whole(EACH) if keys.has(EACH) else None
        own = facts if split is None else {"gpus": split[0]}
        values: dict[str, Any] = dict(zip((EACH, NODES), machines(own, usual), strict=True))
        if split is None:
            return values
        theirs = APART[not on_its_own(keys)]
        return values | dict(zip(theirs, machines({"gpus": split[1]}, keys.whole(theirs[0])), strict=True))

    return Idea(
        keys=(EACH, NODES, *STARTED, *APART[0], *APART[1]),
        facts=names_in("gpus gpus_per_node nodes"),
        read=read,
        write=write,
    )


@reads("async_training.staleness_threshold", "async_training.trigger_parameter_sync_step", facts="placement staleness")
def _placement(keys: Keys) -> Facts:
    """Return whether the rollout has GPUs of its own, and how many updates its answers may be behind."""
    if not has_actor(keys):
        return {}
    if not on_its_own(keys) and not keys.whole(APART[1][1], minimum=0):
        return {}
    per_node, count, width, others = _pools(keys)
    late = max(1, math.ceil(keys.real("async_training.staleness_threshold") or 0))
    return {"placement": f"split:{per_node * count}+{width * others}", "staleness": late} if others else {}


def _layout() -> Idea:
    sizes = {axis: f"{M}{name}" for axis, name in SIZES.items() if axis != "etp"}
    etp, sp, distributed = f"{M}{SIZES['etp']}", f"{M}sequence_parallel", f"{M}use_distributed_optimizer"
    shards, how = f"{M}use_megatron_fsdp", f"{M}override_ddp_config.data_parallel_sharding_strategy"
    lite, again = f"{M}impl_cfg.optimizer", {axis: f"{T}{name}" for axis, name in SIZES.items() if axis != "vpp"}
    older, newer = f"{A}ulysses_sequence_parallel_size", f"{F}ulysses_sequence_parallel_size"
    ring, shared = f"{F}context_parallel_size", f"{F}sequence_parallel"
    group, reshard = f"{F}fsdp_size", f"{F}reshard_after_forward"
    copies, parts = f"{F}data_parallel_replicate_size", f"{F}data_parallel_shard_size"
    policy, strategy, kind = f"{F}offload_policy", f"{A}strategy", f"{F}distributed_strategy"
    once = f"{F}use_no_sync_for_gradient_accumulation"
    experts, kept = f"{F}moe_config.reshard_after_forward", f"{F}backend_config.enable_fsdp_optimizations"
    megatron = (*sizes.values(), etp, sp, distributed, shards, how, lite, *again.values(), f"{T}sequence_parallel")
    dense = (*DENSE.values(), ring, shared, copies, parts, kind, experts, kept)
    chosen = (strategy, "model_engine", "config_name", "actor@actor_rollout_ref.actor", f"{F}strategy")

    def of_megatron(keys: Keys) -> Facts:
        facts: Facts = {name: keys.whole(key) or 1 for name, key in sizes.items()}
        stages = facts["pp"] > 1
        zero = 0 if keys.flag(distributed) is False else 1
        if keys.flag(shards):
            stated = keys.choice(how, STRATEGIES)
            zero = 3 if stated is None else stated
        if keys.word(lite) == "fsdp2":
            keys.note(lite, "PyTorch's FSDP2 with weights in float32, counted as Megatron's FSDP", "either",
                      "weights gradients optimizer gathered", 0.5)  # fmt: skip
            zero = 3
        facts["etp"] = keys.whole(etp) or (facts["tp"] if facts["ep"] > 1 else 1)
        for axis, key in again.items():  # what is overridden goes to the model after its own section
            if keys.has(key) and (keys.whole(key) or 1) != facts[axis]:
                raise keys.wrong(key, f"contradicts {sizes.get(axis, etp)} = {facts[axis]}")
        overridden = keys.flag(f"{T}sequence_parallel")
        return facts | {
            "framework": "megatron",
            "sequence_parallel": (keys.flag(sp) if overridden is None else overridden) is not False and facts["tp"] > 1,
            "vpp": facts["vpp"] if stages else 1,
            "schedule": ("interleaved" if facts["vpp"] > 1 else "1f1b") if stages else None,
            "zero": zero,
        }

    def read(keys: Keys) -> Facts:
        engine = engine_of(keys)
        if engine == "megatron":
            return of_megatron(keys)
        if keys.word(strategy) == "fsdp_turbo":
            raise keys.wrong(strategy, "lays out the model by turbo_config, which is not read; fsdp2 is")
        own = engine in ("torchtitan", "automodel")
        ranks = keys.whole(ring) or 1 if own else ulysses(keys)
        # Its configuration has gradients reduced with every micro-batch; before 0.9 there is nothing to choose.
        # param_offload and optimizer_offload move only between the updates; this is FSDP2's own offload.
        stage = 2 if str(keys.raw(reshard)).lower() in ("false", "never") else 3
        facts: Facts = {axis: keys.whole(key) or 1 for axis, key in DENSE.items()}
        if engine == "automodel" and facts["ep"] > 1 and not keys.flag(experts):
            stage = 2
        if engine == "automodel" and stage == 3 and keys.flag(kept):
            stage = 2
            keys.note(kept, LEFT, "saves", "gathered")
        if own and keys.word(kind) == "ddp":
            stage = 0
        facts |= {
            "framework": "torchtitan" if own or facts["ep"] > 1 else "huggingface",
            "cp": ranks,
            "cp_comm": None if ranks == 1 else "ring" if own else "all_to_all",
            "offload": "all" if keys.flag(policy) else "none",
            "zero": stage,
            "sequence_parallel": own and facts["tp"] > 1 and (engine == "torchtitan" or bool(keys.flag(shared))),
            "gradient_sync": "last" if keys.flag(once) or (engine == "automodel" and not keys.has(once)) else "each",
        }
        if own:
            return facts | ({"replicas": keys.whole(copies)} if (keys.whole(copies) or 1) > 1 else {})
        size, total = keys.whole(group, minimum=-1), _known_gpus(keys)
        if size is not None and size > 0 and (total is None or size < total):
            # A group of the device mesh counts Ulysses' ranks among its own; VeOmni's does not.
            whole, left = divmod(size, 1 if engine == "veomni" else ranks)
            if left or not whole:
                raise keys.wrong(group, f"{size} cannot be split over {keys.document.shown(newer)} = {ranks}")
            facts["shards"] = whole
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if engine_of(keys) in ("torchtitan", "automodel", "veomni"):
            return {}
        wide = (facts.get("tp") or 1, facts.get("pp") or 1, facts.get("ep") or 1) != (1, 1, 1)
        stage = facts.get("zero") or 0
        if facts.get("framework") == "megatron" or wide:
            values: dict[str, Any] = dict.fromkeys((newer, older, group, reshard, policy, once)) | {
                strategy: "megatron"
            }
            values |= {key: facts.get(name) or 1 for name, key in sizes.items() if name != "vpp"}
            virtual, ranks = facts.get("vpp") or 1, facts.get("tp") or 1
            within = facts.get("etp") or 1
            return values | {
                sizes["vpp"]: virtual if virtual > 1 else None,
                sp: bool(facts.get("sequence_parallel")) if ranks > 1 else None,
                etp: within if (facts.get("ep") or 1) > 1 or within > 1 else None,
                distributed: bool(stage),
                shards: True if stage > 1 else False if keys.has(shards) else None,
                how: {number: word for word, number in STRATEGIES.items()}[stage] if stage > 1 else None,
            }
        ranks, moved, pieces = facts.get("cp") or 1, facts.get("offload") or "none", facts.get("shards")
        if not stage:
            return {}
        replicated = (facts.get("replicas") or 1) > 1 or keys.has(group)
        return dict.fromkeys(megatron) | {
            strategy: keys.document.get(strategy)
            if keys.word(strategy) in ("fsdp", "fsdp2") and moved == "none"
            else "fsdp2",
            older: ranks,
            newer: ranks if keys.has(newer) else None,
            policy: True if moved == "all" else False if keys.has(policy) else None,
            once: True if facts.get("gradient_sync") == "last" else False if keys.has(once) else None,
            reshard: stage == 3,
            group: pieces * ranks if replicated and pieces is not None else None,
        }

    facts = names_in("etp sequence_parallel schedule zero cp_comm offload shards framework replicas gradient_sync")
    return Idea(
        keys=(*megatron, *dense, older, newer, group, reshard, policy, once, *chosen),
        facts=(*sizes, *facts),
        read=read,
        write=write,
    )


def _known_gpus(keys: Keys) -> int | None:
    """GPUs of the trainer, where they are known: a flag's, or the file's."""
    try:
        facts = _gpus().read(keys)
        split = split_of(_placement.read(keys).get("placement"))
    except Unknown:
        facts, split = {}, None
    if split is not None:
        return split[0]
    return keys.given.get("gpus") or (facts["gpus_per_node"] * facts["nodes"] if "nodes" in facts else None)


def _host() -> Idea:
    """The optimizer of Megatron in host memory; of a part of it the rest stays."""
    inner = offload(OVER)

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stated = facts.get("offload") == "optimizer" or keys.has(*inner.keys)
        return inner.write(facts, keys) if stated else {}

    return msgspec.structs.replace(
        inner, read=lambda keys: inner.read(keys) if engine_of(keys) == "megatron" else {}, write=write
    )


OPTIMIZERS = {
    "torch.optim.AdamW": "adamw", "torch.optim.Adam": "adamw", "torch.optim.SGD": "sgd", **BITSANDBYTES,
    "bitsandbytes.optim.AdamW": "adamw-bnb-32bit", "torchao.optim.AdamW8bit": "adamw-torchao-8bit",
    "torchao.optim.AdamW4bit": "adamw-4bit", "torchao.optim.AdamWFp8": "adamw-fp8",
    "adam": "adamw", "adamw": "adamw", "sgd": "sgd-momentum", "muon": "muon", "anyprecision_adamw": "adamw-anyprecision",
}  # fmt: skip
"""Classes of FSDP's engines, with their modules, and names of Megatron's and VeOmni's."""


def _optimizer() -> Idea:
    name, module, own = f"{O}optimizer", f"{O}optimizer_impl", f"{O}name"

    def read(keys: Keys) -> Facts:
        word = keys.word(name) or keys.word(own)
        if word is None:
            return {}
        full = f"{keys.word(module) or 'torch.optim'}.{word}"
        matches = OPTIMIZERS.get(full) or (None if keys.has(module) else OPTIMIZERS.get(word.lower()))
        if matches is None:
            keys.note(name, "another optimizer, counted as AdamW with states in float32", "either", "optimizer")
        return {"optimizer": None if matches == "adamw" else matches}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = facts.get("optimizer") or "adamw"
        if wanted.startswith("adamw") and wanted not in OPTIMIZERS.values():
            wanted = "adamw"
        if wanted == "adamw":
            return dict.fromkeys((name, module))
        full = next((word for word, ours in OPTIMIZERS.items() if ours == wanted), None)
        if full is None:
            return {}
        where, _, meaning = full.rpartition(".")
        return {name: meaning, module: where or None}

    return Idea(keys=(name, module, own), facts=("optimizer",), read=read, write=write)


def _attention() -> Idea:
    """transformers' `attn_implementation`, or Megatron's backend."""
    ours, theirs = f"{W}override_config.attn_implementation", f"{T}attention_backend"
    engine = f"{F}attn_implementation"
    words = {**ATTENTION, "te": "cudnn"}

    def read(keys: Keys) -> Facts:
        if engine_of(keys) == "megatron":
            return {"attention": keys.choice(theirs, TRANSFORMER_ENGINE)}
        return {"attention": keys.choice(engine if keys.has(engine) else ours, words)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = facts.get("attention") or "flash"
        megatron = facts.get("framework") == "megatron" or engine_of(keys) == "megatron"
        key, words = (theirs, TRANSFORMER_ENGINE) if megatron else (ours, ATTENTION)
        named = next((word for word, kind in words.items() if kind == wanted), None)
        # verl removes padding, which PyTorch's own attention cannot: without a word it has one that can.
        return {key: None if wanted == "flash" and not keys.has(key) else named} if named else {}

    return Idea(keys=(ours, theirs, engine), facts=("attention",), read=read, write=write)


def _batch() -> Idea:
    """Sequences of an optimizer step. The mini-batch counts prompts, each with `rollout.n` answers: verl multiplies
    (`ppo_mini_batch_size * rollout.n`, trainer/ppo/ray_trainer.py; workers/fsdp_workers.py until 0.6).

    A fully asynchronous trainer takes as many prompts as it trains on, `require_batches` mini-batches.
    """
    mini, count, step = f"{A}ppo_mini_batch_size", verl_step.COUNT, "data.train_batch_size"
    epochs, batches = f"{A}ppo_epochs", "async_training.require_batches"

    def read(keys: Keys) -> Facts:
        if not has_actor(keys):
            return {"global_batch": keys.whole(step) or 256}
        samples, prompts = keys.whole(count) or 1, keys.whole(mini) or 256
        whole = keys.whole(step, minimum=0)
        if on_its_own(keys) == "async":
            whole = prompts * (keys.whole(batches) or 1)
        whole = whole or 1024
        if keys.has(step) and whole % prompts and verl_step.trains_answers(keys):
            # v1 fills the batch up with sequences of one token (`upsample_batch_to_divisible_size`).
            rounded = max(1, whole // prompts) * prompts
            keys.note(step, f"{whole} prompts are no whole mini-batches of {prompts}; {rounded} are counted", "either")
            whole = rounded
        facts = {"global_batch": prompts * samples}
        if not verl_step.trains_answers(keys):
            return facts
        return facts | {"prompts": whole, "samples": samples, "epochs": keys.whole(epochs) or 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        batch, samples = facts.get("global_batch"), facts.get("samples") or keys.whole(count) or 1
        if not has_actor(keys) and "prompts" not in facts:
            return {step: batch} if batch else {}
        values: dict[str, Any] = {}
        if "prompts" in facts:
            values = {step: facts["prompts"], count: samples, epochs: facts.get("epochs")}
            batch = batch or facts["prompts"] * samples
        if not batch:
            return values
        prompts, left = divmod(batch, samples)
        return values | ({mini: batch, count: 1} if left else {mini: prompts})

    return Idea(
        keys=(mini, count, step, epochs, batches),
        facts=names_in("global_batch prompts samples epochs"),
        read=read,
        write=write,
    )


def _micro_batch() -> Idea:
    """Sequences of a micro-batch; with a dynamic one as many as fit into a number of tokens, Ulysses' ranks together.

    They are balanced (`rearrange_micro_batches`).
    """
    actor = (f"{A}ppo_micro_batch_size_per_gpu", f"{A}use_dynamic_bsz", f"{A}ppo_max_token_len_per_gpu")
    sft = ("data.micro_batch_size_per_gpu", "data.use_dynamic_bsz", "data.max_token_len_per_gpu")

    def read(keys: Keys) -> Facts:
        of_actor = has_actor(keys)
        each, dynamic, tokens = actor if of_actor else sft
        if "micro_batch" in keys.given:
            return {"micro_batch": keys.given["micro_batch"]}
        length = _seq_len().read(keys)["seq_len"]
        asked = keys.flag(dynamic) if keys.has(dynamic) else not of_actor
        most = (keys.whole(tokens) or (16_384 if of_actor else 8192)) * sharing(keys)
        if asked and most < length:
            raise keys.wrong(tokens, f"{most} tokens are fewer than a sequence has ({length}), which verl refuses")
        stated = keys.whole(each) or (None if of_actor else 4)
        if not asked and stated is None:
            return {}
        rows = most / length if asked else float(stated or 1)
        layout, gpus = _layout().read(keys), _known_gpus(keys)
        ranks = None if gpus is None else gpus // (layout["tp"] * layout["pp"] * layout["cp"])
        batch = keys.given.get("global_batch") or _batch().read(keys)["global_batch"]
        own = batch // ranks if ranks and batch % ranks == 0 else None
        groups = layout["pp"] if (layout.get("vpp") or 1) > 1 else 1
        said_in = f"up to {most} tokens a micro-batch" if asked else "no whole micro-batches of a rank"
        return {"micro_batch": fitted(keys, tokens if asked else each, rows, own, length, said_in, groups)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        each, dynamic, _ = actor if has_actor(keys) else sft
        values: dict[str, Any] = {dynamic: False} if not has_actor(keys) or keys.has(dynamic) else {}
        return values | {each: facts.get("micro_batch") or 1}

    return Idea(keys=(*actor, *sft), facts=("micro_batch",), read=read, write=write)


def _seq_len() -> Idea:
    prompt, answer, sft = "data.max_prompt_length", "data.max_response_length", "data.max_length"
    longest = (f"{R}prompt_length", f"{R}response_length")

    def read(keys: Keys) -> Facts:
        if not has_actor(keys) or keys.has(sft):
            return {"seq_len": keys.whole(sft) or 1024}
        # What generation is told goes before what it is told by default.
        first, rest = (
            next((size for key in pair if (size := keys.whole(key))), 512)
            for pair in zip(longest, (prompt, answer), strict=True)
        )
        whole: Facts = {"seq_len": first + rest}
        return whole | ({"prompt_len": first, "answers": str(rest)} if verl_step.trains_answers(keys) else {})

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if "prompt_len" in facts:
            # The longest is all that it says of the answers.
            stated = str(facts.get("answers") or "")
            values = {prompt: facts["prompt_len"]} | ({answer: int(stated)} if stated.isdecimal() else {})
            return values | {longest[name == answer]: None for name in values if keys.has(longest[name == answer])}
        if "seq_len" not in facts:
            return {}
        if keys.has(sft) or not has_actor(keys):
            return {sft: facts["seq_len"]}
        first = min(keys.whole(prompt) or 512, facts["seq_len"] // 2)
        return {prompt: first, answer: facts["seq_len"] - first} if first else {}

    return Idea(
        keys=(prompt, answer, sft, *longest), facts=names_in("seq_len prompt_len answers"), read=read, write=write
    )


def _recompute() -> Idea:
    inner = recompute(T, usual="group")
    ours, automodel, titan = (
        f"{W}enable_gradient_checkpointing",
        f"{F}activation_checkpointing",
        f"{F}activation_checkpoint",
    )
    lite = f"{M}impl_cfg.recompute"

    def read(keys: Keys) -> Facts:
        engine = engine_of(keys)
        if engine == "megatron":
            return {"recompute": "full"} if "full" in (keys.words(lite) or []) else inner.read(keys)
        if engine == "torchtitan":
            return {"recompute": {"full": "full", "none": "none"}.get(keys.word(titan) or "", "per-op")}
        if engine == "automodel":
            return {"recompute": "full" if keys.flag(automodel) else "none"}
        return {"recompute": "none" if keys.flag(ours) is False else "full"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if engine_of(keys) == "megatron":
            return inner.write(facts, keys)
        word = facts.get("recompute") or "none"
        key, values = (automodel if engine_of(keys) == "automodel" else ours), {"none": False, "full": True}
        return {key: values[word]} if word in values and engine_of(keys) != "torchtitan" else {}

    return Idea(keys=(ours, automodel, titan, lite, *inner.keys), facts=("recompute",), read=read, write=write)


def _lora() -> Idea:
    """PEFT's adapters under FSDP, Megatron-Bridge's on Megatron's layers."""
    rank, modules, dtype = f"{W}lora_rank", f"{W}target_modules", f"{F}model_dtype"
    of_bridge = (f"{W}lora.rank", f"{W}lora.target_modules")

    def read(keys: Keys) -> Facts:
        number = keys.whole(rank, minimum=0) or 0
        if engine_of(keys) == "megatron":
            number = keys.whole(of_bridge[0], minimum=0) or 0
            chosen = [word for word in keys.words(of_bridge[1]) or TARGETS if word in TARGETS]
            return {"lora_rank": number} | ({"lora_targets": grouped(chosen)} if number else {})
        if not number:
            return {"lora_rank": 0}
        facts = {"lora_rank": number, **layers(modules).read(keys)}
        if keys.word(dtype) not in ("bf16", "bfloat16"):
            # What is trained is loaded in float32 before it is given adapters (`workers/engine/fsdp/transformer_impl.py`).
            facts |= {"precision": "bf16", "weights": "float32"}
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if not facts.get("lora_rank"):
            off = {key: 0 if keys.has(key) else None for key in (rank, of_bridge[0])}
            return off | dict.fromkeys((modules, of_bridge[1]))
        if facts.get("framework") == "megatron" or engine_of(keys) == "megatron":
            named = groups(facts.get("lora_targets") or "all") or None
            return {of_bridge[0]: facts["lora_rank"], of_bridge[1]: named, rank: None, modules: None}
        return {rank: facts["lora_rank"], **layers(modules).write(facts, keys), **dict.fromkeys(of_bridge)}

    return Idea(
        keys=(rank, modules, *of_bridge),
        facts=("lora_rank", "lora_targets", "weights", "precision"),
        read=read,
        write=write,
    )


def _precision() -> Idea:
    """Weights are sharded in float32 and gathered in 16 bits, unless they are loaded in 16."""
    dtype, mixed, half = f"{F}model_dtype", f"{F}mixed_precision", (f"{F}dtype", f"{M}dtype")
    words = {"fp32": "bf16", "float32": "bf16", "bf16": "bf16-pure", "bfloat16": "bf16-pure"}

    def read(keys: Keys) -> Facts:
        engine = engine_of(keys)
        if keys.word(half[engine == "megatron"]) in ("fp16", "float16"):
            return {"precision": "fp16"}
        if engine == "megatron":
            return {}
        if engine == "veomni":
            return {"precision": "bf16-pure" if keys.flag(mixed) is False else "bf16"}
        return {"precision": keys.choice(dtype, words)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        spelled = {"bf16": "fp32", "bf16-pure": "bf16"}.get(facts.get("precision") or "")
        return {dtype: spelled} if spelled and engine_of(keys) != "megatron" else {}

    return Idea(keys=(dtype, mixed, *half), facts=("precision",), read=read, write=write)


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
    programs={
        r"\bmain_gen(?:eration)?\w*\b|\bmain_eval\b": IDLE,
    },
    ideas=(
        row("model", f"{W}path", kind="model"),
        _gpus(),
        _placement,
        _layout(),
        _batch(),
        _micro_batch(),
        _seq_len(),
        loss(),
        liger(),
        _recompute(),
        _lora(),
        _attention(),
        verl_step.task(),
        verl_step.engine(),
        verl_step.log_probs(),
        verl_step.moved(),
        verl_step.critic_batch(),
        _precision(),
        _host(),
        _optimizer(),
        next_tokens(),
    ),
)
