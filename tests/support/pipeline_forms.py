"""The seconds of a pipeline in a closed form, as papers print it, and where each holds: what playing a schedule through is held to.

Letters: p stages, m micro-batches, v chunks of a stage; f, b, w the time of one micro-batch on a whole stage: forward,
gradient of the input, gradient of the weights.
"""

from __future__ import annotations

from typing import Any

from loadgauge.core.base.algebra import Size, maximum, minimum
from loadgauge.core.base.errors import LayoutError, NotModelled
from loadgauge.core.estimate.schedule.orders import SCHEDULES, violation


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
