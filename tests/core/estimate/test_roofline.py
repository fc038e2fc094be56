"""Seconds of one operation against arithmetic by hand, on a machine of round figures."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loadgauge.core.definitions.hardware.calibration import Both, Efficiencies, efficiencies as calibrated
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.definitions.model.kernels import WRITTEN_KERNELS, Kernels
from loadgauge.core.definitions.training.software import TUNINGS
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.time.roofline import (
    Machine,
    gemm_seconds,
    grouped_seconds,
    in_eight_bits,
    layer_seconds,
    operation_seconds,
)
from loadgauge.core.families.catalogue import model, model as catalogue
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.operations.operations import Gemm, Layer, Operation, Tensor

ONE = Both(1.0, 1.0)
PERFECT = msgspec.structs.replace(
    calibrated(""),
    **dict.fromkeys(("matmul", "fp8_matmul", "fp8_block_matmul", "fp4_matmul", "throttle", "weight_gradient"), 1.0),
    **dict.fromkeys(("grouped", "grouped_weight", "product_memory"), 1.0),
    **dict.fromkeys(("wave", "small_k", "fp8_small_k", "fp8_block_small_k", "fp4_small_k", "grouped_launch", "routing"), 0.0),
    launch=0.0, quantise_launch=0.0, block_quantise_launch=0.0, outer_start=0.0, outer_root=0.0,
    multiprocessors=100, attention=dict.fromkeys(calibrated("").attention, ONE),
    attention_keys=Both(0.0, 0.0), narrow=ONE, wide=ONE, memory=dict.fromkeys(calibrated("").memory, ONE),
)  # fmt: skip
"""Everything at its datasheet's rate: what is left is arithmetic by hand."""


def machine(efficiencies: Efficiencies = PERFECT, **rest: Any) -> Machine:
    return Machine(peak=1e12, bandwidth=1e11, efficiencies=efficiencies, **rest)


def efficiencies(**changes: Any) -> Efficiencies:
    return msgspec.structs.replace(PERFECT, **changes)


FREE = {"product_memory": 1e9}
"""Memory so fast that no product waits for it."""


def test_a_large_product_takes_its_arithmetic():
    gemm = Gemm(m=8192, n=8192, k=8192)
    whole = 2 * 8192**3 / 1e12
    assert gemm_seconds(gemm, machine(efficiencies(**FREE))) == pytest.approx(whole)
    assert gemm_seconds(gemm, machine(efficiencies(matmul=0.5, **FREE))) == pytest.approx(2 * whole)
    assert gemm_seconds(gemm, machine(efficiencies(throttle=0.5, **FREE))) == pytest.approx(2 * whole)
    assert gemm_seconds(gemm, machine(efficiencies(small_k=8192.0, **FREE))) == pytest.approx(2 * whole)
    assert gemm_seconds(gemm, machine(efficiencies(**FREE)), slower=1.5) == pytest.approx(1.5 * whole)
    assert gemm_seconds(gemm, machine(efficiencies(**FREE), software=1.2)) == pytest.approx(1.2 * whole)


def test_a_thin_product_takes_its_bytes():
    gemm = Gemm(m=1, n=4096, k=4096)
    moved = 2 * (4096 + 4096 * 4096 + 4096)
    fast = efficiencies(matmul=1e9)
    assert gemm_seconds(gemm, machine(fast)) == pytest.approx(moved / 1e11)
    assert gemm_seconds(gemm, machine(efficiencies(matmul=1e9, launch=1.0))) == pytest.approx(moved / 1e11 + 1)


def test_arithmetic_and_bytes_hide_each_other_but_not_wholly():
    gemm = Gemm(m=2048, n=2048, k=128)
    alone = [gemm_seconds(gemm, machine(efficiencies(**one))) for one in (FREE, {"matmul": 1e9})]
    both = gemm_seconds(gemm, machine())
    assert max(alone) < both < sum(alone)
    assert both**3 == pytest.approx(alone[0] ** 3 + alone[1] ** 3)


def test_float32_moves_four_bytes_and_no_power_limit_slows_it():
    gemm = Gemm(m=1, n=4096, k=4096)
    fast = efficiencies(matmul=1e9, float32=1e9)
    ratio = gemm_seconds(gemm, machine(fast, plain=True)) / gemm_seconds(gemm, machine(fast))
    assert ratio == pytest.approx(2)
    large = Gemm(m=8192, n=8192, k=8192)
    hot = efficiencies(throttle=0.5, float32=1.0, **FREE)
    assert gemm_seconds(large, machine(hot)) == pytest.approx(2 * gemm_seconds(large, machine(hot, plain=True)))


def test_experts_one_by_one_cost_a_launch_each():
    gemm = Gemm(128, 256, 1024, batch=100)
    known = efficiencies(grouped=0.5, grouped_launch=1e-3, **FREE)
    assert grouped_seconds(gemm, machine(known)) == pytest.approx(2 * gemm.flops / 1e12 + 100e-3)
    weight = efficiencies(grouped_weight=0.25, **FREE)
    assert grouped_seconds(gemm, machine(weight), weight=True) == pytest.approx(4 * gemm.flops / 1e12)


def test_experts_in_one_kernel_run_as_one_product():
    gemm = Gemm(128, 256, 1024, batch=100)
    known = efficiencies(grouped=0.5, grouped_launch=1e-3, grouped_memory=1e9)
    assert grouped_seconds(gemm, machine(known, one_kernel=True)) == pytest.approx(gemm.flops / 1e12)
    bytes_alone = efficiencies(grouped_memory=0.5, matmul=1e9)
    moved = 2 * 100 * (128 * 1024 + 1024 * 256 + 128 * 256)
    assert grouped_seconds(gemm, machine(bytes_alone, one_kernel=True)) == pytest.approx(moved / 0.5e11)


@pytest.mark.parametrize(
    ("framework", "card", "overlap", "one"),
    [("torchtitan", "h100-sxm5-80gb", "none", True), ("torchtitan", "a100-sxm4-80gb", "none", False),
     ("megatron", "b200-sxm-180gb", "none", False), ("megatron", "b200-sxm-180gb", "launch", True)],
)  # fmt: skip
def test_which_frameworks_have_one_kernel_for_all_experts(framework: str, card: str, overlap: str, one: bool):
    kind = msgspec.structs.replace(training(framework), overlap=Overlap.parse(overlap))
    assert Machine.of(gpu(card), calibrated(card), kind, experts=True).one_kernel == one


def test_the_host_waits_for_the_routing_unless_a_graph_holds_it():
    layer = block_layer(catalogue("mixtral-8x7b").blocks[0], 4096, View.of(4096, 1, ep=8))
    dispatch = next(one for one in layer if one.name == "mlp.dispatch")
    known = efficiencies(routing=1.0, expert_start=0.25, expert_copy=1e-3)
    waiting, captured = (operation_seconds(dispatch, machine(known, graphs=graphs)) for graphs in (False, True))
    assert waiting.forward - captured.forward == pytest.approx(1.0 - 0.25 - 2 * 4096 * 1e-3)


def test_attention_falls_with_few_keys_and_narrow_heads():
    def kernel(length: int, width: int) -> float:
        pairs = length * length * 1024
        flops = 4 * pairs * width
        gemms = (Gemm(length, length, width, 1024), Gemm(length, width, length, 1024))
        one = Operation("a", "attention", (), (), gemms=gemms, forward_flops=flops, input_gradient_flops=2 * flops)
        known = efficiencies(attention_keys=Both(1024.0, 512.0), narrow=Both(0.5, 1.0), wide=Both(1.25, 1.0))
        time = operation_seconds(one, machine(msgspec.structs.replace(known, multiprocessors=1)))
        assert time.backward == pytest.approx(2 * flops / 1e12 * (1 + 512 / length))
        return time.forward / (flops / 1e12)

    assert kernel(1024, 128) == pytest.approx(2)
    assert kernel(4096, 128) == pytest.approx(1.25)
    assert kernel(4096, 64) == pytest.approx(2.5)
    assert kernel(4096, 96) == pytest.approx(1.25 / 0.75)
    assert kernel(4096, 256) == pytest.approx(1.0)


def test_the_last_wave_of_attention_takes_as_long_as_a_full_one():
    def kernel(heads: int) -> float:
        gemms = (Gemm(128, 128, 128, heads), Gemm(128, 128, 128, heads))
        flops = 4 * 128**3 * heads
        return operation_seconds(
            Operation("a", "attention", (), (), gemms=gemms, forward_flops=flops), machine()
        ).forward

    assert kernel(1) == kernel(100) == pytest.approx(kernel(101) / 2)


@pytest.mark.parametrize(("m", "n", "tiles"), [(128, 256, 1), (129, 256, 2), (128, 257, 2), (1280, 2560, 100)])
def test_tiles_and_waves(m: int, n: int, tiles: int):
    # All of the loss counted: whatever is in a wave of 100 tiles, the wave takes its whole time.
    waves = -(-tiles // 100)
    whole = waves * 100 * 2 * 128 * 256 * 10**6 / 1e12
    assert gemm_seconds(Gemm(m, n, 10**6), machine(efficiencies(wave=1.0, **FREE))) == pytest.approx(whole)


def test_backward_of_a_product_is_twice_its_forward():
    layer = block_layer(model("llama-3.1-8b").blocks[0], 4096, View.of(4096, 1))
    only = Layer("gemms", tuple(op for op in layer if op.gemms and op.kind == "gemm"))
    time = layer_seconds(only, machine(efficiencies(**FREE)))
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
    time = operation_seconds(kernel, machine(efficiencies(multiprocessors=1)))
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
    slow = machine(efficiencies(memory=dict.fromkeys(PERFECT.memory, Both(0.8, 0.4))))
    rate, back = 1 / 0.8e11, 1 / 0.4e11
    plain = operation_seconds(Operation("cast", "elementwise", (x,), (y,)), slow)
    assert (plain.forward, plain.backward) == (pytest.approx(4000 * rate), pytest.approx(4000 * back))
    curve = operation_seconds(Operation("gelu", "elementwise", (x,), (y,), keeps=(x,)), slow)
    assert (curve.forward, curve.backward) == (pytest.approx(4000 * rate), pytest.approx(6000 * back))
    both = Operation("add", "elementwise", (x, Tensor("z", 1000, 2)), (y,), shares_gradient=True)
    assert operation_seconds(both, slow).backward == pytest.approx(6000 * back)
    assert operation_seconds(Operation("view", "view", (x,), (y,)), machine()).forward == 0


def test_eight_bits_are_for_the_matrices_of_the_blocks():
    kernels = training("megatron", "mxfp8").kernels
    layer = block_layer(model("mixtral-8x7b").blocks[0], 4096, View.of(4096, 1, kernels=kernels))
    quantised = {op.name for op in layer if in_eight_bits(op)}
    assert quantised == {
        "attention.query", "attention.key", "attention.value", "attention.output", "mlp.gate_up", "mlp.down",
    } - ({"attention.output"} - {op.name for op in layer})  # fmt: skip
    low = training("megatron", "mxfp8").precision.products
    free = efficiencies(memory=dict.fromkeys(PERFECT.memory, Both(1e9, 1e9)), **FREE)
    fast = layer_seconds(layer, machine(free, fp8_peak=2e12, low=low)).backward
    slow = layer_seconds(layer, machine(free)).backward
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
    assert gemm_seconds(gemm, machine(efficiencies(launch=1.0), graphs=True)) == gemm_seconds(gemm, machine())


def test_a_norm_is_moved_by_who_made_its_kernel():
    x, y = Tensor("x", 1000, 2), Tensor("y", 1000, 2)
    known = efficiencies(memory=PERFECT.memory | {"norm-eager": Both(0.5, 0.25)})
    norm = Operation("norm", "norm", (x,), (y,), keeps=(x, Tensor("wide", 1000, 4)))
    fused, eager = (operation_seconds(norm, machine(known, norm=kernel)) for kernel in ("fused", "eager"))
    assert (fused.forward, fused.backward) == (pytest.approx(4000 / 1e11), pytest.approx(6000 / 1e11))
    assert (eager.forward, eager.backward) == (pytest.approx(8000 / 1e11), pytest.approx(24000 / 1e11))


def test_machines_read_the_catalogue():
    h100 = gpu("h100-sxm5-80gb")
    assert Machine.of(h100, PERFECT, training("megatron", "bf16")).peak == 989e12
    assert Machine.of(h100, PERFECT, training("megatron", "fp32")).peak == 67e12
    assert Machine.of(h100, PERFECT, training("megatron", "fp8")).fp8_peak == 1979e12


def test_automodels_own_models_with_experts_run_on_transformer_engine():
    card, kind = gpu("h100-sxm5-80gb"), training("automodel")
    own, other = (Machine.of(card, PERFECT, kind, experts=experts) for experts in (True, False))
    assert (own.norm, own.attention) == ("fused", "cudnn")
    assert other.norm == "written"


def test_who_tuned_a_run_scales_its_compute():
    card, kind = gpu("h100-sxm5-80gb"), training("megatron")
    recipe, usual, first = (
        Machine.of(card, PERFECT, msgspec.structs.replace(kind, tuning=name)).software for name in TUNINGS
    )
    assert recipe < usual < first


def test_a_written_out_norm_takes_its_bytes_and_a_launch_a_kernel():
    x, y = Tensor("x", 1000, 4), Tensor("y", 1000, 4)
    norm = Operation("norm", "norm", (x,), (y,), moves=(28_000, 92_000))
    known = efficiencies(memory=PERFECT.memory | {"norm-written": Both(0.5, 0.25)}, launch=1e-6)
    written, fused = (operation_seconds(norm, machine(known, norm=kernel)) for kernel in ("written", "fused"))
    ahead, back = WRITTEN_KERNELS
    assert written.forward == pytest.approx(56_000 / 1e11 + ahead * 1e-6)
    assert written.backward == pytest.approx(368_000 / 1e11 + back * 1e-6)
    assert fused.forward == pytest.approx(8000 / 1e11 + 1e-6)


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
    slow, fast = (layer_seconds(layer, machine(efficiencies(routing=seconds))) for seconds in (0.5, 0.0))
    assert slow.forward - fast.forward == pytest.approx(0.5)
    assert slow.backward - fast.backward == pytest.approx(0.5)
    dense = block_layer(model("llama-3.1-8b").blocks[0], 4096, View.of(4096, 1))
    assert layer_seconds(dense, machine(efficiencies(routing=0.5))) == layer_seconds(dense, machine())


def test_autocast_copies_each_matrix_for_each_micro_batch_and_casts_its_gradient_back() -> None:
    # Counted on PyTorch's CPU autocast: one cast of each float32 matrix in forward, one of its gradient, and none of norms.
    own = Machine.of(gpu("a100-sxm4-80gb"), PERFECT, training("huggingface", "bf16-autocast"))
    assert own.cast == 4 + 2
    assert Machine.of(gpu("a100-sxm4-80gb"), PERFECT, training("huggingface", "bf16-mixed-16")).cast == 0
    assert Machine.of(gpu("a100-sxm4-80gb"), PERFECT, training("torchtitan", "bf16")).cast == 0  # FSDP casts shards
    spec = model("llama-3.1-8b")
    layer = block_layer(spec.blocks[0], spec.hidden_size, View.of(128, 1))
    with_, without = (layer_seconds(layer, msgspec.structs.replace(own, cast=each)) for each in (6, 0))
    matrices = sum(weight.numel for weight in layer.weights if weight.kind == "matrix")
    seconds = 6 * matrices / own.memory("elementwise").forward
    assert with_.forward - without.forward == pytest.approx(seconds, rel=1e-6)
    assert with_.weight_gradient - without.weight_gradient == pytest.approx(seconds, rel=1e-6)
    assert with_.input_gradient == without.input_gradient
