"""`Workings`: the memory model and the step model of an estimate, each built once, on first use."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base import ConfigError, Size, shard
from loadgauge.core.definitions.hardware.calibration import Efficiencies, efficiencies as calibrated, of_cluster
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.memory.around import evaluated, moments
from loadgauge.core.estimate.memory.ledger import Ledger
from loadgauge.core.estimate.memory.peak import Memory, Worst
from loadgauge.core.estimate.memory.phases import Moment, StageAtWork
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.schedule.simulate import Simulation, simulate
from loadgauge.core.estimate.schedule.stages import Stage, stages
from loadgauge.core.estimate.states.overhead import workspaces
from loadgauge.core.estimate.time.collectives import Fabric
from loadgauge.core.estimate.time.flops import Flops, step_flops
from loadgauge.core.estimate.time.roofline import Machine, OperationTime, operation_times
from loadgauge.core.estimate.time.step import StepModel, Time, step_time
from loadgauge.core.estimate.time.traffic import Traffic
from loadgauge.core.layers import View
from loadgauge.core.layers.operations.operations import NOTHING, Layer, Operation, Recompute


def view_of(layout: Layout, training: Training) -> View:
    """Return one rank's view of one micro-batch: its tokens, shards and kernels."""
    if (layout.tokens is None) != (layout.pairs is None):
        raise ConfigError("a ragged micro-batch needs both its tokens and its query-key pairs", key="lengths")
    # Virtual tokens stand in front of each sequence; no ragged batch has them (`loadgauge.core.resolve.adapters`).
    length = layout.seq_len + (0 if training.lora is None else training.lora.virtual)
    own = shard(length, layout.cp, "seq_len")
    return View(
        tokens=own * layout.micro_batch if layout.tokens is None else layout.tokens / layout.cp,
        pairs=own * length * layout.micro_batch if layout.pairs is None else layout.pairs / layout.cp,
        kernel_tokens=None if layout.kernel_tokens is None else layout.kernel_tokens / layout.cp,
        sequences=layout.micro_batch,
        positions=own,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        cp=layout.cp,
        cp_comm=layout.cp_comm,
        exchanged=layout.exchanged,
        ep=layout.ep,
        etp=layout.etp,
        imbalance=layout.expert_imbalance,
        kernels=training.kernels,
        lora=training.lora,
        # transformers and PEFT make them where layers run again (`enable_input_require_grads`).
        input_gradients=training.framework.peft and layout.recompute.mode == "full",
    )


class TimedOperation(NamedTuple):
    """One operation of the slowest stage. times: in one micro-batch; again: whether it is recomputed in backward."""

    layer: str
    operation: Operation
    times: Size
    again: bool
    seconds: OperationTime

    @property
    def each(self) -> Size:
        """Seconds in one micro-batch: forward, backward and recomputation."""
        more = self.seconds.forward if self.again else 0
        return self.times * (self.seconds.forward + self.seconds.backward + more)


class Workings:
    """Everything behind one estimate: the models whose sums are its totals, for explanations and figures to draw from.

    efficiencies: those to reckon with, else the calibrated ones of the GPU
    """

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        training: Training,
        gpu: Gpu | None = None,
        cluster: Cluster | None = None,
        efficiencies: Efficiencies | None = None,
    ) -> None:
        self.model, self.layout, self.training = model, layout, training
        self.gpu, self.cluster = gpu, cluster
        if efficiencies is None:
            efficiencies = calibrated("" if gpu is None else gpu.id) if cluster is None else of_cluster(cluster)
        self.efficiencies = efficiencies
        self.view = view_of(layout, training)
        self._played: dict[tuple[int, bool], Simulation] = {}

    def share(self, other: Workings) -> None:
        """Takes over what other workings of the same layout, training and GPU know of its memory and FLOPs."""
        self.memory, self.stages, self.worst, self.flops = other.memory, other.stages, other.worst, other.flops
        self.at_peak, self.workspaces, self.peak_memory = other.at_peak, other.workspaces, other.peak_memory

    def rerouted(self, imbalance: float) -> Workings:
        """Return the workings of the same job with another `expert_imbalance`; what routing does not change is shared."""
        layout = msgspec.structs.replace(self.layout, expert_imbalance=imbalance)
        other = Workings(self.model, layout, self.training, self.gpu, self.cluster, self.efficiencies)
        other.memory = self.memory.rerouted(layout, other.view)
        if layout.fullest is not None:
            there = layout.at_peak
            other.at_peak = self.at_peak.rerouted(there, view_of(there, self.training))
        other.stages, other.flops, other.workspaces = self.stages, self.flops, self.workspaces
        if self.cluster is not None:
            other.fabric = self.fabric
        return other

    def overlapping(self, overlap: Overlap) -> Workings:
        """Return the workings of the same job that hides other communication, which its memory does not depend on."""
        kind = msgspec.structs.replace(self.training, overlap=overlap)
        other = Workings(self.model, self.layout, kind, self.gpu, self.cluster, self.efficiencies)
        other.memory = copy(self.memory)
        other.memory.training = kind
        other.flops = self.flops
        if overlap.launch == self.training.overlap.launch:  # else kernels take another time
            other.step = self.step.overlapping(other.memory)
        return other

    # -- memory -------------------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> MemoryModel:
        """The memory model of this layout."""
        return MemoryModel(self.model, self.layout, self.training, self.view)

    @cached_property
    def at_peak(self) -> MemoryModel:
        """The memory model of the micro-batch that makes the peak."""
        if self.layout.fullest is None:
            return self.memory
        layout = self.layout.at_peak
        return MemoryModel(self.model, layout, self.training, view_of(layout, self.training))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All pipeline stages."""
        return stages(self.model, self.layout)

    @cached_property
    def worst(self) -> Worst:
        """The rank that needs the most memory, and the peak of every stage [bytes]."""
        return Worst.of(self.at_peak, self.stages, self.around)

    def around(self, rank: StageAtWork) -> Iterator[Moment]:
        """Yield the moments between the steps of a rank."""
        return moments(rank, self.model, self.evaluation)

    @cached_property
    def evaluation(self) -> MemoryModel | None:
        """The memory model of an evaluation batch; None where there is none."""
        if not self.training.around.eval_batch:
            return None
        layout = evaluated(self.layout, self.training)
        return MemoryModel(self.model, layout, self.training, view_of(layout, self.training))

    @property
    def phases(self) -> tuple[Moment, ...]:
        """The moments of a step on the worst rank, with the work in each; without memory outside the step."""
        return self.worst.phases

    @property
    def gpu_has_bf16(self) -> bool:
        """Return whether the GPU multiplies in bf16; where none is known, as if it did."""
        return self.gpu is None or self.gpu.bf16

    @cached_property
    def workspaces(self) -> float:
        """Bytes of cuBLAS and Transformer Engine workspaces on the GPU, and of frozen parts beside the model."""
        return workspaces(self.gpu, self.training, grouped=self.memory.has_experts) + float(self.model.own.resident)

    @cached_property
    def peak_memory(self) -> Memory:
        """The memory of the worst rank at its peak."""
        return self.worst.memory(self.gpu, self.workspaces)

    @cached_property
    def idle(self) -> float:
        """Bytes that PyTorch's allocator usually holds and has not handed out."""
        return self.peak_memory.idle

    def ledger(self, phase: int) -> Ledger:
        """Return the ledger of the worst rank at one of its `phases`, by index."""
        return Ledger(self.worst.rank, self.phases[phase], self.workspaces, self.gpu, self.idle)

    # -- time ---------------------------------------------------------------------------------------------------------

    @cached_property
    def flops(self) -> Flops:
        """FLOPs of one optimizer step, over all GPUs."""
        return step_flops(self.model, self.layout, self.training.kernels, self.view)

    @cached_property
    def step(self) -> StepModel:
        """The step model on the cluster. Raises `NotStated` where the GPU lacks a figure that is needed."""
        assert self.cluster is not None, "time needs a cluster"
        machine = Machine.of(self.cluster.gpu, self.efficiencies, self.training, experts=self.model.has_experts)
        return StepModel(self.memory, machine, self.fabric)

    @cached_property
    def fabric(self) -> Fabric:
        """The cluster's links, as collectives see them."""
        assert self.cluster is not None, "links need a cluster"
        return Fabric.of(self.cluster, self.efficiencies)

    @cached_property
    def timed(self) -> tuple[Time, tuple[Traffic, ...]]:
        """Time and traffic of one step. Raises `NotStated` where the GPU lacks a figure that is needed."""
        assert self.cluster is not None
        return step_time(self.step, self.flops, self.cluster)

    @property
    def passes(self) -> Size:
        """Micro-batches that a stage works on in a step."""
        return self.layout.num_microbatches / self.layout.copies

    def play(self, batches: int, *, timed: bool) -> Simulation:
        """Simulate the schedule with `batches` micro-batches [s]; unless `timed`, in units of one forward."""
        if (batches, timed) not in self._played:
            self._played[batches, timed] = self._play(batches, timed)
        return self._played[batches, timed]

    def _play(self, batches: int, timed: bool) -> Simulation:
        layout, split = self.layout, self.layout.splits_backward
        how: dict[str, Any] = {"forward": 1, "backward": 1 if split else 2, "weight": 1 if split else 0}
        if timed:
            clock = self.step
            how = {
                "forward": [[sum(chunk.forward.values()) for chunk in stage] for stage in clock.by_stage],
                "backward": [
                    [sum(chunk.backward.values()) - (chunk.weight if split else 0) for chunk in stage]
                    for stage in clock.by_stage
                ],
                "weight": [[chunk.weight for chunk in stage] for stage in clock.by_stage] if split else 0,
                "send": clock.send_seconds(),
                "overlap_send": clock.sends_hidden,
            }
        chunks = layout.vpp if layout.schedule == "interleaved" else None
        return simulate(layout.schedule, layout.pp, batches, chunks=chunks, put_off=self.memory.put_off, **how)

    @cached_property
    def operations(self) -> list[TimedOperation]:
        """Every operation of the slowest stage, with its seconds."""
        return [
            TimedOperation(name, operation, times, operation.name in again, seconds)
            for name, layer, recomputed, times in self.layers(self.stages[self.timed[0].stage])
            for again in (recomputed.rerun(layer, part=self.training.reruns_part),)
            for operation, seconds in zip(layer, layer.once(operation_times, self.step.machine), strict=True)
        ]

    @cached_property
    def waits(self) -> list[tuple[str, Size, Size]]:
        """Layers of the slowest stage, how many, and the seconds for which the GPU waits for the host in each and micro-batch."""
        stage, memory, ledger = self.stages[self.timed[0].stage], self.memory, self.ledger(0)
        counts = dict(memory.counts(stage, stage.start, stage.stop))
        if stage.last and (more := memory.prediction) is not None:
            counts[more.key] = counts.get(more.key, 0) + more.modules
        times = {key: self.step.layers[key] for key in counts}
        waits = {key: time.forward["host"] + time.backward["host"] for key, time in times.items()}
        return [(ledger.kind(key), count, waits[key]) for key, count in counts.items()]

    def layers(self, stage: Stage) -> Iterator[tuple[str, Layer, Recompute, Size]]:
        """Yield the layers that a micro-batch passes on a stage: name, operations, what is recomputed, how many."""
        memory, ledger = self.memory, self.ledger(0)
        for key, count in memory.counts(stage, stage.start, stage.stop).items():
            yield ledger.kind(key), memory.facts[key].layer, memory.facts[key].recompute, count
        if stage.first:
            yield "embedding", memory.embedding, NOTHING, 1
        if stage.last:
            yield "head", memory.head, NOTHING, 1
            if (more := memory.prediction) is not None:
                block = memory.facts[more.key]
                yield "multi-token prediction", block.layer, block.recompute, more.modules
                for end in more.ends:
                    yield "multi-token prediction", end, NOTHING, more.modules
