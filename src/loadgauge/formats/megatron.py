"""Megatron-LM's arguments, on a command line or in a YAML file (`--yaml-cfg`): dashes and underscores are the same."""

from __future__ import annotations

from typing import Any

from loadgauge.formats.megatron_model import MODEL
from loadgauge.formats.megatron_training import loss, offload, optimizer, overlap, precision, zero
from loadgauge.formats.table import Dialect, Facts, Idea, Keys, row

CP_COMM = {"p2p": "ring", "a2a": "all_to_all", "allgather": "all_gather"}
MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def machines(facts: Facts, before: int | None) -> tuple[int, int]:
    """GPUs of a machine, and machines, where the run says only how many there are in all: as before, or eight."""
    gpus: int = facts["gpus"]
    if "nodes" in facts:
        return facts["gpus_per_node"], facts["nodes"]
    each = next(
        each for each in (before if before != 1 else None, 8, gpus if gpus < 8 else 1, 1) if each and gpus % each == 0
    )
    return each, gpus // each


def launched(*names: str) -> Idea:
    """GPUs as torchrun is told of them: processes of a node, and nodes."""
    each, nodes = names

    def read(keys: Keys) -> Facts:
        if keys.document.syntax != "argv" or not keys.has(each):
            return {}
        return {"gpus_per_node": keys.whole(each), "nodes": keys.whole(nodes) or 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if keys.document.syntax != "argv" or "gpus" not in facts:
            return {}
        return dict(zip((each, nodes), machines(facts, keys.whole(each) if keys.has(each) else None), strict=True))

    return Idea(keys=(each, nodes), facts=("gpus", "gpus_per_node", "nodes"), read=read, write=write)


def tensor_parallel(tp: str, sp: str, default: bool = False) -> Idea:
    """Tensor parallelism, and sequence parallelism, which Megatron switches off where there is none of it."""

    def read(keys: Keys) -> Facts:
        ranks = keys.whole(tp) or 1
        shared = keys.flag(sp)
        return {"tp": ranks, "sequence_parallel": (default if shared is None else shared) and ranks > 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        shared = bool(facts.get("sequence_parallel"))
        said: dict[str, Any] = {tp: facts.get("tp") or 1}
        if shared != default or keys.has(sp):
            said[sp] = shared if shared or default or keys.document.syntax != "argv" else None
        return said

    return Idea(keys=(tp, sp), facts=("tp", "sequence_parallel"), read=read, write=write)


def pipeline(keys_of: dict[str, str]) -> Idea:
    """Stages, their chunks, and layers that are not shared out evenly."""
    pp, chunks, layers = keys_of["pp"], keys_of["chunks"], keys_of["chunk_layers"]
    first, last, count = keys_of["first"], keys_of["last"], keys_of["layers"]
    also = keys_of.get("size")

    def read(keys: Keys) -> Facts:
        stages, total = keys.whole(pp) or 1, keys.whole(count)
        virtual, each = keys.whole(chunks), keys.whole(layers)
        if also is not None and keys.has(also):
            if virtual is not None and virtual != keys.whole(also):
                raise keys.wrong(also, f"contradicts {keys.document.shown(chunks)} = {virtual}")
            virtual = keys.whole(also)
        if virtual is not None and each is not None:
            raise keys.wrong(layers, f"goes against {keys.document.shown(chunks)}")
        if each is not None:
            if total is None:
                raise keys.wrong(layers, f"says nothing without {keys.document.shown(count)}")
            virtual, left = divmod(total, stages * each)
            if left or not virtual:
                raise keys.wrong(layers, f"{each} does not divide {total} layers over {stages} stages")
        virtual = virtual or 1
        found: Facts = {"pp": stages, "vpp": virtual if stages > 1 else 1}
        if stages > 1:
            found["schedule"] = "interleaved" if virtual > 1 else "1f1b"
        ends = keys.whole(first), keys.whole(last)
        if stages > 1 and ends != (None, None):
            if total is None:
                raise keys.wrong(first if ends[0] else last, f"says nothing without {keys.document.shown(count)}")
            found["stage_layers"] = _stage_layers(keys, total, stages, *ends)
        return found

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stages = facts.get("pp") or 1
        said: dict[str, Any] = {pp: stages, chunks: None, layers: None, first: None, last: None}
        said |= {} if also is None else {also: None}
        virtual = facts.get("vpp") or 1
        if stages > 1 and virtual > 1:
            total = keys.whole(count)
            if keys.has(layers) and total and total % (stages * virtual) == 0:
                said[layers] = total // (stages * virtual)
            else:
                said[chunks] = virtual
        if facts.get("stage_layers") and stages > 2:
            counts = [int(word) for word in facts["stage_layers"].split(",")]
            if len(counts) == stages and len(set(counts[1:-1])) == 1:
                said[first] = counts[0] if counts[0] != counts[1] else None
                said[last] = counts[-1] if counts[-1] != counts[1] else None
        return said

    return Idea(
        keys=(pp, chunks, layers, first, last, *([also] if also is not None else [])),
        facts=("pp", "vpp", "schedule", "stage_layers"), read=read, write=write,
    )  # fmt: skip


def _stage_layers(keys: Keys, total: int, stages: int, first: int | None, last: int | None) -> str:
    ends = [end for end in (first, last) if end is not None]
    each, left = divmod(total - sum(ends), max(1, stages - len(ends)))
    if left or each < 0:
        raise keys.wrong("num_layers", f"{total} layers less {sum(ends)} of the ends do not share out over the rest")
    middle = [each] * (stages - len(ends))
    counts = ([first] if first is not None else []) + middle + ([last] if last is not None else [])
    return ",".join(str(count) for count in counts)


def recompute(prefix: str = "", switch: str = "") -> Idea:
    """`full` with a method and a number of layers, or `selective` with a list of modules."""
    what, how, count, modules = (
        f"{prefix}recompute_{word}" for word in ("granularity", "method", "num_layers", "modules")
    )
    owned: tuple[str, ...] = (what, how, count, modules, *([switch] if switch else []))

    def read(keys: Keys) -> Facts:
        kind = keys.choice(what, {"full": "full", "selective": "selective", "none": "none"}) or "none"
        if switch and keys.flag(switch):
            kind = "selective"
        if kind == "selective":
            chosen = keys.words(modules) or ["core_attn"]
            for name in chosen:
                if name not in MODULES:
                    raise keys.wrong(modules, f"{name!r} is not one that is read (read: {', '.join(MODULES)})")
            return {"recompute": "selective" if chosen == ["core_attn"] else f"modules:{','.join(sorted(chosen))}"}
        if kind == "none":
            return {"recompute": "none"}
        method, number = keys.choice(how, {"uniform": "group", "block": "layers"}), keys.whole(count) or 1
        if method is None:
            raise keys.wrong(what, f"full needs {keys.document.shown(how)}")
        return {"recompute": "full" if (method, number) == ("group", 1) else f"full:{method}={number}"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = facts.get("recompute") or "none"
        said: dict[str, Any] = dict.fromkeys(owned)
        kind, _, option = word.partition(":")
        if kind == "none":
            return said
        if kind == "selective":
            return said | {what: "selective"}
        if kind == "modules":
            return said | {what: "selective", modules: option.split(",")}
        key, _, number = option.partition("=")
        if kind != "full" or key == "every":
            return {}
        return said | {what: "full", how: "block" if key == "layers" else "uniform", count: int(number or 1)}

    return Idea(keys=owned, facts=("recompute",), read=read, write=write)


def experts(ep: str, etp: str, tp: str, count: str = "num_experts") -> Idea:
    """Expert parallelism; the ranks of one expert are those of tensor parallelism where nothing else is said."""

    def read(keys: Keys) -> Facts:
        ranks = keys.whole(ep) or 1
        within = keys.whole(etp)
        if within is None:
            within = (keys.whole(tp) or 1) if ranks > 1 or keys.has(count) else 1
        return {"ep": ranks, "etp": within}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        ranks, within = facts.get("ep") or 1, facts.get("etp") or 1
        routed = ranks > 1 or within > 1 or keys.has(count)
        return {ep: ranks if ranks > 1 or keys.has(ep) else None, etp: within if routed else None}

    return Idea(keys=(ep, etp), facts=("ep", "etp"), read=read, write=write)


def context(cp: str, comm: str) -> Idea:
    """Context parallelism, and how its ranks exchange keys and values."""

    def read(keys: Keys) -> Facts:
        ranks = keys.whole(cp) or 1
        words = set(keys.words(comm) or ["p2p"]) & set(CP_COMM) or {"p2p"}
        given = set(keys.words(comm) or []) - {"p2p", "a2a", "allgather"}
        if any("+" in word for word in given) or len(words) > 1:
            raise keys.wrong(comm, "one kind of exchange for all layers is read: p2p, a2a or allgather")
        return {"cp": ranks, "cp_comm": CP_COMM[words.pop()] if ranks > 1 else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        ranks = facts.get("cp") or 1
        word = {ours: theirs for theirs, ours in CP_COMM.items()}[facts.get("cp_comm") or "ring"]
        return {cp: ranks, comm: word if ranks > 1 and (word != "p2p" or keys.has(comm)) else None}

    return Idea(keys=(cp, comm), facts=("cp", "cp_comm"), read=read, write=write)


MODEL_PARALLEL: tuple[str, ...] = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel")
MODEL_PARALLEL += ("virtual_pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
MODEL_PARALLEL += ("expert_tensor_parallel_size", "bf16", "fp16")
LANGUAGE_MODEL: tuple[str, ...] = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "fp8",
)
LANGUAGE_MODEL += ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")

OTHER_PROGRAMS = {
    r"\bpretrain_(?:bert|t5|ict|vision\w*|vlm|retro|mimo|dino|realm)\w*\.py\b": "trains another model than a GPT",
}
"""Command lines of Megatron's that train something else."""
MEGATRON = Dialect(
    name="megatron",
    title="Megatron-LM arguments",
    versions="Megatron-LM of 2026-08 (core 0.16 - 0.18); older names of arguments are read too",
    syntaxes=("argv", "yaml"),
    framework="megatron",
    style="switch",
    marks=frozenset(
        {
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "global_batch_size"),
            *("num_layers", "use_distributed_optimizer", "ffn_hidden_size", "num_attention_heads", "seq_length"),
            *("context_parallel_size", "expert_model_parallel_size", "recompute_granularity"),
        }
    ),
    sections=dict.fromkeys(MODEL_PARALLEL, "model_parallel") | dict.fromkeys(LANGUAGE_MODEL, "language_model"),
    blank={"argv": "torchrun --nproc-per-node 1 --nnodes 1 pretrain_gpt.py\n", "yaml": "language_model:\nmodel_parallel:\n"},
    ideas=(
        launched("nproc_per_node", "nnodes"),
        tensor_parallel("tensor_model_parallel_size", "sequence_parallel"),
        pipeline(
            {
                "pp": "pipeline_model_parallel_size", "chunks": "num_virtual_stages_per_pipeline_rank",
                "size": "virtual_pipeline_model_parallel_size",
                "chunk_layers": "num_layers_per_virtual_pipeline_stage", "layers": "num_layers",
                "first": "decoder_first_pipeline_num_layers", "last": "decoder_last_pipeline_num_layers",
            }
        ),
        context("context_parallel_size", "cp_comm_type"),
        experts("expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_model_parallel_size"),
        zero(),
        recompute(switch="recompute_activations"),
        row("micro_batch", "micro_batch_size"),
        row("global_batch", "global_batch_size"),
        row("seq_len", "seq_length", "encoder_seq_length"),
        precision(),
        optimizer(),
        overlap(),
        offload(),
        row(
            "attention", "attention_backend", default="flash",
            words={"flash": "flash", "auto": "flash", "fused": "flash", "unfused": "eager", "local": "eager"},
        ),
        row("order", "use_tp_pp_dp_mapping", words={"true": "tp,cp,ep,pp,dp", "false": "tp,cp,ep,dp,pp"}),
        loss(),
        MODEL,
    ),
    programs=OTHER_PROGRAMS,
)  # fmt: skip
