"""What people chose: the planner's space has it, and by our own model nothing that people chose beats the planner."""

from __future__ import annotations

import pytest

from accuracy.choices import choose, configurations
from loadgauge.evidence.validate.runs import published

ROWS = ("T-KOR-002", "T-KOR-004", "T-SC21-001", "T-SC21-004", "T-MB-007", "T-MB-068", "T-MB-069")
"""Dense models and one of experts, on 8 to 256 GPUs; `docs/planner.md` has all of them."""


@pytest.mark.parametrize("row", ROWS)
def test_a_published_layout_is_in_the_space_and_the_best_is_no_slower(row: str) -> None:
    rows, job = next(pair for pair in configurations(published().runs) if row in pair[0])
    choice = choose(rows, job)
    assert choice.found
    assert choice.published.memory.verdict != "does not fit"  # it ran
    for other in (choice.best, choice.alike):
        gain = choice.gain(other)
        assert gain is not None
        # A plan gives what surely fits; what people chose may be faster where it may not fit.
        assert gain >= 1 - 1e-9 or (choice.published.memory.verdict, other.memory.verdict) == ("tight", "fits")
    assert choice.gain(choice.best) >= choice.gain(choice.alike)  # type: ignore[operator]


def test_there_are_many() -> None:
    found = configurations(published().runs)
    assert len(found) > 100
    assert {rows[0].split("-")[1] for rows, _ in found} == {"KOR", "SC21", "MB"}
