"""An order of work added up and checked entry by entry, apart from how the package reads it."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from loadgauge.core.base.errors import LayoutError
from loadgauge.core.estimate.schedule.orders import BW, KINDS, PAIR_BW, PAIR_F, B, F, Order, W
from loadgauge.core.estimate.schedule.simulate import Simulation


def most_in_flight(order: Order, size: Any = None, kept: Any = 1) -> tuple[Any, ...]:
    """Return the most activations each stage holds at once: from the start of F to the end of BW, or of W.

    size: of one micro-batch's activations on each chunk of each stage, `size[stage][chunk]`; without it the answer is in
        micro-batches of a whole stage (1/p of the model); kept: the share that B leaves for W (M_W / M_B in qi2024, section 2)
    """
    peaks = []
    for stage, rows in enumerate(order.rows):
        sizes = [1] * order.chunks if size is None else size[stage]
        change = [0 * nbytes for _ in KINDS for nbytes in sizes]
        for chunk, nbytes in enumerate(sizes):
            change[F * order.chunks + chunk] = change[PAIR_F * order.chunks + chunk] = nbytes
            change[BW * order.chunks + chunk] = change[PAIR_BW * order.chunks + chunk] = -nbytes
            change[B * order.chunks + chunk] = (kept - 1) * nbytes
            change[W * order.chunks + chunk] = -kept * nbytes
        peaks.append(max(accumulate(map(change.__getitem__, rows))))
    return tuple(peak / order.split if size is None and order.split > 1 else peak for peak in peaks)


def check_order(order: Order) -> None:
    """Raise `LayoutError` unless every stage does F, B and W of each of its micro-batches and chunks once."""
    routes = len(order.routes)
    for route in range(routes):
        share = range(order.num_microbatches * route // routes, order.num_microbatches * (route + 1) // routes)
        for stage, chunk in order.routes[route]:
            mine = [work for work in order.work(stage) if work.chunk == chunk]
            for kind in "FBW":
                if sorted(work.microbatch for work in mine if kind in work.kind) != list(share):
                    raise LayoutError(f"stage {stage} does not do {kind} of every micro-batch on chunk {chunk} once")


def longest_stage(played: Simulation) -> Any:
    """Return the longest time that one stage takes from its first work to its last [s], as qi2024 counts (section 4)."""
    return max(last - first for first, last in zip(played.first, played.last, strict=True))
