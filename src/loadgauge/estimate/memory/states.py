"""Model states: weights, gradients and optimizer states, and how ZeRO shards them."""

from __future__ import annotations

from operator import add

import msgspec

from loadgauge.algebra import Size, spread
from loadgauge.errors import ConfigError
from loadgauge.layers.operations import Weight
from loadgauge.spec.lora import BASE_FORMATS, base_format
from loadgauge.spec.optimizers import OPTIMIZERS, Optimizer
from loadgauge.spec.precision import Precision

NF4_BYTES = BASE_FORMATS["nf4"].nbytes
"""Bytes per element of 4-bit NormalFloat with double quantisation."""


class WeightCount(msgspec.Struct, frozen=True):
    """Elements of weights on one rank, by how they are stored and trained.

    matrices: of all, those that autocast makes 16-bit copies of; trainable_matrices: trainable ones outside the head;
    base: frozen matrices that QLoRA quantises; quantised: of all, those that products in 8 or 4 bits read; factored:
    rows plus columns of the trainable matrices (Adafactor).
    """

    trainable: Size = 0
    frozen: Size = 0
    base: Size = 0
    matrices: Size = 0
    trainable_matrices: Size = 0
    factored: Size = 0
    quantised: Size = 0

    @property
    def total(self) -> Size:
        """Number of all elements."""
        return self.trainable + self.frozen + self.base

    @classmethod
    def of(cls, weights: tuple[Weight, ...]) -> WeightCount:
        """Count the elements of a layer's weights."""
        trainable = [weight for weight in weights if weight.trainable]
        frozen = [weight for weight in weights if not weight.trainable]
        return cls(
            trainable=sum(weight.numel for weight in trainable),
            frozen=sum(weight.numel for weight in frozen if not weight.base),
            base=sum(weight.numel for weight in frozen if weight.base),
            matrices=sum(weight.numel for weight in weights if weight.kind in ("matrix", "head") and weight.cast),
            trainable_matrices=sum(weight.numel for weight in trainable if weight.kind == "matrix"),
            factored=sum(weight.numel if weight.factored is None else weight.factored for weight in trainable),
            quantised=sum(weight.numel for weight in weights if weight.quantised),
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
    def of(cls, weights: tuple[Weight, ...]) -> RankWeights:
        """Count the elements of a layer's weights, routed experts apart."""
        return cls(
            WeightCount.of(tuple(weight for weight in weights if not weight.expert)),
            WeightCount.of(tuple(weight for weight in weights if weight.expert)),
        )

    def times(self, factor: Size) -> RankWeights:
        """Return the counts of `factor` layers of the same kind."""
        return RankWeights(self.dense.times(factor), self.expert.times(factor))

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


class States(msgspec.Struct, frozen=True):
    """Bytes of model states on one rank."""

    weights: Size
    gradients: Size
    optimizer: Size

    @property
    def total(self) -> Size:
        """Weights, gradients and optimizer states together [bytes]."""
        return self.weights + self.gradients + self.optimizer

    def __add__(self, other: States) -> States:
        return States(self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer)


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

    >>> from loadgauge.spec.precision import PRECISIONS
    >>> mixed = PRECISIONS["bf16-mixed-16"]
    >>> [round(model_states(7_500_000_000, mixed, zero=stage, dp=64).total / 1e9, 1) for stage in (0, 1, 2, 3)]
    [120.0, 31.4, 16.6, 1.9]
    >>> round(model_states(7_500_000_000, mixed, zero=2, dp=64, weights_stage=2).total / 1e9, 1)
    1.9
    """
    if zero not in (0, 1, 2, 3):
        raise ConfigError(f"zero must be 0, 1, 2 or 3, got {zero!r}", key="zero")
    whole = count if isinstance(count, WeightCount) else WeightCount(trainable=count)

    def share(elements: Size, stage: int) -> Size:
        return spread(elements, dp) if zero >= stage else elements

    trainable = whole.trainable
    moment = optimizer.moment(precision)
    stored = base_format(quantised)
    base = precision.weight if stored is None else stored.nbytes
    states = (precision.main_gradient + precision.master + optimizer.moments * moment) * share(trainable, 1)
    if optimizer.matrix_moments is not None:
        states = states - (optimizer.moments - optimizer.matrix_moments) * moment * share(whole.trainable_matrices, 1)
    if optimizer.factored:
        states = states + 4 * share(whole.factored, 1)
    low = precision.products
    copies: Size = 0
    if low is not None and low.weights == "instead":
        copies = (2 * low.weight_element - precision.weight) * share(whole.quantised, weights_stage)
    elif low is not None and low.weights == "beside" and zero < weights_stage:
        copies = 2 * low.weight_element * whole.quantised
    return States(
        weights=precision.weight * share(trainable + whole.frozen, weights_stage)
        + base * share(whole.base, weights_stage)
        + copies,
        gradients=precision.gradient * share(trainable, 2),
        optimizer=states,
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
