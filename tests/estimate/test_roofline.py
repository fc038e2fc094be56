"""Seconds of one operation against arithmetic by hand, on a machine of round figures."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loadgauge.estimate.time.roofline import Machine, gemm_seconds, in_eight_bits, layer_seconds, operation_seconds
from loadgauge.families.catalogue import model
from loadgauge.layers import View, block_layer
from loadgauge.layers.operations import Gemm, Layer, Operation, Tensor
from loadgauge.spec.calibration import DEFAULT, Rates
from loadgauge.spec.hardware import gpu
from loadgauge.spec.kernels import Kernels
from loadgauge.spec.training import training

EFFICIENCIES = (
    "matmul",
    "attention",
    "attention_backward",
    "flash2",
    "flash2_backward",
    "memory",
    "traffic",
    "fp8_matmul",
)
PERFECT = msgspec.structs.replace(
    DEFAULT, wave=0.0, small_k=0.0, launch=0.0, routing=0.0, multiprocessors=100, **dict.fromkeys(EFFICIENCIES, 1.0)
)


def machine(rates: Rates = PERFECT, **rest: Any) -> Machine:
    return Machine(peak=1e12, bandwidth=1e11, rates=rates, **rest)


def rates(**changes: float) -> Rates:
    return msgspec.structs.replace(PERFECT, **changes)


def test_a_large_product_takes_its_arithmetic():
    gemm = Gemm(m=8192, n=8192, k=8192)
    assert gemm_seconds(gemm, machine()) == 2 * 8192**3 / 1e12
    assert gemm_seconds(gemm, machine(rates(matmul=0.5))) == 2 * 2 * 8192**3 / 1e12
    assert gemm_seconds(gemm, machine(rates(small_k=8192.0))) == 2 * 2 * 8192**3 / 1e12


def test_a_thin_product_takes_its_bytes():
    gemm = Gemm(m=1, n=4096, k=4096)
    moved = 2 * (4096 + 4096 * 4096 + 4096)
    assert gemm_seconds(gemm, machine()) == moved / 1e11
    assert gemm_seconds(gemm, machine(rates(launch=1.0))) == moved / 1e11 + 1


@pytest.mark.parametrize(("m", "n", "tiles"), [(128, 256, 1), (129, 256, 2), (128, 257, 2), (1280, 2560, 100)])
def test_tiles_and_waves(m: int, n: int, tiles: int):
    # All of the loss counted: whatever is in a wave of 100 tiles, the wave takes its whole time.
    waves = -(-tiles // 100)
    whole = waves * 100 * 2 * 128 * 256 * 10**6 / 1e12
    assert gemm_seconds(Gemm(m, n, 10**6), machine(rates(wave=1.0))) == pytest.approx(whole)


def test_backward_of_a_product_is_twice_its_forward():
    layer = block_layer(model("llama-3.1-8b").blocks[0], 4096, View.of(4096, 1))
    only = Layer("gemms", tuple(op for op in layer if op.gemms and op.kind == "gemm"))
    time = layer_seconds(only, machine())
    assert time.forward == pytest.approx(only.forward_flops / 1e12)
    assert time.backward == pytest.approx(only.backward_flops / 1e12)
    assert time.weight_gradient == pytest.approx(only.forward_flops / 1e12)


@pytest.mark.parametrize(("length", "window"), [(64, None), (64, 16), (64, 64), (64, 100)])
def test_a_causal_kernel_computes_the_pairs_below_the_diagonal(length: int, window: int | None):
    block = model("mistral-7b-v0.1").blocks[0]
    attention = msgspec.structs.replace(block.attention, sliding_window=window)
    layer = block_layer(msgspec.structs.replace(block, attention=attention), 4096, View.of(length, 3))
    (kernel,) = (op for op in layer if op.kind == "attention")
    reach = length if window is None else min(window, length)
    seen = sum(1 for query in range(length) for key in range(length) if query - reach < key <= query)
    # A continuous diagonal: its own half cells, one a query, are not counted.
    products = 4 * 32 * 128 * 3
    computed = kernel.forward_flops * kernel.computed_share / products
    assert computed == pytest.approx(seen, rel=0.5 / min(reach, 16) + 0.01)
    exact = reach * length - reach * reach / 2
    assert computed == pytest.approx(exact)
    time = operation_seconds(kernel, machine())
    assert time.forward == pytest.approx(products * exact / 1e12)
    assert time.backward == pytest.approx(2.5 * products * exact / 1e12)


def test_bidirectional_attention_computes_all_pairs():
    block = model("bert-base").blocks[0]
    kernels = Kernels(attention="flash")
    layer = block_layer(block, 768, View.of(128, 1, kernels=kernels))
    (kernel,) = (op for op in layer if op.kind == "attention")
    assert kernel.computed_share == 1


def test_elementwise_takes_its_bytes():
    """Forward reads x and writes y; backward reads the gradient of y and what was kept, and writes that of x."""
    x, y = Tensor("x", 1000, 2), Tensor("y", 1000, 2)
    slow = machine(rates(traffic=0.5, memory=0.8))
    rate = 0.5 / 0.8e11
    plain = operation_seconds(Operation("cast", "elementwise", (x,), (y,)), slow)
    assert (plain.forward, plain.backward) == (pytest.approx(4000 * rate), pytest.approx(4000 * rate))
    curve = operation_seconds(Operation("gelu", "elementwise", (x,), (y,), keeps=(x,)), slow)
    assert (curve.forward, curve.backward) == (pytest.approx(4000 * rate), pytest.approx(6000 * rate))
    both = Operation("add", "elementwise", (x, Tensor("z", 1000, 2)), (y,), shares_gradient=True)
    assert operation_seconds(both, slow).backward == pytest.approx(6000 * rate)
    assert operation_seconds(Operation("view", "view", (x,), (y,)), machine()).forward == 0


def test_eight_bits_are_for_the_matrices_of_the_blocks():
    kernels = training("megatron", "mxfp8").kernels
    layer = block_layer(model("mixtral-8x7b").blocks[0], 4096, View.of(4096, 1, kernels=kernels))
    quantised = {op.name for op in layer if in_eight_bits(op)}
    assert quantised == {
        "attention.query", "attention.key", "attention.value", "attention.output", "mlp.gate_up", "mlp.down",
    } - ({"attention.output"} - {op.name for op in layer})  # fmt: skip
    low = training("megatron", "mxfp8").precision.products
    fast = layer_seconds(layer, machine(rates(memory=1e9), fp8_peak=2e12, low=low)).backward
    slow = layer_seconds(layer, machine(rates(memory=1e9))).backward
    products = sum(op.backward_flops for op in layer if in_eight_bits(op)) / 1e12
    assert slow - fast == pytest.approx(products / 2, rel=1e-3)


def test_quantising_reads_16_bits_and_writes_8_twice():
    low = training("megatron", "mxfp8").precision.products
    assert low is not None
    kernels = training("megatron", "mxfp8").kernels
    layer = block_layer(model("llama-3.1-8b").blocks[0], 4096, View.of(4096, 1, kernels=kernels))
    (cast,) = (op for op in layer if op.name == "attention.norm.quantised")
    time = operation_seconds(cast, machine(low=low))
    assert time.forward == pytest.approx(4096 * 4096 * (2 + 2 * (1 + 1 / 32)) / 1e11)


def test_graphs_hide_launches():
    gemm = Gemm(m=1, n=4096, k=4096)
    assert gemm_seconds(gemm, machine(rates(launch=1.0), graphs=True)) == gemm_seconds(gemm, machine())


def test_machines_read_the_catalogue():
    h100 = gpu("h100-sxm5-80gb")
    assert Machine.of(h100, PERFECT, training("megatron", "bf16")).peak == 989e12
    assert Machine.of(h100, PERFECT, training("megatron", "fp32")).peak == 67e12
    assert Machine.of(h100, PERFECT, training("megatron", "fp8")).fp8_peak == 1979e12


def test_megatrons_dropout_is_part_of_the_residual_sum():
    x, y, mask = Tensor("x", 1000, 2), Tensor("y", 1000, 2), Tensor("mask", 1000, 1)
    dropout = Operation("before the sum", "residual_dropout", (x,), (y,), keeps=(mask,))
    elsewhere = Operation("mlp.residual_dropout", "elementwise", (x,), (y,), keeps=(mask,))
    apart, fused = (operation_seconds(dropout, machine(fuses_dropout=flag)) for flag in (False, True))
    assert operation_seconds(elsewhere, machine(fuses_dropout=True)) == apart, "its kind decides, not its name"
    assert (apart.forward, fused.forward) == (pytest.approx(4000 / 1e11), pytest.approx(1000 / 1e11))
    assert apart.backward == fused.backward == pytest.approx(5000 / 1e11)


def test_routing_takes_its_time_in_each_direction():
    layer = block_layer(model("mixtral-8x7b").blocks[0], 4096, View.of(4096, 1))
    slow, fast = (layer_seconds(layer, machine(rates(routing=seconds))) for seconds in (0.5, 0.0))
    assert slow.forward - fast.forward == pytest.approx(0.5)
    assert slow.backward - fast.backward == pytest.approx(0.5)
    dense = block_layer(model("llama-3.1-8b").blocks[0], 4096, View.of(4096, 1))
    assert layer_seconds(dense, machine(rates(routing=0.5))) == layer_seconds(dense, machine())
