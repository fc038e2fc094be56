"""Closed forms of a layer with experts (Mixtral) and of one with latent attention (DeepSeek-V3), derived by hand.

Letters: T = s b tokens; h hidden size, a heads, k key-value heads, d head width; q and m the latents of queries and of
keys with values, n, r and v (d_n, d_r, d_v) a head's parts without and with positions and of its values; E experts, K
experts a token, f (f_e) the width of one, g (f_s) of the shared one; t, c, e and u (t_e) tensor-, context- and
expert-parallel ranks, and tensor-parallel ranks of one expert.

Kept for backward: a matrix product y = x w keeps x, a product x y keeps both, silu keeps what goes in, softmax and
sigmoid what comes out, an RMSNorm what goes in (its statistic is neglected, as ids are). 2 bytes an element, 4 where
the modules compute in float32. A tensor that two operations keep is kept once.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import sympy

import loadgauge
from command_line import document, typed
from loadgauge.core.answers.equations import layers as equation_layers
from loadgauge.core.answers.equations.equation import QUANTITIES, Equation, equation, equations
from loadgauge.core.base.sources import cite
from loadgauge.core.definitions.layout.layout import RecomputePolicy
from loadgauge.core.definitions.model.kernels import PAPER, Kernels
from loadgauge.core.definitions.model.model import Mlp
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.symbols import letter, substitute
from loadgauge.core.families.reference import llama_model
from loadgauge.core.layers import View, block_layer

NAMES = "s b h a k d q m d_n d_r d_v E K f_e f_s t c e t_e"
s, b, h, a, k, d, q, m, n, r, v, E, K, f, g, t, c, e, u = (letter(name) for name in NAMES.split())
T = s * b
MEGATRON: dict[str, Any] = {"tp": "t", "sequence_parallel": True, "ep": "e", "etp": "t_e"}


def same(found: Equation, by_hand: Any) -> bool:
    return bool(sympy.expand(found.expression - by_hand) == 0)


# -- parameters: rows times columns of every matrix, and the gains of the norms ----------------------------------------


def mixtral_params(t: Any = 1, e: Any = 1, u: Any = 1) -> Any:
    attention = h * a * d + h * k * d + h * k * d + a * d * h  # queries, keys, values, output: split by heads
    experts = E * (h * f + h * f + f * h)  # gate, up, down
    return attention / t + h * E + experts / (e * u) + 2 * h  # the router and the norms are whole on every rank


def deepseek_params(t: Any = 1, e: Any = 1, u: Any = 1) -> Any:
    down = h * q + h * (m + r)  # into the latents: whole on every rank; the rotated key is beside the latent
    up = q * a * (n + r) + m * a * (n + v) + a * v * h  # out of them, and the output: split by heads
    experts = E * (h * f + h * f + f * h)
    shared = h * g + h * g + g * h
    return down + up / t + (q + m) + h * E + experts / (e * u) + shared / t + 2 * h


@pytest.mark.parametrize(("layer", "by_hand"), [("mixtral", mixtral_params), ("deepseek", deepseek_params)])
def test_parameters(layer: str, by_hand: Any) -> None:
    assert same(equation("params", layer), by_hand())
    assert same(equation("params", layer, tp="t"), by_hand(t))
    assert same(equation("params", layer, ep="e"), by_hand(1, e))
    assert same(equation("params", layer, tp="t", ep="e", etp="t_e"), by_hand(t, e, u))
    assert same(equation("params", layer, tp=8, ep=4, etp=2), by_hand(8, 4, 2))
    # K of the E experts see a token, and the router all of them.
    assert same(equation("active-params", layer), by_hand() - (E - K) * 3 * h * f)


# -- FLOPs: 2 m n k of each product; backward makes two of each --------------------------------------------------------


def mixtral_forward() -> tuple[Any, Any]:
    """Of the matrices, and of the scores with the context."""
    attention = 2 * T * h * (a * d) + 2 * (2 * T * h * (k * d)) + 2 * T * (a * d) * h
    router, experts = 2 * T * h * E, 3 * (2 * (T * K) * h * f)  # K copies of each token meet three matrices
    core = a * b * (2 * s * d * s) + a * b * (2 * s * s * d)  # q k^T, and its product with the values
    return attention + router + experts, core


def deepseek_forward() -> tuple[Any, Any]:
    into = 2 * T * h * q + 2 * T * h * (m + r)
    out_of = 2 * T * q * a * (n + r) + 2 * T * m * a * (n + v)
    output, router = 2 * T * (a * v) * h, 2 * T * h * E
    experts, shared = 3 * (2 * (T * K) * h * f), 3 * (2 * T * h * g)
    core = a * b * (2 * s * (n + r) * s) + a * b * (2 * s * s * v)  # scores are n + r wide, values v
    return into + out_of + output + router + experts + shared, core


@pytest.mark.parametrize(
    ("layer", "forward", "scores"),
    [
        ("mixtral", mixtral_forward(), 2 * a * b * s**2 * d),
        ("deepseek", deepseek_forward(), 2 * a * b * s**2 * (n + r)),
    ],
)
def test_flops(layer: str, forward: tuple[Any, Any], scores: Any) -> None:
    total = sum(forward)
    assert same(equation("forward-flops", layer), total)
    assert same(equation("backward-flops", layer), 2 * total)
    assert same(equation("training-flops", layer), 3 * total)
    assert same(equation("training-flops", layer, recompute="full"), 4 * total)
    assert same(equation("recompute-flops", layer), 0)
    # Selective recomputation makes scores and context again; FlashAttention's own backward only the scores.
    assert same(equation("recompute-flops", layer, recompute="selective"), forward[1])
    assert same(equation("recompute-flops", layer, attention="flash"), scores)
    # With every expert as busy as any other, t ranks share all of it; e and u ranks hold more experts, not more work.
    assert same(equation("forward-flops", layer, **MEGATRON), total / t)
    assert same(equation("training-flops", layer, tp="t", sequence_parallel=True, ep="e"), 3 * total / t)
    assert same(equation("forward-flops", layer, ep="e"), total)
    assert same(equation("forward-flops", layer, cp="c", attention="flash"), total / c)


# -- bytes kept for backward -------------------------------------------------------------------------------------------


def core_bytes(query: Any, key: Any, value: Any, context: Any, attention: str) -> Any:
    """Of queries, keys, values and context, of so many channels a token, what attention keeps.

    Eager: queries and keys for the scores, the softmax's output for itself and for the product with the values.
    FlashAttention: all four, and a float32 log-sum-exp a token and head. The output's matrix keeps the context anyway.
    """
    scores = 2 * a * s**2 * b if attention == "eager" else 4 * T * a
    return 2 * T * (query + key + value + context) + scores


def grouped_experts(u: Any = 1) -> Any:
    """One grouped product, on u T K rows of f / u channels; what they put out is weighted, in the order of the rows."""
    rows, own = u * T * K, T * K
    matrices_input = 2 * rows * h
    gate, up, active, product = (2 * rows * f / u for _ in range(4))  # silu keeps gate; silu(gate) times up keeps both
    weighting = 2 * own * h + 4 * own  # outputs and float32 weights, of the rows this rank sent
    return matrices_input + gate + up + active + product + weighting


def fused_experts(u: Any = 1) -> Any:
    """Megatron-LM: weight and activation are one operation, which keeps its input (gate and up) and the weights."""
    rows = u * T * K
    return 2 * rows * h + 2 * rows * 2 * f / u + 4 * rows + 2 * rows * f / u


def mixtral_kept(attention: str = "eager", experts: str = "grouped", u: Any = 1) -> Any:
    norms = 2 * T * h + 2 * T * h
    matrices_input = 2 * T * h  # one for queries, keys and values
    core = core_bytes(a * d, k * d, k * d, a * d, attention)  # keys and values are not repeated
    router_input = 2 * T * h
    if experts == "fused":
        router = router_input + 4 * T * K  # softmax over the chosen alone
        return norms + matrices_input + core + router + fused_experts(u)
    # float32 softmax over all experts; the chosen are divided by their sum, which keeps both.
    router = router_input + 4 * T * E + 4 * T * K + 4 * T
    return norms + matrices_input + core + router + grouped_experts(u)


def deepseek_kept(attention: str = "eager", experts: str = "grouped", u: Any = 1) -> tuple[Any, Any]:
    """What grows with the tokens, and what does not."""
    norms = 2 * T * h + 2 * T * h + 2 * T * q + 2 * T * m  # two of the layer, two of the latents
    matrices_input = 2 * T * h + 2 * T * q + 2 * T * m  # into both latents, and out of each
    core = core_bytes(a * (n + r), a * (n + r), a * v, a * v, attention)
    shared = 2 * T * h + 4 * (2 * T * g)  # its input; gate, silu(gate), up, their product
    choice = 4 * T * E + 4 * T * K + 4 * T  # sigmoid of all; the chosen and their sum
    if experts == "fused":
        # Megatron-LM's router keeps its input as it came, and the shared expert's MLP keeps the same one.
        return norms + matrices_input + core + shared + choice + fused_experts(u), 0
    # The router's product is in float32: its input and its matrix are copied.
    return norms + matrices_input + core + shared + 4 * T * h + choice + grouped_experts(u), 4 * E * h


@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("experts", ["grouped", "fused"])
def test_bytes_kept(attention: Any, experts: Any) -> None:
    how = {"attention": attention, "experts": experts}
    assert same(equation("activations", "mixtral", **how), mixtral_kept(attention, experts))
    assert same(equation("activations", "deepseek", **how), sum(deepseek_kept(attention, experts)))


@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("experts", ["grouped", "fused"])
def test_bytes_kept_on_one_of_many_ranks(attention: Any, experts: Any) -> None:
    """Tensor parallelism splits heads and, with sequence parallelism, the tokens of everything else: all is over t."""
    how = {"attention": attention, "experts": experts} | MEGATRON
    assert same(equation("activations", "mixtral", **how), mixtral_kept(attention, experts, u) / t)
    growing, fixed = deepseek_kept(attention, experts, u)
    assert same(equation("activations", "deepseek", **how), growing / t + fixed)
    without = {name: value for name, value in how.items() if name != "etp"}
    assert same(equation("activations", "mixtral", **without), mixtral_kept(attention, experts) / t)
    # Expert parallelism alone moves rows between ranks and changes what none of them keeps.
    assert same(equation("activations", "mixtral", ep="e"), mixtral_kept())


def test_bytes_kept_with_recomputation_context_parallelism_and_ragged_batches() -> None:
    for layer, kept in (("mixtral", mixtral_kept()), ("deepseek", sum(deepseek_kept()))):
        # The probabilities are made again; queries, keys and values stay, to make them from.
        assert same(equation("activations", layer, recompute="selective"), kept - 2 * a * s**2 * b)
        assert same(equation("activations", layer, recompute="full"), 2 * T * h)
    assert same(equation("activations", "mixtral", attention="flash", cp="c"), mixtral_kept("flash") / c)
    tokens, pairs = letter("T"), letter("P")
    ragged = equation("activations", "mixtral", padding_free=True)
    eager = mixtral_kept().subs({a: 0}) / T * tokens + 2 * tokens * 2 * a * d + 2 * a * pairs
    assert sympy.expand(ragged.expression - eager) == 0


# -- bytes sent --------------------------------------------------------------------------------------------------------


def test_bytes_sent() -> None:
    """Sequence parallelism: a half of the layer is gathered into and scattered out of, both again in backward, and its
    input gathered once more there. Latent attention gathers both latents so, the rotated keys without the third time.
    Experts: rows out and back, in forward and in backward; the ranks of an expert gather rows and add up results.
    """
    share = 2 * T * (t - 1) / t
    attention, latent, shared = 5 * h * share, (3 * (q + m) + 2 * r + 2 * h) * share, 5 * h * share
    exchanged = 4 * (2 * T * K * h / t) * (e - 1) / e
    of_one = 4 * (2 * u * T * K * h / t) * (u - 1) / u
    assert same(equation("wire", "mixtral", tp="t", sequence_parallel=True), attention)
    assert same(equation("wire", "mixtral", ep="e"), exchanged * t)
    assert same(equation("wire", "mixtral", **MEGATRON), attention + exchanged + of_one)
    assert same(equation("wire", "deepseek", **MEGATRON), latent + shared + exchanged + of_one)
    # Nothing said: all that a layer with experts is usually sharded over.
    assert same(equation("wire", "mixtral"), attention + exchanged)
    assert same(equation("wire", "mixtral", ep=8), 4 * (2 * T * K * h) * sympy.Rational(7, 8))
    # What runs again sends again: of the experts, the way out and the way back.
    assert same(equation("wire", "mixtral", ep="e", recompute="full"), exchanged * t * sympy.Rational(6, 4))


def test_bytes_sent_around_a_ring() -> None:
    """c - 1 times a rank hands on the keys and values of T / c tokens: once forward, twice backward, with gradients."""
    turn = (c - 1) * 2 * T / c
    assert same(equation("wire", "llama", cp="c", attention="flash"), 3 * turn * 2 * k * d)
    assert same(equation("wire", "mla", cp="c", attention="flash"), 3 * turn * a * (n + r + v))
    for layer, exchange in (("llama", "ring"), ("mamba2-2.7b", "all-to-all"), ("nemotron-h-8b", "ring, recurrences")):
        assert exchange in typed(f"equation wire --layer {layer} --cp --attention flash").out.replace("\n", " ")


# -- parts -------------------------------------------------------------------------------------------------------------


def test_parts_of_a_gpt_layer_are_korthikantis() -> None:
    """Section 4.1: attention 11 s b h + 5 a s^2 b, MLP 19 s b h, LayerNorms 4 s b h."""
    parts = equation("activations", "gpt").parts
    by_hand = {"attention": 11 * T * h + 5 * a * s**2 * b, "MLP": 19 * T * h, "norms": 4 * T * h}
    assert {name: sympy.expand(part - by_hand[name]) for name, part in parts.items()} == dict.fromkeys(by_hand, 0)


def test_parts_of_a_layer_with_experts() -> None:
    parts = equation("params", "deepseek").parts
    by_hand = {
        "attention": h * q + h * (m + r) + q * a * (n + r) + m * a * (n + v) + a * v * h,
        "router": h * E, "experts": 3 * E * h * f, "shared expert": 3 * h * g, "norms": 2 * h + q + m,
    }  # fmt: skip
    assert list(parts) == list(by_hand)
    assert all(sympy.expand(parts[name] - by_hand[name]) == 0 for name in by_hand)
    # Megatron's shared expert and its router keep one and the same input, which belongs to the first: the expert runs before.
    kept = equation("activations", "deepseek", experts="fused").parts
    assert sympy.expand(kept["router"] - (4 * T * E + 4 * T * K + 4 * T)) == 0
    assert sympy.expand(kept["shared expert"] - (2 * T * h + 8 * T * g)) == 0
    flops = equation("forward-flops", "deepseek").parts
    assert sympy.expand(flops["scores and context"] - deepseek_forward()[1]) == 0
    assert list(equation("wire", "deepseek", **MEGATRON).parts) == [
        "tensor parallelism", "expert parallelism", "tensor parallelism of experts"
    ]  # fmt: skip


def from_latex(text: str) -> str:
    """The LaTeX of a formula as Python."""
    text = re.sub(r"\\begin{aligned}|\\end{aligned}|&& \\text{[^}]*}|\\\\|&|{}|\\left|\\right", "", text)
    text = re.sub(r"\^{(\d+)}", r"**\1", re.sub(r"_{(\w+)}", r"_\1", text))
    while "frac" in text:
        text = re.sub(r"\\frac{([^{}]*)}{([^{}]*)}", r"((\1)/(\2))", text)
    text = text.replace("\\min", "Min")
    return re.sub(r"(?<=[\w)]) +(?=[\w(])", "*", text.replace("\n", " "))


@pytest.mark.parametrize("layer", ["gpt", "llama", "moe", "mla", "falcon-h1-0.5b", "gpt-oss-20b", "albert-base-v2"])
def test_what_is_printed_can_be_read_back(layer: str) -> None:
    """Text, parts and LaTeX are the expression itself, and every letter is in the legend."""
    for quantity in QUANTITIES:
        for found in equations(quantity, layer):
            names = {symbol.name: symbol for symbol in found.expression.free_symbols}
            assert set(found.legend) == set(names)
            by_part = "\n".join(line.partition("#")[0] for line in found.lines)
            for text in (found.text, by_part or found.text, from_latex(found.latex)):
                read = sympy.sympify(f"({text})", locals=names)
                assert sympy.expand(read - found.expression) == 0, (quantity, text)
            assert all(str(cite(key)) in found.source for key in found.keys)


def test_forms_are_short() -> None:
    assert equation("params", "moe").text == "3*E*f_e*h + 2*a*d*h + 2*d*h*k + E*h + 2*h"
    assert equation("params", "moe").written_parts == {
        "attention": "2*d*h*(a + k)", "router": "E*h", "experts": "3*E*f_e*h", "norms": "2*h"
    }  # fmt: skip
    assert equation("forward-flops", "mla").written_parts["scores and context"] == "2*a*b*s**2*(d_n + d_r + d_v)"
    assert equation("wire", "mla", ep="e").text == "8*K*b*h*s*(e - 1)/e"
    assert equation("params", "gpt", tp="t").factored == "h**2*(12/t + 6/h + 7/(h*t))"
    many = equation("params", "moe", tp="t", ep="e", etp="t_e")
    assert many.factored == "h*(2*a*d/t + 2*d*k/t + E + 3*E*f_e/(e*t_e) + 2)"
    for layer in ("moe", "mla"):
        for quantity in QUANTITIES:
            for found in equations(quantity, layer):
                assert all(len(part) < 90 for part in found.written_parts.values())


def test_names_of_a_layer() -> None:
    for quantity in ("params", "activations", "model-flops"):
        assert equation(quantity, "moe") == equation(quantity, "mixtral")
        assert equation(quantity, "mla") == equation(quantity, "deepseek")


# -- real models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "name", "kind"), [("mixtral", "mixtral-8x7b", 0), ("deepseek", "deepseek-v3", 1)])
def test_open_layers_are_the_real_ones(layer: str, name: str, kind: int) -> None:
    """What is read from the published configuration has the form of the layer with all sizes open."""
    for quantity in ("params", "active-params", "training-flops", "activations"):
        real, open_ = equation(quantity, name, kind=kind), equation(quantity, layer)
        assert real.expression == open_.expression
        assert real.parts == open_.parts


NUMBERED = ["mixtral-8x7b", "deepseek-v3", "deepseek-v2-lite", "qwen3-30b-a3b", "gpt-oss-20b", "llama-4-scout"]


@pytest.mark.parametrize("name", NUMBERED)
@pytest.mark.parametrize("ranks", [{}, {"tp": 4, "sequence_parallel": True, "ep": 8, "etp": 2}], ids=["one", "many"])
def test_letters_of_a_real_model_agree_with_its_numbers(name: str, ranks: dict[str, Any]) -> None:
    """The closed form, with the model's numbers put in, is the whole-number reading of the same list."""
    model = loadgauge.model(name)
    kernels = Kernels(**{field: getattr(PAPER, field) for field in PAPER.__struct_fields__} | {"experts": "fused"})
    view = View.of(2048, 3, kernels=kernels, **ranks)
    again = RecomputePolicy(mode="selective")
    for kind, block in enumerate(model.blocks):
        layer = block_layer(block, model.hidden_size, view)
        run = applied(again, layer)
        for quantity, number, how in (
            ("params", layer.params, {}),
            ("forward-flops", layer.forward_flops, {}),
            ("recompute-flops", layer.recompute_flops(run), {"recompute": "selective"}),
            ("activations", layer.saved(run), {"recompute": "selective", "experts": "fused"}),
            *([("wire", layer.wire, {})] if ranks else []),
        ):
            found = equation(quantity, name, kind=kind, **how, **ranks)
            assert substitute(found.expression, found.numbers | {"s": 2048, "b": 3}) == number, (quantity, kind)


@pytest.mark.parametrize("name", [*NUMBERED, "falcon-h1-0.5b", "granite-4.0-h-tiny", "opt-350m", "electra-small"])
def test_model_parameters_with_numbers_are_exact(name: str) -> None:
    found = loadgauge.parameters(loadgauge.model(name))
    assert equation("model-params", name).substitute == found.total
    assert equation("model-active-params", name).substitute == found.active


@pytest.mark.parametrize(
    ("layer", "sizes", "total", "active"),
    [
        # Jiang et al., section 1: 47 billion parameters, of which a token uses 13.
        ("mixtral", {"h": 4096, "a": 32, "k": 8, "d": 128, "E": 8, "K": 2, "f_e": 14336, "v": 32000, "l": 32}, 47, 13),
        # DeepSeek-AI, abstract: 671 billion, 37 of them active, which leaves out the token table.
        ("deepseek", {"h": 7168, "a": 128, "q": 1536, "m": 512, "d_n": 128, "d_r": 64, "d_v": 128, "E": 256, "K": 8,
                      "f": 18432, "f_e": 2048, "f_s": 2048, "v": 129280, "l": 61, "l_d": 3}, 671, 37),
    ],
)  # fmt: skip
def test_published_parameters(layer: str, sizes: dict[str, int], total: int, active: int) -> None:
    table = sizes["v"] * sizes["h"] if layer == "deepseek" else 0
    assert round(substitute(equation("model-params", layer).expression, sizes) / 1e9) == total
    assert round((substitute(equation("model-active-params", layer).expression, sizes) - table) / 1e9) == active


def test_a_letter_stands_for_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where layers differ in a size, its letter is that of the first, and the others' numbers are put in."""
    plain = llama_model(5, 64, 4, 100, intermediate_size=96)
    wide = msgspec.structs.replace(plain.blocks[0], mlp=Mlp(intermediate_size=160))
    model = msgspec.structs.replace(plain, blocks=(plain.blocks[0], wide), pattern=(0, 0, 1, 1, 1))
    monkeypatch.setattr(equation_layers, "find_model", lambda _: model)
    found = equation("model-params", "two-widths")
    width = letter("f")
    assert sympy.expand(found.parts["MLP"] - (2 * 3 * h * width + 3 * 3 * h * 160)) == 0
    assert found.numbers["f"] == 96
    assert found.substitute == loadgauge.parameters(model).total


def test_a_real_model_over_more_ranks_than_it_has_key_value_heads() -> None:
    """Llama 3.1's 8 key-value heads are copied, one to each of 16 ranks."""
    found = equation("params", "llama-3.1-8b", tp=16)
    assert same(found, 2 * h * a * d / 16 + 2 * h * d + 3 * h * letter("f") / 16 + 2 * h)


# -- on the command line -----------------------------------------------------------------------------------------------


def test_the_command_prints_every_part_and_letter() -> None:
    found = typed("equation params --layer mla --tp --ep --etp")
    assert found.code == 0
    for words in ("# shared expert", "3*E*f_e*h/(e*t_e)", "t_e: tensor-parallel ranks of one expert", "q_lora_rank",
                  "arXiv:2412.19437"):  # fmt: skip
        assert words in found.out
    (one,) = document("equation activations --layer moe --ep 8 --experts fused")["equations"]
    assert list(one["parts"]) == ["attention", "router", "experts", "norms"]
    assert one["expression"] == " + ".join(one["parts"].values())
    assert one["source_keys"] == ["jiang2024"]
    assert "ep = 8" in one["validity"]
    assert typed("equation params --layer mla --latex").out.startswith("\\begin{aligned}")


@pytest.mark.parametrize("layer", ["gpt", "llama", "mixtral", "moe", "deepseek", "mla"])
@pytest.mark.parametrize("quantity", [name for name in QUANTITIES if name != "states"])
def test_every_layer_has_every_quantity(quantity: str, layer: str) -> None:
    found = typed(["equation", quantity, "--layer", layer])
    assert found.code == 0, found.err
    assert "Source: " in found.out


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("params --layer gpt --ep", "gpt has none"),
        ("params --layer llama --etp 2", "llama has none"),
        ("activations --layer llama-3.1-8b --ep", "llama-3.1-8b has none"),
        ("activations --layer gpt --experts fused", "no experts"),
        ("params --layer moe --experts fused", "--experts does not change params"),
        ("params --layer moe --cp", "--cp does not change params"),
        ("active-params --layer moe --ep", "--ep does not change active-params"),
        ("model-params --layer mla --tp", "--tp does not change model-params"),
        ("model-active-params --layer moe --recompute full", "--recompute does not change model-active-params"),
        ("states --ep", "--ep does not change states"),
        ("states --layer moe", "--layer does not change states"),
        ("activations --layer moe --tp", "need sequence parallelism"),
        ("activations --layer moe --tp 1 --sequence-parallel", "give tp as well"),
        ("activations --layer moe --cp", "eager attention"),
        ("activations --layer moe --ep many", "letter e"),
        ("activations --layer moe --ep 0", "number of ranks"),
        ("activations --layer moe --etp -1", "-1"),
        ("activations --layer moe --ep t", "letter e"),
        ("activations --layer moe --experts both", "both"),
        ("activations --layer moe --recompute nothing.such", "nothing.such"),
        ("activations --layer moee", "did you mean moe?"),
        ("activations --layer deepsek", "did you mean deepseek?"),
        ("activations --layer mixtral-8x7", "mixtral-8x7b"),
        ("activatoin --layer moe", "did you mean activations?"),
        ("params --layer mixtral-8x7b --ep 3", "8 over 3 leaves 2"),
        ("params --layer gpt2 --tp 5", "12 over 5 leaves 2"),
        ("activations --layer minimax-text-01 --cp", "not modelled"),
    ],
)
def test_what_does_not_apply_is_refused_in_one_line(line: str, word: str) -> None:
    found = typed(f"equation {line}")
    assert found.code == 2
    assert not found.out
    assert found.err.startswith("loadgauge: ")
    assert found.err.count("\n") == 1
    assert word in found.err
