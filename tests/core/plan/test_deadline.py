"""Whole runs and dates: the GPUs found are enough, none fewer are, and the three questions agree."""

from __future__ import annotations

import pytest

from command_line import document, typed

BASE = "plan llama-3.1-8b --gpu h100-sxm5-80gb --global-batch 1024 --tp 1 --cp 1 --pp 1,2 --vpp 1 --recompute none"


def test_the_fewest_gpus_that_finish_in_time() -> None:
    found = document(f"{BASE} --tokens 100B --days 2")
    (answer,) = found["answers"]
    beside = {one["gpus"]: one["days"] for one in found["sizes"]}
    assert answer["value"] % 8 == 0
    assert beside[answer["value"]] <= 2
    assert all(days > 2 for gpus, days in beside.items() if gpus < answer["value"])
    assert min(beside) < answer["value"] < max(beside)
    # Every whole node below it, by plans of their own.
    for gpus in range(answer["value"] - 16, answer["value"], 8):
        other = typed(f"{BASE} --find days --tokens 100B --gpus {gpus} --json")
        assert other.code == 1 or document(f"{BASE} --find days --tokens 100B --gpus {gpus}")["answers"][0]["value"] > 2
    same = document(f"{BASE} --find days --tokens 100B --gpus {answer['value']}")["answers"][0]["value"]
    assert same == pytest.approx(beside[answer["value"]])
    tokens = document(f"{BASE} --find tokens --days {same} --gpus {answer['value']}")["answers"][0]["value"]
    assert tokens == pytest.approx(100e9)


def test_the_cheapest_kind_of_gpu_by_a_date_has_the_fewest_of_each() -> None:
    """Each kind as a question of its own; what a forward at the peak cannot do in time is not searched."""
    few = BASE.replace("--gpu h100-sxm5-80gb ", "")
    prices = {"h100-sxm5-80gb": 2.5, "a100-sxm4-80gb": 1.6}
    listed = ",".join(f"{name}={price}" for name, price in prices.items())
    answers = document(f"{few} --tokens 100B --days 4 --prices {listed}")["answers"]
    costs = {}
    for name, price in prices.items():
        (alone,) = document(f"{few} --gpu {name} --tokens 100B --days 4")["answers"]
        best = alone["best"]
        costs[name] = price * 1e9 / (3600 * best["time"]["tokens_per_second_per_gpu"])
    found = {answer["best"]["gpu"]: answer["value"] for answer in answers}
    assert found == pytest.approx(costs)
    assert list(found.values()) == sorted(found.values())
    told = typed(f"{few} --tokens 100B --days 0.01 --gpus 8 --prices {listed}")
    assert told.code == 1
    assert "and more, 0.01 are allowed" in told.err


def test_tokens_or_days_on_a_number_of_gpus_ask_for_the_other() -> None:
    for words, find in (("--tokens 1T", "days"), ("--days 30", "tokens")):
        line = f"{BASE} --gpus 64 {words}"
        assert document(line)["answers"] == document(f"{line} --find {find}")["answers"]


def test_a_utilisation_may_be_assumed() -> None:
    """Days are then 6 P N FLOPs and attention's over n x 989 TFLOP/s x 40 %."""
    found = document(f"{BASE} --find days --tokens 1T --gpus 64 --mfu 40%")["answers"][0]
    assert 1 < found["value"] * 86400 * 64 * 989e12 * 0.4 / (6 * 8.03e9 * 1e12) < 1.1
    plain = document("estimate gpt2-xl --gpu a100-sxm4-80gb --gpus 8 --tokens 1B --mfu 50%")["time"]
    assert plain["mfu"] == pytest.approx(0.5)
    hardware = document("estimate gpt2-xl --gpu a100-sxm4-80gb --gpus 8 --recompute full --tokens 1B --hfu 50%")["time"]
    assert hardware["hfu"] == pytest.approx(0.5)
    assert hardware["mfu"] < 0.4


@pytest.mark.parametrize(
    ("question", "assumed"),
    [
        ("--find gpus --tokens 100B --days 2", "--mfu 40%"),
        ("--find gpus --tokens 100B --days 3", "--hfu 50%"),
        ("--find days --tokens 100B --gpus 64", "--hfu 33.3%"),
        ("--find tokens --days 3 --gpus 64", "--mfu 40%"),
        ("--find days --tokens 100B --gpus 64", ""),
    ],
)
def test_times_beside_an_answer_are_of_one_utilisation(question: str, assumed: str) -> None:
    """Days are tokens over the rate beside them, and what is printed to reproduce them gives all of it."""
    found = document(f"{BASE.replace('none', 'full')} {question} {assumed}")
    (answer,) = found["answers"]
    layout, value = answer["best"], answer["value"]
    tokens = value if "find tokens" in question else 100e9
    sizes = {one["gpus"]: one["days"] for one in found.get("sizes", ())}
    days = 3 if "find tokens" in question else sizes.get(value, value)
    rate = layout["time"]["tokens_per_second_per_gpu"] * layout["layout"]["gpus"]
    assert tokens / rate / 86400 == pytest.approx(days, rel=1e-9)
    again = document(layout["command"].removeprefix("loadgauge "))["time"]
    assert again["days"] == pytest.approx(days, rel=1e-9)
    for name in ("step", "low", "high", "mfu", "hfu", "tokens_per_second_per_gpu"):
        assert again[name] == pytest.approx(layout["time"][name], rel=1e-9)
    if assumed:
        name, share = assumed.removeprefix("--").removesuffix("%").split()
        assert again[name] == pytest.approx(float(share) / 100)


def test_years_are_said() -> None:
    """Article 3: 300 B tokens of GPT-3 on one A100 at its peak."""
    text = typed("estimate gpt3-175b --gpu a100-sxm4-80gb --tokens 300B --mfu 100%").out
    assert "32.8 years" in text


def test_no_number_of_gpus_may_be_enough() -> None:
    found = typed(f"{BASE.replace('1024', '16')} --tokens 10T --days 1")
    assert found.code == 1
    assert "sequences a step" in found.err


@pytest.mark.parametrize(
    ("question", "value"),
    [("link --exposed 0.4", 32e9), ("nic --exposed 0.9", 25e9 / 8)],
)
def test_links_that_are_enough(question: str, value: float) -> None:
    found = document(
        f"plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 16 --global-batch 512 --pp 1 --cp 1 --tp 1,2 --find {question}"
    )
    assert found["answers"][0]["value"] == value


def test_a_link_that_does_not_help_is_said() -> None:
    found = typed(
        "plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 16 --global-batch 16 --pp 1 --cp 1 --tp 8 --find link --exposed 0.01"
    )
    assert found.code == 1
    assert "most of it is" in found.err


def test_the_smallest_batch() -> None:
    line = "plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 16 --pp 1 --cp 1 --tp 1 --recompute none --find batch"
    strict, loose = (document(f"{line} --exposed {share}")["answers"][0]["value"] for share in (0.08, 0.3))
    assert strict > loose


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tokens 1T", "--days"),
        ("--days 3", "--tokens"),
        ("--find days --gpus 8", "tokens"),
        ("--find tokens --gpus 8", "days"),
        ("--find days --tokens 1T", "gpus"),
        ("--mfu 40%", "--tokens"),
        ("--tokens 1T --days 3 --mfu 140%", "share"),
        ("--tokens 1T --days 3 --find nic", "does not affect"),
        ("--tokens 1T --gpus 64 --find spares --mfu 40%", "mfu: does not affect"),
    ],
)
def test_what_does_not_go_together_is_said(words: str, said: str) -> None:
    found = typed(f"{BASE} {words}")
    assert found.code == 2
    assert said in found.err


@pytest.mark.slow
def test_a_card_on_given_gpus_is_in_time_to_the_second() -> None:
    """What rules a card out before its plan is a bound that no layout beats."""
    line = "plan llama-3.1-8b --find gpu --gpus 8 --tokens 10B --prices h100-sxm5-80gb=2"
    best = document(f"{line} --days 30")["answers"][0]["best"]
    days = 10e9 / (best["time"]["tokens_per_second_per_gpu"] * 8) / 86400
    late, timely = (typed(f"{line} --days {days * factor:.6f}") for factor in (0.999, 1.001))
    assert (late.code, timely.code) == (1, 0)
    assert "takes 1.4" in late.err


def test_a_stated_number_of_gpus_is_named_where_it_is_too_small() -> None:
    line = "plan llama-3.1-8b --gpu h100 --gpus 8 --global-batch 64 --tokens 1T --days 30"
    assert "no number of GPUs up to 8 finishes in 30 days: 8 take" in (said := typed(line)).err
    assert said.code == 1
