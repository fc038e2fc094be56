"""Grams of CO2 for a kilowatt-hour, by country (`data/electricity.toml`)."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

from loadgauge.core.base import ConfigError, read_table, suggest
from loadgauge.core.definitions.job.job_text import positive_number


@functools.cache
def _countries() -> dict[str, Any]:
    countries: dict[str, Any] = read_table("electricity.toml")["grams"]
    return countries | {each["name"]: each for each in countries.values()}


def grams(text: str) -> tuple[float, str]:
    """Return the grams of CO2 equivalents a kWh of a country, by its name or ISO code, or as they are said; and what they are of.

    Raises `ConfigError` for a country that is not in the table.

    >>> grams("Norway")[0] < 50 < grams("POL")[0], grams("400")
    (True, (400.0, 'as stated'))
    """
    with suppress(ValueError):
        float(text)
        return positive_number(text), "as stated"
    country = _countries().get(text.strip().lower())
    if country is None:
        raise ConfigError(
            f"unknown electricity {text!r}: give a country, or grams a kWh{suggest(text.lower(), _countries())}"
        )
    return country["grams"], f"{country['name'].title()}, {country['year']}"
