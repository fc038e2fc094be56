"""The time of one optimizer step: compute, exposed communication, pipeline bubble and optimizer, which add up.

Every component is on the slowest stage's critical path, overlapped communication by its exposed part; the bubble is the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property, reduce
from typing import Any

import msgspec

from loadgauge.core.base import NotStated, Size, ceil_div, maximum, minimum, same, where
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.hardware.host import HOST_UPDATES
from loadgauge.core.definitions.layout.axes import COMMUNICATION, LANE_OF
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.software import bounds, kind_of
from loadgauge.core.estimate.memory.rank_memory import LayerFacts, MemoryModel
from loadgauge.core.estimate.schedule.simulate import played_seconds
from loadgauge.core.estimate.schedule.stages import Chunk, Stage, stages
from loadgauge.core.estimate.states.optimizer_step import staying, summed_gradients, updated
from loadgauge.core.estimate.states.states import RankWeights
from loadgauge.core.estimate.time.collectives import Fabric, Group, seconds
from loadgauge.core.estimate.time.contention import NOTHING, Links, added, beside, beside_gradients, on_network
from loadgauge.core.estimate.time.flops import Flops
from loadgauge.core.estimate.time.roofline import Machine, Sums, layer_seconds, operation_times
from loadgauge.core.estimate.time.traffic import (
    Traffic,
    collective_seconds,
    exchange,
    expose,
    gather_seconds,
    layout_groups,
    reduced_bytes,
    stage_traffic,
)
from loadgauge.core.layers import head_layer
from loadgauge.core.layers.embedding_head import prediction_layer
from loadgauge.core.layers.operations.operations import Layer, Recompute

LANES = ("forward", "backward", "recompute", "loss", "host", *COMMUNICATION[:-1], "bubble", "dp", "optimizer", "fixed")
TINY = 1e-30
"""Seconds: nothing, and no divisor of 0."""
ROUNDS = 3
"""Micro-batches of a pipeline that are played through, over its stages."""


class MicroBatch(msgspec.Struct, frozen=True):
    """Time of one micro-batch in a layer, stage or end, by component [s]; forward and backward apart for the schedule."""

    forward: dict[str, Size]
    backward: dict[str, Size]
    weight: Size = 0
    """Of the backward, what makes gradients of weights (zero-bubble schedules move it)."""
    links: Links = NOTHING
    """Seconds in which collectives of the layers use the network between nodes: exposed and all, of forward and of backward."""

    @property
    def seconds(self) -> Size:
        """Seconds of all components, forward and backward."""
        return sum(self.forward.values()) + sum(self.backward.values())

    def add(self, other: MicroBatch, times: Size = 1) -> MicroBatch:
        """Return this time plus `times` that of another, component by component [s]."""
        return MicroBatch(
            _add(self.forward, other.forward, times),
            _add(self.backward, other.backward, times),
            self.weight + times * other.weight,
            added(self.links, other.links, times),
        )


def _add(first: dict[str, Size], second: dict[str, Size], times: Size) -> dict[str, Size]:
    return {lane: first.get(lane, 0) + times * second.get(lane, 0) for lane in {**first, **second}}


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one optimizer step. `parts` (seconds by component) add up to `step`; `traffic` is what the network carried."""

    step: Size
    parts: dict[str, Size]
    stage: int
    traffic: tuple[Traffic, ...]


class Time(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one optimizer step: `step` is the sum of `parts`, `low` and `high` bound it.

    tokens: of one step, over all GPUs; peak_flops: the dense 16-bit peak of one GPU [FLOP/s], the base of MFU and HFU; that of
    float32 where products run in it, of TF32 where most are convolutions
    stage: the slowest pipeline stage; tdp: of one GPU [W]
    scale: measured over predicted seconds of what a card does, by a run of the user's
    """

    step: float
    low: float
    high: float
    parts: dict[str, float]
    stage: int
    tokens: float
    gpus: int
    peak_flops: float
    model_flops: float
    hardware_flops: float
    tdp: float | None = None
    scale: float = 1.0

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of each GPU [tokens/s]."""
        return self.tokens / self.step / self.gpus

    @property
    def model_flops_per_gpu(self) -> float:
        """Model FLOP/s of each GPU: without recomputation."""
        return self.model_flops / self.step / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, a share of the 16-bit peak (source: chowdhery2022)."""
        return self.model_flops_per_gpu / self.peak_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation, recomputation included, a share of the 16-bit peak (source: korthikanti2022)."""
        return self.mfu * self.hardware_flops / self.model_flops

    def to_dict(self) -> dict[str, Any]:
        """Return the `time` of `estimate --json`: seconds and plain numbers; days and cost are those of a whole run."""
        return {
            "step": self.step,
            "low": self.low,
            "high": self.high,
            "parts": self.parts,
            "stage": self.stage,
            "tokens_per_step": self.tokens,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "model_tflops_per_gpu": self.model_flops_per_gpu / 1e12,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "scale": self.scale,
            "days": None,
            "cost": None,
        }


class StepModel:
    """The time of a step of a model under a layout on a machine."""

    def __init__(
        self, memory: MemoryModel, machine: Machine, fabric: Fabric, groups: dict[str, Group] | None = None
    ) -> None:
        self.memory, self.machine, self.fabric = memory, machine, fabric
        self.layout, self.training = memory.layout, memory.training
        self.overlap, self.slower = self.training.overlap, machine.efficiencies.slower[0]
        self.groups = groups or layout_groups(self.layout)
        self._time_layers()

    def _time_layers(self) -> None:
        memory = self.memory
        self.layers = {key: self.of_layer(facts) for key, facts in memory.facts.items()}
        self.embedding = self.of_end(memory.embedding)
        self.head = self.of_end(memory.head)

    def overlapping(self, memory: MemoryModel) -> StepModel:
        """Return the step of a training that differs in what communication is hidden; compute is not timed again."""
        other = copy(self)
        other.memory, other.training, other.overlap = memory, memory.training, memory.training.overlap
        for name in ("by_stage", "step"):
            vars(other).pop(name, None)
        other._time_layers()
        return other

    # -- one micro-batch ------------------------------------------------------------------------------------------------

    def comm(self, layer: Layer, direction: str, recompute: Recompute | None = None) -> dict[str, Size]:
        """Return the seconds of a layer's collectives by axis: forward, backward, or of what is recomputed."""
        chosen = [op for op in layer if recompute is None or op.name in recompute]
        listed = [c for op in chosen for c in op.sent(direction if recompute is None else "again")]
        return collective_seconds(listed, self.groups, self.fabric)

    def shown(self, whole: Size, under: Size, least: Size = 0, exposed: Size = 0, all_: Size = 0) -> Size:
        """Return the seconds that communication of `whole` seconds adds to the `under` seconds of a pass that it overlaps with.

        At least the share `least` of it cannot overlap; what is hidden slows the compute down by `Efficiencies.contention`.
        exposed, all_: as in `beside`
        """
        seen = maximum(beside(whole, under, exposed, all_), least * whole)
        return seen + self.machine.efficiencies.contention * (whole - seen)

    def crosses(self, name: str) -> Size:
        """Return 1 where a group of ranks sends over the network between nodes, else 0."""
        return where(self.groups[name].domains(self.fabric.domain) > 1, 1, 0)

    def met(self, names: Iterable[str], links: Links) -> Links:
        """Return what communication of some groups meets of `MicroBatch.links`: nothing where it stays inside a node."""
        if links is NOTHING:
            return links
        crosses: Size = 0
        for name in dict.fromkeys(names):
            crosses = maximum(crosses, self.read(self.crosses(name)))
        return added(NOTHING, links, crosses)

    def on_network(
        self, sent: dict[str, Size], ahead: dict[str, Size], returned: dict[str, Size], back: dict[str, Size]
    ) -> Links:
        """Return `MicroBatch.links` of a layer: seconds of its collectives by axis, and by component what is exposed of them."""
        crossing = {axis: self.crosses(axis) for axis in {**sent, **returned}}
        if all(same(crosses, 0) for crosses in crossing.values()):
            return NOTHING
        return (*on_network(sent, ahead, crossing), *on_network(returned, back, crossing))

    def exposed(self, by_axis: dict[str, Size], products: Size, attention: Size, layer: Size) -> dict[str, Size]:
        """Return the seconds by component that a layer's collectives add to compute.

        by_axis: seconds of the collectives; products, attention, layer: seconds of compute. Overlapped tensor-parallel rings
        hide under their products but for the first chunk; context-parallel rings under attention but for the first piece;
        dispatch and combine under another half of the batch.
        """
        overlap, layout = self.overlap, self.layout
        lanes: dict[str, Size] = {}
        for axis, value in by_axis.items():
            if axis == "tp" and overlap.tp:
                value = self.shown(value, products, 1 / layout.tp)
            elif axis == "cp" and overlap.cp and layout.cp_comm == "ring":
                value = self.shown(value, attention * (layout.cp - 1) / layout.cp)
            elif axis == "ep" and overlap.ep:
                value = self.shown(value, layer)
            lanes[LANE_OF[axis]] = lanes.get(LANE_OF[axis], 0) + value
        return lanes

    def of_layer(self, facts: LayerFacts) -> MicroBatch:
        """Return the time of one layer and micro-batch [s]: compute, recomputation, exposed collectives, ZeRO-3's gathers."""
        time = self.computed(facts)
        ahead, back = time.forward, time.backward
        if self.layout.zero == 3:
            gather, scatter = self.zero_seconds(facts.weights)
            first = 0 if exchange(self.layout, self.training).after else gather
            if self.overlap.prefetch:
                others = self.met(("zero", "expert_dp"), time.links)
                ahead["zero"] = self.shown(first, sum(ahead.values()), 0, *others[:2])
                back["zero"] = self.shown(gather + scatter, sum(back.values()), 0, *others[2:])
            else:
                ahead["zero"], back["zero"] = first, gather + scatter
        carried: list[Size] = []
        if self.training.offload == "all":
            # Weights come from the host for each pass, overlapped with the compute of the previous layer.
            carried.append(self.slower * self.training.precision.compute * facts.weights.all.total)
        if self.training.host.activations != "none":
            # Out in forward and back in backward, beside the computing.
            carried.append(self.slower * facts.hosted)
        for nbytes in carried:
            whole = self.read(nbytes / self.training.host.link)
            for side in (ahead, back):
                side["zero"] = side.get("zero", 0) + self.shown(whole, sum(side.values()))
        return time

    def computed(self, facts: LayerFacts) -> MicroBatch:
        """Return the part of `of_layer` that does not depend on where the weights are sharded [s]."""
        layer = facts.layer
        again = facts.recompute.rerun(layer, part=self.training.reruns_part)
        forward, backward, weight, repeated = Sums(), Sums(), 0, Sums()
        launches, times = [0, 0], layer.once(operation_times, self.machine)
        for operation, time in zip(layer, times, strict=True):
            if operation.kind != "view":
                launches[0] += operation.calls
                launches[1] += operation.calls * (operation.gradients + (operation.name in again))
            forward.add(operation, time.forward)
            backward.add(operation, time.backward)
            weight = weight + time.weight_gradient
            if operation.name in again:
                repeated.add(operation, time.forward)
        sent, returned = self.comm(layer, "forward"), self.comm(layer, "backward")
        whole = forward.all + backward.all + repeated.all
        # The host runs ahead of the GPU as far as it can: what it takes longer over a micro-batch, the GPU waits, launch by launch.
        waits = maximum(self.machine.host - whole / maximum(1, sum(launches)), 0)
        ahead = {"forward": forward.all, "host": launches[0] * waits, **self.exposed(sent, *forward.parts)}
        back = {"backward": backward.all, "recompute": repeated.all, "host": launches[1] * waits}
        back |= self.exposed(returned, *backward.parts)
        beside_products = self.training.framework.sums_beside and self.overlap.prefetch and not self.overlap.tp
        if "tp" in back and beside_products and not self.layout.splits_backward:
            for collective, under in beside_gradients(layer, times):
                sends = collective_seconds([collective], self.groups, self.fabric)["tp"]
                back["tp"] = back["tp"] - sends + self.shown(sends, under)
        if again:
            repeats = self.comm(layer, "forward", again)
            back = _add(back, self.exposed(repeats, *repeated.parts), 1)
            returned = _add(returned, repeats, 1)
        if self.overlap.ep and "ep" in sent:
            # One half's forward runs beside the other half's backward, so that all of one hides under all of the other.
            back_again = returned.get("ep", 0)  # a frozen layer below the trained ones sends nothing back
            total = sent["ep"] + back_again
            seen = self.shown(total, whole) / maximum(total, TINY)
            ahead["ep"] = sent.get("etp", 0) + sent["ep"] * seen
            back["ep"] = returned.get("etp", 0) + back_again * seen
        return MicroBatch(ahead, back, weight, self.on_network(sent, ahead, returned, back))

    def of_end(self, layer: Layer) -> MicroBatch:
        """Return the time of the embedding, or of the head with its loss, for one micro-batch [s]. layer: its operations"""
        time, forward, backward = self.computed_end(layer)
        if self.layout.zero == 3:
            # The first gather and the last reduction have nothing to overlap with.
            gather, scatter = self.zero_seconds(self.memory.weights_of(layer))
            first = layer is self.memory.embedding or not self.overlap.prefetch
            time.forward["zero"] = gather if first else self.shown(gather, forward)
            time.backward["zero"] = scatter if first else self.shown(scatter, backward)
        return time

    def computed_end(self, layer: Layer) -> tuple[MicroBatch, Size, Size]:
        """Return the part of `of_end` without ZeRO-3, then the seconds of its compute in forward and in backward."""
        time = layer_seconds(layer, self.machine)
        sent, returned = self.comm(layer, "forward"), self.comm(layer, "backward")
        ahead = {"loss": time.forward, **self.exposed(sent, time.forward, 0, 0)}
        back = {"loss": time.backward, **self.exposed(returned, time.backward, 0, 0)}
        links = self.on_network(sent, ahead, returned, back)
        return MicroBatch(ahead, back, time.weight_gradient, links), time.forward, time.backward

    def zero_seconds(self, weights: RankWeights) -> tuple[Size, Size]:
        """Return the seconds to gather some weights, and to reduce-scatter their gradients, under ZeRO-3."""
        scatter: Size = 0
        for part, group, others in (
            (weights.dense, self.groups["zero"], self.groups["replicas"]),
            (weights.expert, self.groups["expert_dp"], self.groups["expert_replicas"]),
        ):
            if not same(part.total, 0):
                reduced = self.reduced_bytes * part.trainable
                scatter = scatter + seconds("reduce_scatter", reduced, group, self.fabric)
                scatter = scatter + seconds("all_reduce", reduced / group.ranks, others, self.fabric)
        how = exchange(self.layout, self.training)
        if how.after:
            scatter = 0  # at the end of the step: `once`
        elif not how.reduces:
            # With the last micro-batch alone; spread over all, which take equally long here.
            scatter = scatter / self.layout.num_microbatches
        return self.read(gather_seconds(weights, self.training, self.groups, self.fabric)), self.read(scatter)

    def read(self, value: Size) -> Size:
        """Return a size unchanged; array versions of this class override it."""
        return value

    @property
    def reduced_bytes(self) -> Size:
        """Bytes of a gradient element when it is reduced."""
        return reduced_bytes(self.training, self.layout)

    def of_chunk(self, stage: Stage, chunk: Chunk) -> MicroBatch:
        """Return the time of one micro-batch through one chunk of a stage [s]."""
        total = MicroBatch({}, {})
        for key, count in self.memory.counts(stage, chunk.start, chunk.stop).items():
            total = total.add(self.layers[key], count)
        if chunk.first:
            total = total.add(self.embedding)
        if chunk.last:
            total = total.add(self.head)
            if (more := self.memory.prediction) is not None:
                model, view = self.memory.model, self.memory.view
                entry, head = prediction_layer(model, view), head_layer(model, view, shared=True)
                module = self.of_end(entry).add(self.layers[more.key]).add(self.of_end(head))
                total = total.add(module, more.modules)
        return total

    def of_stage(self, stage: Stage) -> tuple[MicroBatch, ...]:
        """Return the time of one micro-batch on each chunk of a stage [s]."""
        return tuple(self.of_chunk(stage, chunk) for chunk in stage.chunks)

    # -- the end of a step ----------------------------------------------------------------------------------------------

    def once(self, rows: Iterable[Traffic], stage: Stage, micro: MicroBatch) -> dict[str, Size]:
        """Return the exposed seconds, by component, of traffic besides the layers' own collectives: gradients and new weights.

        With overlap, what comes once a step hides under the last micro-batch's backward (new weights: under the first
        forward), what comes with every micro-batch under each one's; the last bucket has nothing to hide under. What goes over
        several groups (replicas, experts) shares that compute.
        """
        layers = max(1, stage.stop - stage.start)
        backward, forward = sum(micro.backward.values()), sum(micro.forward.values())
        lanes: dict[str, Size] = {}
        hidden: dict[tuple[bool, bool], tuple[Size, Size]] = {}
        among: dict[tuple[bool, bool], list[str]] = {}
        for row in rows:
            if row.kind.after_backward:
                lanes[row.lane] = lanes.get(row.lane, 0) + self.read(row.seconds)
                continue
            if row.lane != "dp":
                continue
            once = same(row.calls_per_microbatch, 0)
            times = 1 if once else self.layout.num_microbatches
            whole, times = self.read(self.of_call(row, times)), self.read(times)
            if row.hidden:
                key = row.kind.in_forward, once
                hidden[key] = hidden.get(key, (0, 0))[0] + whole, times
                among.setdefault(key, []).append(row.group)
            else:
                lanes["dp"] = lanes.get("dp", 0) + times * whole
        for (in_forward, once), (whole, times) in hidden.items():
            others = self.met(among[in_forward, once], micro.links)
            exposed, all_ = others[:2] if in_forward else others[2:]
            seen = self.shown(whole, forward if in_forward else backward, 1 / layers, exposed, all_)
            lanes["dp"] = lanes.get("dp", 0) + times * seen
        return lanes

    def of_call(self, row: Traffic, times: Size) -> Size:
        """Return the seconds of one of the `times` that a reduction (or gathering) comes in a step, in buckets."""
        group = self.groups[row.group]
        itemsize = self.training.precision.compute if row.kind.in_forward else self.reduced_bytes
        framework = self.training.framework
        bucket: Size = framework.reduced
        if framework.reduced_per_rank:
            bucket = maximum(bucket, framework.reduced_per_rank * self.layout.zero_ranks)
        calls = ceil_div(row.payload, bucket * itemsize)
        if framework.reduces_by_layer and self.layout.zero:
            calls = self.memory.model.num_hidden_layers / self.layout.pp
        return row.seconds / times + maximum(calls - 1, 0) * seconds(row.collective, 0, group, self.fabric)

    def updated(self, stage: Stage) -> Size:
        """Return the elements that one rank of a stage updates."""
        return updated(self.memory, self.memory.weighed(stage)[1])

    def summed(self, stage: Stage) -> Size:
        """Return the bytes that one rank of a stage moves to add up gradients of micro-batches."""
        return summed_gradients(self.memory, stage)

    def optimizer(self, stage: Stage) -> Size:
        """Return the seconds of the update, bound by memory bandwidth, or by host and PCIe where it is offloaded.

        Gradients are read twice (once for their norm), master weights and moments read and written back. Of a part that is
        offloaded, the card updates the rest beside the host; states that wait there travel to the card before it and back after.
        Before it, gradients of micro-batches are added up.
        """
        elements, stays = self.updated(stage), staying(self.memory, stage)
        rate = self.machine.memory("elementwise").forward
        update = self.training.optimizer.moved(self.training.precision) * stays * elements / rate
        if self.training.offload == "states":
            update = update + 2 * self.memory.weighed(stage)[2].optimizer / self.training.host.link
        elif self.training.offload != "none":
            update = maximum(update, self.slower * self.host_update((1 - stays) * elements))
        return self.summed(stage) / rate + update

    def host_update(self, elements: Size) -> Size:
        """Return the seconds of an update on the host. elements: that one rank updates

        Gradients travel to the host, unless they went there in backward, and new weights back; weights that stay on the
        host travel with each layer. The GPUs of a node share its cores, its memory and its NVMe.
        """
        training, layout = self.training, self.layout
        precision, host = training.precision, training.host
        sharing = elements * minimum(layout.gpus, self.fabric.domain)
        travels = 0 if "gradients" in self.memory.offloaded else precision.gradient
        travels = travels + (0 if "weights" in self.memory.offloaded else precision.compute)
        seconds: Size = travels * elements / host.link
        if host.bandwidth is None:
            seconds = seconds + sharing / HOST_UPDATES
        else:
            seconds = seconds + (training.optimizer.moved(precision) - precision.gradient) * sharing / host.bandwidth
        if host.nvme:
            if host.nvme_bandwidth is None:
                raise NotStated("the time of an update on NVMe: say --nvme-bandwidth")
            states = precision.master + training.optimizer.moments * training.optimizer.moment(precision)
            seconds = seconds + 2 * states * sharing / host.nvme_bandwidth
        return seconds

    # -- the step -------------------------------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All pipeline stages."""
        return stages(self.memory.model, self.layout)

    @cached_property
    def by_stage(self) -> list[tuple[MicroBatch, ...]]:
        """Time of one micro-batch on each chunk of each stage."""
        alike: dict[object, tuple[MicroBatch, ...]] = {}
        keys = [self.memory.make_up(stage) for stage in self.stages]
        for key, stage in zip(keys, self.stages, strict=True):
            if key not in alike:
                alike[key] = self.of_stage(stage)
        return [alike[key] for key in keys]

    @cached_property
    def step(self) -> StepTime:
        """Time [s] and traffic of the whole optimizer step, on its slowest stage."""
        return self.alone(once=False)

    def alone(self, *, once: bool = True) -> StepTime:
        """Return `step` without its traffic. once: work no traffic out that this time does not depend on, else all of it"""
        layout = self.layout
        stages, chunks = self.stages, self.by_stage
        # A micro-batch passes all chunks of a stage; with DualPipe, the one of its own direction.
        passes = layout.num_microbatches / layout.copies
        busy = [passes * sum(chunk.seconds for chunk in times) for times in chunks]
        slowest = max(range(layout.pp), key=busy.__getitem__)
        send = self.send_seconds()
        total, sending = self.pipeline_seconds(chunks, send, slowest)
        waiting = maximum(total - busy[slowest], 0)
        # Hidden sends are exposed while the pipeline fills and drains, where nothing overlaps with them.
        sent = minimum(2 * (layout.pp - 1) * send if self.sends_hidden else sending, waiting)
        rows = stage_traffic(self.memory, self.fabric, stages[slowest], self.groups, once=once)
        micro = reduce(MicroBatch.add, chunks[slowest], MicroBatch({}, {}))
        parts: dict[str, Size] = dict.fromkeys(LANES, 0)
        for side in (micro.forward, micro.backward):
            for lane, value in side.items():
                parts[lane] = parts[lane] + passes * value
        for lane, value in self.once(rows, stages[slowest], micro).items():
            parts[lane] = parts[lane] + value
        parts["pp"] = parts["pp"] + sent
        parts.update(bubble=waiting - sent, optimizer=self.optimizer(stages[slowest]))
        return StepTime(
            step=sum(parts.values()), parts=parts, stage=slowest, traffic=() if once else expose(rows, parts)
        )

    def send_seconds(self) -> Size:
        """Return the seconds to send one micro-batch's activations to the next stage; 0 without stages."""
        layout, view = self.layout, self.memory.view
        if layout.pp == 1:
            return 0
        nbytes = view.kernels.dtypes.activation * view.tokens * self.memory.model.stream_size / view.token_shards
        if self.training.framework.splits_sends and not layout.sequence_parallel:
            gathered = seconds("all_gather", nbytes, self.groups["tp"], self.fabric)
            return gathered + seconds("send_recv", nbytes / layout.tp, self.groups["pp"], self.fabric)
        return seconds("send_recv", nbytes, self.groups["pp"], self.fabric)

    @property
    def sends_hidden(self) -> bool:
        """Return whether sends between stages are hidden under compute."""
        return self.overlap.pp and self.layout.schedule not in self.training.framework.sends_in_turn

    def pipeline_seconds(self, chunks: Sequence[Sequence[MicroBatch]], send: Size, stage: int = 0) -> tuple[Size, Size]:
        """Return the seconds of the schedule, and of them the seconds that `stage` spends on exposed sends.

        chunks: time of one micro-batch by stage and chunk; send: seconds of one send. The schedule is played through; of a long
        steady state three rounds, to which the rest is added.

        Once every stage has had its first micro-batches, each further one adds the time of the slowest stage (GPipe: of
        the slowest forward and the slowest backward). Very unequal stages make that wrong by up to 2 %.
        """
        layout, batches = self.layout, self.layout.num_microbatches
        if layout.pp == 1:
            return batches * chunks[0][0].seconds, 0
        played = layout.played(ROUNDS)
        split = layout.splits_backward
        total, sending = played_seconds(
            layout.schedule,
            layout.pp,
            played,
            layout.vpp if layout.schedule == "interleaved" else None,
            tuple(tuple(sum(chunk.forward.values()) for chunk in times) for times in chunks),
            tuple(
                tuple(sum(chunk.backward.values()) - (chunk.weight if split else 0) for chunk in times)
                for times in chunks
            ),
            tuple(tuple(chunk.weight for chunk in times) for times in chunks) if split else 0,
            send,
            self.sends_hidden,
            self.memory.put_off,
        )
        slowest = max(sum(chunk.seconds for chunk in times) for times in chunks) / layout.copies
        if layout.schedule == "gpipe":
            slowest = sum(
                max(sum(getattr(times[0], side).values()) for times in chunks) for side in ("forward", "backward")
            )
        more = 0 if self.sends_hidden else 2 * send * layout.vpp
        rest = batches - played
        return total + rest * (slowest + more), sending[stage] + rest * more


def step_tokens(layout: Layout) -> float:
    """Return the tokens of one optimizer step over all GPUs; without padding where the batch is padding-free."""
    if layout.tokens is None:
        return float(layout.global_batch * layout.seq_len)
    return float(layout.tokens * layout.num_microbatches * layout.dp)


def step_time(model: StepModel, flops: Flops, cluster: Cluster) -> tuple[Time, tuple[Traffic, ...]]:
    """Return the time of one step [s] and its traffic."""
    gpu, machine = cluster.gpu, model.machine
    step = model.step
    training = model.training
    low, high = bounds(
        kind_of(stack=training.framework.stack, experts=model.memory.model.has_experts, tuning=training.tuning),
        tables=machine.efficiencies.basis == "measured",
        own_run=model.slower != 1.0,
        own_power=cluster.sustained is not None,
    )
    time = Time(
        step=float(step.step),
        low=step.step * low,
        high=step.step * high,
        parts={lane: float(value) for lane, value in step.parts.items()},
        stage=step.stage,
        tokens=step_tokens(model.layout),
        gpus=model.layout.gpus,
        peak_flops=machine.peak_of(facts.layer for facts in model.memory.facts.values()),
        model_flops=flops.model,
        hardware_flops=flops.hardware,
        tdp=None if gpu.power.tdp is None else gpu.tdp,
        scale=model.slower,
    )
    return time, step.traffic
