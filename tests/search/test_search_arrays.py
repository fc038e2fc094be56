"""The array reading is the reading of whole numbers: the same layouts, bytes and seconds, one by one."""

from __future__ import annotations

import pytest
from spaces import CASES, alone, case, every_layout, read, some

from loadgauge.layout import Layout


@pytest.mark.parametrize("name", CASES)
def test_the_layouts_are_those_that_are_valid_one_by_one(name: str) -> None:
    given = CASES[name]
    assert set(read(given)) == set(every_layout(given))


@pytest.mark.parametrize("name", CASES)
def test_memory_and_time_are_those_of_each_alone(name: str) -> None:
    given = CASES[name]
    found = read(given)
    for layout in some(list(found), 40):
        memory, step = alone(given, layout)
        assert found[layout][0] == pytest.approx(memory, abs=0.5), layout
        assert found[layout][1] == pytest.approx(step, rel=1e-9), layout


def test_a_grid_cut_in_pieces_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case("llama-3.1-8b", 4, 8, schedule=("1f1b", "zb-h1"))
    whole = read(given)
    monkeypatch.setattr("loadgauge.search.space.ELEMENTS", 7)
    assert read(given) == whole


def test_every_axis_is_walked() -> None:
    found = list(read(CASES["experts"]))
    for axis in (
        "dp",
        "tp",
        "pp",
        "cp",
        "ep",
        "etp",
        "vpp",
        "zero",
        "replicas",
        "micro_batch",
        "recompute",
        "schedule",
    ):
        assert len({getattr(layout, axis) for layout in found}) > 1, axis
    assert isinstance(found[0], Layout)
