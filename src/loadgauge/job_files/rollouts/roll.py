"""ROLL: pipelines of YAML in which each role has a strategy and devices of its own; RLVR, agentic, SFT, DPO and distillation.

Nothing of a file is evaluated: devices are read where they are ranges or lists of numbers.
"""

from __future__ import annotations

import re
from typing import Any

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.ideas import ATTENTION, Dialect, Document, Facts, Idea, Keys, fitted, lengths, names_in, row
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
MEGATRON = (
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
        value = str([int(one) for one in value if str(one).isdecimal()])
    if value is None:
        return None
    text, numbers = str(value), set[int]()
    for match in RANGE.finditer(text):
        start, end, step, listed = match.groups()
        words = [word for word in (listed or "").replace(" ", "").split(",") if word]
        numbers |= set(map(int, words)) if end is None else set(range(int(start or 0), int(end), int(step or 1) or 1))
    if RANGE.sub("", text).strip(" +") or not numbers:
        raise keys.wrong(key, f"{text[:40]!r} is read where it is list(range(0, 8)), or a list of numbers")
    return numbers


def _gpus() -> Idea:
    own, theirs, each, late = f"{A}device_mapping", f"{G}device_mapping", "num_gpus_per_node", "async_generation_ratio"

    def read(keys: Keys) -> Facts:
        trains, generates = devices(keys, own), devices(keys, theirs)
        if trains is None:
            return {"gpus_per_node": keys.whole(each)}
        facts: Facts = {"gpus": len(trains)}
        if generates is not None and not trains & generates:
            facts = {"gpus": len(trains | generates), "placement": f"split:{len(trains)}+{len(generates)}"}
        elif generates is not None and len(generates) != len(trains):
            keys.note(theirs, f"answers are made on {len(generates)} GPUs, and counted as on the trainer's", "either")
        if keys.real(late):
            facts["staleness"] = 1 if "placement" in facts else None
        per_node = keys.whole(each) or 8
        return facts | {"gpus_per_node": per_node if facts["gpus"] % per_node == 0 else None}

    return Idea(
        keys=(own, theirs, each, late),
        facts=names_in("gpus gpus_per_node placement staleness"),
        read=read,
        write=lambda facts, keys: (
            {own: f"list(range(0,{facts['gpus']}))"} if "gpus" in facts and not facts.get("placement") else {}
        ),
    )


def _layout() -> Idea:
    """Megatron-Core's arguments, or FSDP2 with Ulysses (`roll/distributed/strategy`), whose groups are of one GPU by default."""
    strategy, distributed, ranks = (
        f"{A}strategy_args.strategy_name",
        f"{S}use_distributed_optimizer",
        f"{A}model_args.ulysses_size",
    )
    group, reshard, policy, ep = (
        f"{S}{name}" for name in ("fsdp_size", "reshard_after_forward", "offload_policy", "ep_size")
    )
    once, narrow, off = (
        f"{S}reduce_scatter_during_grad_accumulation",
        f"{S}param_dtype",
        f"{A}model_args.disable_gradient_checkpointing",
    )
    stage, dtype = f"{S}zero_optimization.stage", f"{A}model_args.dtype"

    def read(keys: Keys) -> Facts:
        engine = keys.choice(
            strategy, {"megatron_train": "megatron", "fsdp2_train": "huggingface", "deepspeed_train": "deepspeed"}
        )
        word = {"fp32": "fp32", "fp16": "fp16"}.get(keys.word(dtype) or "", "bf16")
        if engine == "megatron":
            facts: Facts = {"framework": engine, "precision": word, "zero": 1 if keys.flag(distributed) else 0}
            for idea in MEGATRON:
                facts |= idea.read(keys)
            return facts
        full = "none" if keys.flag(off) else "full"
        if engine == "deepspeed":
            return {"framework": engine, "zero": keys.whole(stage, minimum=0), "recompute": full, "precision": word}
        size, cp, split = keys.whole(group, minimum=-1) or 1, keys.whole(ranks) or 1, keys.whole(ep) or 1
        trains = devices(keys, f"{A}device_mapping") or set()
        loaded = {"bf16": "bf16-pure", "bfloat16": "bf16-pure", "float16": "fp16", "fp16": "fp16"}.get(
            keys.word(narrow) or "", "bf16"
        )
        return {
            "framework": "torchtitan" if split > 1 else "huggingface",
            "zero": 2 if keys.flag(reshard) is False else 3,
            "shards": None if size < 0 or size >= len(trains) else max(1, size // cp),
            "cp": cp,
            "ep": split,
            "cp_comm": "all_to_all" if cp > 1 else None,
            "offload": "all" if keys.flag(policy) else "none",
            "gradient_sync": "last" if keys.flag(once) is False else "each",
            "recompute": full,
            "precision": loaded,
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if facts.get("framework") == "megatron":
            for idea in MEGATRON:
                values |= idea.write({**dict.fromkeys(idea.facts), "offload": "none", **facts}, keys)
            return values | {strategy: "megatron_train", distributed: bool(facts.get("zero"))}
        return {strategy: "fsdp2_train", reshard: (facts.get("zero") or 0) == 3, ranks: facts.get("cp") or 1}

    owned = (strategy, distributed, ranks, group, reshard, policy, ep, once, narrow, off, stage, dtype)
    facts = names_in("framework precision zero shards replicas offload gradient_sync")
    inner = tuple(name for idea in MEGATRON for name in idea.facts)
    return Idea(
        keys=(*owned, *(key for idea in MEGATRON for key in idea.keys)), facts=(*facts, *inner), read=read, write=write
    )


def _sequences() -> Idea:
    """Prompts with their answers, and the batches that they are trained in; an agentic pipeline counts whole trajectories."""
    prompts, count, epochs, group = (
        "rollout_batch_size",
        "num_return_sequences_in_group",
        "ppo_epochs",
        "train_env_manager.group_size",
    )
    longest, first, rest = "sequence_length", "prompt_length", "response_length"
    micro, steps = (
        f"{A}training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    dynamic, most = f"{A}use_dynamic_batching_in_train", f"{A}max_tokens_per_microbatch_in_train"

    def read(keys: Keys) -> Facts:
        length = keys.whole(longest) or (keys.whole(first) or 1024) + (keys.whole(rest) or 1024)
        rows, accumulated = keys.whole(micro) or 8, keys.whole(steps) or 1
        if _kind(keys) != "rl":
            return {"seq_len": length, "micro_batch": rows, "accumulation": accumulated}
        layout, trains = _layout().read(keys), devices(keys, f"{A}device_mapping")
        split = (layout.get("tp") or 1) * (layout.get("pp") or 1) * (layout.get("cp") or 1)
        samples = keys.whole(count) or keys.whole(group) or 1
        whole = keys.whole(prompts) or 128
        whole = whole if keys.has(count) or not keys.has(group) else max(1, whole // samples)
        ranks = max(1, len(trains or ()) // split)
        batch = min(rows * accumulated * ranks, whole * samples)
        if whole * samples % batch:  # `adjust_batch` adds to a batch or takes from it
            keys.note(
                prompts,
                f"{whole * samples} answers are no whole batches of {batch}, and counted as one batch",
                "either",
            )
            batch = whole * samples
        prompt = keys.whole(first) or 1024
        first_part = prompt if prompt < length else max(1, length // 8)
        facts = {
            "seq_len": length,
            **lengths(keys, first_part, length - first_part, taken=prompt >= length),
            "prompts": whole,
            "samples": samples,
        }
        own = batch // ranks if batch % ranks == 0 else None
        tokens = keys.whole(most, minimum=0) if keys.flag(dynamic) else None
        if tokens:
            tokens = max(tokens * (layout.get("cp") or 1), length)
            rows = fitted(keys, most, tokens / length, own, length, f"up to {tokens} tokens a micro-batch")
        elif own is not None and own % rows:
            rows = fitted(keys, micro, float(rows), own, length, "no whole micro-batches of a rank")
        return facts | {"global_batch": batch, "micro_batch": rows, "epochs": keys.whole(epochs) or 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        values = {micro: facts.get("micro_batch") or 1, steps: facts.get("accumulation") or 1}
        if "prompts" in facts:
            values |= {
                prompts: facts["prompts"],
                count: facts.get("samples"),
                epochs: facts.get("epochs"),
                first: facts["prompt_len"],
            }
        return values | ({longest: facts["seq_len"]} if facts.get("seq_len") else {})

    return Idea(
        keys=(prompts, count, epochs, group, longest, first, rest, micro, steps, dynamic, most),
        facts=names_in("seq_len micro_batch accumulation prompt_len answers prompts samples global_batch epochs"),
        read=read,
        write=write,
    )


def _task() -> Idea:
    """The task, its other models and the engine; with devices in common everything else leaves them in between."""
    kind, kl, weight, on = "adv_estimator", "use_kl_loss", "init_kl_coef", "enable_reference"
    reward, teacher, ipo = "reward_pretrain", ("teacher_pretrain", "teacher.model_args.model_name_or_path"), "ipo"
    switches, lora = ("is_pure_opd", "use_opd"), (f"{A}model_args.lora_target", f"{A}model_args.lora_rank")
    engine, scored = f"{G}strategy_args.strategy_name", (f"{A}infer_batch_size", f"{REF}infer_batch_size")
    again, never = "enable_old_logprobs_recompute", "force_disable_old_logprobs_recompute"
    names = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "utilization": "gpu_memory_utilization",
             "static_fraction": "mem_fraction_static", "context": "max_model_len", "max_num_seqs": "max_num_seqs",
             "max_batched_tokens": "max_num_batched_tokens", "sleep": "sleep_level"}  # fmt: skip
    likeliest = "logits_topk"
    eager, prefix, served = f"{E}enforce_eager", f"{E}enable_prefix_caching", f"{E}enable_expert_parallel"

    def read(keys: Keys) -> Facts:
        pipeline_of, apart = _kind(keys), "placement" in _gpus().read(keys)
        adapts = keys.words(lora[0]) or []
        facts: Facts = {"lora_rank": 0}
        if adapts:
            every = set(adapts) & {"all-linear", "all", "all-experts", "all-router"}
            facts = {"lora_rank": keys.whole(lora[1]) or 8, "lora_targets": "all" if every else ",".join(adapts)}
        if pipeline_of == "sft":
            return facts
        refers = {"reference": "adapter-off" if adapts else "model", "frozen_offload": not adapts}
        if pipeline_of == "dpo":
            return facts | refers | {"task": "ipo" if keys.flag(ipo) else "dpo"}
        if pipeline_of == "distill":
            if keys.whole(likeliest, minimum=0) != 0:
                keys.note(likeliest, "keeps the teacher's likeliest tokens only; all are counted", "saves", "loss")
            return facts | {
                "task": "gkd",
                "loss_terms": "forward-kl",
                "teacher": keys.agreed(teacher, keys.word),
                "on_policy": None,
            }
        task = "ppo" if (keys.word(kind) or "gae") == "gae" else "grpo"
        penalty = keys.real(weight)
        refers_to = keys.flag(kl) or keys.flag(on) or (0.2 if penalty is None else penalty) > 0
        facts |= refers if refers_to else {"reference": "none"}
        if any(keys.flag(name) for name in switches):
            task, facts = (
                "opd",
                {**facts, "teacher": keys.agreed(teacher, keys.word), "reference": None, "frozen_offload": True},
            )
        chosen = keys.choice(engine, {"vllm": "vllm", "sglang": "sglang"}) or "vllm"
        options: dict[str, Any] = {
            option: value
            for option, name in names.items()
            if (
                value := keys.real(f"{E}{name}")
                if option in ("utilization", "static_fraction")
                else keys.whole(f"{E}{name}")
            )
        }
        options.pop("static_fraction" if chosen == "vllm" else "utilization", None)
        if options.get("context", length := _sequences().read(keys)["seq_len"]) < length:
            keys.note(f"{E}max_model_len", f"answers end at it, and are counted up to {length} tokens", "saves")
            del options["context"]
        if task == "ppo":
            keys.note(kind, "actor and critic leave the GPUs while the other runs, and are counted together", "saves",
                      "weights gradients optimizer", 0.5)  # fmt: skip
        options = {"sleep": 1} | options | {"graphs": "false" if keys.flag(eager) else "true"}
        options["prefix"] = "false" if keys.flag(prefix) is False else "true"
        if keys.flag(served) and options.get("tp", 1) > 1:
            options["ep"] = options["tp"]
        words = ",".join(f"{name}={value}" for name, value in options.items())
        return facts | {
            "task": task,
            "critic": keys.word(reward) if task == "ppo" and keys.word(reward) != keys.word("pretrain") else None,
            "rollout": Engine.parse(f"{chosen}:{words}").text(),
            "rollout_offload": "none" if apart else "all",
            "old_logprobs": "none" if keys.flag(never) and task != "opd" else None,
            "logprob_batch": max((keys.whole(name) or 1 for name in scored), default=None),
        }

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        rank = facts.get("lora_rank") or 0
        return {
            lora[1]: rank or None,
            lora[0]: (facts.get("lora_targets") or "all-linear").replace("all", "all-linear") if rank else None,
        }

    owned = (kind, kl, weight, on, reward, *teacher, ipo, *switches, *lora, engine, *scored, again, never, eager, prefix, served,
             likeliest, *(f"{E}{name}" for name in names.values()))  # fmt: skip
    return Idea(
        keys=owned,
        facts=names_in(
            "task reference critic teacher rollout rollout_offload frozen_offload old_logprobs logprob_batch loss_terms"
            " lora_rank lora_targets"
        ),
        read=read,
        write=write,
    )


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
        _gpus(),
        _layout(),
        _sequences(),
        _task(),
        row(
            "attention",
            f"{A}model_args.attn_implementation",
            f"{A}model_args.flash_attn",
            words={"fa2": "fa2", **ATTENTION, "auto": "flash"},
        ),
    ),
)
