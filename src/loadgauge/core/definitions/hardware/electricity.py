"""Grams of CO2 for a kilowatt-hour, by country (`data/electricity.toml`)."""

import functools
import re
from typing import Any

from loadgauge.core.base import ConfigError, read_table, suggest
from loadgauge.core.definitions.job.job_text import positive_number


@functools.cache
def _countries() -> dict[str, Any]:
    countries: dict[str, Any] = read_table("electricity.toml")["grams"]
    return (
        countries
        | {each[key]: each for each in countries.values() for key in ("name", "short")}
        | {"uk": countries["gbr"]}
    )


STATED = re.compile(r"(?i)(?P<number>[\d.]+(e[+-]?\d+)?)\s*(?P<kilo>k)?(g\s*(co2(e|eq)?)?\s*(/|per|a)\s*kwh)?")
"""Grams of CO2 equivalents a kWh as they are said."""


def grams(text: str) -> tuple[float, str]:
    """Return the grams of CO2 equivalents a kWh of a country, by its name or ISO code, or as they are said; and what they are of.

    Raises `ConfigError` for a country that is not in the table.

    >>> grams("Norway")[0] < 50 < grams("POL")[0], grams("400"), grams("380 gCO2/kWh"), grams("0.38kg/kWh")
    (True, (400.0, 'as stated'), (380.0, 'as stated'), (380.0, 'as stated'))
    >>> grams("FR") == grams("fra") == grams("France")
    True
    """
    stated = STATED.fullmatch(text.strip())
    if stated is not None:
        return positive_number(stated["number"]) * (1000 if stated["kilo"] else 1), "as stated"
    country = _countries().get(text.strip().lower())
    if country is None:
        raise ConfigError(
            f"unknown electricity {text!r}: give a country, or grams a kWh{suggest(text.lower(), _countries())}"
        )
    return country["grams"], f"{country['name'].title()}, {country['year']}"
