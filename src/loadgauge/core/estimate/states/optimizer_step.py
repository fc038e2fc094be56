"""Memory of the optimizer's step beside the states: temporaries of the implementation, and copies of gradients."""

from __future__ import annotations

from typing import Literal

from loadgauge.core.base.algebra import Size, maximum, spread
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.estimate.states.states import RankWeights


def step_temporaries(memory: MemoryModel, stage: Stage) -> Size:
    """Return the bytes that the optimizer's own step holds beside the states (`Optimizer.step`)."""
    training = memory.training
    temporaries, precision = training.optimizer.step, training.precision
    if "optimizer" in memory.offloaded or training.optimizer.in_backward:
        return 0
    master = precision.master or precision.weight
    listed: Size = 0
    if temporaries.lists:
        # Tensors of one dtype are a list; that of float32 adapters is not alive with that of 16-bit weights.
        weights = memory.weighed(stage)[1]
        wide, all_updated = updated(memory, weights, "wide"), updated(memory, weights)
        listed = temporaries.lists * maximum(4 * wide, precision.moment * (all_updated - wide))
    if temporaries.largest:
        # Adapters are float32 beside weights of 16 bits.
        largest: Size = 0
        for wide, itemsize in ((False, master), (True, 4)):
            number = temporaries.largest + (temporaries.upcasts if itemsize < 4 else 0)
            each = 4 if temporaries.float32 else itemsize
            largest = maximum(largest, number * each * largest_updated(memory, stage, wide=wide))
        listed = listed + largest
    return listed


def updated(memory: MemoryModel, weights: RankWeights, field: Literal["trainable", "wide"] = "trainable") -> Size:
    """Return the elements of weights that this rank updates, its share under ZeRO; `wide`: of those held in float32."""
    dense, expert = getattr(weights.dense, field), getattr(weights.expert, field)
    if not memory.layout.zero:
        return dense + expert
    return spread(dense, memory.layout.zero_ranks) + spread(expert, memory.layout.expert_zero_ranks)


def largest_updated(memory: MemoryModel, stage: Stage, *, wide: bool) -> Size:
    """Return the elements of the largest tensor that this rank updates, of the layers of a stage and of its ends.

    wide: of those held in float32 whatever the recipe (adapters), or of the others
    """
    layers = [memory.facts[key].layer for key in memory.counts(stage, stage.start, stage.stop)]
    layers += [memory.embedding] * stage.first + [memory.head] * stage.last
    largest: dict[bool, Size] = {False: 0, True: 0}
    for weight in (weight for layer in layers for weight in layer.weights if weight.trainable and weight.wide == wide):
        largest[weight.expert] = maximum(largest[weight.expert], weight.numel)
    if not memory.layout.zero:
        return maximum(largest[False], largest[True])
    return maximum(
        spread(largest[False], memory.layout.zero_ranks), spread(largest[True], memory.layout.expert_zero_ranks)
    )


def step_transient(memory: MemoryModel, stage: Stage) -> Size:
    """Return the bytes of temporaries of the optimizer step: the optimizer's own, and float32 copies of gradients."""
    step, precision = step_temporaries(memory, stage), memory.training.precision
    if memory.training.optimizer.one_block:
        # Each 16-bit gradient is replaced by one of float32.
        return memory.weighed(stage)[2].gradients * (4 / precision.gradient - 1)
    if memory.training.framework.engine is None or not precision.master:
        return step
    return step + 4 * updated(memory, memory.weighed(stage)[1])
