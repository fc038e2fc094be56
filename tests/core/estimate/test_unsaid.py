"""What a job does not say: each other value differs by what the job that says it needs more or less."""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge import estimate
from loadgauge.core.estimate.result import Estimate

SAID: dict[str, Any] = {"weights": "bfloat16", "optimizer": "adamw-fused", "loss": "float32"}


def of(**flags: Any) -> Estimate:
    return estimate("llama-3.2-1b", gpu="h100-sxm5-80gb", **flags)


def peak(**flags: Any) -> float:
    return of(**{**SAID, **flags}).memory.allocated


def spread(result: Estimate) -> tuple[float, float]:
    """Bytes fewer and more of all that is not said, in the range and beside it."""
    memory = result.memory
    return (
        memory.margins.fewer + sum(thing.fewer for thing in memory.unsaid),
        memory.margins.more + sum(thing.more for thing in memory.unsaid),
    )


def test_where_everything_is_said_nothing_is_wider() -> None:
    assert spread(of(**SAID)) == (0, 0)
    assert spread(of(loss="float32", version="transformers=5.23,torch=2.13")) == (0, 0)


@pytest.mark.parametrize(
    ("flag", "other"), [("weights", "float32"), ("optimizer", "adamw-foreach"), ("loss", "chunked")]
)
@pytest.mark.parametrize("batch", [1, 8])
def test_each_outcome_is_that_of_the_job_that_says_it(flag: str, other: str, batch: int) -> None:
    more = peak(micro_batch=batch, **{flag: other}) - peak(micro_batch=batch)
    said = {name: value for name, value in SAID.items() if name != flag}
    assert spread(of(micro_batch=batch, **said)) == pytest.approx((max(0, -more), max(0, more)), abs=1)


def test_separate_causes_are_summed() -> None:
    each = [spread(of(**{name: value for name, value in SAID.items() if name != left})) for left in SAID]
    assert spread(of()) == pytest.approx(tuple(map(sum, zip(*each, strict=True))))


def test_upcasts_of_a_quantised_base() -> None:
    said = {"qlora": True, "loss": "float32", "optimizer": "adamw-fused"}
    upcast, plain = (of(**said, kbit_upcast=word).memory for word in ("all", "none"))
    fewer, more = spread(of(**said))
    assert more == 0
    # Embedding, head and norms in two bytes more; what layers keep is not in it.
    assert fewer == pytest.approx(upcast.parts["weights"] - plain.parts["weights"], rel=0.001)
    assert spread(of(**said, version="trl=0.9"))[0] == 0


def test_fsdp_trains_float32_whatever_is_loaded() -> None:
    assert spread(of(gpus=8, zero=3))[1] == 0


def test_what_is_far_is_no_part_of_the_range() -> None:
    said, open_ = of(**SAID).memory, of(**{**SAID, "weights": None}).memory
    assert (open_.low, open_.high) == (said.low, said.high)
    (thing,) = open_.unsaid
    assert (thing.flag, thing.assumed, [other.value for other in thing.others]) == (
        "--weights",
        "bfloat16",
        ["float32"],
    )
    other, shown = of(**{**SAID, "weights": "float32"}).memory, open_.range_with(thing.more)
    assert (shown.low, shown.value, shown.high) == pytest.approx((other.low, other.total, other.high))
    assert open_.widest.high == pytest.approx(other.high)
    assert open_.widest.low == pytest.approx(said.low)


@pytest.mark.parametrize(
    ("end", "verdict", "of_other"),
    [("widest", "fits", None), ("other value", "depends", "tight"), ("own high", "depends", "does not fit"),
     ("own low", "tight", "does not fit"), ("below", "does not fit", None)],
)  # fmt: skip
def test_one_thing_that_is_not_said_decides(end: str, verdict: str, of_other: str | None) -> None:
    short = {**SAID, "seq_len": 512}  # states are most of it, so that the ranges lie apart
    own, other = of(**{**short, "weights": None}).memory, of(**{**short, "weights": "float32"}).memory
    assert own.high < other.low
    capacity = {"widest": other.high + 1, "other value": other.total, "own high": own.high + 1, "own low": own.low + 1,
                "below": own.margins.needed(own.allocated).low - 1}[end]  # fmt: skip
    memory = of(**{**short, "weights": None}, memory=f"{capacity / 2**30:.9f}GiB").memory
    assert memory.verdict == verdict
    question = memory.question
    assert (question is not None) == (of_other is not None)
    if question is None:
        return
    first, second = question.choices
    assert (question.flag, first.value, second.value) == ("--weights", "bfloat16", "float32")
    assert (first.assumed, second.assumed) == (True, False)
    # Each answer is that of the job that says it.
    for choice in question.choices:
        said = of(**short | choice.fields, memory=f"{capacity / 2**30:.9f}GiB").memory
        assert (choice.total, choice.low, choice.high) == pytest.approx((said.total, said.low, said.high))
        assert choice.verdict == said.verdict
    assert second.verdict == of_other


def test_no_alternative_makes_a_job_fit() -> None:
    memory = estimate("llama-3.2-1b", gpu="h100-sxm5-80gb", recompute="full", micro_batch=16).memory
    assert any(thing.flag == "--loss" and thing.fewer > 2**36 for thing in memory.unsaid)
    assert memory.verdict == "does not fit"
    assert memory.question is None
