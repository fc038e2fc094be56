"""The best split of layers is the best of all splits, counted out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from loadgauge import model
from loadgauge.core.base.errors import LayoutError
from loadgauge.core.plan.space.stage_split import balanced, best_split


def every_split(layers: int, stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]


def costs_of(split: tuple[int, ...], costs: list[int], first: int, last: int) -> list[int]:
    ends = list(itertools.accumulate(split))
    each = [sum(costs[stop - size : stop]) for size, stop in zip(split, ends, strict=True)]
    each[0] += first
    each[-1] += last
    return each


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=9), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9))
def test_no_split_has_a_faster_slowest_stage_nor_is_more_even(costs: list[int], p: int, first: int, last: int) -> None:
    stages = min(p, len(costs))
    found = best_split([float(cost) for cost in costs], stages, float(first), float(last))

    def rank(split: tuple[int, ...]) -> tuple[int, int]:
        each = costs_of(split, costs, first, last)
        return max(each), sum(cost**2 for cost in each)

    assert sum(found) == len(costs)
    assert len(found) == stages
    assert rank(found) == min(map(rank, every_split(len(costs), stages)))


def test_limits_of_memory_are_kept() -> None:
    assert best_split([1.0] * 8, 4, most=(1, 2, 3, 8)) == (1, 2, 2, 3)
    with pytest.raises(LayoutError, match="cannot be split"):
        best_split([1.0] * 8, 2, most=(3, 4))


def test_llama_405b_is_split_as_it_was_trained() -> None:
    """One layer fewer on the first and on the last of 16 stages (source: dubey2024, section 3.3.2)."""
    assert balanced(model("llama-3.1-405b"), 16, 8192) == (7, *(8,) * 14, 7)
