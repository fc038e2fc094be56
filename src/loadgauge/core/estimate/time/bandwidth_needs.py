"""Bandwidth needs: the bandwidth each axis needs, against what its link reaches.

Exposed communication may take a share of the time of compute; overlapped communication must end when compute does. Both
limits are seconds: bytes over the seconds allowed is the bandwidth needed, bytes over the seconds taken (latency included)
is the bandwidth reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import cached_property

import msgspec

from loadgauge.core.base.algebra import Size, same
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.hardware.calibration import Efficiencies
from loadgauge.core.definitions.hardware.cluster import GPUS_PER_NODE, evenly
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec, Moe
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.time.collectives import Fabric
from loadgauge.core.estimate.time.flops import step_flops
from loadgauge.core.estimate.time.roofline import Machine, operation_times
from loadgauge.core.estimate.time.step import StepModel, StepTime
from loadgauge.core.estimate.time.traffic import Carries, Traffic, exchange, expose, layout_groups, sends, stage_traffic
from loadgauge.core.estimate.workings import view_of

SHARE = 0.05
"""Share of compute time that an axis may expose: the convention of cluster planners."""
RACK = 72
"""GPUs that NVLink joins in an NVL72 rack."""


class Purpose(StrEnum):
    """Payload of an axis's traffic, in words."""

    ACTIVATIONS = "activations"
    KEYS_AND_VALUES = "keys and values"
    TOKENS = "tokens"
    GRADIENTS = "gradients"
    UPDATED_WEIGHTS = "updated weights"
    SHARDED_WEIGHTS = "weights and gradients"
    SHARED_WEIGHTS = "shared weights"


OF_LAYERS = {
    Carries.ACTIVATIONS: Purpose.ACTIVATIONS, Carries.KEYS_AND_VALUES: Purpose.KEYS_AND_VALUES, Carries.TOKENS: Purpose.TOKENS,
}  # fmt: skip
"""Purpose of the layers' own collectives, by axis."""


def bandwidth_needed(nbytes: float, seconds: float, share: float = 1.0) -> float:
    """Return the bandwidth [byte/s] that carries `nbytes` within a share of `seconds` of compute; 0 without bytes.

    Article 3 of tests/core/paper, 40.27 GB of tensor parallelism alongside 8.52 s of compute, of which it may take 5 %:

    >>> round(bandwidth_needed(40.27e9, 8.52, 0.05) / 1e9)
    95
    """
    return nbytes / (share * seconds) if nbytes else 0.0


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of compute of a step on the slowest pipeline stage, and of what communication can overlap with.

    forward, backward: of one micro-batch, recomputation included; attention: of the step, part of `total`
    """

    total: float
    forward: float
    backward: float
    attention: float


def slowed(machine: Machine, factor: float) -> Machine:
    """Return the machine on which every operation takes `factor` times as long."""
    return msgspec.structs.replace(machine, software=machine.software * factor)


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Bandwidth that one axis needs of its slowest link, per GPU of the pipeline stage that needs most.

    carried: bytes that link carries in a step; seconds: of all calls; beside: seconds of compute they overlap with (0: none);
    allowed: seconds that may be exposed; bandwidth: of the link, by its datasheet [byte/s]
    """

    axis: str
    what: Purpose
    link: str
    stage: int
    ranks: int
    carried: float
    seconds: float
    overlapped: bool
    beside: float
    allowed: float
    bandwidth: float

    @property
    def window(self) -> float:
        """Seconds that it may take: the compute it overlaps with, and what may be exposed."""
        return self.beside + self.allowed

    @property
    def needed(self) -> float:
        """Bandwidth with which no more than the allowed share is exposed [byte/s]."""
        return bandwidth_needed(self.carried, self.window)

    @property
    def reached(self) -> float:
        """Bandwidth the axis reaches, latency included [byte/s]."""
        return self.carried / self.seconds if self.seconds else 0.0

    @property
    def hidden(self) -> bool:
        """Return whether compute hides all of the traffic."""
        return self.overlapped and self.seconds <= self.beside

    @property
    def shown(self) -> float:
        """Exposed seconds in a step."""
        return max(self.seconds - self.beside, 0.0)

    @property
    def enough(self) -> bool:
        """Return whether the exposed seconds are within those allowed."""
        return self.seconds <= self.window

    def to_dict(self) -> dict[str, object]:
        """Return bytes, seconds and byte/s as plain values for JSON."""
        plain = {name: getattr(self, name) for name in self.__struct_fields__}
        return {**plain, "needed": self.needed, "reached": self.reached, "hidden": self.hidden, "enough": self.enough}


def efficiency(share: Size) -> Size:
    """Return 1 / (1 + r), the share of time that is compute, where exposed communication takes r of compute's time.

    This is not Amdahl's law, which splits the work of one processor: communication is none of that work.

    >>> round(efficiency(0.05), 3)
    0.952
    """
    return 1 / (1 + share)


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Bandwidth that each axis needs and reaches, from the traffic of a step.

    stage: the slowest pipeline stage, whose compute is given; traffic: over each axis, that of a GPU of the stage where it
    takes longest (inner stages send both ways, the last one has the head's); exposed seconds are those of the step
    """

    step: float
    stage: int
    exposed: float
    compute: Compute
    traffic: tuple[Traffic, ...]
    needs: tuple[Need, ...]

    @property
    def enough(self) -> bool:
        """Return whether every axis has the bandwidth it needs."""
        return all(need.enough for need in self.needs)

    @property
    def tightest(self) -> Need | None:
        """The axis that takes the largest part of its allowed time; None without traffic."""
        return max(self.needs, key=lambda need: need.seconds / need.window, default=None)

    @property
    def efficiency(self) -> float:
        """Compute over compute plus exposed communication; the pipeline bubble is not included."""
        return float(efficiency(self.exposed / self.compute.total))


class NetworkCase(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A model under a layout on a cluster, and the communication it may expose.

    share: of compute, the time that exposed communication may take on each axis; achieved: FLOP/s per GPU, where the user
    knows it better than the roofline; servers: parameter servers to compare with, each with the adapter of a GPU
    """

    model: ModelSpec
    layout: Layout
    training: Training
    machine: Machine
    fabric: Fabric
    share: float = SHARE
    achieved: float | None = None
    servers: int = 0

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        layout: Layout,
        training: Training,
        cluster: Cluster,
        efficiencies: Efficiencies,
        *,
        share: float = SHARE,
        achieved: float | None = None,
        oversubscription: float | None = None,
        pod: int | None = None,
        rails: bool = False,
        servers: int = 0,
    ) -> NetworkCase:
        """Build the case of a cluster; oversubscription, pod and rails as in `Fabric`, where the cluster's links do not say.

        Raises `ConfigError` for a share outside 0 to 1 or an oversubscription below 1, `LayoutError` for an impossible layout.
        """
        if not 0 < share < 1:
            raise ConfigError(f"must be between 0 and 1, got {share:g}", key="share")
        if oversubscription is not None and oversubscription < 1:
            raise ConfigError(f"must be at least 1, got {oversubscription:g}", key="oversubscription")
        if servers and layout.zero:
            raise ConfigError("hold the optimizer states themselves: with --zero 0", key="parameter_servers")
        layout.check(model)
        stated = {"oversubscription": oversubscription, "pod": pod}
        fabric = msgspec.structs.replace(
            Fabric.of(cluster, efficiencies, rails=rails),
            **{name: value for name, value in stated.items() if value is not None},
        )
        machine = Machine.of(cluster.gpu, efficiencies, training, experts=model.has_experts)
        return cls(
            model=model,
            layout=layout,
            training=training,
            machine=machine,
            fabric=fabric,
            share=share,
            achieved=achieved,
            servers=servers,
        )

    @classmethod
    def of_step(cls, step: StepModel) -> NetworkCase:
        """Build the case of a step whose time is already computed."""
        memory = step.memory
        case = cls(
            model=memory.model, layout=memory.layout, training=memory.training, machine=step.machine, fabric=step.fabric
        )
        case.__dict__.update(memory=memory, timed=step)
        return case

    @cached_property
    def memory(self) -> MemoryModel:
        """The memory model, shared with the case on any other fabric."""
        return MemoryModel(self.model, self.layout, self.training, view_of(self.layout, self.training))

    @cached_property
    def timed(self) -> StepModel:
        """The step model of this case."""
        return StepModel(self.memory, self.machine, self.fabric)

    def on(self, fabric: Fabric) -> NetworkCase:
        """Return the case on another fabric."""
        other = msgspec.structs.replace(self, fabric=fabric)
        other.__dict__["memory"] = self.memory
        return other

    def answer(self) -> Network:
        """Compute what each axis needs and reaches."""
        memory, model = self.memory, self.timed
        compute = self.compute(model)
        if self.achieved is not None:
            flops = step_flops(self.model, self.layout, self.training.kernels, memory.view).hardware
            machine = slowed(self.machine, flops / (self.layout.gpus * self.achieved) / compute.total)
            model = StepModel(memory, machine, self.fabric)
            compute = self.compute(model)
        step = model.step
        traffic = expose(self.slowest_traffic(model, step), step.parts)
        return Network(
            step=step.step,
            stage=step.stage,
            exposed=sum(row.exposed_seconds for row in traffic),
            compute=compute,
            traffic=traffic,
            needs=tuple(self.needs(traffic, compute)),
        )

    def slowest_traffic(self, model: StepModel, step: StepTime) -> Iterator[Traffic]:
        """Yield the traffic of each axis, from the stage where it takes longest; of equal ones, from the slowest stage."""
        by_stage = {step.stage: step.traffic}
        seen = set()
        for stage in model.stages:
            alike = model.memory.make_up(stage), sends(self.layout, stage.index)
            if alike not in seen and stage.index != step.stage:
                by_stage[stage.index] = stage_traffic(model.memory, self.fabric, stage, model.groups)
            seen.add(alike)
        seconds: dict[object, dict[int, float]] = {}
        for index, rows in by_stage.items():
            for row in rows:
                places = seconds.setdefault(_asks(row), {})
                places[index] = places.get(index, 0.0) + row.seconds
        # Rows of another stage take the place of the slowest stage's own.
        left = {key: max(places, key=places.__getitem__) for key, places in seconds.items()}
        for row in (row for rows in by_stage.values() for row in rows):
            key = _asks(row)
            if left.get(key) == step.stage:
                if row.stage == step.stage:
                    yield row
            elif key in left:
                yield from (other for other in by_stage[left.pop(key)] if _asks(other) == key)

    def compute(self, model: StepModel) -> Compute:
        """Return the compute of a step on its slowest stage [s]; a third of the ends' compute is forward."""
        memory, parts, batches = model.memory, model.step.parts, self.layout.num_microbatches
        stage, attention = model.stages[model.step.stage], 0.0
        for key, count in memory.counts(stage, stage.start, stage.stop).items():
            facts = memory.facts[key]
            for operation, time in zip(facts.layer, facts.layer.once(operation_times, model.machine), strict=True):
                if operation.kind == "attention":
                    again = time.forward if operation.name in facts.recompute else 0
                    attention += count * batches * (time.forward + time.backward + again)
        forward = parts["forward"] + parts["loss"] / 3
        total = parts["forward"] + parts["backward"] + parts["recompute"] + parts["loss"]
        return Compute(
            total=total, forward=forward / batches, backward=(total - forward) / batches, attention=attention
        )

    def needs(self, traffic: tuple[Traffic, ...], compute: Compute) -> Iterator[Need]:
        """Yield what each axis needs, with the traffic of one axis, link and moment taken together."""
        together: dict[tuple[str, Purpose, str, float], list[Traffic]] = {}
        for row in traffic:
            purpose, beside = self.beside(row, compute)
            together.setdefault((row.axis, purpose, row.link, beside), []).append(row)
        for (axis, purpose, link, beside), rows in together.items():
            outer = link == "outer"
            yield Need(
                axis=axis,
                what=purpose,
                link=link,
                stage=rows[0].stage,
                ranks=max(row.ranks for row in rows),
                carried=sum(row.calls_per_step * (row.adapter if outer else row.wire) for row in rows),
                seconds=sum(row.seconds for row in rows),
                overlapped=beside > 0,
                beside=beside,
                allowed=self.share * compute.total,
                bandwidth=self.fabric.outer_bandwidth if outer else self.fabric.inner_bandwidth,
            )

    def purpose(self, row: Traffic, network: Network) -> Purpose:
        """Return the purpose that a row of a network's traffic counts for."""
        return self.beside(row, network.compute)[0]

    def beside(self, row: Traffic, compute: Compute) -> tuple[Purpose, float]:
        """Return the purpose of a row of traffic, and the seconds of compute it can overlap with (0: none)."""
        overlap, layout = self.training.overlap, self.layout
        if row.kind.after_backward:
            return Purpose.SHARED_WEIGHTS, 0.0
        if row.lane == "zero":
            return Purpose.SHARDED_WEIGHTS, overlap.prefetch * compute.total
        if row.lane == "dp":
            updated = row.kind.in_forward
            each = compute.forward if updated else compute.backward
            times = layout.num_microbatches if row.calls_per_microbatch else 1
            return Purpose.UPDATED_WEIGHTS if updated else Purpose.GRADIENTS, row.hidden * times * each
        hidden = {
            "tp": overlap.tp * (compute.total - compute.attention),
            "cp": (overlap.cp and layout.cp_comm == "ring") * compute.attention * (layout.cp - 1) / layout.cp,
            "ep": overlap.ep * compute.total,
            "pp": overlap.pp * compute.total,
        }
        return OF_LAYERS[row.kind], hidden.get(row.axis, 0.0)


def _asks(row: Traffic) -> object:
    """The same for rows that ask for an axis together."""
    return row.axis, row.lane, row.kind.after_backward


class Change(msgspec.Struct, frozen=True):
    """A cluster with one thing changed, and the resulting network needs."""

    name: str
    fabric: Fabric
    result: Network


def served_step(beside: float, sent: float, ranks: float, servers: int, speed: float, *, waits: bool) -> float:
    """Return the seconds between the updates of a rank that sends gradients to parameter servers and fetches weights.

    beside: seconds of its step without that; sent: bytes of its gradients, and of its weights; speed: of each adapter [byte/s],
    in each direction; waits: for the gradients of all ranks. Without waiting, gradients are of weights that are `ranks - 1`
    updates old, and ranks, served one after another, wait only where the servers' adapters are full
    (source: li2014); where all are served at once, up to a fifth longer.

    >>> [served_step(1.0, 10.0, 8, 2, 100.0, waits=waits) for waits in (True, False)]
    [1.8, 1.2]
    """
    way = sent / speed
    full = way * ranks / servers
    return beside + 2 * max(way, full) if waits else max(beside + 2 * way, full)


def _served(setup: NetworkCase, network: Network) -> Iterator[Change]:
    """Yield the run with parameter servers in place of what data parallelism sends."""
    layout, fabric = setup.layout, setup.fabric
    rows = [row for row in network.traffic if row.axis == "dp"]
    sent = float(sum(row.payload * row.calls_per_step for row in rows))
    exposed = float(sum(row.exposed_seconds for row in rows))
    beside, speed = network.step - exposed, fabric.outer_bandwidth * fabric.outer_efficiency
    others = tuple(need for need in network.needs if need.axis != "dp")
    for waits, how in ((True, ""), (False, f", no waiting: {layout.dp - 1:,} updates old")):
        step = served_step(beside, sent, layout.gpus, setup.servers, speed, waits=waits)
        need = Need(
            axis="dp",
            what=Purpose.GRADIENTS,
            link="outer",
            stage=network.stage,
            ranks=layout.gpus + setup.servers,
            carried=2 * sent * max(1.0, layout.gpus / setup.servers),
            seconds=step - beside,
            overlapped=False,
            beside=0.0,
            allowed=setup.share * network.compute.total,
            bandwidth=fabric.outer_bandwidth,
        )
        result = msgspec.structs.replace(
            network, step=step, exposed=network.exposed - exposed + step - beside, needs=(*others, need)
        )
        yield Change(f"{setup.servers:,} parameter servers{how}", fabric, result)


def what_if(setup: NetworkCase, network: Network) -> Iterator[Change]:
    """Yield the same run on other clusters: links twice and half as fast, other node sizes, an oversubscribed network.

    First with parameter servers, where there are some.
    """
    if setup.servers:
        yield from _served(setup, network)
    layout, fabric, links = setup.layout, setup.fabric, {row.link for row in network.traffic}

    def changed(name: str, **fields: float) -> Change:
        other = msgspec.structs.replace(fabric, **fields)
        return Change(name, other, setup.on(other).answer())

    for link, title, field in (
        ("inner", "node link", "inner_bandwidth"),
        ("outer", "network", "outer_bandwidth"),
    ):
        if link in links:
            speed = getattr(fabric, field)
            for factor in (2, 0.5):
                yield changed(f"{title} x {factor:g}", **{field: speed * factor})
    if fabric.tiers:
        return
    for size, title in ((GPUS_PER_NODE, "nodes"), (RACK, "racks")):
        domain = filling(layout, size)
        if fabric.domain not in (1, domain):
            yield changed(_domain_name(title, domain, size, layout), domain=domain)
    if "outer" in links:
        for factor in (1, 2, 4):
            if factor != fabric.oversubscription:
                yield changed(f"oversubscription {factor:g}", oversubscription=float(factor))


def filling(layout: Layout, size: int) -> int:
    """Return the number of GPUs of each domain of `size` a job uses, so that no tensor-parallel group leaves its domain.

    The largest number that fills all domains evenly, if it is at least half a domain; else the largest, and the last domain
    is used in part. Where tensor-parallel groups are larger than a domain, domains are filled evenly.

    >>> [filling(Layout(tp=tp, dp=dp, seq_len=1), size) for tp, dp, size in ((8, 32, 72), (8, 212, 72), (16, 4, 8))]
    [64, 72, 8]
    """
    if layout.gpus <= size:
        return int(layout.gpus)
    tp = layout_groups(layout)["tp"]
    whole = [domain for domain in range(size, 0, -1) if same(tp.domains(domain), 1)]
    if not whole:
        return evenly(layout.gpus, size)
    return next((domain for domain in whole if layout.gpus % domain == 0 and 2 * domain >= size), whole[0])


def _domain_name(title: str, domain: int, size: int, layout: Layout) -> str:
    """Return the name of nodes or racks of which a job uses `domain` GPUs each."""
    of = f" (of {size})" if domain < min(size, layout.gpus) else ""
    over = layout_groups(layout)["tp"].domains(domain)
    return f"{title} of {domain}{of}" + (f", tp over {over}" if over > 1 else "")


def largest_tp(setup: NetworkCase) -> int | None:
    """Return the largest tensor-parallel degree, on the same GPUs, whose traffic stays within the time allowed.

    1 where no other does; None where the model or the layout admits no other. Experts come with sequence parallelism.
    """
    layout, model = setup.layout, setup.model
    shared = layout.sequence_parallel or any(isinstance(block.mlp, Moe) for block in model.blocks)
    ranks, best, tp = layout.tp * layout.dp, None, 2
    while tp <= ranks:
        other = msgspec.structs.replace(layout, tp=tp, dp=ranks // tp, sequence_parallel=shared)
        if ranks % tp == 0 and not other.valid(model):
            answer = msgspec.structs.replace(setup, layout=other).answer()
            best = tp if all(need.enough for need in answer.needs if need.axis == "tp") else best or 1
        tp *= 2
    return best


class Batch(msgspec.Struct, frozen=True):
    """Sequences of a micro-batch, and of a step over all GPUs."""

    micro_batch: int
    global_batch: int


def smallest_batch(setup: NetworkCase, most: int = 4096) -> Batch | None:
    """Return the smallest batch at which data parallelism exposes no more than the share; None where none does.

    What is reduced once a step costs less the more micro-batches there are, up to `most`; what is reduced with each
    micro-batch (ZeRO-2 and 3) costs less the larger that is.
    """
    layout = setup.layout

    def kept(micro_batch: int, batches: int) -> Batch | None:
        sizes = {"micro_batch": micro_batch, "global_batch": layout.dp * micro_batch * batches}
        if layout.tokens is not None and micro_batch != layout.micro_batch:
            return None
        other = msgspec.structs.replace(layout, **sizes)
        if other.valid(setup.model):
            return None
        network = msgspec.structs.replace(setup, layout=other).answer()
        return Batch(**sizes) if all(need.enough for need in network.needs if need.axis == "dp") else None

    if layout.zero == 3 or exchange(layout, setup.training).reduces:
        sizes = (2**power for power in range(7))
        return next((batch for size in sizes if (batch := kept(size, layout.num_microbatches))), None)
    # Interleaved schedules take whole rounds of micro-batches, DualPipe two at a time and at least two a stage.
    step = {"interleaved": layout.pp, "dualpipe": 2}.get(layout.schedule, 1)
    low, high = 0, 1
    while not kept(layout.micro_batch, high * step):
        low, high = high, 2 * high
        if high * step > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if kept(layout.micro_batch, middle * step) else (middle, high)
    return kept(layout.micro_batch, high * step)
