"""Time of a pipeline: its schedule played through with the real time of every stage.

`simulate` plays a schedule (`schedule_orders`) through (`schedule_timeline`).
"""

from collections.abc import Sequence
from functools import lru_cache

from loadgauge.core.base import Size
from loadgauge.core.estimate.schedule.orders import SCHEDULES, Order, Work, order_of_work, violation
from loadgauge.core.estimate.schedule.timeline import Event, Simulation, Times, run

__all__ = [
    "SCHEDULES",
    "Event",
    "Order",
    "Simulation",
    "Work",
    "order_of_work",
    "played_seconds",
    "run",
    "simulate",
    "violation",
]


def simulate(
    schedule: str,
    stages: int,
    num_microbatches: int,
    *,
    forward: Times,
    backward: Times,
    weight: Times = 0,
    send: float | Sequence[float] = 0,
    overlap_send: bool = True,
    tail: float | Sequence[float] = 0,
    chunks: int | None = None,
    pair: float = 1,
    put_off: tuple[int, ...] = (),
) -> Simulation:
    """Play a schedule through with the time of every stage [s]; raises `LayoutError` where it cannot exist.

    forward, backward, weight: of one micro-batch: the same on every stage, a number a stage (shared by its chunks)
        or one a chunk, `forward[stage][chunk]`; `order_of_work(...).routes` says which chunk holds which part of the
        model. `backward` is the gradient of the input, `weight` that of the weights; schedules that do not split them
        take the sum, so that without `weight` `backward` is the whole
    send: of one micro-batch's activations (or their gradient) from a stage to the next: the same on every link, or a
        number for each: link i joins stages i and i + 1, the last (interleaved only) the last stage and the first
    overlap_send: sends overlap with compute; else a stage waits until what it sends has arrived
    tail: fixed time of each stage at the end (gradients still to be reduced, the optimizer)
    chunks: of a stage; only for interleaved, the others have their own
    pair: time of DualPipe's overlapped F and BW, as a share of their sum; put_off: as in `order_of_work`

    >>> played = simulate("1f1b", 4, 8, forward=1, backward=2)
    >>> played.total, played.idle
    (33, (9, 9, 9, 9))
    >>> simulate("zb-h1", 4, 8, forward=1, backward=1, weight=1).total
    27
    """
    order = order_of_work(schedule, stages, num_microbatches, chunks, put_off)
    return run(
        order,
        forward=forward,
        backward=backward,
        weight=weight,
        send=send,
        overlap_send=overlap_send,
        tail=tail,
        pair=pair,
    )


@lru_cache(maxsize=1024)
def played_seconds(
    schedule: str,
    stages: int,
    batches: int,
    chunks: int | None,
    forward: tuple[tuple[Size, ...], ...],
    backward: tuple[tuple[Size, ...], ...],
    weight: tuple[tuple[Size, ...], ...] | Size,
    send: Size,
    overlap_send: bool,
    put_off: tuple[int, ...] = (),
) -> tuple[Size, tuple[Size, ...]]:
    """Return the seconds of a schedule played through, and the seconds each stage waits for its own sends.

    The arguments are those of `simulate`, hashable; results are cached, as many layouts share them.
    """
    result = simulate(
        schedule,
        stages,
        batches,
        forward=forward,
        backward=backward,
        weight=weight,
        send=send,
        overlap_send=overlap_send,
        chunks=chunks,
        put_off=put_off,
    )
    return result.total, result.sending
