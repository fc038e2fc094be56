"""The estimate: one model, one way to train it, one layout, one kind of GPU."""

from collections.abc import Iterator

from loadgauge.core.base.errors import ConfigError, NotStated
from loadgauge.core.definitions.hardware.calibration import Efficiencies, slowed
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu
from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.lora import FUSED, Lora
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.model.tuners import TUNERS
from loadgauge.core.definitions.training.frameworks import default_framework
from loadgauge.core.definitions.training.training import Training, training as how_to_train
from loadgauge.core.estimate.result import Basis, Estimate
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.estimate.time.step import Time
from loadgauge.core.estimate.time.traffic import Traffic
from loadgauge.core.estimate.workings import Workings, view_of

__all__ = ["default_training", "estimate", "view_of"]


def estimate(
    model: ModelSpec,
    layout: Layout,
    training: Training | None = None,
    gpu: Gpu | None = None,
    cluster: Cluster | None = None,
    *,
    efficiencies: Efficiencies | None = None,
    scale: float = 1.0,
    shared: Workings | None = None,
) -> Estimate:
    """Estimate memory, FLOPs, and on a cluster the time and traffic of one optimizer step.

    gpu: enables the fits / does-not-fit verdict; cluster: enables time and network; efficiencies: another calibration than the
        GPU's own; scale: measured over predicted seconds of a step; shared: workings of the same layout without a cluster.
        `loadgauge.estimate` is this function with names in place of specifications, and the cluster filled in.
    Memory is of the worst rank at its peak [bytes]. Raises `LayoutError` when the layout cannot exist, `NotModelled` when
    it can but is not modelled.

    >>> from loadgauge import cluster, gpu, model
    >>> h100s = cluster(gpu("h100-sxm5-80gb"), 8)
    >>> layout = Layout(dp=8, zero=3, micro_batch=1, global_batch=8, seq_len=4096)
    >>> result = estimate(model("llama-3.1-8b"), layout, cluster=h100s)
    >>> result.params, result.memory.fits
    (8030261248, True)
    """
    chosen = (training or default_training(layout)).under(layout.zero)
    layout.check(model)
    chosen.check(model)
    if cluster is not None:
        gpu = cluster.gpu if gpu is None else gpu
        if cluster.gpus != layout.gpus:
            raise ConfigError(f"the layout needs {layout.gpus} GPUs and the cluster has {cluster.gpus}", key="gpus")
        if scale != 1.0:
            cluster, efficiencies = slowed(cluster, 3 * (scale,), efficiencies), None
    workings = Workings(model, layout, chosen, gpu, cluster, efficiencies)
    if shared is not None:
        workings.share(shared)
    time, network, untimed = _time(workings)
    counted = parameters(model)
    result = Estimate(
        model=model,
        params=counted.total,
        active_params=counted.active,
        layout=layout,
        training=chosen,
        gpu=None if gpu is None else gpu.id,
        memory=workings.peak_memory,
        flops=workings.flops,
        time=time,
        network=network,
        cluster=cluster,
        basis=_basis(gpu, None if time is None else workings.efficiencies),
        left_out=_left_out(model, chosen),
        untimed=untimed,
        assumed={key: f"{size} (not in the config: {model.model_type}'s default)" for key, size in model.defaults},
    )
    return result.keep(workings)


def default_training(layout: Layout) -> Training:
    """Return the training used where none is given: the default framework's, AdamW, mixed precision.

    >>> [default_training(Layout(**degrees, seq_len=1)).framework.name for degrees in ({"dp": 8}, {"tp": 8})]
    ['huggingface', 'megatron']
    """
    degrees = {axis: (size,) for axis in MODEL_PARALLEL if isinstance(size := getattr(layout, axis), int)}
    return how_to_train(default_framework(degrees))


def _time(workings: Workings) -> tuple[Time | None, tuple[Traffic, ...], str]:
    """The time and traffic of a step, or why there is none."""
    if workings.cluster is None:
        return None, (), "they need a --gpu"
    try:
        return *workings.timed, ""
    except NotStated as error:
        return None, (), str(error)


def _basis(gpu: Gpu | None, efficiencies: Efficiencies | None) -> dict[str, Basis]:
    basis: dict[str, Basis] = dict.fromkeys(
        (
            "params",
            "flops",
            "weights",
            "gradients",
            "optimizer",
            "gathered",
            "activations",
            "loss",
            "transient",
            "evaluation",
        ),
        "derived",
    )
    basis["outside"] = "assumed"
    basis["high"] = "assumed"
    if gpu is not None:
        basis["capacity"] = gpu.capacity_basis
    if efficiencies is not None:
        basis["network"] = "derived"
        basis["time"] = "measured" if efficiencies.basis == "measured" else "assumed"
    return basis


def _adapters_left_out(lora: Lora) -> Iterator[str]:
    stored = lora.stored
    if stored is not None and stored.source not in ("dettmers2023", "dettmers2022", "openai2025"):
        yield "what the kernels of this quantised base keep and cast (taken for those of bitsandbytes' 4-bit layers)"
    if lora.fused:
        yield "gradients that Unsloth's kernels write over activations in attention, and its smaller chunks of short batches' loss"
        if any(not lora.fuses(target) for group in FUSED for target in group & lora.targets):
            yield "what Unsloth keeps where not all matrices of attention or MLP have adapters (taken for PEFT's)"
    if lora.method in TUNERS and (note := TUNERS[lora.method].left_out):
        yield note
    if not lora.peft and lora.stored is not None:
        yield "casts of this library's adapters and 4-bit layers"


def _left_out(model: ModelSpec, training: Training) -> tuple[str, ...]:
    around = training.around
    silent = {
        "evaluation": around.eval_batch,
        "generation": around.generate,
        "checkpoint saving": around.save == "full",
    }
    notes = [", ".join(["data loading", *(name for name, counted in silent.items() if not counted)])]
    if training.lora is not None:
        notes += _adapters_left_out(training.lora)
    if training.kernels.compiled:
        notes.append("buffers inside torch.compile's kernels, pools of its CUDA graphs, and what graph breaks keep")
    notes += [f"config key {key}" for key in model.unused_keys]
    notes += model.own.notes
    return tuple(notes)
