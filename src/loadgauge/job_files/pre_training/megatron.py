"""Megatron-LM's arguments, on a command line or in a YAML file (`--yaml-cfg`): dashes and underscores are the same.

Ideas that other dialects share take the names of their keys, or a prefix. The sizes of a model are read as a Hugging Face config.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.definitions.training.optimizers import MOMENTS
from loadgauge.job_files.ideas import (
    NEAREST,
    STAYS,
    TRANSFORMER_ENGINE,
    Dialect,
    Facts,
    Idea,
    Keys,
    Named,
    in_part,
    names_in,
    reads,
    row,
)
from loadgauge.job_files.pre_training.megatron_model import EVENLY, MODEL, SPLIT, placed

CP_COMM = {"p2p": "ring", "a2a": "all_to_all", "allgather": "all_gather"}
MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def machines(facts: Facts, before: int | None) -> tuple[int, int]:
    """GPUs per node and nodes. Where only the total is known, a node has as many GPUs as `before`, or eight."""
    gpus: int = facts["gpus"]
    if "nodes" in facts:
        return facts["gpus_per_node"], facts["nodes"]
    sizes = (before if before != 1 else None, 8, gpus if gpus < 8 else 1)
    per_node = next((size for size in sizes if size and gpus % size == 0), 1)
    return per_node, gpus // per_node


def launched(per_node: str = "nproc_per_node", nodes: str = "nnodes", *, argv: bool = True) -> Idea:
    """The idea of the number of GPUs as torchrun takes it: processes per node, and nodes; `argv`: on a command line only."""

    def read(keys: Keys) -> Facts:
        if argv and keys.document.syntax != "argv":
            return {}
        if not keys.has(per_node):
            return scheduled(keys)
        return {"gpus_per_node": keys.whole(per_node), "nodes": keys.whole(nodes) or 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if (argv and keys.document.syntax != "argv") or "gpus" not in facts:
            return {}
        return dict(
            zip((per_node, nodes), machines(facts, keys.whole(per_node) if keys.has(per_node) else None), strict=True)
        )

    return Idea(keys=(per_node, nodes), facts=("gpus", "gpus_per_node", "nodes"), read=read, write=write)


@reads("num_gpus", "num_nodes", facts="gpus_per_node nodes")
def started_by_deepspeed(keys: Keys) -> Facts:
    """The idea of the number of GPUs as `deepspeed` takes it, of a node and nodes; another launcher's are written."""
    return {"gpus_per_node": keys.whole("num_gpus"), "nodes": keys.whole("num_nodes")} if keys.has("num_gpus") else {}


def scheduled(keys: Keys) -> Facts:
    """The GPUs that a script asks Slurm for, by its `#SBATCH` lines."""
    variables: dict[str, str] = getattr(keys.document, "variables", {})
    each = variables.get("SLURM_GPUS_PER_NODE") or variables.get("SLURM_NTASKS_PER_NODE") or ""
    count = variables.get("SLURM_JOB_NUM_NODES") or "1"
    if not (each.isdecimal() and count.isdecimal() and 0 < int(each) < 1000 and 0 < int(count) < 10**6):
        return {}
    return {"gpus_per_node": int(each), "nodes": int(count)}


def tensor_parallel(tp: str, sp: str, default: bool = False, older: str = "") -> Idea:
    """The idea of tensor parallelism, and of sequence parallelism, which Megatron switches off where tp is 1."""

    def read(keys: Keys) -> Facts:
        ranks = keys.whole(tp) or (keys.whole(older) if older else None) or 1
        shared = keys.flag(sp)
        return {"tp": ranks, "sequence_parallel": (default if shared is None else shared) and ranks > 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        shared = bool(facts.get("sequence_parallel"))
        switch = {sp: shared if shared or default or keys.document.syntax != "argv" else None}
        return {tp: facts.get("tp") or 1} | (switch if shared != default or keys.has(sp) else {})

    return Idea(keys=(tp, sp, older) if older else (tp, sp), facts=("tp", "sequence_parallel"), read=read, write=write)


def pipeline(keys_of: dict[str, str]) -> Idea:
    """The idea of pipeline parallelism: stages, their chunks, and stages with fewer or more layers.

    keys_of: the keys by what they hold: pp, chunks, chunk_layers, layers, first, last, and possibly size and accounted
    """
    layout = f"{keys_of['pp'].removesuffix('size')}layout"
    pp, chunks, layers = keys_of["pp"], keys_of["chunks"], keys_of["chunk_layers"]
    first, last, count = keys_of["first"], keys_of["last"], keys_of["layers"]
    also = keys_of.get("size")
    accounted = tuple(keys_of["accounted"].split()) if "accounted" in keys_of else ()

    def read(keys: Keys) -> Facts:
        stages, total = keys.whole(pp) or 1, keys.whole(count)
        virtual, per_chunk = keys.whole(chunks), keys.whole(layers)
        if also is not None and keys.has(also):
            keys.refuse(
                also,
                f"contradicts {keys.document.shown(chunks)} = {virtual}",
                when=virtual is not None and virtual != keys.whole(also),
            )
            virtual = keys.whole(also)
        keys.refuse(
            layers,
            f"contradicts {keys.document.shown(chunks)}; leave one of them out",
            when=virtual is not None and per_chunk is not None,
        )
        if per_chunk is not None:
            if total is None:
                keys.note(layers, f"says nothing without {keys.document.shown(count)}, and {EVENLY}", *SPLIT)
                virtual, left = 1, 0
            else:
                virtual, left = divmod(total, stages * per_chunk)
            keys.refuse(
                layers, f"{per_chunk} does not divide {total} layers over {stages} stages", when=left or not virtual
            )
        virtual = virtual or 1
        schedule = ("interleaved" if virtual > 1 else "1f1b") if stages > 1 else None
        facts: Facts = {"pp": stages, "vpp": virtual if stages > 1 else 1, "schedule": schedule}
        ends = keys.whole(first), keys.whole(last)
        if stages > 1 and ends != (None, None):
            if total is None and virtual > 1:
                keys.note(first if ends[0] else last, f"is not read beside chunks, and {EVENLY}", *SPLIT)
            elif total is None:  # the model has the number of all
                facts["layers_per_stage"] = f"ends,{ends[0] or ''},{ends[1] or ''}"
            else:
                facts["stage_layers"] = _stage_layers(keys, total, stages, *ends)
        elif stages > 1 and keys.has(layout):
            facts |= placed(keys, layout, stages)
        elif stages > 1 and total is not None and virtual == 1 and accounted and any(map(keys.flag, accounted)):
            # The embedding, and the loss, count as a layer of the first, and the last, stage.
            before, after = (int(bool(keys.flag(key))) for key in accounted)
            each, left = divmod(total + before + after, stages)
            counts = ",".join(map(str, [each - before, *[each] * (stages - 2), each - after]))
            facts["stage_layers"] = None if left else counts
        return facts

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stages = facts.get("pp") or 1
        virtual = facts.get("vpp") or 1
        total = keys.whole(count) or 0
        chunked = stages > 1 and virtual > 1
        whole = chunked and keys.has(layers) and total and total % (stages * virtual) == 0
        counts = [int(word) for word in (facts.get("stage_layers") or "").split(",") if word]
        uneven = stages > 2 and len(counts) == stages and len(set(counts[1:-1])) == 1
        return {
            chunks: virtual if chunked and not whole else None,
            layers: total // (stages * virtual) if whole else None,
            first: counts[0] if uneven and counts[0] != counts[1] else None,
            last: counts[-1] if uneven and counts[-1] != counts[1] else None,
            layout: None,
            pp: stages,
            **dict.fromkeys([] if also is None else [also]),
        }

    return Idea(
        keys=(pp, chunks, layers, first, last, layout, *([also] if also is not None else []), *accounted),
        facts=("pp", "vpp", "schedule", "stage_layers", "layers_per_stage"),
        read=read,
        write=write,
    )


def _stage_layers(keys: Keys, total: int, stages: int, first: int | None, last: int | None) -> str:
    ends = [end for end in (first, last) if end is not None]
    per_stage, left = divmod(total - sum(ends), max(1, stages - len(ends)))
    keys.refuse(
        "num_layers",
        f"{total} layers less {sum(ends)} of the ends cannot be split evenly over the rest",
        when=left or per_stage < 0,
    )
    counts = (first, *[per_stage] * (stages - len(ends)), last)
    return ",".join(str(count) for count in counts if count is not None)


def recompute(prefix: str = "", switch: str = "", usual: str | None = None, otherwise: str = "none") -> Idea:
    """The idea of recomputation: `full` with a method and a number of layers, or `selective` with a list of modules.

    usual: the method where none is given; None: `full` needs one; otherwise: the tool's own granularity
    """
    granularity, how, count, modules = (
        f"{prefix}recompute_{word}" for word in ("granularity", "method", "num_layers", "modules")
    )
    named = (
        "activations_checkpoint_method",
        "activations_checkpoint_num_layers",
    )  # of 2021, when the method was the switch
    older = () if prefix else ("checkpoint_activations", "checkpoint_num_layers", "moe_layer_recompute", *named)
    parted = () if prefix else ("distribute_saved_activations",)
    owned: tuple[str, ...] = (granularity, how, count, modules, *([switch] if switch else []), *older, *parted)

    def read(keys: Keys) -> Facts:
        kind = keys.choice(granularity, {"full": "full", "selective": "selective", "none": "none"}) or otherwise
        if older and keys.flag(older[0]):
            group = keys.whole(older[1]) or 1
            return {"recompute": "full" if group == 1 else f"full:group={group}"}
        routed, by_method = (
            not prefix and bool(keys.flag("moe_layer_recompute")) and kind != "full",
            older and keys.has(named[0]),
        )
        method, number = named if by_method else (how, count)
        kind = "full" if by_method else "selective" if routed or (switch and keys.flag(switch)) else kind
        if kind == "none":
            return {"recompute": "none"}
        if kind == "selective":
            asked = dict.fromkeys([*(keys.words(modules) or ["core_attn"]), *(["moe"] if routed else [])])
            chosen = [name for name in asked if name in MODULES]
            for name in asked:
                keys.note(
                    modules,
                    f"{name} is recomputed too, and is not read",
                    "saves",
                    "activations",
                    when=name not in MODULES,
                )
            return {"recompute": "selective" if chosen == ["core_attn"] else f"modules:{','.join(sorted(chosen))}"}
        way, each = keys.choice(method, {"uniform": "group", "block": "layers"}) or usual, keys.whole(number) or 1
        keys.refuse(granularity, f"full needs {keys.document.shown(how)}", when=way is None)
        parts = ":partitioned" if parted and keys.flag(parted[0]) else ""
        return {"recompute": f"full{'' if (way, each) == ('group', 1) else f':{way}={each}'}{parts}"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = (whole := facts.get("recompute") or "none").removesuffix(":partitioned")
        kind, _, option = word.partition(":")
        key, _, number = option.partition("=")
        way = "block" if key == "layers" else "uniform"
        values: dict[str, Any] = {
            "none": {},
            "selective": {granularity: "selective"},
            "modules": {granularity: "selective", modules: option.split(",")},
            "full": {granularity: "full", how: way, count: int(number or 1)} if key != "every" else None,
        }
        split = dict.fromkeys(parted, True) if word != whole else {}
        return {} if values.get(kind) is None else dict.fromkeys(owned) | split | values[kind]

    return Idea(keys=owned, facts=("recompute",), read=read, write=write)


def experts(ep: str, etp: str, tp: str, count: str = "num_experts") -> Idea:
    """The idea of expert parallelism; an expert is split over tp ranks unless etp is given."""

    def read(keys: Keys) -> Facts:
        ranks = keys.whole(ep) or 1
        within = keys.whole(etp)
        split = (keys.whole(tp) or 1) if ranks > 1 or keys.has(count) else 1
        return {"ep": ranks, "etp": split if within is None else within}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        ranks, within = facts.get("ep") or 1, facts.get("etp") or 1
        routed = ranks > 1 or within > 1 or keys.has(count)
        return {ep: ranks if ranks > 1 or keys.has(ep) else None, etp: within if routed else None}

    return Idea(keys=(ep, etp), facts=("ep", "etp"), read=read, write=write)


def context(cp: str, comm: str) -> Idea:
    """The idea of context parallelism, and of how its ranks exchange keys and values."""

    def read(keys: Keys) -> Facts:
        ranks = keys.whole(cp) or 1
        words = set(keys.words(comm) or ["p2p"]) & set(CP_COMM) or {"p2p"}
        transports = set(keys.words(comm) or []) - {"p2p", "a2a", "allgather"}
        keys.note(
            comm,
            "exchanges in different ways by layer, counted as one",
            "either",
            when=any("+" in word for word in transports) or len(words) > 1,
        )
        return {"cp": ranks, "cp_comm": CP_COMM[words.pop()] if ranks > 1 else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        ranks = facts.get("cp") or 1
        word = {ours: theirs for theirs, ours in CP_COMM.items()}[facts.get("cp_comm") or "ring"]
        return {cp: ranks, comm: word if ranks > 1 and (word != "p2p" or keys.has(comm)) else None}

    return Idea(keys=(cp, comm), facts=("cp", "cp_comm"), read=read, write=write)


# -- number formats, sharded states, the optimizer, overlap, offload -----------------------------------------------------

FP8 = {"delayed": "fp8-delayed", "tensorwise": "fp8-tensorwise", "blockwise": "fp8-blockwise", "mxfp8": "mxfp8"}
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {}, **{name: {name.partition("-")[0]: True} for name in ("bf16", "fp16", "bf16-mixed-18", "fp16-mixed-18")},
    "bf16-mixed-16": {"bf16": True, "grad_reduce_in_bf16": True},
    "nvfp4": {"bf16": True, "fp4_format": "e2m1", "fp4_recipe": "nvfp4"},
    **{name: {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": recipe} for recipe, name in FP8.items()},
    "mxfp8": {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "fp8": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
}  # fmt: skip
"""Arguments of a precision."""
FORMATS |= {f"{name}-primary": FORMATS[name] | {"fp8_param_gather": True} for name in FP8.values()}
REUSED = "reuse_grad_buf_for_mxfp8_param_ag"
FORMATS["mxfp8-primary"] |= {REUSED: True}
FORMATS["nvfp4-primary"] = FORMATS["nvfp4"] | {"fp4_param_gather": True}


def _precision_written(facts: Facts, keys: Keys, at: Named) -> dict[str, Any]:
    return dict.fromkeys(at.owned) | FORMATS[facts["precision"]]


@reads(
    facts="precision",
    write=_precision_written,
    can={"precision": tuple(FORMATS)},
    owned=names_in(
        """
        bf16 fp16 grad_reduce_in_bf16 fp8_format fp8_recipe fp4_format fp4_recipe fp8_param_gather fp4_param_gather
        reuse_grad_buf_for_mxfp8_param_ag fp8_hybrid fp8_e4m3 accumulate_allreduce_grads_in_fp32 fp8 fp4
        """
    ),
)
def precision(keys: Keys, at: Named) -> Facts:
    """The idea of the precision: 16 bits, and 8 or 4 bits in the matrix products."""
    half = "bf16" if keys.flag("bf16") else "fp16" if keys.flag("fp16") else ""
    keys.refuse("fp16", f"contradicts {keys.document.shown('bf16')}", when=keys.flag("bf16") and keys.flag("fp16"))
    eight = keys.has("fp8_format", "fp8") or keys.flag("fp8_hybrid") or keys.flag("fp8_e4m3")
    if eight or keys.has("fp4_format", "fp4"):
        if not eight:
            keys.choice("fp4_recipe", {"nvfp4": "nvfp4"})
        name = (keys.choice("fp8_recipe", FP8) or "fp8-delayed") if eight else "nvfp4"
        primary = keys.flag("fp8_param_gather" if eight else "fp4_param_gather")
        keys.note(
            "fp8_param_gather",
            f"gathers weights in a buffer of its own without {REUSED}",
            "costs",
            "gradients",
            0.5,
            when=name == "mxfp8" and primary and not keys.flag(REUSED),
        )
        return {"precision": f"{name}-primary" if primary else name}
    if half and keys.flag("grad_reduce_in_bf16") and half == "bf16":
        return {"precision": "bf16-mixed-16"}
    return {"precision": half or "fp32"}


def zero(prefix: str = "", *also: str) -> Idea:
    """The idea of ZeRO: the distributed optimizer is stage 1, Megatron's and PyTorch's FSDP have stages of their own.

    also: further keys for the distributed optimizer and for Megatron's FSDP
    """
    shared, fsdp, older, strategy, torch, kept, instances = owned = names_in(
        f"""
        {prefix}use_distributed_optimizer {prefix}use_megatron_fsdp {prefix}use_custom_fsdp
        {prefix}data_parallel_sharding_strategy {prefix}use_torch_fsdp2 {prefix}torch_fsdp2_no_reshard_after_forward
        {prefix}num_distributed_optimizer_instances
        """
    )

    def read(keys: Keys) -> Facts:
        replicas = keys.whole(instances) or 1
        shards = any(keys.flag(key) for key in (fsdp, older, *also[1:]))
        keys.refuse(torch, f"contradicts {keys.document.shown(fsdp)}", when=keys.flag(torch) and shards)
        if keys.flag(torch):
            return {"zero": 2 if keys.flag(kept) else 3, "replicas": replicas}
        stated = keys.choice(strategy, STRATEGIES) if shards else None
        # `LayerWiseDistributedOptimizer` shares out states by whole tensors (core/optimizer/__init__.py).
        by_layer = any(str(keys.raw(key)) == "dist_muon" for key in (f"{prefix}optimizer", "optimizer.optimizer"))
        alone = not shards and (by_layer or any(keys.flag(key) for key in (shared, *also[:1])))
        stage = (3 if stated is None else stated) if shards else int(alone)
        return {"zero": stage, "replicas": replicas if stage else 1}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        stage, replicas = facts.get("zero") or 0, facts.get("replicas") or 1
        return {
            **dict.fromkeys(owned),
            shared: True if stage else None,
            instances: replicas if stage and replicas > 1 else None,
            fsdp: True if stage > 1 else None,
            strategy: {number: name for name, number in STRATEGIES.items()}[stage] if stage > 1 else None,
            **{key: stage > least for least, key in enumerate(also) if keys.has(key)},
        }

    return Idea(keys=(*owned, *also), facts=("zero", "replicas"), read=read, write=write)


def overlap(sections: Mapping[str, str] | None = None) -> Idea:
    """The idea of overlapped communication; the ring of context parallelism and FSDP's prefetch have no switch.

    sections: those that a configuration has some of the switches in; those that it has not, stay where the command line has them
    """
    at = sections or {}
    owned = names_in(
        """
        overlap_grad_reduce overlap_param_gather tp_comm_overlap overlap_moe_expert_parallel_comm overlap_p2p_comm
        no_overlap_p2p_communication
        """
    )
    owned = tuple(at.get(name, "") + name for name in owned if not at or name in at)
    grads, params, tensor, experts_too, stages, *switched_off = owned

    def read(keys: Keys) -> Facts:
        if not keys.has(*owned):
            return {}
        hidden = {"cp", "prefetch"}
        hidden |= {name for name, key in (("dp", grads), ("tp", tensor), ("ep", experts_too)) if keys.flag(key)}
        hidden |= {"pp"} if keys.flag(stages) is not False and not any(map(keys.flag, switched_off)) else set()
        return {"overlap": ",".join(sorted(hidden))}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        hidden = {name.strip() for name in facts["overlap"].split(",")}
        if not hidden >= {"cp", "prefetch"} or hidden & {"launch"}:
            return {}
        on = {grads: "dp" in hidden, params: "dp" in hidden and bool(facts.get("zero")), tensor: "tp" in hidden}
        values: dict[str, Any] = {key: value or None for key, value in {**on, experts_too: "ep" in hidden}.items()}
        by_option = keys.document.syntax == "argv" and switched_off
        whether = {switched_off[0]: True} if by_option else {stages: False}
        return values | {stages: None} | (dict.fromkeys(whether) if "pp" in hidden else whether)

    return Idea(keys=owned, facts=("overlap",), read=read, write=write)


OPTIMIZER_NAMES = {
    "adam": "adamw",
    "adamw": "adamw",
    "sgd": "sgd-momentum",
    "muon": "muon",
    "dist_muon": "muon",
    "lion": "lion",
}


AWARE = "use_precision_aware_optimizer"


def remaindered(keys: Keys, key: str, *, away: bool) -> None:
    """Names main weights that are kept in part, which an optimizer on the host does not do (`HybridDeviceOptimizer`)."""
    why = "keeps of each main weight the 16 bits that the weight itself lacks, where all 32 are counted"
    keys.note(key, why, "saves", "optimizer", 1 / 6, when=keys.flag(key) and not away)


def _optimizer_written(facts: Facts, keys: Keys) -> dict[str, Any]:
    name, _, moments = facts["optimizer"].partition(":moments=")
    theirs = {"adamw": "adam", "sgd-momentum": "sgd", "sgd": "sgd", "muon": "muon", "lion": "lion"}.get(name)
    if theirs is None or moments not in ("", *MOMENTS):
        return {}
    stated = theirs == "sgd" and (name == "sgd" or keys.has("sgd_momentum"))
    return {
        "optimizer": theirs,
        AWARE: True if moments else STAYS,
        "exp_avg_dtype": moments or STAYS,
        "exp_avg_sq_dtype": moments or STAYS,
        "sgd_momentum": (0.0 if name == "sgd" else 0.9) if stated else STAYS,
    }


@reads(
    "optimizer",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    AWARE,
    "sgd_momentum",
    facts="optimizer",
    write=_optimizer_written,
)
def optimizer(keys: Keys) -> Facts:
    """The idea of the optimizer; `adam` is AdamW, as weight decay is decoupled."""
    name = keys.choice("optimizer", OPTIMIZER_NAMES, NEAREST["optimizer"]) or "adamw"
    moments = {keys.word("exp_avg_dtype") or "fp32", keys.word("exp_avg_sq_dtype") or "fp32"}
    if len(moments) == 1 and name == "adamw" and moments <= {*MOMENTS}:
        name += f":moments={moments.pop()}".removesuffix(":moments=fp32")
    elif moments != {"fp32"}:
        key = "exp_avg_dtype" if keys.has("exp_avg_dtype") else "exp_avg_sq_dtype"
        keys.note(key, "moments in fewer bits than the 32 that are counted", "saves", "optimizer", 0.5, bare=True)
    remaindered(keys, AWARE, away=bool(keys.flag("optimizer_cpu_offload")))
    return {"optimizer": "sgd" if name == "sgd-momentum" and keys.real("sgd_momentum") == 0 else name}


def loss(prefix: str = "", usual: Callable[[Keys], bool] = lambda keys: False) -> Idea:
    """The idea of the fused vocabulary-parallel loss: Megatron's own kernel, or Transformer Engine's; `usual`: if unsaid."""
    switch, kind = f"{prefix}cross_entropy_loss_fusion", f"{prefix}cross_entropy_fusion_impl"
    forms = {"native": "jit", "te": "fused"}

    def read(keys: Keys) -> Facts:
        return {"loss": (keys.choice(kind, forms) or "jit") if keys.flag(switch, usual(keys)) else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word = {ours: theirs for theirs, ours in forms.items()}.get(facts["loss"])
        return {switch: bool(word) or None, kind: word} if word or facts["loss"] in ("auto", "inplace") else {}

    return Idea(keys=(switch, kind), facts=("loss",), read=read, write=write)


def offload(prefix: str = "", share: float | None = None) -> Idea:
    """The idea of the optimizer in host memory, or a part of it; `share`: what is written where all of it is."""
    switch, part = f"{prefix}optimizer_cpu_offload", f"{prefix}optimizer_offload_fraction"

    def read(keys: Keys) -> Facts:
        return {"offload": in_part(keys, part) if keys.flag(switch) else "none"}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        word, _, some = facts["offload"].partition(":")
        if word == "optimizer":
            return {switch: True, part: float(some) if some else share}
        return {switch: None, part: None} if facts["offload"] == "none" else {}

    return Idea(keys=(switch, part), facts=("offload",), read=read, write=write)


VISION = {
    "clip": 0.31e9, "siglip": 0.43e9, "internvit": 5.54e9, "internvit300M": 0.31e9, "radio": 0.65e9, "radio-g": 1.16e9,
    "cradio-g": 1.16e9, "radio_siglip_move": 0.65e9,
}  # fmt: skip
"""Parameters of the encoders of `--vision-model-type`, as their publishers have them."""


@reads(kind="vision_model_type", frozen="freeze_ViT", body="freeze_LM")
def vision(keys: Keys, at: Named) -> Facts:
    """The idea of images: an encoder beside the language model, whose memory is a bound, and parts that are not trained."""
    drafted = re.search(
        r"--algorithm[ =]+(eagle|medusa|dflash)", keys.document.text()
    )  # ModelOpt's, beside frozen weights
    why = "trains the draft that another command of the script puts beside the model, which is counted as if it were trained"
    keys.note("load", why, "saves", "gradients optimizer activations", when=drafted)
    if not keys.has(at.kind, at.frozen, at.body):
        return {}
    shown, ranks = keys.document.shown(at.kind), keys.whole("tensor_model_parallel_size") or 1
    size = VISION.get(str(keys.raw(at.kind) or "clip"), max(VISION.values()))
    held = size * (2 if keys.flag(at.frozen) else 18) / ranks
    note = f"{shown}: shows images to the model, whose encoder is not counted"
    parts = ("transient",) if keys.flag(at.frozen) else ("activations", "transient")
    keys.add(Uncounted(note, shown, high=held, effect="costs", parts=parts))
    keys.note(
        at.body,
        "the language model is not trained, and is counted as if it were",
        "saves",
        "gradients optimizer",
        when=keys.flag(at.body),
        bare=True,
    )
    return {}


@reads(
    inner=row("seq_len", "seq_length", "encoder_seq_length"),
    longer=("decoder_seq_length", "total_seq_length"),
)
def _length(keys: Keys, at: Named) -> Facts:
    length = next((keys.whole(key) for key in at.longer if keys.has(key)), None)
    return at.inner.read(keys) if length is None else {"seq_len": length}


LAYOUT = (
    tensor_parallel("tensor_model_parallel_size", "sequence_parallel", older="model_parallel_size"),
    pipeline({
        "pp": "pipeline_model_parallel_size", "chunks": "num_virtual_stages_per_pipeline_rank", "layers": "num_layers",
        "size": "virtual_pipeline_model_parallel_size", "chunk_layers": "num_layers_per_virtual_pipeline_stage",
        "first": "decoder_first_pipeline_num_layers", "last": "decoder_last_pipeline_num_layers",
        "accounted": "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    }),
    context("context_parallel_size", "cp_comm_type"),
    experts("expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_model_parallel_size"),
)  # fmt: skip
ATTENTION = row("attention", "attention_backend", default="flash", words=TRANSFORMER_ENGINE)
"""The layout and the kernel of attention, by Megatron's arguments; slime passes them on."""

SECTIONS = {
    "model_parallel": """
        tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel virtual_pipeline_model_parallel_size
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size bf16 fp16
    """,
    "language_model": """
        recompute_granularity recompute_method recompute_num_layers recompute_modules fp8 num_layers hidden_size
        num_attention_heads num_query_groups ffn_hidden_size
    """,
}
"""Where keys belong in a YAML file."""
OTHER_PROGRAMS = {
    r"\bpretrain_(?:t5|ict|vision\w*|retro|dino|realm)\w*\.py\b": "trains another model than a GPT",
}
"""Command lines of Megatron's that train something else."""
MEGATRON = Dialect(
    name="megatron",
    title="Megatron-LM arguments",
    versions="Megatron-LM of 2026-08 (core 0.16 - 0.18); older names of arguments are read too",
    syntaxes=("argv", "yaml"),
    framework="megatron",
    style="switch",
    sections={key: section for section, keys in SECTIONS.items() for key in keys.split()},
    blank={"argv": "torchrun --nproc-per-node 1 --nnodes 1 pretrain_gpt.py\n", "yaml": "language_model:\nmodel_parallel:\n"},
    ideas=(
        launched(),
        started_by_deepspeed,
        *LAYOUT,
        zero(),
        recompute(switch="recompute_activations"),
        row("micro_batch", "micro_batch_size", "batch_size"),
        row("global_batch", "global_batch_size"),
        _length,
        vision,
        precision,
        optimizer,
        overlap(),
        offload(),
        ATTENTION,
        row("determinism", "deterministic_mode", words={"true": "kernels", "false": None}, add=False),
        row("order", "use_tp_pp_dp_mapping", words={"true": "tp,cp,ep,pp,dp", "false": "tp,cp,ep,dp,pp"}),
        loss(),
        MODEL,
    ),
    programs=OTHER_PROGRAMS,
)  # fmt: skip
