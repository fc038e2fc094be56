"""The range of memory: what is left out decides it, and it holds what it says."""

from __future__ import annotations

import math
import random

import pytest

from accuracy.memory_range import (
    CARD,
    COMMON,
    IDLE,
    RARE,
    Residual,
    bounds,
    calibrated_level,
    centred,
    covered,
    distances,
    factors,
    floor_of,
    left_out,
    middles,
    pool,
    ranges,
    reported,
    residual,
    text,
)
from loadgauge.core.definitions.training.memory_range import COVERAGE, MemoryRange, memory_range


def made(sources: int, rows: int, spread: float, bias: float = 0.0, stack: str = "pretraining") -> list[Residual]:
    """Residuals of sources that each have a bias of their own, drawn from one distribution."""
    draw = random.Random(1)
    return [
        Residual(f"S{source}", stack, bias + shift + draw.gauss(0, spread / 2), 1 / rows)  # type: ignore[arg-type]
        for source in range(sources)
        for shift in [draw.gauss(0, spread)]
        for _ in range(rows)
    ]


def test_a_new_source_has_about_80_percent_of_its_rows_inside() -> None:
    found = made(100, 20, 0.1)
    known, unseen = found[:1000], found[1000:]
    low, high = bounds(known, calibrated_level(known))
    inside = sum(math.log(low) <= one.value <= math.log(high) for one in unseen) / len(unseen)
    assert inside == pytest.approx(COVERAGE, abs=0.05)


def test_the_level_is_the_lowest_that_covers_what_is_left_out() -> None:
    found = made(8, 10, 0.1)
    level = calibrated_level(found)
    assert covered(left_out(found, level)) >= COVERAGE
    assert covered(left_out(found, level - 0.01)) < COVERAGE


def test_a_source_that_is_left_out_does_not_touch_its_own_range() -> None:
    found = made(6, 10, 0.1)
    moved = [one._replace(value=one.value + 5) if one.source == "S0" else one for one in found]
    before, after = (next(one for one in left_out(rows, 0.9) if one.source == "S0") for rows in (found, moved))
    assert (before.low, before.high) == (after.low, after.high)
    assert after.covered == 0


def test_a_bias_moves_the_range_and_the_prediction_stays_in_it() -> None:
    low, high = bounds(made(8, 10, 0.02, bias=0.3), 0.8)
    assert low == 1
    assert high > math.exp(0.3)


def cards(stack: str, spread: float, bias: float = 0.0) -> list[Residual]:
    """Rows of 10 sources of a class of cards."""
    name = f"{stack}{CARD}"
    rows = made(10, 4, spread, bias)
    return [one._replace(source=f"{stack} {one.source}", stack=name, card=name, floor=-0.2) for one in rows]


def test_a_range_of_cards_is_as_wide_as_the_rows_of_its_class_lie_apart() -> None:
    """By hand: the stretch of all rows in distances of their class, times the distance of the class."""
    near, far = cards("fine-tuning", 0.05), cards("adapters", 0.2)
    found = near + far
    by = distances(found)
    of_all = math.log(sum(abs(one.value) for one in found) / 80 + 1e-3)
    of_near = math.log(sum(abs(one.value) for one in near) / 40 + 1e-3)
    assert by[f"fine-tuning{CARD}"] == pytest.approx(math.exp((10 * of_near + COMMON * of_all) / (10 + COMMON)))
    scores = sorted(one.value / by[one.card] for one in found)
    low, high = (math.log(end) / by[f"adapters{CARD}"] for end in factors(found, f"adapters{CARD}", 0.8))
    assert sum(low - 1e-9 <= score <= high + 1e-9 for score in scores) == 64
    widths = [factors(found, f"{name}{CARD}", 0.8) for name in ("fine-tuning", "adapters")]
    assert widths[0][1] - widths[0][0] < (widths[1][1] - widths[1][0]) / 2


def test_few_cards_show_less_than_the_floor() -> None:
    found = [one._replace(floor=one.value - 0.01 * number) for number, one in enumerate(cards("adapters", 0.1))]
    below = sum(one.value - one.floor < math.log(floor_of([*found])) - 1e-9 for one in found)
    assert below == 0  # none is below its own floor, so that the factor is 1
    under = [one._replace(floor=one.value + 0.01 * number) for number, one in enumerate(cards("adapters", 0.1))]
    factor = math.log(floor_of(under))
    assert sum(one.value - one.floor < factor - 1e-9 for one in under) == round(RARE * len(under))


def test_few_sources_are_pooled() -> None:
    found = made(6, 4, 0.1) + made(2, 4, 0.1, stack="fine-tuning")
    assert len(pool(found, "pretraining")) == 24
    assert len(pool(found, "fine-tuning")) == 32


def test_adapters_and_what_a_card_holds_are_classes_of_their_own() -> None:
    found = made(6, 4, 0.1) + made(6, 4, 0.1, stack="adapters") + made(6, 4, 0.1, stack=f"pretraining{CARD}")
    assert [len(pool(found, stack)) for stack in ("FSDP", "adapters", f"adapters{CARD}", f"FSDP{CARD}")] == [
        24,
        24,
        24,
        24,
    ]
    assert pool(found, f"adapters{CARD}") == pool(found, f"pretraining{CARD}")


def test_the_middle_of_cards_is_drawn_to_that_of_all_and_left_out_with_its_source() -> None:
    few = [one for one in cards("adapters", 0.001, 0.1) if one.source.endswith("S0")]
    found = cards("fine-tuning", 0.001, 0.3) + few
    by = middles(found)
    assert by[f"fine-tuning{CARD}"] == pytest.approx(0.3, abs=0.01)
    assert by[f"adapters{CARD}"] == pytest.approx((0.1 + COMMON * 0.3) / (1 + COMMON), abs=0.01)
    assert by[f"FSDP{CARD}"] == pytest.approx(0.3, abs=0.01)  # of no source of its own
    assert next(one.covered for one in left_out(found, 1.0) if one.source == few[0].source) == 0  # 0.3 without it
    assert [one.value for one in centred(few, by)] == pytest.approx([0.1 - by[f"adapters{CARD}"]] * 4, abs=0.01)


def test_sources_of_cards_that_are_left_out_keep_their_share() -> None:
    found = cards("fine-tuning", 0.05) + cards("adapters", 0.2)
    assert covered([one for each in ranges(found) for one in each.left]) >= COVERAGE - 0.01


def test_one_far_report_does_not_widen_the_range_of_many() -> None:
    found = made(9, 4, 0.02)
    far = Residual("far", "pretraining", 1.0, 1.0)
    assert bounds([*found, far], 0.9)[1] == pytest.approx(bounds(found, 0.95)[1], rel=0.1)


def test_a_report_is_of_the_counter_that_it_names(tmp_path) -> None:
    flags = "gpt2 --gpu a100-sxm4-80gb --precision bf16-pure --seq-len 1024"
    rows = [f"{counter},someone,A,{counter},{gib},{flags}" for counter in ("allocated", "device") for gib in ("2", "3")]
    file = tmp_path / "reports.csv"
    file.write_text("\n".join(["id,source,quality,counter,gib,flags", *rows]))
    found = reported(file)
    assert [one.stack for one in found] == ["fine-tuning"] * 2 + [f"fine-tuning{CARD}"] * 2
    assert [found[number + 1].value > found[number].value for number in (0, 2)] == [True, True]


@pytest.mark.parametrize(("measured", "expected"), [(0.5, math.log(0.5)), (1.5, 0.0), (3.0, math.log(1.5))])
def test_a_residual_is_how_far_outside_a_row_lies(measured: float, expected: float) -> None:
    assert residual(measured, 1.0, 2.0) == pytest.approx(expected)


def test_the_file_is_what_the_tool_writes() -> None:
    import tomllib

    import msgspec

    known = memory_range()
    idle = {kind: getattr(known, kind) for kind in IDLE}
    assert msgspec.convert(tomllib.loads(text(known.spread, idle, known.date)), MemoryRange) == known


def test_a_spread_names_its_sources_and_rows() -> None:
    found = made(6, 4, 0.1)
    first = ranges(found)[0].spread
    assert (first.stack, first.runs, first.sources) == ("pretraining", 24, tuple(f"S{number}" for number in range(6)))
