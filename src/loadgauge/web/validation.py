"""Predictions compared with published runs, some rows at a time: all of them take about a minute."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from loadgauge.validate.runs import Run, published
from loadgauge.validate.summary import summary
from loadgauge.validate.validate import Record, validate

FIRST, SECONDS = 0.3, 1.0
"""Seconds of work for the first answer, and for each later one."""
STRIDE = 617
"""Step through the rows, so that the first ones cover every source."""


class Done:
    """The records so far, and the number of runs they cover."""

    records: tuple[Record, ...] = ()
    runs = 0


@cache
def order() -> tuple[Run, ...]:
    """Return the published runs, mixed so that the first rows are of many sources."""
    runs = published().runs
    stride = STRIDE if len(runs) % STRIDE else STRIDE + 2
    return tuple(runs[place * stride % len(runs)] for place in range(len(runs)))


def some(since: int = 0) -> dict[str, Any]:
    """Validate more runs for about a second; return the records from number `since` on, the progress and the summary."""
    runs = order()
    end = time.perf_counter() + (SECONDS if Done.runs else FIRST)
    while Done.runs < len(runs) and time.perf_counter() < end:
        Done.records += validate(runs[Done.runs : Done.runs + 1])
        Done.runs += 1
    start = since if since <= len(Done.records) else 0
    return {
        "rows": [record.to_dict() for record in Done.records[start:]],
        "since": start,
        "done": Done.runs,
        "of": len(runs),
        "complete": Done.runs == len(runs),
        "summary": summary(Done.records),
    }
