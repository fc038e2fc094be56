"""What a user asks for: the flags of a command line, and the run they mean once everything unsaid is filled in."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from loadgauge.cli.options import Request
from loadgauge.errors import ConfigError, LayoutError, NotStated
from loadgauge.estimate.cost import Budget, Failures
from loadgauge.estimate.estimate import estimate
from loadgauge.estimate.padding import Forecast, forecast
from loadgauge.estimate.result import Estimate
from loadgauge.families.catalogue import find_model
from loadgauge.formats.coverage import Uncounted
from loadgauge.layers import View, block_layer
from loadgauge.lengths import Lengths
from loadgauge.spec.cluster import cluster
from loadgauge.spec.hardware import Cluster, Gpu, gpu
from loadgauge.spec.layout import AXES, Layout, RecomputePolicy
from loadgauge.spec.lora import ATTENTION_TARGETS, Lora
from loadgauge.spec.model import ModelSpec, Moe
from loadgauge.spec.overlap import Overlap
from loadgauge.spec.training import MODEL_PARALLEL, Training, default_framework, training
from loadgauge.units import parse, parse_count

LORA_RANK = 16
JOB_FILES = ("json", "toml", "yaml", "yml", "sh", "txt", "args", "bash", "slurm", "sbatch")
"""Endings of files that may be another tool's."""
SEQ_LEN = 4096
TARGETS = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output", "qkv_proj": "qkv", "c_attn": "qkv",
    "query_key_value": "qkv", "out_proj": "output", "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "gate_up_proj": "gate_up", "fc1": "up", "fc2": "down", "c_fc": "up",
}  # fmt: skip
"""Names of linear layers in transformers' modules, and ours."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A run, ready to be estimated. `assumed`: what the user did not say, by flag."""

    request: Request
    model: ModelSpec
    layout: Layout
    training: Training
    gpu: Gpu | None
    lengths: Lengths | None
    assumed: dict[str, str]
    cluster: Cluster | None = None
    untimed: str = ""
    """Why there is no cluster, where a GPU is given."""
    scale: float = 1.0
    """What the user's measured run took, over what was predicted for it."""
    file: str = ""
    """Where the model is another tool's job file: whose, and how its keys were read."""
    uncounted: tuple[Uncounted, ...] = ()
    """What a job file asks for that is not counted."""
    dropout: float = 0.0
    """Of the input of a job file's adapters."""

    def estimate(self) -> Estimate:
        """The estimate of the job, its range widened by what a job file asks for that is not counted."""
        found = estimate(self.model, self.layout, self.training, self.gpu, self.cluster, scale=self.scale)
        found = msgspec.structs.replace(found, assumed=self.assumed)
        if self.untimed:
            found = msgspec.structs.replace(found, untimed=self.untimed)
        if self.uncounted or (self.dropout and self.training.lora is not None):
            from loadgauge.resolve.job_file import widened

            found = widened(self, found)
        return found

    def budget(self, found: Estimate) -> Budget | None:
        """What the whole run takes, where the user says how many tokens it has."""
        request = self.request
        if request.tokens is None or found.time is None:
            return None
        failures = None
        if request.mtbf_hours is not None:
            given = {"checkpoint_seconds": request.checkpoint_seconds, "restart_seconds": request.restart_seconds}
            failures = Failures(
                hours_between_failures_per_gpu=request.mtbf_hours,
                **{name: value for name, value in given.items() if value is not None},
            )
        return Budget.of(
            tokens=parse_count(request.tokens, "tokens"),
            gpus=self.layout.gpus,
            step_tokens=found.time.tokens,
            step_seconds=found.time.step,
            price=request.price,
            watts=found.time.tdp,
            failures=failures,
            wanted_days=request.days,
        )

    def worst_case(self) -> Estimate | None:
        """The estimate where every sequence of the micro-batch is the longest there is; None without lengths."""
        if self.lengths is None:
            return None
        layout = msgspec.structs.replace(self.layout, tokens=None, pairs=None)
        return estimate(self.model, layout, self.training, self.gpu)

    def forecast(self) -> Forecast | None:
        """What the lengths need padded and without padding; None without lengths."""
        if self.lengths is None:
            return None
        return forecast(self.model, self.lengths, self.layout, self.training, self.gpu, self.cluster, scale=self.scale)


def worst_routing(given: Job) -> Estimate | None:
    """The estimate where all tokens that can go to one expert rank do; None where that changes nothing."""
    worst = given.layout.worst_imbalance(given.model)
    if worst <= given.layout.expert_imbalance:
        return None
    layout = msgspec.structs.replace(given.layout, expert_imbalance=worst)
    return msgspec.structs.replace(given, layout=layout).estimate()


def job(request: Request, model: ModelSpec | None = None) -> Job:
    """The run that a request means; `model` where it is at hand already.

    >>> found = job(Request(model="llama-3.1-8b", gpus=16, tp=8))
    >>> found.layout.dp, found.layout.seq_len, found.training.framework.name
    (2, 4096, 'megatron')
    """
    file, dropout = "", 0.0
    uncounted: tuple[Uncounted, ...] = ()
    if model is None and os.path.splitext(request.model)[1].lower().lstrip(".") in JOB_FILES:
        from loadgauge.resolve.job_file import from_job_file, is_job_file  # only then are dialects read

        if is_job_file(request.model):
            request, model, file, uncounted, dropout = from_job_file(request)
    chosen = find_model(request.model) if model is None else model
    card = None if request.gpu is None else gpu(request.gpu)
    assumed: dict[str, str] = {}

    def fill(name: str, default: Any, why: str = "") -> Any:
        value = getattr(request, name)
        if value is None:
            assumed[f"--{name.replace('_', '-')}"] = f"{default}{f' ({why})' if why else ''}"
            return default
        return value

    _applies(request, chosen)
    if request.mtp:
        chosen = chosen.with_mtp()
    _whole_run(request)
    dp, degrees = _degrees(request, fill)
    micro_batch = fill("micro_batch", 1)
    lengths = _lengths(request.lengths)
    kind = training(
        framework=fill("framework", framework_of(request), _why_framework(request)),
        precision=fill("precision", "bf16"),
        optimizer=fill("optimizer", "adamw"),
        attention=fill("attention", "flash"),
        loss=fill("loss", "auto"),
        lora=_lora(request, chosen, fill),
        offload=_offload(request.offload or "none"),
    )
    if request.overlap is not None:
        kind = msgspec.structs.replace(kind, overlap=Overlap.parse(request.overlap))
    if request.precision in (None, "bf16", "fp16"):
        assumed["--precision"] = (
            f"{kind.precision.name} ({kind.framework.name}'s recipe of {request.precision or 'bf16'})"
        )
    if chosen.head.kind != "lm":
        assumed.pop("--loss", None)
    elif request.loss in (None, "auto"):
        assumed["--loss"] = f"{kind.kernels.loss} ({kind.framework.name}'s)"
    layout = Layout(
        **degrees,
        dp=dp,
        zero=fill("zero", 0),
        sequence_parallel=request.sequence_parallel or False,
        recompute=RecomputePolicy.parse(fill("recompute", "none")),
        micro_batch=micro_batch,
        global_batch=fill("global_batch", dp * micro_batch, "dp x micro-batch"),
        seq_len=_seq_len(request, chosen, lengths, fill),
        schedule=_schedule(request, assumed),
        stage_layers=_stage_layers(request.stage_layers),
        cp_comm=request.cp_comm or "ring",  # type: ignore[arg-type]
        expert_imbalance=_imbalance(request, chosen, fill),
        replicas=request.replicas or 1,
        order=_order(request.order),
        **_ragged(lengths, micro_batch, kind),
    )
    for key, size in chosen.defaults:
        assumed[key] = f"{size} (not in the config: {chosen.model_type}'s default)"
    machines, untimed = _cluster(request, card, layout)
    found = Job(
        request=request, model=chosen, layout=layout, training=kind, gpu=card, lengths=lengths, assumed=assumed,
        cluster=machines, untimed=untimed, file=file, uncounted=uncounted, dropout=dropout,
    )  # fmt: skip
    if request.measured is None:
        return found
    from loadgauge.resolve.rescale import scale  # it asks for a job itself

    return msgspec.structs.replace(found, scale=scale(request, chosen))


def _whole_run(request: Request) -> None:
    """Refuses flags that go with others that are not there."""
    if request.gpu is None:
        for name in ("gpus_per_node", "link_bandwidth", "nic_bandwidth", "overlap", "order", "tokens", "measured"):
            if getattr(request, name) is not None:
                raise ConfigError("goes with --gpu", key=name)
    if request.tokens is None:
        for name in ("price", "days", "mtbf_hours"):
            if getattr(request, name) is not None:
                raise ConfigError("goes with --tokens, the length of the whole run", key=name)
    if request.mtbf_hours is None:
        for name in ("checkpoint_seconds", "restart_seconds"):
            if getattr(request, name) is not None:
                raise ConfigError("goes with --mtbf-hours, how often a GPU fails", key=name)
    if request.cp_comm is not None and (request.cp or 1) == 1:
        raise ConfigError("goes with --cp above 1", key="cp_comm")


def bandwidth(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    value, unit = parse(text)
    if unit != "byte/s" or value <= 0:
        raise ConfigError(f"must be a bandwidth such as 50GB/s or 400Gbit/s, got {text!r}", key=name)
    return value


def _cluster(request: Request, card: Gpu | None, layout: Layout) -> tuple[Cluster | None, str]:
    """The cluster the job runs on, or why there is none."""
    if card is None:
        return None, ""
    link, adapter = (bandwidth(getattr(request, name), name) for name in ("link_bandwidth", "nic_bandwidth"))
    try:
        return cluster(card, layout.gpus, request.gpus_per_node, link, adapter), ""
    except NotStated as error:
        return None, str(error)


def _applies(request: Request, model: ModelSpec) -> None:
    """Refuses flags that mean nothing for this model."""
    if request.loss is not None and model.head.kind != "lm":
        raise ConfigError(f"{model.name} has no language-model head, so it has no such loss", key="loss")
    experts = any(isinstance(block.mlp, Moe) for block in model.blocks)
    for name in ("ep", "etp"):
        if (getattr(request, name) or 1) > 1 and not experts:
            raise ConfigError(f"{model.name} has no experts to share out", key=name)


def _degrees(request: Request, fill: Any) -> tuple[int, dict[str, int]]:
    """The parallel degrees; data parallelism is what is left of the GPUs."""
    names = ("tp", "pp", "vpp", "cp", "ep", "etp")
    degrees = {name: 1 if getattr(request, name) is None else getattr(request, name) for name in names}
    within = degrees["tp"] * degrees["pp"] * degrees["cp"]
    gpus = fill("gpus", within, "one replica" if within > 1 else "")
    if gpus % within:
        raise LayoutError(
            f"{gpus} GPUs cannot be shared out: tp {degrees['tp']} x pp {degrees['pp']} x cp {degrees['cp']} = {within}"
            f" leaves {gpus % within}",
            dimension="gpus", size=gpus, ranks=within,
        )  # fmt: skip
    return gpus // within, degrees


def _lengths(path: str | None) -> Lengths | None:
    return None if path is None else Lengths.parse(path)


def framework_of(request: Request) -> str:
    """The framework where none is named."""
    return default_framework({axis: (getattr(request, axis) or 1,) for axis in MODEL_PARALLEL})


def _why_framework(request: Request) -> str:
    used = [axis for axis in MODEL_PARALLEL if (getattr(request, axis) or 1) > 1]
    return f"because of {' and '.join(used)}" if used else ""


def _offload(text: str) -> Any:
    if text not in ("none", "optimizer", "all"):
        raise ConfigError(f"unknown offload {text!r} (known: none, optimizer, all)", key="offload")
    return text


def _schedule(request: Request, assumed: dict[str, str]) -> Any:
    if request.schedule is not None:
        if (request.pp or 1) == 1:
            raise ConfigError(f"{request.schedule} is a pipeline schedule and needs pp above 1", key="schedule")
        return request.schedule
    if (request.pp or 1) > 1:
        name = "interleaved" if (request.vpp or 1) > 1 else "1f1b"
        assumed["--schedule"] = name
        return name
    return "1f1b"


def _seq_len(request: Request, model: ModelSpec, lengths: Lengths | None, fill: Any) -> int:
    if lengths is not None:
        if request.seq_len is not None:
            raise ConfigError("the lengths file says how long the sequences are; leave --seq-len out", key="seq_len")
        return lengths.longest
    longest = model.max_position_embeddings
    found: int = fill("seq_len", SEQ_LEN if longest is None else min(SEQ_LEN, longest))
    return found


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
        return AXES
    names = [name.strip() for name in text.split(",")]
    if "ep" not in names and "dp" in names:
        names.insert(names.index("dp"), "ep")
    if sorted(names) != sorted(AXES):
        raise ConfigError(f"must name each of {', '.join(AXES)} once, got {text!r}", key="order")
    return tuple(names)


def _imbalance(request: Request, model: ModelSpec, fill: Any) -> float:
    """Tokens of the busiest expert rank over the mean; balanced where nothing is said, and said so."""
    if any(isinstance(block.mlp, Moe) for block in model.blocks):
        return float(fill("expert_imbalance", 1.0, "balanced routing"))
    if request.expert_imbalance is not None:
        raise ConfigError(f"{model.name} has no experts", key="expert_imbalance")
    return 1.0


def _stage_layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 6 for word in words):
        raise ConfigError(f"must be counts of layers such as 7,8,8,7, got {text!r}", key="stage_layers")
    return tuple(int(word) for word in words)


def _lora(request: Request, model: ModelSpec, fill: Any) -> Lora | None:
    if request.base is not None and not request.qlora:
        raise ConfigError("goes with --qlora", key="base")
    if request.lora_rank is None and not request.qlora:
        if request.lora_targets is not None:
            raise ConfigError("goes with --lora-rank or --qlora", key="lora_targets")
        return None
    rank = fill("lora_rank", LORA_RANK)
    lora = Lora(rank=rank, quantised=(request.base or True) if request.qlora else False)  # type: ignore[arg-type]
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
