"""Numbers on the command line, read as the fields of a `Job` are."""

from collections.abc import Callable
from typing import Any

import click

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job_text import positive_number, whole_number


class Read(click.ParamType):  # type: ignore[type-arg]
    """A text that a function of `job_text` reads, such as a finite number above 0."""

    def __init__(self, read: Callable[[str], Any], name: str = "number") -> None:
        self.read, self.name = read, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the text; one that cannot be read is a usage error."""
        try:
            return self.read(str(value))
        except ConfigError as error:
            return self.fail(str(error), param, ctx)


class Whole(Read):
    """A whole number from `low` to `high`; thousands may be separated by underscores."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__(lambda text: whole_number(text, low, high))


POSITIVE = Read(positive_number)
"""Finite numbers above 0."""
