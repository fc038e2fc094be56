"""torchtitan: flags on top of a named configuration (`--module llama3 --config llama3_8b`), and TOML until 2026-02.

Until then a command named a TOML (`--job.config_file`), which is read where it lies beside the script.
"""

import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgauge.core.base import read_table, read_text
from loadgauge.job_files.hugging_face.huggingface import compiled
from loadgauge.job_files.ideas import STAYS, Dialect, Document, Facts, Keys, Named, in_pieces, reads, row
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


@functools.cache
def _recipes() -> dict[str, dict[str, str]]:
    texts = read_table("titan_recipes.toml")["recipes"]
    return {name: dict(word.split("=") for word in text.split()) for name, text in texts.items()}


def _usual(keys: Keys, word: str, otherwise: Any = None) -> Any:
    """Return what the configuration that a command names says by a word of the table of them, else what its class has."""
    told = _recipes().get(keys.word("config") or "", {}).get(word)
    return otherwise if told is None else int(told) if told.isdecimal() else told


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
    keys.refuse(
        FILE,
        f"names {str(keys.raw(FILE))[:60]}, which is not there; give its TOML, or lay it beside",
        when=keys.has(FILE) and not named_file(keys.document),
    )
    return {}


def _recompute_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    word = facts.get("recompute") or "none"
    kind, _, every = word.partition(":every=")
    if keys.document.syntax == "argv" and not keys.has(at.mode):
        spelled = {"per-op": "selective"}.get(word, word)
        policy = {f"activation_checkpoint:{spelled}": True}
        return dict.fromkeys(at.chosen) | policy if spelled in POLICIES else {}
    part = word == "per-op" or (kind == "full" and every)
    if not part and word not in ("none", "full"):
        return {}
    return {at.mode: "selective" if part else word, at.option: (every or "op") if part else None}


@reads(
    facts="recompute",
    write=_recompute_written,
    mode="activation_checkpoint.mode",
    option="activation_checkpoint.selective_ac_option",
    chosen=tuple(f"activation_checkpoint:{word}" for word in POLICIES),
)
def _recompute(keys: Keys, at: Named) -> Facts:
    for word, key in zip(POLICIES, at.chosen, strict=True):
        if keys.has(key):
            keys.note(
                key,
                "keeps what torch.compile chooses; nothing again is counted",
                "saves",
                "activations",
                when=word == "memory_budget",
            )
            return {"recompute": {"selective": "per-op", "memory_budget": "none"}.get(word, word)}
    kind = keys.choice(at.mode, {"none": "none", "full": "full", "selective": "selective"})
    if kind == "selective" or (kind is None and keys.document.syntax == "toml"):
        how = keys.word(at.option) or ("2" if keys.document.syntax == "toml" else "op")
        if how == "op":
            return {"recompute": "per-op"}
        every = keys.whole(at.option) or 2
        return {"recompute": "full" if every == 1 else f"full:every={every}"}
    return {"recompute": kind or _usual(keys, "again", "per-op")}


def _sharding_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    stage, replicas, dp = (facts.get("zero") or 0), facts.get("replicas") or 1, facts.get("dp") or 1
    unsplit = (facts.get("cp") or 1) == 1
    if stage == 0:
        return {at.copies: dp, at.shards: 1, at.old: None} if unsplit else {}
    usual = 3 if (facts.get("pp") or 1) == 1 else 2
    word = None if stage == usual and not keys.has(at.reshard) else "always" if stage == 3 else "never"
    sharded = {
        at.copies: replicas,
        at.shards: dp // replicas if "gpus" in facts else -1,
        at.reshard: word,
        at.old: None,
    }
    return {} if stage == 1 or (dp // replicas == 1 and unsplit) else sharded


@reads(
    facts="zero replicas shards dp",
    write=_sharding_written,
    copies="parallelism.data_parallel_replicate_degree",
    shards="parallelism.data_parallel_shard_degree",
    old="training.data_parallel_degree",
    reshard="parallelism.fsdp_reshard_after_forward",
)
def _sharding(keys: Keys, at: Named) -> Facts:
    replicas = keys.whole(at.copies) or 1
    number = next((facts for key in (at.shards, at.old) if (facts := keys.whole(key, minimum=-1)) is not None), -1)
    cp, pp = keys.whole(DEGREES["cp"]) or 1, keys.whole(DEGREES["pp"]) or 1
    again = keys.choice(at.reshard, {"default": pp == 1, "always": True, "never": False})
    keys.refuse(at.shards, "must be -1 or at least 1, got 0", when=number == 0)
    listed: Facts = {"shards": number} if number > 0 else {}
    if number == 1 and cp == 1:
        return {"zero": 0, "replicas": 1, "dp": replicas}
    return listed | {"zero": 3 if (pp == 1 if again is None else again) else 2, "replicas": replicas}


def _batch_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    sequences, batch, several = facts.get("micro_batch") or 1, facts.get("global_batch"), (facts.get("pp") or 1) > 1
    return {
        at.old if keys.has(at.old) else at.rank: sequences * (facts.get("accumulation") or 1) if several else sequences,
        at.whole: batch if "gpus" in facts or batch else None,
        at.micro: sequences if several else None,
    }


@reads(
    facts="micro_batch global_batch accumulation",
    write=_batch_written,
    rank="training.local_batch_size",
    whole="training.global_batch_size",
    old="training.batch_size",
    micro="parallelism.pipeline_parallel_microbatch_size",
)
def _batch(keys: Keys, at: Named) -> Facts:
    pp = keys.whole(DEGREES["pp"]) or 1
    stated = (keys.whole(key, minimum=least) for key, least in ((at.rank, -1), (at.old, 1)))
    local = next((number for number in stated if number is not None), _usual(keys, "micro", 8))
    batch = max(0, keys.whole(at.whole, minimum=-1) or 0) or None
    if pp == 1:
        return {"micro_batch": local, "global_batch": batch, "accumulation": None if batch else 1}
    sequences = keys.whole(at.micro) or 1
    keys.refuse(
        at.micro, f"{sequences} does not divide {keys.document.shown(at.rank)} = {local}", when=local % sequences
    )
    in_pieces(keys, at.rank, batch, math.prod(keys.whole(name) or 1 for name in DEGREES.values()), {})
    return {"micro_batch": sequences, "global_batch": batch, "accumulation": None if batch else local // sequences}


def _pipeline_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    stages = facts.get("pp") or 1
    looped = (facts.get("vpp") or 1) > 1
    name = facts.get("schedule") or ("interleaved" if looped else "1f1b")
    spelled = {ours: theirs for theirs, ours in SCHEDULES.items()}.get(name)
    return {
        at.pp: stages,
        at.schedule: spelled or STAYS if stages > 1 else STAYS,
        # Which pipelines do not have yet.
        at.graphs: True if stages > 1 and keys.document.syntax == "argv" else STAYS,
    }


@reads(
    facts="pp schedule vpp",
    write=_pipeline_written,
    pp=DEGREES["pp"],
    schedule="parallelism.pipeline_parallel_schedule",
    graphs="training.disable_cuda_graphs",
    old=(f"{OLD}pipeline_parallel_degree", f"{OLD}pipeline_parallel_schedule"),
)
def _pipeline(keys: Keys, at: Named) -> Facts:
    stages = keys.whole(at.pp) or keys.whole(at.old[0]) or 1
    name = keys.choice(at.schedule, SCHEDULES) or keys.choice(at.old[1], SCHEDULES) or "1f1b"
    # Looped schedules take two stages a rank where nothing else is values.
    looped = name == "interleaved" and not keys.has("parallelism.pipeline_parallel_layers_per_stage")
    return {"pp": stages, "schedule": name if stages > 1 else None, "vpp": 2 if looped and stages > 1 else 1}


TENSOR_PARALLEL_OLD = ("training.tensor_parallel_degree", "parallelism.disable_loss_parallel")


def _tensor_parallel_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    ranks, shared = facts.get("tp") or 1, bool(facts.get("sequence_parallel"))
    return {
        TENSOR_PARALLEL_OLD[0] if keys.has(TENSOR_PARALLEL_OLD[0]) else at.tp: ranks,
        at.sp: False if ranks > 1 and not shared else True if keys.has(at.sp) else None,
    }


@reads(
    facts="tp sequence_parallel",
    write=_tensor_parallel_written,
    tp=DEGREES["tp"],
    sp="parallelism.enable_sequence_parallel",
    also=(TENSOR_PARALLEL_OLD[0],),
)
def _tensor_parallel(keys: Keys, at: Named) -> Facts:
    ranks = keys.whole(at.tp) or keys.whole(TENSOR_PARALLEL_OLD[0]) or _usual(keys, "tp", 1)
    return {"tp": ranks, "sequence_parallel": keys.flag(at.sp) is not False and ranks > 1}


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name = {"bf16-autocast": "bf16"}.get(facts["precision"], facts["precision"])
    return {
        at.dtype: BF16 if name == "bf16-pure" else FP32 if keys.has(at.dtype) else None,
        at.mixed: FP32 if name == "fp32" else BF16 if keys.has(at.mixed) else None,
    }


@reads(
    facts="precision",
    write=_precision_written,
    can={"precision": ("bf16", "fp32", "bf16-pure", "bf16-autocast")},
    dtype="training.dtype",
    mixed="training.mixed_precision_param",
)
def _precision(keys: Keys, at: Named) -> Facts:
    spelled = {BF16: 16, FP32: 32}
    weights, products = keys.choice(at.dtype, spelled) or 32, keys.choice(at.mixed, spelled) or 16
    return {"precision": "bf16-pure" if weights == 16 else "bf16" if products == 16 else "fp32"}


MODEL_BACKWARD = {ours: theirs for theirs, ours in NAMES.items()}


def _model_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    name = MODEL_BACKWARD.get(facts.get("model") or "", "")
    family, _, size = name.rpartition("_") if name.count("_") == 1 else (name[:11], "", name[12:])
    toml = keys.document.syntax == "toml"
    named = {at.old: family, at.flavor: size.upper()} if toml else {at.module: family, at.named: name}
    return named if name else {}


@reads(
    facts="model loss", write=_model_written, named="config", module="module", old="model.name", flavor="model.flavor"
)
def _model(keys: Keys, at: Named) -> Facts:
    name = keys.word(at.named)
    if name is None and keys.has(at.old, at.flavor):
        name = f"{keys.word(at.old) or 'llama3'}_{(keys.word(at.flavor) or '8B').lower().replace('-', '_')}"
    products = _usual(keys, "products")
    keys.note(
        at.named,
        f"multiplies in {products}, which is counted in 16 bits",
        "either",
        "weights activations transient",
        0.5,
        when=products,
    )
    return {"model": _usual(keys, "model", NAMES.get(name or "")), "loss": "chunked" if keys.has(at.named) else None}


@reads(inner=compiled("compile.enable", "training.compile"), parts="compile.components")
def _compiled(keys: Keys, at: Named) -> Facts:
    """The idea of torch.compile, where it makes both the model and the loss, as it does unless it is told otherwise."""
    facts = at.inner.read(keys)
    if not keys.has(*at.inner.keys):
        return {"compile": "model" in _usual(keys, "compile", "")}
    keys.note(
        at.parts,
        "compiles a part alone",
        "costs",
        "activations transient loss",
        when=facts["compile"] and set(keys.words(at.parts) or WHOLE) != WHOLE,
    )
    return facts


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
        _model,
        _tensor_parallel,
        _pipeline,
        row("cp", DEGREES["cp"], f"{OLD}context_parallel_degree", default=1),
        row("ep", "parallelism.expert_parallel_degree", default=lambda keys: _usual(keys, "ep", 1)),
        _sharding,
        _batch,
        row("seq_len", "training.seq_len", default=lambda keys: _usual(keys, "length", 2048)),
        _recompute,
        _precision,
        # By name in TOML; the flags have groups of parameters, of which only the configuration itself has the names.
        row(
            "optimizer",
            "optimizer.name",
            "optimizer.param_groups.0.optimizer_name",
            default=lambda keys: _usual(keys, "optimizer", "adamw"),
            add=False,
            words={"AdamW": "adamw", "Adam": "adamw", "Muon": "muon"},
        ),
        row(
            "offload", "training.enable_cpu_offload", words={"true": "all", "false": "none"}, default="none", off="none"
        ),
        _compiled,
    ),
)
