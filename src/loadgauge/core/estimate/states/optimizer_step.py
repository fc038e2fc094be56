"""Memory of the optimizer's step beside the states: temporaries of the implementation, and copies of gradients."""

from typing import Literal

from loadgauge.core.base.algebra import Size, ceil_div, maximum, minimum, same, spread
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.estimate.states.states import RankWeights


def step_temporaries(memory: MemoryModel, stage: Stage) -> Size:
    """Return the bytes that the optimizer's own step holds beside the states (`Optimizer.step`)."""
    training = memory.training
    temporaries, precision = training.optimizer.step, training.precision
    stays = staying(memory, stage)
    if training.optimizer.in_backward or same(stays, 0):
        return 0
    master = precision.master or precision.weight
    listed: Size = 0
    if temporaries.lists:
        # Tensors of one dtype are a list; that of float32 adapters is not alive with that of 16-bit weights.
        weights = memory.weighed(stage)[1]
        wide, all_updated = updated(memory, weights, "wide"), updated(memory, weights)
        listed = stays * temporaries.lists * maximum(4 * wide, precision.moment * (all_updated - wide))
    if temporaries.largest:
        # Adapters are float32 beside weights of 16 bits.
        largest: Size = 0
        for wide, itemsize in ((False, master), (True, 4)):
            number = temporaries.largest + (temporaries.upcasts if itemsize < 4 else 0)
            each = 4 if temporaries.float32 else itemsize
            largest = maximum(largest, number * each * largest_updated(memory, stage, wide=wide))
        listed = listed + largest
    return listed


def staying(memory: MemoryModel, stage: Stage) -> Size:
    """Return the share of a rank's optimizer states that stays on the card: 1 where none is offloaded, 0 where all of it is.

    Megatron-Core moves tensors until the fraction is reached (`HybridDeviceOptimizer`; the last one's excess is not counted).
    DeepSpeed keeps the first int((1 - ratio) n) of n sub-groups, of which weights without decay are the last (zero/stage3.py).
    """
    training = memory.training
    part = training.offloaded_share
    engine = training.framework.engine
    if engine is None or part in (0, 1):
        return 1 - part
    share = updated(memory, memory.weighed(stage)[1])
    kept = (1 - part) * (ceil_div(share, engine.step_elements) + 1) // 1
    return minimum(kept * engine.step_elements / maximum(share, 1), 1)


def away(memory: MemoryModel, phase: str) -> tuple[str, ...]:
    """Return the parts that are on the host at a phase of the step: states that wait there come back for the update."""
    return () if (memory.training.offload, phase) == ("states", "step") else memory.offloaded


def on_card(memory: MemoryModel, stage: Stage) -> dict[str, Size]:
    """Return the bytes that stay on the card of each part of the states that is offloaded.

    DeepSpeed holds float32 gradients of what it updates there from one step to the next.
    """
    if memory.training.offload in ("none", "optimizer", "states", "all"):
        return dict.fromkeys(memory.offloaded, 0)
    stays, (_, weights, states, *_) = staying(memory, stage), memory.weighed(stage)
    left = {"optimizer": states.optimizer, "gradients": 4 * updated(memory, weights)}
    return {part: stays * left[part] for part in memory.offloaded}


def updated(memory: MemoryModel, weights: RankWeights, field: Literal["trainable", "wide"] = "trainable") -> Size:
    """Return the elements of weights that this rank updates, its share under ZeRO; `wide`: of those held in float32."""
    dense, expert = getattr(weights.dense, field), getattr(weights.expert, field)
    if not memory.layout.zero:
        return dense + expert
    return spread(dense, memory.layout.zero_ranks) + spread(expert, memory.layout.expert_zero_ranks)


def summed_gradients(memory: MemoryModel, stage: Stage) -> Size:
    """Return the bytes that move where gradients of a step's micro-batches are added to those before: both read, one written.

    Buffers that exist from the start are added to inside the product. FSDP adds shards, after their reduction, where it does not
    wait for the last micro-batch with that (source: pytorch, `AccumulateGrad`, and `foreach_reduce` of FSDP2).
    """
    training, layout, weights = memory.training, memory.layout, memory.weighed(stage)[1]
    framework = training.framework
    if framework.gradients_persist:
        return 0
    elements = weights.dense.trainable + weights.expert.trainable
    if framework.fully_shards and layout.zero >= 2 and not framework.reduces_once:
        elements = updated(memory, weights)
    return 3 * training.precision.gradient * elements * (layout.num_microbatches - 1)


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
