"""Questions the other way round: the most, the fewest, the smallest that will do. Each answer is planned, none is solved for.

Where an answer is sought by halving, it rests on what is bigger never needing less memory, which tests check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from loadgauge.cluster import cluster
from loadgauge.errors import ConfigError, Error, LayoutError, NothingFits
from loadgauge.estimate.params import parameters
from loadgauge.estimate.result import Estimate
from loadgauge.hardware import gpu as kind_of_gpu
from loadgauge.model import ModelSpec
from loadgauge.search.choices import space_for
from loadgauge.search.plan import Case, Objective, plan
from loadgauge.search.space import Space, divisors

STEP = 1024
"""Tokens that a sequence length is found to."""
NICS = (25, 50, 100, 200, 400, 800, 1600, 3200)
"""Gbit/s of network adapters that are sold, per GPU."""
COMMUNICATION = ("tp", "cp", "ep", "pp", "zero", "dp")
"""Lanes of a step that are communication which nothing hides."""


class Answer(NamedTuple):
    """An answer in words, its value, and the best layout with it."""

    text: str
    value: Any
    best: Estimate


def best_of(case: Case, objective: Objective, margin: float) -> Estimate | None:
    """The best layout; None where none can exist, or none fits."""
    try:
        return plan([case], objective=objective, margin=margin, top=1).layouts[0]
    except (NothingFits, LayoutError):
        return None


def with_space(case: Case, **changes: Any) -> Case:
    """The same case with another batch, length or model, all axes as open as they were."""
    return msgspec.structs.replace(case, space=msgspec.structs.replace(case.space, **changes))


def largest_sequence(case: Case, objective: Objective = "time", margin: float = 0.0) -> Answer:
    """The longest sequence that some layout fits, to `STEP` tokens; raises `NothingFits` where not one step fits."""
    limit = case.space.model.max_position_embeddings if case.space.model.learned_positions else None

    def fits(steps: int) -> Estimate | None:
        if limit is not None and steps * STEP > limit:
            return None
        return best_of(with_space(case, seq_len=steps * STEP), objective, margin)

    steps, best = _most(fits)
    if best is None:
        raise NothingFits(f"not even {STEP} tokens of {case.space.model.name} fit")
    return Answer(f"the longest sequence that fits: {steps * STEP:,} tokens", steps * STEP, best)


def _most(fits: Callable[[int], Estimate | None]) -> tuple[int, Estimate | None]:
    """The largest number that fits, by doubling and halving."""
    low, best = 0, None
    high = 1
    while high <= 2**16 and (found := fits(high)) is not None:
        low, best, high = high, found, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        found = fits(middle)
        if found is None:
            high = middle
        else:
            low, best = middle, found
    return low, best


def largest_micro_batch(case: Case, objective: Objective = "time", margin: float = 0.0) -> Answer:
    """The most sequences that one rank can run at once."""
    limit = case.cluster.gpu.capacity - margin
    most = 0
    for batch in case.reading().batches():
        rows = batch.places[batch.memory <= limit] // batch.grid.shape[1]
        if rows.size:
            most = max(most, int(batch.grid.columns["micro_batch"][rows].max()))
    best = best_of(with_space(case, micro_batch=(most,)), objective, margin) if most else None
    if best is None:
        raise NothingFits(f"not even one sequence of {case.space.model.name} fits")
    return Answer(f"the largest micro-batch that fits: {most}", most, best)


def sizes(most: int, node: int) -> Iterator[int]:
    """Numbers of GPUs to try: all up to a node that divide it, then whole nodes.

    >>> list(sizes(32, 8))
    [1, 2, 4, 8, 16, 24, 32]
    """
    yield from (size for size in divisors(node) if size <= most)
    yield from range(2 * node, most + 1, node)


def fewest_gpus(case: Case, objective: Objective = "time", margin: float = 0.0) -> Answer:
    """The fewest GPUs on which some layout fits, of a part of a node or whole nodes; at most those of the case."""
    from loadgauge.search.changes import more_gpus

    for size in sizes(case.space.gpus, case.cluster.gpus_per_node):
        best = best_of(more_gpus(case, size, batch=case.space.global_batch), objective, margin)
        if best is not None:
            return Answer(f"the fewest GPUs that hold it: {size}", size, best)
    raise NothingFits(f"{case.space.model.name} does not fit {case.space.gpus} x {case.cluster.gpu.name}")


def smallest_nic(case: Case, share: float, objective: Objective = "time", margin: float = 0.0) -> Answer:
    """The slowest network adapter with which communication that nothing hides takes at most a share of the step."""
    if len(case.cluster.links) < 2:
        raise ConfigError("the GPUs are all in one domain, and need no adapter", key="find")
    for gigabits in NICS:
        links = (
            *case.cluster.links[:-1],
            msgspec.structs.replace(case.cluster.links[-1], bandwidth=gigabits * 1e9 / 8),
        )
        slower = msgspec.structs.replace(case, cluster=msgspec.structs.replace(case.cluster, links=links))
        best = best_of(slower, objective, margin)
        if best is not None and exposed(best) <= share:
            words = f"{gigabits} Gbit/s for each GPU keep exposed communication at {exposed(best):.1%} of the step"
            return Answer(f"the smallest adapter: {words}", gigabits * 1e9 / 8, best)
    raise NothingFits(f"not even {NICS[-1]} Gbit/s keep exposed communication under {share:.0%} of the step")


def exposed(found: Estimate) -> float:
    """The share of a step that is communication which nothing hides."""
    assert found.time is not None
    return sum(found.time.parts[lane] for lane in COMMUNICATION) / found.time.step


def largest_model(
    case: Case, models: Sequence[ModelSpec], objective: Objective = "time", margin: float = 0.0
) -> Answer:  # fmt: skip
    """Of several models the one with the most parameters that fits; those that are not modelled are passed over."""
    for model in sorted(models, key=lambda model: -parameters(model).total):
        try:
            space: Space = space_for(
                model, case.training, case.space.gpus, case.space.global_batch, case.space.seq_len,
                lengths=case.space.lengths, base=case.space.base,
            )  # fmt: skip
            best = best_of(msgspec.structs.replace(case, space=space), objective, margin)
        except Error:
            continue
        if best is not None:
            return Answer(f"the largest model that fits: {model.name}, {best.params:,} parameters", model.name, best)
    raise NothingFits("none of the models fits")


def cheapest_gpu(case: Case, prices: dict[str, float], margin: float = 0.0) -> list[Answer]:
    """Kinds of GPU, each at its price of an hour, the cheapest step first; those on which nothing fits are left out."""
    found = []
    for name, price in prices.items():
        card = kind_of_gpu(name)
        machines = cluster(card, case.space.gpus)
        best = best_of(msgspec.structs.replace(case, cluster=machines, rates=None, price=price), "money", margin)
        if best is not None and best.time is not None:
            cost = price * case.space.gpus * best.time.step / 3600 / best.time.tokens * 1e9
            found.append(Answer(f"{card.name}: {cost:,.2f} for a billion tokens", cost, best))
    if not found:
        raise NothingFits(f"{case.space.model.name} fits none of {', '.join(prices)}")
    return sorted(found, key=lambda answer: answer.value)
