"""Fit the figures of convolutions (`core/estimate/time/roofline.py`, `Convolution`) to measured layers, and to all GPUs but one.

python -m operators.convolutions
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from loadgauge.core.definitions.hardware.calibration import efficiencies
from loadgauge.core.definitions.hardware.hardware import gpu as card_named
from loadgauge.core.estimate.time import roofline
from loadgauge.core.estimate.time.roofline import CONVOLUTIONS, Convolution, Machine, operation_seconds
from loadgauge.core.layers.operations.operations import Gemm, Operation, Weight

TABLE = Path(__file__).parents[2] / "tests/data/convolutions.csv"
SHARES = tuple(share / 100 for share in range(40, 115, 5))
STARTS = tuple(microseconds * 1e-6 for microseconds in (4, 6, 8, 10, 12, 16, 20, 25, 30, 40, 50))
GRID = {
    "forward": SHARES, "inputs": SHARES, "filters": SHARES, "memory": SHARES[2:], "start": STARTS, "filters_start": STARTS,
    "wave": (0.25, 0.5, 0.75, 1.0), "stepping": (1.0, 1.5, 2.0, 2.5, 3.0), "winograd": (1.0, 1.6, 2.0, 2.4),
}  # fmt: skip
MOST = 1.2
"""An error counts no more than this (of the logarithm): libraries choose an algorithm that does not fit for one layer in ten."""


class Layer(NamedTuple):
    """A measured layer: of its passes (forward, inputs, filters) those that were measured [s]."""

    gpu: str
    dtype: str
    operation: Operation
    seconds: tuple[float | None, float | None, float | None]

    @property
    def kind(self) -> tuple[str, str]:
        """The GPU and the format."""
        return self.gpu, self.dtype


def layers() -> Iterator[Layer]:
    """Read the table. In 16 bits what has channels that 8 does not divide was padded to some that it does."""
    lines = [line for line in TABLE.read_text("utf-8").splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        size = {name: int(row[name]) for name in list(row)[2:12]}
        itemsize = 2 if row["dtype"] == "fp16" else 4
        channels, filters, batch = size["channels"], size["filters"], size["batch"]
        if itemsize == 2:
            channels += -channels % 8
        taps, places = size["filter_height"] * size["filter_width"], batch * size["rows"] * size["columns"]
        flops, numel = 2 * places * filters * channels * taps, filters * channels * taps
        moved = itemsize * (batch * channels * size["width"] * size["height"] + places * filters + numel)
        operation = Operation(
            "convolution", "convolution", (), (), (Weight("w", numel, None, "matrix"),), forward_flops=flops,
            input_gradient_flops=2 * flops, moves=(moved, 2 * moved), implicit=Gemm(places, filters, channels * taps),
            taps=taps, steps=size["stride"] > 1,
        )  # fmt: skip
        seconds = [float(row[name]) / 1e3 if row[name] else None for name in list(row)[12:]]
        yield Layer(row["gpu"], row["dtype"], operation, (seconds[0], seconds[1], seconds[2]))


def machine(layer: Layer) -> Machine:
    """Return the GPU of a layer, without what software adds to kernels."""
    card, plain = card_named(layer.gpu), layer.dtype == "fp32"
    return Machine(
        peak=card.peak("fp32" if plain else "fp16"), bandwidth=card.memory_bandwidth, efficiencies=efficiencies(layer.gpu),
        plain=plain, single=card.peak("fp32"),
    )  # fmt: skip


def errors(measured: Iterable[Layer], figures: Convolution | None = None) -> dict[str, list[float]]:
    """Return the logarithms of predicted over measured seconds, by pass. figures: in place of the package's"""
    found: dict[str, list[float]] = {"forward": [], "inputs": [], "filters": []}
    before, roofline.CONVOLUTIONS = CONVOLUTIONS, CONVOLUTIONS if figures is None else {True: figures, False: figures}
    try:
        for layer in measured:
            card = machine(layer)
            both = operation_seconds(layer.operation, card)
            half = Operation(**{name: getattr(layer.operation, name) for name in layer.operation.__struct_fields__} | {
                "input_gradient_flops": layer.operation.forward_flops})  # fmt: skip
            filters = operation_seconds(half, card).backward
            for name, predicted, seconds in zip(
                found, (both.forward, both.backward - filters, filters), layer.seconds, strict=True
            ):
                if seconds:
                    found[name].append(math.log(predicted / seconds))
    finally:
        roofline.CONVOLUTIONS = before
    return found


LARGE = 2e9
"""FLOPs of a layer from which on it is one of a training, with batches of tens of pictures: half of what counts."""


def score(measured: list[Layer], figures: Convolution) -> float:
    """The mean error, of each pass as much, and of large layers as much as of all."""
    large = [layer for layer in measured if layer.operation.forward_flops > LARGE]
    return statistics.fmean(
        statistics.fmean(min(abs(error), MOST) for error in of)
        for some in (measured, large)
        for of in errors(some, figures).values()
        if of
    )


def fit(measured: list[Layer], rounds: int = 3) -> Convolution:
    """Return the figures of the grid that are best, one after the other; kinds of GPU and format count alike."""
    kinds = {layer.kind for layer in measured}
    by_kind = [[layer for layer in measured if layer.kind == kind][::2] for kind in sorted(kinds)]

    def of(figures: Convolution) -> float:
        return statistics.fmean(score(of_kind, figures) for of_kind in by_kind)

    best = CONVOLUTIONS[measured[0].dtype == "fp16"]
    least = of(best)
    for _ in range(rounds):
        for name, values in GRID.items():
            for value in values:
                if (tried := of(other := best._replace(**{name: value}))) < least - 1e-9:
                    best, least = other, tried
    return best


def _line(name: str, found: dict[str, list[float]]) -> str:
    parts = []
    for way, of in found.items():
        signed, middle = math.exp(statistics.median(of)) - 1, statistics.median(abs(error) for error in of)
        parts.append(f"{way} {signed:+.0%} / {math.exp(middle) - 1:.0%}")
    return f"{name:24} {', '.join(parts)}"


def main() -> None:
    """Print the fit to all, and the errors of each GPU by the figures that the others give: signed / usual."""
    measured = list(layers())
    for dtype in ("fp16", "fp32"):
        print(dtype, fit([layer for layer in measured if layer.dtype == dtype]))
    for kind in sorted({layer.kind for layer in measured}):
        own = [layer for layer in measured if layer.kind == kind]
        others = fit([layer for layer in measured if layer.gpu != kind[0] and layer.dtype == kind[1]])
        print(_line(f"{' '.join(kind)}", errors(own)))
        print(_line("  left out", errors(own, others)), others)


if __name__ == "__main__":
    main()
