"""`loadgauge.estimate`: the estimate as a function of names or of specifications."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack, overload

import msgspec

from loadgauge.core.answers.post_training import RunOfTask, answered
from loadgauge.core.base.errors import ConfigError, NotStated
from loadgauge.core.definitions.hardware.calibration import Efficiencies
from loadgauge.core.definitions.hardware.cluster import cluster as cluster_of
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu, gpu as gpu_of
from loadgauge.core.definitions.job.flag_types import Flags, TaskFlags
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.estimate import estimate as of_specifications
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.families.reader import shown
from loadgauge.core.resolve.resolve import resolve_job


def posttrain(model: str | Job, **flags: Unpack[TaskFlags]) -> RunOfTask:
    """Return memory and time of a step of preference tuning, distillation or reinforcement learning, by phase and role.

    run: its roles, sequences and engine; memory: by phase and role; time: of a step, by phase; None where `untimed` says why

    model: a name in the catalogue, the path of a config.json, or a `Job` with a `task`, which has no other arguments
    flags: those of `loadgauge estimate --task`, with underscores

    Raises `ConfigError`, `LayoutError` or `NotModelled`.

    >>> import loadgauge
    >>> answer = loadgauge.posttrain("llama-3.1-8b", task="dpo", gpu="h200-sxm-141gb", gpus=8, zero=3, recompute="full")
    >>> answer.memory.verdict, [phase.name for phase in answer.memory.phases]
    ('fits', ['update', 'reference'])
    >>> 1 < answer.time.step < 10
    True
    """
    if isinstance(model, Job):
        if flags:
            raise ConfigError("a Job is estimated as it is; change it with job.replace(...)", key="model")
        return answered(model)
    return answered(Job.of(model, flags))


@overload
def estimate(model: Job) -> Estimate: ...


@overload
def estimate(
    model: str | Path | ModelSpec,
    layout: Layout,
    training: Training | None = None,
    gpu: str | Gpu | None = None,
    cluster: Cluster | None = None,
    *,
    efficiencies: Efficiencies | None = None,
    scale: float = 1.0,
) -> Estimate: ...


@overload
def estimate(model: str | Path | ModelSpec, *, gpu: str | Gpu | None = None, **flags: Unpack[Flags]) -> Estimate: ...


def estimate(
    model: str | Path | ModelSpec | Job,
    layout: Layout | None = None,
    training: Training | None = None,
    gpu: str | Gpu | None = None,
    cluster: Cluster | None = None,
    *,
    efficiencies: Efficiencies | None = None,
    scale: float = 1.0,
    **flags: Any,
) -> Estimate:
    """Estimate the peak memory of the worst rank, the FLOPs and, on a GPU, the time and traffic of one optimizer step.

    Without a `layout`, the keywords are the flags of `loadgauge estimate`, with underscores; a `Job` holds the same
    fields. What is not given gets the command's default, listed in `Estimate.assumed`, and dp = gpus / (tp * pp * cp).
    With a `Layout` nothing is assumed; `training` defaults to `loadgauge.training()`.

    model: a name in the catalogue, the path of a config.json or its folder (without a layout also of another tool's
    job file), a `ModelSpec`, or a `Job`, which has no other arguments
    gpu: an id (`loadgauge.gpu_ids()`) or a `Gpu`; required for the verdict and the time
    cluster: the links between the GPUs (`loadgauge.cluster`), where they differ from those in the GPU's data file
    efficiencies: a calibration other than the GPU's own; scale: measured step time over predicted step time

    Raises `ConfigError` for arguments that cannot be read, `LayoutError` for a layout that cannot exist, `NotModelled`
    for one that can but is not modelled.

    >>> import loadgauge
    >>> result = loadgauge.estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, seq_len=8192)
    >>> result.layout.dp, result.memory.capacity is None, result.time is None
    (8, False, False)
    >>> job = loadgauge.Job(model="llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, seq_len=8192)
    >>> loadgauge.estimate(job) == result
    True
    >>> layout = loadgauge.Layout(dp=8, zero=3, global_batch=8, seq_len=8192)
    >>> loadgauge.estimate("llama-3.1-8b", layout, gpu="h100-sxm5-80gb").memory.total == result.memory.total
    True
    """
    if isinstance(model, Job):
        if any(value is not None for value in (layout, training, gpu, cluster, efficiencies)) or scale != 1.0 or flags:
            raise ConfigError("a Job is estimated as it is; change it with job.replace(...)", key="model")
        return resolve_job(model).estimate()
    if layout is None:
        objects = {"training": training, "cluster": cluster, "efficiencies": efficiencies}
        for name, value in objects.items():
            if value is not None:
                raise ConfigError("needs a Layout; without one, give the flags of the job", key=name)
        if scale != 1.0:
            raise ConfigError("needs a Layout; without one, give measured='step=12.3s'", key="scale")
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
    result = of_specifications(spec, layout, training, card, cluster, efficiencies=efficiencies, scale=scale)
    if untimed:
        result = msgspec.structs.replace(result, untimed=untimed)
    return result


def _signature() -> inspect.Signature:
    """The signature of `estimate` with every flag by name."""
    signature = inspect.signature(estimate)
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in Flags.__annotations__.items()
    ]
    return signature.replace(parameters=[*list(signature.parameters.values())[:-1], *flags])


estimate.__signature__ = _signature()  # type: ignore[attr-defined]


def _of_flags(model: str | Path | ModelSpec, gpu: str | Gpu | None, flags: Mapping[str, Any]) -> Estimate:
    """The estimate that `loadgauge estimate` makes of a job."""
    if not isinstance(model, str | Path | ModelSpec):
        raise _wrong("model", "a name in the catalogue, a path, a ModelSpec or a Job", model)
    spec = model if isinstance(model, ModelSpec) else None
    card = _gpu(gpu)
    if isinstance(gpu, Gpu) and gpu_of(gpu.id) != gpu:
        raise ConfigError(f"a changed {gpu.id} needs a Layout; without one, give an id", key="gpu")
    job = Job.of(spec.name if spec else str(model), flags)
    name = gpu if isinstance(gpu, str) else None if card is None else card.id
    return resolve_job(job.replace(gpu=name), spec).estimate()


def _model(model: str | Path | ModelSpec) -> ModelSpec:
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, str | Path):
        return find_model(str(model))
    raise _wrong("model", "a name in the catalogue, a path, a ModelSpec or a Job", model)


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
