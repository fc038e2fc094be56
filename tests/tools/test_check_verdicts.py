"""A sample of `tools/check_verdicts.py`: the four definitions hold for random jobs, and it sees where they do not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from check_verdicts import checked, drawn
from compare_answers import entry_point, names_of
from verdicts import violations


@pytest.mark.long
def test_random_jobs_agree_in_all_their_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, pick = entry_point(), random.Random(5)
    jobs = drawn(names_of(run, tmp_path, pick), pick)
    seen = [checked(run, next(jobs)) for _ in range(20)]
    assert not [faults for _, faults in seen if faults]
    assert len({verdict for verdict, _ in seen}) > 2


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"low": 9.0}, "outside its range"),
        ({"capacity": 4.0}, "by the range does not fit"),
        ({"fits": False}, "fits is False"),
    ],
)
def test_what_goes_against_the_definitions_is_seen(change: dict[str, Any], fault: str) -> None:
    memory = {"total": 6.0, "low": 5.0, "high": 7.0, "capacity": 8.0, "verdict": "fits", "fits": True}
    line = "FITS  0.0 GiB of 0.0 GiB, 80 % range 0.0-0.0 GiB"
    assert violations(memory, 0, line) == []
    assert any(fault in each for each in violations(memory | change, 0, line))
