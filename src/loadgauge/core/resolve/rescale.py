"""`--measured`: the ratio of measured to predicted time of a run of the user's own, which rescales other predictions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.units import parse, share
from loadgauge.core.definitions.job.job import WHOLE_RUN, Job
from loadgauge.core.estimate.result import Time

MEASURES = ("step", "tokens_per_second_per_gpu", "mfu", "hfu", "tflops")
SHARES = ("mfu", "hfu")
PRODUCT = "gemm"
"""The name of the rate that a long matrix product sustains, which is no run."""


def sustained(job: Job) -> float | None:
    """The FLOP/s that a long 16-bit matrix product sustains on the user's GPU (`gemm=612TFLOP/s`); None where nobody says.

    >>> sustained(Job(model="gpt2", measured="gemm=612TFLOP/s")), sustained(Job(model="gpt2", measured="gemm=612,step=2s"))
    (612000000000000.0, 612000000000000.0)
    >>> sustained(Job(model="gpt2", measured="step=2s"))
    """
    text = _words(job.measured or "").get(PRODUCT)
    if text is None:
        return None
    try:
        value, unit = (float(text) * 1e12, "FLOP/s") if text[-1:].isdigit() else parse(text)
    except ValueError:
        raise ConfigError(f"cannot read {text!r}", key="measured") from None
    if unit != "FLOP/s" or not 0 < value < float("inf"):
        raise ConfigError(f"{PRODUCT} cannot be {text!r} (such as {PRODUCT}=612TFLOP/s)", key="measured")
    return value


def is_run(job: Job) -> bool:
    """Return whether `--measured` tells of a run, and not of a matrix product alone."""
    return bool(_words(job.measured or "").keys() - {PRODUCT, ""})


def scale(job: Job, predict: Callable[[Job], Time | None]) -> float:
    """The ratio of the time a measured run took to the time that `predict` gives for it. Raises `ConfigError`.

    The text is a measure (`step=12.3s`, `tokens_per_second_per_gpu=9000`, `mfu=0.41`, `tflops=400`) and, after it, the
    flags in which that run differed from this one (`step=12.3s,gpus=64,tp=4`); `tp=` is a flag that was not given there.
    """
    there, name, text = run(job)
    time = predict(there)
    if time is None:
        raise ConfigError("there is no predicted time to compare a measured one with", key="measured")
    try:
        if name in SHARES:
            value, unit = share(text), ""
        else:
            value, unit = (float(text), "") if text[-1:].isdigit() else parse(text)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}", key="measured") from None
    except ValueError:
        raise ConfigError(f"cannot read {text!r}", key="measured") from None
    if not 0 < value < float("inf") or unit not in ("", "second") or (unit == "second") != (name == "step"):
        raise ConfigError(f"{name} cannot be {text!r} (step needs a unit of time, the others none)", key="measured")
    predicted = {
        "step": time.step,
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "mfu": time.mfu,
        "hfu": time.hfu,
        "tflops": time.model_flops_per_gpu / 1e12,
    }[name]
    return value / predicted if name == "step" else predicted / value


def run(job: Job) -> tuple[Job, str, str]:
    """The measured run as a job, the name of its measure (one of `MEASURES`) and the text of its value. Raises `ConfigError`."""
    assert job.measured is not None
    words = _words(job.measured)
    product = words.pop(PRODUCT, None)
    measures = [name for name in words if name in MEASURES]
    others = {name.replace("-", "_"): value for name, value in words.items() if name not in MEASURES}
    if len(measures) != 1:
        raise ConfigError(
            f"name one of {', '.join(MEASURES)}, as in step=12.3s, or {PRODUCT}=612TFLOP/s", key="measured"
        )
    unknown = [name for name in others if name not in Job.__struct_fields__ or name in ("model", "gpu", "measured")]
    if unknown:
        raise ConfigError(f"no flag {unknown[0]!r} in which the measured run could differ", key="measured")
    same = {name: getattr(job, name) for name in Job.__struct_fields__[1:] if name not in ("measured", *WHOLE_RUN)}
    try:
        given = {} if product is None else {"measured": f"{PRODUCT}={product}"}
        there = Job.of(job.model, {**same, **{name: value or None for name, value in others.items()}, **given})
    except ConfigError as error:
        raise ConfigError(str(error), key="measured") from None
    return there, measures[0], words[measures[0]]


def changed(job: Job, change: dict[str, Any]) -> str:
    """`--measured` for a job after a change, so that it still describes the measured run, without the change.

    >>> changed(Job(model="gpt2", measured="step=12s,gpus=64", zero=1), {"zero": 3, "tp": 2, "gpus": 16})
    'step=12s,gpus=64,zero=1,tp='
    """
    assert job.measured is not None
    if not is_run(job):
        return job.measured
    described = {name.replace("-", "_") for name in _words(job.measured)}
    pinned = {name: getattr(job, name) for name in change if name not in described}
    pins = (f",{name}={'' if value is None else str(value).lower()}" for name, value in pinned.items())
    return job.measured + "".join(pins)


def _words(text: str) -> dict[str, str]:
    """Names and values, with commas between them; a value may have commas too (`stage_layers=7,8,8,7`)."""
    return dict(word.strip().partition("=")[::2] for word in re.split(r",(?=[^,=]*=)", text))
