"""Time of inference, by roofline: of all prompts (the first token), and of one more token of each sequence.

An operation takes what the same operation takes in training (`core/estimate/time/roofline.py`), without launches, which CUDA graphs
hide in generation; attention over a cache moves the cache, at the share of the bandwidth that products reach. Weights in 8-bit
floats are multiplied in that format where the GPU has it; those in fewer bits are read, and multiplied in 16.
"""

from __future__ import annotations

import msgspec

from loadgauge.core.base.algebra import Size, both_count
from loadgauge.core.definitions.hardware.calibration import of_cluster
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.estimate.time.collectives import Fabric, Group, groups, seconds
from loadgauge.core.estimate.time.roofline import Machine, attention_seconds, gemm_seconds, operation_seconds
from loadgauge.core.layers import View
from loadgauge.core.layers.attention.cache import kept_by_block
from loadgauge.core.layers.operations.operations import Operation
from loadgauge.core.serving.memory import fixed_bytes, stored
from loadgauge.core.serving.passes import Part, of_prompts, of_token, parts


class Wire(msgspec.Struct, frozen=True):
    """Traffic of one pass on one rank: calls, bytes of the whole tensor and bytes that the rank sends, of all calls; seconds."""

    axis: str
    collective: str
    calls: float
    payload: float
    wire: float
    seconds: float


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of all GPUs of a replica, bytes read and written and seconds of a pass through all stages.

    lanes: seconds by kind: products, attention, rest, and each axis of traffic
    """

    flops: float
    moved: float
    lanes: dict[str, float]
    traffic: tuple[Wire, ...]

    @property
    def seconds(self) -> float:
        """The sum of all lanes [s]."""
        return sum(self.lanes.values())

    def after(self, name: str, other: Pass) -> Pass:
        """Return both passes, one after the other, in which the other is a lane, messages included."""
        flops, moved = self.flops + other.flops, self.moved + other.moved
        return Pass(flops=flops, moved=moved, lanes=self.lanes | {name: other.seconds}, traffic=self.traffic)


def kind_of(operation: Operation) -> str:
    """Return the class that an operation's time counts in: `dense`, `experts`, `attention` or `rest`."""
    if operation.kind == "attention":
        return "attention"
    if not operation.gemms:
        return "rest"
    return "experts" if any(weight.expert for weight in operation.weights) else "dense"


class Clock:
    """Seconds of passes of one model on one cluster. Raises `NotStated` where the GPU lacks a figure that is needed."""

    def __init__(self, model: ModelSpec, asked: Inference, stages: tuple[Stage, ...], cluster: Cluster) -> None:
        measured = of_cluster(cluster)
        peaks = cluster.gpu.peaks
        # Products in blocks of 32 with a scale are of cards that have formats of 4 bits too; others widen the matrices.
        own = {"fp8": peaks.fp8, "mxfp8": peaks.fp8 if peaks.fp4 is not None else None}
        self.eight_bits = own.get(asked.weight_format) is not None
        usual = "bf16" if cluster.gpu.bf16 else "fp16"
        how = training("megatron", "fp8" if self.eight_bits else usual)
        machine = Machine.of(cluster.gpu, measured, how, experts=model.has_experts)
        self.machine = msgspec.structs.replace(machine, graphs=True, software=1.0, fuses_dropout=False)
        self.fabric = Fabric.of(cluster, measured)
        self.groups = groups({"tp": asked.tp, "dp": asked.attentions, "pp": asked.pp})
        self.groups |= {"etp": Group("etp", asked.etp, 1), "ep": Group("ep", asked.ep, asked.etp)}
        self.model, self.asked, self.stages = model, asked, stages

    def prompts(self) -> Pass:
        """Return the pass of all prompts of the batch; a score makes logits of every token."""
        asked = self.asked
        rows = asked.batch if asked.task == "generate" else asked.batch * asked.prompt
        whole = of_prompts(self.model, asked, whole=True)
        return self._pass(of_prompts(self.model, asked), rows, whole)

    def kernels(self) -> dict[str, float]:
        """Return the seconds of the kernels of all prompts of the batch, without traffic: dense, experts, attention, rest."""
        view = of_prompts(self.model, self.asked)
        by_kind = {"dense": 0.0, "experts": 0.0, "attention": 0.0, "rest": 0.0}
        for stage in self.stages:
            for part in parts(self.model, stage, view, self.asked.batch, self.asked.attentions):
                for operation in part.layer:
                    took = self._seconds(operation, self._moved(operation), view)
                    by_kind[kind_of(operation)] += float(part.times * took)
        return by_kind

    def token(self, context: Size) -> Pass:
        """Return the pass of one more token of each sequence, at a context of so many tokens."""
        whole = of_token(self.model, self.asked, context, whole=True)
        return self._pass(of_token(self.model, self.asked, context), self.asked.batch, whole)

    def _pass(self, view: View, rows: Size, whole_view: View) -> Pass:
        """A pass of a view. one: the same on one rank, of which FLOPs are counted"""
        flops: Size = 0
        moved: Size = 0
        lanes = {"products": 0.0, "attention": 0.0, "rest": 0.0}
        traffic: dict[tuple[str, str], list[float]] = {}
        for stage in self.stages:
            whole = parts(self.model, stage, whole_view, rows)
            flops += self.asked.attentions * sum(part.times * part.layer.forward_flops for part in whole)
            for part in parts(self.model, stage, view, rows, self.asked.attentions):
                for operation in part.layer:
                    nbytes = self._moved(operation)
                    moved += part.times * nbytes
                    kind = kind_of(operation)
                    lane = "products" if kind in ("dense", "experts") else kind
                    lanes[lane] += part.times * self._seconds(operation, nbytes, view)
                self._collect(traffic, part)
            if view.cached is not None:  # states are read, and written again
                own = (
                    kept_by_block(self.model.blocks[kind], self.model.hidden_size, view.tp) for kind in stage.pattern
                )
                nbytes = 2 * view.sequences * sum(map(fixed_bytes, own))
                moved += nbytes
                lanes["rest"] += nbytes / (self.machine.bandwidth * self.machine.efficiencies.product_memory)
        if len(self.stages) > 1:
            sent = 2 * view.tokens * self.model.hidden_size
            row = traffic.setdefault(("pp", "send_recv"), [0.0] * 4)
            for index, value in enumerate(
                (1, sent, sent, seconds("send_recv", sent, self.groups["pp"], self.fabric)),
            ):
                row[index] += (len(self.stages) - 1) * value
        rows_of = tuple(Wire(axis, kind, *values) for (axis, kind), values in traffic.items())
        for row_of in rows_of:
            lanes[row_of.axis] = lanes.get(row_of.axis, 0.0) + row_of.seconds
        return Pass(flops=flops, moved=moved, lanes=lanes, traffic=rows_of)

    def _collect(self, traffic: dict[tuple[str, str], list[float]], part: Part) -> None:
        for operation in part.layer:
            for collective in operation.forward_comm:
                if collective.axis in self.groups and collective.ranks > 1:
                    group: Group = self.groups[collective.axis]
                    row = traffic.setdefault((collective.axis, collective.kind), [0.0] * 4)
                    took = seconds(collective.kind, collective.nbytes, group, self.fabric, copies=collective.copies)
                    for index, value in enumerate((1, collective.nbytes, collective.wire, took)):
                        row[index] += part.times * value

    def _moved(self, operation: Operation) -> Size:
        """Bytes that an operation reads and writes, its weights as they are stored; of a table only the rows it looks up."""
        if operation.kind == "view":
            return 0
        tensors = sum(tensor.nbytes for tensor in (*operation.inputs, *operation.outputs))
        if operation.kind == "lookup":
            return tensors + sum(tensor.nbytes for tensor in operation.outputs)
        read = sum(weight.numel * stored(weight, self.asked.weight_format) for weight in operation.weights)
        read += sum(2 * weight.numel for weight in operation.borrows)
        experts = [weight for weight in operation.weights if weight.expert and weight.kind == "matrix"]
        if experts and operation.gemms:
            read *= operation.gemms[0].batch / experts[0].copies
        return tensors + read

    def _seconds(self, operation: Operation, nbytes: Size, view: View) -> Size:
        if self.asked.experts_from and any(weight.expert and weight.kind == "matrix" for weight in operation.weights):
            return nbytes / self.asked.experts_from
        machine = self.machine
        if operation.kind == "attention":
            if view.cached is not None:
                streamed = nbytes / (machine.bandwidth * machine.efficiencies.product_memory)
                return both_count(operation.forward_flops / machine.usual.flops, streamed)
            return attention_seconds(operation, machine).forward
        if operation.gemms and operation.weights and operation.kind in ("gemm", "router"):
            element = stored(operation.weights[0], self.asked.weight_format)
            fp8 = self.eight_bits and element < 1.1
            return sum(gemm_seconds(product, machine, fp8=fp8, weight=element) for product in operation.gemms)
        if operation.kind == "lookup":
            return nbytes / machine.memory("elementwise").forward
        if operation.kind == "collective":
            return nbytes / machine.memory("permute").forward
        return operation_seconds(operation, machine).forward
