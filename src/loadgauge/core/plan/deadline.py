"""Whole runs and dates: GPUs that finish N tokens in D days, days that they take, tokens that they see.

A number of GPUs is one that can exist: whole nodes on which some layout is valid and fits. How many are needed follows from what
each achieves there, which follows from the number; so sizes are tried one by one, from a bound below upwards.
"""

import math
from typing import NamedTuple

import msgspec

from loadgauge.core.base import Error, NothingFits, count, days_words
from loadgauge.core.definitions.hardware.calibration import slowed
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.estimate.time.cost import DAY, gpus_needed
from loadgauge.core.plan.inverse import Answer, Progress, best_of, days_for, quiet
from loadgauge.core.plan.reopen import reopen
from loadgauge.core.plan.search import Case, Objective

GUESS = 0.4
"""Utilisation that the first size is chosen by; the answer does not depend on it."""
ABOVE = 0.9
"""Of the GPUs that a power of two of nodes would need, the share from which sizes are tried: another size may be faster."""
MOST_SIZES = 40
"""Sizes that are tried at most."""
BESIDE = 2
"""Sizes shown on either side of the answer."""


class Pace(msgspec.Struct, frozen=True):
    """Utilisation to assume in place of the predicted one, if any: a share of the 16-bit peak. hardware: with recomputation"""

    share: float | None = None
    hardware: bool = False

    def best_of(self, case: Case, objective: Objective, margin: float) -> Estimate | None:
        """Return the best layout of a case, all its times at this utilisation; None where none is valid and fits."""
        best = best_of(case, objective, margin)
        if best is None or best.time is None or self.share is None:
            return best
        predicted = best.time.hfu if self.hardware else best.time.mfu
        assumed = slowed(case.cluster, 3 * (predicted / self.share,), case.efficiencies)
        return msgspec.structs.replace(case, cluster=assumed, efficiencies=None).estimate(best.layout)

    @property
    def measured(self) -> str | None:
        """The utilisation as `--measured` of an estimate."""
        return None if self.share is None else f"{'hfu' if self.hardware else 'mfu'}={self.share:.12g}"


class Sized(NamedTuple):
    """The best layout on a number of GPUs, and the days it takes; None where none fits."""

    gpus: int
    best: Estimate | None
    days: float


class Dated(NamedTuple):
    """An answer about a date, and what sizes beside it take."""

    answer: Answer
    beside: tuple[Sized, ...]


def gpus_by_date(
    case: Case,
    tokens: float,
    days: float,
    pace: Pace,
    objective: Objective = "time",
    margin: float = 0.0,
    progress: Progress = quiet,
    most: int = 10**6,
    *,
    any_batch: bool = False,
) -> Dated:
    """Find the fewest GPUs, of the sizes tried, that finish in time. Raises `NothingFits`, with the cause, where none does.

    any_batch: the global batch was not given, so that each size may have the multiple of itself that is nearest
    """
    node, card, name = case.cluster.gpus_per_node, case.cluster.gpu, case.space.model.name
    tried: dict[int, Sized] = {}

    def at(gpus: int) -> Sized:
        if gpus not in tried:
            progress(f"{gpus:,} GPUs")
            try:
                batch = max(1, round(case.space.global_batch / gpus)) * gpus if any_batch else None
                best = pace.best_of(reopen(case, gpus=gpus, global_batch=batch), objective, margin)
            except Error:
                best = None
            tried[gpus] = Sized(gpus, best, math.inf if best is None else days_for(best, tokens, case.price))
        return tried[gpus]

    achieved = (pace.share or GUESS) * card.peak("bf16" if card.bf16 else "fp16")
    first = gpus_needed(6 * parameters(case.space.model).active * tokens, days * DAY, achieved)
    start = node * 2 ** max(0, round(math.log2(max(1.0, first / node))))
    # More where memory is short; fewer where the batch cannot be shared out.
    for factor in (1, 2, 4, 8, *(2.0**-power for power in range(1, 20))):
        if node <= start * factor <= most and at(int(start * factor)).best is not None:
            start = int(start * factor)
            break
    # What a power of two of nodes achieves, and a little more, bounds the sizes that may do from below.
    size = _whole(min(start * at(start).days / days * ABOVE, most), node)
    suits = case.space.model.num_hidden_layers * case.space.global_batch
    while size <= most and len(tried) < MOST_SIZES:
        if _smooth(size, suits) and at(size).days <= days:
            break
        size += node
    enough = [sized.gpus for sized in tried.values() if sized.days <= days]
    if not enough:
        sizes = [sized for sized in tried.values() if sized.best is not None]
        raise NothingFits(_cause(name, days, sizes, max(tried), bounded=size > most))
    least = min(enough)
    more, size = 0, least + node
    while more < BESIDE and size < 2 * least + 8 * node and len(tried) < MOST_SIZES + 8:
        more += _smooth(size, suits) and at(size).best is not None
        size += node
    chosen = tried[least]
    assert chosen.best is not None
    nodes = f"{least // node:,} nodes" if least > node else "one node"
    text = f"{least:,} GPUs ({nodes}) take {days_words(chosen.days)} for {count(tokens)} tokens; asked: at most {days_words(days)}"
    size = least - node
    while size >= node and not any(sized.best is not None for sized in tried.values() if sized.gpus < least):
        at(size)
        size -= node
    with_layout = [tried[gpus] for gpus in sorted(tried) if tried[gpus].best is not None]
    closest = next(index for index, sized in enumerate(with_layout) if sized.gpus == least)
    beside = tuple(with_layout[max(0, closest - BESIDE) : closest + BESIDE + 1])
    return Dated(Answer(text, least, chosen.best), beside)


def _whole(gpus: float, node: int) -> int:
    """Whole nodes for so many GPUs."""
    return max(1, math.ceil(gpus / node - 1e-9)) * node


def _smooth(gpus: int, suits: int) -> bool:
    """Return whether layouts may divide a size evenly: no prime above 13 but those of layers x batch.

    >>> _smooth(1152, 96), _smooth(1272, 96), _smooth(1272, 53 * 96)
    (True, False, True)
    """
    rest = gpus
    for prime in (2, 3, 5, 7, 11, 13):
        while rest % prime == 0:
            rest //= prime
    return rest == 1 or suits % rest == 0


def _cause(name: str, days: float, sizes: list[Sized], largest: int, *, bounded: bool) -> str:
    """Why no number of GPUs meets the date. bounded: all that may be were tried"""
    if not sizes:
        return f"{name} does not fit any number of GPUs that was tried, up to {largest:,}"
    best = min(sizes, key=lambda sized: sized.days)
    assert best.best is not None
    took = f"{best.gpus:,} take {days_words(best.days)}"
    if bounded:
        return f"no number of GPUs up to {largest:,} finishes in {days:g} days: {took}; leave --gpus out, or give more"
    rows = best.best.layout
    per_rank = rows.global_batch / rows.dp
    return (
        f"no number of GPUs that was tried finishes in {days:g} days: {took}; with a"
        f" global batch of {rows.global_batch:,} each of {rows.dp:,} replicas has {per_rank:,.0f} sequences a step, and"
        " more GPUs have less to do: a larger --global-batch, or more days"
    )


def days_of(case: Case, tokens: float, pace: Pace, objective: Objective, margin: float) -> Answer:
    """Return the days that the best layout takes. Raises `NothingFits`."""
    best = _best(case, pace, objective, margin)
    needed_days = days_for(best, tokens, case.price)
    return Answer(
        f"{count(tokens)} tokens take {days_words(needed_days)} on {case.space.gpus:,} GPUs", needed_days, best
    )


def tokens_of(case: Case, days: float, pace: Pace, objective: Objective, margin: float) -> Answer:
    """Return the tokens that the best layout sees in some days. Raises `NothingFits`."""
    best = _best(case, pace, objective, margin)
    assert best.time is not None
    seen_tokens = best.time.tokens / best.time.step * days * DAY
    return Answer(f"{case.space.gpus:,} GPUs see {count(seen_tokens)} tokens in {days_words(days)}", seen_tokens, best)


def _best(case: Case, pace: Pace, objective: Objective, margin: float) -> Estimate:
    best = pace.best_of(case, objective, margin)
    if best is None:
        raise NothingFits(
            f"no layout of {case.space.model.name} is valid and fits {case.space.gpus:,} x {case.cluster.gpu.name}"
        )
    return best
