"""prime-rl's TOML: of `rl` (trainer, orchestrator and inference in one file) and of `sft`.

Defaults are those of 0.8 (`prime_rl/configs/*.py`); keys of 0.2 and later that were renamed are read too. The trainer compares
with the engine's log-probs, so it makes none of its own, and there is no reference.
"""

from __future__ import annotations

from typing import Any

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.ideas import (
    MISSING,
    NEAREST,
    Dialect,
    Facts,
    Idea,
    Keys,
    layers,
    lengths,
    names_in,
    spec_of,
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
PROMPT_SHARE = 8
"""One of so many tokens of the longest sequence is the prompt's, where the file does not say how long an answer is."""
ATTENTION = {
    "auto": "flash", "sdpa": "flash", "eager": "eager", "flash_attention_2": "fa2", "flash_attention_3": "fa3",
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


def _model() -> Idea:
    shared, own = "model.name", "trainer.model.name"
    others = ("orchestrator.model.name", f"{V}model", "inference.model.name")

    return Idea(
        keys=(shared, own, *others),
        facts=("model",),
        read=lambda keys: {"model": keys.agreed((shared, own), keys.word) or NAME},
        write=lambda facts, keys: dict.fromkeys(
            (own if keys.has(own) and not keys.has(shared) else shared, *(name for name in others if keys.has(name))),
            facts.get("model"),
        ),
    )


def _gpus() -> Idea:
    """GPUs of the trainer, and those of the engines, which are always others; answers may be some updates old."""
    kind, each = "deployment.type", "deployment.gpus_per_node"
    train, infer, nodes, hosts, copies = (
        f"deployment.{name}"
        for name in ("num_train_gpus", "num_infer_gpus", "num_train_nodes", "num_infer_nodes", "num_infer_replicas")
    )
    late, older = "orchestrator.max_off_policy_steps", ("orchestrator.max_async_level", "max_async_level")
    listed = ("trainer_gpu_ids", "inference_gpu_ids")

    def read(keys: Keys) -> Facts:
        per_node = keys.whole(each) or 8
        many = keys.choice(kind, {"single_node": False, "multi_node": True})
        if many:
            trainer = (keys.whole(nodes) or 1) * per_node
            each_replica = keys.whole(hosts, minimum=0)
            each_replica = _inference_nodes(keys) if each_replica is None else each_replica
            rollout = each_replica * per_node * (keys.whole(copies) or 1)
        else:
            named = [keys.raw(name) for name in listed]
            counts = [len(item) if isinstance(item, list) else None for item in named]
            trainer = counts[0] or keys.whole(train) or 1
            rollout = counts[1] or keys.whole(infer) or 1
        if not _rl(keys):
            return {"gpus": trainer, "gpus_per_node": per_node if many else None}
        if not rollout:
            raise keys.wrong(hosts, "says how many nodes generate, and is none")
        age = keys.agreed((late, *older), lambda name: keys.whole(name, minimum=0))
        total = trainer + rollout
        return {
            "gpus": total,
            "gpus_per_node": per_node if total % per_node == 0 else None,
            "placement": f"split:{trainer}+{rollout}",
            "staleness": (8 if age is None else age) or None,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if "gpus" not in facts:
            return {}
        split = split_of(facts.get("placement"))
        if _rl(keys) and split is None:
            return {}
        trainer, rollout = split or (facts["gpus"], 0)
        size = keys.whole(each) or facts.get("gpus_per_node") or 8
        wide = trainer + rollout > size and trainer % size == 0 and rollout % size == 0
        values: dict[str, Any] = {kind: "multi_node" if wide else "single_node", **dict.fromkeys((*listed, copies))}
        if wide:
            values |= {each: size, nodes: trainer // size, hosts: rollout // size or None, train: None, infer: None}
        else:
            values |= {train: trainer, infer: rollout or None, nodes: None, hosts: None}
        if _rl(keys):
            values |= dict.fromkeys(older) | {late: facts.get("staleness") or 0}
        return values

    own = tuple(f"inference.deployment.{name}" for names in DISAGGREGATED for name in names)
    return Idea(
        keys=(
            kind,
            each,
            train,
            infer,
            nodes,
            hosts,
            copies,
            late,
            *older,
            *listed,
            *own,
            "inference.deployment.num_nodes",
        ),
        facts=names_in("gpus gpus_per_node placement staleness"),
        read=read,
        write=write,
    )


def _inference_nodes(keys: Keys) -> int:
    """Nodes of one replica of the servers, by their own deployment (`RLConfig.auto_setup_infer_nodes`)."""
    own = "inference.deployment."
    kind = keys.choice(f"{own}type", {"single_node": 1, "multi_node": 2, "disaggregated": 3}) or 1
    if kind == 2:
        return keys.whole(f"{own}num_nodes") or 2
    parts = [[keys.whole(f"{own}{name}") or 1 for name in names] for names in DISAGGREGATED]
    return sum(first * second for first, second in parts) if kind == 3 else 1


def _task() -> Idea:
    kind = "orchestrator.algo.type"

    def read(keys: Keys) -> Facts:
        if not _rl(keys):
            return {"task": None}
        return {"task": keys.choice(kind, ALGORITHMS) or "grpo", "reference": "none", "old_logprobs": "none"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        task, named = facts.get("task"), keys.word(kind)
        if not _rl(keys) or task not in ("grpo", "dapo"):
            return {}
        return {kind: named if named in ALGORITHMS else "grpo"}

    return Idea(keys=(kind,), facts=names_in("task reference old_logprobs"), read=read, write=write)


def _batch() -> Idea:
    """Sequences of a step, all of one update; micro-batches are packed to `seq_len`."""
    whole, group, older = "orchestrator.batch_size", "orchestrator.group_size", "orchestrator.rollouts_per_example"
    sft, micro, length = "data.batch_size", "data.micro_batch_size", "data.seq_len"
    fake, built = ("data.fake.batch_size", "trainer.data.fake.batch_size"), ("model.seq_len", "data.fake")
    shared, own, shown = "seq_len", "orchestrator.seq_len", "trainer.model.seq_len"
    answer = ("orchestrator.train.sampling.max_completion_tokens", "orchestrator.sampling.max_tokens")

    def read(keys: Keys) -> Facts:
        if not _rl(keys) and keys.document.get(built[1]) is not MISSING:  # the trainer of answers by itself
            return {"global_batch": keys.whole(fake[0]) or 2, "micro_batch": 1, "seq_len": keys.whole(built[0]) or 2048}
        if not _rl(keys):
            return {
                "global_batch": keys.whole(sft) or 128,
                "micro_batch": keys.whole(micro) or 1,
                "seq_len": keys.whole(length) or 128,
            }
        number, each = keys.whole(whole), keys.agreed((group, older), keys.whole) or 1
        longest = keys.agreed((shared, own), keys.whole) or 2048
        if number is None:
            # So many tokens are as many answers of the longest kind.
            tokens = keys.whole(TOKENS)
            number = 128 if tokens is None else max(1, round(tokens / longest / each)) * each
        prompts, left = divmod(number, each)
        if left:
            raise keys.wrong(whole, f"{number} answers are no whole groups of {each}")
        rest = keys.agreed(answer, keys.whole)
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

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if not _rl(keys):
            return {
                sft: facts.get("global_batch") or 1,
                micro: facts.get("micro_batch") or 1,
                length: facts.get("seq_len") or 2048,
            }
        values: dict[str, Any] = {}
        if facts.get("prompts"):
            name = older if keys.has(older) else group
            values |= {whole: facts["prompts"] * (facts.get("samples") or 1), name: facts.get("samples") or 1}
        most = str(facts.get("answers") or "")
        if most.isdecimal() and facts.get("prompt_len"):
            total = facts["prompt_len"] + int(most)
            stated = next((name for name in answer if keys.has(name)), answer[0])
            values |= {stated: int(most), **{name: total for name in (own, shown) if keys.has(name)}, shared: total}
        return values

    return Idea(
        keys=(whole, group, older, sft, micro, length, shared, own, shown, *answer, *fake, built[0]),
        facts=names_in("global_batch micro_batch seq_len prompts samples prompt_len answers epochs"),
        read=read,
        write=write,
    )


def _engine() -> Idea:
    """vLLM on GPUs of its own, which never sleeps; data-parallel ranks of attention are replicas but for experts."""
    tp, dp = (f"{V}tensor_parallel_size", "inference.parallel.tp"), (f"{V}data_parallel_size", "inference.parallel.dp")
    share = (f"{V}gpu_memory_utilization", "inference.gpu_memory_utilization")
    longest = (f"{V}max_model_len", "inference.model.max_model_len")
    eager, quantised = (f"{V}enforce_eager", "inference.model.enforce_eager"), f"{V}quantization"
    spread, prefixes, dtype = f"{V}enable_expert_parallel", f"{V}enable_prefix_caching", f"{V}dtype"
    most, cache = (
        {"max_num_seqs": f"{V}max_num_seqs", "max_batched_tokens": f"{V}max_num_batched_tokens"},
        f"{V}kv_cache_dtype",
    )

    def read(keys: Keys) -> Facts:
        if not _rl(keys):
            return {}
        ranks, copies = keys.agreed(tp, keys.whole) or 1, keys.agreed(dp, keys.whole)
        kind = keys.choice(
            "inference.deployment.type", dict.fromkeys(("single_node", "multi_node"), 0) | {"disaggregated": 1}
        )
        if copies is None and (keys.flag(spread) or kind):
            # Ranks of one replica fill its GPUs (`RLConfig.auto_setup_deployment`, `InferenceConfig.auto_setup_disaggregated`).
            nodes = (keys.whole(f"inference.deployment.{DISAGGREGATED[1][0]}") or 1) if kind else 1
            size = keys.whole("deployment.gpus_per_node") or 8
            many = keys.word("deployment.type") == "multi_node"
            copies = max(1, (size * nodes if kind or many else keys.whole("deployment.num_infer_gpus") or 1) // ranks)
        copies = copies or 1
        used, context = keys.agreed(share, keys.real), keys.agreed(longest, keys.whole)
        named = (keys.word(f"{V}model") or "").lower()
        options: dict[str, Any] = {
            "tp": ranks,
            "utilization": 0.9 if used is None else used,
            "graphs": "false" if keys.agreed(eager, keys.flag) else "true",
            "prefix": "false" if keys.flag(prefixes) is False else "true",
            "weights": keys.choice(quantised, {"fp8": "fp8"}) or ("fp8" if named.endswith("-fp8") else "bf16"),
        }
        if (keys.flag(spread) or (kind and keys.flag(spread) is None)) and copies * ranks > 1:
            options["ep"] = copies * ranks
        if context:
            options["context"] = context
        options |= {name: number for name, key in most.items() if (number := keys.whole(key)) is not None}
        options["kv"] = (
            keys.choice(cache, {"auto": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8", "bfloat16": "bf16"}) or "bf16"
        )
        text = "vllm:" + ",".join(f"{name}={value}" for name, value in options.items())
        return {"rollout": Engine.parse(text).text()}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        engine = Engine.parse(facts.get("rollout") or "vllm")
        if not _rl(keys) or engine.kind != "vllm" or engine.pp > 1 or engine.weights not in ("bf16", "fp8"):
            return {}

        def at(names: tuple[str, ...]) -> str:
            return next((name for name in names if keys.has(name)), names[0])

        copies, plain = engine.ep // engine.tp if engine.ep > engine.tp else None, Engine.parse("vllm")
        split = split_of(facts.get("placement"))
        if copies is None and split is not None and not keys.has(*dp):
            copies = max(1, split[1] // engine.replica)
        return {
            at(tp): engine.tp,
            at(dp): copies,
            at(share): engine.utilization,
            at(eager): not engine.graphs,
            at(longest): engine.context,
            spread: True if engine.ep > 1 else None,
            prefixes: None if engine.prefix else False,
            quantised: "fp8" if engine.weights == "fp8" else None,
            cache: "fp8" if engine.kv == "fp8" else None,
            **{
                key: getattr(engine, name)
                for name, key in most.items()
                if getattr(engine, name) != getattr(plain, name)
            },
        }

    return Idea(
        keys=(*tp, *dp, *share, *longest, *eager, quantised, spread, prefixes, dtype, *most.values(), cache),
        facts=("rollout",),
        read=read,
        write=write,
    )


def _experts_shared(keys: Keys, copies: str) -> int:
    """Ranks that share the experts by themselves: at most 8 of those that share the weights (`ModelConfig.ep`)."""
    placed = _gpus().read(keys)
    ranks = (split_of(placed.get("placement")) or (keys.given.get("gpus") or placed["gpus"], 0))[0]
    spec = spec_of(keys, "trainer.model.name" if keys.has("trainer.model.name") else "model.name")
    return 1 if spec is None or not spec.has_experts else min(ranks // (keys.whole(_of(keys, copies)) or 1), 8)


def _trainer() -> Idea:
    """FSDP2 over float32 weights gathered in 16 bits; what is checkpointed is on the host unless that is switched off."""
    names = (
        "model.cp",
        "model.cp_style",
        "model.ep",
        "model.dp_replicate",
        "model.reshard_after_forward",
        "model.fsdp_cpu_offload",
        "model.ac.mode",
        "model.ac.freq",
        "model.ac.targets",
        "model.ac",
        "model.ac_offloading",
        "model.ac_offloading.max_inflight_activations",
        "model.ac_offloading.pin_memory",
        "model.optimization_dtype",
        "model.compile",
        "model.compile.fullgraph",
        "model.attn",
        "model.full_offload",
    )
    cp, style, ep, copies, reshard, moved, mode, every, _, ac, offloaded, _, _, dtype, compiled, _, attn, everything = (
        names
    )

    def read(keys: Keys) -> Facts:
        ranks = keys.whole(_of(keys, cp)) or 1
        again = _section(keys, _of(keys, ac), usual=True)
        word = "full"
        if again and keys.choice(_of(keys, mode), {"full": "full", "selective": "selective"}) == "selective":
            keys.note(
                _of(keys, mode),
                "keeps parts of layers by name; whole layers are counted again",
                "costs",
                "activations",
                10,
            )
        step = keys.whole(_of(keys, every)) or 1
        if again and step > 1:
            word = f"full:every={step}"
        host = _section(keys, _of(keys, everything), usual=False)
        experts = keys.raw(_of(keys, ep))
        width = keys.whole(_of(keys, ep)) or 1 if experts not in (None, "auto") else _experts_shared(keys, copies)
        return {
            "framework": "torchtitan",
            "zero": 2 if keys.flag(_of(keys, reshard)) is False else 3,
            "cp": ranks,
            "cp_comm": (keys.choice(_of(keys, style), {"ring": "ring", "ulysses": "all_to_all"}) or "ring")
            if ranks > 1
            else None,
            "ep": width,
            "replicas": keys.whole(_of(keys, copies)),
            "offload": "all" if keys.flag(_of(keys, moved)) else "optimizer" if host else "none",
            "recompute": word if again else "none",
            "activation_offload": "checkpoints" if again and _section(keys, _of(keys, offloaded), usual=True) else None,
            # With the whole optimizer on the host 16-bit weights are on the card, and float32 ones beside its states.
            "precision": "bf16-mixed-16"
            if host
            else keys.choice(_of(keys, dtype), {"float32": "bf16", "bfloat16": "bf16-pure"}) or "bf16",
            "compile": _section(keys, _of(keys, compiled), usual=True),
            "attention": keys.choice(_of(keys, attn), ATTENTION, NEAREST["attention"]),
            "tp": 1,
            "pp": 1,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        kind, _, step = (facts.get("recompute") or "none").partition(":every=")
        name, out = facts.get("precision") or "bf16", facts.get("offload") or "none"
        size, width, wider = facts.get("cp") or 1, facts.get("ep") or 1, facts.get("replicas") or 1
        if (facts.get("tp") or 1, facts.get("pp") or 1) != (1, 1) or kind not in ("none", "full"):
            return {}
        spelled = next((word for word, ours in ATTENTION.items() if ours == facts.get("attention")), None)
        values: dict[str, Any] = {
            cp: size if size > 1 else None,
            style: {"all_to_all": "ulysses"}.get(facts.get("cp_comm") or "") if size > 1 else None,
            ep: width if width > 1 else None,
            copies: wider if wider > 1 else None,
            reshard: False if facts.get("zero") == 2 else None,
            moved: True if out == "all" else None,
            dtype: "bfloat16" if name == "bf16-pure" else None,
            attn: None if spelled == "auto" else spelled,
        }
        if kind == "none":
            values |= {mode: None, every: None, ac: "None", offloaded: "None"}
        else:
            values |= {every: int(step or 1)}
            values[offloaded] = None if facts.get("activation_offload") == "checkpoints" else "None"
        values[compiled] = None if facts.get("compile") else "None"
        return {_of(keys, key): value for key, value in values.items()}

    return Idea(
        keys=_both(*names),
        facts=names_in(
            "framework zero cp cp_comm ep replicas offload recompute activation_offload precision compile attention tp pp"
        ),
        read=read,
        write=write,
    )


def _adapter() -> Idea:
    rank, modules, dropped, saved = (
        f"model.lora.{name}" for name in ("rank", "target_modules", "dropout", "modules_to_save")
    )
    section, others = "model.lora", ("orchestrator.model.lora.rank", f"{V}max_lora_rank")
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

    def read(keys: Keys) -> Facts:
        if not _section(keys, _of(keys, section), usual=False):
            return {"lora_rank": 0}
        chosen = keys.words(_of(keys, modules))
        everything = chosen is None or set(chosen) >= every
        return {
            "lora_rank": keys.whole(_of(keys, rank)) or 16,
            "lora_targets": "all" if everything else ",".join(chosen or ()),
            "lora_dropout": keys.real(_of(keys, dropped)) or None,
            "modules_to_save": ",".join(keys.words(_of(keys, saved)) or ()) or None,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if (facts.get("adapter") or "lora") != "lora" or facts.get("qlora"):
            return {}
        if not facts.get("lora_rank"):
            there = keys.document.get(_of(keys, section)) is not MISSING
            return {_of(keys, name): None for name in (rank, modules, dropped, saved, section)} if there else {}
        kept = facts.get("modules_to_save")
        return {
            _of(keys, rank): facts["lora_rank"],
            **layers(_of(keys, modules), None).write(facts, keys),
            _of(keys, dropped): facts.get("lora_dropout"),
            _of(keys, saved): kept.split(",") if kept else None,
        } | {name: facts["lora_rank"] for name in others if keys.has(name)}

    return Idea(
        keys=(*_both(rank, modules, dropped, saved, section), *others),
        facts=names_in("adapter qlora lora_rank lora_targets lora_dropout modules_to_save"),
        read=read,
        write=write,
    )


def _optimizer() -> Idea:
    kind, moved = "optim.type", "model.optim_cpu_offload"
    sorts = {"adamw": "adamw", "muon": "muon", "sgd": "sgd-momentum", "sign_sgd": "sgd"}

    def read(keys: Keys) -> Facts:
        whole = _section(keys, _of(keys, "model.full_offload"), usual=False) or keys.flag(
            _of(keys, "model.fsdp_cpu_offload")
        )
        if keys.flag(_of(keys, moved)) is not False and not whole and keys.since(0, 6):
            stated = "moves the optimizer's states to the host between its steps, and they are counted on the card"
            keys.note(_of(keys, moved), f"{stated} (it is on unless a file says otherwise)", "saves", "optimizer")
        return {"optimizer": keys.choice(_of(keys, kind), sorts) or "adamw"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        plain = facts["optimizer"] if facts["optimizer"] in sorts.values() else facts["optimizer"].partition("-")[0]
        word = next((word for word, ours in sorts.items() if ours == plain), None)
        return {_of(keys, kind): word} if word else {}

    return Idea(keys=_both(kind, moved), facts=("optimizer",), read=read, write=write)


def _loss() -> Idea:
    """The head and its loss, so many tokens at a time."""
    key, off = "model.fused_lm_head_token_chunk_size", "disabled"

    def length(keys: Keys) -> int:
        if not _rl(keys):
            return (keys.whole("data.seq_len") or 128) * (keys.whole("data.micro_batch_size") or 1)
        return keys.agreed(("seq_len", "orchestrator.seq_len"), keys.whole) or 2048

    def read(keys: Keys) -> Facts:
        if keys.raw(_of(keys, key)) == off:
            return {"loss": "float32"}
        size = keys.whole(_of(keys, key)) or 8192
        return {"loss": f"chunked:{max(1, -(-length(keys) // (size * (keys.whole(_of(keys, 'model.cp')) or 1))))}"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted, _, pieces = (facts.get("loss") or "").partition(":")
        if wanted == "chunked":
            return {_of(keys, key): -(-length(keys) // int(pieces or 1))}
        return {_of(keys, key): off} if wanted in ("float32", "plain") and not pieces else {}

    return Idea(keys=_both(key), facts=("loss",), read=read, write=write)


PRIME_RL = Dialect(
    name="prime-rl",
    title="prime-rl",
    versions="prime-rl 0.2 - 0.8",
    syntaxes=("toml",),
    framework="torchtitan",
    blank={"toml": "[data]\n"},
    blanks=dict.fromkeys(("grpo", "dapo"), "[orchestrator]\n"),
    ideas=(
        _model(),
        _gpus(),
        _task(),
        _batch(),
        _engine(),
        _trainer(),
        _adapter(),
        _optimizer(),
        _loss(),
    ),
)
