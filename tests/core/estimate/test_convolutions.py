"""Convolutions beside measured layers, and what must hold for all of them."""

from __future__ import annotations

import math
import statistics

import pytest

from loadgauge.core.definitions.hardware.calibration import efficiencies
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.estimate.time.roofline import CONVOLUTIONS, Machine, OperationTime, operation_seconds
from loadgauge.core.layers.operations.operations import Gemm, Operation, Weight
from operators.convolutions import errors, layers

MEASURED = list(layers())
KINDS = sorted({layer.kind for layer in MEASURED})


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_layers_take_the_time_that_was_measured(kind: tuple[str, str]) -> None:
    """Half of 90 layers within a quarter forward, and a half at the filters' gradient; none of the passes off as a whole."""
    found = errors([layer for layer in MEASURED if layer.kind == kind])
    for name, most in (("forward", 0.25), ("inputs", 0.35), ("filters", 0.55)):
        assert len(found[name]) > 60
        assert statistics.median(map(abs, found[name])) < math.log(1 + most), name
        assert abs(statistics.median(found[name])) < math.log(1.55), name


def seconds(
    channels: int = 64, filters: int = 64, *, plain: bool = False, groups: int = 1, **fields: object
) -> OperationTime:
    """A filter of 3 x 3 over a million places of endless memory bandwidth, on a card whose tiles are all full."""
    card = gpu("v100-sxm2-16gb")
    machine = Machine(
        peak=card.peak("fp32" if plain else "fp16"), bandwidth=1e30, efficiencies=efficiencies(card.id), plain=plain, graphs=True
    )  # fmt: skip
    flops = 2 * 2**20 * channels * filters * 9 * groups
    given: dict[str, object] = {"forward_flops": flops, "input_gradient_flops": 2 * flops, "moves": (0, 0), "taps": 9}
    given |= {"implicit": Gemm(80 * 2**16, filters, 9 * channels, groups), **fields}
    return operation_seconds(Operation("c", "convolution", (), (), **given), machine)  # type: ignore[arg-type]


TENSOR, PLAIN = CONVOLUTIONS[True], CONVOLUTIONS[False]


def arithmetic(time: float, start: float = TENSOR.start) -> float:
    return time - start


def test_few_channels_take_the_time_of_a_whole_slab() -> None:
    """Tensor cores read 32 channels of each place at once, and make 64 of the result: of fewer, the rest is idle."""
    whole = arithmetic(seconds(32, 64).forward)
    rates = efficiencies("v100-sxm2-16gb")
    products = gpu("v100-sxm2-16gb").peak("fp16") * rates.matmul * rates.throttle
    assert whole * products * TENSOR.forward == pytest.approx(2 * 2**20 * 32 * 64 * 9, rel=1e-6)
    assert arithmetic(seconds(3, 64).forward) == pytest.approx(whole, rel=1e-6)
    assert arithmetic(seconds(32, 16).forward) == pytest.approx(whole, rel=1e-6)
    assert arithmetic(seconds(33, 64).forward) == pytest.approx(2 * whole, rel=1e-6)
    plain = arithmetic(seconds(32, 64, plain=True).forward, PLAIN.start)  # plain cores have none
    assert arithmetic(seconds(3, 64, plain=True).forward, PLAIN.start) == pytest.approx(plain * 3 / 32, rel=1e-6)


def test_groups_are_multiplied_together() -> None:
    """32 groups of 4 channels have the FLOPs of one of 22.6, and take the time of two whole ones of 64."""
    grouped = arithmetic(seconds(4, 4, groups=32).forward)
    assert grouped == pytest.approx(2 * arithmetic(seconds(64, 64).forward), rel=1e-6)


def test_gradients() -> None:
    """One gradient or both; the input's takes longer where the filter steps over places; a transposed one does so forward."""
    flops = 2 * 2**20 * 64 * 64 * 9
    weights = (Weight("w", 64 * 64 * 9, None, "matrix"),)
    both = seconds(weights=weights).backward
    filters = seconds(weights=weights, input_gradient_flops=flops).backward
    frozen = seconds(input_gradient_flops=flops).backward
    assert both == pytest.approx(filters + frozen, rel=1e-6)
    stepping = seconds(input_gradient_flops=flops, steps=True)
    assert arithmetic(stepping.backward) == pytest.approx(TENSOR.stepping * arithmetic(frozen), rel=1e-6)
    # A transposed one is stated by its filters' places beside what it makes.
    product = Gemm(80 * 2**16, 9 * 64, 64)
    turned = seconds(taps=-9, steps=True, implicit=product, input_gradient_flops=flops)
    assert turned.forward == pytest.approx(stepping.backward, rel=1e-6)
    assert turned.backward == pytest.approx(stepping.forward, rel=1e-6)


def test_winograd_spares_products_of_plain_cores() -> None:
    usual, stepping = seconds(plain=True), seconds(plain=True, steps=True)
    assert arithmetic(stepping.forward, PLAIN.start) == pytest.approx(
        PLAIN.winograd * arithmetic(usual.forward, PLAIN.start), rel=1e-6
    )
    wide = seconds(plain=True, taps=25, implicit=Gemm(80 * 2**16, 64, 25 * 64))
    assert wide.forward == pytest.approx(stepping.forward, rel=1e-6)
