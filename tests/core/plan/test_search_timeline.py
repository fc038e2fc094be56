"""Schedules played through for many layouts at once take what each takes alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from loadgauge.core.definitions.layout.layout import SCHEDULES
from loadgauge.core.estimate.schedule.simulate import simulate, violation
from loadgauge.core.plan.batch import schedule as timeline


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (4, 8), (4, 12)])
def test_each_layout_takes_what_its_simulation_takes(schedule: str, stages: int, batches: int, overlap: bool) -> None:
    rng = np.random.default_rng(stages + batches)
    split = schedule not in ("1f1b", "gpipe", "interleaved")
    chunks = 3 if schedule == "interleaved" else 2 if schedule in ("zb-v", "dualpipe", "dualpipev") else 1
    rows, layouts = stages * chunks, 5
    forward, backward = rng.random((rows, layouts)), rng.random((rows, layouts))
    weight = rng.random((rows, layouts)) * split
    send = rng.random(layouts) / 5
    found = timeline.play(
        schedule, stages, batches, range(rows), forward, backward, weight, send, overlap_send=overlap
    )  # fmt: skip
    for layout in range(layouts):
        f, b, w = (each[:, layout].reshape(stages, chunks).tolist() for each in (forward, backward, weight))
        played = simulate(
            schedule, stages, batches, forward=f, backward=b, weight=w if split else 0, send=send[layout],
            overlap_send=overlap, chunks=chunks if schedule == "interleaved" else None,
        )  # fmt: skip
        assert found[layout] == pytest.approx(played.total, rel=1e-12)


SIZES = {  # micro-batches that each schedule can run on so many stages
    (schedule, stages): [
        batches for batches in range(1, 13)
        if not violation(schedule, stages, batches, 2 if schedule == "interleaved" else None)
    ]
    for schedule in SCHEDULES for stages in (2, 4)
}  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(st.sampled_from([key for key, sizes in SIZES.items() if sizes]), st.data())
def test_no_layout_takes_less_than_the_least(key: tuple[str, int], data: st.DataObject) -> None:
    schedule, stages = key
    batches = data.draw(st.sampled_from(SIZES[key]))
    chunks = 2 if schedule in ("interleaved", "zb-v", "dualpipe", "dualpipev") else 1
    rows = data.draw(st.integers(1, stages * chunks))
    kinds = data.draw(st.lists(st.integers(0, rows - 1), min_size=stages * chunks, max_size=stages * chunks))
    if schedule == "dualpipe":  # what is on chunk 0 of a stage is on chunk 1 of its mirror image
        kinds[1::2] = kinds[::2][::-1]
    times = st.lists(st.floats(0, 1), min_size=rows, max_size=rows)
    forward, backward = (np.array(data.draw(times))[:, None] for _ in range(2))
    weight = np.array(data.draw(times))[:, None] * (schedule not in ("1f1b", "gpipe", "interleaved"))
    send, overlap = np.array([data.draw(st.floats(0, 1))]), data.draw(st.booleans())
    played = timeline.play(schedule, stages, batches, kinds, forward, backward, weight, send, overlap_send=overlap)
    assert timeline.least(schedule, stages, batches, kinds, forward, backward + weight, send) <= played


@pytest.mark.parametrize("chunks", [1, 3])
def test_with_equal_stages_and_free_sends_the_least_is_what_it_takes(chunks: int) -> None:
    schedule, ones, none = "1f1b" if chunks == 1 else "interleaved", np.ones((1, 1)), np.zeros((1, 1))
    for stages, batches in ((2, 4), (4, 8), (8, 24)):
        kinds = [0] * stages * chunks
        played = timeline.play(schedule, stages, batches, kinds, ones, 2 * ones, none, none[0], overlap_send=True)
        found = timeline.least(schedule, stages, batches, kinds, ones, 2 * ones, none[0])
        assert found == pytest.approx(played, rel=1e-8)
        assert found == pytest.approx(3 * (batches * chunks + stages - 1), rel=1e-8)  # source: narayanan2021, 2.2


def test_pieces_of_the_table_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    times = np.random.default_rng(1).random((4, 50))
    arguments = ("1f1b", 4, 9, range(4), times, times[::-1], 0 * times, times[0])
    whole = timeline.play(*arguments, overlap_send=False)
    monkeypatch.setattr(timeline, "ELEMENTS", 100)
    assert (timeline.play(*arguments, overlap_send=False) == whole).all()
