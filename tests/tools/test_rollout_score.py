"""Published steps with a rollout: predicted with a factor that the other source's steps gave (docs/rollout.md)."""

from __future__ import annotations

import statistics

import pytest

from loadgauge.core.post_training.step import HIGH, LOW, SOFTWARE
from rollout.score import scored


@pytest.mark.long
def test_steps_of_a_source_take_what_the_other_source_says() -> None:
    rows, factors, _ = scored()
    assert {row["source"] for row, _, _ in rows} == {"nemo-rl", "verl"}
    off = [abs(predicted / step - 1) for _, step, predicted in rows]
    assert len(off) == 50
    assert statistics.median(off) < 0.15
    assert statistics.quantiles(off, n=10, method="inclusive")[-1] < 0.37
    h100 = [abs(predicted / step - 1) for row, step, predicted in rows if row["gpu"].startswith("h100")]
    assert statistics.quantiles(h100, n=10, method="inclusive")[-1] < 0.29
    inside = [LOW < step / predicted < HIGH for _, step, predicted in rows]
    assert sum(inside) / len(inside) >= 0.75
    assert min(factors.values()) <= SOFTWARE <= max(factors.values())
