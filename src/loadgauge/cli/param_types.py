"""Numbers on the command line."""

from __future__ import annotations

import math
from typing import Any

import click


class Whole(click.ParamType):  # type: ignore[type-arg]
    """A whole number from `low` to `high`; what is no such number is refused in plain words."""

    name = "number"

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number that the text says; thousands may be set apart by underscores."""
        text = str(value).strip()
        digits = text.replace("_", "").removeprefix("-")
        if digits.isascii() and digits.isdecimal() and len(digits) <= 20:
            number = int(text.replace("_", ""))
            if self.low <= number <= self.high:
                return number
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        return self.fail(f"must be a whole number from {self.low} to {self.high}, got {shown!r}", param, ctx)


class Positive(click.ParamType):  # type: ignore[type-arg]
    """A finite number above 0."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number that the text says."""
        try:
            number = float(str(value))
        except ValueError:
            number = math.nan
        if 0 < number < math.inf:
            return number
        return self.fail(f"must be a number above 0, got {str(value)[:40]!r}", param, ctx)
