"""Values of a job's fields, read from text: from the command line, the page, a sweep's file or a keyword of the API."""

import math
import os
from collections.abc import Sequence
from itertools import groupby

from loadgauge.core.base import ConfigError, parse_count


def whole_number(text: str, low: int, high: int) -> int:
    """Read a whole number from `low` to `high`. Underscores may separate thousands. Raises `ConfigError`.

    >>> whole_number(" 131_072 ", 1, 10**9)
    131072
    """
    text = text.strip()
    digits = text.replace("_", "").removeprefix("-")
    if digits.isascii() and digits.isdecimal() and len(digits) <= 20:
        number = int(text.replace("_", ""))
        if low <= number <= high:
            return number
    raise ConfigError(f"must be a whole number from {low} to {high}, got {_quote(text)}")


def positive_number(text: str, low: int | None = None) -> float:
    """Read a finite number above 0. low: 0 where that may be said, too. Raises `ConfigError`.

    >>> positive_number("2.5"), positive_number("0.0", 0)
    (2.5, 0.0)
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if 0 < number < math.inf or number == low:
        return number
    raise ConfigError(f"must be a number above 0, got {text[:40]!r}")


def offload_words(text: str) -> str:
    """Read what is offloaded to the host, the optimizer perhaps in part. Raises `ConfigError`.

    >>> offload_words("optimizer:0.50"), offload_words("optimizer:1"), offload_words("all")
    ('optimizer:0.5', 'optimizer', 'all')
    """
    word, _, part = text.partition(":")
    if word not in ("none", "optimizer", "states", "all", "experts"):
        raise ConfigError(
            f"unknown offload {text!r} (known: none, optimizer, optimizer:0.5, states, all)", key="offload"
        )
    if word == "experts":
        raise ConfigError("experts: needs --task generate", key="offload")
    share = positive_number(part) if part else 1
    if part and (word != "optimizer" or share > 1):
        raise ConfigError("a part is of the optimizer, above 0 and up to 1: optimizer:0.5", key="offload")
    return f"{word}:{share:g}" if share < 1 else word


def count(text: str) -> str:
    """Return the text of a count above 0, such as 300B or 1.5e12. Raises `ConfigError`.

    >>> count("300B")
    '300B'
    """
    parse_count(text)
    return text


def stage_counts(text: str) -> tuple[int, ...]:
    """Read the layers of each pipeline stage; 14x8 is fourteen stages of eight. Raises `ConfigError`.

    >>> stage_counts("7,2x8,7")
    (7, 8, 8, 7)
    """
    counts: list[int] = []
    for word in text.split(","):
        times, _, size = word.strip().rpartition("x")
        if not all(part.isascii() and part.isdecimal() and len(part) < 6 for part in (times or "1", size)):
            raise ConfigError(
                f"must be counts of layers such as 7,8,8,7 or 7,14x8,7, got {_quote(text)}", key="stage_layers"
            )
        counts += [int(size)] * int(times or "1")
    return tuple(counts)


def stage_words(counts: Sequence[int]) -> str:
    """Return the layers of each pipeline stage as `stage_counts` reads them, more than three equal ones as one word.

    >>> stage_words((7, 8, 8, 8, 8, 7, 7))
    '7,4x8,7,7'
    """
    runs = [(size, len(list(same))) for size, same in groupby(counts)]
    return ",".join(f"{times}x{size}" if times > 3 else ",".join([str(size)] * times) for size, times in runs)


def choice(text: str, choices: Sequence[str]) -> str:
    """Return the text if it is one of the choices. Raises `ConfigError`."""
    if text not in choices:
        raise ConfigError(f"{_quote(text)} is not one of {', '.join(map(repr, choices))}")
    return text


def switch(value: object) -> bool:
    """Read a switch: a bool, or the text `true` or `false`. Raises `ConfigError`.

    >>> switch("true"), switch(False)
    (True, False)
    """
    if isinstance(value, bool):
        return value
    if value in ("true", "false"):
        return value == "true"
    raise ConfigError(f"must be true or false, got {_quote(value)}")


def text_of(value: object) -> str:
    """Return a text, a number or a path as text. Raises `ConfigError` for a bool and for any other type."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | os.PathLike):
        raise ConfigError(f"must be a number or a text, got {_quote(value)} ({type(value).__name__})")
    try:
        return str(value)
    except ValueError:  # an int of thousands of digits
        raise ConfigError("is too long a number") from None


def _quote(value: object) -> str:
    """The value for an error message, on one line and short."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:37]}...")
    try:
        return repr(value)[:40]
    except (ValueError, RecursionError):  # an int of thousands of digits, or endlessly nested lists
        return "a value too long to show"
