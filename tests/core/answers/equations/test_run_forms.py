"""Closed forms of a run, against simulated schedules, a search by brute force, and the articles' worked cases."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from command_line import document, typed
from loadgauge.core.answers.equations.equation import QUANTITIES, equations
from loadgauge.core.answers.equations.numbers import solved, with_numbers
from loadgauge.core.answers.equations.run_forms import FORMS, run_forms
from loadgauge.core.estimate.memory.recompute import checkpointed
from loadgauge.core.estimate.schedule.simulate import simulate
from loadgauge.core.estimate.symbols import letter
from theory import CASES


def value(quantity: str, part: int = 0, **numbers: float) -> float:
    expression: Any = run_forms(quantity)[part].expression
    found = expression.subs({letter(name): number for name, number in numbers.items()})
    return float(found)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 64)])
def test_the_bubble_is_that_of_a_simulated_schedule(p: int, m: int) -> None:
    whole = simulate("1f1b", p, m, forward=1, backward=2, weight=0).total
    assert whole / (3 * m) - 1 == pytest.approx(value("bubble", p=p, m=m))


def test_the_best_number_of_checkpoints() -> None:
    layers, entering, kept = 64, 2.0, 32.0
    least = min(range(1, 10 * layers), key=lambda count: checkpointed(layers, count, entering, kept))
    assert value("checkpoints", l=layers, A=kept, A_in=entering) == pytest.approx(least)
    smallest = checkpointed(layers, least, entering, kept)
    assert value("checkpoints", 1, l=layers, A=kept, A_in=entering) == pytest.approx(smallest)


@pytest.mark.parametrize("size", ["13B", "65B", "175B"])
def test_bandwidth_is_that_of_the_worked_cases(size: str) -> None:
    i = CASES[f"A3-TRAF-{size}-TPCALLS"]["inputs"]
    known = {
        "X": 150e12,
        "r": 0.05,
        "t": i["t"],
        "d": i["d"],
        "B": i["B"],
        "s": i["s"],
        "h": i["h"],
        "l": i["l"],
        "p": i["p"],
    }
    data = value("bandwidth", 2, **known)
    assert 8 * data / 1e9 == pytest.approx(CASES[f"A3-BW-S3-{size}-DP"]["computed"])
    # The cases neglect attention, 1 + s/6h, and say 13 B or 65.2 B for 12 l h^2 parameters.
    neglected = (1 + i["s"] / (6 * i["h"])) * 12 * i["l"] * i["h"] ** 2 / i["P"]
    tensor = value("bandwidth", 0, **known) / 1e9
    assert tensor * neglected == pytest.approx(CASES[f"A3-BW-S3-{size}-TP"]["computed"])
    if i["p"] > 1:
        assert value("bandwidth", 1, **known) / 1e9 * neglected == pytest.approx(
            CASES[f"A3-BW-S3-{size}-PP"]["computed"]
        )


def test_other_worked_cases() -> None:
    i = CASES["A3-AMDAHL-S"]["inputs"]
    assert value("amdahl", f=i["serial"], n=i["N"]) == pytest.approx(CASES["A3-AMDAHL-S"]["computed"])
    i = CASES["A3-NGPU-175B"]["inputs"]
    gpus = value("gpus", P=i["P"], N=i["T"], X=i["X"], S=86_400 * i["days"])
    assert gpus == pytest.approx(CASES["A3-NGPU-175B"]["computed"])
    i = CASES["A3-1T-PAPER"]["inputs"]
    seconds = value("duration", 1, P=i["P"], N=i["T"], n=i["n"], X=i["X"])
    assert seconds / 86_400 == pytest.approx(CASES["A3-1T-PAPER"]["computed"])
    i = CASES["S-ZHIHU-KV"]["inputs"]
    cache = value("kv-cache", l=i["l"], b=i["b"], s=i["s"] + i["n"], k=1, w=i["h"])
    assert cache == CASES["S-ZHIHU-KV"]["computed"]
    assert value("utilisation", F=312e12, S=2, n=1, X=312e12) == 0.5


def test_partitioned_inputs_cost_a_twelfth_of_what_the_layers_send() -> None:
    """Rajbhandari et al., section 8: 12 x sequence x hidden a block of Megatron-LM, and one all-gather more."""
    (wire,) = equations("wire", layer="gpt", tp="t", recompute="full")[:1]
    t, b, s, h = 16, 8, 1024, 8192
    sent = float(
        wire.expression.subs({letter(name): number for name, number in (("t", t), ("b", b), ("s", s), ("h", h))})
    )
    gathered = value("partitioned", 2, l=1, b=b, s=s, h=h, t=t)
    assert gathered / sent == pytest.approx(value("partitioned", 3)) == pytest.approx(1 / 12)
    assert value("partitioned", l=1, b=b, s=s, h=h, t=t) * t == value("partitioned", 1, l=1, b=b, s=s, h=h)


@pytest.mark.parametrize("quantity", FORMS)
def test_every_form_has_its_letters_source_and_latex(quantity: str) -> None:
    found = document(f"equation {quantity}")["equations"]
    out = typed(f"equation {quantity}").out
    for form in found:
        assert form["expression"] in out
        assert form["latex"]
        assert form["source"]
        assert set(form["legend"]) >= {"X"} or quantity not in ("bandwidth", "duration", "gpus", "utilisation")
        assert all(meaning in out for meaning in form["legend"].values())
    assert typed(f"equation {quantity} --layer llama").code == 2


def test_the_longest_of_some_lengths() -> None:
    """Every draw of three from 1 to 6; and, of 8,192 and eight, what article 4's formulas give."""
    draws = [max(draw) for draw in itertools.product(range(1, 7), repeat=3)]
    expression: Any = run_forms("longest")[0].expression
    small = expression.subs({letter("N"): 6, letter("n"): 3}).doit()
    assert float(small) == pytest.approx(sum(draws) / len(draws))
    assert value("longest", 1, N=8192, n=8) == pytest.approx(7282.28, abs=0.6)
    # The longest of two exponentials is a mean of each in turn: M/2 until the first, then M.
    assert value("longest", 2, M=10, n=2) == pytest.approx(15)


@pytest.mark.parametrize("share", ["0", "0.5", "1"])
def test_part_of_the_layers_run_again(share: str) -> None:
    case = CASES[f"A1-FLOPS-65B-g{share}"]
    i = case["inputs"]
    expression: Any = run_forms("gamma")[0].expression
    names = {"b": "b", "s": "s", "h": "h", "l": "l", "v": "V"}
    known = {symbol: i[names[symbol.name]] for symbol in expression.free_symbols if symbol.name in names}
    gamma = next(symbol for symbol in expression.free_symbols if symbol.name == "gamma")
    assert float(expression.subs(known | {gamma: i["gamma"]})) == pytest.approx(case["computed"], rel=1e-9)


def test_traffic_of_article_3() -> None:
    """175 B over 8 x 8 x 18: the audit's own arithmetic, in bytes."""
    sizes = {"b": 1, "s": 2048, "h": 12288, "l": 96, "t": 8, "p": 8, "m": 64}
    assert value("traffic", 0, **sizes) == pytest.approx(270.58e9, rel=1e-4)
    assert value("traffic", 1, **sizes) == pytest.approx(6.4425e9, rel=1e-4)
    assert value("traffic", 2, **sizes) == pytest.approx(3.2212e9, rel=1e-4)
    whole = value("traffic", 3, P=174.6e9, d=18, t=8, p=8)
    assert whole == 2 * 2 * 17 / 18 * 174.6e9 / 64


def test_a_ring_hides_under_attention() -> None:
    """Each of c - 1 rounds sends the keys and values of s/c tokens and multiplies the rank's queries with as many."""
    b, s, h, c, X = 2, 32768, 4096, 8, 400e12
    seconds = 4 * b * (s / c) * (s / c) * h / X
    nbytes = 2 * 2 * b * (s / c) * h
    assert value("bandwidth", 3, s=s, c=c, X=X) == pytest.approx(nbytes / seconds)


def test_experts_need_bandwidth() -> None:
    """Of a token: 3 x its layer's FLOPs against 4 exchanges of K copies of 2 h bytes, of which (e - 1)/e leave."""
    h, a, k, w, F, E, K, e, s, X, r = 4096, 32, 8, 128, 14336, 8, 2, 8, 4096, 400e12, 0.05
    products = 2 * h * w * (2 * a + 2 * k) + 4 * s * a * w + 2 * h * E + 6 * K * h * F
    wire = 4 * K * 2 * h * (e - 1) / e
    known = {"h": h, "a": a, "k": k, "w": w, "F_e": F, "E": E, "K": K, "e": e, "s": s, "X": X, "r": r}
    assert value("bandwidth", 4, **known) == pytest.approx(wire / (r * 3 * products / X))


def test_padded_flash_is_what_an_estimate_keeps() -> None:
    """Article 4's layer at N = 8,192, as the audit of its table has it: 10.840 GiB, and 6.382 without padding."""
    drawn = {"T_p": 8 * 7282.277, "T": 8 * 4096.5, "h": 6144, "a": 48}
    assert value("padded-flash", 0, **drawn) / 2**30 == pytest.approx(10.840, abs=0.001)
    assert value("padded-flash", 1, **drawn) / 2**30 == pytest.approx(6.382, abs=0.001)


@pytest.mark.parametrize(
    ("quantity", "letter", "numbers"),
    [
        ("duration", "n", {"P": 175e9, "N": 300e9, "X": 140e12, "n": 1056}),
        ("gpus", "X", {"P": 65e9, "N": 1.4e12, "X": 150e12, "S": 21 * 86400}),
        ("amdahl", "f", {"f": 0.05, "n": 64}),
        ("bandwidth", "h", {"X": 150e12, "r": 0.05, "t": 8, "s": 2048, "h": 12288}),
        ("utilisation", "S", {"F": 1e18, "S": 30, "n": 64, "X": 312e12}),
        ("checkpoints", "A_in", {"l": 64, "A": 32, "A_in": 2}),
    ],
)
def test_a_letter_is_found_again_from_the_value(quantity: str, letter: str, numbers: dict[str, float]) -> None:
    given = ",".join(f"{name}={number!r}" for name, number in numbers.items() if name != letter)
    told = document(f"equation {quantity} --numbers {quantity}={value(quantity, **numbers)!r},{given} --solve {letter}")
    assert told["equations"][0]["solved"][letter] == pytest.approx(numbers[letter])


def test_amdahl_of_hours_and_the_longest_by_counting() -> None:
    told = document("equation amdahl --numbers serial=1h,total=20h,gpus=64")
    assert float(told["equations"][0]["with_numbers"]) == pytest.approx(20 / (1 + 19 / 64))
    assert float(told["equations"][1]["with_numbers"]) == pytest.approx(20)
    draws = list(itertools.product(range(1, 7), repeat=3))
    share = sum(max(draw) == 5 for draw in draws) / len(draws)
    assert value("longest", 4, N=6, n=3, k=5) == pytest.approx(share)
    assert value("longest", 3, N=6, n=3) == pytest.approx(sum(max(draw) ** 2 for draw in draws) / len(draws))


def test_words_stand_for_letters_and_none_is_passed_over() -> None:
    """15 T tokens of 8 B parameters on 512 GPUs at 40 % of 989 TFLOP/s."""
    told = document("equation duration --numbers tokens=15T,params=8B,gpus=512,peak=989TFLOP/s,mfu=40%")
    seconds = 6 * 15e12 * 8e9 / (512 * 0.4 * 989e12)
    assert float(told["equations"][0]["with_numbers"].replace(",", "")) == pytest.approx(seconds)
    assert "no letter 'hidden'" in typed("equation duration --numbers tokens=15T,hidden=4096").err
    assert typed("equation gather").out == typed("equation collectives").out


@pytest.mark.parametrize(
    "flags", ["--numbers n", "--solve n", "--numbers duration=1d --solve n", "--numbers n=x", "--numbers mfu=40%"]
)
def test_numbers_that_cannot_be_read_or_solved_for_are_one_line(flags: str) -> None:
    told = typed(f"equation duration {flags}")
    assert told.code == 2
    assert len(told.err.splitlines()) == 1


def test_without_a_name_every_quantity_is_listed() -> None:
    out = typed("equation").out
    assert all(f"\n{name} " in out for name in (*FORMS, *QUANTITIES))


@pytest.mark.parametrize("quantity", sorted(FORMS))
def test_every_form_is_solved_for_each_of_its_letters(quantity: str) -> None:
    """The value of a form at some numbers, asked back for a letter, gives a number with which the form has that value."""
    small = {"f": 0.1, "r": 0.05, "gamma": 0.5, "N": 40.0, "k": 13.0, "n": 4.0}
    for form in run_forms(quantity):
        given = {name: small.get(name, 8.0) for name in form.legend}
        value = float(with_numbers(form, given).substitute)
        for name in form.legend:
            found = solved(with_numbers(form, given), name, value)
            assert float(with_numbers(form, given | {name: found}).substitute) == pytest.approx(value, rel=1e-6)


def test_the_longest_of_so_many_lengths_is_found_by_its_words_and_its_own_name_is_no_letter() -> None:
    """`longest` is the value asked for, not N, whose meaning has that word; only forms in its unit answer."""
    told = document("equation longest --numbers longest=3000,M=1000 --solve n")["equations"]
    harmonic = next(n for n in range(1, 99) if 1000 * sum(1 / k for k in range(1, n + 1)) >= 3000)
    assert [form["solved"] for form in told] == [{"n": harmonic}]
    told = document("equation longest --numbers longest=90,n=8,k=3,M=1 --solve N")["equations"]
    assert [form["unit"] for form in told] == ["tokens", "tokens"]
