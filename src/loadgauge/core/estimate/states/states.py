"""Model states: weights, gradients and optimizer states, and how ZeRO shards them."""

from __future__ import annotations

from collections.abc import Callable
from operator import add

import msgspec

from loadgauge.core.base import ConfigError, Size, minimum, spread, where
from loadgauge.core.definitions.model.lora import base_format
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS, Optimizer
from loadgauge.core.definitions.training.precision import Precision
from loadgauge.core.layers.operations.operations import Layer, Weight


class WeightCount(msgspec.Struct, frozen=True):
    """Elements of weights on one rank, by how they are stored and trained.

    matrices: of all, those that autocast makes 16-bit copies of; trainable_matrices: trainable ones outside the head;
    base: frozen matrices that QLoRA quantises; quantised: of all, those that products in 8 or 4 bits read; wide, wide_frozen:
    of the trainable and of the frozen ones, those in float32 whatever the recipe; unread, wide_unread: of the trainable ones and
    of those in float32, those that get no gradient.
    moments, plain, float32: elements of the optimizer's state by their size: `Optimizer.moment`, `Precision.moment` and
    4 bytes; paged: of `moments`, those in managed memory; paged_float32: of `float32`.
    """

    trainable: Size = 0
    frozen: Size = 0
    base: Size = 0
    matrices: Size = 0
    trainable_matrices: Size = 0
    quantised: Size = 0
    moments: Size = 0
    plain: Size = 0
    float32: Size = 0
    paged: Size = 0
    paged_float32: Size = 0
    wide: Size = 0
    wide_frozen: Size = 0
    unread: Size = 0
    wide_unread: Size = 0

    @property
    def total(self) -> Size:
        """Number of all elements."""
        return self.trainable + self.frozen + self.base

    @classmethod
    def of(cls, weights: tuple[Weight, ...], optimizer: Optimizer = OPTIMIZERS["adamw"]) -> WeightCount:
        """Count the elements of a layer's weights, and those of their state in an optimizer."""
        trainable = [weight for weight in weights if weight.trainable]
        frozen = [weight for weight in weights if not weight.trainable]
        unread = [weight for weight in trainable if weight.unread]
        stated = (weight for weight in weights if weight.rows or (weight.trainable and not weight.unread))
        kept = state_elements(tuple(stated), optimizer)
        return cls(
            trainable=sum(weight.numel for weight in trainable),
            frozen=sum(weight.numel for weight in frozen if not weight.base),
            base=sum(weight.numel for weight in frozen if weight.base),
            matrices=sum(weight.numel for weight in weights if weight.kind in ("matrix", "head") and weight.cast),
            trainable_matrices=sum(weight.numel for weight in trainable if weight.kind == "matrix"),
            quantised=sum(weight.numel for weight in weights if weight.quantised),
            wide=sum(weight.numel for weight in trainable if weight.wide),
            wide_frozen=sum(weight.numel for weight in frozen if weight.wide),
            unread=sum(weight.numel for weight in unread),
            wide_unread=sum(weight.numel for weight in unread if weight.wide),
            **kept,
        )

    def times(self, factor: Size) -> WeightCount:
        """Return the counts of `factor` layers of the same kind."""
        return WeightCount(*[factor * size for size in msgspec.structs.astuple(self)])

    def __add__(self, other: WeightCount) -> WeightCount:
        return WeightCount(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


class RankWeights(msgspec.Struct, frozen=True):
    """Weights on one rank by the group that ZeRO shards them over: routed experts have a smaller one than the rest."""

    dense: WeightCount = WeightCount()
    expert: WeightCount = WeightCount()

    @classmethod
    def of(cls, weights: tuple[Weight, ...], optimizer: Optimizer = OPTIMIZERS["adamw"]) -> RankWeights:
        """Count the elements of a layer's weights, and of their state in an optimizer, routed experts apart."""
        return cls(
            WeightCount.of(tuple(weight for weight in weights if not weight.expert), optimizer),
            WeightCount.of(tuple(weight for weight in weights if weight.expert), optimizer),
        )

    @classmethod
    def of_layer(cls, layer: Layer, optimizer: Optimizer) -> RankWeights:
        """Count the elements of all weights of a layer."""
        return cls.of(layer.weights, optimizer)

    def times(self, factor: Size) -> RankWeights:
        """Return the counts of `factor` layers of the same kind."""
        return RankWeights(self.dense.times(factor), self.expert.times(factor))

    def mapped(self, of: Callable[[Size], Size]) -> RankWeights:
        """Return a function of each count."""
        return RankWeights(
            *(WeightCount(*map(of, msgspec.structs.astuple(part))) for part in (self.dense, self.expert))
        )

    def __add__(self, other: RankWeights) -> RankWeights:
        return RankWeights(self.dense + other.dense, self.expert + other.expert)

    @property
    def all(self) -> WeightCount:
        """Counts of both groups together."""
        return self.dense + self.expert

    @property
    def total(self) -> Size:
        """Number of all elements."""
        return self.dense.total + self.expert.total


def state_elements(weights: tuple[Weight, ...], optimizer: Optimizer) -> dict[str, Size]:
    """Return the elements that an optimizer keeps of trainable weights, by the field of `WeightCount` that counts them.

    Tensor by tensor, as the implementations decide it (`loadgauge.core.definitions.training.optimizers`).

    >>> table = Weight("table", 1000 * 256, kind="table", shape=(1000, 256))
    >>> state_elements((table,), OPTIMIZERS["adafactor"])
    {'moments': 0, 'plain': 0, 'float32': 1256, 'paged': 0, 'paged_float32': 0}
    """
    counts: dict[str, Size] = dict.fromkeys(("moments", "plain", "float32", "paged", "paged_float32"), 0)
    own_dtype = optimizer.moment_bytes is not None
    if not optimizer.by_tensor:
        for weight in weights:
            counts["float32" if weight.wide and not own_dtype else "moments"] += optimizer.moments * weight.numel
        return counts
    for weight in weights:
        matrix = weight.kind == "matrix" and weight.shape is not None
        low = optimizer.low_rank
        moments, kept = optimizer.moments, weight.numel
        if weight.kind == "matrix" and optimizer.matrix_moments is not None:
            moments = optimizer.matrix_moments
        rows, columns = weight.shape or (weight.numel, 0)
        if low is not None and (matrix or (low.head and weight.kind == "head")):
            longer = rows + columns - minimum(rows, columns)
            rank = minimum(low.rank, minimum(rows, columns))
            counts["plain" if low.projector_bytes is None else "float32"] += (
                weight.copies * rank * minimum(rows, columns)
            )
            rows, columns, kept = rank, longer, weight.copies * rank * longer
        if optimizer.table_by_row and weight.rows:
            moments, kept = 1, rows
        if optimizer.factored:
            counts["float32"] += weight.copies * (rows + columns)
        if optimizer.by_row:
            counts["moments"] += weight.copies * rows if weight.shape is not None else 1
        if (square := optimizer.preconditioners) is not None and weight.shape is not None:
            for side in (rows, columns):
                counts["moments"] += where(side <= square.longest, weight.copies * square.each * side * side, 0)
        elements: Size = moments * kept
        wide = weight.wide and not own_dtype
        whole: Size = elements if wide or (optimizer.table_float32 and weight.kind == "table") else 0
        if optimizer.small:
            whole = where(kept < optimizer.small, elements, whole)
        field = "float32" if optimizer.small_float32 or wide else "plain"
        counts[field] += whole
        counts["moments"] += elements - whole
        if optimizer.paged:
            large = where(weight.numel >= optimizer.paged, 1, 0)
            counts["paged"] += large * (elements - whole)
            counts["paged_float32"] += large * whole
    return counts


class States(msgspec.Struct, frozen=True):
    """Bytes of model states on one rank. paged: optimizer states in managed memory, which are not among `optimizer`."""

    weights: Size
    gradients: Size
    optimizer: Size
    paged: Size = 0

    @property
    def total(self) -> Size:
        """Weights, gradients and optimizer states together [bytes]."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: States) -> States:
        return States(*map(add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


def model_states(
    count: WeightCount | Size,
    precision: Precision,
    optimizer: Optimizer = OPTIMIZERS["adamw"],
    *,
    zero: int = 0,
    dp: Size = 1,
    quantised: bool | str = False,
    weights_stage: int = 3,
) -> States:
    """Return the bytes of weights, gradients and optimizer states on one rank.

    count: trainable parameters on the rank before ZeRO, or a `WeightCount`; quantised: the format of the frozen base
        (`Lora.quantised`)
    zero, dp: stage 1 shards the optimizer states over `dp` ranks, stage 2 the gradients too, stage 3 the weights as well;
        the largest share is returned
    weights_stage: the stage from which on weights are held in shards (`Framework.weights_stage`): 2 for FSDP, whose
        gathered copies are not part of the states
    Source: rajbhandari2019, section 3; megatron-lm.

    ZeRO's own example, 7.5 B parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB.

    >>> from loadgauge.core.definitions.training.precision import PRECISIONS
    >>> mixed = PRECISIONS["bf16-mixed-16"]
    >>> [round(model_states(7_500_000_000, mixed, zero=stage, dp=64).total / 1e9, 1) for stage in (0, 1, 2, 3)]
    [120.0, 31.4, 16.6, 1.9]
    >>> round(model_states(7_500_000_000, mixed, zero=2, dp=64, weights_stage=2).total / 1e9, 1)
    1.9
    """
    if zero not in (0, 1, 2, 3):
        raise ConfigError(f"zero must be 0, 1, 2 or 3, got {zero!r}", key="zero")
    whole = count if isinstance(count, WeightCount) else WeightCount(trainable=count, moments=optimizer.moments * count)

    def share(elements: Size, stage: int) -> Size:
        return spread(elements, dp) if zero >= stage else elements

    trainable = whole.trainable
    stored = base_format(quantised)
    base = precision.weight if stored is None else stored.nbytes
    # Float32 weights need no master copy, and have float32 moments (`state_elements`).
    master = (precision.main_gradient + precision.master) * share(trainable - whole.wide, 1)
    paged: Size = 0
    if optimizer.paged:
        paged = optimizer.moment(precision) * share(whole.paged, 1) + 4 * share(whole.paged_float32, 1)
    if optimizer.compensated and precision.weight == 2 and not precision.master:
        master = master + precision.weight * share(trainable - whole.wide, 1)
    low = precision.products
    copies: Size = 0
    if low is not None and low.weights == "instead":
        copies = (2 * low.weight_element - precision.weight) * share(whole.quantised, weights_stage)
    elif low is not None and low.weights == "beside" and zero < weights_stage:
        copies = 2 * low.weight_element * whole.quantised
    return States(
        weights=precision.weight * share(trainable, weights_stage)
        + (precision.frozen or precision.weight) * share(whole.frozen, weights_stage)
        + base * share(whole.base, weights_stage)
        + (4 - precision.weight) * share(whole.wide + whole.wide_frozen, weights_stage)
        + copies,
        gradients=0
        if optimizer.in_backward
        else precision.gradient * share(trainable - whole.unread, 2)
        + (4 - precision.gradient) * share(whole.wide - whole.wide_unread, 2),
        optimizer=master + state_bytes(whole, precision, optimizer, share) - paged,
        paged=paged,
    )


def state_bytes(
    count: WeightCount, precision: Precision, optimizer: Optimizer, share: Callable[[Size, int], Size]
) -> Size:
    """Return the bytes of the moments and the like of one rank. share: a rank's part of some elements, by ZeRO stage"""
    return (
        optimizer.moment(precision) * share(count.moments, 1)
        + optimizer.average * share(count.trainable, 1)
        + precision.moment * share(count.plain, 1)
        + 4 * share(count.float32, 1)
    )


def gathered_bytes(count: WeightCount, precision: Precision, quantised: bool | str = False) -> Size:
    """Return the bytes of weights gathered over their ranks: in the compute dtype, or in 8 or 4 bits where those are sent.

    quantised: the format of the frozen base, which is gathered as it is stored
    """
    stored, low = base_format(quantised), precision.products
    base = precision.compute if stored is None else stored.nbytes
    total = precision.compute * (count.trainable + count.frozen) + base * count.base
    if low is None or not low.gathers:
        return total
    return total - (precision.compute - low.weight_element) * count.quantised
