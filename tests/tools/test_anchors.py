"""Pairs of published runs, of which the first moves the second: which are one stack, and what a moved step keeps to."""

from __future__ import annotations

import msgspec
import pytest

from accuracy.anchors import Pair, on_one_node, one_stack, time_pairs
from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.hardware.calibration import slowed
from loadgauge.core.estimate.estimate import estimate
from loadgauge.evidence.validate.runs import Run, published, setup_of
from loadgauge.evidence.validate.validate import validate
from published_runs.tables import published as source_rows

RUNS = {run.id: run for run in published().runs}
ROWS = {row.id: row for row in source_rows()}


def pairs_of(series: str) -> list[Pair]:
    runs = [run for run in RUNS.values() if run.series == series]
    return time_pairs(validate(runs, ("time",)), runs)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("T-IE-001", "T-IE-008", True),
        ("T-NEMO-014", "T-NEMO-006", True),
        ("T-NEMO-014", "T-NEMO-024", False),  # another release's document
        ("T-TT-002", "T-TT-009", True),
        ("T-TT-002", "T-TT-001", False),  # compiled
        ("T-TT-002", "T-TT-003", False),  # in 8 bits
        ("T-LLMF-149", "T-LLMF-025", False),  # another card
    ],
)
def test_what_one_stack_is(one: str, other: str, alike: bool) -> None:
    assert (one_stack(RUNS[one], ROWS[one]) == one_stack(RUNS[other], ROWS[other])) == alike


def test_a_node_is_as_large_as_its_source_says() -> None:
    assert [on_one_node(RUNS[name], ROWS[name]) for name in ("T-IE-001", "T-IE-002")] == [True, False]


def test_an_anchor_does_not_look_at_what_it_predicts() -> None:
    """What the second run of a pair measured changes its error alone, in proportion."""
    runs = [run for run in RUNS.values() if run.series == "TT"]
    records = validate(runs, ("time",))
    before = time_pairs(records, runs)
    name = before[0].run
    twice = [
        msgspec.structs.replace(record, measured=2 * record.measured)
        if record.id == name and record.measured
        else record
        for record in records
    ]
    after = {pair.run: pair.anchored for pair in time_pairs(twice, runs)}
    assert 1 + before[0].anchored == pytest.approx(2 * (1 + after[name]))
    assert all(pair.anchored == after[pair.run] for pair in before[1:])


@pytest.mark.slow
def test_the_range_of_a_moved_answer_holds_four_of_five() -> None:
    pairs = [pair for series in ("IE", "LLMF", "TT", "NEMO") for pair in pairs_of(series)]
    inside = [pair.inside for pair in pairs if pair.stack]
    assert 0.75 <= sum(inside) / len(inside) <= 0.9


SAMPLE = [run for run in RUNS.values() if run.job is not None][::40]


@pytest.mark.parametrize("run", SAMPLE, ids=lambda run: run.id)
def test_a_step_of_which_all_takes_k_times_as_long_takes_k_times_as_long(run: Run) -> None:
    """Time is homogeneous in what a run may move: kernels, hosts, links, network."""
    try:
        setup = setup_of(run)
        assert setup.cluster is not None
        usual = estimate(setup.model, setup.layout, setup.training, setup.gpu, setup.cluster).timing
    except (Error, AssertionError):
        pytest.skip("its time is not predicted")
    cluster = slowed(setup.cluster, (1.7, 1.7, 1.7))
    after = estimate(setup.model, setup.layout, setup.training, setup.gpu, cluster).timing
    assert after.step == pytest.approx(1.7 * usual.step)
    assert after.parts == pytest.approx({lane: 1.7 * value for lane, value in usual.parts.items()})
