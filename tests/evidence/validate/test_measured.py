"""The step time that a row measured, by what its source prints; and the count of FLOPs that its rates are of."""

from __future__ import annotations

import msgspec
import pytest

from loadgauge.core.base.errors import NotModelled
from loadgauge.core.definitions.model.model import Attention, Mlp
from loadgauge.evidence.validate.measured import step_seconds
from loadgauge.evidence.validate.runs import Measured, published, setup_of

RUNS = {run.id: run for run in published().runs}


def test_a_step_is_the_batch_over_the_rate() -> None:
    run = RUNS["T-MB-074"]
    setup = setup_of(run)
    assert step_seconds(run, setup) == 256 * 8192 / (64 * 5248)
    timed = msgspec.structs.replace(run, measured=msgspec.structs.replace(run.measured, step_time_s=7.5))
    assert step_seconds(timed, setup) == 7.5


@pytest.mark.parametrize(("utilisation", "timed"), [("22B", "002"), ("175B", "004"), ("530B", "006"), ("1T", "008")])
def test_utilisation_gives_the_step_time_that_was_printed_elsewhere(utilisation: str, timed: str) -> None:
    """Megatron-LM's README prints the utilisation of the very runs whose seconds are in table 5 of Korthikanti et al."""
    run = next(run for run in RUNS.values() if run.series == "MMFU" and run.model.endswith(utilisation))
    assert step_seconds(run, setup_of(run)) == pytest.approx(RUNS[f"T-KOR-{timed}"].measured.step_time_s, rel=0.01)


def test_flops_are_counted_as_each_framework_counts_them() -> None:
    """Rows that print both tokens/s and TFLOP/s say how their source counts: all pairs, or in Megatron-Bridge half."""
    checked = {"LLMF": 0, "MB": 0, "NEMO": 0}
    for run in RUNS.values():
        printed = run.measured.tokens_per_s_per_gpu is not None and run.measured.model_tflops_per_gpu is not None
        llama2 = "LLAMA2" in run.model  # NeMo 24.07 prints a tenth less for these than its own formula
        if run.series not in checked or not printed or run.job is None or llama2:
            continue
        setup = setup_of(run)
        dense = all(
            isinstance(block.mlp, Mlp) and isinstance(block.attention, Attention) for block in setup.model.blocks
        )
        if not dense or setup.training.lora is not None:
            continue
        rates = msgspec.structs.replace(run.measured, tokens_per_s_per_gpu=None)
        converted = step_seconds(msgspec.structs.replace(run, measured=rates), setup)
        # The printed figures have two to four digits.
        assert converted == pytest.approx(step_seconds(run, setup), rel=0.035), run.id
        checked[run.series] += 1
    assert all(count > 5 for count in checked.values())


def test_only_what_is_a_time_counts_as_one() -> None:
    assert not Measured(peak_memory_gib=3.0).timed
    assert Measured(hfu=0.4).timed


def test_a_row_that_contradicts_itself_is_no_measurement() -> None:
    """A time, a rate and a batch that cannot all be right: four times the FLOPs are no way of counting."""
    run = RUNS["T-MB-074"]
    setup, rate = setup_of(run), run.measured.model_tflops_per_gpu
    assert rate is not None
    step = step_seconds(run, setup)
    for factor, refused in ((1.0, False), (1.3, False), (0.25, True), (4.0, True)):
        timed = msgspec.structs.replace(run, measured=Measured(step_time_s=factor * step, model_tflops_per_gpu=rate))
        if refused:
            with pytest.raises(NotModelled, match="times the FLOPs of the batch"):
                step_seconds(timed, setup)
        else:
            assert step_seconds(timed, setup) == factor * step


def test_no_card_is_faster_than_its_peak() -> None:
    run = RUNS["T-MB-074"]
    setup = setup_of(run)
    tokens = run.measured.tokens_per_s_per_gpu
    assert tokens is not None
    fast = msgspec.structs.replace(run, measured=Measured(tokens_per_s_per_gpu=4 * tokens))
    with pytest.raises(NotModelled, match="of the peak of"):
        step_seconds(fast, setup)
