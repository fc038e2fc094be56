"""Traffic: every collective of one optimizer step on one rank, by axis, with its bytes and seconds.

Once a micro-batch: what the layers' own operations exchange (tensor, context and expert parallelism, in forward, backward
and recomputation), activations between pipeline stages, ZeRO-3's weights. Once a step: gradients of weights that
tensor-parallel ranks share under sequence parallelism, and those of a tied table on the first and last stage.

Gradients over the data-parallel ranks, of `Precision.gradient` bytes each (`reduced` from stage 2 on), and the weights under
ZeRO (`exchange`):

==  ==================================================================================  =====================================
0   all-reduce, once a step                                                             DDP (no_sync), Megatron-LM
1   reduce-scatter, and updated weights gathered, once a step                           DeepSpeed, Megatron's distributed
                                                                                        optimizer
2   reduce-scatter with every micro-batch; updated weights gathered once a step         DeepSpeed (issue 2252), Megatron-FSDP
2   the same, weights gathered with every micro-batch (`reshard_after_forward=False`)   FSDP2, which shards them again after
                                                                                        each backward
3   reduce-scatter with every micro-batch; weights gathered twice with every            FSDP2 (pytorch, pull request 126166),
    micro-batch, those of embedding and head once                                       DeepSpeed, Megatron-FSDP
==  ==================================================================================  =====================================

FSDP under `no_sync` (`Framework.reduces_once`) holds whole gradients and reduces them once a step; FSDP1's SHARD_GRAD_OP then keeps
weights gathered, too. In PyTorch's pipelines FSDP reduces a stage's gradients once, after its last backward, with nothing left to
hide under; stage 2 gathers once a step, stage 3 once with every micro-batch, for its backward. Where ZeRO shards over a part of the
ranks (HSDP, Megatron's optimizer instances), each shard is all-reduced over its replicas after its reduce-scatter.

Hidden under compute: what FSDP and Megatron-FSDP send, on streams of their own (`Overlap.prefetch`); what DDP, DeepSpeed and
Megatron send, where `Overlap.dp` says so; but DeepSpeed gathers updated weights inside its optimizer step.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base import ConfigError, LayoutError, Size, same, shard, sums, where
from loadgauge.core.definitions.layout.axes import FACTORS, LANE_OF, RANK_ORDER
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, Stage
from loadgauge.core.estimate.states.states import RankWeights, WeightCount, gathered_bytes
from loadgauge.core.estimate.time.collectives import Fabric, Group, adapter_bytes, groups, joined, seconds, wire_bytes
from loadgauge.core.layers.operations.operations import Collective, Layer, Recompute


class Carries(StrEnum):
    """Payload of a collective, as far as its time or its place in the step depends on it."""

    ACTIVATIONS = "activations"
    """Of a layer, or between pipeline stages; forward, backward, or both."""
    KEYS_AND_VALUES = "keys and values"
    TOKENS = "tokens"
    """To experts and back, or among the ranks of one expert."""
    GRADIENTS = "gradients"
    """Of all weights, over the ranks that hold the same ones."""
    SHARED_GRADIENTS = "gradients of shared weights"
    """Of weights that tensor-parallel ranks hold whole, after the last backward."""
    TIED_GRADIENTS = "gradients of the tied table"
    """Of the table that the first and the last stage share, after the last backward."""
    WEIGHTS = "weights"
    """Gathered from their shards for a pass: by ZeRO-3, and by FSDP at stage 2."""
    UPDATED_WEIGHTS = "updated weights"
    """Gathered after the optimizer step by ZeRO-1 and 2."""

    @property
    def in_forward(self) -> bool:
        """Return whether a forward needs it, under which it may hide; else it follows a backward."""
        return self in (Carries.WEIGHTS, Carries.UPDATED_WEIGHTS)

    @property
    def after_backward(self) -> bool:
        """Return whether it is exchanged after the last backward, with nothing to overlap."""
        return self in (Carries.SHARED_GRADIENTS, Carries.TIED_GRADIENTS)


BY_AXIS = {
    "tp": (Carries.ACTIVATIONS, "activations"),
    "cp": (Carries.KEYS_AND_VALUES, "keys and values"),
    "ep": (Carries.TOKENS, "tokens to experts and back"),
    "etp": (Carries.TOKENS, "tokens among an expert's ranks"),
}
"""Data that the layers' own collectives carry, by axis, and the words for it."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective on one axis, per GPU and step.

    kind: what it carries; what: the same in words, for display only; group: its ranks, by their name among
    `layout_groups`; stage: the pipeline stage of the GPU
    payload: bytes of the full tensor, per call; wire: bytes one GPU sends, per call; adapter: bytes that its share of the
    network between domains carries, per call; link: `inner`, `outer` or `none`, the slowest link of the group; seconds,
    exposed_seconds: of all calls of the step; lane: the component of step time that the exposed ones belong to
    hidden: whether it may overlap with compute
    """

    axis: str
    kind: Carries
    what: str
    group: str
    collective: str
    calls_per_microbatch: Size
    calls_per_step: Size
    payload: Size
    wire: Size
    adapter: Size
    link: str
    ranks: Size
    seconds: Size
    exposed_seconds: Size
    lane: str
    hidden: bool = False
    stage: int = 0

    @property
    def sent(self) -> Size:
        """Bytes one GPU sends in a step."""
        return self.calls_per_step * self.wire

    def to_dict(self) -> dict[str, Any]:
        """Return a row of `network` in the JSON documents: bytes, seconds and plain counts."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("group", "lane", "hidden")}


def layout_groups(layout: Layout) -> dict[str, Group]:
    """Return the groups of ranks that communicate, by name: those of the axes, and

    zero, replicas: the ranks that ZeRO shards over (dp and cp together, or a part of dp), and those with the same shard;
    ep, etp, expert_dp, expert_replicas: of the experts, whose ranks are those of dp x cp x tp, numbered again in the same
    order;
    ends: the first and the last pipeline stage.

    >>> made = layout_groups(Layout(dp=8, tp=4, cp=2, ep=8, replicas=2, seq_len=1))
    >>> [(name, made[name].ranks, made[name].stride) for name in ("dp", "zero", "replicas", "ep", "expert_dp")]
    [('dp', 8, 8), ('zero', 8, 4), ('replicas', 2, 32), ('ep', 8, 1), ('expert_dp', 4, 8)]
    """
    order, replicas = layout.order, layout.replicas
    if sorted(order) != sorted(RANK_ORDER):
        raise ConfigError(f"must name each of {', '.join(RANK_ORDER)} once, got {', '.join(order)}", key="order")
    by_axis = groups({axis: getattr(layout, axis) for axis in FACTORS}, order)
    experts = groups({"tp": layout.etp, "ep": layout.ep, "dp": layout.expert_dp, "pp": layout.pp}, order)
    if layout.pp > 1 and not same(layout.ep * layout.etp, 1) and not same(by_axis["pp"].stride, experts["pp"].stride):
        raise LayoutError(
            f"with pp numbered before dp, experts need ep x etp = tp x cp, not {layout.ep} x {layout.etp}"
            f" and {layout.tp} x {layout.cp}"
        )
    part = _shards(by_axis["dp"], replicas)
    first, second = (by_axis["cp"], part) if order.index("cp") < order.index("dp") else (part, by_axis["cp"])
    by_axis["zero"] = joined("dp", first, second)
    by_axis["ep"], by_axis["etp"] = (
        Group(name, experts[axis].ranks, experts[axis].stride) for name, axis in (("ep", "ep"), ("etp", "tp"))
    )
    by_axis["expert_dp"] = _shards(experts["dp"], replicas)
    for name, group in (("replicas", part), ("expert_replicas", by_axis["expert_dp"])):
        by_axis[name] = Group("dp", replicas, group.stride * group.ranks)
    if layout.pp > 1:
        by_axis["ends"] = Group("pp", 2, by_axis["pp"].stride * (layout.pp - 1), part_of=by_axis["pp"])
    return by_axis


def _shards(group: Group, replicas: Size) -> Group:
    """The part of a data-parallel group that ZeRO shards over."""
    return Group("dp", shard(group.ranks, replicas, "data-parallel ranks over replicas"), group.stride)


def collective_seconds(collectives: Iterable[Collective], by_axis: dict[str, Group], fabric: Fabric) -> dict[str, Size]:
    """Return the seconds of a list of collectives, by axis."""
    return sums(
        (
            sent.axis,
            seconds(sent.kind, sent.nbytes, by_axis[sent.axis], fabric, "auto", sent.copies, sent.rows, sent.groups),
        )
        for sent in collectives
    )


def entry(
    carries: Carries,
    label: str,
    kind: str,
    calls: Size,
    payload: Size,
    among: str,
    by_axis: Mapping[str, Group],
    fabric: Fabric,
    *,
    each: Size = 0,
    exposed: Size = 1,
    lane: str | None = None,
    copies: Size = 1,
    rows: Size = 0,
    groups: tuple[int, int] = (1, 1),
) -> Traffic:
    """Build one row of the table.

    kind: of collective; calls: per step; each: per micro-batch; payload: bytes per call; among: the name of its ranks in
    `made`; exposed: the share of its seconds that is exposed; copies, rows, groups: as in `ops.Collective`
    """
    group = by_axis[among]
    several = where(group.ranks > 1, 1, 0)
    # For arrays of layouts the bytes are not read, and computing them takes longer than the seconds.
    many = hasattr(group.ranks, "shape")
    whole = calls * seconds(kind, payload, group, fabric, "auto", copies, rows, groups)
    return Traffic(
        axis=group.axis,
        kind=carries,
        what=label,
        group=among,
        collective=kind,
        calls_per_microbatch=each * several,
        calls_per_step=calls * several,
        payload=payload,
        wire=math.nan if many else wire_bytes(kind, payload, group.ranks),
        adapter=math.nan if many else adapter_bytes(kind, payload, group, fabric, copies, groups),
        link=group.link(fabric.domain) if isinstance(group.ranks, int) else "",
        ranks=group.ranks,
        seconds=whole,
        exposed_seconds=whole * exposed,
        hidden=isinstance(exposed, int) and exposed == 0,
        lane=lane or LANE_OF.get(group.axis, group.axis),
    )


def expose(rows: Iterable[Traffic], lanes: Mapping[str, Size]) -> tuple[Traffic, ...]:
    """Return the rows with a step's exposed seconds by component, split in proportion to the seconds of each row."""
    listed = tuple(rows)
    total = sums((row.lane, row.seconds) for row in listed)
    return tuple(
        msgspec.structs.replace(row, exposed_seconds=row.seconds * lanes[row.lane] / total[row.lane])
        if row.lane in lanes and total[row.lane]
        else row
        for row in listed
    )


def stage_traffic(
    memory: MemoryModel, fabric: Fabric, stage: Stage, by_axis: dict[str, Group] | None = None, *, once: bool = False
) -> tuple[Traffic, ...]:
    """Return every collective of a step on one rank of a pipeline stage; none where there is one rank.

    Exposed seconds are all or nothing here, by the overlap switches; `expose` sets those of the step's timeline.
    once: only those that are not with the micro-batches
    """
    groups_of = layout_groups(memory.layout) if by_axis is None else by_axis
    own = () if once else _operations(memory, fabric, stage, groups_of)
    rows = [*own, *weight_traffic(memory, fabric, stage, groups_of, once=once)]
    listed = (row for row in rows if not same(row.calls_per_step, 0) and not same(row.payload, 0))
    return tuple(msgspec.structs.replace(row, stage=stage.index) for row in listed)


def weight_traffic(
    memory: MemoryModel, fabric: Fabric, stage: Stage, by_axis: dict[str, Group], *, once: bool = False
) -> Iterator[Traffic]:
    """Yield the traffic besides the layers' own collectives: between pipeline stages, and of gradients and weights.

    once: only what `StepModel.once` counts, which is not with the micro-batches
    """
    layout = memory.layout
    counts = memory.counts(stage, stage.start, stage.stop)
    layers = [(count, memory.facts[key].weights) for key, count in counts.items()]
    if not once or layout.copies > 1:
        yield from _pipeline(memory, fabric, stage, by_axis)
    yield from _shared(memory, fabric, stage, by_axis)
    if not once or layout.zero < 3 or exchange(layout, memory.training).after:
        yield from gradient_traffic(layout, memory.training, layers, memory.ends(stage), by_axis, fabric)


def _operations(memory: MemoryModel, fabric: Fabric, stage: Stage, by_axis: dict[str, Group]) -> Iterator[Traffic]:
    """Yield what the operations of the layers, of the embedding and of the head exchange."""
    batches = memory.layout.num_microbatches
    shown = {axis: not getattr(memory.training.overlap, axis, False) for axis in BY_AXIS}
    calls_of: dict[tuple[str, str, str, Size, Size, Size, tuple[int, int]], Size] = {}

    def add(collectives: Iterable[Collective], count: int, label: str) -> None:
        """Count the collectives of `count` layers. label: a text in which `{}` stands for what the axis carries."""
        for collective in collectives:
            key = (
                collective.axis,
                label.format(BY_AXIS[collective.axis][1]),
                collective.kind,
                collective.nbytes,
                collective.copies,
                collective.rows,
                collective.groups,
            )
            calls_of[key] = calls_of.get(key, 0) + count

    for key, count in memory.counts(stage, stage.start, stage.stop).items():
        layer, again = memory.facts[key].layer, memory.facts[key].recompute
        add(_forward(layer), count, "{}, forward")
        add(_forward(layer, again), count, "{}, recomputed")
        add((collective for operation in layer for collective in operation.backward_comm), count, "{}, backward")
    if stage.first:
        add(memory.embedding.comm, 1, "embedding")
    if stage.last:
        add(memory.head.comm, 1, "head")
    for (axis, label, kind, nbytes, copies, rows, limit), calls in calls_of.items():
        yield entry(
            BY_AXIS[axis][0],
            label,
            kind,
            calls * batches,
            nbytes,
            axis,
            by_axis,
            fabric,
            each=calls,
            exposed=int(shown[axis]),
            copies=copies,
            rows=rows,
            groups=limit,
        )


def _forward(layer: Layer, recompute: Recompute | None = None) -> Iterator[Collective]:
    for operation in layer:
        if recompute is None or operation.name in recompute:
            yield from operation.sent("forward" if recompute is None else "again")


def sends(layout: Layout, stage: int) -> tuple[int, int]:
    """Return the number of times that a pipeline stage sends activations of each micro-batch forward, and their gradients back.

    Inner stages send both ways, the first only forward and the last only back. With DualPipe, of both directions together.

    >>> [sends(Layout(pp=4, global_batch=8, seq_len=1), stage) for stage in range(4)]
    [(1, 0), (1, 1), (1, 1), (0, 1)]
    """
    hops = [(here[0], other[0]) for route in layout.routes for here, other in pairwise(route) if here[0] != other[0]]
    return sum(source == stage for source, _ in hops), sum(target == stage for _, target in hops)


def _pipeline(memory: MemoryModel, fabric: Fabric, stage: Stage, by_axis: dict[str, Group]) -> Iterator[Traffic]:
    """Activations to the stage of the next chunk, and their gradients to that of the one before.

    Without sequence parallelism every tensor-parallel rank sends all of them. With DualPipe each direction has half of the
    micro-batches, and the two stages that hold the same layers add up their gradients.
    """
    layout, view = memory.layout, memory.view
    if layout.pp == 1:
        return
    batches = layout.num_microbatches
    nbytes = view.kernels.dtypes.activation * view.tokens * memory.model.stream_size / view.token_shards
    exposed = int(not memory.training.overlap.pp)
    forward, backward = sends(layout, stage.index)
    for label, calls in (("activations, forward", forward), ("gradients of activations, backward", backward)):
        each = calls / layout.copies if layout.copies > 1 else calls
        yield entry(
            Carries.ACTIVATIONS,
            label,
            "send_recv",
            each * batches,
            nbytes,
            "pp",
            by_axis,
            fabric,
            each=each,
            exposed=exposed,
        )
    if layout.copies > 1:
        weights = memory.weights(memory.counts(stage, stage.start, stage.stop)) + memory.ends(stage)
        gradients = memory.training.precision.gradient * weights.all.trainable
        yield entry(
            Carries.GRADIENTS,
            "gradients, both directions",
            "all_reduce",
            1,
            gradients,
            "ends",
            by_axis,
            fabric,
            exposed=int(not memory.training.overlap.dp),
            lane="dp",
        )


def _shared(memory: MemoryModel, fabric: Fabric, stage: Stage, by_axis: dict[str, Group]) -> Iterator[Traffic]:
    """Gradients of weights that several ranks hold and work out from different tokens, once a step."""
    layout, gradient = memory.layout, memory.training.precision.gradient
    if layout.sequence_parallel:
        count: Size = 0
        for key, layers in memory.counts(stage, stage.start, stage.stop).items():
            count = count + layers * _replicated(memory.facts[key].layer)
        count = count + (_replicated(memory.embedding) if stage.first else 0)
        count = count + (_replicated(memory.head) if stage.last else 0)
        yield entry(
            Carries.SHARED_GRADIENTS,
            "gradients of shared weights",
            "all_reduce",
            1,
            gradient * count,
            "tp",
            by_axis,
            fabric,
        )
    tied = sum(weight.numel for weight in memory.head.weights if weight.name == "head.logits.weight")
    if (
        not layout.ends_together
        and memory.model.tie_word_embeddings
        and (stage.first or stage.last)
        and not same(tied, 0)
    ):
        yield entry(
            Carries.TIED_GRADIENTS,
            "gradients of the tied table",
            "all_reduce",
            1,
            gradient * tied,
            "ends",
            by_axis,
            fabric,
        )


def _replicated(layer: Layer) -> Size:
    """Elements of trainable weights that every tensor-parallel rank holds whole."""
    return sum(w.numel for w in layer.weights if w.trainable and not w.expert and same(w.shards, 1))


class Exchange(NamedTuple):
    """Schedule by which the data-parallel ranks of a framework exchange gradients and weights under a ZeRO stage.

    reduces: gradients are reduced with every micro-batch, else once a step; after: a stage's, after its last backward
    gathers: weights are gathered with every micro-batch, else once a step
    hides_gradients, hides_weights: whether these may overlap with backward and with forward
    """

    reduces: bool
    after: bool
    gathers: bool
    hides_gradients: bool
    hides_weights: bool


def exchange(layout: Layout, training: Training) -> Exchange:
    """Return the exchange of a framework at a ZeRO stage, as the head of this file lists them.

    >>> from loadgauge.core.definitions.training.training import training
    >>> staged = Layout(dp=8, pp=2, zero=2, global_batch=32, seq_len=1)
    >>> exchange(staged, training("torchtitan")).after, exchange(staged, training("megatron")).reduces
    (True, False)
    """
    framework, overlap, zero = training.framework, training.overlap, layout.zero
    sharded = framework.fully_shards and zero >= 2
    after = sharded and layout.pp > 1
    streams = zero == 3 or (zero == 2 and framework.engine is None)
    kept = after or (framework.flat_parameters and framework.reduces_once)
    return Exchange(
        # Pipelines reduce once a step: runs that call theirs ZeRO 2 would be 30 to 70 % slower otherwise (source: dubey2024).
        reduces=zero >= 2 and not framework.reduces_once and not after and (zero == 3 or layout.pp == 1),
        after=after,
        gathers=zero == 3 or (sharded and not kept),
        hides_gradients=not after and (overlap.prefetch if streams else overlap.dp),
        hides_weights=overlap.prefetch if streams else overlap.dp and framework.engine is None,
    )


def gather_seconds(weights: RankWeights, training: Training, ranks: Mapping[str, Group], fabric: Fabric) -> Size:
    """Return the seconds to gather some weights under ZeRO-3. ranks: groups of ranks by name"""
    gather: Size = 0
    for part, name in ((weights.dense, "zero"), (weights.expert, "expert_dp")):
        if not same(part.total, 0):
            base = training.lora is not None and training.lora.quantised
            gather = gather + seconds("all_gather", gathered_bytes(part, training.precision, base), ranks[name], fabric)
    return gather


def reduced_bytes(training: Training, layout: Layout) -> Size:
    """Return the bytes of a gradient element as it is reduced: under Ulysses, DeepSpeed's engine reduces in float32 by default.

    >>> from loadgauge.core.definitions.training.training import training
    >>> [reduced_bytes(training("deepspeed"), Layout(cp=2, seq_len=8, cp_comm=comm)) for comm in ("ring", "all_to_all")]
    [2, 4]
    """
    precision = training.precision
    own = precision.reduced if layout.zero >= 2 else precision.gradient
    if training.framework.engine is None or layout.cp_comm != "all_to_all":
        return own
    return where(layout.cp > 1, 4, own)  # `seq_parallel_communication_data_type` (runtime/engine.py)


def gradient_traffic(
    layout: Layout,
    training: Training,
    layers: Iterable[tuple[int, RankWeights]],
    ends: RankWeights,
    by_axis: dict[str, Group],
    fabric: Fabric,
) -> Iterator[Traffic]:
    """Yield the traffic of gradients and weights over the data-parallel ranks, by ZeRO stage (see the head of this file).

    layers: (number of layers, weights of one on this rank); ends: weights of its embedding and head. ZeRO-3 goes layer by
    layer (and under QLoRA gathers the base as it is stored); below it, gradients count as one call, whatever the buckets.
    """
    precision, zero = training.precision, layout.zero
    batches, how = layout.num_microbatches, exchange(layout, training)
    base = training.lora is not None and training.lora.quantised

    def held(part: WeightCount) -> Size:
        """Bytes of weights that the matrix products read."""
        return gathered_bytes(part, precision, base)

    def row(carries: Carries, which: str, kind: str, nbytes: Size, among: str, calls: Size, often: bool) -> Traffic:
        hidden = how.hides_weights if carries.in_forward else how.hides_gradients
        with_layers = zero == 3 and not (how.after and carries is Carries.GRADIENTS)
        return entry(
            carries,
            f"{carries}{which}",
            kind,
            calls * batches if often else calls,
            nbytes,
            among,
            by_axis,
            fabric,
            each=calls if often else 0,
            exposed=int(not hidden),
            lane="zero" if with_layers else "dp",
        )

    listed = list(layers)
    for name, expert, group, copies in (
        ("", False, "zero", "replicas"),
        (" of experts", True, "expert_dp", "expert_replicas"),
    ):
        parts = [(count, weights.expert if expert else weights.dense, "") for count, weights in listed]
        parts.append((1, ends.expert if expert else ends.dense, ", embedding and head"))
        if zero < 3:
            whole = WeightCount()
            for count, weights, _ in parts:
                whole = whole + weights.times(count)
            parts = [(1, whole, "")]
        for count, part, where_to in parts:
            if same(part.total, 0):
                continue
            gradients = reduced_bytes(training, layout) * part.trainable
            kind = "all_reduce" if zero == 0 else "reduce_scatter"
            which, often = f"{name}{where_to}", how.reduces
            trains = not same(part.trainable, 0)
            if trains:
                yield row(Carries.GRADIENTS, which, kind, gradients, group, count, often)
            if trains and not same(by_axis[copies].ranks, 1):
                share = gradients if zero == 0 else gradients / by_axis[group].ranks
                yield row(Carries.GRADIENTS, f"{which}, replicas", "all_reduce", share, copies, count, often)
            if zero == 2 and training.framework.fully_shards:
                yield row(Carries.WEIGHTS, name, "all_gather", held(part), group, count, how.gathers)
            elif zero in (1, 2) and trains:
                updated = precision.compute * part.trainable
                yield row(Carries.UPDATED_WEIGHTS, name, "all_gather", updated, group, count, often=False)
            if zero == 3:
                # Those of the embedding and the head stay gathered from forward to backward, all of them from a backward to
                # the next forward in PyTorch's pipelines.
                calls = count if where_to or how.after else 2 * count
                yield row(Carries.WEIGHTS, which, "all_gather", held(part), group, calls, often=True)
