"""Resolving a `Job` into a `Setup`: defaults are filled in and recorded, and what does not go together is refused."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from loadgauge.errors import ConfigError, LayoutError, NotStated
from loadgauge.families.catalogue import find_model
from loadgauge.formats.uncounted import Uncounted
from loadgauge.layers import View, block_layer
from loadgauge.lengths import Lengths
from loadgauge.resolve.rescale import scale
from loadgauge.resolve.setup import Setup
from loadgauge.spec.axes import DEGREES, MODEL_PARALLEL, RANK_ORDER
from loadgauge.spec.cluster import cluster
from loadgauge.spec.frameworks import default_framework
from loadgauge.spec.hardware import Cluster, Gpu, gpu
from loadgauge.spec.job import Job
from loadgauge.spec.layout import Layout, RecomputePolicy
from loadgauge.spec.lora import ATTENTION_TARGETS, Lora
from loadgauge.spec.model import ModelSpec, Moe
from loadgauge.spec.overlap import Overlap
from loadgauge.spec.training import Training, training
from loadgauge.units import parse

LORA_RANK = 16
JOB_FILES = ("json", "toml", "yaml", "yml", "sh", "txt", "args", "bash", "slurm", "sbatch")
"""Endings of files that may be another tool's."""
SEQ_LEN = 4096
TARGETS = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output", "qkv_proj": "qkv", "c_attn": "qkv",
    "query_key_value": "qkv", "out_proj": "output", "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "gate_up_proj": "gate_up", "fc1": "up", "fc2": "down", "c_fc": "up",
}  # fmt: skip
"""Linear layers by their names in transformers' modules."""


def names_job_file(model: str) -> bool:
    """Whether the name of a model is the path of another tool's job file. Dialects are imported only where it may be.

    >>> names_job_file("llama-3.1-8b"), names_job_file("./axolotl.yaml")
    (False, True)
    """
    if os.path.splitext(model)[1].lower().lstrip(".") not in JOB_FILES:
        return False
    from loadgauge.resolve.job_file import is_job_file

    return is_job_file(model)


def resolve_job(job: Job, model: ModelSpec | None = None) -> Setup:
    """Fill in what a job does not state and return the run; `model`: the model where it is loaded already.

    Raises `ConfigError`, `LayoutError` or `NotModelled`.

    >>> setup = resolve_job(Job(model="llama-3.1-8b", gpus=16, tp=8))
    >>> setup.layout.dp, setup.layout.seq_len, setup.training.framework.name
    (2, 4096, 'megatron')
    """
    file, dropout = "", 0.0
    uncounted: tuple[Uncounted, ...] = ()
    if model is None and names_job_file(job.model):
        from loadgauge.resolve.job_file import from_job_file  # only then are dialects read

        job, model, file, uncounted, dropout = from_job_file(job)
    chosen = find_model(job.model) if model is None else model
    card = None if job.gpu is None else gpu(job.gpu)
    assumed: dict[str, str] = {}
    if card is not None and job.gpu != card.id:
        assumed["--gpu"] = f"{card.id} (the commonest {job.gpu})"

    def fill(name: str, default: Any, why: str = "") -> Any:
        value = getattr(job, name)
        if value is None:
            assumed[f"--{name.replace('_', '-')}"] = f"{default}{f' ({why})' if why else ''}"
            return default
        return value

    _applies(job, chosen)
    if job.mtp:
        chosen = chosen.with_mtp()
    _whole_run(job)
    dp, degrees = _degrees(job, fill)
    micro_batch = fill("micro_batch", 1)
    lengths = _lengths(job.lengths)
    kind = training(
        framework=fill("framework", framework_of(job), _why_framework(job)),
        precision=fill("precision", "bf16"),
        optimizer=fill("optimizer", "adamw"),
        attention=fill("attention", "flash"),
        loss=fill("loss", "auto"),
        lora=_lora(job, chosen, fill),
        offload=_offload(job.offload or "none"),
    )
    if job.overlap is not None:
        kind = msgspec.structs.replace(kind, overlap=Overlap.parse(job.overlap))
    if job.precision in (None, "bf16", "fp16"):
        assumed["--precision"] = f"{kind.precision.name} ({kind.framework.name}'s recipe of {job.precision or 'bf16'})"
    if chosen.head.kind != "lm":
        assumed.pop("--loss", None)
    elif job.loss in (None, "auto"):
        assumed["--loss"] = f"{kind.kernels.loss} ({kind.framework.name}'s)"
    layout = Layout(
        **degrees,
        dp=dp,
        zero=fill("zero", 0),
        sequence_parallel=job.sequence_parallel or False,
        recompute=RecomputePolicy.parse(fill("recompute", "none")),
        micro_batch=micro_batch,
        global_batch=fill("global_batch", dp * micro_batch, "dp x micro-batch"),
        seq_len=_seq_len(job, chosen, lengths, fill),
        schedule=_schedule(job, assumed),
        stage_layers=_stage_layers(job.stage_layers),
        cp_comm=job.cp_comm or "ring",  # type: ignore[arg-type]
        expert_imbalance=_imbalance(job, chosen, fill),
        replicas=job.replicas or 1,
        order=_order(job.order),
        **_ragged(lengths, micro_batch, kind),
    )
    for key, size in chosen.defaults:
        assumed[key] = f"{size} (not in the config: {chosen.model_type}'s default)"
    machines, untimed = _cluster(job, card, layout)
    setup = Setup(
        job=job, model=chosen, layout=layout, training=kind, gpu=card, lengths=lengths, assumed=assumed,
        cluster=machines, untimed=untimed, file=file, uncounted=uncounted, dropout=dropout,
    )  # fmt: skip
    if job.measured is None:
        return setup
    return msgspec.structs.replace(setup, scale=scale(job, lambda there: resolve_job(there, chosen).estimate().time))


def _whole_run(job: Job) -> None:
    """Refuses flags that go with others that are not there."""
    if job.gpu is None:
        for name in ("gpus_per_node", "link_bandwidth", "nic_bandwidth", "overlap", "order", "tokens", "measured"):
            if getattr(job, name) is not None:
                raise ConfigError("goes with --gpu", key=name)
    if job.tokens is None:
        for name in ("price", "days", "mtbf_hours"):
            if getattr(job, name) is not None:
                raise ConfigError("goes with --tokens, the length of the whole run", key=name)
    if job.mtbf_hours is None:
        for name in ("checkpoint_seconds", "restart_seconds"):
            if getattr(job, name) is not None:
                raise ConfigError("goes with --mtbf-hours, how often a GPU fails", key=name)
    if job.cp_comm is not None and (job.cp or 1) == 1:
        raise ConfigError("goes with --cp above 1", key="cp_comm")


def bandwidth(text: str | None, name: str) -> float | None:
    """Read a bandwidth [byte/s] of the flag `name`; None stays None. Raises `ConfigError`."""
    if text is None:
        return None
    value, unit = parse(text)
    if unit != "byte/s" or value <= 0:
        raise ConfigError(f"must be a bandwidth such as 50GB/s or 400Gbit/s, got {text!r}", key=name)
    return value


def _cluster(job: Job, card: Gpu | None, layout: Layout) -> tuple[Cluster | None, str]:
    """The cluster the job runs on, or why there is none."""
    if card is None:
        return None, ""
    link, adapter = (bandwidth(getattr(job, name), name) for name in ("link_bandwidth", "nic_bandwidth"))
    try:
        return cluster(card, layout.gpus, job.gpus_per_node, link, adapter), ""
    except NotStated as error:
        return None, str(error)


def _applies(job: Job, model: ModelSpec) -> None:
    """Refuses flags that mean nothing for this model."""
    if job.loss is not None and model.head.kind != "lm":
        raise ConfigError(f"{model.name} has no language-model head, so it has no such loss", key="loss")
    experts = any(isinstance(block.mlp, Moe) for block in model.blocks)
    for name in ("ep", "etp"):
        if (getattr(job, name) or 1) > 1 and not experts:
            raise ConfigError(f"{model.name} has no experts to shard", key=name)


def _degrees(job: Job, fill: Any) -> tuple[int, dict[str, int]]:
    """The parallel degrees; data parallelism is what is left of the GPUs."""
    degrees = {name: 1 if getattr(job, name) is None else getattr(job, name) for name in DEGREES}
    within = degrees["tp"] * degrees["pp"] * degrees["cp"]
    gpus = fill("gpus", within, "one replica" if within > 1 else "")
    if gpus % within:
        raise LayoutError(
            f"{gpus} GPUs are not divisible by tp {degrees['tp']} x pp {degrees['pp']} x cp {degrees['cp']} = {within}:"
            f" leaves {gpus % within}",
            dimension="gpus", size=gpus, ranks=within,
        )  # fmt: skip
    return gpus // within, degrees


def _lengths(path: str | None) -> Lengths | None:
    return None if path is None else Lengths.parse(path)


def framework_of(job: Job) -> str:
    """Return the framework of a job that names none."""
    return default_framework({axis: (getattr(job, axis) or 1,) for axis in MODEL_PARALLEL})


def _why_framework(job: Job) -> str:
    used = [axis for axis in MODEL_PARALLEL if (getattr(job, axis) or 1) > 1]
    return f"because of {' and '.join(used)}" if used else ""


def _offload(text: str) -> Any:
    if text not in ("none", "optimizer", "all"):
        raise ConfigError(f"unknown offload {text!r} (known: none, optimizer, all)", key="offload")
    return text


def _schedule(job: Job, assumed: dict[str, str]) -> Any:
    if job.schedule is not None:
        if (job.pp or 1) == 1:
            raise ConfigError(f"{job.schedule} is a pipeline schedule and needs pp above 1", key="schedule")
        return job.schedule
    if (job.pp or 1) > 1:
        name = "interleaved" if (job.vpp or 1) > 1 else "1f1b"
        assumed["--schedule"] = name
        return name
    return "1f1b"


def _seq_len(job: Job, model: ModelSpec, lengths: Lengths | None, fill: Any) -> int:
    if lengths is not None:
        if job.seq_len is not None:
            raise ConfigError("the lengths file says how long the sequences are; leave --seq-len out", key="seq_len")
        return lengths.longest
    longest = model.max_position_embeddings
    seq_len: int = fill("seq_len", SEQ_LEN if longest is None else min(SEQ_LEN, longest))
    return seq_len


def _ragged(lengths: Lengths | None, micro_batch: int, kind: Training) -> dict[str, Any]:
    """Expected tokens and query-key pairs of a micro-batch: padding-free with flash attention, padded with eager."""
    if lengths is None:
        return {}
    free = kind.kernels.attention == "flash"
    tokens, pairs = lengths.unpadded(micro_batch) if free else lengths.padded(micro_batch)
    return {"tokens": tokens, "pairs": pairs}


def _order(text: str | None) -> tuple[str, ...]:
    """The axes, the fastest first; ep may be left out, and then comes before dp."""
    if text is None:
        return RANK_ORDER
    names = [name.strip() for name in text.split(",")]
    if "ep" not in names and "dp" in names:
        names.insert(names.index("dp"), "ep")
    if sorted(names) != sorted(RANK_ORDER):
        raise ConfigError(f"must name each of {', '.join(RANK_ORDER)} once, got {text!r}", key="order")
    return tuple(names)


def _imbalance(job: Job, model: ModelSpec, fill: Any) -> float:
    """Tokens of the busiest expert rank over the mean; balanced where nothing is said, and said so."""
    if any(isinstance(block.mlp, Moe) for block in model.blocks):
        return float(fill("expert_imbalance", 1.0, "balanced routing"))
    if job.expert_imbalance is not None:
        raise ConfigError(f"{model.name} has no experts", key="expert_imbalance")
    return 1.0


def _stage_layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 6 for word in words):
        raise ConfigError(f"must be counts of layers such as 7,8,8,7, got {text!r}", key="stage_layers")
    return tuple(int(word) for word in words)


def _lora(job: Job, model: ModelSpec, fill: Any) -> Lora | None:
    if job.base is not None and not job.qlora:
        raise ConfigError("goes with --qlora", key="base")
    if job.lora_rank is None and not job.qlora:
        if job.lora_targets is not None:
            raise ConfigError("goes with --lora-rank or --qlora", key="lora_targets")
        return None
    rank = fill("lora_rank", LORA_RANK)
    lora = Lora(rank=rank, quantised=(job.base or True) if job.qlora else False)  # type: ignore[arg-type]
    known = _targets(model, lora)
    wanted = fill("lora_targets", "all", f"every linear layer of a block: {', '.join(sorted(known))}")
    if wanted == "all":
        return lora
    if wanted == "attention":
        return msgspec.structs.replace(lora, targets=known & ATTENTION_TARGETS)
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if TARGETS.get(name, name) not in known:
            raise ConfigError(
                f"no linear layer {name!r} in this model (known: all, attention, {', '.join(sorted(known))})",
                key="lora_targets",
            )
    return msgspec.structs.replace(lora, targets=frozenset(TARGETS.get(name, name) for name in names))


def _targets(model: ModelSpec, lora: Lora) -> frozenset[str]:
    """The linear layers of a model that can have adapters."""
    view = View(tokens=1, pairs=1, lora=lora)
    names = (name for block in model.blocks for name in block_layer(block, model.hidden_size, view).names)
    return frozenset(name.split(".")[-2] for name in names if name.endswith(".lora_a"))
