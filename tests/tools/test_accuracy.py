"""The page of accuracy: cross-validation, why rows are far off, and that the page says what the records say."""

from __future__ import annotations

import csv

import pytest

from accuracy.causes import CAUSES, FAR, far_off
from accuracy.page import page
from accuracy.reports import FAR as REPORTS_FAR, grouped_far, memory_errors, reported_causes, section
from accuracy.samples import samples
from accuracy.slack import REPORTS as TIMES
from loadgauge.evidence.validate.runs import Run, published
from loadgauge.evidence.validate.summary import errors
from loadgauge.evidence.validate.validate import validate
from published_runs.tables import published as source_rows

RUNS = {run.id: run for run in published().runs}


def source(*names: str, quality: str = "ABC") -> list[Run]:
    return [run for run in RUNS.values() if run.series in names and run.quality in quality]


def test_a_configuration_weighs_one_in_a_fit() -> None:
    pairs = samples(source("SM"))["b200-sxm-180gb"]
    assert len(pairs) == 43
    total: dict[object, float] = {}
    for run, sample in pairs:
        total[run.configuration] = total.get(run.configuration, 0) + sample.weight
    assert all(weight == pytest.approx(1) for weight in total.values())


# -- why ---------------------------------------------------------------------------------------------------------------


def test_every_row_that_is_far_off_is_listed_once() -> None:
    runs = source("LG", "MCI", "AO", quality="AB")
    found = validate(runs)
    listed = [one.id + one.quantity for group in far_off(found, source_rows()).values() for one in group]
    far = [one.id + one.quantity for one in found if one.error is not None and abs(one.error) > FAR]
    assert sorted(listed) == sorted(far)
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)


def test_every_report_that_is_far_off_is_listed_once() -> None:
    found = memory_errors()
    groups = grouped_far("memory", found)
    listed = [name for rows in groups.values() for name in rows]
    assert sorted(listed) == sorted(name for name, error in found.items() if abs(error) > REPORTS_FAR["memory"])
    text = section({"memory": found})
    assert all(f"{name} {100 * found[name]:+.0f} %" in text for name in listed)
    assert len(groups[None]) <= 13  # those of which no cause is known
    with TIMES.open(encoding="utf-8") as file:
        known = {"memory": set(found), "time": {row["id"] for row in csv.DictReader(file)}}
    for quantity, ids in known.items():
        named = [row for cause in reported_causes() if cause.quantity == quantity for row in cause.rows]
        assert len(named) == len(set(named))
        assert set(named) <= ids


def test_the_page_states_what_the_records_say() -> None:
    runs = source("KOR", "SM")
    found = validate(runs)
    text = page(found, runs)
    assert "| T-" not in text
    median = errors([one for one in found if one.quantity == "time" and one.source == "SM"]).median
    assert median is not None
    assert f"| time: loadgauge | {100 * median:.1f} % |" in text
    assert text.count("\n| megatron-22B") + text.count("\n| gpt3-175B") == 4
