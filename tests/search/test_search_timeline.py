"""Schedules played through for many layouts at once take what each takes alone."""

from __future__ import annotations

import numpy as np
import pytest

from loadgauge.estimate.schedule import simulate
from loadgauge.layout import SCHEDULES
from loadgauge.search import timeline


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


def test_pieces_of_the_table_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    times = np.random.default_rng(1).random((4, 50))
    arguments = ("1f1b", 4, 9, range(4), times, times[::-1], 0 * times, times[0])
    whole = timeline.play(*arguments, overlap_send=False)
    monkeypatch.setattr(timeline, "ELEMENTS", 100)
    assert (timeline.play(*arguments, overlap_send=False) == whole).all()
