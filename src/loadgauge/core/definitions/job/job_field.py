"""`Field`: type, bounds, unit and help of a field of `Job`, stated once for the command line, the page and sweeps."""

from typing import Any, Literal

import msgspec

from loadgauge.core.definitions.job import job_text

Kind = Literal["text", "whole", "positive", "switch", "choice", "file", "bandwidth", "count", "price", "electricity"]
Group = Literal["model", "file", "method", "batch", "layout", "cluster", "money", "plan", "posttrain"]


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """Type, bounds, choices, unit and help of a field of `Job`.

    low, high: bounds of a whole number; low: 0 of a number that may be 0
    choices: all values of a choice; values: the usual values of a text
    unit: of a number in text form (GB/s); metavar: the placeholder in `--help`; aliases: other spellings of the flag
    repeats: whether the flag may be given several times, whose texts are joined with commas
    needs: the field that must be given for this one to have a meaning
    group: `file` is about job files on the disk of whoever types the command, and no control of the page; neither is
        `posttrain`, which says what `--task` does
    """

    kind: Kind
    group: Group
    help: str
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    unit: str = ""
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    needs: str = ""
    repeats: bool = False

    def read(self, value: object) -> bool | int | float | str:
        """Read a value of this field from text (or a number, a bool or a path). Raises `ConfigError`.

        >>> Field(kind="whole", group="layout", help="", low=1, high=9).read("8")
        8
        """
        if self.kind == "switch":
            return job_text.switch(value)
        text = job_text.text_of(value)
        if self.kind == "whole":
            assert self.low is not None
            assert self.high is not None
            return job_text.whole_number(text, self.low, self.high)
        if self.kind == "positive":
            return job_text.positive_number(text.removesuffix("s") if self.metavar == "SECONDS" else text, self.low)
        if self.kind == "price":
            from loadgauge.core.definitions.hardware.prices import Prices  # only where one is asked for

            return Prices.read(text)
        if self.kind == "electricity":
            from loadgauge.core.definitions.hardware.electricity import grams

            grams(text)
        if self.kind == "count":
            return job_text.count(text)
        return job_text.choice(text, self.choices) if self.kind == "choice" else text


def about(kind: Kind, group: Group, help: str, **more: Any) -> msgspec.Meta:
    """Return the annotation of a field. more: further fields of `Field`"""
    return msgspec.Meta(extra={"field": Field(kind=kind, group=group, help=help, **more)})
