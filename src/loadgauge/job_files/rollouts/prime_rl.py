"""prime-rl's TOML: of `rl` (trainer, orchestrator and inference in one file) and of `sft`.

Defaults are those of 0.8 (`prime_rl/configs/*.py`); keys of 0.2 and later that were renamed are read too. The trainer compares
with the engine's log-probs, so it makes none of its own, and there is no reference.
"""

import re
from typing import Any

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.ideas import (
    MISSING,
    NEAREST,
    STAYS,
    Dialect,
    Facts,
    Keys,
    Named,
    layers,
    lengths,
    product,
    reads,
    row,
    served,
    spec_of,
    spelled,
    split_of,
)

V = "inference.vllm."
TOKENS = "orchestrator.token_batch_size"
ALGORITHMS = dict.fromkeys(("grpo", "max_rl", "rae", "hierarchical_grpo", "echo", "opd", "opsd", "sft"), "grpo")
"""`orchestrator.algo.type` by passes; a teacher is on a server of its own, so that only its log-probs or its answers arrive."""
NAME = "Qwen/Qwen3-0.6B"
"""The model where a file names none (`BaseModelConfig`)."""
DISAGGREGATED = (
    ("prefill_nodes_per_replica", "num_prefill_replicas"),
    ("decode_nodes_per_replica", "num_decode_replicas"),
)
"""Nodes that read prompts, and those that write answers, which are counted as one kind of server."""
CACHES = {"auto": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8", "bfloat16": "bf16"}
TURNS = re.compile(r"'max_turns': (\d+)")
"""Turns that an environment's own arguments allow, wherever they stand among them."""
PROMPT_SHARE = 8
"""One of so many tokens of the longest sequence is the prompt's, where the file does not say how long an answer is."""
ATTENTION = {
    "sdpa": "flash", "eager": "eager", "flash_attention_2": "fa2", "flash_attention_3": "fa3",
    "flash_attention_4": "fa4", "fa4": "fa4",
}  # fmt: skip


def _rl(keys: Keys) -> bool:
    """Return whether a file is of `rl`, and not of `sft`."""
    sections = {key.split(".")[0] for key in keys.document.names()}
    return bool(sections & {"orchestrator", "trainer"}) or ("inference" in sections and not sections & {"data", "eval"})


def _of(keys: Keys, name: str) -> str:
    """A key of the trainer, which `sft` has without its section."""
    return f"trainer.{name}" if _rl(keys) else name


def _both(*names: str) -> tuple[str, ...]:
    return tuple(key for name in names for key in (f"trainer.{name}", name))


def _section(keys: Keys, name: str, *, usual: bool) -> bool:
    """Return whether a part is on that is a section, `true`, `false` or `"None"`; `usual`: where nothing is said."""
    value = keys.document.get(name)
    if value is MISSING:
        return usual
    if isinstance(value, str | bool):
        return str(value).lower() not in ("none", "false", "null", "")
    return True


def _model_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    first = at.own if keys.has(at.own) and not keys.has(at.shared) else at.shared
    return dict.fromkeys((first, *filter(keys.has, at.others)), facts.get("model"))


@reads(
    facts="model",
    write=_model_written,
    shared="model.name",
    own="trainer.model.name",
    others=("orchestrator.model.name", f"{V}model", "inference.model.name"),
)
def _model(keys: Keys, at: Named) -> Facts:
    return {"model": keys.agreed((at.shared, at.own), keys.word) or NAME}


def _gpus_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    split = split_of(facts.get("placement"))
    if _rl(keys) and split is None:
        return {}
    trainer, rollout = split or (facts["gpus"], 0)
    size = keys.whole(at.each) or facts.get("gpus_per_node") or 8
    wide = trainer + rollout > size and trainer % size == 0 and rollout % size == 0
    return {
        at.kind: "multi_node" if wide else "single_node",
        **dict.fromkeys((*at.listed, at.copies)),
        at.each: size if wide else STAYS,
        at.nodes: trainer // size if wide else None,
        at.hosts: rollout // size or None if wide else None,
        at.train: None if wide else trainer,
        at.infer: None if wide else rollout or None,
        **(dict.fromkeys(at.older) | {at.late: facts.get("staleness") or 0} if _rl(keys) else {}),
    }


@reads(
    facts="gpus gpus_per_node placement staleness",
    write=_gpus_written,
    needs="gpus",
    kind="deployment.type",
    each="deployment.gpus_per_node",
    train="deployment.num_train_gpus",
    infer="deployment.num_infer_gpus",
    nodes="deployment.num_train_nodes",
    hosts="deployment.num_infer_nodes",
    copies="deployment.num_infer_replicas",
    late="orchestrator.max_off_policy_steps",
    older=("orchestrator.max_async_level", "max_async_level"),
    listed=("trainer_gpu_ids", "inference_gpu_ids"),
    own=tuple(f"inference.deployment.{name}" for names in DISAGGREGATED for name in names),
    also=("inference.deployment.num_nodes",),
)
def _gpus(keys: Keys, at: Named) -> Facts:
    """GPUs of the trainer, and those of the engines, which are always others; answers may be some updates old."""
    per_node = keys.whole(at.each) or 8
    many = keys.choice(at.kind, {"single_node": False, "multi_node": True})
    if many:
        trainer = (keys.whole(at.nodes) or 1) * per_node
        each_replica = keys.whole(at.hosts, minimum=0)
        each_replica = _inference_nodes(keys) if each_replica is None else each_replica
        rollout = each_replica * per_node * (keys.whole(at.copies) or 1)
    else:
        named = [keys.raw(name) for name in at.listed]
        counts = [len(item) if isinstance(item, list) else None for item in named]
        trainer = counts[0] or keys.whole(at.train) or 1
        rollout = counts[1] or keys.whole(at.infer) or 1
    if not _rl(keys):
        return {"gpus": trainer, "gpus_per_node": per_node if many else None}
    keys.refuse(at.hosts, "says how many nodes generate, and is none", when=not rollout)
    age = keys.agreed((at.late, *at.older), lambda name: keys.whole(name, minimum=0))
    total = trainer + rollout
    return {
        "gpus": total,
        "gpus_per_node": per_node if total % per_node == 0 else None,
        "placement": f"split:{trainer}+{rollout}",
        "staleness": (8 if age is None else age) or None,
    }


def _inference_nodes(keys: Keys) -> int:
    """Nodes of one replica of the servers, by their own deployment (`RLConfig.auto_setup_infer_nodes`)."""
    own = "inference.deployment."
    kind = keys.choice(f"{own}type", {"single_node": 1, "multi_node": 2, "disaggregated": 3}) or 1
    if kind == 2:
        return keys.whole(f"{own}num_nodes") or 2
    parts = [[keys.whole(f"{own}{name}") or 1 for name in names] for names in DISAGGREGATED]
    return sum(first * second for first, second in parts) if kind == 3 else 1


def _task_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    named = keys.word(at.kind)
    wanted = _rl(keys) and facts.get("task") in ("grpo", "dapo")
    return {at.kind: named if named in ALGORITHMS else "grpo"} if wanted else {}


@reads(facts="task reference old_logprobs", write=_task_written, kind="orchestrator.algo.type")
def _task(keys: Keys, at: Named) -> Facts:
    if not _rl(keys):
        return {"task": None}
    keys.note(
        at.kind,
        "takes answers that a server elsewhere makes, where the GPUs for generation are counted to make them",
        when=keys.word(at.kind) == "sft",
    )
    return {"task": keys.choice(at.kind, ALGORITHMS) or "grpo", "reference": "none", "old_logprobs": "none"}


BATCH_BUILT = ("model.seq_len", "data.fake")


def _batch_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    if not _rl(keys):
        return {
            at.sft: facts.get("global_batch") or 1,
            at.micro: facts.get("micro_batch") or 1,
            at.length: facts.get("seq_len") or 2048,
        }
    prompts = facts.get("prompts")
    samples = facts.get("samples") or 1
    most = str(facts.get("answers") or "")
    total = facts["prompt_len"] + int(most) if most.isdecimal() and facts.get("prompt_len") else STAYS
    return {
        at.whole: prompts * samples if prompts else STAYS,
        at.older if keys.has(at.older) else at.group: samples if prompts else STAYS,
        next(filter(keys.has, at.answer), at.answer[0]): STAYS if total is STAYS else int(most),
        **dict.fromkeys(filter(keys.has, (at.own, at.shown)), total),
        at.shared: total,
    }


@reads(
    facts="global_batch micro_batch seq_len prompts samples prompt_len answers epochs",
    write=_batch_written,
    whole="orchestrator.batch_size",
    group="orchestrator.group_size",
    older="orchestrator.rollouts_per_example",
    sft="data.batch_size",
    micro="data.micro_batch_size",
    length="data.seq_len",
    shared="seq_len",
    own="orchestrator.seq_len",
    shown="trainer.model.seq_len",
    answer=("orchestrator.train.sampling.max_completion_tokens", "orchestrator.sampling.max_tokens"),
    environments=("orchestrator.train.source", "orchestrator.train.env", "orchestrator.env"),
    fake=("data.fake.batch_size", "trainer.data.fake.batch_size"),
    also=(BATCH_BUILT[0],),
)
def _batch(keys: Keys, at: Named) -> Facts:
    """Sequences of a step, all of one update; micro-batches are packed to `seq_len`."""
    if not _rl(keys) and keys.document.get(BATCH_BUILT[1]) is not MISSING:  # the trainer of answers by itself
        return {
            "global_batch": keys.whole(at.fake[0]) or 2,
            "micro_batch": 1,
            "seq_len": keys.whole(BATCH_BUILT[0]) or 2048,
        }
    if not _rl(keys):
        return {
            "global_batch": keys.whole(at.sft) or 128,
            "micro_batch": keys.whole(at.micro) or 1,
            "seq_len": keys.whole(at.length) or 128,
        }
    number, each = keys.whole(at.whole), keys.agreed((at.group, at.older), keys.whole) or 1
    longest = keys.agreed((at.shared, at.own), keys.whole) or 2048
    if number is None:
        # So many tokens are as many answers of the longest kind.
        tokens = keys.whole(TOKENS)
        number = 128 if tokens is None else max(1, round(tokens / longest / each)) * each
    prompts, left = divmod(number, each)
    keys.refuse(at.whole, f"{number} answers are no whole groups of {each}", when=left)
    for listed in at.environments:
        turns = max(map(int, TURNS.findall(str(keys.raw(listed)))), default=1)
        keys.note(
            listed,
            f"its environments take up to {turns} turns, each with an answer of its own, and one answer is counted",
            "costs",
            when=turns > 1,
            bare=True,
        )
    rest = keys.agreed(at.answer, keys.whole)
    unsaid = rest is None or rest >= longest
    first = max(1, longest // PROMPT_SHARE) if unsaid else longest - (rest or 0)
    return {
        "global_batch": number,
        "prompts": prompts,
        "samples": each,
        "micro_batch": 1,
        "epochs": 1,
        **lengths(keys, first, longest - first, taken=unsaid),
    }


COPIES, SPREAD, QUANTISED = (f"{V}{name}" for name in ("data_parallel_size", "enable_expert_parallel", "quantization"))
OPTIONS = product(
    row("tp", f"{V}tensor_parallel_size", "inference.parallel.tp", default=1),
    row("utilization", f"{V}gpu_memory_utilization", "inference.gpu_memory_utilization", kind="real", default=0.9),
    row("context", f"{V}max_model_len", "inference.model.max_model_len"),
    row(
        "graphs",
        f"{V}enforce_eager",
        "inference.model.enforce_eager",
        words={"true": False, "false": True},
        default=True,
    ),
    row("prefix", f"{V}enable_prefix_caching", words={"true": True, "false": False}, default=True, off=True),
    row("max_num_seqs", f"{V}max_num_seqs", quiet=Engine.parse("vllm").max_num_seqs),
    row("max_batched_tokens", f"{V}max_num_batched_tokens", quiet=Engine.parse("vllm").max_batched_tokens),
    row("kv", f"{V}kv_cache_dtype", words=CACHES, default="bf16", off="bf16"),
)


def _engine_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    engine, split = Engine.parse(facts.get("rollout") or "vllm"), split_of(facts.get("placement"))
    if not _rl(keys) or engine.kind != "vllm" or engine.pp > 1 or engine.weights not in ("bf16", "fp8"):
        return {}
    copies = engine.ep // engine.tp if engine.ep > engine.tp else None
    if copies is None and split is not None and not keys.has(*at.dp):
        copies = max(1, split[1] // engine.replica)
    return OPTIONS.write({name: getattr(engine, name) for name in OPTIONS.facts}, keys) | {
        next(filter(keys.has, at.dp), at.dp[0]): copies,
        SPREAD: True if engine.ep > 1 else None,
        QUANTISED: "fp8" if engine.weights == "fp8" else None,
    }


@reads(
    *OPTIONS.keys[:2],
    facts="rollout",
    write=_engine_written,
    when=_rl,
    dp=(COPIES, "inference.parallel.dp"),
    most="orchestrator.concurrency.max_inflight",
    handed="weight_broadcast.type",
    also=(*OPTIONS.keys[2:], QUANTISED, SPREAD, f"{V}dtype"),
)
def _engine(keys: Keys, at: Named) -> Facts:
    """vLLM on GPUs of its own, which never sleeps; data-parallel ranks of attention are replicas but for experts."""
    options, copies, spread = OPTIONS.read(keys), keys.agreed(at.dp, keys.whole), keys.flag(SPREAD)
    kind = keys.choice(
        "inference.deployment.type", dict.fromkeys(("single_node", "multi_node"), 0) | {"disaggregated": 1}
    )
    if copies is None and (spread or kind):
        # Ranks of one replica fill its GPUs (`RLConfig.auto_setup_deployment`, `InferenceConfig.auto_setup_disaggregated`).
        nodes = (keys.whole(f"inference.deployment.{DISAGGREGATED[1][0]}") or 1) if kind else 1
        size = keys.whole("deployment.gpus_per_node") or 8
        many = keys.word("deployment.type") == "multi_node"
        gpus = size * nodes if kind or many else keys.whole("deployment.num_infer_gpus") or 1
        copies = max(1, gpus // options["tp"])
    ranks, loaded = (copies or 1) * options["tp"], (keys.word(f"{V}model") or "").lower()
    wide = (spread or (kind and spread is None)) and ranks > 1
    small = keys.choice(QUANTISED, {"fp8": "fp8"}) or ("fp8" if loaded.endswith("-fp8") else "bf16")
    # Answers go on at an update, whatever it is (`orchestrator.max_off_policy_steps`).
    adapts = keys.has("trainer.model.lora.rank", "model.lora.rank")  # files of adapters alone
    sent = None if adapts else {"filesystem": "disk", "nccl": "nccl", "nixl": "nccl"}.get(keys.word(at.handed) or "")
    begun = keys.whole(at.most) or (1024 if keys.since(0, 8) else None)  # `ConcurrencyConfig.max_inflight`
    late = {"partial": True, "inflight": begun} if _gpus.read(keys).get("staleness") else {}
    return {"rollout": served("vllm", options | {"weights": small, "ep": ranks if wide else None, "sync": sent} | late)}


def _experts_shared(document: Any, copies: str) -> int:
    """Ranks that share the experts by themselves: at most 8 of those that share the weights (`ModelConfig.ep`)."""
    keys: Keys = document.keys  # by the file's own names, and not the trainer's
    placed = _gpus.read(keys)
    ranks = (split_of(placed.get("placement")) or (keys.given.get("gpus") or placed["gpus"], 0))[0]
    spec = spec_of(keys, "trainer.model.name" if keys.has("trainer.model.name") else "model.name")
    return 1 if spec is None or not spec.has_experts else min(ranks // (keys.whole(_of(keys, copies)) or 1), 8)


def _trainer_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    kind, _, step = (facts.get("recompute") or "none").partition(":every=")
    name, out = facts.get("precision") or "bf16", facts.get("offload") or "none"
    size, width, wider = facts.get("cp") or 1, facts.get("ep") or 1, facts.get("replicas") or 1
    if (facts.get("tp") or 1, facts.get("pp") or 1) != (1, 1) or kind not in ("none", "full"):
        return {}
    spelled = next((word for word, ours in ATTENTION.items() if ours == facts.get("attention")), None)
    off = kind == "none"
    hosted = facts.get("activation_offload") == "checkpoints"
    return {
        at.cp: size if size > 1 else None,
        at.style: {"all_to_all": "ulysses"}.get(facts.get("cp_comm") or "") if size > 1 else None,
        at.ep: width if width > 1 else None,
        at.copies: wider if wider > 1 else None,
        at.reshard: False if facts.get("zero") == 2 else None,
        at.moved: True if out == "all" else None,
        at.waits: STAYS if not keys.since(0, 7) else None if out == "states" else False,
        at.dtype: "bfloat16" if name in ("bf16-pure", "bf16-pure-32") else None,
        at.reduced: "bfloat16" if name == "bf16-pure" else None,
        at.attn: spelled,
        at.mode: None if off else STAYS,
        at.every: None if off else int(step or 1),
        at.ac: "None" if off else STAYS,
        at.offloaded: None if hosted and not off else "None",
        at.compiled: None if facts.get("compile") else "None",
    }


def _of_the_card(keys: Keys) -> str | None:
    """Return what `auto` chooses by the card's compute capability (`resolve_auto_attn`), None where no card is known; before it,
    FlashAttention-2 was the default."""
    from loadgauge.core.definitions.hardware.hardware import gpu

    named = keys.given.get("gpu")
    if named is None or not keys.since(0, 8):
        return None if keys.since(0, 8) else "fa2"
    capability = gpu(named).compute_capability
    return "fa4" if capability == "10.0" else "fa3" if capability.startswith("9.") else "fa2"


@reads(
    facts="framework zero cp cp_comm ep replicas offload recompute activation_offload precision compile attention tp pp",
    write=_trainer_written,
    cp="model.cp",
    style="model.cp_style",
    ep="model.ep",
    copies="model.dp_replicate",
    reshard="model.reshard_after_forward",
    moved="model.fsdp_cpu_offload",
    mode="model.ac.mode",
    every="model.ac.freq",
    targets="model.ac.targets",
    ac="model.ac",
    offloaded="model.ac_offloading",
    beside=("model.ac_offloading.max_inflight_activations", "model.ac_offloading.pin_memory"),
    dtype="model.optimization_dtype",
    reduced="model.reduce_dtype",
    compiled="model.compile",
    whole="model.compile.fullgraph",
    attn="model.attn",
    everything="model.full_offload",
    waits="model.optim_cpu_offload",
)
def _trainer(keys: Keys, at: Named) -> Facts:
    """FSDP2 over float32 weights gathered in 16 bits; what is checkpointed, and states between updates, are on the host unless
    that is switched off (`CPUOffloadOptimizer`)."""
    ranks = keys.whole(at.cp) or 1
    again = _section(keys, at.ac, usual=True)
    keys.note(
        at.mode,
        "keeps parts of layers by name; whole layers are counted again",
        "costs",
        "activations",
        10,
        when=again and keys.choice(at.mode, {"full": "full", "selective": "selective"}) == "selective",
    )
    step = keys.whole(at.every) or 1
    word = f"full:every={step}" if step > 1 else "full"
    host = _section(keys, at.everything, usual=False)
    waits = keys.flag(at.waits) is not False and keys.since(0, 7)
    narrow, reduced = (keys.choice(key, {"float32": False, "bfloat16": True}) for key in (at.dtype, at.reduced))
    keys.note(
        at.reduced,
        "keeps gradients in another format than float32 where they are summed",
        "saves",
        "gradients transient",
        0.5,
        when=reduced and not narrow,
    )
    experts = keys.raw(at.ep)
    width = keys.whole(at.ep) or 1 if experts not in (None, "auto") else _experts_shared(keys.document, at.copies)
    return {
        "framework": "torchtitan",
        "zero": 2 if keys.flag(at.reshard) is False else 3,
        "cp": ranks,
        "cp_comm": (keys.choice(at.style, {"ring": "ring", "ulysses": "all_to_all"}) or "ring") if ranks > 1 else None,
        "ep": width,
        "replicas": keys.whole(at.copies),
        "offload": "all" if keys.flag(at.moved) else "optimizer" if host else "states" if waits else "none",
        "recompute": word if again else "none",
        "activation_offload": "checkpoints" if again and _section(keys, at.offloaded, usual=True) else None,
        # With the whole optimizer on the host 16-bit weights are on the card, and float32 ones beside its states.
        "precision": "bf16-mixed-16" if host else "bf16" if not narrow else "bf16-pure" if reduced else "bf16-pure-32",
        "compile": _section(keys, at.compiled, usual=True),
        "attention": _of_the_card(keys)
        if keys.raw(at.attn) in (None, "auto")
        else keys.choice(at.attn, ATTENTION, NEAREST["attention"]),
        "tp": 1,
        "pp": 1,
    }


ADAPTER_RANK, ADAPTER_MODULES, ADAPTER_DROPPED, ADAPTER_SAVED = (
    f"model.lora.{name}" for name in ("rank", "target_modules", "dropout", "modules_to_save")
)
ADAPTER_SECTION = "model.lora"
ADAPTER_EVERY = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def _adapter_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    rank = facts.get("lora_rank")
    kept = facts.get("modules_to_save")
    names = (ADAPTER_RANK, ADAPTER_MODULES, ADAPTER_DROPPED, ADAPTER_SAVED, ADAPTER_SECTION)
    if not rank:
        there = keys.document.get(_of(keys, ADAPTER_SECTION)) is not MISSING
        return {_of(keys, name): None for name in names} if there else {}
    return {
        _of(keys, ADAPTER_RANK): rank,
        **layers(_of(keys, ADAPTER_MODULES), None).write(facts, keys),
        _of(keys, ADAPTER_DROPPED): facts.get("lora_dropout"),
        _of(keys, ADAPTER_SAVED): kept.split(",") if kept else None,
        **dict.fromkeys(filter(keys.has, at.others), rank),
    }


@reads(
    *_both(ADAPTER_RANK, ADAPTER_MODULES, ADAPTER_DROPPED, ADAPTER_SAVED, ADAPTER_SECTION),
    facts="adapter qlora lora_rank lora_targets lora_dropout modules_to_save",
    write=_adapter_written,
    can={"adapter": ("lora",), "qlora": (False,)},
    others=("orchestrator.model.lora.rank", f"{V}max_lora_rank"),
)
def _adapter(keys: Keys, at: Named) -> Facts:
    if not _section(keys, _of(keys, ADAPTER_SECTION), usual=False):
        return {"lora_rank": 0}
    chosen = keys.words(_of(keys, ADAPTER_MODULES))
    everything = chosen is None or set(chosen) >= ADAPTER_EVERY
    return {
        "lora_rank": keys.whole(_of(keys, ADAPTER_RANK)) or 16,
        "lora_targets": "all" if everything else ",".join(chosen or ()),
        "lora_dropout": keys.real(_of(keys, ADAPTER_DROPPED)) or None,
        "modules_to_save": ",".join(keys.words(_of(keys, ADAPTER_SAVED)) or ()) or None,
    }


OPTIMIZER_KIND = "optim.type"
OPTIMIZER_SORTS = {"adamw": "adamw", "muon": "muon", "sgd": "sgd-momentum", "sign_sgd": "sgd"}


def _optimizer_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    names = facts["optimizer"], facts["optimizer"].partition("-")[0]
    words = [word for name in names for word, ours in OPTIMIZER_SORTS.items() if ours == name]
    return {_of(keys, OPTIMIZER_KIND): words[0]} if words else {}


@reads(*_both(OPTIMIZER_KIND), facts="optimizer", write=_optimizer_written)
def _optimizer(keys: Keys) -> Facts:
    kind = keys.choice(_of(keys, OPTIMIZER_KIND), OPTIMIZER_SORTS) or "adamw"
    whole = _section(keys, _of(keys, "model.full_offload"), usual=False) or keys.flag(
        _of(keys, "model.fsdp_cpu_offload")
    )
    alone = not whole and keys.flag(_of(keys, "model.optim_cpu_offload")) is not False
    # `fused=False`, which `_create_optimizer` says, is one parameter at a time; before, PyTorch chose lists of them.
    step = "foreach" if not keys.since(0, 8, 1) else "loop" if alone else "fused"
    return {"optimizer": f"adamw-{step}" if kind == "adamw" else kind}


LOSS_KEY, LOSS_OFF = "model.fused_lm_head_token_chunk_size", "disabled"


def _length(keys: Keys) -> int:
    if not _rl(keys):
        size = keys.given.get("micro_batch") or keys.whole("data.micro_batch_size") or 1
        return (keys.whole("data.seq_len") or 128) * size
    return keys.agreed(("seq_len", "orchestrator.seq_len"), keys.whole) or 2048


def _loss_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    wanted, _, pieces = (facts.get("loss") or "").partition(":")
    if wanted == "chunked":
        return {_of(keys, LOSS_KEY): -(-_length(keys) // int(pieces or 1))}
    return {_of(keys, LOSS_KEY): LOSS_OFF} if wanted in ("float32", "plain") and not pieces else {}


@reads(*_both(LOSS_KEY), facts="loss", write=_loss_written)
def _loss(keys: Keys) -> Facts:
    """The head and its loss, so many tokens at a time."""
    if keys.raw(_of(keys, LOSS_KEY)) == LOSS_OFF:
        return {"loss": "float32"}
    size = keys.whole(_of(keys, LOSS_KEY)) or 8192
    return {"loss": f"chunked:{max(1, -(-_length(keys) // (size * (keys.whole(_of(keys, 'model.cp')) or 1))))}"}


PRIME_RL = Dialect(
    name="prime-rl",
    title="prime-rl",
    versions="prime-rl 0.2 - 0.8",
    syntaxes=("toml",),
    framework="torchtitan",
    blank={"toml": "[data]\n"},
    blanks=dict.fromkeys(("grpo", "dapo"), "[orchestrator]\n"),
    ideas=(
        _model,
        _gpus,
        _task,
        _batch,
        _engine,
        spelled(_trainer, _of, _both),
        _adapter,
        _optimizer,
        _loss,
    ),
)
