"""How large the errors are: weighted by configuration and by source, never by row."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import msgspec

from loadgauge.core.base.by_key import lists
from loadgauge.evidence.validate.validate import Record


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Of the rows of a group: how many have a prediction, and median and 90th percentile of the absolute error [share of 1].

    Each configuration weighs 1, split evenly over its rows; `bias` is the weighted median of the signed error. None where
    no row has a prediction.
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
        """Rows with a prediction over all rows."""
        return self.expressible / self.rows if self.rows else 0.0


def errors(records: Iterable[Record]) -> Errors:
    """Return the errors of a group of records: median, 90th percentile and bias of predicted over measured."""
    every = tuple(records)
    predicted = [record for record in every if record.error is not None]
    weights = configuration_weights(predicted)
    signed = [record.error for record in predicted if record.error is not None]
    sizes = [abs(error) for error in signed]
    return Errors(
        rows=len(every),
        expressible=len(predicted),
        configurations=len({record.configuration for record in predicted}),
        median=quantile(sizes, weights, 0.5),
        p90=quantile(sizes, weights, 0.9),
        bias=quantile(signed, weights, 0.5),
        mean=sum(size * weight for size, weight in zip(sizes, weights, strict=True)) / sum(weights) if sizes else None,
        largest=max(sizes, default=None),
    )


def configuration_weights(records: Sequence[Record]) -> list[float]:
    """Return the weight of each record: 1 over the number of records of its configuration."""
    count = Counter(record.configuration for record in records)
    return [1 / count[record.configuration] for record in records]


def quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float | None:
    """Return the weighted quantile: the smallest value that at least `share` of the weight does not exceed; None of nothing.

    >>> quantile([0.1, 0.2, 0.9], [1, 1, 1], 0.5), quantile([0.1, 0.9], [1, 3], 0.5), quantile([], [], 0.5)
    (0.2, 0.9, None)
    """
    if not values:
        return None
    ordered = sorted(zip(values, weights, strict=True))
    wanted = share * math.fsum(weights)
    reached = accumulate(weight for _, weight in ordered)
    values_reached = zip(ordered, reached, strict=True)
    return next((value for (value, _), weight in values_reached if weight >= wanted - 1e-9), ordered[-1][0])


def grouped(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, tuple[Record, ...]]:
    """Group records by a key, in order of first appearance."""
    return {name: tuple(group) for name, group in lists((key(record), record) for record in records).items()}


def reasons(records: Iterable[Record]) -> dict[str, int]:
    """Count why rows have no prediction, the most frequent reason first; numbers in a reason are replaced by N."""
    return dict(Counter(reason_kind(record.reason) for record in records if record.reason).most_common())


def reason_kind(reason: str) -> str:
    """Return a reason without its particulars, so that equal kinds compare equal.

    >>> reason_kind("num_experts over ep: 5 over 4 leaves 1")
    'num_experts over ep: N over N leaves N'
    """
    text = re.sub(r" \(known: .*?\)", "", reason.partition("; did you mean")[0])
    return re.sub(r"(?<![\w.])\d[\d.,]*(?![\w])", "N", text)


def summary(records: Sequence[Record]) -> dict[str, object]:
    """Return the `summary` of `validate --json`: `Errors` overall, by quality and by source, for each quantity."""

    def by(of: Sequence[Record], key: Callable[[Record], str]) -> dict[str, object]:
        return {name: msgspec.to_builtins(errors(group)) for name, group in sorted(grouped(of, key).items())}

    return {
        quantity: {
            "all": msgspec.to_builtins(errors(of)),
            "by_quality": by(of, lambda record: record.quality),
            "by_source": by(of, lambda record: record.source),
            "reasons": reasons(of),
        }
        for quantity in ("time", "memory")
        if (of := [record for record in records if record.quantity == quantity])
    }
