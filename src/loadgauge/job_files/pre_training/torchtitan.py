"""torchtitan: flags on top of a named configuration (`--module llama3 --config llama3_8b`), and TOML until 2026-02.

Until then a command named a TOML (`--job.config_file`), which is read where it lies beside the script.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgauge.core.base.files import read_text
from loadgauge.job_files.hugging_face.huggingface import compiled
from loadgauge.job_files.ideas import Dialect, Document, Facts, Idea, Keys, reads, row
from loadgauge.job_files.pre_training.megatron import launched
from loadgauge.job_files.reading.nested import toml_document

SCHEDULES = {
    "1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipev",
}  # fmt: skip
NAMES = {
    "llama3_8b": "llama-3.1-8b", "llama3_70b": "llama-3.1-70b", "llama3_405b": "llama-3.1-405b",
    "deepseek_v3_671b": "deepseek-v3", "deepseek_v3_16b": "deepseek-v2-lite", "qwen3_0.6b": "qwen3-0.6b",
    "qwen3_1.7b": "qwen3-1.7b", "qwen3_4b": "qwen3-4b", "qwen3_8b": "qwen3-8b", "qwen3_14b": "qwen3-14b",
    "qwen3_32b": "qwen3-32b", "qwen3_30b_a3b": "qwen3-30b-a3b", "qwen3_235b_a22b": "qwen3-235b-a22b",
    "gpt_oss_20b": "gpt-oss-20b", "gpt_oss_120b": "gpt-oss-120b", "llama4_17bx16e": "llama-4-scout",
    "llama4_17bx128e": "llama-4-maverick", "qwen3_0_6b": "qwen3-0.6b", "qwen3_1_7b": "qwen3-1.7b",
    "qwen35_27b": "qwen3.5-27b", "qwen35_35b_a3b": "qwen3.5-35b-a3b", "qwen35_122b_a10b": "qwen3.5-122b-a10b",
    "qwen35_397b_a17b": "qwen3.5-397b-a17b", "kimi_k2_5": "kimi-k2.5",
}  # fmt: skip
"""Configurations by name; of a configuration it has no flag for, such as the loss, this knows the tool's usual."""
FILE = "job.config_file"
LARGEST_FILE = 100_000
"""Bytes of a TOML that a command names."""
BF16, FP32 = "bfloat16", "float32"
DEGREES = {
    "tp": "parallelism.tensor_parallel_degree", "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
}  # fmt: skip
OLD = "experimental."
WHOLE = {"model", "loss"}
POLICIES = ("none", "full", "selective", "memory_budget")


def named_file(document: Document) -> Mapping[str, Any]:
    """Return what the TOML has that a command names, beside its script or where it is started; nothing where it is not there."""
    name, script = document.get(FILE), getattr(document, "file", "")
    name = name[0] if isinstance(name, list) and name else name
    if document.syntax != "argv" or not isinstance(name, str) or "$" in name or not script:
        return {}
    here, root = Path(script).resolve().parent, Path.cwd()
    for position in ((here / name).resolve(), (root / name).resolve()):
        if (
            position.suffix == ".toml"
            and os.path.isfile(position)
            and (position.is_relative_to(here) or position.is_relative_to(root))
        ):
            toml = toml_document(read_text(position, LARGEST_FILE))
            return {key: toml.get(key) for key in toml.names()}
    return {}


@reads(FILE)
def _file(keys: Keys) -> Facts:
    if keys.has(FILE) and not named_file(keys.document):
        raise keys.wrong(FILE, f"names {str(keys.raw(FILE))[:60]}, which is not there; give its TOML, or lay it beside")
    return {}


def _recompute() -> Idea:
    mode, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
    chosen = tuple(f"activation_checkpoint:{word}" for word in POLICIES)

    def read(keys: Keys) -> Facts:
        for word, key in zip(POLICIES, chosen, strict=True):
            if keys.has(key):
                if word == "memory_budget":
                    keys.note(key, "keeps what torch.compile chooses; nothing again is counted", "saves", "activations")
                    return {"recompute": "none"}
                return {"recompute": {"selective": "per-op"}.get(word, word)}
        kind = keys.choice(mode, {"none": "none", "full": "full", "selective": "selective"})
        if kind == "selective" or (kind is None and keys.document.syntax == "toml"):
            how = keys.word(option) or ("2" if keys.document.syntax == "toml" else "op")
            if how == "op":
                return {"recompute": "per-op"}
            every = keys.whole(option) or 2
            return {"recompute": "full" if every == 1 else f"full:every={every}"}
        if kind is None:
            full = (keys.word("config") or "").removeprefix("llama3_") in ("70b", "405b")
            return {"recompute": "full" if full else "per-op"}
        return {"recompute": kind}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        kind, _, every = word.partition(":every=")
        if keys.document.syntax == "argv" and not keys.has(mode):
            spelled = {"per-op": "selective"}.get(word, word)
            if spelled not in POLICIES:
                return {}
            return dict.fromkeys(chosen) | {f"activation_checkpoint:{spelled}": True}
        if word in ("none", "full"):
            return {mode: word, option: None}
        if word == "per-op" or (kind == "full" and every):
            return {mode: "selective", option: every or "op"}
        return {}

    return Idea(keys=(mode, option, *chosen), facts=("recompute",), read=read, write=write)


def _sharding() -> Idea:
    copies, shards = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
    old, reshard = "training.data_parallel_degree", "parallelism.fsdp_reshard_after_forward"

    def read(keys: Keys) -> Facts:
        replicas = keys.whole(copies) or 1
        number = next((facts for key in (shards, old) if (facts := keys.whole(key, minimum=-1)) is not None), -1)
        cp, pp = keys.whole(DEGREES["cp"]) or 1, keys.whole(DEGREES["pp"]) or 1
        again = keys.choice(reshard, {"default": pp == 1, "always": True, "never": False})
        if number == 0:
            raise keys.wrong(shards, "must be -1 or at least 1, got 0")
        listed: Facts = {"shards": number} if number > 0 else {}
        if number == 1 and cp == 1:
            return {"zero": 0, "replicas": 1, "dp": replicas}
        return listed | {"zero": 3 if (pp == 1 if again is None else again) else 2, "replicas": replicas}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stage, replicas, dp = (facts.get("zero") or 0), facts.get("replicas") or 1, facts.get("dp") or 1
        cp, pp = facts.get("cp") or 1, facts.get("pp") or 1
        if stage == 0:
            return {copies: dp, shards: 1, old: None} if cp == 1 else {}
        if stage == 1 or (dp // replicas == 1 and cp == 1):
            return {}
        usual = 3 if pp == 1 else 2
        word = None if stage == usual and not keys.has(reshard) else "always" if stage == 3 else "never"
        return {copies: replicas, shards: dp // replicas if "gpus" in facts else -1, reshard: word, old: None}

    return Idea(keys=(copies, shards, old, reshard), facts=("zero", "replicas", "shards", "dp"), read=read, write=write)


def _batch() -> Idea:
    rank, whole = "training.local_batch_size", "training.global_batch_size"
    old, micro = "training.batch_size", "parallelism.pipeline_parallel_microbatch_size"

    def read(keys: Keys) -> Facts:
        pp = keys.whole(DEGREES["pp"]) or 1
        local, batch = keys.whole(rank, minimum=-1), keys.whole(whole, minimum=-1)
        local = local if local is not None else keys.whole(old)
        if local is None:
            local = {"llama3_8b": 1, "llama3_405b": 2}.get(keys.word("config") or "", 8)
        batch = batch if batch and batch > 0 else None
        if pp == 1:
            return {"micro_batch": local, "global_batch": batch, "accumulation": None if batch else 1}
        sequences = keys.whole(micro) or 1
        if local % sequences:
            raise keys.wrong(micro, f"{sequences} does not divide {keys.document.shown(rank)} = {local}")
        return {"micro_batch": sequences, "global_batch": batch, "accumulation": None if batch else local // sequences}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        pp, sequences, count = facts.get("pp") or 1, facts.get("micro_batch") or 1, facts.get("accumulation") or 1
        batch = facts.get("global_batch")
        target = old if keys.has(old) else rank
        local: dict[str, Any] = {
            target: sequences if pp == 1 else sequences * count,
            whole: batch if "gpus" in facts or batch else None,
        }
        return local | {micro: sequences if pp > 1 else None}

    return Idea(
        keys=(rank, whole, old, micro), facts=("micro_batch", "global_batch", "accumulation"), read=read, write=write
    )


def _pipeline() -> Idea:
    pp, schedule = DEGREES["pp"], "parallelism.pipeline_parallel_schedule"
    layers = "parallelism.pipeline_parallel_layers_per_stage"
    old = (f"{OLD}pipeline_parallel_degree", f"{OLD}pipeline_parallel_schedule")
    graphs = "training.disable_cuda_graphs"

    def read(keys: Keys) -> Facts:
        stages = keys.whole(pp) or keys.whole(old[0]) or 1
        name = keys.choice(schedule, SCHEDULES) or keys.choice(old[1], SCHEDULES) or "1f1b"
        if stages == 1:
            return {"pp": 1, "vpp": 1}
        # Looped schedules take two stages a rank where nothing else is values.
        return {"pp": stages, "schedule": name, "vpp": 2 if name == "interleaved" and not keys.has(layers) else 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stages = facts.get("pp") or 1
        values: dict[str, Any] = {pp: stages}
        if stages > 1:
            name = facts.get("schedule") or ("interleaved" if (facts.get("vpp") or 1) > 1 else "1f1b")
            spelled = {ours: theirs for theirs, ours in SCHEDULES.items()}.get(name)
            values |= {schedule: spelled} if spelled else {}
            if keys.document.syntax == "argv":
                values[graphs] = True  # which pipelines do not have yet
        return values

    return Idea(keys=(pp, schedule, graphs, *old), facts=("pp", "schedule", "vpp"), read=read, write=write)


def _tensor_parallel() -> Idea:
    tp, sp = DEGREES["tp"], "parallelism.enable_sequence_parallel"
    old = ("training.tensor_parallel_degree", "parallelism.disable_loss_parallel")

    def read(keys: Keys) -> Facts:
        named = 8 if keys.word("config") in ("llama3_70b", "llama3_405b") else 1
        ranks = keys.whole(tp) or keys.whole(old[0]) or named
        return {"tp": ranks, "sequence_parallel": keys.flag(sp) is not False and ranks > 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        ranks, shared = facts.get("tp") or 1, bool(facts.get("sequence_parallel"))
        return {
            old[0] if keys.has(old[0]) else tp: ranks,
            sp: False if ranks > 1 and not shared else True if keys.has(sp) else None,
        }

    return Idea(keys=(tp, sp, old[0]), facts=("tp", "sequence_parallel"), read=read, write=write)


def _precision() -> Idea:
    dtype, mixed = "training.dtype", "training.mixed_precision_param"

    def read(keys: Keys) -> Facts:
        spelled = {BF16: 16, FP32: 32}
        weights, products = keys.choice(dtype, spelled) or 32, keys.choice(mixed, spelled) or 16
        return {"precision": "bf16-pure" if weights == 16 else "bf16" if products == 16 else "fp32"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name = {"bf16-autocast": "bf16"}.get(facts["precision"], facts["precision"])
        if name not in ("bf16", "fp32", "bf16-pure"):
            return {}
        return {
            dtype: BF16 if name == "bf16-pure" else FP32 if keys.has(dtype) else None,
            mixed: FP32 if name == "fp32" else BF16 if keys.has(mixed) else None,
        }

    return Idea(keys=(dtype, mixed), facts=("precision",), read=read, write=write)


def _model() -> Idea:
    named, module, old, flavor = "config", "module", "model.name", "model.flavor"
    backward = {ours: theirs for theirs, ours in NAMES.items()}

    def read(keys: Keys) -> Facts:
        name = keys.word(named)
        if name is None and keys.has(old, flavor):
            name = f"{keys.word(old) or 'llama3'}_{(keys.word(flavor) or '8B').lower().replace('-', '_')}"
        return {"model": NAMES.get(name) if name else None, "loss": "chunked" if keys.has(named) else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        name = backward.get(facts.get("model") or "")
        if name is None:
            return {}
        family, _, size = name.rpartition("_") if name.count("_") == 1 else (name[:11], "", name[12:])
        if keys.document.syntax == "toml":
            return {old: family, flavor: size.upper()}
        return {module: family, named: name}

    return Idea(keys=(named, module, old, flavor), facts=("model", "loss"), read=read, write=write)


def _usual_length(keys: Keys) -> int:
    return 8192 if keys.word("config") in ("llama3_8b", "llama3_70b", "llama3_405b") else 2048


def _compiled() -> Idea:
    """The idea of torch.compile, where it makes both the model and the loss, as it does unless it is told otherwise."""
    inner, parts = compiled("compile.enable", "training.compile"), "compile.components"

    def read(keys: Keys) -> Facts:
        facts = inner.read(keys)
        if facts["compile"] and set(keys.words(parts) or WHOLE) != WHOLE:
            keys.note(parts, "compiles a part alone", "costs", "activations transient loss")
        return facts

    return Idea(keys=(*inner.keys, parts), facts=inner.facts, read=read, write=inner.write)


TORCHTITAN = Dialect(
    name="torchtitan",
    title="torchtitan flags",
    versions="torchtitan 0.3 (flags), and 0.1 - 0.2 (TOML)",
    syntaxes=("argv", "toml"),
    framework="torchtitan",
    style="tyro",
    beneath=named_file,
    blank={"argv": "torchrun --nproc_per_node 1 --nnodes 1 -m torchtitan.train\n", "toml": ""},
    ideas=(
        launched(),
        _file,
        _model(),
        _tensor_parallel(),
        _pipeline(),
        row("cp", DEGREES["cp"], f"{OLD}context_parallel_degree", default=1),
        row("ep", "parallelism.expert_parallel_degree", default=1),
        _sharding(),
        _batch(),
        row("seq_len", "training.seq_len", default=_usual_length),
        _recompute(),
        _precision(),
        # By name in TOML; the flags have groups of parameters, of which only the configuration itself has the names.
        row(
            "optimizer",
            "optimizer.name",
            "optimizer.param_groups.0.optimizer_name",
            default="adamw",
            add=False,
            words={"AdamW": "adamw", "Adam": "adamw", "Muon": "muon"},
        ),
        row(
            "offload", "training.enable_cpu_offload", words={"true": "all", "false": "none"}, default="none", off="none"
        ),
        _compiled(),
    ),
)
