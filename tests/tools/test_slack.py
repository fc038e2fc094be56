"""The factor of software and the range of step times: made of the sources other than those predicted, by a closed form."""

from __future__ import annotations

import math
import random

import numpy
import pytest

from accuracy import slack
from accuracy.slack import NOISE, SPREADS, Fit, Held, Left, Timed, by_source, calibrated, class_of, held, left_out


def row(source: str, configuration: str, value: float, *, experts: bool = False) -> Timed:
    return Timed(
        f"T-{source}-{configuration}", source, f"{source}{configuration}", "h100-sxm5-80gb", True, "pretraining", experts,
        experts, False, value, source, (0.0, 0.0),
    )  # fmt: skip


def drawn(seed: int, sources: int = 30) -> list[Timed]:
    """Runs whose effects are drawn as the model says: their mean is 0.1, their spreads those of `SPREADS`."""
    chance = random.Random(seed)
    rows = []
    for source in range(sources):
        own = chance.gauss(0.1, SPREADS[("source",)])
        for configuration in range(4):
            each = own + chance.gauss(0, SPREADS[("configuration",)])
            rows += [row(f"S{source}", str(configuration), each + chance.gauss(0, NOISE)) for _ in range(2)]
    return rows


def test_a_source_is_predicted_without_its_rows() -> None:
    rows = drawn(1)
    moved = [one._replace(value=one.value + 5) if one.source == "S3" else one for one in rows]
    before, after = (
        {one.row.id: one.error + one.row.value for one in left_out(each) if one.row.source == "S3"}
        for each in (rows, moved)
    )
    assert before == pytest.approx(after)


def test_a_source_that_tells_of_another_is_left_out_with_it() -> None:
    rows = [row("KOR", "a", 0.0), row("MMFU", "b", 3.0), *drawn(2)]
    alone = left_out([one for one in rows if one.source != "MMFU"])
    both = left_out(rows)
    first, second = ([one.error for one in each if one.row.source == "KOR"] for each in (alone, both))
    assert first == pytest.approx(second)


def test_the_prediction_is_the_mean_of_a_normal_distribution_given_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and nothing robust: mean and spread of two correlated normal values, by the textbook's formula."""
    monkeypatch.setattr(slack, "FREEDOM", 1e12)
    known, new = row("A", "a", 0.7), row("B", "b", 0.0)
    mean, deviation = Fit([known]).predict([new])
    own = slack.MEAN_SPREAD**2 + sum(spread**2 for spread in SPREADS.values()) + NOISE**2
    kinds = SPREADS[("hosted",)] ** 2 + SPREADS[("low",)] ** 2
    shared = slack.MEAN_SPREAD**2 + kinds
    assert mean[0] == pytest.approx(slack.MEAN + shared / own * (0.7 - slack.MEAN), rel=1e-6)
    assert deviation[0] == pytest.approx(math.sqrt(own - shared**2 / own), rel=1e-6)


def test_the_shortest_range_holds_the_wanted_share_of_sources_left_out() -> None:
    left = left_out(drawn(3))
    best, apart = calibrated(left, "pretraining")
    assert by_source(apart) >= slack.COVERAGE
    # Drawn from the model itself, the range is that of a normal distribution over sources, but for chance.
    spread = math.sqrt(sum(one**2 for one in SPREADS.values()) + NOISE**2)
    assert (best.high - best.low) / 2 == pytest.approx(1.28 * spread, rel=0.35)
    assert best.middle == 0


def test_a_class_of_few_sources_has_no_end_nearer_than_the_best_known() -> None:
    many = left_out(drawn(3))
    best, _ = calibrated(many, "pretraining")
    few = [Left(row(f"F{each}", "a", 0.0)._replace(stack="FSDP"), 0.1 + each / 1000) for each in range(slack.SURE - 1)]
    made, apart = calibrated([*many, *few], "FSDP")
    assert (made.low, made.high) == (min(best.low, -0.1 - 0.008), best.high)
    assert {one.high for one in apart} == {best.high}
    more = [*few, *(one._replace(row=one.row._replace(source=f"G{one.row.source}")) for one in few)]
    assert calibrated([*many, *more], "FSDP")[0].high == 0


def test_a_range_is_made_of_the_other_sources() -> None:
    left = [Left(row(f"S{each}", "a", 0.0), error) for each, error in enumerate((0.1, -0.1, 0.0, 5.0))]
    apart = {one.row.source: one for one in held(left, "pretraining", (0.0, 0.0))}
    assert (apart["S3"].low, apart["S3"].high) == (-0.1, 0.1)
    assert not apart["S3"].inside
    assert apart["S2"].inside


def test_who_tuned_a_run_moves_its_middle_as_far_as_its_sources_agree() -> None:
    def of(errors: tuple[float, ...], kind: str = "recipe") -> float:
        left = [
            Left(row(source, "a", 0.0), error)
            for source, error in zip(("KOR", "DG", "MB", "NEMO"), errors, strict=True)
        ]
        return class_of(left, kind, (0.1, 0.1)).middle

    assert of((0.2,) * 4) == pytest.approx(-0.2)
    assert of((0.2,) * 4, "pretraining") == 0
    apart = SPREADS[("source",)]  # scatter as large as sources have: one source of four is not believed
    middle = -0.2 + apart
    assert of((0.2 - apart, 0.2 - apart, 0.2 - 2 * apart, 0.2)) == pytest.approx(middle * 4 / (4 + 0.5), rel=1e-6)


def test_what_a_row_does_not_state_widens_its_range() -> None:
    plain = Held(row("A", "a", 0.0), -0.4, -0.1, 0.1)
    assert not plain.inside
    assert plain._replace(row=plain.row._replace(widened=(0.0, 0.35))).inside


def test_after_a_run_only_what_differs_between_configurations_is_left() -> None:
    rows = [one._replace(value=one.value + 0.5) for one in drawn(4)]
    errors = numpy.array([error for error, _ in slack.after_a_run(rows)])
    # Six of the seven others are of another configuration.
    wanted = math.sqrt(6 / 7 * 2 * SPREADS[("configuration",)] ** 2 + 2 * NOISE**2)
    assert numpy.std(errors) == pytest.approx(wanted, rel=0.1)
