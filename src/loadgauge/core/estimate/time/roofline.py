"""Seconds of one operation, from what its kernel was measured to achieve (`core/definitions/hardware/calibration.py`).

Kernels that compute and move bytes hide most of one under the other, but not all: t = (arithmetic^3 + traffic^3)^(1/3) + launch. A
sum of the two is twice as far off on measured products, their maximum a little further.

Legend: m, n, k a matrix product's sizes; a tile is 128 x 256 results, computed by one multiprocessor at a time; of attention, 128
queries of one head.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import msgspec

from loadgauge.core.base.algebra import Size, both_count, ceil_div, maximum, minimum, same
from loadgauge.core.base.errors import NotStated
from loadgauge.core.definitions.hardware.calibration import Both, Efficiencies, chip_of
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.model.kernels import WRITTEN_KERNELS, LowPrecision
from loadgauge.core.definitions.model.lora import BaseFormat
from loadgauge.core.definitions.training.software import factor, host_seconds, kind_of
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.layers.operations.operations import Gemm, Layer, Operation, Tensor

TILE_ROWS, TILE_COLUMNS = 128, 256
NARROW, USUAL, WIDE = 64, 128, 256
"""Widths of attention heads between which the achieved share is interpolated."""


GROUPED_SINCE = 9.0
"""The compute capability from which on PyTorch has one kernel for products of several experts."""
FUSED_LOSSES = ("inplace", "jit", "fused")
"""Losses of one kernel or a few, whose measured share is of the least they can move."""
DEQUANTISE = 2.5 / 3.35
"""Share of the memory bandwidth at which 16 bits are made of fewer (source: DeepSpeed, pull request 5373: 2.5 TB/s on H100)."""
BRANCHING = 1.68
"""By how much bitsandbytes' kernel was slower before 0.48 where memory does not bound it, on chips of data centres (the middle of
1.36 to 2.07; source: bitsandbytes, pull request 1747)."""
FAST_MEMORY = ("8.0", "9", "10")
"""Chips of data centres, by `chip_of`."""


class Rate(NamedTuple):
    """Speed of matrix products in one format: FLOP/s of a large one, the inner width at which half of it is reached, and the
    bytes of an element of what goes in and of what comes out."""

    flops: float
    small_k: float
    element: float
    result: int = 2


class Machine(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One GPU as kernels see it: peaks [FLOP/s], bandwidth [byte/s] and what kernels achieve of them.

    peak: of the format matrix products run in; fp8_peak: of the 8-bit ones, where the recipe has any
    """

    peak: float
    bandwidth: float
    efficiencies: Efficiencies
    fp8_peak: float | None = None
    low: LowPrecision | None = None
    graphs: bool = False
    """True where CUDA graphs hide the launches."""
    one_kernel: bool = False
    """True where one kernel multiplies for all experts of a rank; else each expert has launches of its own."""
    fuses_dropout: bool = False
    """True where the kernel of the residual sum also drops out."""
    stored: BaseFormat | None = None
    """Storage of a frozen base, whose matrices are made in 16 bits for each product."""
    dequantise: float = DEQUANTISE
    """Share of the bandwidth at which they are made."""
    cast: int = 0
    """Bytes moved to copy an element of a float32 weight in 16 bits, where autocast does for each micro-batch."""
    attention: str = "fa2"
    """The kernel of fused attention (`Efficiencies.attention`)."""
    norm: str = "eager"
    """Who made the kernels of norms (`Kernels.norm_kernel`)."""
    loss: str = "elementwise"
    """The family of kernels that the loss belongs to."""
    software: float = 1.0
    """Seconds of compute over those of the kernels alone."""
    host: float = 0.0
    """Seconds in which the host launches an operation, in each direction (`core/definitions/training/software.py`)."""
    plain: bool = False
    """True where products run without tensor cores (float32), at a share of their own."""
    tf32: float = 0.0
    """Peak of convolutions in float32 over that of products, where tensor cores run them; 0: they do not."""
    single: float = 1.0
    """FLOP/s of the plain cores in float32, which convolutions of single channels run on."""

    @property
    def format(self) -> str:
        """The format that `peak` is of."""
        return "float32" if self.plain else "16-bit"

    def peak_of(self, layers: Iterable[Layer]) -> float:
        """Return the dense peak in the format of most products of some layers [FLOP/s]: float32's convolutions run in TF32."""
        operations = [operation for layer in layers for operation in layer.operations]
        convolved = sum(each.forward_flops for each in operations if each.implicit is not None and same(each.turns, 0))
        most = 2 * convolved > sum(operation.forward_flops for operation in operations)
        return self.peak * (self.tf32 if most and self.plain and self.tf32 else 1.0)

    @property
    def launch(self) -> float:
        """Seconds before each operation (kernel launch)."""
        return 0.0 if self.graphs else self.efficiencies.launch * self.software

    @property
    def quantise_launch(self) -> float:
        """Seconds before each kernel that makes a copy of few bits, and before those that find its scale."""
        blocks, rates = self.low is not None and (self.low.blocks or self.low.format == "fp4"), self.efficiencies
        launch = rates.block_quantise_launch if blocks else rates.quantise_launch
        return 0.0 if self.graphs else launch * self.software

    @cached_property
    def usual(self) -> Rate:
        """Return the rate of products in the usual format."""
        rates = self.efficiencies
        share = rates.float32 if self.plain else rates.matmul * rates.throttle
        return Rate(self.peak * share / self.software, rates.small_k, *((4, 4) if self.plain else (2, 2)))

    @cached_property
    def few_bits(self) -> Rate:
        """Return the rate of products in the 8-bit or 4-bit format of the recipe; in the usual one where it has none."""
        rates = self.efficiencies
        if self.fp8_peak is None:
            return self.usual
        share, small_k, element = rates.fp8_matmul, rates.fp8_small_k, 1.0
        if self.low is not None and self.low.format == "fp4":
            share, small_k, element = rates.fp4_matmul, rates.fp4_small_k, 0.5
        elif self.low is not None and self.low.blocks:
            share, small_k = rates.fp8_block_matmul, rates.fp8_block_small_k
        return Rate(self.fp8_peak * share * rates.throttle / self.software, small_k, element)

    @cached_property
    def fused_attention(self) -> Both:
        """FLOP/s that the attention kernel reaches in forward and backward, of heads 128 wide and long sequences.

        In float32 it is the memory-efficient one, which makes a product of three in TF32 where there are tensor cores for it
        (source: pytorch, `mem_eff_attention/gemm_kernel_utils.h`, `OpMultiplyAddFastF32`).
        """
        shares = self.efficiencies.attention["fa1" if self.plain and self.tf32 else self.attention]
        peak = self.peak * max(1.0, self.tf32 / 3) if self.plain else self.peak
        rate = peak * self.efficiencies.throttle / self.software
        return Both(rate * shares.forward, rate * shares.backward)

    def memory(self, family: str) -> Both:
        """Return the byte/s that a family of kernels moves in forward and backward."""
        rates: Both | None = self.__dict__.get(family)
        if rates is None:
            share, rate = self.efficiencies.memory[family], self.bandwidth / self.software
            rates = self.__dict__[family] = Both(rate * share.forward, rate * share.backward)
        return rates

    @classmethod
    def of(cls, gpu: Gpu, efficiencies: Efficiencies, training: Training, *, experts: bool = False) -> Machine:
        """Build the machine for a precision. experts: of a mixture of experts

        Products run in 16 bits, or in float32 (PyTorch uses no TF32 by default); those of the blocks in 8 or 4 bits where the
        recipe says so.
        """
        recipe, low = training.precision, training.precision.products
        casts = recipe.casts or training.framework.casts
        own = experts and training.framework.experts_by_te
        branches = training.lora is not None and training.lora.branching
        if training.precision.activation == 4:
            peak = gpu.peak("fp32")
        elif training.precision.name.startswith("bf16") and not gpu.bf16:
            raise NotStated(f"{gpu.name} has no bf16, and what PyTorch's emulation of it takes is not known")
        else:
            peak = gpu.peaks.bf16.value if gpu.peaks.bf16 is not None else gpu.peak("fp16")
        return cls(
            peak=peak,
            bandwidth=gpu.memory_bandwidth,
            efficiencies=efficiencies,
            fp8_peak=None if low is None else gpu.peak(low.format),
            low=low,
            graphs=training.overlap.launch,
            one_kernel=_one_kernel(gpu, training),
            fuses_dropout=training.kernels.activation == "fused",
            stored=None if training.lora is None else training.lora.stored,
            dequantise=DEQUANTISE / (BRANCHING if branches and chip_of(gpu) in FAST_MEMORY else 1.0),
            cast=(recipe.weight + recipe.compute) * (recipe.autocast and casts == "autocast"),
            attention="cudnn" if own else training.kernels.flash or training.framework.flash_on(gpu),
            norm="fused" if own else training.kernels.norm_kernel,
            loss="loss" if training.kernels.loss in FUSED_LOSSES else "elementwise",
            software=factor(experts=experts, low_precision=low is not None, graphs=training.overlap.launch).factor
            * kind_of(stack=training.framework.stack, experts=experts, tuning=training.tuning).factor
            * efficiencies.slower[0],
            host=host_seconds(
                "graphs" if training.overlap.launch else "compiled" if training.kernels.compiled else "eager"
            )
            * efficiencies.slower[0],
            plain=training.precision.activation == 4,
            tf32=0.0 if gpu.peaks.tf32 is None else gpu.peaks.tf32.value / peak,
            single=gpu.peak("fp32") if gpu.peaks.fp32 else peak,
        )


def _one_kernel(gpu: Gpu, training: Training) -> bool:
    """Return whether one kernel multiplies for all experts: PyTorch's `grouped_mm` from Hopper on (it loops on older cards), and
    a CUDA graph of the whole step, which cannot launch a number that only routing decides. Transformer Engine launches each.

    (source: pytorch, `aten/native/cuda/GroupedBlas.cpp`; megatron-lm, `full_iteration` graphs of dropless experts)
    """
    if training.overlap.launch:
        return True
    older = gpu.vendor == "nvidia" and float(gpu.compute_capability or 0) < GROUPED_SINCE
    return training.kernels.experts in ("grouped", "scattered") and not older


class OperationTime(msgspec.Struct, frozen=True):
    """Seconds of the forward, the input gradient and the weight gradient of an operation or a layer."""

    forward: Size
    input_gradient: Size
    weight_gradient: Size

    @property
    def backward(self) -> Size:
        """Seconds of both gradients."""
        return self.input_gradient + self.weight_gradient


def gemm_seconds(
    gemm: Gemm,
    machine: Machine,
    *,
    fp8: bool = False,
    slower: Size = 1.0,
    weight: Size | None = None,
    memory: float | None = None,
) -> Size:
    """Return the seconds of a matrix product: what `product_parts` says, both counted, and a launch."""
    arithmetic, traffic = product_parts(gemm, machine, fp8=fp8, slower=slower, weight=weight, memory=memory)
    return both_count(arithmetic, traffic) + machine.launch


def product_parts(
    gemm: Gemm,
    machine: Machine,
    *,
    fp8: bool = False,
    slower: Size = 1.0,
    weight: Size | None = None,
    memory: float | None = None,
) -> tuple[Size, Size]:
    """Return the seconds of a matrix product's FLOPs at the achieved rate, and of its bytes at the bandwidth.

    Partial tiles, and a last wave that does not fill the GPU, count as `Efficiencies.wave` says. slower: the time of its
    arithmetic over that of a product that only writes its result; weight: bytes of an element of the (k, n) matrix, where it is
    stored in fewer than the other; memory: share of the bandwidth, where another
    """
    efficiencies = machine.efficiencies
    rate = machine.few_bits if fp8 else machine.usual
    tiles = ceil_div(gemm.m, TILE_ROWS) * ceil_div(gemm.n, TILE_COLUMNS) * gemm.batch
    waves = ceil_div(tiles, efficiencies.multiprocessors)
    useful = gemm.m * gemm.n * gemm.batch / (waves * (efficiencies.multiprocessors * TILE_ROWS * TILE_COLUMNS))
    filled = 1 - (1 - useful) * efficiencies.wave
    arithmetic = gemm.flops * (slower / rate.flops) / (filled * gemm.k / (gemm.k + rate.small_k))
    stored = rate.element if weight is None else weight
    moved = (gemm.k * (rate.element * gemm.m + stored * gemm.n) + rate.result * gemm.m * gemm.n) * gemm.batch
    share = memory or efficiencies.product_memory
    return arithmetic, moved * (machine.software / (machine.bandwidth * share))


def grouped_seconds(gemm: Gemm, machine: Machine, *, fp8: bool = False, weight: bool = False) -> Size:
    """Return the seconds of the products of several experts: what `grouped_parts` says, the first two both counted."""
    arithmetic, traffic, launches = grouped_parts(gemm, machine, fp8=fp8, weight=weight)
    return both_count(arithmetic, traffic) + launches


def grouped_parts(gemm: Gemm, machine: Machine, *, fp8: bool = False, weight: bool = False) -> tuple[Size, Size, Size]:
    """Return the seconds of FLOPs, of bytes and of launches of the products of several experts: one kernel, or one by one.

    gemm: `batch` products of one size; weight: whether they add to the gradients of the weights
    """
    measured = machine.efficiencies
    if machine.one_kernel:
        slower = measured.weight_gradient if weight else 1.0
        parts = product_parts(gemm, machine, fp8=fp8, slower=slower, memory=measured.grouped_memory)
        return *parts, machine.launch
    slower = 1 / (measured.grouped_weight if weight else measured.grouped)
    launches = machine.launch + gemm.batch * (measured.grouped_launch * machine.software)
    return *product_parts(gemm, machine, fp8=fp8, slower=slower), launches


def attention_seconds(operation: Operation, machine: Machine) -> OperationTime:
    """Return the seconds of a fused attention kernel: FLOPs of the pairs that are not masked, at its achieved rate.

    The rate falls where each query sees few keys, where heads are narrow, and where the last wave of tiles leaves
    multiprocessors idle. Backward counts the scores that it makes again.
    """
    measured, rates = machine.efficiencies, machine.fused_attention
    scores, values = operation.gemms
    share, queries = operation.computed_share, scores.m * scores.batch
    flops = operation.forward_flops * share
    keys = flops / (2 * (scores.k + values.n) * queries)
    tiles = ceil_div(scores.m, TILE_ROWS) * scores.batch
    filled = tiles / (ceil_div(tiles, measured.multiprocessors) * measured.multiprocessors)
    forward = rates.forward * _of_width(scores.k, measured.narrow.forward, measured.wide.forward) * filled
    backward = rates.backward * _of_width(scores.k, measured.narrow.backward, measured.wide.backward) * filled
    again = (operation.input_gradient_flops + operation.rerun_flops) * share
    few, back = 1 + measured.attention_keys.forward / keys, 1 + measured.attention_keys.backward / keys
    return OperationTime(flops * few / forward + machine.launch, again * back / backward + machine.launch, 0)


def _of_width(width: Size, narrow: float, wide: float) -> float:
    """The factor on the rate of attention of heads of this width: 1 at 128."""
    if not isinstance(width, (int, float)):
        return 1.0
    if width <= USUAL:
        return narrow + (1 - narrow) * max(0.0, width - NARROW) / (USUAL - NARROW)
    return 1 + (wide - 1) * min(1.0, (width - USUAL) / (WIDE - USUAL))


def in_eight_bits(operation: Operation) -> bool:
    """Return whether the recipe quantises this product: matrices of the blocks, not router, adapters or head."""
    return any(weight.quantised for weight in operation.weights)


def operation_seconds(operation: Operation, machine: Machine) -> OperationTime:
    """Return the seconds of one operation on one micro-batch, without collectives."""
    time = _seconds(operation, machine)
    if not operation.gradients:
        return OperationTime(time.forward, 0, 0)
    # A frozen base's input may need no gradient, nor what a trained weight reads at the bottom of what is trained.
    products = operation.gemms and operation.kind != "attention" and not operation.into_inputs
    return OperationTime(time.forward, 0, time.weight_gradient) if products else time


def _seconds(operation: Operation, machine: Machine) -> OperationTime:
    if operation.kind == "quantise":
        copied = 0 if machine.low is None else _quantising(operation.inputs, machine, machine.low)
        return OperationTime(copied, 0, 0)
    # Dispatch to the experts also reorders the tokens in memory.
    permutes = any(collective.axis == "ep" for collective in operation.forward_comm)
    if operation.kind == "view" or (operation.kind == "collective" and not permutes):
        return OperationTime(0, 0, 0)
    if operation.kind == "attention":
        return attention_seconds(operation, machine)
    if operation.gemms:
        return _products(operation, machine)
    if operation.implicit is not None and not same(operation.turns, 0):
        return _recurrent(operation, operation.implicit, machine)
    if operation.implicit is not None:
        return _convolved(operation, operation.implicit, machine)
    if operation.moves is not None and operation.kind == "norm" and machine.norm == "written":
        rate, launch = machine.memory("norm-written"), machine.launch
        ahead, back = operation.moves[0] / rate.forward, operation.moves[1] / rate.backward
        return OperationTime(ahead + WRITTEN_KERNELS[0] * launch, back + WRITTEN_KERNELS[1] * launch, 0)
    if operation.moves is not None and operation.kind != "norm":
        ahead, back = (operation.calls * _streamed(nbytes, machine) for nbytes in operation.moves)
        return OperationTime(ahead, back, 0)
    permutes = operation.kind == "collective"
    rates = machine.memory(_family(operation, machine))
    nbytes = operation.hbm_bytes()
    if machine.fuses_dropout and operation.kind == "residual_dropout":
        # One kernel with the residual sum, which reads and writes the rest.
        nbytes = sum(tensor.nbytes for tensor in operation.keeps)
    back = operation.hbm_bytes()
    if operation.kind == "norm":
        # Measured shares are of the least a norm can move: backward reads two tensors and writes one.
        back = back + sum(tensor.nbytes for tensor in operation.inputs)
    elif not operation.shares_gradient:
        # Backward reads the gradient of what came out and what was kept, and writes the gradient of what went in; a
        # residual sum adds up the two gradients that come to it.
        back = back + sum(tensor.nbytes for tensor in operation.keeps)
    beside, calls = machine.launch + (_routing(operation, machine) if permutes else 0.0), operation.calls
    return OperationTime(calls * (nbytes / rates.forward + beside), calls * (back / rates.backward + beside), 0)


def _recurrent(operation: Operation, product: Gemm, machine: Machine) -> OperationTime:
    """Return the seconds of a recurrence: of a turn a product and what follows it, each after the one before; the rest at once.

    Backward makes the gradient of each turn's state in the same order, and those of weights at the end.
    """
    turns = operation.turns * (gemm_seconds(product, machine) + machine.launch)
    rest = operation.forward_flops / machine.usual.flops
    again = operation.backward_flops / maximum(operation.forward_flops, 1)
    return OperationTime(turns + rest, minimum(again, 1) * turns + again * rest, 0)


class Single(NamedTuple):
    """Shares of the plain cores' peak and of the bandwidth that a filter of one channel reaches, one after the other, and both
    its gradients over forward.

    Source: 30 measured stacks of such layers, of 3 to 31 places a side (ding2022, table 1), which these meet within 3 % in the
    median; cuDNN's kernels of 16 bits are 1.23 times as fast (pytorch-91735), gradients as in pytorch-75747 and pytorch-18631.
    """

    cores: float
    memory: float
    backward: float


SINGLE, SINGLE_NARROW = Single(0.118, 0.46, 4.6), Single(0.145, 0.57, 2.4)


class Convolution(NamedTuple):
    """Shares that cuDNN's convolutions reach, and what each takes beside.

    forward, inputs, filters: share of the rate of matrix products, of the result and both gradients
    memory: share of the bandwidth; start, filters_start: seconds that each takes beside; wave: share of the multiprocessors which a
    last wave leaves idle that shows; stepping: arithmetic of an input's gradient where the filter moves on by several places, over
    that of one; winograd: products that are spared on plain cores, with filters of 3 x 3 that move on by one place
    Source: 640 layers on five GPUs (deepbench), fitted by `tools/operators/convolutions.py`.
    """

    forward: float
    inputs: float
    filters: float
    memory: float
    start: float
    filters_start: float
    wave: float
    stepping: float
    winograd: float


CONVOLUTIONS = {
    True: Convolution(0.85, 0.8, 0.65, 0.75, 1e-5, 1.2e-5, 0.5, 1.5, 1),
    False: Convolution(0.85, 0.9, 0.7, 0.65, 3e-5, 5e-5, 0.25, 2.0, 2.0),
}
"""On tensor cores, and on plain ones."""
SLAB, COLUMNS = 32, 64
"""Channels that tensor cores read at once for each place of a filter, and that a tile of the result has at least."""


def _convolved(operation: Operation, product: Gemm, machine: Machine) -> OperationTime:
    """Return the seconds of a convolution: of its FLOPs, as the product that it is, and of the bytes that it moves, both counted.

    In float32 it runs on tensor cores in TF32 where there are any (`torch.backends.cudnn.allow_tf32` is on unless said). Tensor
    cores read channels that lie together: of others, what goes in and out is copied there and back. They multiply whole slabs of
    channels, so that few channels take the time of many. A filter of one channel has nothing to multiply with a tile of rows, and
    runs on the plain cores (`Single`).
    """
    ahead = (operation.moves or (0, 0))[0]
    flops, again = operation.forward_flops, operation.backward_flops / operation.forward_flops
    if same(product.n, 1) and not same(product.batch, 1):
        rates = SINGLE if machine.plain else SINGLE_NARROW
        arithmetic = flops / (rates.cores * machine.single)
        alone = machine.software * (arithmetic + ahead / (rates.memory * machine.bandwidth))
        return OperationTime(alone + machine.launch, again / 2 * rates.backward * alone + again * machine.launch, 0)
    rate, taps = machine.usual.flops, abs(operation.taps)
    outer, inner = (product.n / taps, product.k) if operation.taps < 0 else (product.n, product.k / taps)
    on_tensor_cores = machine.tf32 > 0 or not machine.plain
    figures = CONVOLUTIONS[on_tensor_cores]
    if machine.plain and machine.tf32:
        rate = rate * machine.tf32 * machine.efficiencies.matmul / machine.efficiencies.float32
    elif machine.plain and taps == 9 and not operation.steps:
        rate = rate * figures.winograd
    traffic = ahead * machine.software / (machine.bandwidth * figures.memory)
    copied = 2 * ahead / machine.memory("elementwise").forward if operation.strided and on_tensor_cores else 0

    def seconds(share: float, start: float, outer: Size, inner: Size, columns: int, slab: int, places: Size) -> Size:
        waste: Size = 1
        if on_tensor_cores:  # groups are multiplied together, until a tile is full
            groups = minimum(product.batch, ceil_div(columns, outer))
            waste = groups * _whole(groups * outer, columns) * _whole(groups * inner, slab)
        tiles = ceil_div(places, TILE_ROWS) * ceil_div(outer, TILE_COLUMNS) * product.batch
        waves = ceil_div(tiles, machine.efficiencies.multiprocessors) * machine.efficiencies.multiprocessors
        filled = 1 - (1 - tiles / waves) * figures.wave if places else 1
        arithmetic = flops * waste / (rate * share * filled)
        return both_count(arithmetic, traffic) + copied + machine.launch + start * machine.software

    shares = (figures.forward, figures.inputs / (figures.stepping if operation.steps else 1))
    forward, back = shares if operation.taps > 0 else shares[::-1]
    result = seconds(forward, figures.start, outer, inner, COLUMNS, SLAB, product.m)
    inputs = seconds(back, figures.start, inner, outer, COLUMNS, SLAB, product.m)
    filters = seconds(figures.filters, figures.filters_start, outer, inner, COLUMNS, COLUMNS, 0)
    # The kernel of backward makes both gradients, or one: of frozen filters, or of what nothing before is trained.
    trained = any(weight.trainable for weight in (*operation.weights, *operation.borrows))
    weighed = minimum(again, maximum(trained, again - 1))
    return OperationTime(result, inputs * (again - weighed) + filters * weighed, 0)


def _whole(channels: Size, slab: int) -> Size:
    """Channels in whole slabs over those there are."""
    return ceil_div(channels, slab) * slab / channels


def _family(operation: Operation, machine: Machine) -> str:
    """The family of kernels that an operation without products belongs to: a key of `Efficiencies.memory`."""
    # Of a written-out norm, what it moves is listed; PyTorch's own kernel is what else such a module has.
    norm = f"norm-{'eager' if machine.norm == 'written' else machine.norm}"
    return {"norm": norm, "loss": machine.loss, "collective": "permute"}.get(operation.kind, "elementwise")


def _routing(operation: Operation, machine: Machine) -> Size:
    """Return the seconds of sorting the copies of tokens by expert: with a host that waits for their numbers, or without."""
    measured = machine.efficiencies
    if not machine.graphs:
        return measured.routing * measured.slower[0]
    copies = sum(tensor.numel for tensor in operation.keeps)
    return (measured.expert_start + measured.expert_copy * copies) * machine.software


def _streamed(nbytes: Size, machine: Machine) -> Size:
    """Return the seconds of one kernel that reads and writes `nbytes` bytes and no others; 0 for none."""
    return nbytes / machine.memory("elementwise").forward + minimum(nbytes, 1) * machine.launch


def _quantising(tensors: Iterable[Tensor], machine: Machine, low: LowPrecision) -> Size:
    """Seconds to read 16 bits and write 8 or 4, by rows and by columns."""
    return _quantised(sum(tensor.numel for tensor in tensors) * (2 + 2 * low.element), machine)


def _quantised(nbytes: Size, machine: Machine) -> Size:
    """Seconds to move bytes in the kernels that quantise."""
    return nbytes / machine.memory("quantise").forward + machine.quantise_launch


def _products(operation: Operation, machine: Machine) -> OperationTime:
    """Matrix products with weights (one product a gradient), or between activations."""
    dequantised, remade = dequantising(operation, machine)
    copied = (
        [weight for weight in operation.weights if weight.cast and weight.kind in ("matrix", "head")]
        if machine.cast
        else ()
    )
    low = machine.low if in_eight_bits(operation) else None
    eight = low is not None and low.weight_gradient
    experts = any(weight.expert for weight in operation.weights)
    forward: Size = _streamed(machine.cast * sum(weight.numel for weight in copied), machine)
    inputs: Size = 0
    # A gradient in 16 bits is cast back.
    weights: Size = _streamed(machine.cast * sum(weight.numel for weight in copied if weight.trainable), machine)
    # The gradient of a weight that the layer makes (`adapted_experts`) is that of an input, and as much work.
    trained = any(weight.trainable for weight in operation.weights) or not same(operation.weight_gradient_flops, 0)
    for gemm in operation.gemms:
        m, n, k, batch = gemm.m, gemm.n, gemm.k, gemm.batch
        seconds = grouped_seconds if experts else gemm_seconds
        forward = forward + seconds(gemm, machine, fp8=low is not None)
        inputs = inputs + seconds(Gemm(m, k, n, batch), machine, fp8=low is not None)
        if not operation.weights:
            weights = weights + gemm_seconds(Gemm(k, n, m, batch), machine)
        elif trained and experts:
            weights = weights + grouped_seconds(Gemm(k, n, m, batch), machine, fp8=eight, weight=True)
        elif trained:
            weights = weights + gemm_seconds(
                Gemm(k, n, m, batch), machine, fp8=eight, slower=machine.efficiencies.weight_gradient
            )
    if not operation.weights:
        return OperationTime(forward, inputs + weights, 0)
    if low is not None:
        # What goes in is quantised, and so is the gradient of what comes out.
        done = operation.read_again or any(tensor.dtype == "quantised" for tensor in operation.keeps)
        into = 0 if done else _quantising(operation.inputs, machine, low)
        both = _quantised(operation.params * (2 + low.weight_element), machine) if low.weights == "within" else 0
        return OperationTime(
            forward + into + both, inputs + _quantising(operation.outputs, machine, low) + both, weights
        )
    return OperationTime(forward + dequantised, inputs + remade, weights)


def dequantising(operation: Operation, machine: Machine) -> tuple[Size, Size]:
    """Return the seconds to make a quantised base's matrices in 16 bits, as each product with them does again: forward, backward.

    The stored bytes are read and 16 bits written, which the product then reads as it would any matrix; scales that are
    quantised too are made first, by launches of their own. LLM.int8() makes none in forward, but quantises what goes in and
    scales what comes out; its products are counted as those of 16 bits, for no table has any.
    """
    stored = machine.stored
    if stored is None:
        return 0, 0
    elements = sum(weight.numel for weight in operation.weights if weight.base)
    if same(elements, 0) or (stored.experts_only and not any(weight.expert for weight in operation.weights)):
        return 0, 0
    rate, launches = machine.bandwidth * machine.dequantise / machine.software, stored.kernels * machine.launch
    unpacked = elements * (stored.remade or stored.nbytes + 2) / rate + launches
    if not stored.input_moves:
        return unpacked, unpacked
    sides = (operation.inputs, stored.input_moves), (operation.outputs, stored.output_moves)
    copied = [_streamed(moves * sum(tensor.numel for tensor in side), machine) for side, moves in sides]
    return sum(copied) + 2 * machine.launch, unpacked


def operation_times(layer: Layer, machine: Machine) -> list[OperationTime]:
    """Return the seconds of each operation of a layer on one micro-batch, without collectives."""
    return [operation_seconds(operation, machine) for operation in layer]


def layer_seconds(layer: Layer, machine: Machine) -> OperationTime:
    """Return the seconds of a layer on one micro-batch: the sum over its operations, without collectives."""
    times = layer.once(operation_times, machine)
    return OperationTime(
        sum(time.forward for time in times),
        sum(time.input_gradient for time in times),
        sum(time.weight_gradient for time in times),
    )


class Sums:
    """Seconds of operations: of matrix products, of attention, of all."""

    def __init__(self) -> None:
        self.products: Size = 0
        self.attention: Size = 0
        self.all: Size = 0

    def add(self, operation: Operation, time: Size) -> None:
        """Add the time of an operation [s]."""
        if operation.kind == "attention":
            self.attention = self.attention + time
        elif operation.gemms:
            self.products = self.products + time
        self.all = self.all + time

    @property
    def parts(self) -> tuple[Size, Size, Size]:
        """Seconds of matrix products, of attention, of all."""
        return self.products, self.attention, self.all
