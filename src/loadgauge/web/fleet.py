"""The page's fleet: the run of the flags with failures, spares and checkpoints, as figures."""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.fleet.fleet import Fleet, Options, fleet
from loadgauge.report.fleet import verdict
from loadgauge.web.flags import State, job_of
from loadgauge.web.uploads import Uploads

RUNS, BINS, MARKS = 300, 24, 400
"""Simulated runs, columns of their distribution, and failures of the timeline."""
TOKENS = "1T"
"""Of a run whose length is not said."""


class OfFleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The flags, and those of `loadgauge fleet` that the page offers. spares: per cent; every: minutes (None: the best)"""

    flags: State
    spares: float = 1.0
    every: float | None = None
    failures: str = "studies"
    recover: str = "restart"


def answer(question: OfFleet, uploads: Uploads) -> dict[str, Any]:
    """Simulate the run: the document of `loadgauge fleet --json`, and what is drawn of it. Raises `Error` without an answer."""
    if question.failures.endswith(".toml"):
        raise ConfigError("files are read by `loadgauge fleet` alone", key="failures")
    given = job_of(question.flags, uploads)
    result = given.estimate()
    every = "async" if question.every is None else f"async:{question.every * 60:.3f}s"
    options = Options(
        failures=question.failures,
        spares=f"{question.spares:g}%",
        checkpoint=every,
        recover=question.recover,
        runs=RUNS,
    )
    found = fleet(result, given.job.tokens or TOKENS, options, price=given.job.price)
    return {
        **found.to_dict(),
        "events": [
            [event.at / 86_400, event.cause, event.redone + event.down] for event in found.outcome.events[:MARKS]
        ],
        "first_days": float(found.outcome.seconds[0]) / 86_400,
        "bins": bins(found),
        "said": verdict(found),
        "assumed_tokens": None if given.job.tokens else TOKENS,
    }


def bins(found: Fleet) -> dict[str, Any]:
    """Return how many runs take how many days, in columns of one width."""
    import numpy

    days = found.outcome.seconds / 86_400
    counts, edges = numpy.histogram(days, bins=BINS)
    return {"counts": counts.tolist(), "low": float(edges[0]), "high": float(edges[-1])}
