"""Closed forms read off the list of operations, against the papers' equations written down by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy

import loadgauge
from command_line import document
from loadgauge.core.answers.equations.equation import QUANTITIES, Equation, equation, equations
from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.definitions.model.kernels import PAPER, Kernels
from loadgauge.core.estimate.symbols import factored, letter, substitute, text
from loadgauge.core.layers import View, block_layer

s, b, h, a, k, d, f, t, l, v, n, T, P = (
    letter(name) for name in ["s", "b", "h", "a", "k", "d", "f", "t", "l", "v", "n", "T", "P"]
)
sbh = s * b * h
TP: dict[str, Any] = {"tp": "t"}
SP: dict[str, Any] = {"tp": "t", "sequence_parallel": True}


def same(found: Equation, by_hand: Any) -> bool:
    return bool(sympy.simplify(found.expression - by_hand) == 0)


@pytest.mark.parametrize(
    ("options", "by_hand", "place"),
    [
        ({}, sbh * (34 + 5 * a * s / h), "equation 1"),
        (TP, sbh * (10 + 24 / t + 5 * a * s / (h * t)), "equation 2"),
        (SP, sbh / t * (34 + 5 * a * s / h), "equation 4"),
        (SP | {"recompute": "selective"}, 34 * sbh / t, "equation 6"),
        (TP | {"recompute": "selective"}, sbh * (10 + 24 / t), "table 2"),
        ({"recompute": "full"}, 2 * sbh, "table 2"),
        (TP | {"recompute": "full"}, 2 * sbh, "table 2"),
    ],
)
def test_activations_of_a_gpt_layer_are_korthikantis(options: dict[str, Any], by_hand: Any, place: str) -> None:
    found = equation("activations", "gpt", **options)
    assert same(found, by_hand)
    assert found.unit == "byte"
    assert "Korthikanti" in found.source
    assert found.source.endswith(place)


def test_activations_in_float32() -> None:
    assert same(equation("activations", "gpt", precision="fp32"), sbh * (66 + 9 * a * s / h))


def test_activations_of_a_llama_layer() -> None:
    by_hand = s * b * (8 * h + 4 * a * d + 4 * k * d + 8 * f + 2 * a * s)
    assert same(equation("activations", "llama"), by_hand)
    # Multi-head and d = h/a: sbh (16 + 8 f/h + 2 a s/h), without dropout.
    multi_head = equation("activations", "llama").expression.subs({k: a}).subs({d: h / a})
    assert sympy.simplify(multi_head - sbh * (16 + 8 * f / h + 2 * a * s / h)) == 0


def test_padding_free_activations() -> None:
    """The post adds half of its own attention term; its output is also counted twice: 34 + 4a/h is right."""
    found = equation("activations", "gpt", attention="flash", padding_free=True)
    assert same(found, T * h * (34 + 4 * a / h))
    padded = equation("activations", "gpt", attention="flash")
    assert sympy.simplify(found.expression.subs({T: s * b}) - padded.expression) == 0


def test_eager_padding_free_counts_pairs() -> None:
    assert same(equation("activations", "gpt", padding_free=True), 34 * T * h + 5 * a * P)


@pytest.mark.parametrize(
    ("quantity", "options", "by_hand"),
    [
        ("params", {}, 12 * h**2 + 13 * h),
        ("forward-flops", {}, 24 * b * s * h**2 + 4 * b * s**2 * h),
        ("backward-flops", {}, 2 * (24 * b * s * h**2 + 4 * b * s**2 * h)),
        ("training-flops", {}, 72 * b * s * h**2 * (1 + s / (6 * h))),
        ("training-flops", {"recompute": "full"}, 96 * b * s * h**2 * (1 + s / (6 * h))),
        ("recompute-flops", {"recompute": "selective"}, 4 * b * s**2 * h),
        ("model-flops", {}, 72 * b * l * s * h**2 * (1 + s / (6 * h) + v / (12 * l * h))),
        ("model-flops", {"recompute": "full"}, 96 * b * l * s * h**2 * (1 + s / (6 * h) + v / (16 * l * h))),
    ],
)
def test_parameters_and_flops_of_a_gpt_are_narayanans(quantity: str, options: dict[str, Any], by_hand: Any) -> None:
    assert same(equation(quantity, "gpt", **options), by_hand)


def test_model_parameters_are_narayanans_and_the_final_norm() -> None:
    paper = 12 * l * h**2 * (1 + sympy.Integer(13) / (12 * h) + (v + n) / (12 * l * h))
    assert same(equation("model-params", "gpt"), paper + 2 * h)


def test_llama_parameters() -> None:
    assert same(equation("params", "llama"), 2 * h * a * d + 2 * h * k * d + 3 * h * f + 2 * h)
    layer = 2 * h * a * d + 2 * h * k * d + 3 * h * f + 2 * h
    assert same(equation("model-params", "llama"), l * layer + 2 * v * h + h)


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [
        ({}, 16 * sbh * (t - 1) / t),  # two all-reduces forward, two backward
        (SP, 20 * sbh * (t - 1) / t),  # four pairs of half the bytes, and two inputs gathered again
        (TP | {"recompute": "full"}, 24 * sbh * (t - 1) / t),  # six all-reduces
    ],
)
def test_bytes_sent_for_a_layer(options: dict[str, Any], by_hand: Any) -> None:
    assert same(equation("wire", "gpt", **options), by_hand)


@pytest.mark.parametrize(
    ("precision", "by_hand"),
    [
        ("bf16-mixed-16", (16, 4 + 12 / d, 2 + 14 / d, 16 / d)),  # Rajbhandari et al.
        ("bf16-mixed-18", (18, 6 + 12 / d, 2 + 16 / d, 18 / d)),  # Megatron-LM, float32 gradients
        ("bf16-mixed-20", (20, 4 + 16 / d, 2 + 18 / d, 20 / d)),  # Smith et al.
        ("fp32", (16, 8 + 8 / d, 4 + 12 / d, 16 / d)),
    ],
)
def test_model_states_are_zeros_table(precision: str, by_hand: tuple[Any, ...]) -> None:
    found = equations("states", precision=precision)
    assert len(found) == 4
    assert all(same(one, by) for one, by in zip(found, by_hand, strict=True))


@pytest.mark.parametrize(("precision", "gathered"), [("bf16-mixed-16", 2), ("bf16-autocast", 2), ("fp32", 4)])
def test_states_say_what_fsdp_holds_at_stage_2(precision: str, gathered: int) -> None:
    """Shards of all, and gathered weights: as `estimate` counts it for a model that divides."""
    (found,) = equations("states", precision=precision, zero=2)
    assert found.validity[1].endswith(f": {gathered} + 16/d in all")
    spec, ranks = loadgauge.model("llama-3.1-8b"), 8
    layout = loadgauge.Layout(dp=ranks, zero=2, seq_len=128, global_batch=ranks)
    memory = loadgauge.estimate(spec, layout, loadgauge.training("torchtitan", precision)).memory
    loss = next(moment.parts for moment in memory.moments if moment.name == "loss")
    held = loss["weights"] + loss["optimizer"] + memory.moments[-1].parts["gradients"]
    assert held == pytest.approx(16 / ranks * 8_030_261_248, rel=1e-6)
    assert loss["gathered"] == gathered * 8_030_261_248


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_zero_stage_on_the_command_line(stage: int) -> None:
    (found,) = document(f"equation states --zero {stage}")["equations"]
    assert found["expression"] == ("16", "4 + 12/d", "2 + 14/d", "16/d")[stage]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "gemma-2-9b", "qwen3-8b", "bert-base"])
@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_letters_of_a_real_model_agree_with_its_numbers(name: str, attention: Any) -> None:
    """The closed form, with the model's numbers put in, is the whole-number reading of the same list."""
    model = loadgauge.model(name)
    sizes = {"s": 2048, "b": 3}
    kernels = Kernels(**{field: getattr(PAPER, field) for field in PAPER.__struct_fields__} | {"attention": attention})
    view = View.of(sizes["s"], sizes["b"], kernels=kernels)
    for kind, block in enumerate(model.blocks):
        layer = block_layer(block, model.hidden_size, view)
        for quantity, number in (
            ("activations", layer.saved()),
            ("params", layer.params),
            ("forward-flops", layer.forward_flops),
            ("backward-flops", layer.backward_flops),
            ("recompute-flops", layer.recompute_flops()),
        ):
            found = equation(quantity, name, attention=attention, kind=kind)
            assert substitute(found.expression, found.numbers | sizes) == number, (quantity, kind)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "gemma-2-9b", "opt-350m", "bert-base"])
def test_model_parameters_with_numbers_are_exact(name: str) -> None:
    assert equation("model-params", name).substitute == loadgauge.parameters(loadgauge.model(name)).total


def test_printed_as_in_the_papers() -> None:
    found = equation("activations", "gpt")
    assert found.text == "34*b*h*s + 5*a*b*s**2"
    assert found.factored == "b*h*s*(34 + 5*a*s/h)"
    assert found.latex == "34 b h s + 5 a b s^{2}"
    assert equation("params", "gpt").text == "12*h**2 + 13*h"
    assert equation("activations", "gpt", **TP).factored == "b*h*s*(10 + 24/t + 5*a*s/(h*t))"


@pytest.mark.parametrize("layer", ["gpt", "llama", "gemma-2-9b"])
def test_what_is_printed_can_be_read_back(layer: str) -> None:
    """Text and factored text are the expression itself, and every letter is in the legend."""
    for quantity in QUANTITIES:
        for found in equations(quantity, layer):
            names = {symbol.name: symbol for symbol in found.expression.free_symbols}
            assert sympy.simplify(sympy.sympify(found.text, locals=names) - found.expression) == 0
            if found.factored:
                assert sympy.simplify(sympy.sympify(found.factored, locals=names) - found.expression) == 0
            assert set(found.legend) == set(names)
            assert found.source


def test_every_combination_gives_an_equation_or_a_clear_error() -> None:
    refused = 0
    policies = ("none", "selective", "full", "mlp")
    for quantity, layer, tp, sp, policy, attention in itertools.product(
        QUANTITIES, ("gpt", "llama"), (1, 8, "t"), (False, True), policies, ("eager", "flash")
    ):
        options = {"tp": tp, "sequence_parallel": sp, "recompute": policy, "attention": attention}
        try:
            assert equation(quantity, layer, **options).text  # type: ignore[arg-type]
        except Error:
            refused += 1
            assert quantity.startswith("model-") or quantity == "active-params" or (sp and tp == 1)
    assert refused


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("volume",), {}),
        (("params", "lama-3"), {}),
        (("activations",), {"tp": 0}),
        (("activations",), {"sequence_parallel": True}),
        (("activations",), {"recompute": "full:every=2"}),
        (("activations",), {"recompute": "nothing.such"}),
        (("activations",), {"precision": "int3"}),
        (("activations",), {"attention": "fast"}),
        (("activations", "gpt2"), {"kind": 4}),
        (("model-params",), {"tp": "t"}),
        (("states",), {"precision": "fp7"}),
    ],
)
def test_what_cannot_be_answered_is_refused(arguments: tuple[str, ...], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        equation(*arguments, **options)


def test_terms_with_a_minimum_are_printed_whole() -> None:
    window = sympy.Min(s**2 * b, 4096 * b * s)
    assert text(window) == "Min(4096*b*s, b*s**2)"
    assert factored(34 * sbh + a * window) == ""


def test_equation_is_part_of_the_package() -> None:
    assert loadgauge.equation("params").text == "12*h**2 + 13*h"
    with pytest.raises(AttributeError):
        loadgauge.no_such_name  # noqa: B018
