"""The papers' closed forms come out of the list of operations, as identities between symbols."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import sympy

import published_formulas as published
from loadgauge.core.definitions.layout.layout import RecomputePolicy
from loadgauge.core.definitions.model.kernels import PAPER, Dtypes, Kernels
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.precision import PRECISIONS
from loadgauge.core.estimate.memory.recompute import applied, checkpointed
from loadgauge.core.estimate.states.states import model_states
from loadgauge.core.families.reference import gpt_block, gpt_model, llama_block
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer
from loadgauge.core.layers.operations.operations import NOTHING, Layer
from published_formulas import rule_of_thumb

B, s, b, h, a, k, d, f, t, l, V, P, N, T, Tp, p = sympy.symbols(
    "B s b h a k d f t l V P N T Tp p", positive=True, integer=True
)
SELECTIVE, FULL = RecomputePolicy(mode="selective"), RecomputePolicy(mode="full")
FP32 = Kernels(attention="eager", dtypes=Dtypes(activation=4, norm_statistic=0))
FLASH = Kernels(attention="flash", dtypes=Dtypes(norm_statistic=0))


def same(ours: Any, by_hand: Any) -> None:
    assert sympy.simplify(ours - by_hand) == 0, f"{sympy.expand(ours)} is not {sympy.expand(by_hand)}"


def gpt(**how: Any) -> Layer:
    return block_layer(gpt_block(h, a), h, View.of(s, b, **{"kernels": PAPER, **how}))


def llama(**how: Any) -> Layer:
    return block_layer(llama_block(h, a, k, d, f), h, View.of(s, b, **{"kernels": PAPER, **how}))


def model(view: View) -> tuple[ModelSpec, Layer, tuple[Layer, Layer]]:
    """A GPT with learned positions: its block, and its two ends. `l` such blocks make the model."""
    spec = gpt_model(1, h, a, V, positions=s)
    block = block_layer(spec.blocks[0], h, view)
    return spec, block, (embedding_layer(spec, view), head_layer(spec, view))


def total(layers: Iterable[Layer], what: str) -> Any:
    return sum(getattr(layer, what) for layer in layers)


# -- Narayanan et al. -------------------------------------------------------------------------------------------------


def test_narayanan_equation_2_parameters() -> None:
    _, block, ends = model(View.of(s, B, kernels=PAPER))
    final_norm = 2 * h  # which the equation leaves out
    same(
        l * block.params + total(ends, "params") - final_norm,
        12 * l * h**2 * (1 + 13 / (12 * h) + (V + s) / (12 * l * h)),
    )


def test_narayanan_equation_3_flops_with_full_recomputation() -> None:
    _, block, ends = model(View.of(s, B, kernels=PAPER))
    of_block = block.forward_flops + block.backward_flops + block.recompute_flops(applied(FULL, block))
    of_ends = total(ends, "forward_flops") + total(ends, "backward_flops")
    same(l * of_block + of_ends, 96 * B * s * l * h**2 * (1 + s / (6 * h) + V / (16 * l * h)))


@pytest.mark.parametrize(("policy", "again"), [(FULL, 1), (None, 0)], ids=["full", "none"])
def test_article_1_layer_flops(policy: RecomputePolicy | None, again: int) -> None:
    block = gpt()
    same(block.forward_flops, 24 * b * s * h**2 + 4 * b * s**2 * h)
    run = applied(policy, block) if policy else NOTHING
    trained = block.forward_flops + block.backward_flops + block.recompute_flops(run)
    same(trained, (3 + again) * 24 * b * s * h**2 * (1 + s / (6 * h)))


def test_rule_of_thumb_is_exact_for_matrices_alone() -> None:
    # Tokens that see no others: equation 3 without s/6h and V/16lh.
    block = block_layer(gpt_block(h, a), h, View(tokens=T, pairs=0, kernels=PAPER))
    rule = rule_of_thumb(12 * h**2, T, full_recompute=True)
    same(block.forward_flops, rule.forward)
    same(block.forward_flops + block.backward_flops, rule.model)
    same(rule.model + block.recompute_flops(applied(FULL, block)), rule.hardware)
    same(rule_of_thumb(P, T).hardware, 6 * P * T)


# -- Korthikanti et al. -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "policy", "by_hand"),
    [
        ({}, None, 34 + 5 * a * s / h),
        ({"tp": t}, None, 10 + 24 / t + 5 * a * s / (h * t)),
        ({"tp": t, "sequence_parallel": True}, None, (34 + 5 * a * s / h) / t),
        ({"tp": t}, SELECTIVE, 10 + 24 / t),
        ({"tp": t, "sequence_parallel": True}, SELECTIVE, 34 / t),
        ({"tp": t}, FULL, sympy.Integer(2)),
    ],
    ids=["equation 1", "equation 2", "equation 4", "table 2", "equation 6", "full"],
)
def test_korthikanti_bytes(how: dict[str, Any], policy: RecomputePolicy | None, by_hand: Any) -> None:
    layer = gpt(**how)
    same(layer.saved(applied(policy, layer) if policy else NOTHING), s * b * h * by_hand)


def test_korthikanti_equation_7_and_the_slip_in_8() -> None:
    _, block, ends = model(View.of(s, B, kernels=PAPER))
    trained = (
        l * (block.forward_flops + block.backward_flops) + total(ends, "forward_flops") + total(ends, "backward_flops")
    )
    same(trained, 72 * B * l * s * h**2 * (1 + s / (6 * h) + V / (12 * h * l)))
    again = l * block.recompute_flops(applied(SELECTIVE, block))
    same(again, 4 * B * l * s**2 * h)
    printed = published.korthikanti_hardware_flops(l, h, V, s, B)
    same(printed, 72 * B * l * s * h**2 * (1 + s / (3 * h) + V / (12 * h * l)))
    same(printed - trained, 3 * again)
    same(trained + again, 72 * B * l * s * h**2 * (1 + 2 * s / (9 * h) + V / (12 * h * l)))


def test_korthikanti_equation_9() -> None:
    printed = published.korthikanti_hardware_flops(l, h, 0, s, B)
    block = gpt()
    modelled = l * (block.forward_flops + block.backward_flops) * B / b
    ratio = published.korthikanti_selective_overhead(h, s)
    same((printed / modelled - 1) * (1 + s / (6 * h)), ratio)
    right = block.recompute_flops(applied(SELECTIVE, block)) / (block.forward_flops + block.backward_flops)
    same(right, (s / (18 * h)) / (1 + s / (6 * h)))


# -- articles 1 and 2 -------------------------------------------------------------------------------------------------


def test_gpt_row_in_float32() -> None:
    same(gpt(kernels=FP32).saved(), b * s * h * (66 + 9 * a * s / h))


def test_llama_row() -> None:
    layer = llama()
    multi_head = layer.saved().subs({k: a, d: h / a})
    same(multi_head, b * s * h * (16 + 8 * f / h + 2 * a * s / h))
    same(layer.params.subs({k: a, d: h / a}), 4 * h**2 + 3 * h * f + 2 * h)
    # Grouped queries: only keys and values shrink.
    same(layer.saved(), s * b * (8 * h + 4 * a * d + 4 * k * d + 8 * f + 2 * a * s))


def test_article_2_formula_at_any_item_size() -> None:
    layer = gpt(kernels=msgspec.structs.replace(PAPER, dtypes=Dtypes(activation=p, norm_statistic=0)))
    same(layer.saved(), p * s * b * h * (16 + 2 / p + 2 * a * s / h + a * s / (p * h)))


def test_checkpoints() -> None:
    c, inputs, layer = sympy.symbols("c A_in A_layer", positive=True)
    kept = checkpointed(l, c, inputs, layer)
    (least,) = sympy.solve(sympy.diff(kept, c), c)
    # The root of a number of layers times a pure number, so the unit of bytes cancels.
    same(least, sympy.sqrt(l * layer / inputs))
    unit = sympy.Symbol("u", positive=True)
    same(least.subs({inputs: unit * inputs, layer: unit * layer}, simultaneous=True), least)


# -- ZeRO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "by_stage"),
    [
        ("fp16-mixed-16", (16, 4 + 12 / N, 2 + 14 / N, 16 / N)),
        ("bf16-mixed-18", (18, 6 + 12 / N, 2 + 16 / N, 18 / N)),
        ("fp16-mixed-20", (20, 4 + 16 / N, 2 + 18 / N, 20 / N)),
        ("fp32", (16, 8 + 8 / N, 4 + 12 / N, 16 / N)),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_per_parameter(recipe: str, by_stage: tuple[Any, ...], stage: int) -> None:
    same(model_states(P, PRECISIONS[recipe], zero=stage, dp=N).total, by_stage[stage] * P)


def test_the_post_with_a_master_copy_always() -> None:
    for recipe, itemsize, too_much in (("fp16-mixed-16", 2, 0), ("fp32", 4, 4)):
        right = model_states(P, PRECISIONS[recipe]).total
        same(published.states_with_master(P, itemsize) - right, too_much * P)


# -- padding-free -----------------------------------------------------------------------------------------------------


def ragged(tokens: Any, pairs: Any, kernels: Kernels) -> Layer:
    return block_layer(gpt_block(h, a), h, View(tokens=tokens, pairs=pairs, kernels=kernels))


def test_padding_free() -> None:
    right = ragged(T, P, FLASH).saved()
    same(right, T * (34 * h + 4 * a))
    printed = published.padding_free_activations(h, a, T)
    same(printed, T * h * (35 + 2 * a / h))
    same(printed - right, T * (h - 2 * a))


def test_padded_around_a_fused_kernel() -> None:
    (kernel,) = (op for op in ragged(T, P, FLASH) if op.name == "attention.flash")
    made = sum(tensor.nbytes for tensor in kernel.keeps if tensor not in kernel.inputs)
    same(made, 2 * T * (h + 2 * a))
    right = ragged(Tp, 0, PAPER).saved() + made
    same(right, 34 * h * Tp + 2 * h * T + 4 * a * T)
    printed = published.padded_flash_activations(h, a, Tp, T)
    same(printed, Tp * h * (34 + T / Tp * (1 + 2 * a / h)))
    same(2 * (right - printed), made)


def test_flash_padded_throughout() -> None:
    same(gpt(kernels=FLASH).saved(), s * b * (34 * h + 4 * a))
    same(gpt(kernels=PAPER).saved(), s * b * h * (34 + 5 * a * s / h))


def test_zeros_count_of_activations() -> None:
    layer = gpt()
    same(l * layer.saved(applied(SELECTIVE, layer)) * 24, 34 * published.zero_activations(l, h, s, b))
