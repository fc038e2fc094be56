"""`--measured gemm=`: the power at which the user's GPUs run."""

from __future__ import annotations

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.hardware.calibration import efficiencies
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.reproduce import completer
from loadgauge.core.resolve.resolve import resolve_job

H100 = gpu("h100-sxm5-80gb")
JOB = Job(model="llama-3.1-8b", gpu=H100.id, gpus=8, zero=3, seq_len=8192, micro_batch=1)


def time(job: Job):
    found = resolve_job(job).estimate().time
    assert found is not None
    return found


def at(rate: str) -> Job:
    return JOB.replace(measured=f"gemm={rate}")


def test_the_tables_own_sustained_rate_changes_nothing_but_the_range():
    known = efficiencies(H100.id)
    rate = H100.peak("bf16") * known.matmul * known.throttle
    own, plain = time(at(f"{rate / 1e12:.6f}TFLOP/s")), time(JOB)
    assert own.step == pytest.approx(plain.step, rel=1e-5)
    assert plain.low < own.low < own.high < plain.high


def test_products_take_longer_on_a_throttled_chip():
    fast, slow = time(at("700TFLOP/s")), time(at("350"))
    # Most of the step are products and attention, whose rate halves; norms and the optimizer stay.
    assert 1.6 < slow.parts["forward"] / fast.parts["forward"] < 2
    assert slow.parts["optimizer"] == fast.parts["optimizer"]


@pytest.mark.parametrize("rate", ["1200TFLOP/s", "100TFLOP/s", "600GB/s", "-3TFLOP/s", "fast", "nan"])
def test_what_no_product_reaches_is_refused(rate: str):
    with pytest.raises(ConfigError, match=r"^measured"):
        resolve_job(at(rate)).estimate()


def test_it_goes_with_a_run():
    own = time(JOB.replace(measured="gemm=600TFLOP/s,step=2s,micro_batch=2"))
    there = time(JOB.replace(measured="gemm=600TFLOP/s", micro_batch=2))
    here = time(JOB.replace(measured="gemm=600TFLOP/s"))
    assert own.step == pytest.approx(here.step * 2 / there.step)


@pytest.mark.parametrize("measured", ["gemm=600TFLOP/s", "gemm=600TFLOP/s,step=2s,micro_batch=2"])
def test_the_completed_command_keeps_it(measured: str):
    job = JOB.replace(measured=measured)
    result = resolve_job(job).estimate()
    again = resolve_job(completer(job)(result)).estimate()
    assert again.time is not None
    assert result.time is not None
    assert again.time.step == pytest.approx(result.time.step)
