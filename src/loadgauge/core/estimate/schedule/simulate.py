"""Time of a pipeline: its schedule played through with the real time of every stage, and the closed forms.

`simulate` plays a schedule (`schedule_orders`) through (`schedule_timeline`); `closed_form` is what papers print for
equal stages, where it holds.

Letters: p stages, m micro-batches, v chunks of a stage; f, b, w the time of one micro-batch on a whole stage: forward,
gradient of the input, gradient of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from loadgauge.core.base import LayoutError, NotModelled, Size, maximum, minimum
from loadgauge.core.estimate.schedule.orders import SCHEDULES, Order, Work, order_of_work, violation
from loadgauge.core.estimate.schedule.timeline import Event, Simulation, Times, run

__all__ = [
    "SCHEDULES",
    "Event",
    "Order",
    "Simulation",
    "Work",
    "closed_form",
    "closed_form_holds",
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


def closed_form(
    schedule: str,
    stages: Size,
    num_microbatches: Size,
    forward: Size,
    backward: Size,
    weight: Size = 0,
    chunks: Size = 1,
    pair: Size = 1,
) -> Size:
    """Return the seconds of a pipeline of p equal stages with free sends, without the fixed time at the end.

    The arguments are those of `simulate` [s]; ints, float64 arrays and SymPy symbols pass through.

    Each holds where `closed_form_holds` says so; plain numbers outside of that raise `NotModelled`.

    | schedule    | seconds                                                          | source and validity        |
    |-------------|------------------------------------------------------------------|----------------------------|
    | gpipe, 1f1b | (m + p - 1)(f + b + w)                                           | narayanan2021, 2.2.1       |
    | interleaved | (m + (p - 1) / v)(f + b + w)                                     | narayanan2021, 2.2.2       |
    | zb-h1       | m (f + b + w) + (p - 1)(f + b - w)                               | qi2024 table 2, see below  |
    | zb-2p       | m (f + b + w) + (p - 1) max(f, b - f, f + b - 2w)                | ours; m >= 2p - 1          |
    | zb-v        | m (f + b + w) + (p - 1) f / 2                                    | ours; f = b = w, m >= 2p-1 |
    | dualpipe    | (m - p - 1) F&B + (p + 1)(f + b + w) + (p/2 - 1)(F&B + b - 2w)   | deepseek2024 table 2       |
    | dualpipev   | the same with 2p stages and 2m micro-batches of half the time    | dualpipe                   |

    zb-h1: as printed where w <= f, w <= b and m >= p. What is computed is exact everywhere (ours, from `simulate`):
    m (f + b + w) + (p - 1)(f + b) - (min(m, p) - 1) min(f, b, w).
    zb-2p: the printed bubble, (p - 1)(f + b - 2w), counts a stage from its own start and holds
    while it is above 0 and above (p - 1)(b - f). zb-v: the same count gives the zero of its name.
    dualpipe, dualpipev: F&B = pair (f + b + w). The printed bubble, (p/2 - 1)(F&B + B - 3w) with B = b + w, is that of
    the stages at the turning point, where m - p - 1 forwards are paired. It holds where f = b >= w and F&B >= f + b.

    >>> import sympy
    >>> p, m, f, b, v = sympy.symbols("p m f b v", positive=True)
    >>> sympy.factor(closed_form("1f1b", p, m, f, b))
    (b + f)*(m + p - 1)
    >>> closed_form("interleaved", p, m, f, b, chunks=v) - m * (f + b)
    (b + f)*(p - 1)/v
    >>> closed_form("zb-h1", 4, 8, 1, 1, 1)
    27
    """
    p, m, f, b, w, v = stages, num_microbatches, forward, backward, weight, chunks
    if closed_form_holds(schedule, p, m, f, b, w, pair) is False:
        raise NotModelled(f"the closed form of {schedule} does not hold for these sizes and times; simulate it")
    work = m * (f + b + w)
    if schedule in ("gpipe", "1f1b"):
        return work + (p - 1) * (f + b + w)
    if schedule == "interleaved":
        return work + (p - 1) * (f + b + w) / v
    if schedule == "zb-h1":
        return work + (p - 1) * (f + b) - (minimum(m, p) - 1) * minimum(minimum(f, b), w)
    if schedule == "zb-2p":
        return work + (p - 1) * maximum(f, maximum(b - f, f + b - 2 * w))
    if schedule == "zb-v":
        return work + (p - 1) * f / 2
    # At the turning point n + 1 forwards and backwards run alone; dualpipev counts stages and work in halves.
    both, n, half = pair * (f + b + w), (p if schedule == "dualpipe" else 2 * p), 1 if schedule == "dualpipe" else 2
    alone = n + 1
    return ((m * half - alone) * both + alone * (f + b + w) + (n - 2) * (both + b - 2 * w) / 2) / half


def closed_form_holds(
    schedule: str,
    stages: Size,
    num_microbatches: Size,
    forward: Size,
    backward: Size,
    weight: Size = 0,
    pair: Size = 1,
) -> Any:
    """Return where `closed_form` equals `simulate`: True or False, an array of them, or a relation between symbols.

    >>> closed_form_holds("zb-v", 4, 8, 1, 1, 1), closed_form_holds("zb-v", 4, 8, 1, 2, 1)
    (True, False)
    """
    p, m, f, b, w = stages, num_microbatches, forward, backward, weight
    if schedule not in SCHEDULES:
        raise LayoutError(violation(schedule, 1, 1))
    if schedule == "interleaved":
        return m % p <= 0  # not ==, which is False between symbols
    if schedule == "zb-2p":
        return m >= 2 * p - 1
    if schedule == "zb-v":
        return (m >= 2 * p - 1) & (f <= b) & (b <= w) & (w <= f)
    if schedule in ("dualpipe", "dualpipev"):
        return (m >= 2 * p) & (f <= b) & (b <= f) & (w <= b) & (pair * (f + b + w) >= f + b)
    return True
