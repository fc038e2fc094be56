"""Numbers on the command line, read as the fields of a `Job` are."""

from __future__ import annotations

from typing import Any

import click

from loadgauge.errors import ConfigError
from loadgauge.spec.job_text import positive_number, whole_number


class Whole(click.ParamType):  # type: ignore[type-arg]
    """A whole number from `low` to `high`."""

    name = "number"

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the number; thousands may be separated by underscores. One out of bounds is a usage error."""
        try:
            return whole_number(str(value), self.low, self.high)
        except ConfigError as error:
            return self.fail(str(error), param, ctx)


class Positive(click.ParamType):  # type: ignore[type-arg]
    """A finite number above 0."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read the number; anything but a finite number above 0 is a usage error."""
        try:
            return positive_number(str(value))
        except ConfigError as error:
            return self.fail(str(error), param, ctx)
