"""`loadgauge.estimate`: the estimate as a function of names or of specifications."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import click
import msgspec

from loadgauge.errors import ConfigError, NotStated
from loadgauge.estimate.estimate import estimate as of_specifications
from loadgauge.estimate.result import Estimate
from loadgauge.families.catalogue import find_model
from loadgauge.families.reader import shown
from loadgauge.resolve.resolve import resolve_job
from loadgauge.spec.calibration import Rates
from loadgauge.spec.cluster import cluster as cluster_of
from loadgauge.spec.hardware import Cluster, Gpu
from loadgauge.spec.hardware import gpu as gpu_of
from loadgauge.spec.job import Job
from loadgauge.spec.layout import Layout, Schedule
from loadgauge.spec.model import ModelSpec
from loadgauge.spec.training import Training


class Flags(TypedDict, total=False):
    """What describes a job beside its model and GPU: the flags of `loadgauge estimate`, with underscores."""

    gpus: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    zero: int
    sequence_parallel: bool
    schedule: Schedule
    recompute: str
    stage_layers: str
    micro_batch: int
    global_batch: int
    seq_len: int
    lengths: str
    precision: str
    optimizer: str
    attention: Literal["flash", "eager"]
    loss: str
    framework: str
    lora_rank: int
    lora_targets: str
    qlora: bool
    base: str
    offload: Literal["none", "optimizer", "all"]
    gpus_per_node: int
    link_bandwidth: str
    nic_bandwidth: str
    cp_comm: Literal["ring", "all_gather", "all_to_all"]
    mtp: bool
    expert_imbalance: float
    replicas: int
    order: str
    overlap: str
    tokens: str
    price: float
    days: float
    mtbf_hours: float
    checkpoint_seconds: float
    restart_seconds: float
    measured: str


@overload
def estimate(
    model: str | Path | ModelSpec,
    layout: Layout,
    training: Training | None = None,
    gpu: str | Gpu | None = None,
    cluster: Cluster | None = None,
    *,
    rates: Rates | None = None,
    scale: float = 1.0,
) -> Estimate: ...


@overload
def estimate(
    model: str | Path | ModelSpec, *, gpu: str | Gpu | None = None, **flags: Unpack[Flags]
) -> Estimate: ...  # fmt: skip


def estimate(
    model: str | Path | ModelSpec,
    layout: Layout | None = None,
    training: Training | None = None,
    gpu: str | Gpu | None = None,
    cluster: Cluster | None = None,
    *,
    rates: Rates | None = None,
    scale: float = 1.0,
    **flags: Any,
) -> Estimate:
    """Memory of the worst rank at its peak, FLOPs and, on a GPU, the time and traffic of one optimizer step.

    Without a `layout`, the keywords are the flags of `loadgauge estimate`, with underscores: what is not given is
    assumed as the command assumes it (see `Estimate.assumed`), and data parallelism is what tp, pp and cp leave of
    `gpus`. With a `Layout`, nothing is assumed; `training` is `loadgauge.training()` unless given.

    model: a name in the catalogue, the path of a config.json or of its folder (without a layout also of another tool's
    job file), or a `ModelSpec`
    gpu: an id (`loadgauge.gpu_ids()`) or a `Gpu`; without one there is neither a verdict nor a time
    cluster: the links between the GPUs, where they are not those that the GPU's file states (`loadgauge.cluster`)
    rates: another calibration than the GPU's own; scale: time that a measured run took over the time predicted for it

    Raises `ConfigError` for arguments that cannot be read, `LayoutError` for a layout that cannot exist, `NotModelled`
    for one that can but is not modelled.

    >>> import loadgauge
    >>> result = loadgauge.estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, seq_len=8192)
    >>> result.layout.dp, result.memory.capacity is None, result.time is None
    (8, False, False)
    >>> layout = loadgauge.Layout(dp=8, zero=3, global_batch=8, seq_len=8192)
    >>> loadgauge.estimate("llama-3.1-8b", layout, gpu="h100-sxm5-80gb").memory == result.memory
    True
    """
    if layout is None:
        given = {"training": training, "cluster": cluster, "rates": rates}
        for name, value in given.items():
            if value is not None:
                raise ConfigError("goes with a Layout; without one, give the flags of the job", key=name)
        if scale != 1.0:
            raise ConfigError("goes with a Layout; without one, give measured='step=12.3s'", key="scale")
        return _of_flags(model, gpu, flags)
    _expect(layout, Layout, "layout", "a loadgauge.Layout; without one, give gpus=, tp= and the other flags by name")
    if flags:
        names = ", ".join(flags)
        raise ConfigError(f"{names}: already said by the Layout and the Training; leave them out, or leave these out")
    spec = _model(model)
    _expect(training, Training | None, "training", "what loadgauge.training() gives")
    _expect(cluster, Cluster | None, "cluster", "what loadgauge.cluster() gives")
    card = _gpu(gpu)
    untimed = ""
    if cluster is None and card is not None:
        layout.check(spec)
        try:
            cluster = cluster_of(card, layout.gpus)
        except (NotStated, ConfigError) as error:
            untimed = f"{error}, in a loadgauge.cluster()"
    result = of_specifications(spec, layout, training, card, cluster, rates=rates, scale=scale)
    if untimed:
        result = msgspec.structs.replace(result, untimed=untimed)
    return result


def signature() -> inspect.Signature:
    """The signature of `estimate`, with every flag by its name."""
    known = inspect.signature(estimate)
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in Flags.__annotations__.items()
    ]
    return known.replace(parameters=[*list(known.parameters.values())[:-1], *flags])


def _of_flags(model: str | Path | ModelSpec, gpu: str | Gpu | None, flags: Mapping[str, Any]) -> Estimate:
    """The estimate that `loadgauge estimate` makes of a job."""
    if not isinstance(model, str | Path | ModelSpec):
        raise _wrong("model", "a name in the catalogue, a path or a ModelSpec", model)
    spec = model if isinstance(model, ModelSpec) else None
    card = _gpu(gpu)
    if isinstance(gpu, Gpu) and gpu_of(gpu.id) != gpu:
        raise ConfigError(f"a changed {gpu.id} goes with a Layout; without one, give an id", key="gpu")
    job = Job(
        model=spec.name if spec else str(model), gpu=None if card is None else card.id, **_checked(flags)
    )  # fmt: skip
    return resolve_job(job, spec).estimate()


def _checked(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags, each read as the command line reads it. None is the same as not given."""
    from loadgauge.cli.estimate import command

    known = {str(parameter.name): parameter for parameter in command.params}
    checked: dict[str, Any] = {}
    for name, value in flags.items():
        if name not in Job.__struct_fields__ or name not in known:
            fields = [field for field in Job.__struct_fields__ if field in known]
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {close[0]}?" if close else f" (known: {', '.join(fields)})"
            raise ConfigError(f"no flag of a job is called {shown(name)}{hint}")
        if value is None:
            continue
        parameter = known[name]
        is_switch = isinstance(parameter, click.Option) and parameter.is_flag
        if is_switch != isinstance(value, bool) or not isinstance(value, str | int | float | Path):
            raise _wrong(name, "True or False" if is_switch else "a number or a text", value)
        if is_switch:
            checked[name] = value
            continue
        try:
            checked[name] = parameter.type.convert(str(value), None, None)
        except click.UsageError as error:
            raise ConfigError(error.message, key=name) from None
    return checked


def _model(model: str | Path | ModelSpec) -> ModelSpec:
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, str | Path):
        return find_model(str(model))
    raise _wrong("model", "a name in the catalogue, a path or a ModelSpec", model)


def _gpu(gpu: str | Gpu | None) -> Gpu | None:
    if gpu is None or isinstance(gpu, Gpu):
        return gpu
    if isinstance(gpu, str):
        return gpu_of(gpu)
    raise _wrong("gpu", "the id of a GPU (loadgauge.gpu_ids() lists them) or what loadgauge.gpu() gives", gpu)


def _expect(value: object, kind: Any, name: str, accepted: str) -> None:
    if not isinstance(value, kind):
        raise _wrong(name, accepted, value)


def _wrong(name: str, accepted: str, value: object) -> ConfigError:
    return ConfigError(f"must be {accepted}, got {shown(value)} ({type(value).__name__})", key=name)
