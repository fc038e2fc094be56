"""Seconds of one operation: the larger of its arithmetic and its memory traffic, at calibrated rates, and its launch.

Legend: m, n, k a matrix product's sizes; a tile is 128 x 256 results, computed by one multiprocessor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from loadgauge.algebra import Size, ceil_div, maximum
from loadgauge.layers.operations import Gemm, Layer, Operation, Tensor
from loadgauge.spec.calibration import Rates
from loadgauge.spec.hardware import Gpu
from loadgauge.spec.kernels import LowPrecision
from loadgauge.spec.training import Training

TILE_ROWS, TILE_COLUMNS = 128, 256


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as the roofline sees it: peaks [FLOP/s], bandwidth [byte/s] and calibrated efficiencies.

    peak: of the format matrix products run in; fp8_peak: of the 8-bit ones, where the recipe has any
    """

    peak: float
    bandwidth: float
    rates: Rates
    fp8_peak: float | None = None
    low: LowPrecision | None = None
    graphs: bool = False
    """Whether CUDA graphs hide the launches."""
    fuses_dropout: bool = False
    """Whether dropout is part of the residual sum's kernel."""
    flash2: bool = False
    """Whether attention is FlashAttention-2's, and not the vendor's own."""

    @property
    def launch(self) -> float:
        """Seconds before each operation (kernel launch)."""
        return 0.0 if self.graphs else self.rates.launch

    @classmethod
    def of(cls, gpu: Gpu, rates: Rates, training: Training) -> Machine:
        """Build the machine for a precision.

        Products run in 16 bits, or in float32 (PyTorch uses no TF32 by default); those of the blocks in 8 or 4 bits where the
        recipe says so.
        """
        low = training.precision.products
        if training.precision.activation == 4:
            peak = gpu.peak("fp32")
        else:
            peak = gpu.peaks.bf16.value if gpu.peaks.bf16 is not None else gpu.peak("fp16")
        return cls(
            peak=peak,
            bandwidth=gpu.memory_bandwidth,
            rates=rates,
            fp8_peak=None if low is None else gpu.peak(low.format),
            low=low,
            graphs=training.overlap.launch,
            fuses_dropout=training.kernels.activation == "fused",
            flash2=not training.framework.transformer_engine,
        )


class OperationTime(msgspec.Struct, frozen=True):
    """Seconds of the forward, the input gradient and the weight gradient of an operation or a layer."""

    forward: Size
    input_gradient: Size
    weight_gradient: Size

    @property
    def backward(self) -> Size:
        """Seconds of both gradients."""
        return self.input_gradient + self.weight_gradient


def gemm_seconds(gemm: Gemm, machine: Machine, *, fp8: bool = False) -> Size:
    """Return the seconds of a matrix product: FLOPs over the achieved rate, or bytes over the bandwidth, the larger of the two.

    Partial tiles, and a last wave that does not fill the GPU, count as `Rates.wave` says.
    """
    rates = machine.rates
    tiles = ceil_div(gemm.m, TILE_ROWS) * ceil_div(gemm.n, TILE_COLUMNS) * gemm.batch
    waves = ceil_div(tiles, rates.multiprocessors)
    useful = gemm.m * gemm.n * gemm.batch / (waves * rates.multiprocessors * TILE_ROWS * TILE_COLUMNS)
    filled = 1 - (1 - useful) * rates.wave
    peak, share = machine.peak, rates.matmul
    if fp8 and machine.fp8_peak is not None:
        four = machine.low is not None and machine.low.format == "fp4"
        peak, share = machine.fp8_peak, rates.fp4_matmul if four else rates.fp8_matmul
    arithmetic = gemm.flops / (peak * share * filled * gemm.k / (gemm.k + rates.small_k))
    moved = 2 * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n) * gemm.batch
    return maximum(arithmetic, moved / (machine.bandwidth * rates.memory)) + machine.launch


def in_eight_bits(operation: Operation) -> bool:
    """Return whether the recipe quantises this product: matrices of the blocks, not router, adapters or head."""
    return any(weight.quantised for weight in operation.weights)


def operation_seconds(operation: Operation, machine: Machine) -> OperationTime:
    """Return the seconds of one operation on one micro-batch, without collectives."""
    rates = machine.rates
    if operation.kind == "quantise":
        copied = 0 if machine.low is None else _quantising(operation.inputs, machine, machine.low)
        return OperationTime(copied, 0, 0)
    if operation.kind == "view" or (operation.kind == "collective" and not _permutes(operation)):
        return OperationTime(0, 0, 0)
    if operation.kind == "attention":
        share = operation.computed_share
        ahead, back = (
            (rates.flash2, rates.flash2_backward) if machine.flash2 else (rates.attention, rates.attention_backward)
        )
        forward = operation.forward_flops * share / (machine.peak * ahead)
        backward = (operation.input_gradient_flops + operation.rerun_flops) * share / (machine.peak * back)
        return OperationTime(forward + machine.launch, backward + machine.launch, 0)
    if operation.gemms:
        return _products(operation, machine)
    nbytes = operation.hbm_bytes()
    if machine.fuses_dropout and operation.kind == "residual_dropout":
        # One kernel with the residual sum, which reads and writes the rest.
        nbytes = sum(tensor.nbytes for tensor in operation.keeps)
    # Backward reads the gradient of what came out and what was kept, and writes the gradient of what went in; a residual
    # sum adds up the two gradients that come to it.
    back = operation.hbm_bytes()
    if not operation.shares_gradient:
        back = back + sum(tensor.nbytes for tensor in operation.keeps)
    routing = rates.routing if _permutes(operation) and operation.kind == "collective" else 0.0
    return OperationTime(_moved(nbytes, machine) + routing, _moved(back, machine) + routing, 0)


def _permutes(operation: Operation) -> bool:
    """Dispatch to the experts also reorders the tokens in memory."""
    return any(collective.axis == "ep" for collective in operation.forward_comm)


def _moved(nbytes: Size, machine: Machine) -> Size:
    """Return the seconds of an element-wise operation over `nbytes` bytes."""
    rates = machine.rates
    return rates.traffic * (nbytes / (machine.bandwidth * rates.memory) + machine.launch)


def _quantising(tensors: Iterable[Tensor], machine: Machine, low: LowPrecision) -> Size:
    """Seconds to read 16 bits and write 8 or 4, by rows and by columns."""
    return _moved(sum(tensor.numel for tensor in tensors) * (2 + 2 * low.element), machine)


def _products(operation: Operation, machine: Machine) -> OperationTime:
    """Matrix products with weights (one product a gradient), or between activations."""
    low = machine.low if in_eight_bits(operation) else None
    fp8 = low is not None
    forward = sum(gemm_seconds(gemm, machine, fp8=fp8) for gemm in operation.gemms)
    inputs = sum(gemm_seconds(Gemm(g.m, g.k, g.n, g.batch), machine, fp8=fp8) for g in operation.gemms)
    if not operation.weights:
        weights = sum(gemm_seconds(Gemm(g.k, g.n, g.m, g.batch), machine) for g in operation.gemms)
        return OperationTime(forward, inputs + weights, 0)
    weights = 0
    if any(weight.trainable for weight in operation.weights):
        eight = low is not None and low.weight_gradient
        weights = sum(gemm_seconds(Gemm(g.k, g.n, g.m, g.batch), machine, fp8=eight) for g in operation.gemms)
    if low is not None:
        # What goes in is quantised, and so is the gradient of what comes out.
        done = any(tensor.dtype == "quantised" for tensor in operation.keeps)
        into = 0 if done else _quantising(operation.inputs, machine, low)
        out_of = _quantising(operation.outputs, machine, low)
        if low.weights == "within":
            into = into + _moved(operation.params * (2 + low.weight_element), machine)
            out_of = out_of + _moved(operation.params * (2 + low.weight_element), machine)
        return OperationTime(forward + into, inputs + out_of, weights)
    return OperationTime(forward, inputs, weights)


def layer_seconds(layer: Layer, machine: Machine) -> OperationTime:
    """Return the seconds of a layer on one micro-batch: the sum over its operations, without collectives."""
    times = [operation_seconds(operation, machine) for operation in layer]
    return OperationTime(
        sum(time.forward for time in times),
        sum(time.input_gradient for time in times),
        sum(time.weight_gradient for time in times),
    )
