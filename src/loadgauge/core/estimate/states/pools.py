"""Pools of PyTorch's allocator: what streams beside the main one hold, and what of the main one no request fits.

A block serves the stream that it was allocated on and no other (pytorch, CUDACachingAllocator.cpp), so that what is reserved
is the sum of what each stream holds at most, each at its own moment. DeepSpeed's streams are in `zero_engine`. FSDP2's (pytorch
2.13, `distributed/fsdp/_fully_shard`, the same since 2.4; no tensor is handed from stream to stream by `record_stream`):

- the flat buffers that weights are gathered in, and the 16-bit copy of the shard that goes into them, belong to the stream
  of the copy-in (`foreach_all_gather`). One stays until the next unit is copied out (`AllGatherState`), so that two
  units are there at once in forward, the first time the embedding (or the root's unit) and the first layer. In backward the
  next layer waits in it, and is copied out when its own backward begins;
- what reduce-scatter leaves belongs to its stream (`foreach_reduce`), and is the gradient of the shard: that pool has all
  gradients of the rank at the end of the backward, and none at the loss;
- the gathered weights themselves, whole gradients and reduce-scatter's input belong to the main stream.

Where the logits of 16 bits are upcast for the loss and let go of, backward asks for two gradients of 32 bits: one fits where
logits and upcast copy were, the other does not fit into the rest of it, which are the 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.training.memory_range import memory_range
from loadgauge.core.estimate.memory.counters import Pools
from loadgauge.core.estimate.memory.phases import Moment, Phase, StageAtWork
from loadgauge.core.estimate.memory.points import At
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.schedule.stages import Key, Stage
from loadgauge.core.estimate.states import zero_engine
from loadgauge.core.estimate.states.states import RankWeights


def pools(rank: StageAtWork, moments: Sequence[Moment], peak: Moment) -> Pools:
    """Return the bytes that the pools of a rank hold. peak: the one of the moments at which the rank holds the most."""
    memory, stage = rank.memory, rank.stage
    if memory.engine is not None:
        by_moment = [
            {} if step_moment.point is None else zero_engine.pools(memory, stage, step_moment.point)
            for step_moment in moments
        ]
        most: dict[str, float] = {}
        for streams in by_moment:
            for stream, (_, highest) in streams.items():
                most[stream] = max(most.get(stream, 0.0), float(highest))
        held = [sum(there for there, _ in streams.values()) for streams in by_moment]
        # What is asked for there changes its size all the time.
        return _sums(moments, peak, held, sum(most.values()), 0.0, regular=False)
    if not (memory.fully_sharded and memory.sharded is True):
        return Pools()
    waiting = [_gathering(memory, moment) for moment in moments]
    shards = [_shards(rank, moment) for moment in moments]
    both = [step_moment + other for step_moment, other in zip(waiting, shards, strict=True)]
    most_of_both = _most_gathered(memory, stage) + max(shards) + _being_reduced(rank)
    return _sums(moments, peak, both, most_of_both, hole(memory) if stage.last else 0.0, regular=True)


def _sums(
    moments: Sequence[Moment], peak: Moment, held: Sequence[Size], most: float, hole: float, *, regular: bool
) -> Pools:
    """`held`: bytes of each moment that are in other pools; `hole`: bytes that the main pool cannot use at the loss."""
    if not most:
        return Pools()
    main = max(
        float(moment.total) - min(float(moment.total), float(beside)) + (hole if moment.phase is Phase.LOSS else 0.0)
        for moment, beside in zip(moments, held, strict=True)
    )
    measured = memory_range()
    return Pools(
        beside=float(peak.total) - main, most=most, idle=(measured.static if regular else measured.dynamic).reserved
    )


def _gathering(memory: MemoryModel, moment: Moment) -> Size:
    """Bytes at a moment of the flat buffers that weights are gathered in."""
    point = moment.point
    if not memory.by_layer or point is None:
        return 0
    layer, ahead = _gathered(memory, point.layer), _gathered(memory, point.ahead)
    if point.doing == "forward":
        return layer
    if memory.ends_apart:
        return _gathered_apart(memory, point, layer, ahead)
    if point.doing == "head":
        return layer  # whose buffer nothing has replaced
    if memory.layout.zero < 3:
        return 0
    return layer if point.doing == "loss" else ahead  # of the last one, whose backward comes next


def _gathered_apart(memory: MemoryModel, point: At, layer: Size, ahead: Size) -> Size:
    """The same where embedding and head are units of their own. layer, ahead: bytes of these layers"""
    embedding, head = (memory.gathered_bytes(weights) for weights in memory.end_weights)
    if point.doing == "enter":
        return embedding
    if point.doing == "gather":
        return head + layer
    if point.doing == "head":
        return head
    if point.doing == "backward" and memory.layout.zero == 3:
        return embedding if point.ahead is None else ahead
    return 0


def _gathered(memory: MemoryModel, key: Key | None) -> Size:
    return 0 if key is None else memory.gathered_bytes(memory.facts[key].weights)


def _units(memory: MemoryModel, stage: Stage) -> Iterator[RankWeights]:
    """The weights of each unit, in the order of the forward."""
    if memory.ends_apart:
        yield memory.end_weights[0]
    else:
        yield memory.units(stage)
    for layer in range(stage.start, stage.stop):
        yield memory.facts[memory.key(stage, layer)].weights
    if memory.ends_apart:
        yield memory.end_weights[1]


def _most_gathered(memory: MemoryModel, stage: Stage) -> float:
    """Bytes of the buffers of a unit and of the one before it, while the shard of the unit is copied, where they are most."""
    copied = 1 / memory.layout.zero_ranks if memory.training.precision.autocast else 0.0  # FSDP casts nothing else
    most = before = 0.0
    for weights in _units(memory, stage):
        own = float(memory.gathered_bytes(weights))
        most = max(most, before + own * (1 + copied))
        before = own
    return most


def _shards(rank: StageAtWork, moment: Moment) -> float:
    """Bytes of the gradients of the rank's shards at a moment."""
    whole = rank.memory.whole_gradients is True and moment.phase is not Phase.STEP
    return 0.0 if whole else float(moment.parts["gradients"])


def _being_reduced(rank: StageAtWork) -> float:
    """Bytes of the largest unit's reduced shard, where it does not stay as the gradient."""
    memory, precision = rank.memory, rank.memory.training.precision
    stays = precision.reduced == precision.gradient and not rank.accumulating and "gradients" not in memory.offloaded
    if stays:
        return 0.0
    largest = max(float(weights.all.trainable) for weights in _units(memory, rank.stage))
    return float(precision.reduced * largest / memory.layout.zero_ranks)


def hole(memory: MemoryModel) -> float:
    """Return the bytes of 16-bit logits into whose place nothing of the loss's backward fits."""
    kernels = memory.view.kernels
    upcast = kernels.loss == "float32" and kernels.loss_pieces == 1 and memory.training.precision.compute < 4
    if not upcast or kernels.holds_logits or memory.training.copies_outputs:
        return 0.0
    logits = (tensor for operation in memory.head for tensor in operation.outputs if tensor.name == "head.logits")
    return float(next((tensor.nbytes for tensor in logits), 0.0))
