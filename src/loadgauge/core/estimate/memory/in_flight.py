"""Micro-batches in flight on a pipeline stage: from the order of work of its schedule.

A micro-batch's activations are held from its forward (F) to its backward. Where the backward is split, B frees what
only the gradient of the input needed, and W finds what is left: the input of every matrix, and the gradient of its
output (source: qi2024, section 2; `pending_wgrad`). Letters as in `estimate.schedule.orders`.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import ge
from typing import Any, NamedTuple, TypeVar

from loadgauge.core.base.algebra import Size, maximum, minimum
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.estimate.schedule.orders import BW, KINDS, PAIR_BW, PAIR_F, B, F, W, rows_of_stage
from loadgauge.core.layers.operations.operations import Layer, Tensor

T = TypeVar("T")


class Flight(NamedTuple):
    """Micro-batches in flight on each chunk of a stage: between forward and backward, and those that wait for W only."""

    whole: tuple[Size, ...]
    waiting: tuple[Size, ...]


class Work(NamedTuple):
    """Micro-batches that a stage holds when it runs a forward (already counted) or a backward (still counted) of a chunk.

    splits: the backward is split, and leaves what W needs
    """

    forward: bool
    chunk: int
    splits: bool
    flight: Flight


def works(layout: Layout, stage: int, put_off: tuple[int, ...] = ()) -> tuple[Work, ...]:
    """Return the moments at which a stage holds the most micro-batches, from its schedule's order of work.

    Among the moments of the same kind of work and chunk, those remain that no other one exceeds on every chunk.
    stage: index of the pipeline stage; put_off: as in `order_of_work`

    >>> [work.flight.whole for work in works(Layout(pp=4, global_batch=8, seq_len=1), 1)]
    [(3,), (3,)]
    >>> for work in works(Layout(pp=4, global_batch=8, schedule="zb-h1", seq_len=1), 3):
    ...     print("F" if work.forward else "B", *work.flight)
    F (1,) (3,)
    B (1,) (3,)
    """
    if layout.schedule in ("1f1b", "gpipe"):
        flight = Flight((layout.in_flight(stage),), (0,))
        return Work(True, 0, False, flight), Work(False, 0, False, flight)
    return peak_candidates(layout, stage, tuple(range(layout.chunks)), put_off)


AHEAD = {"zb-h1": 1, "zb-2p": 2}
"""Times that a schedule is as far ahead of its backward as 1F1B, and as many weight gradients late."""


def late_weights(schedule: str, held: Sequence[tuple[Size, Size]]) -> tuple[int, ...]:
    """Return how many weight gradients each stage of ZB-H1 or ZB-H2 puts off at the most.

    The layers of a stage hold no more bytes than those of p micro-batches that wait for their backward (ZB-H2: 2p - 1), as if
    it were the first (qi2024, section 2: the limit of memory of both). W needs more than what the forward keeps where
    layers run again, and of many experts. The head's logits wait on top of that, as in the runs that qi2024 measured.

    held: of each stage, bytes of one micro-batch in its layers until its backward, and from then until W

    >>> late_weights("zb-h1", [(4, 3)] * 4), late_weights("zb-h1", [(4, 8)] * 4)
    ((0, 1, 2, 3), (0, 0, 1, 1))
    """
    late = []
    for index, (kept, waits) in enumerate(held):
        share = minimum(kept / maximum(waits, 1), 1)
        fewest = share.min() if hasattr(share, "min") else share
        late.append(
            int(AHEAD[schedule] * index * fewest) if isinstance(fewest, float | int) else AHEAD[schedule] * index
        )
    return tuple(late)


def _not_exceeded(numbered: Iterable[tuple[tuple[int, ...], T]]) -> Iterator[T]:
    """Yield those whose numbers no other one exceeds in everything."""
    kept: list[tuple[int, ...]] = []
    # One that exceeds another holds more in all, so it comes first.
    for own, item in sorted(numbered, key=lambda pair: (-sum(pair[0]), pair[0])):
        if not any(all(map(ge, other, own)) for other in kept):
            kept.append(own)
            yield item


def peak_candidates(
    layout: Layout, stage: int, alike: tuple[object, ...], put_off: tuple[int, ...] = ()
) -> tuple[Work, ...]:
    """Return those of a stage's `works` that may need the most bytes.

    Works of the same kind whose chunks of like layers hold no more than another's are dropped.
    alike: for each chunk, a key that is equal for chunks of the same layers; put_off: as in `order_of_work`

    >>> layout = Layout(pp=4, vpp=4, global_batch=16, schedule="interleaved", seq_len=1)
    >>> len(works(layout, 1)), len(peak_candidates(layout, 1, ("same",) * 4))
    (32, 2)
    """
    if layout.schedule in ("1f1b", "gpipe"):
        return works(layout, stage)
    names: dict[object, int] = {}
    chunks = layout.vpp if layout.schedule == "interleaved" else None
    return _peak_candidates(
        layout.schedule,
        layout.pp,
        layout.played(4),
        chunks,
        stage,
        tuple(names.setdefault(each, len(names)) for each in alike),
        put_off,
    )


@lru_cache(maxsize=4096)
def _peak_candidates(
    schedule: str,
    stages: int,
    batches: int,
    chunks: int | None,
    stage: int,
    alike: tuple[int, ...],
    put_off: tuple[int, ...],
) -> tuple[Work, ...]:
    size, order = rows_of_stage(schedule, stages, batches, chunks, stage, put_off)
    names = max(alike) + 1
    groups: dict[object, dict[tuple[int, ...], Work]] = {}
    # Of each row: its chunk and name, its group where it finds something, and what it leaves in flight and waiting.
    rows: list[Any] = []
    for row in range(len(KINDS) * size):
        kind, chunk = divmod(row, size)
        forward, finds, splits = kind in (F, PAIR_F), kind in (F, B, BW, PAIR_F, PAIR_BW), kind == B
        group = groups.setdefault((forward, alike[chunk], splits), {}) if finds else None
        rows.append((chunk, alike[chunk], forward, splits, group, kind in (B, BW, PAIR_BW), splits - (kind == W)))
    whole, waiting, totals = [0] * size, [0] * size, [0] * (2 * names)
    last: object = None
    nothing: Any = (None,) * len(rows[0])
    for here, following in pairwise([*map(rows.__getitem__, order), nothing]):
        chunk, name, forward, splits, group, ends, more = here
        if forward:
            whole[chunk] += 1
            totals[name] += 1
        # A forward before another one of its kind holds less than that, and a whole backward less than the one before it.
        less = group is following[4] if forward else group is last and not splits
        last = group
        if group is not None and not less:
            # Of works with equal totals, that of the first chunk.
            before = group.get(key := tuple(totals))
            if before is None or chunk < before.chunk:
                group[key] = Work(forward, chunk, splits, Flight(tuple(whole), tuple(waiting)))
        if ends:
            whole[chunk] -= 1
            totals[name] -= 1
        if more:
            waiting[chunk] += more
            totals[names + name] += more
    return tuple(work for by_totals in groups.values() for work in _not_exceeded(by_totals.items()))


@lru_cache(maxsize=4096)
def summed(these: tuple[Work, ...], groups: tuple[int, ...], *, by_chunk: bool) -> frozenset[tuple[Any, ...]]:
    """Return what works hold of each group of like chunks together, each with its chunk or the group of it.

    groups: of each chunk, the first one of the same layers; by_chunk: gradients are allocated layer by layer, and include those of
        all later layers
    """
    flights = set()
    for work in these:
        sums = [0] * (2 * len(groups))
        for group, whole, waits in zip(groups, *work.flight, strict=True):
            sums[2 * group] += whole
            sums[2 * group + 1] += waits
        flights.add((work.forward, work.chunk if by_chunk else groups[work.chunk], work.splits, tuple(sums)))
    return frozenset(flights)


def pending_wgrad(layer: Layer) -> Size:
    """Return the bytes that a layer's weight gradients still need after its input gradient is computed.

    The input of every trained matrix, and the gradient of its output, which has its output's size: 32 s b h for a GPT
    layer (source: qi2024, table 1). Gradients of norms, biases and tables are computed with the input gradient. Of a product
    in 8 or 4 bits the gradient is quantised before it waits, as its input is (transformer-engine, `module/linear.py`).

    >>> from loadgauge.core.families.reference import gpt_block
    >>> from loadgauge.core.definitions.model.kernels import PAPER
    >>> from loadgauge.core.layers import View, block_layer
    >>> s, b, h, a = 2048, 4, 6144, 64
    >>> pending_wgrad(block_layer(gpt_block(h, a), h, View.of(s, b, kernels=PAPER))) == 32 * s * b * h
    True
    """
    inputs: dict[str, Tensor] = {}
    gradients: Size = 0
    for operation in layer:
        if operation.trains_matrix:
            inputs.update((tensor.name, tensor) for tensor in operation.keeps)
            low = [tensor.itemsize for tensor in operation.keeps if tensor.dtype == "quantised"]
            gradients = gradients + sum(tensor.numel * (*low, tensor.itemsize)[0] for tensor in operation.outputs)
    return gradients + sum(tensor.nbytes for tensor in inputs.values())
