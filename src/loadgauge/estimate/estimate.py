"""The estimate: one model, one way to train it, one layout, one kind of GPU."""

from __future__ import annotations

from loadgauge.algebra import shard
from loadgauge.errors import ConfigError, NotStated
from loadgauge.estimate.flops import Flops, step_flops
from loadgauge.estimate.memory.overhead import FRAGMENTATION, non_pytorch_memory, workspaces
from loadgauge.estimate.memory.phases import Moment, moments
from loadgauge.estimate.memory.rank_memory import MemoryModel
from loadgauge.estimate.parameters import parameters
from loadgauge.estimate.result import Basis, Estimate, Memory, Rank, Time
from loadgauge.estimate.schedule.stages import Stage, stages
from loadgauge.estimate.time.summary import step_time
from loadgauge.estimate.time.traffic import Traffic
from loadgauge.layers import View
from loadgauge.spec.axes import MODEL_PARALLEL
from loadgauge.spec.calibration import Rates
from loadgauge.spec.calibration import rates as calibrated
from loadgauge.spec.frameworks import default_framework
from loadgauge.spec.hardware import Cluster, Gpu
from loadgauge.spec.layout import Layout
from loadgauge.spec.model import ModelSpec
from loadgauge.spec.training import Training
from loadgauge.spec.training import training as how_to_train


def view_of(layout: Layout, training: Training) -> View:
    """What one rank sees of one micro-batch."""
    if (layout.tokens is None) != (layout.pairs is None):
        raise ConfigError("a ragged micro-batch needs both its tokens and its query-key pairs", key="lengths")
    own = shard(layout.seq_len, layout.cp, "seq_len")
    return View(
        tokens=own * layout.micro_batch if layout.tokens is None else layout.tokens / layout.cp,
        pairs=own * layout.seq_len * layout.micro_batch if layout.pairs is None else layout.pairs / layout.cp,
        kernel_tokens=None if layout.kernel_tokens is None else layout.kernel_tokens / layout.cp,
        sequences=layout.micro_batch,
        positions=own,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        cp=layout.cp,
        cp_comm=layout.cp_comm,
        ep=layout.ep,
        etp=layout.etp,
        imbalance=layout.expert_imbalance,
        kernels=training.kernels,
        lora=training.lora,
    )


def estimate(
    model: ModelSpec,
    layout: Layout,
    training: Training | None = None,
    gpu: Gpu | None = None,
    cluster: Cluster | None = None,
    *,
    rates: Rates | None = None,
    scale: float = 1.0,
) -> Estimate:
    """Memory of the worst rank at its peak, FLOPs, and, on a cluster, the time and traffic of one optimizer step.

    `gpu` enables the verdict, `cluster` the time and network; `loadgauge.estimate` is this function with names in place of
    specifications, and the cluster filled in. rates: another calibration than the GPU's own; scale: time that a measured
    run took over the time predicted for it. Raises `LayoutError` when the layout cannot exist, `NotModelled` when it can
    but is not modelled.

    >>> from loadgauge import cluster, gpu, model
    >>> h100s = cluster(gpu("h100-sxm5-80gb"), 8)
    >>> layout = Layout(dp=8, zero=3, micro_batch=1, global_batch=8, seq_len=4096)
    >>> result = estimate(model("llama-3.1-8b"), layout, cluster=h100s)
    >>> result.params, result.memory.fits
    (8030261248, True)
    """
    chosen = training or default_training(layout)
    layout.check(model)
    chosen.check(model)
    if cluster is not None:
        gpu = cluster.gpu if gpu is None else gpu
        if cluster.gpus != layout.gpus:
            raise ConfigError(f"the layout needs {layout.gpus} GPUs and the cluster has {cluster.gpus}", key="gpus")
    view = view_of(layout, chosen)
    facts = MemoryModel(model, layout, chosen, view)
    flops = step_flops(model, layout, chosen.kernels, view)
    known = rates or calibrated("" if gpu is None else gpu.id)
    time, network, untimed = _time(facts, flops, cluster, known, scale)
    counted = parameters(model)
    return Estimate(
        model=model,
        params=counted.total,
        active_params=counted.active,
        layout=layout,
        training=chosen,
        gpu=None if gpu is None else gpu.id,
        memory=_memory(facts, gpu),
        flops=flops,
        time=time,
        network=network,
        cluster=cluster,
        basis=_basis(gpu, None if time is None else known),
        left_out=_left_out(model, chosen),
        untimed=untimed,
        assumed={key: f"{size} (not in the config: {model.model_type}'s default)" for key, size in model.defaults},
    )


def default_training(layout: Layout) -> Training:
    """The training of a layout where none is given: the default framework's, with AdamW in mixed precision.

    >>> [default_training(Layout(**degrees, seq_len=1)).framework.name for degrees in ({"dp": 8}, {"tp": 8})]
    ['huggingface', 'megatron']
    """
    degrees = {axis: (size,) for axis in MODEL_PARALLEL if isinstance(size := getattr(layout, axis), int)}
    return how_to_train(default_framework(degrees))


def _time(
    facts: MemoryModel, flops: Flops, cluster: Cluster | None, rates: Rates, scale: float
) -> tuple[Time | None, tuple[Traffic, ...], str]:
    """The time and traffic of a step, or why there is none."""
    if cluster is None:
        return None, (), "they need a --gpu"
    try:
        return *step_time(facts, flops, cluster, rates, scale), ""
    except NotStated as error:
        return None, (), str(error)


def _memory(facts: MemoryModel, gpu: Gpu | None) -> Memory:
    model, layout = facts.model, facts.layout
    beyond = non_pytorch_memory(layout)
    held = workspaces(gpu, facts.training, grouped=facts.has_experts)
    fixed = beyond.value + held
    worst: tuple[Stage, list[Moment], Moment] | None = None
    peaks: dict[object, float] = {}
    by_stage: list[float] = []
    host = 0.0
    for stage in stages(model, layout):
        alike = facts.alike(stage)
        if alike not in peaks:
            passed = list(moments(facts, stage))
            peak = max(passed, key=lambda moment: moment.total)
            peaks[alike] = peak.total
            if worst is None or peak.total > worst[2].total:
                worst = (stage, passed, peak)
                host = facts.host(stage)
        by_stage.append(peaks[alike] + fixed)
    assert worst is not None
    stage, passed, peak = worst
    allocated = peak.total + held
    total = allocated + beyond.value
    capacity = None if gpu is None else gpu.capacity
    return Memory(
        total=total,
        low=allocated + beyond.low,
        high=allocated * (1 + FRAGMENTATION.high) + beyond.high,
        capacity=capacity,
        fits=None if capacity is None else total <= capacity,
        rank=Rank(stage.index),
        moment=peak.name,
        parts={**peak.parts, "outside": fixed},
        moments=tuple(Moment(m.name, m.phase, {**m.parts, "outside": fixed}, m.position) for m in passed),
        stages=tuple(by_stage),
        host=host,
        workspaces=held,
    )


def _basis(gpu: Gpu | None, rates: Rates | None) -> dict[str, Basis]:
    basis: dict[str, Basis] = dict.fromkeys(
        ("params", "flops", "weights", "gradients", "optimizer", "gathered", "activations", "loss", "transient"),
        "derived",
    )
    basis["outside"] = "assumed"
    basis["high"] = "assumed"
    if gpu is not None:
        basis["capacity"] = gpu.capacity_basis
    if rates is not None:
        basis["network"] = "derived"
        basis["time"] = "measured" if rates.basis == "measured" else "assumed"
    return basis


def _left_out(model: ModelSpec, training: Training) -> tuple[str, ...]:
    notes = [
        "data loading, checkpoint saving and evaluation",
    ]
    if training.lora is not None:
        notes.append("copies that PEFT makes when adapters and activations differ in dtype")
    notes += [f"config key {key}" for key in model.unused_keys]
    return tuple(notes)
