"""Why reports of users are far off as they are typed: each cause once, with its rows (`published_runs/raw/reported_causes.toml`).

A cause of published tables is a rule on a row's configuration (`causes`); a report states too little for rules, so its rows are
named.
Nothing here moves a prediction or a range.
"""

from __future__ import annotations

import csv
import functools
import tomllib
from collections.abc import Iterable, Mapping

import msgspec

from accuracy.memory_range import ON_CARD, REPORTS, as_typed
from loadgauge.core.base.errors import Error
from loadgauge.core.base.units import GIB
from loadgauge.evidence.validate.counters import Counter, reading

FAR = {"memory": 0.20, "time": 0.25}
"""Absolute error from which a report gets a line that says why."""


class ReportedCause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A known reason for large errors of a quantity. `rows`: the reports that it was seen in."""

    quantity: str
    name: str
    sentence: str
    rows: tuple[str, ...]


@functools.cache
def reported_causes() -> tuple[ReportedCause, ...]:
    """Return the causes, in the order of their file.

    >>> {cause.quantity for cause in reported_causes()} <= set(FAR)
    True
    """
    text = REPORTS.with_name("reported_causes.toml").read_text(encoding="utf-8")
    return tuple(msgspec.convert(tomllib.loads(text)["causes"], list[ReportedCause]))


def memory_errors() -> dict[str, float]:
    """Return predicted / measured - 1 of every report of memory that is predicted, by its id.

    Of a card the total is compared, else the counter of the same name.
    """
    found = {}
    with REPORTS.open(newline="", encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            try:
                estimate = as_typed(row["flags"])
            except Error:
                continue
            shown = estimate.memory.total
            if row["counter"] not in ON_CARD:
                shown = reading(Counter.parse(row["counter"]), estimate).value
            found[row["id"]] = shown / (float(row["gib"]) * GIB) - 1
    return found


def grouped_far(quantity: str, errors: Mapping[str, float]) -> dict[ReportedCause | None, dict[str, float]]:
    """Return the errors of reports that are far off, by their cause; None for those of which none is known.

    errors: of all reports, by id

    >>> {getattr(cause, "name", ""): rows for cause, rows in grouped_far("memory", {"TG1": 0.32, "?": -0.5, "FP1": 0.02}).items()}
    {'lengths are caps': {'TG1': 0.32}, '': {'?': -0.5}}
    """
    far = {name: error for name, error in errors.items() if abs(error) > FAR[quantity]}
    groups: dict[ReportedCause | None, dict[str, float]] = {}
    for cause in (*(one for one in reported_causes() if one.quantity == quantity), None):
        of: Iterable[str] = far if cause is None else cause.rows
        listed = set().union(*groups.values()) if groups else set()
        if rows := {name: far[name] for name in of if name in far and name not in listed}:
            groups[cause] = rows
    return groups


def section(errors: Mapping[str, Mapping[str, float]]) -> str:
    """Return the part of the page of accuracy on reports that are far off. errors: by quantity and id"""
    lines = ["## Reports wrong by more than 20 % (memory) or 25 % (time)"]
    for quantity, of in errors.items():
        groups = grouped_far(quantity, of)
        unknown = len(groups.get(None, ()))
        lines.append(
            f"Of {len(of)} reports of {quantity}, as typed, {sum(map(len, groups.values()))}; of {unknown} the cause is unknown."
        )
        for cause, rows in groups.items():
            listed = ", ".join(f"{name} {100 * error:+.0f} %" for name, error in rows.items())
            why = "**unknown**" if cause is None else f"**{cause.name}**"
            words = "No evidence was found." if cause is None else cause.sentence
            lines.append(f"{quantity}: {why} ({len(rows)} rows). {words} {listed}")
    return "\n\n".join(lines)
