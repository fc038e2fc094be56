"""The time of a step on a cluster, as an estimate says it."""

from __future__ import annotations

from loadgauge.estimate.flops import Flops
from loadgauge.estimate.memory.rank_memory import MemoryModel
from loadgauge.estimate.result import Time
from loadgauge.estimate.time.collectives import Fabric
from loadgauge.estimate.time.roofline import Machine
from loadgauge.estimate.time.step import StepModel
from loadgauge.estimate.time.traffic import Traffic
from loadgauge.spec.calibration import Rates
from loadgauge.spec.hardware import Cluster
from loadgauge.spec.layout import Layout


def step_tokens(layout: Layout) -> float:
    """Tokens of one optimizer step, over all GPUs; without padding where the batch is padding-free."""
    if layout.tokens is None:
        return float(layout.global_batch * layout.seq_len)
    return float(layout.tokens * layout.num_microbatches * layout.dp)


def step_time(
    memory: MemoryModel, flops: Flops, cluster: Cluster, rates: Rates, scale: float = 1.0
) -> tuple[Time, tuple[Traffic, ...]]:
    """Seconds and traffic of one step; `scale` corrects every second by what a measured run took longer.

    Raises `NotStated` where the GPU's file lacks a figure that is needed.
    """
    gpu, layout, training = cluster.gpu, memory.layout, memory.training
    machine = Machine.of(gpu, rates, training)
    found = StepModel(memory, machine, Fabric.of(cluster, rates)).step()
    time = Time(
        step=found.step * scale,
        low=found.step * scale * (rates.low if scale == 1.0 else rates.low_measured),
        high=found.step * scale * (rates.high if scale == 1.0 else rates.high_measured),
        parts={lane: value * scale for lane, value in found.parts.items()},
        stage=found.stage,
        tokens=step_tokens(layout),
        gpus=layout.gpus,
        peak_flops=machine.peak,
        model_flops=flops.model,
        hardware_flops=flops.hardware,
        tdp=None if gpu.power.tdp is None else gpu.tdp,
        scale=scale,
    )
    return time, found.traffic
