"""What a job does not say: each outcome widens the range by what the job that says it needs more or less."""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge import estimate
from loadgauge.estimate.result import Estimate

SAID: dict[str, Any] = {"weights": "bfloat16", "optimizer": "adamw-fused", "loss": "float32"}


def of(**flags: Any) -> Estimate:
    return estimate("llama-3.2-1b", gpu="h100-sxm5-80gb", **flags)


def peak(**flags: Any) -> float:
    return of(**{**SAID, **flags}).memory.allocated


def test_where_everything_is_said_nothing_is_wider() -> None:
    margins = of(**SAID).memory.margins
    assert (margins.fewer, margins.more) == (0, 0)
    released = of(loss="float32", version="transformers=5.23,torch=2.13").memory.margins
    assert (released.fewer, released.more) == (0, 0)


@pytest.mark.parametrize(
    ("flag", "other"), [("weights", "float32"), ("optimizer", "adamw-foreach"), ("loss", "chunked")]
)
@pytest.mark.parametrize("batch", [1, 8])
def test_each_outcome_is_that_of_the_job_that_says_it(flag: str, other: str, batch: int) -> None:
    more = peak(micro_batch=batch, **{flag: other}) - peak(micro_batch=batch)
    said = {name: value for name, value in SAID.items() if name != flag}
    margins = of(micro_batch=batch, **said).memory.margins
    assert margins.more == pytest.approx(max(0, more), abs=1)
    assert margins.fewer == pytest.approx(max(0, -more), abs=1)


def test_separate_causes_are_summed() -> None:
    every = of().memory.margins
    each = [
        of(**{name: value for name, value in SAID.items() if name != left}).memory.margins for left in SAID
    ]  # fmt: skip
    assert every.more == pytest.approx(sum(one.more for one in each))
    assert every.fewer == pytest.approx(sum(one.fewer for one in each))


def test_upcasts_of_a_quantised_base() -> None:
    said = {"qlora": True, "loss": "float32", "optimizer": "adamw-fused"}
    upcast, plain = (of(**said, kbit_upcast=word).memory for word in ("all", "none"))
    margins = of(**said).memory.margins
    assert margins.more == 0
    # Embedding, head and norms in two bytes more; what layers keep is not in it.
    assert margins.fewer == pytest.approx(upcast.parts["weights"] - plain.parts["weights"], rel=0.001)
    assert of(**said, version="trl=0.9").memory.margins.fewer == 0


def test_fsdp_trains_float32_whatever_is_loaded() -> None:
    assert of(gpus=8, zero=3).memory.margins.more == 0


def test_an_outcome_that_does_not_fit_makes_it_tight() -> None:
    limit = of(**SAID).memory.high + 2**20
    sure = of(**SAID, memory=f"{limit / 2**30:.3f}GiB")
    unsure = of(**{**SAID, "weights": None}, memory=f"{limit / 2**30:.3f}GiB")
    assert (sure.memory.verdict, unsure.memory.verdict) == ("fits", "tight")


def test_outcomes_that_are_far_are_told_apart() -> None:
    memory = of(**{**SAID, "weights": None}).memory
    (outcome,) = memory.outcomes
    assert outcome.flag == "--weights float32"
    said, other = of(**SAID).memory, of(**{**SAID, "weights": "float32"}).memory
    own, shown = memory.range_of(), memory.range_of(outcome)
    assert (own.low, own.high) == pytest.approx((said.low, said.high))
    assert (shown.low, shown.value, shown.high) == pytest.approx((other.low, other.total, other.high))
    assert (memory.low, memory.high) == pytest.approx((own.low, shown.high))
    assert not of(**SAID).memory.outcomes


def test_an_outcome_that_fits_as_predicted_leaves_the_verdict() -> None:
    unsaid = {**SAID, "weights": None}
    (outcome,) = of(**unsaid).memory.outcomes
    between = (of(**unsaid).memory.range_of(outcome).value + of(**unsaid).memory.high) / 2
    assert of(**unsaid, memory=f"{between / 2**30:.3f}GiB").memory.verdict == "fits"
