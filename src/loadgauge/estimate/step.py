"""The time of one optimizer step: compute, exposed communication, pipeline bubble and optimizer, as lanes that add up.

Every lane is on the critical path of the slowest pipeline stage; the bubble is what is left of the step. Communication
that runs beside compute shows only by what sticks out.
"""

from __future__ import annotations

import msgspec

from loadgauge.algebra import Size, maximum
from loadgauge.estimate.comm import Fabric, Group, seconds
from loadgauge.estimate.memory import LayerFacts, MemoryModel, Stage, stages
from loadgauge.estimate.roofline import LayerTime, Machine, layer_seconds, operation_seconds
from loadgauge.estimate.schedule import simulate
from loadgauge.estimate.states import RankWeights
from loadgauge.estimate.traffic import Traffic, collective_seconds, entry, layout_groups
from loadgauge.ops import Layer, Operation, Recompute

LANES = (
    "forward", "backward", "recompute", "loss", "tp", "cp", "ep", "pp", "zero", "bubble", "dp", "optimizer", "fixed",
)  # fmt: skip


class MicroBatch(msgspec.Struct, frozen=True):
    """Seconds that one micro-batch spends on one stage, by lane; forward and backward apart for the schedule."""

    forward: dict[str, Size]
    backward: dict[str, Size]
    weight: Size = 0
    """Of the backward, what makes gradients of weights (zero-bubble schedules move it)."""

    def add(self, other: MicroBatch, times: Size = 1) -> MicroBatch:
        """With another one's time, so many times."""
        return MicroBatch(
            _add(self.forward, other.forward, times),
            _add(self.backward, other.backward, times),
            self.weight + times * other.weight,
        )


class _Sums:
    """Seconds of operations: of matrix products, of attention, of all."""

    def __init__(self) -> None:
        self.products: Size = 0
        self.attention: Size = 0
        self.all: Size = 0

    def add(self, operation: Operation, time: Size) -> None:
        if operation.kind == "attention":
            self.attention = self.attention + time
        elif operation.gemms:
            self.products = self.products + time
        self.all = self.all + time

    @property
    def parts(self) -> tuple[Size, Size, Size]:
        return self.products, self.attention, self.all


def _add(first: dict[str, Size], second: dict[str, Size], times: Size) -> dict[str, Size]:
    return {lane: first.get(lane, 0) + times * second.get(lane, 0) for lane in {**first, **second}}


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step. `parts` (seconds, by lane) add up to `step`; `traffic` is what the network carried."""

    step: Size
    parts: dict[str, Size]
    stage: int
    traffic: tuple[Traffic, ...]


class StepModel:
    """The time of a step of a model under a layout on a machine."""

    def __init__(self, memory: MemoryModel, machine: Machine, fabric: Fabric) -> None:
        self.memory, self.machine, self.fabric = memory, machine, fabric
        self.layout, self.training = memory.layout, memory.training
        self.overlap = self.training.overlap
        self.groups = layout_groups(self.layout)
        self.layers = {key: self.of_layer(facts) for key, facts in memory.facts.items()}
        self.embedding = self.of_end(memory.embedding)
        self.head = self.of_end(memory.head)

    # -- one micro-batch ------------------------------------------------------------------------------------------------

    def comm(self, layer: Layer, direction: str, recompute: Recompute | None = None) -> dict[str, Size]:
        """Seconds of a layer's collectives by axis, forward, backward, or of what runs again."""
        chosen = [op for op in layer if recompute is None or op.name in recompute]
        listed = [c for op in chosen for c in (op.backward_comm if direction == "backward" else op.forward_comm)]
        return collective_seconds(listed, self.groups, self.fabric)

    def shown(self, whole: Size, under: Size, least: Size = 0) -> Size:
        """What is seen of so many seconds of communication beside compute.

        At least a share `least` of it has nothing to hide under; what is hidden slows the compute down by
        `Rates.contention`.
        """
        seen = maximum(whole - under, least * whole)
        return seen + self.machine.rates.contention * (whole - seen)

    def exposed(self, by_axis: dict[str, Size], products: Size, attention: Size, layer: Size) -> dict[str, Size]:
        """Seconds by lane that a layer's collectives add, `products`, `attention` and `layer` being those of compute.

        Overlapped tensor-parallel rings hide under their products but for the first chunk; context-parallel rings under
        attention but for the first piece; dispatch and combine under another half of the batch.
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
            lane = "ep" if axis == "etp" else axis
            lanes[lane] = lanes.get(lane, 0) + value
        return lanes

    def of_layer(self, facts: LayerFacts) -> MicroBatch:
        """One layer and micro-batch: compute, what runs again, exposed collectives, ZeRO-3's gathers."""
        layer, again = facts.layer, facts.recompute
        forward, backward, weight, repeated = _Sums(), _Sums(), 0, _Sums()
        for operation in layer:
            time = operation_seconds(operation, self.machine)
            forward.add(operation, time.forward)
            backward.add(operation, time.backward)
            weight = weight + time.weight_gradient
            if operation.name in again:
                repeated.add(operation, time.forward)
        ahead = {"forward": forward.all, **self.exposed(self.comm(layer, "forward"), *forward.parts)}
        back = {
            "backward": backward.all,
            "recompute": repeated.all,
            **self.exposed(self.comm(layer, "backward"), *backward.parts),
        }
        if again:
            back = _add(back, self.exposed(self.comm(layer, "forward", again), *repeated.parts), 1)
        if self.layout.zero == 3:
            gather, scatter = self.zero_seconds(facts.weights)
            if self.overlap.prefetch:
                ahead["zero"] = self.shown(gather, sum(ahead.values()))
                back["zero"] = self.shown(gather + scatter, sum(back.values()))
            else:
                ahead["zero"], back["zero"] = gather, gather + scatter
        return MicroBatch(ahead, back, weight)

    def of_end(self, layer: Layer) -> MicroBatch:
        """The embedding, or the head with its loss."""
        time: LayerTime = layer_seconds(layer, self.machine)
        ahead = {"loss": time.forward, **self.exposed(self.comm(layer, "forward"), time.forward, 0, 0)}
        back = {"loss": time.backward, **self.exposed(self.comm(layer, "backward"), time.backward, 0, 0)}
        if self.layout.zero == 3:
            # Nothing runs yet beside the first gather, nothing any more beside the last reduction.
            gather, scatter = self.zero_seconds(RankWeights.of(layer.weights))
            first = layer is self.memory.embedding or not self.overlap.prefetch
            ahead["zero"] = gather if first else self.shown(gather, time.forward)
            back["zero"] = scatter if first else self.shown(scatter, time.backward)
        return MicroBatch(ahead, back, time.weight_gradient)

    def zero_seconds(self, weights: RankWeights) -> tuple[Size, Size]:
        """Seconds to gather some weights and to scatter their gradients under ZeRO-3."""
        precision = self.training.precision
        gather: Size = 0
        scatter: Size = 0
        for part, group in ((weights.dense, self.groups["zero"]), (weights.expert, self.groups["expert_dp"])):
            gather = gather + seconds("all_gather", precision.compute * part.total, group, self.fabric)
            scatter = scatter + seconds("reduce_scatter", self.reduced_bytes * part.trainable, group, self.fabric)
        return gather, scatter

    @property
    def reduced_bytes(self) -> int:
        """Bytes a gradient element has on the wire."""
        precision = self.training.precision
        return precision.gradient if precision.name != "bf16-pure" else 2

    def of_stage(self, stage: Stage) -> MicroBatch:
        """One micro-batch through one stage."""
        total = MicroBatch({}, {})
        for key, count in self.memory.counts(stage, stage.start, stage.stop).items():
            total = total.add(self.layers[key], count)
        if stage.first:
            total = total.add(self.embedding)
        if stage.last:
            total = total.add(self.head)
        return total

    # -- the end of a step ----------------------------------------------------------------------------------------------

    def gradients(self, stage: Stage, micro: MicroBatch) -> tuple[Size, list[Traffic]]:
        """Exposed seconds of the data-parallel reduction (and of gathering updated weights), and its traffic."""
        layout, precision = self.layout, self.training.precision
        weights = self.memory.weights(self.memory.counts(stage, stage.start, stage.stop)) + self.memory.ends(stage)
        exposed: Size = 0
        table: list[Traffic] = []
        rows: list[tuple[str, str, Size, Group, Size]] = []
        parts = ((weights.dense, self.groups["zero"]), (weights.expert, self.groups["expert_dp"]))
        for part, group in parts:
            if group is self.groups["expert_dp"] and not self.memory.has_experts:
                continue
            reduced, copies = self.reduced_bytes * part.trainable, precision.compute * part.trainable
            if layout.zero == 0:
                rows.append(("gradients", "all_reduce", reduced, group, 1))
            elif layout.zero < 3:
                rows.append(("gradients", "reduce_scatter", reduced, group, 1))
                rows.append(("updated weights", "all_gather", copies, group, 0))
        backward, forward = sum(micro.backward.values()), sum(micro.forward.values())
        for what, kind, nbytes, group, is_backward in rows:
            whole = seconds(kind, nbytes, group, self.fabric)
            shown = whole
            if self.overlap.dp:
                hidden = backward if is_backward else forward
                # The last bucket has nothing left to hide under.
                shown = self.shown(whole, hidden, 1 / max(1, stage.stop - stage.start))
            exposed = exposed + shown
            table.append(entry("dp", what, kind, 1, nbytes, group, self.fabric, exposed=shown / whole if whole else 1))
        return exposed, table

    def optimizer(self, stage: Stage) -> Size:
        """Seconds of the update: gradients read twice (their norm), master weights and moments read and written back."""
        precision, chosen = self.training.precision, self.training.optimizer
        weights = self.memory.weights(self.memory.counts(stage, stage.start, stage.stop)) + self.memory.ends(stage)
        moment = precision.moment if chosen.moment_bytes is None else chosen.moment_bytes
        master = precision.master or precision.weight
        moved = 2 * precision.gradient + 2 * master + 2 * chosen.moments * moment + precision.compute
        sharded = self.layout.zero >= 1
        elements = weights.dense.trainable / (self.layout.zero_ranks if sharded else 1)
        elements = elements + weights.expert.trainable / (self.layout.expert_dp if sharded else 1)
        return moved * elements / (self.machine.bandwidth * self.machine.rates.memory)

    # -- the step -------------------------------------------------------------------------------------------------------

    def step(self) -> StepTime:
        """The whole step."""
        layout = self.layout
        each = list(stages(self.memory.model, layout))
        alike: dict[object, MicroBatch] = {}
        micro = []
        for stage in each:
            key = (stage.first, stage.last, tuple(self.memory.counts(stage, stage.start, stage.stop).items()))
            if key not in alike:
                alike[key] = self.of_stage(stage)
            micro.append(alike[key])
        forward = [sum(one.forward.values()) for one in micro]
        backward = [sum(one.backward.values()) for one in micro]
        batches = layout.num_microbatches
        slowest = max(range(layout.pp), key=lambda index: forward[index] + backward[index])
        busy = batches * (forward[slowest] + backward[slowest])
        send = self.send_seconds()
        total = self.pipeline_seconds(forward, backward, [one.weight for one in micro], send)
        exposed, table = self.gradients(each[slowest], micro[slowest])
        update = self.optimizer(each[slowest])
        parts: dict[str, Size] = dict.fromkeys(LANES, 0)
        for side in (micro[slowest].forward, micro[slowest].backward):
            for lane, value in side.items():
                parts[lane] = parts[lane] + batches * value
        free = self.pipeline_seconds(forward, backward, [one.weight for one in micro], 0) if layout.pp > 1 else total
        parts["pp"] = parts["pp"] + total - free
        parts.update(bubble=free - busy, dp=exposed, optimizer=update)
        return StepTime(
            step=sum(parts.values()), parts=parts, stage=slowest, traffic=tuple(self.table(each[slowest], table))
        )

    def send_seconds(self) -> Size:
        """Seconds to send one micro-batch's activations to the next stage."""
        layout, view = self.layout, self.memory.view
        if layout.pp == 1:
            return 0
        nbytes = view.kernels.dtypes.activation * view.tokens * self.memory.model.hidden_size / view.token_shards
        return seconds("send_recv", nbytes, self.groups["pp"], self.fabric)

    def pipeline_seconds(self, forward: list[Size], backward: list[Size], weight: list[Size], send: Size) -> Size:
        """The schedule played through; a long steady state is played short and its rest added (`PLAYED`)."""
        layout = self.layout
        batches = layout.num_microbatches
        if layout.pp == 1:
            return batches * (forward[0] + backward[0])
        # From the second round on every micro-batch adds the time of the slowest stage.
        played = min(batches, 3 * layout.pp)
        chunks = layout.vpp if layout.schedule == "interleaved" else None
        split = layout.schedule not in ("1f1b", "gpipe", "interleaved")
        result = simulate(
            layout.schedule, layout.pp, played,
            forward=forward,
            backward=[b - w for b, w in zip(backward, weight, strict=True)] if split else backward,
            weight=weight if split else 0,
            send=send, overlap_send=self.overlap.pp, chunks=chunks,
        )  # fmt: skip
        rest = batches - played
        slowest = max(f + b for f, b in zip(forward, backward, strict=True))
        return result.total + rest * (slowest + (0 if self.overlap.pp else 2 * send * layout.vpp))

    def table(self, stage: Stage, reduced: list[Traffic]) -> list[Traffic]:
        """Every collective of the step on one rank of a stage."""
        layout, memory = self.layout, self.memory
        batches = layout.num_microbatches
        found: dict[tuple[str, str, Size], list[Size]] = {}
        layers = [(memory.facts[key].layer, memory.facts[key].recompute, count)
                  for key, count in memory.counts(stage, stage.start, stage.stop).items()]  # fmt: skip
        layers += [(memory.embedding, Recompute(), 1)] if stage.first else []
        layers += [(memory.head, Recompute(), 1)] if stage.last else []
        for layer, recompute, count in layers:
            for op in layer:
                again = op.forward_comm if op.name in recompute else ()
                for collective in (*op.forward_comm, *again, *op.backward_comm):
                    key = (collective.axis, collective.kind, collective.nbytes)
                    found.setdefault(key, []).append(count * batches)
        shown = {"tp": not self.overlap.tp, "cp": not self.overlap.cp, "ep": not self.overlap.ep, "etp": True}
        rows = [
            entry(
                axis, "activations", kind, sum(calls), nbytes, self.groups[axis], self.fabric, exposed=int(shown[axis])
            )
            for (axis, kind, nbytes), calls in found.items()
        ]
        if layout.pp > 1:
            view = memory.view
            nbytes = view.kernels.dtypes.activation * view.tokens * memory.model.hidden_size / view.token_shards
            calls = batches * layout.vpp * ((not stage.first) + (not stage.last))
            rows.append(
                entry("pp", "activations", "send_recv", calls, nbytes, self.groups["pp"], self.fabric, exposed=0)
            )
        if layout.zero == 3:
            weights = memory.weights(memory.counts(stage, stage.start, stage.stop)) + memory.ends(stage)
            for part, name in ((weights.dense, "zero"), (weights.expert, "expert_dp")):
                if name == "expert_dp" and not memory.has_experts:
                    continue
                group, compute = self.groups[name], self.training.precision.compute
                rows.append(
                    entry(
                        "dp", "weights", "all_gather", 2 * batches, compute * part.total, group, self.fabric, exposed=0
                    )
                )
                rows.append(
                    entry(
                        "dp",
                        "gradients",
                        "reduce_scatter",
                        batches,
                        self.reduced_bytes * part.trainable,
                        group,
                        self.fabric,
                        exposed=0,
                    )
                )
        return [*rows, *reduced]
