"""Time of answers of unequal lengths: fewer run as they end, those that wait take their places, the longest is last.

Sequences start when a slot is free and run as many steps as their answer has tokens. In the mean over lengths, a(t) of them run at
step t, from the starts s(t) before it: a(t) = sum over u of s(u) S(t - u), with S the share of answers that are longer; completions
are refilled while any wait. All of N are done at t with probability prod (1 - S(t - u))^s(u), so the phase takes the sum over t of
what a step takes times the probability that any still runs. A step's seconds are near a line in what runs, for which this is exact
but for how the replicas differ: all wait for that with the longest answer.

Legend: n sequences of a replica, R replicas, B slots, X the tokens of an answer, p those of a prompt.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import msgspec

from loadgauge.core.base.lengths import Lengths

BINS = 128
"""Steps of length into which the longest answer is divided, at most."""
HORIZON = 3000
"""Bins of time at most: with more sequences that wait, all slots are busy, and time is tokens over throughput."""
TAIL = 0.1
"""Share of the sequences that ran at first, below which the rest is called the tail."""

JOINED = 4
"""Power in which full slots and the longest answer's way are added (`in_turns`)."""

Step = Callable[[float, float], float]
"""Seconds of a step of so many sequences at a mean context of so many tokens."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Generation of a step's answers on the replica that ends last.

    seconds: of decoding; steps: until the last answer ends, expected; tail: seconds with less than `TAIL` of the sequences
    idle: share of the slots that are empty, over the phase; running: sequences at the start; curve: (seconds, sequences that run)
    """

    seconds: float
    steps: float
    tail: float
    idle: float
    running: float
    curve: tuple[tuple[float, float], ...]


def survivor(lengths: Lengths, width: int) -> Any:
    """Return the share of answers longer than the middle of each bin of `width` tokens, from 0 up to the longest.

    >>> [float(round(one, 2)) for one in survivor(Lengths.uniform(100), 25)]
    [0.88, 0.63, 0.38, 0.13]
    """
    import numpy

    bins = math.ceil(lengths.longest / width)
    values, upto = numpy.asarray(lengths.values), numpy.asarray(lengths.cumulative)
    edges = numpy.arange(bins) * width + width / 2
    below = numpy.concatenate([[0], upto])[numpy.searchsorted(values, edges, side="left")]
    return 1 - below / upto[-1]


def generation(
    lengths: Lengths, step: Step, *, sequences: float, slots: float, prompt: int, replicas: int = 1
) -> Phase:
    """Return the phase in which `replicas` replicas generate `sequences` answers each, `slots` at once.

    >>> one = generation(Lengths.of([100]), lambda running, context: 0.01, sequences=8, slots=4, prompt=10)
    >>> round(one.seconds, 2), round(one.idle, 2)
    (2.0, 0.0)
    """
    import numpy

    width = max(1, math.ceil(lengths.longest / BINS))
    alive = survivor(lengths, width)
    mean = float(alive.sum())
    if sequences / max(1.0, min(slots, sequences)) * mean > HORIZON:
        return _full(lengths, step, sequences, slots, prompt)
    ends = -numpy.diff(numpy.concatenate([[1.0], alive, [0.0]]))
    lifetimes = len(alive)
    starts, running, ages = [], [], []
    left = sequences
    first = min(slots, sequences)
    starts.append(first)
    left -= first
    now = 0
    while True:
        history = numpy.asarray(starts[-lifetimes:])[::-1]
        living = history * alive[: len(history)]
        running.append(float(living.sum()))
        ages.append(float((living * (numpy.arange(len(history)) + 0.5)).sum()))
        if left <= 0 and running[-1] < 1e-9:
            break
        now += 1
        past = numpy.asarray(starts[1 - len(ends) :])[::-1]
        done = float((past * ends[1 : len(past) + 1]).sum())
        fresh = min(left, done)
        left -= fresh
        starts.append(fresh)
        if now > HORIZON + 2 * lifetimes or (left <= 0 and now - _last(starts) > lifetimes):
            break
    begun = numpy.asarray(starts)
    none = _log_none(begun, alive, len(running))
    any_of_all = -numpy.expm1(replicas * none)
    any_here = -numpy.expm1(none)
    counts = numpy.asarray(running)
    here = numpy.maximum(1.0, counts / numpy.maximum(any_here, 1e-12))
    context = prompt + width * numpy.asarray(ages) / numpy.maximum(counts, 1e-12)
    each = _steps(step, here, context)
    seconds = width * each * any_of_all
    times = numpy.cumsum(seconds)
    total, peak = float(times[-1]), first
    busy = float((counts * seconds).sum())
    shown = numpy.linspace(0, len(times) - 1, min(64, len(times))).astype(int)
    return Phase(
        seconds=total,
        steps=float(width * any_of_all.sum()),
        tail=float(seconds[counts < TAIL * peak].sum()),
        idle=max(0.0, 1 - busy / (peak * total)),
        running=peak,
        curve=tuple((float(times[i] - seconds[i]), float(counts[i])) for i in shown),
    )


def in_turns(
    phase: Phase,
    lengths: Lengths,
    step: Step,
    *,
    sequences: float,
    slots: float,
    prompt: int,
    replicas: int,
    away: float,
) -> Phase:
    """Return the phase where each answer leaves its slot for `away` seconds in all, between its turns.

    Turns wait behind others where there are more answers than slots, which hides what they are away. So the phase lies between
    that of full slots and the way of the longest answer, which is of a batch with a slot for each, and what it is away: both
    together to the power of `JOINED` are 7 % below to 14 % above a loop over every turn.

    >>> law, slots = Lengths.of([100]), {"sequences": 8, "slots": 8, "prompt": 10, "replicas": 1}
    >>> plain = generation(law, lambda running, context: 0.01, **slots)
    >>> round(in_turns(plain, law, lambda running, context: 0.01, **slots, away=3.0).seconds, 2)
    4.0
    """
    wave = phase.seconds
    if sequences > slots:
        free = functools.partial(_within, step, slots)
        wave = generation(lengths, free, sequences=sequences, slots=sequences, prompt=prompt, replicas=replicas).seconds
    seconds = (phase.seconds**JOINED + (wave + away) ** JOINED - wave**JOINED) ** (1 / JOINED)
    ratio = seconds / phase.seconds
    return msgspec.structs.replace(
        phase,
        seconds=seconds,
        tail=phase.tail * ratio,
        idle=max(0.0, 1 - (1 - phase.idle) / ratio),
        curve=tuple((when * ratio, count) for when, count in phase.curve),
    )


def _within(step: Step, slots: float, running: float, context: float) -> float:
    """Seconds of a step of no more than so many."""
    return step(min(running, slots), context)


def _last(starts: list[float]) -> int:
    """Where the last sequence started."""
    return max(index for index, value in enumerate(starts) if value > 0)


def _log_none(starts: Any, alive: Any, bins: int) -> Any:
    """Logarithm of the probability that nothing runs, in each bin: sum over starts of s log(1 - S).

    Less than one start in a bin is one that begins there with that probability: log(1 - s S).
    """
    import numpy

    log_share = numpy.zeros(bins)
    for lag, share in enumerate(numpy.minimum(alive, 1 - 1e-15)):
        begun = starts[: bins - lag]
        log_share[lag:] += numpy.where(
            begun < 1, numpy.log1p(-numpy.minimum(begun, 1) * share), begun * numpy.log1p(-share)
        )
    return log_share


def _steps(step: Step, running: Any, context: Any) -> Any:
    """Seconds of steps at many sizes: on a grid of sizes, and along a line in the context between its ends."""
    import numpy

    low, high = float(context.min()), float(context.max())
    most = float(running.max())
    grid = numpy.unique(numpy.round(numpy.geomspace(1, max(1.0, most), 14)))
    if grid[-1] < most:
        grid = numpy.append(grid, most)
    ends = [numpy.array([step(float(size), at) for size in grid]) for at in (low, high)]
    near, far = (numpy.interp(running, grid, end) for end in ends)
    share = (context - low) / (high - low) if high > low else 0.0
    return near + (far - near) * share


def _full(lengths: Lengths, step: Step, sequences: float, slots: float, prompt: int) -> Phase:
    """Very many sequences for each slot: throughput of full slots, then the tail of one more round."""
    age = lengths.mean_square / (2 * lengths.mean)
    full = step(slots, prompt + age)
    rest = generation(lengths, step, sequences=slots, slots=slots, prompt=prompt)
    rounds = (sequences - slots) / slots * lengths.mean
    seconds = rounds * full + rest.seconds
    return Phase(
        seconds=seconds,
        steps=rounds + rest.steps,
        tail=rest.tail,
        idle=rest.idle * rest.seconds / seconds,
        running=slots,
        curve=((0.0, slots), *((rounds * full + time, count) for time, count in rest.curve)),
    )


def expected_longest(lengths: Lengths, answers: int) -> float:
    """Return the tokens of the longest of so many answers, expected.

    >>> round(expected_longest(Lengths.uniform(1000), 9))
    900
    """
    return lengths.expected_max(answers)
