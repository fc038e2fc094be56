"""Fits the efficiencies of one kind of GPU to published runs: what `data/calibration/*.toml` is made of.

One set of numbers a GPU, whatever the run, the model or the source. The fit minimises the logarithm of predicted over
measured time, robustly, each configuration weighing the same, and is held to round prior values, so that what the runs
say nothing about stays where it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loadgauge.estimate.estimate import view_of
from loadgauge.estimate.memory.rank_memory import MemoryModel
from loadgauge.estimate.time.collectives import Fabric
from loadgauge.estimate.time.roofline import Machine
from loadgauge.estimate.time.step import StepModel
from loadgauge.spec.calibration import DEFAULT, Rates
from loadgauge.spec.hardware import Cluster
from loadgauge.spec.layout import Layout
from loadgauge.spec.model import ModelSpec
from loadgauge.spec.training import Training

FITTED = {
    "matmul": (0.70, 0.15, 0.2, 1.0),
    "wave": (0.5, 0.4, 0.0, 1.0),
    "small_k": (50.0, 100.0, 0.0, 1000.0),
    "attention": (0.55, 0.15, 0.1, 1.0),
    "attention_backward": (0.45, 0.15, 0.1, 1.0),
    "flash2": (0.45, 0.15, 0.05, 1.0),
    "flash2_backward": (0.35, 0.12, 0.05, 1.0),
    "memory": (0.82, 0.07, 0.3, 1.0),
    "traffic": (1.0, 0.3, 0.1, 4.0),
    "launch": (4e-6, 2e-6, 0.0, 3e-5),
    "inner_link": (0.78, 0.05, 0.2, 1.0),
    "outer_link": (0.85, 0.1, 0.1, 1.0),
    "inner_latency": (3.4e-6, 2e-6, 0.0, 2e-5),
    "outer_latency": (1.4e-5, 1e-5, 0.0, 1e-4),
    "contention": (0.2, 0.1, 0.0, 1.0),
    "fp8_matmul": (0.5, 0.15, 0.1, 1.0),
    "fp4_matmul": (0.4, 0.15, 0.1, 1.0),
    "routing": (3e-4, 3e-4, 0.0, 5e-3),
}
"""Prior value, its spread, and the bounds of each fitted efficiency."""
ONE_ATTENTION = ("a100", "a800", "a10", "v100", "rtx3090")
SPREAD = 0.05
"""Of measured times, as a logarithm: the same box from two vendors differs by 2 to 12 %."""
WITHIN_A_CHIP = 0.8
"""How far the GPUs of one chip are from one another, of the spreads in `FITTED`."""
CHIPS = {
    "ampere": ("a100-sxm4-80gb", "a100-sxm4-40gb", "a100-pcie-80gb", "a100-pcie-40gb", "a800-sxm4-80gb"),
    "hopper": (
        "h100-sxm5-80gb", "h100-sxm-96gb-500w", "h100-pcie-80gb", "h100-nvl-94gb", "h200-sxm-141gb", "h800-sxm5-80gb",
    ),
    "blackwell": ("b200-sxm-180gb", "gb200-nvl72", "gb300-nvl72", "b300-sxm-288gb", "b100-sxm"),
    "cdna3": ("mi300x", "mi325x"),
}  # fmt: skip
"""GPUs of one chip, which share what nothing else is known of."""
MULTIPROCESSORS = {"ampere": 108, "hopper": 132, "blackwell": 148, "cdna3": 304}
"""Streaming multiprocessors or compute units in use (source: the vendors' datasheets)."""
PRIOR_WEIGHT = 8.0
"""Configurations that the prior counts for."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step [s] of a run that can be expressed; `weight` is its share of its configuration."""

    id: str
    model: ModelSpec
    layout: Layout
    training: Training
    cluster: Cluster
    seconds: float
    weight: float = 1.0


def predictor(sample: Sample) -> Any:
    """The step time of a sample as a function of `Rates`; what does not depend on them is worked out once."""
    facts = MemoryModel(sample.model, sample.layout, sample.training, view_of(sample.layout, sample.training))

    def seconds(rates: Rates) -> float:
        machine = Machine.of(sample.cluster.gpu, rates, sample.training)
        fabric = msgspec.structs.replace(
            Fabric.of(sample.cluster, rates), inner_latency=rates.inner_latency, outer_latency=rates.outer_latency
        )
        return float(StepModel(facts, machine, fabric).step().step)

    return seconds


def fit(
    samples: Sequence[Sample], gpu: str, start: Rates = DEFAULT, prior: Rates | None = None, rounds: int = 15
) -> Rates:
    """The efficiencies of a GPU from its samples, held to those of `prior` (its chip's), or to `FITTED`. Needs scipy.

    On Ampere and before, Megatron's attention is FlashAttention-2 too, so the two share their rates.
    """
    import numpy
    from scipy.optimize import least_squares

    shared = gpu.startswith(ONE_ATTENTION)
    chosen = [name for name in FITTED if not (shared and name in ("attention", "attention_backward"))]
    centre = numpy.array([FITTED[name][0] if prior is None else getattr(prior, name) for name in chosen])
    spread = numpy.array([FITTED[name][1] for name in chosen]) * (1 if prior is None else WITHIN_A_CHIP)
    low, high = (numpy.array([FITTED[name][side] for name in chosen]) for side in (2, 3))
    calls = [predictor(sample) for sample in samples]
    weights = numpy.sqrt([sample.weight for sample in samples])

    def rates_of(point: Any) -> Rates:
        values = numpy.clip(centre + spread * point, low, high)
        values_by_name = dict(zip(chosen, (float(value) for value in values), strict=True))
        if shared:
            values_by_name.update(
                attention=values_by_name["flash2"], attention_backward=values_by_name["flash2_backward"]
            )
        return msgspec.structs.replace(start, gpu=gpu, **values_by_name)

    def residuals(point: Any) -> Any:
        known = rates_of(point)
        errors = [math.log(call(known) / sample.seconds) for call, sample in zip(calls, samples, strict=True)]
        pulled = math.sqrt(PRIOR_WEIGHT / len(chosen)) * point
        return numpy.concatenate([weights * soft(numpy.array(errors) / SPREAD), pulled])

    def soft(scaled: Any) -> Any:
        # Beyond one spread an error counts by its size, not by its square.
        return numpy.sign(scaled) * numpy.sqrt(2 * (numpy.sqrt(1 + scaled**2) - 1))

    margin = 1e-9
    solution = least_squares(
        residuals,
        numpy.clip(numpy.zeros(len(chosen)), (low - centre) / spread + margin, (high - centre) / spread - margin),
        bounds=((low - centre) / spread, (high - centre) / spread),
        diff_step=1e-3,
        max_nfev=rounds,
    )
    return rates_of(solution.x)


def fit_pooled(samples: Mapping[str, Sequence[Sample]], chip: str, rounds: int = 8) -> Rates | None:
    """The efficiencies of a chip from the samples of all its GPUs; None where there are none."""
    gpus, start = CHIPS[chip], msgspec.structs.replace(DEFAULT, multiprocessors=MULTIPROCESSORS[chip])
    pooled = [sample for gpu in gpus for sample in samples.get(gpu, ())]
    return fit(pooled, gpus[0], start, rounds=rounds) if pooled else None


def fit_chip(samples: Mapping[str, Sequence[Sample]], chip: str) -> dict[str, Rates]:
    """The efficiencies of each GPU of a chip: those of the chip from all samples, then those of each GPU near them.

    A GPU without samples of its own gets the chip's.
    """
    gpus, start = CHIPS[chip], msgspec.structs.replace(DEFAULT, multiprocessors=MULTIPROCESSORS[chip])
    common = fit_pooled(samples, chip, rounds=15)
    if common is None:
        return {}
    return {
        gpu: fit(own, gpu, start, common) if (own := samples.get(gpu, ())) else msgspec.structs.replace(common, gpu=gpu)
        for gpu in gpus
    }


def chip_of(gpu: str) -> str | None:
    """The chip that a GPU is made of, where another GPU is made of it too or runs calibrate it."""
    return next((chip for chip, gpus in CHIPS.items() if gpu in gpus), None)
