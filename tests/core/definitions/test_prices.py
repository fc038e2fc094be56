"""Prices: the dated table of list prices, and several of a job's own."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path

import pytest

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.package_data import read_data
from loadgauge.core.definitions.hardware.hardware import gpu_ids
from loadgauge.core.definitions.hardware.prices import Prices, listed, read_prices, usual_prices
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.time.cost import Budget
from loadgauge.core.text.estimate.step_time import money_lines


def test_every_price_has_a_card_a_day_and_a_source():
    rows, sources = tomllib.loads(read_data("prices.toml"))["offer"], tomllib.loads(read_data("sources.toml"))
    assert {row["kind"] for row in rows} == {"on-demand", "spot", "reserved"}
    for row in rows:
        assert datetime.date.fromisoformat(row["read"])
        assert row["where"]
        assert row["source"] in sources
        assert set(row["each"]) <= set(gpu_ids())
        assert all(0.01 < each < 20 for each in row["each"].values())
    assert len({row["cloud"] for row in rows}) >= 7
    assert usual_prices()["h100-sxm5-80gb"] == min(
        one.each for one in listed()["h100-sxm5-80gb"] if one.kind == "on-demand"
    )


def test_a_job_of_several_prices_costs_the_least_and_shows_all():
    job = Job.of("llama-3.1-8b", {"gpu": "h100", "tokens": "1B", "price": "runpod=1.89,lambda=2.75"})
    assert job.price == 1.89
    assert (
        Job.of("llama-3.1-8b", {"price": dict(zip(job.words()[::2], job.words()[1::2], strict=True))["--price"]}).price
        == 1.89
    )
    budget = Budget.of(tokens=1e9, gpus=8, step_tokens=1e6, step_seconds=450, price=job.price)  # 1,000 GPU-hours
    assert budget.cost == pytest.approx(1890)
    (line,) = money_lines(budget, "h100-sxm5-80gb")
    assert "runpod 1,890 at 1.89, lambda 2,750 at 2.75" in line


def test_list_prices_where_none_is_given():
    budget = Budget.of(tokens=1e9, gpus=8, step_tokens=1e6, step_seconds=450)
    (line,) = money_lines(budget, "a10")
    assert "lambda on-demand 1,290 at 1.29 (2026-09-25)" in line
    assert money_lines(budget, "trainium3") == []


@pytest.mark.parametrize("text", ["0", "runpod=", "=2", "runpod=1.89;lambda=2", "a=1,b=-2"])
def test_what_is_no_price(text: str):
    with pytest.raises(ConfigError):
        Prices.read(text)


def test_co2_is_energy_times_what_a_country_emits():
    line = "estimate llama-3.1-8b --gpu h100 --gpus 8 --zero 3 --tokens 1B --electricity"
    by_name, by_code, stated = (document(f"{line} {word}")["time"] for word in ("france", "FRA", "100"))
    assert by_name["co2_kg"] == by_code["co2_kg"]
    assert stated["co2_kg"] == pytest.approx(stated["energy_kwh"] * 0.1)
    rows = tomllib.loads(read_data("electricity.toml"))
    assert rows["source"] in tomllib.loads(read_data("sources.toml"))
    assert by_name["co2_kg"] == pytest.approx(by_name["energy_kwh"] * rows["grams"]["fra"]["grams"] / 1000)
    assert document("estimate llama-3.1-8b --gpu h100 --tokens 1B")["time"]["co2_kg"] is None
    refused = typed(f"{line} franc")
    assert (refused.code, "did you mean france" in refused.err) == (2, True)


@pytest.mark.parametrize(
    "text",
    [
        "gpu,price\nh100,1.9\na100-80gb,$1.1\n", "# mine\nh100 = 1.9\na100-80gb = 1.1 # of 8\n", "h100;1.9\na100-80gb;1.1",
        '"h100","1.9"\n"a100-80gb","1.1"', "h100\t1.9\n\na100-80gb\t1.1\n", "h100: 1.9\na100-80gb: 1.1\n",
    ],
)  # fmt: skip
def test_prices_are_read_from_a_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "prices"
    file.write_text(text, encoding="utf-8")
    assert read_prices(str(file)) == {"h100": 1.9, "a100-80gb": 1.1}
    file.write_text("h100\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has no line with a GPU and a price"):
        read_prices(str(file))
    file.write_text("h100, cheap 4\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has a line that is no GPU and price"):
        read_prices(str(file))


def test_list_prices_by_their_kind() -> None:
    spot = {gpu for gpu, offers in listed().items() if any(offer.kind == "spot" for offer in offers)}
    assert set(read_prices("spot")) == spot
    assert read_prices("on-demand") == usual_prices()
