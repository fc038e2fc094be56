"""How large the errors are: weighted by configuration and by source, never by row."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

import msgspec

from loadgauge.validate.validate import Record


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Of the rows of a group: how many are expressible, and median and 90th percentile of the absolute error.

    Each configuration weighs 1, shared by its rows; `bias` is the weighted median of the signed error. None where no
    row has a prediction.
    """

    rows: int
    expressible: int
    configurations: int
    median: float | None
    p90: float | None
    bias: float | None
    mean: float | None
    largest: float | None

    @property
    def share(self) -> float:
        """Expressible rows over all rows."""
        return self.expressible / self.rows if self.rows else 0.0


def errors(records: Iterable[Record], equal_sources: bool = False) -> Errors:
    """The errors of a group of records. `equal_sources`: each source weighs the same, its configurations share that."""
    every = tuple(records)
    found = [record for record in every if record.error is not None]
    weights = configuration_weights(found)
    if equal_sources:
        total: dict[str, float] = {}
        for record, weight in zip(found, weights, strict=True):
            total[record.source] = total.get(record.source, 0.0) + weight
        weights = [weight / total[record.source] for record, weight in zip(found, weights, strict=True)]
    signed = [record.error for record in found if record.error is not None]
    sizes = [abs(error) for error in signed]
    return Errors(
        rows=len(every),
        expressible=len(found),
        configurations=len({record.configuration for record in found}),
        median=quantile(sizes, weights, 0.5),
        p90=quantile(sizes, weights, 0.9),
        bias=quantile(signed, weights, 0.5),
        mean=sum(map(_product, sizes, weights)) / sum(weights) if found else None,
        largest=max(sizes, default=None),
    )


def _product(left: float, right: float) -> float:
    return left * right


def configuration_weights(records: Sequence[Record]) -> list[float]:
    """1 for each configuration, shared by its rows."""
    count: dict[object, int] = {}
    for record in records:
        count[record.configuration] = count.get(record.configuration, 0) + 1
    return [1 / count[record.configuration] for record in records]


def quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the weight does not exceed; None of nothing.

    >>> quantile([0.1, 0.2, 0.9], [1, 1, 1], 0.5), quantile([0.1, 0.9], [1, 3], 0.5), quantile([], [], 0.5)
    (0.2, 0.9, None)
    """
    if not values:
        return None
    ordered = sorted(zip(values, weights, strict=True))
    wanted = share * math.fsum(weights)
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted - 1e-9:
            return value
    return ordered[-1][0]


def grouped(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, tuple[Record, ...]]:
    """The records by a key, in order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return {name: tuple(group) for name, group in groups.items()}


def reasons(records: Iterable[Record]) -> dict[str, int]:
    """Why rows have no prediction, and how many; numbers and names inside a reason are taken out of it."""
    count: dict[str, int] = {}
    for record in records:
        if record.reason:
            kind = reason_kind(record.reason)
            count[kind] = count.get(kind, 0) + 1
    return dict(sorted(count.items(), key=lambda item: -item[1]))


def reason_kind(reason: str) -> str:
    """A reason without its particulars.

    >>> reason_kind("micro-batches over pp (interleaved schedule): 5 over 4 leaves 1")
    'micro-batches over pp (interleaved schedule): N over N leaves N'
    """
    text = re.sub(r" \(known: .*?\)", "", reason.partition("; did you mean")[0])
    return re.sub(r"(?<![\w.])\d[\d.,]*(?![\w])", "N", text)


def summary(records: Sequence[Record]) -> dict[str, object]:
    """The `summary` of `validate --json`: overall, by quality and by source, for each quantity."""
    found: dict[str, object] = {}
    for quantity in ("time", "memory"):
        of = [record for record in records if record.quantity == quantity]
        if not of:
            continue
        found[quantity] = {
            "all": msgspec.to_builtins(errors(of)),
            "by_quality": {
                name: msgspec.to_builtins(errors(group))
                for name, group in sorted(grouped(of, lambda record: record.quality).items())
            },
            "by_source": {
                name: msgspec.to_builtins(errors(group))
                for name, group in sorted(grouped(of, lambda record: record.source).items())
            },
            "reasons": reasons(of),
        }
    return found
