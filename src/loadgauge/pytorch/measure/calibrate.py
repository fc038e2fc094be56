"""Efficiencies of this device's kernels, from microbenchmarks, as a file of `data/calibration`.

The forms that will read the figures fit them (`estimate/time`). What one device cannot tell (links without a second rank, 8 bits
where there are none) keeps what is known of the card, and is listed.
"""

import datetime
import math
from collections.abc import Iterable, Sequence

import msgspec
import torch

from loadgauge.core.base.errors import refuse
from loadgauge.core.definitions.hardware.calibration import Both, Efficiencies, Wire, efficiencies
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.estimate.time.collectives import Fabric, Group, seconds
from loadgauge.core.estimate.time.roofline import Machine, attention_seconds, gemm_seconds
from loadgauge.core.layers.operations.operations import Gemm, Operation
from loadgauge.pytorch.measure.benchmarks import (
    ATTENTION,
    COLLECTIVES,
    NORM,
    STREAMS,
    Saved,
    Sizes,
    Timing,
    median,
    timings,
)

WAVES = tuple(step / 10 for step in range(11))
SMALL_K = (0, 10, 20, 35, 50, 75, 100, 150, 200, 300, 400)
ROOTS = tuple(step / 2000 for step in range(21))
"""Square roots of seconds: `Wire.root`."""


class Calibration(msgspec.Struct, frozen=True):
    """Efficiencies, what they were taken from, and the device. `peak` [FLOP/s] and `bandwidth` [byte/s] are what the
    shares are of. `kept`: fields that nothing here could measure; `error`: of the products, |log(fit / measured)|."""

    efficiencies: Efficiencies
    timings: tuple[Timing, ...]
    device: str
    torch: str
    cuda: str
    peak: float
    bandwidth: float
    kept: tuple[str, ...]
    error: float


def calibrate(
    device: str, gpu: Gpu | None = None, sizes: Sizes | None = None, saved: Saved | None = None
) -> Calibration:
    """Times the device and fits its efficiencies. `gpu`: whose datasheet they are shares of; without one, they are of
    the best that was measured, and good for comparing only; `saved`: where parts are kept, so that a run that was
    stopped goes on. Raises ConfigError where there is no such device, or something else runs on it."""
    refuse(
        gpu is None and device == "cuda",
        "gpu: say which one it is (`loadgauge gpus` lists them): efficiencies are shares of its datasheet",
    )
    taken = timings(device, sizes, saved)
    if gpu is not None:
        peak, bandwidth = gpu.peak("bf16"), gpu.memory_bandwidth
    else:
        peak = max(timing.flops / timing.seconds for timing in taken if timing.kind == "matmul")
        bandwidth = max(timing.nbytes / timing.seconds for timing in taken if timing.kind == "copy")
    return fit_efficiencies(
        taken,
        peak=peak,
        bandwidth=bandwidth,
        gpu="" if gpu is None else gpu.id,
        device=device,
        multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 1,
        fp8_peak=None if gpu is None or gpu.peaks.fp8 is None else gpu.peaks.fp8.value,
        link=None if gpu is None or gpu.interconnect.bandwidth is None else gpu.interconnect.bandwidth.value,
    )


def fit_efficiencies(
    taken: Sequence[Timing],
    *,
    peak: float,
    bandwidth: float,
    gpu: str = "",
    device: str = "cpu",
    multiprocessors: int = 132,
    fp8_peak: float | None = None,
    link: float | None = None,
) -> Calibration:
    """Fit the efficiencies with which an estimate reproduces these times."""
    rates = msgspec.structs.replace(
        efficiencies(gpu),
        multiprocessors=multiprocessors,
        launch=median([timing.seconds for timing in taken if timing.kind == "launch"]),
        throttle=1.0,
        nvls=0.0,
    )
    fit, error = _products([timing for timing in taken if timing.kind == "matmul"], rates, peak, bandwidth)
    rates = msgspec.structs.replace(rates, **fit)
    figures: dict[str, object] = {"launch": rates.launch, **fit}
    whole = Machine(peak=peak, bandwidth=bandwidth, efficiencies=rates)
    long = [timing for timing in taken if timing.kind == "sustained"]
    if long:
        figures["throttle"] = min(1.05, median([_product(timing, whole) / timing.seconds for timing in long]))
    attention = dict(rates.attention)
    for kernel in ATTENTION:
        ahead, back = ([timing for timing in taken if timing.kind == kind] for kind in (kernel, f"{kernel}_backward"))
        if ahead and back:
            attention[kernel] = Both(_attention(ahead, whole, kernel, 0), _attention(back, whole, kernel, 1))
    memory = dict(rates.memory)
    moved = [timing.nbytes / (timing.seconds - rates.launch) / bandwidth for timing in taken if timing.kind in STREAMS]
    memory["elementwise"] = Both(min(1.0, median(moved)), min(1.0, median(moved)))
    norms = [
        [timing.nbytes / timing.seconds / bandwidth for timing in taken if timing.kind == kind]
        for kind in (NORM, f"{NORM}_backward")
    ]
    if all(norms):
        memory["norm-eager"] = Both(min(1.0, median(norms[0])), min(1.0, median(norms[1])))
    figures |= {"attention": attention, "memory": memory}
    eights = [timing for timing in taken if timing.kind == "matmul-fp8"]
    if eights and fp8_peak is not None:
        figures["fp8_matmul"] = median([eight.flops / eight.seconds / fp8_peak for eight in eights])
    wires = {
        kind: _wire([timing for timing in taken if timing.kind == kind], kind, rates, link) for kind in COLLECTIVES
    }
    measured = {kind: wire for kind, wire in wires.items() if wire is not None}
    if measured:
        figures["wires"] = rates.wires | measured
    fitted = msgspec.structs.replace(
        rates,
        gpu=gpu or device,
        basis="measured",
        how="",
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        figures={},
        **figures,
    )
    beside = {"multiprocessors", "gpu", "basis", "how", "date", "figures", "nvls", *figures}
    return Calibration(
        efficiencies=fitted,
        timings=tuple(taken),
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        peak=peak,
        bandwidth=bandwidth,
        kept=tuple(name for name in Efficiencies.__struct_fields__ if name not in beside),
        error=error,
    )


def _products(
    products: Sequence[Timing], efficiencies: Efficiencies, peak: float, bandwidth: float
) -> tuple[dict[str, float], float]:
    """`matmul`, `wave` and `small_k` with the least mean |log(fit / measured)|; and that."""
    refuse(not products, "no matrix product was timed")
    best: tuple[float, dict[str, float]] = (math.inf, {})
    for wave in WAVES:
        for small_k in SMALL_K:
            fit = {"matmul": efficiencies.matmul, "wave": wave, "small_k": float(small_k)}
            for _ in range(4):  # the share and which products are bound by memory decide each other
                logs = _logs(products, msgspec.structs.replace(efficiencies, **fit), peak, bandwidth)
                fit["matmul"] = min(1.5, fit["matmul"] * math.exp(median(logs)))
            error = sum(map(abs, _logs(products, msgspec.structs.replace(efficiencies, **fit), peak, bandwidth))) / len(
                products
            )
            if error < best[0]:
                best = error, fit
    return best[1], best[0]


def _logs(products: Iterable[Timing], efficiencies: Efficiencies, peak: float, bandwidth: float) -> list[float]:
    machine = Machine(peak=peak, bandwidth=bandwidth, efficiencies=efficiencies)
    return [math.log(_product(product, machine) / product.seconds) for product in products]


def _product(product: Timing, machine: Machine) -> float:
    time: float = gemm_seconds(Gemm(product.sizes["m"], product.sizes["n"], product.sizes["k"]), machine)
    return time


def _attention(taken: Sequence[Timing], machine: Machine, kernel: str, way: int) -> float:
    """The share of the peak with which the form gives these times, forward (way 0) or backward."""
    efficiencies = machine.efficiencies
    efficiencies = msgspec.structs.replace(efficiencies, attention=efficiencies.attention | {kernel: Both(1.0, 1.0)})
    at_peak = msgspec.structs.replace(machine, efficiencies=efficiencies, attention=kernel)
    shares = []
    for timing in taken:
        b, s, a, d = (timing.sizes[letter] for letter in "bsad")
        flops = 4 * b * a * s * s * d
        operation = Operation(
            "attention",
            "attention",
            (),
            (),
            gemms=(Gemm(s, s, d, b * a), Gemm(s, d, s, b * a)),
            forward_flops=flops,
            input_gradient_flops=2 * flops,
            rerun_flops=flops // 2,
            computed_share=0.5,
        )
        time = attention_seconds(operation, at_peak)
        at_best = (time.backward if way else time.forward) - machine.launch
        shares.append(at_best / max(1e-9, timing.seconds - machine.launch))
    return median(shares)


def _wire(taken: Sequence[Timing], kind: str, efficiencies: Efficiencies, link: float | None) -> Wire | None:
    """How long a collective takes inside a domain, from its times by size; None where there is no second rank or link.

    One number of ranks does not tell a start from the steps between them: the steps stay what they are.
    """
    if not taken or taken[0].sizes["ranks"] < 2 or link is None:
        return None
    ranks, step = taken[0].sizes["ranks"], efficiencies.wires[kind].step
    small = min(taken, key=lambda timing: timing.sizes["bytes"])

    def error(wire: Wire) -> float:
        fabric = Fabric(
            domain=ranks,
            inner_bandwidth=link,
            outer_bandwidth=link,
            inner_latency=0.0,
            outer_latency=0.0,
            wires={kind: wire},
        )
        group = Group("dp", ranks, 1)
        return sum(abs(math.log(seconds(kind, each.sizes["bytes"], group, fabric) / each.seconds)) for each in taken)

    start = max(1e-7, small.seconds - step * (ranks - 1))
    return min(
        (Wire(start, min(step, small.seconds / ranks), share / 100, root) for share in range(1, 111) for root in ROOTS),
        key=error,
    )


def text(calibration: Calibration) -> str:
    """The efficiencies as TOML, which `spec.calibration` reads."""
    efficiencies = calibration.efficiencies
    lines = [
        f"# What kernels achieve on {calibration.device}, by `loadgauge calibrate`: PyTorch {calibration.torch},"
        f" CUDA {calibration.cuda or 'none'}.",
        f"# Shares of {calibration.peak / 1e12:.4g} TFLOP/s and {calibration.bandwidth / 1e9:.4g} GB/s. Of the time of the matrix"
        f" products, these are off by {math.expm1(calibration.error):.1%} on average.",
        *_sustained(calibration),
        f"# Not measured here: {', '.join(calibration.kept)}.",
        f"# From: {', '.join(timing.name for timing in calibration.timings)}.",
    ]
    tables = ("attention", "memory", "wires")
    for name in Efficiencies.__struct_fields__:
        if name not in (*tables, "figures", "how", "slower"):
            value = getattr(efficiencies, name)
            lines.append(f"{name} = {_value(value)}")
    for name in tables:
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in getattr(efficiencies, name).items())]
    return "\n".join([*lines, ""])


def _sustained(calibration: Calibration) -> list[str]:
    """The rate of a long product, in words that `estimate` takes; nothing where none was timed."""
    long = [timing.flops / timing.seconds for timing in calibration.timings if timing.kind == "sustained"]
    return [f"# Sustained: --measured gemm={median(long) / 1e12:.4g}TFLOP/s"] if long else []


def _value(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return f"[{', '.join(map(_value, msgspec.structs.astuple(value)))}]"
    if isinstance(value, float):
        return repr(float(f"{value:.3g}"))
    return f'"{value}"' if isinstance(value, str) else str(value)
