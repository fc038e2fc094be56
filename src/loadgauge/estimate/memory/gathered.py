"""Copies besides the model states at each point of a step: gathered weights, whole gradients, buckets, 16-bit copies.

What PyTorch's FSDP2 holds of one rank's model, layer by layer (source: pytorch, `torch/distributed/fsdp/_fully_shard`):

- embedding and head are one unit, gathered from the first forward to the end of backward; their gradients are whole until
  then;
- in forward, a layer is gathered into a buffer and copied out of it; the buffer stays until the next layer is copied;
- stage 2 (`reshard_after_forward=False`) keeps every layer gathered from its forward to its backward; stage 3 gathers it
  for each pass, and in backward the next one ahead (at the loss, the last layer);
- the gradient of a layer is computed in the compute dtype, is copied to the dtype it is reduced in, and this copy
  stays until the backward of the next layer is over.

One rank gathers nothing; from two on, gathered weights exist alongside the shards, so that where most weights are frozen
(LoRA) each of two ranks holds more than a single one.

With pipeline stages, PyTorch reduces gradients after the last micro-batch alone: weights stay gathered and gradients whole.

DeepSpeed's stage 3 keeps gathered weights up to `stage3_max_live_parameters`, and so holds a small model whole alongside its
shard of it: there stage 3 needs more than stage 2. Its buckets exist at stages 1 to 3 and not at 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from loadgauge.algebra import Size, maximum, minimum, where
from loadgauge.estimate.memory.rank_memory import MemoryModel
from loadgauge.estimate.memory.states import RankWeights
from loadgauge.estimate.schedule.stages import Key, Stage

Pass = Literal["forward", "head", "loss", "prediction", "backward", "embedding", "ends"]


class At(NamedTuple):
    """A point of a step, described by all that the gathered copies at it depend on.

    doing: the pass of a layer, the head's forward, the loss's backward, the backward of multi-token prediction, of a layer
        or of the embedding, or the reduction of the gradients of embedding and head
    layer: the kind of layer at work; ahead: of the one whose backward comes next; before: of the one whose backward was
        before
    held: how many layers of each kind have begun their forward and not finished their backward
    """

    doing: Pass = "forward"
    layer: Key | None = None
    ahead: Key | None = None
    before: Key | None = None
    held: tuple[tuple[Key, int], ...] = ()


def at(memory: MemoryModel, stage: Stage, doing: Pass, position: int | None = None) -> At:
    """Return the `At` of one pass on a pipeline stage, the key under which its copies are computed once.

    position: the layer at work (numbered through all stages); None where the pass is not a layer's. Only what the copies
    depend on is distinguished, so that few points need computing.
    """
    if memory.by_layer or (memory.copied and memory.layout.pp == 1):
        return _in_turn(memory, stage, doing, position)
    if memory.training.framework.unit_gradients and doing == "backward" and position is not None:
        return At("backward", (stage.kind(position), False))
    return At()


def _in_turn(memory: MemoryModel, stage: Stage, doing: Pass, position: int | None) -> At:
    if stage.start == stage.stop or doing == "ends":
        return At(doing)
    if doing == "embedding":
        return At(doing, before=memory.key(stage, stage.start))
    place = stage.stop - 1 if position is None else position
    in_backward = tuple(memory.counts(stage, stage.start, place + 1).items())
    layer = memory.key(stage, place)
    if doing == "prediction":
        return At(doing, ahead=layer, held=in_backward)
    if doing != "backward":
        return At(doing, layer, held=in_backward)
    ahead = memory.key(stage, place - 1) if place > stage.start else None
    before = memory.key(stage, place + 1) if place + 1 < stage.stop else None
    return At(doing, layer, ahead, before, in_backward)


def copies(memory: MemoryModel, stage: Stage, point: At) -> dict[str, Size]:
    """Return the bytes of each copy that exists alongside the model states at a point of the step, by its description.

    Gathered weights, unsharded gradients, communication buckets, 16-bit copies, placeholders and layers fetched from the
    host, by the rules of FSDP2 and DeepSpeed at the head of this file.
    """
    layout, framework, precision = memory.layout, memory.training.framework, memory.training.precision
    ends, weights, *_ = memory.weighed(stage)
    several = where(memory.sharded, 1, 0)
    if memory.fully_sharded:
        terms = _fsdp(memory, stage, point) if memory.by_layer else _fsdp_in_pipeline(memory, weights)
        terms = {what: several * nbytes for what, nbytes in terms.items()}
        if precision.autocast:
            terms["16-bit copies of the weights"] = (
                (1 - several) * precision.compute * _cast(memory, stage, point, weights)
            )
        return terms | _fetched(memory, ends, 1 - several)
    terms = {}
    if framework.live_parameters and layout.zero == 3:
        gathered = minimum(weights.total, framework.live_parameters)
        terms["gathered weights"] = several * precision.compute * gathered
    elif layout.zero == 3:
        # One layer in use and the next one on its way.
        terms["gathered embedding and head"] = several * memory.gathered_bytes(ends)
        terms["two gathered layers"] = several * 2 * _largest(memory)
    if framework.buckets and layout.zero:
        buckets = minimum(weights.all.trainable, framework.buckets)
        terms["communication buckets"] = several * 2 * precision.gradient * buckets
    if framework.unit_gradients and layout.zero >= 2 and point.doing == "backward" and point.layer is not None:
        # In the compute dtype, and in float32 on the way to its shards.
        trainable = memory.facts[point.layer].weights.all.trainable
        terms["unsharded gradient of one layer"] = several * (precision.compute + 4) * trainable
    if memory.copied:
        terms["16-bit copies of the weights"] = precision.compute * _cast(memory, stage, point, weights)
    terms["placeholders of weights' gradients"] = memory.placeholders
    if layout.zero < 2 and framework.ddp_copies:
        terms["gradient buckets of data parallelism"] = several * precision.gradient * weights.all.trainable
    return terms | _fetched(memory, ends, 1 - several if layout.zero == 3 else 1)


def _fsdp(memory: MemoryModel, stage: Stage, point: At) -> dict[str, Size]:
    """What FSDP2 gathers and has not reduced yet."""
    precision, facts = memory.training.precision, memory.facts
    if point.doing == "ends":
        return {}

    def gathered(key: Key | None) -> Size:
        return 0 if key is None else memory.gathered_bytes(facts[key].weights)

    terms: dict[str, Size] = {"gathered embedding and head": memory.gathered_bytes(memory.weighed(stage)[0])}
    if memory.layout.zero == 3:
        if point.doing == "forward":
            terms["gathered layer, and the buffer it came in"] = 2 * gathered(point.layer)
        elif point.doing != "embedding":
            terms["gathered layer, and the next one"] = gathered(point.layer) + gathered(point.ahead)
    elif point.doing != "embedding":
        terms["layers gathered until their backward"] = sum(count * gathered(key) for key, count in point.held)
        if point.doing in ("forward", "head"):
            terms["buffer that a layer was gathered in"] = gathered(point.layer)
        if memory.prediction is not None and point.doing in ("head", "loss", "prediction"):
            terms["gathered multi-token prediction"] = memory.gathered_bytes(memory.prediction.weights)
    if point.doing in ("prediction", "backward", "embedding"):
        terms["whole gradient of the head"] = precision.compute * memory.head_trainable
    if point.before is not None:
        trainable = facts[point.before].weights.all.trainable
        terms["gradient of one layer on its way to its shards"] = precision.gradient * trainable
    return terms


def _fsdp_in_pipeline(memory: MemoryModel, weights: RankWeights) -> dict[str, Size]:
    """Between micro-batches neither weights nor gradients are sharded again."""
    return {
        "gathered weights of the stage": memory.gathered_bytes(weights),
        "unsharded gradients of the stage": memory.training.precision.gradient * weights.all.trainable,
    }


def _cast(memory: MemoryModel, stage: Stage, point: At, weights: RankWeights) -> Size:
    """Elements that autocast has 16-bit copies of: all in forward; in backward, of layers that are not through with it.

    A layer that runs again in backward has its copies again; nothing else remembers those of its forward.
    """
    every: Size = weights.all.matrices + memory.tied_matrices
    if point.doing in ("forward", "head") or memory.layout.pp > 1:
        return every
    if point.doing in ("embedding", "ends"):
        return 0
    left: Size = sum(count * memory.facts[key].weights.all.matrices for key, count in point.held if not key[1])
    if point.doing == "backward" and point.layer is not None and point.layer[1]:
        left = left + memory.facts[point.layer].weights.all.matrices
    if point.doing in ("loss", "prediction"):
        layers: Size = sum(count * memory.facts[key].weights.all.matrices for key, count in point.held)
        left = left + every - layers
    return left


def _largest(memory: MemoryModel) -> Size:
    """Bytes of the largest layer, gathered."""
    largest: Size = 0
    for facts in memory.facts.values():
        largest = maximum(largest, memory.gathered_bytes(facts.weights))
    return largest


def _fetched(memory: MemoryModel, ends: RankWeights, alone: Size) -> dict[str, Size]:
    """What is fetched of weights that are offloaded and not gathered (`alone`: 1, else 0): like ZeRO 3's layers."""
    if "weights" not in memory.offloaded:
        return {}
    return {"layers fetched from the host": alone * (memory.gathered_bytes(ends) + 2 * _largest(memory))}
