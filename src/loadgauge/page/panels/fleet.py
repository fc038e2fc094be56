"""The page's fleet: the run of the flags with failures, spares and checkpoints, as figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.core.base import Door, refuse
from loadgauge.core.base.sources import cite
from loadgauge.page.inputs.flags import State, job_of
from loadgauge.page.inputs.uploads import Uploads
from loadgauge.page.panels.reasons import UNITS, Step, shown

if TYPE_CHECKING:
    from loadgauge.fleets.fleet import Fleet

FLEETS = Door("fleets")

RUNS, BINS, MARKS, COLUMNS = 300, 24, 150, 200
"""Simulated runs, columns of their distribution, failures that are drawn one by one, and the timeline's columns of more."""
TOKENS = "1T"
"""Of a run whose length is not said."""


class OfFleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The flags, and those of `loadgauge fleet` that the page offers. spares: per cent; every: minutes (None: the best)

    why: the number that is to be explained, as `loadgauge fleet --explain` has it; empty for the whole answer
    """

    flags: State
    spares: float = 1.0
    every: float | None = None
    failures: str = "studies"
    recover: str = "restart"
    why: str = ""


def answer(question: OfFleet, uploads: Uploads) -> dict[str, Any]:
    """Simulate the run: the document of `loadgauge fleet --json`, and what is drawn of it; or why one of its numbers is what it is.

    Raises `Error` without an answer.
    """
    refuse(question.failures.endswith(".toml"), "files are read by `loadgauge fleet` alone", key="failures")
    setup = job_of(question.flags, uploads)
    result = setup.estimate()
    every = "async" if question.every is None else f"async:{question.every * 60:.3f}s"
    options = FLEETS.Options(
        failures=question.failures,
        spares=f"{question.spares:g}%",
        checkpoint=every,
        recover=question.recover,
        runs=RUNS,
    )
    fleet = FLEETS.fleet(result, setup.job.tokens or TOKENS, options, price=setup.job.price)
    if question.why:
        return explained(fleet, question.why)
    return {
        **fleet.to_dict(),
        "events": [
            [event.at / 86_400, event.cause, event.redone + event.down] for event in fleet.outcome.events[:MARKS]
        ],
        "columns": columns(fleet) if len(fleet.outcome.events) > MARKS else [],
        "first_days": float(fleet.outcome.seconds[0]) / 86_400,
        "bins": bins(fleet),
        "said": FLEETS.verdict(fleet),
        "assumed_tokens": None if setup.job.tokens else TOKENS,
    }


def columns(fleet: Fleet) -> list[list[float]]:
    """Return for each stretch of the first run how many interruptions begin in it, and the share of it that they take."""
    whole = float(fleet.outcome.seconds[0])
    rows = [[0.0, 0.0] for _ in range(COLUMNS)]
    for event in fleet.outcome.events:
        row = rows[min(COLUMNS - 1, int(COLUMNS * event.at / whole))]
        row[0] += 1
        row[1] += (event.redone + event.down) * COLUMNS / whole
    return rows


def explained(fleet: Fleet, topic: str) -> dict[str, Any]:
    """Return why a number is what it is, as the page shows reasons; shares with what they are summed from."""
    why = FLEETS.reason(fleet, topic)
    shares = [row for row in why.rows if isinstance(row[1], float) and len(row) < 4 and topic != "days"]
    words = {name: f"fleet.time.{name.replace(' ', '-')}" for name in fleet.names}
    steps = [
        Step(words.get(str(row[0]), str(row[0])), float(row[1]), "share", note=str(row[2]) if len(row) > 2 else "")
        for row in shares
    ]
    why = msgspec.structs.replace(why, sources=tuple(str(cite(key)) for key in why.sources))
    return shown(0.0 if why.value is None else why.value, UNITS.get(why.unit, why.unit), why, why.lines, steps)


def bins(fleet: Fleet) -> dict[str, Any]:
    """Return how many runs take how many days, in columns of one width."""
    import numpy

    days = fleet.outcome.seconds / 86_400
    counts, edges = numpy.histogram(days, bins=BINS)
    return {"counts": counts.tolist(), "low": float(edges[0]), "high": float(edges[-1])}
