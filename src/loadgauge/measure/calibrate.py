"""The efficiencies of this device from microbenchmarks, as a file of `data/calibration`.

Matrix products are fitted with the roofline that will read them. What one device cannot tell (links without a second
rank, 8 bits where there are none) keeps the stated default, and is listed.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence

import msgspec
import torch

from loadgauge.errors import ConfigError
from loadgauge.estimate.time.roofline import Machine, gemm_seconds
from loadgauge.layers.operations import Gemm
from loadgauge.measure.benchmarks import Sizes, Timing, median, timings
from loadgauge.spec.calibration import DEFAULT, Rates
from loadgauge.spec.hardware import Gpu

WAVES = tuple(step / 10 for step in range(11))
SMALL_K = (0, 10, 20, 35, 50, 75, 100, 150, 200, 300, 400)


class Calibration(msgspec.Struct, frozen=True):
    """Efficiencies, what they were taken from, and the device. `peak` [FLOP/s] and `bandwidth` [byte/s] are what the
    shares are of. `kept`: fields that nothing here could measure; `error`: of the products, |log(fit / measured)|."""

    rates: Rates
    timings: tuple[Timing, ...]
    device: str
    torch: str
    cuda: str
    peak: float
    bandwidth: float
    kept: tuple[str, ...]
    error: float


def calibrate(device: str, gpu: Gpu | None = None, sizes: Sizes | None = None) -> Calibration:
    """Times the device and fits its efficiencies. `gpu`: whose datasheet they are shares of; without one, they are of
    the best that was measured, and good for comparing only. Raises ConfigError where there is no such device."""
    if gpu is None and device == "cuda":
        raise ConfigError(
            "gpu: say which one it is (`loadgauge gpus` lists them): efficiencies are shares of its datasheet"
        )
    taken = timings(device, sizes)
    if gpu is not None:
        peak, bandwidth = gpu.peak("bf16"), gpu.memory_bandwidth
    else:
        peak = max(timing.flops / timing.seconds for timing in taken if timing.kind == "matmul")
        bandwidth = max(timing.nbytes / timing.seconds for timing in taken if timing.kind == "copy")
    return fit_efficiencies(
        taken, peak=peak, bandwidth=bandwidth, gpu="" if gpu is None else gpu.id, device=device,
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 1,
        fp8_peak=None if gpu is None or gpu.peaks.fp8 is None else gpu.peaks.fp8.value,
        link=None if gpu is None or gpu.interconnect.bandwidth is None else gpu.interconnect.bandwidth.value,
    )  # fmt: skip


def fit_efficiencies(
    taken: Sequence[Timing], *, peak: float, bandwidth: float, gpu: str = "", device: str = "cpu",
    multiprocessors: int = 132, fp8_peak: float | None = None, link: float | None = None,
) -> Calibration:  # fmt: skip
    """Fits the efficiencies with which the roofline reproduces these times."""
    efficiencies: dict[str, float] = {"launch": _of(taken, "launch", lambda timing: timing.seconds)}
    efficiencies["memory"] = min(1.0, _of(taken, "copy", lambda timing: timing.nbytes / timing.seconds / bandwidth))
    for kind in ("flash2", "flash2_backward", "attention", "attention_backward"):
        if any(timing.kind == kind for timing in taken):
            efficiencies[kind] = _of(taken, kind, lambda timing: timing.flops / timing.seconds / peak)
    moved = [
        _traffic(timing, bandwidth * efficiencies["memory"])
        for timing in taken
        if timing.kind in ("add", "mul", "silu", "gelu")
    ]
    efficiencies["traffic"] = median(moved)
    known = msgspec.structs.replace(DEFAULT, multiprocessors=multiprocessors, **efficiencies)
    products = [timing for timing in taken if timing.kind == "matmul"]
    fit, error = _products(products, known, peak, bandwidth)
    efficiencies |= fit
    eights = [timing for timing in taken if timing.kind == "matmul-fp8"]
    if eights and fp8_peak is not None:
        efficiencies["fp8_matmul"] = median([eight.flops / eight.seconds / fp8_peak for eight in eights])
    efficiencies |= _link([timing for timing in taken if timing.kind == "all_reduce"], link)
    measured = {"multiprocessors", "gpu", "basis", "date", "rows", *efficiencies}
    rates = msgspec.structs.replace(
        DEFAULT, gpu=gpu or device, multiprocessors=multiprocessors, basis="measured", date=_today(),
        rows=tuple(timing.name for timing in taken), **efficiencies,
    )  # fmt: skip
    return Calibration(
        rates=rates,
        timings=tuple(taken),
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        peak=peak,
        bandwidth=bandwidth,
        kept=tuple(name for name in Rates.__struct_fields__ if name not in measured),
        error=error,
    )


def _today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def _of(taken: Sequence[Timing], kind: str, value: Callable[[Timing], float]) -> float:
    return median([value(timing) for timing in taken if timing.kind == kind])


def _traffic(timing: Timing, achieved: float) -> float:
    """How often an element-wise operation moves its bytes, at the rate of a copy."""
    return timing.seconds / (timing.nbytes / achieved)


def _products(
    products: Sequence[Timing], known: Rates, peak: float, bandwidth: float
) -> tuple[dict[str, float], float]:
    """`matmul`, `wave` and `small_k` with the least mean |log(fit / measured)|; and that."""
    if not products:
        raise ConfigError("no matrix product was timed")
    best: tuple[float, dict[str, float]] = (math.inf, {})
    for wave in WAVES:
        for small_k in SMALL_K:
            matmul = known.matmul
            for _ in range(3):  # the share and which products are bound by memory decide each other
                rates = msgspec.structs.replace(known, matmul=matmul, wave=wave, small_k=float(small_k))
                logs = _logs(products, Machine(peak=peak, bandwidth=bandwidth, rates=rates))
                matmul = min(1.5, matmul * math.exp(median(logs)))
            rates = msgspec.structs.replace(known, matmul=matmul, wave=wave, small_k=float(small_k))
            error = sum(map(abs, _logs(products, Machine(peak=peak, bandwidth=bandwidth, rates=rates)))) / len(products)
            if error < best[0]:
                best = error, {"matmul": matmul, "wave": wave, "small_k": float(small_k)}
    return best[1], best[0]


def _logs(products: Sequence[Timing], machine: Machine) -> list[float]:
    return [
        math.log(
            gemm_seconds(Gemm(product.sizes["m"], product.sizes["n"], product.sizes["k"]), machine) / product.seconds
        )
        for product in products
    ]


def _link(reduced: Sequence[Timing], link: float | None) -> dict[str, float]:
    """Latency of a step from the smallest all-reduce, and from the largest the share of the link that it reaches."""
    if not reduced or reduced[0].sizes["ranks"] < 2:
        return {}
    ranks = reduced[0].sizes["ranks"]
    small, large = min(reduced, key=lambda timing: timing.nbytes), max(reduced, key=lambda timing: timing.nbytes)
    result = {"inner_latency": small.seconds / (2 * (ranks - 1))}
    if link is not None:
        result["inner_link"] = min(1.0, large.nbytes / max(1e-12, large.seconds - small.seconds) / link)
    return result


def text(calibration: Calibration) -> str:
    """The efficiencies as TOML, which `spec.calibration` reads."""
    known = calibration.rates
    lines = [
        f"# Efficiencies of {calibration.device}, by `loadgauge calibrate`: PyTorch {calibration.torch},"
        f" CUDA {calibration.cuda or 'none'}.",
        f"# Shares of {calibration.peak / 1e12:.4g} TFLOP/s and {calibration.bandwidth / 1e9:.4g} GB/s. Of the time of the matrix"
        f" products, these are off by {math.expm1(calibration.error):.1%} on average.",
        f"# Defaults, not measured here: {', '.join(calibration.kept)}.",
    ]
    for name in Rates.__struct_fields__:
        value = getattr(known, name)
        if name == "rows":
            continue
        lines.append(f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {_number(value)}")
    return "\n".join([*lines, "rows = [", *(f'  "{row}",' for row in known.rows), "]", ""])


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(f"{value:.3g}"))
