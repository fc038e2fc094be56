"""The complete flags of a run: typed into `loadgauge estimate`, they give the same bytes and seconds to the bit.

Every command line that is printed, exported, copied or linked is written here. The rule: each value that was given and
each value that follows from other flags (GPUs, batches, sequence length, schedule, framework) is written out. Only two
kinds of values are left out: constant defaults, and what the named framework decides (its precision, loss and overlap).
"""

from collections.abc import Callable
from typing import Any

import msgspec

from loadgauge.core.base import Error, need, rate
from loadgauge.core.definitions.hardware.cluster import cluster
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.hardware.usual import usual_network
from loadgauge.core.definitions.job.job import FILES, POSTTRAIN, WHOLE_RUN, Job
from loadgauge.core.definitions.job.job_text import stage_words
from loadgauge.core.definitions.layout.axes import DEGREES, RANK_ORDER
from loadgauge.core.definitions.model.tuners import TUNERS
from loadgauge.core.definitions.training.stacks import Stack
from loadgauge.core.definitions.training.training import Training, spell_loss, training
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.adapters import usual_upcast
from loadgauge.core.resolve.large_runs import overlapped
from loadgauge.core.resolve.rescale import is_run, run as measured_run
from loadgauge.core.resolve.resolve import asks_for_files, bandwidth, resolve_job

CONSTANT = {
    **dict.fromkeys((*DEGREES, "replicas"), 1), "zero": 0, "recompute": "none",
    "optimizer": "adamw", "attention": "flash", "offload": "none", "offload_to": "cpu", "activation_offload": "none",
    "kernels": "native",
    "base": "nf4", "lora_targets": "all",
    "cp_comm": "ring", "order": ",".join(RANK_ORDER),
    **dict.fromkeys(("sequence_parallel", "qlora", "mtp"), False),
}  # fmt: skip
"""Defaults that depend on no other flag."""
NEEDING = ("cp_comm", "base", "lora_targets")
"""Of those, flags that are refused without another one."""


def completer(job: Job) -> Callable[[Estimate], Job]:
    """A function that completes the flags of an estimate made for the same model as `job`: each value is written out.

    Where the model is another tool's job file, a default is written out if the file says otherwise.

    >>> from loadgauge.core.resolve.resolve import resolve_job
    >>> given = resolve_job(Job(model="llama-3.1-8b", gpu="h100-sxm5-80gb", tp=8))
    >>> completer(given.job)(given.estimate()).flags()
    '--gpu h100-sxm5-80gb --gpus 8 --tp 8 --micro-batch 1 --global-batch 1 --seq-len 4096 --framework megatron'
    """
    file = _from_file(job)
    return lambda result: _complete(job, result, file)


def documented(result: Estimate, complete: Callable[[Estimate], Job]) -> dict[str, Any]:
    """The estimate as a dictionary for JSON, with the command line that reproduces it under `command`."""
    return {**result.to_dict(), "command": complete(result).command()}


def _from_file(job: Job) -> dict[str, Any] | None:
    """The flags of the job file alone; empty where the model is no job file, None where it cannot be read alone."""
    if not asks_for_files(job):
        return {}
    try:
        named = Job(model=job.model, gpu=job.gpu, version=job.version, **{name: getattr(job, name) for name in FILES})
        own = need("DIALECTS").from_job_file(named)[0]
    except Error:
        return None
    return {name: value for name in own.__struct_fields__ if (value := getattr(own, name)) is not None}


def _complete(job: Job, result: Estimate, file: dict[str, Any] | None) -> Job:
    layout, kind = result.layout, result.training
    stack = Stack.parse(job.version)
    framework = training(kind.framework.name, lora=kind.lora, checkpoint=result.model.dtype, stack=stack)
    framework = framework.under(layout.zero)
    # What is assumed to hide is assumed again.
    open_ = msgspec.structs.replace(job, overlap=None, tp=int(layout.tp), ep=int(layout.ep), schedule=layout.schedule)
    plain = msgspec.structs.replace(kind, overlap=kind.framework.overlap)
    usual = overlapped(open_, plain, int(layout.gpus), result.workings.gpu, {}).overlap
    values: dict[str, Any] = {
        **dict.fromkeys((*FILES, *POSTTRAIN, "topology")),
        "mtp": bool(job.mtp),
        **{name: int(getattr(layout, name)) for name in (*DEGREES, "zero", "replicas")},
        "gpu": None if result.gpu is None or result.gpu.startswith("memory=") else result.gpu,
        "gpus": int(layout.gpus),
        "sequence_parallel": layout.sequence_parallel,
        "schedule": layout.schedule if layout.pp > 1 else None,
        "stage_layers": None if layout.stage_layers is None else stage_words(layout.stage_layers),
        "recompute": str(layout.recompute),
        "micro_batch": int(layout.micro_batch),
        "global_batch": int(layout.global_batch),
        "seq_len": int(layout.seq_len) if job.lengths is None else None,
        "framework": kind.framework.name,
        "precision": kind.precision.name,
        "weights": None if kind.precision.products is None else job.weights,  # else the recipe's name says it
        "optimizer": kind.optimizer.name,
        "attention": job.attention or kind.kernels.attention,
        "kernels": job.kernels,
        "loss": spell_loss(kind) if result.model.head.kind == "lm" else None,
        "offload": kind.offload,
        **_hosted(job, kind, layout.recompute.mode),
        "cp_comm": layout.cp_comm if layout.cp > 1 else "ring",
        "expert_imbalance": None if layout.expert_imbalance == 1 else float(layout.expert_imbalance),
        "order": ",".join(layout.order),
        "overlap": None if job.overlap is None and kind.overlap == usual else kind.overlap.alone(),
        **_adapters(job, kind),
        **_links(job, result.cluster),
    }
    defaults = {
        **CONSTANT,
        "etp": result.model.within_experts(int(layout.tp), int(layout.ep)),
        # What the framework decides once it is named.
        "precision": framework.precision.name,
        "loss": spell_loss(framework),
        "overlap": kind.framework.overlap.alone(),
        "zero": kind.framework.scripts_zero * (layout.dp * layout.cp > 1),
    }
    if kind.lora is not None and kind.lora.stored is not None and file == {}:
        defaults["recompute"] = "full"
    if kind.lora is not None and job.kbit_upcast is None and file == {}:
        # Written out, it would be known, and the range narrower.
        defaults["kbit_upcast"] = usual_upcast(kind.lora, kind.framework, kind.precision.name, layout.zero)
    if result.gpu is not None and not result.workings.gpu_has_bf16:
        defaults["precision"] = ""
        if job.precision in ("bf16", "fp16") and kind.precision.name.startswith(job.precision):
            values["precision"] = job.precision  # of which the recipe depends on the dtype of the weights
    if layout.cp == 1:
        values["cp_comm"] = None
    if result.gpu is None:
        values |= {"order": None, "overlap": None}
    if values["stage_layers"] is None and layout.pp > 1 and (file is None or "stage_layers" in file):
        values["stage_layers"] = stage_words(layout.layers_of(result.model))
    for name, default in defaults.items():
        if values.get(name) == default and file is not None and file.get(name, default) == default:
            values[name] = None
    complete = msgspec.structs.replace(job, **values)  # what a result does not hold stays as it was given
    if job.measured is None or not is_run(job):
        return msgspec.structs.replace(complete, measured=job.measured)
    return msgspec.structs.replace(
        complete, measured=_measured(job, result, _complete(job.replace(measured=None), result, {}))
    )


def _measured(job: Job, result: Estimate, here: Job) -> str:
    """`--measured` with everything in which the measured run differs from this one, both completed."""
    there, name, text = measured_run(job)
    other = _complete(there, resolve_job(there, result.model).estimate(), {})
    words = [f"{name}={text}", *([] if there.measured is None else [there.measured])]
    for field in other.__struct_fields__[2:]:
        value = getattr(other, field)
        if field not in (*WHOLE_RUN, "measured") and value != getattr(here, field):
            if value is None and field not in NEEDING:
                value = "full" if field == "recompute" and other.qlora else CONSTANT.get(field)
            words.append(f"{field}={'' if value is None else str(value).lower()}")
    return ",".join(words)


def _adapters(job: Job, kind: Training) -> dict[str, Any]:
    lora = kind.lora
    if lora is None:
        return {"qlora": False}
    base = lora.quantised if isinstance(lora.quantised, str) else "nf4"
    return {
        "lora_rank": int(lora.rank) or None,
        "lora_targets": job.lora_targets or (None if lora.method in TUNERS else "all"),
        "qlora": bool(lora.quantised),
        "base": base if lora.quantised else None,
        "kbit_upcast": lora.upcast if lora.peft and (lora.upcast != "none" or lora.quantised) else None,
    }


def _hosted(job: Job, kind: Training, recompute: str) -> dict[str, Any]:
    moved = kind.offload != "none"
    # A search may choose layouts that recompute nothing, and have no checkpoints.
    hosted = "none" if kind.host.activations == "checkpoints" and recompute != "full" else kind.host.activations
    return {
        "offload_to": "nvme" if kind.host.nvme and moved else None,
        "activation_offload": hosted,
        "pin_memory": None if kind.host.pinned or not (moved or kind.host.activations != "none") else False,
    }


def _links(job: Job, machines: Cluster | None) -> dict[str, Any]:
    """The flags of the links: the given ones if they result in this cluster, else those that differ from the GPU's own."""
    names = ("gpus_per_node", "link_bandwidth", "nic_bandwidth")
    links: dict[str, Any] = {name: getattr(job, name) for name in names}
    if machines is not None and machines.topology is not None:
        return links | {"topology": job.topology or machines.topology.id}
    if machines is None or _cluster(machines, **links) == machines:
        return links
    inner = machines.links[0].bandwidth if machines.links[0].domain > 1 else None
    outer = machines.links[-1].bandwidth if len(machines.links) > 1 else None
    for node in dict.fromkeys((job.gpus_per_node, None, machines.gpus_per_node)):
        for link, adapter in ((None, None), (None, outer), (inner, None), (inner, outer)):
            words: dict[str, Any] = {
                "gpus_per_node": node,
                "link_bandwidth": rate(link) if link else None,
                "nic_bandwidth": rate(adapter) if adapter else None,
            }
            if _cluster(machines, **words) == machines:
                return words
    raise AssertionError(f"no flags give {machines}")


def _cluster(
    machines: Cluster, gpus_per_node: int | None, link_bandwidth: str | None, nic_bandwidth: str | None
) -> Cluster | None:
    """The cluster that these flags give with as many GPUs of this kind; None where they give none."""
    link, adapter = bandwidth(link_bandwidth, "link_bandwidth"), bandwidth(nic_bandwidth, "nic_bandwidth")
    if adapter is None and (usual := usual_network(machines.gpu)) is not None:
        adapter = usual[0]
    try:
        machines_again = cluster(machines.gpu, machines.gpus, gpus_per_node, link, adapter)
        return msgspec.structs.replace(machines_again, sustained=machines.sustained, kernels=machines.kernels)
    except Error:
        return None


def layout_flags(result: Estimate) -> str:
    """The layout alone as flags, to tell it from other layouts of a job; `completer` writes all flags."""
    layout = result.layout
    words = [f"--{name} {value}" for name in DEGREES if (value := getattr(layout, name)) > 1]
    words += [f"--zero {layout.zero}"] if layout.zero or result.training.framework.scripts_zero else []
    words += [f"--replicas {layout.replicas}"] if layout.replicas > 1 else []
    words += ["--sequence-parallel"] if layout.sequence_parallel else []
    if layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved"):
        words.append(f"--schedule {layout.schedule}")
    words += [f"--recompute {layout.recompute}"] if layout.recompute.mode != "none" else []
    if layout.stage_layers is not None:
        words.append(f"--stage-layers {stage_words(layout.stage_layers)}")
    return " ".join([*words, f"--micro-batch {layout.micro_batch}"])
