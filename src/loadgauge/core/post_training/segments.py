"""Reserved-but-unused allocator segments when only adapters train: segments of PyTorch's caching allocator that are not full.

Requests up to 1 MiB come from segments of their own kind, those up to 10 MiB from segments of 20 MiB, larger ones from one each, a
multiple of 2 MiB (source: pytorch, `c10/cuda/CUDACachingAllocator.cpp`). Weights stay, and so do the ends of their segments. No
small segment serves a large request or the other way round: activations and adapters' tensors have their peaks at different
moments, and the driver sees both. The trace's allocator, which serves request after request, is the oracle of the tests.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from loadgauge.core.base.units import MIB
from loadgauge.core.estimate.memory.phases import Moment, Phase, StageAtWork

SMALL, MIDDLE, SEGMENT, ROUND = MIB, 10 * MIB, 20 * MIB, 2 * MIB
"""The largest request of small segments, the smallest with a segment of its own, a shared segment; and the rest's multiple."""


class Segments(msgspec.Struct, frozen=True):
    """ends: bytes of segments of frozen weights that nothing fits in; small: share of the adapters' bytes in small segments"""

    ends: float
    small: float


def tensors(rank: StageAtWork, frozen: float) -> Iterator[tuple[float, int, bool]]:
    """Yield bytes, number and whether it is trained, of each weight of a rank. frozen: bytes of an element of a frozen one"""
    memory = rank.memory
    layers = [(layer, 1) for layer in (memory.embedding, memory.head)]
    layers += [
        (memory.facts[key].layer, count)
        for key, count in memory.counts(rank.stage, rank.stage.start, rank.stage.stop).items()
    ]
    for layer, count in layers:
        for weight in layer.weights:
            itemsize = frozen if not weight.trainable else 4 if weight.wide else memory.training.precision.weight
            yield float(itemsize * weight.numel), count, weight.trainable


def segments(rank: StageAtWork, frozen: float) -> Segments:
    """Return the allocator's segments of a rank's frozen weights and of its adapters."""
    whole: dict[float, int] = {}
    trained = small = 0.0
    for nbytes, count, trains in tensors(rank, frozen):
        if trains:
            trained += count * nbytes
            small += count * nbytes if nbytes <= SMALL else 0.0
        else:
            whole[nbytes] = whole.get(nbytes, 0) + count
    return Segments(ends_of(whole), small / trained if trained else 0.0)


def ends_of(sizes: Mapping[float, int]) -> float:
    """Return the bytes that no tensor fills in the segments of tensors that stay, the largest first. sizes: how many of each

    >>> ends_of({12.5 * MIB: 2, 7 * MIB: 4}) / MIB
    15.0
    """
    idle = sum(count * (-size % ROUND) for size, count in sizes.items() if size >= MIDDLE)
    holes: dict[float, int] = {}
    for size in sorted((size for size in sizes if SMALL < size < MIDDLE), reverse=True):
        left = sizes[size]
        after: dict[float, int] = {}
        for hole, count in holes.items():
            fit = int(hole // size)
            used = min(count, -(-left // fit)) if fit else 0
            left -= min(left, used * fit)
            for rest, number in ((hole, count - used), (hole - fit * size, used)):
                if number:
                    after[rest] = after.get(rest, 0) + number
        fit = int(SEGMENT // size)
        if left:
            after[SEGMENT - fit * size] = after.get(SEGMENT - fit * size, 0) + -(-left // fit)
        holes = after
    return float(idle + sum(hole * count for hole, count in holes.items()))


def unshared(moments: Sequence[Moment], small: float, forwards: float, beside: float) -> float:
    """Return by how much both kinds of segments at their peaks exceed the peak of their sum, in an update [bytes].

    moments: of the update; small: share of the adapters' tensors in small segments; forwards: the peak of the passes before it,
    whose segments are still there; beside: bytes that are there besides in the update
    """
    peaks = []
    for moment in moments:
        parts = moment.parts
        mine = parts["gradients"] + parts["optimizer"] + (parts["transient"] if moment.phase is Phase.STEP else 0)
        peaks.append((float(moment.total) + beside, small * float(mine)))
    held = small * min(float(moment.parts["optimizer"]) for moment in moments)
    large = max(max(total - own for total, own in peaks), forwards - held)
    return max(0.0, large + max(own for _, own in peaks) - max(total for total, _ in peaks))
