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

import functools
from collections.abc import Iterator, Sequence

from loadgauge.core.base.algebra import Size, maximum, where
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
    memory, measured = rank.memory, memory_range()
    most = float(most_beside(rank, moments)) if pooled(memory) else 0.0
    if not most:
        return Pools()
    beside = float(peak.total) - max(float(moment.total) - float(beside_main(rank, moment)) for moment in moments)
    regular = memory.engine is None  # what its engine asks for changes its size all the time
    idle = (measured.static if regular else measured.dynamic).reserved
    return Pools(beside=beside, most=most, idle=idle, further=most - beside if counted(memory) else 0.0)


def pooled(memory: MemoryModel) -> bool:
    """Return whether streams beside the main one have pools of their own."""
    if memory.engine is not None:
        return memory.engine.overlaps(memory.layout.zero)
    return memory.fully_sharded and memory.sharded is True


def counted(memory: MemoryModel) -> bool:
    """Return whether the total counts pools: of pre-training, whose cards no report shows, only what reads the allocator does."""
    return memory.training.framework.stack == "fine-tuning" and memory.layout.pp == 1 and pooled(memory)


def further(rank: StageAtWork, moments: Sequence[Moment]) -> list[Size]:
    """Return by how many bytes the main pool of each moment and the most of all others are above what is handed out then."""
    if not counted(rank.memory):
        return [0] * len(moments)
    most = most_beside(rank, moments)
    return [most - beside_main(rank, moment) for moment in moments]


def beside_main(rank: StageAtWork, moment: Moment) -> Size:
    """Return the bytes of a moment that are in other pools, less what the main pool cannot use at the loss (`hole`)."""
    memory, stage = rank.memory, rank.stage
    if memory.engine is not None:
        point = moment.point
        streams = {} if point is None else zero_engine.pools(memory, stage, point)
        return sum(there for there, _ in streams.values())
    unused = hole(memory) if stage.last and moment.phase is Phase.LOSS else 0
    return _gathering(memory, moment) + _shards(rank, moment) - unused


def most_beside(rank: StageAtWork, moments: Sequence[Moment]) -> Size:
    """Return the bytes that the other pools hold at most, each at its own moment."""
    memory, stage = rank.memory, rank.stage
    if memory.engine is None:
        shards = functools.reduce(maximum, (_shards(rank, moment) for moment in moments))
        return _most_gathered(memory, stage) + shards + _being_reduced(rank)
    most: dict[str, Size] = {}
    for moment in moments:
        if moment.point is not None:
            for stream, (_, highest) in zero_engine.pools(memory, stage, moment.point).items():
                most[stream] = maximum(most.get(stream, 0), highest)
    return sum(most.values())


def _gathering(memory: MemoryModel, moment: Moment) -> Size:
    """Bytes at a moment of the flat buffers that weights are gathered in."""
    if not memory.by_layer or moment.point is None:
        return 0
    own = _gathering_at(memory, moment.point)
    return (
        own if moment.elsewhere is None else where(moment.elsewhere[0], _gathering_at(memory, moment.elsewhere[1]), own)
    )


def _gathering_at(memory: MemoryModel, point: At) -> Size:
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


def _most_gathered(memory: MemoryModel, stage: Stage) -> Size:
    """Bytes of the buffers of a unit and of the one before it, while the shard of the unit is copied, where they are most."""
    copied = 1 / memory.layout.zero_ranks if memory.training.precision.autocast else 0.0  # FSDP casts nothing else
    most: Size = 0
    before: Size = 0
    for weights in _units(memory, stage):
        own = memory.gathered_bytes(weights)
        most = maximum(most, before + own * (1 + copied))
        before = own
    return most


def _shards(rank: StageAtWork, moment: Moment) -> Size:
    """Bytes of the gradients of the rank's shards at a moment."""
    gradients = moment.parts["gradients"]
    return gradients if moment.phase is Phase.STEP else where(rank.memory.whole_gradients, 0, gradients)


def _being_reduced(rank: StageAtWork) -> Size:
    """Bytes of the largest unit's reduced shard, where it does not stay as the gradient."""
    memory, precision = rank.memory, rank.memory.training.precision
    units = (weights.all.trainable for weights in _units(memory, rank.stage))
    largest = precision.reduced * functools.reduce(maximum, units) / memory.layout.zero_ranks
    stays = precision.reduced == precision.gradient and "gradients" not in memory.offloaded
    return where(rank.accumulating, largest, 0) if stays else largest


def hole(memory: MemoryModel) -> Size:
    """Return the bytes of 16-bit logits into whose place nothing of the loss's backward fits."""
    kernels = memory.view.kernels
    upcast = kernels.loss == "float32" and kernels.loss_pieces == 1 and memory.training.precision.compute < 4
    if not upcast or kernels.holds_logits or memory.training.copies_outputs:
        return 0.0
    logits = (tensor for operation in memory.head for tensor in operation.outputs if tensor.name == "head.logits")
    return next((tensor.nbytes for tensor in logits), 0)
