"""Closed forms of a run, against simulated schedules, a search by brute force, and the articles' worked cases."""

from __future__ import annotations

from typing import Any

import pytest

from command_line import document, typed
from loadgauge.equation.run_forms import FORMS, run_forms
from loadgauge.estimate.memory.recompute import checkpointed
from loadgauge.estimate.schedule.simulate import simulate
from loadgauge.estimate.symbols import letter
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
