"""Lengths of generated answers: a distribution, from a few words or a file.

Lengths that a law would draw beyond the longest allowed are cut off there, as an engine does: they are that long.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path

from loadgauge.core.base.errors import ConfigError, refuse
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.base.lengths.files import LONGEST

DRAWS = 10**6
"""Answers among which a law's shares are counted out."""
LAWS = {"exp": 2, "lognormal": 3}
FORMS = "N, uniform:N, exp:MEAN,MAX, lognormal:MEDIAN,SIGMA,MAX"


def answers(text: str) -> Lengths:
    """Read a distribution of answers [tokens]. Raises `ConfigError`.

    N: all as long; uniform:N; exp:MEAN,MAX; lognormal:MEDIAN,SIGMA,MAX; otherwise a file of lengths.

    >>> answers("2048").mean, answers("uniform:100").mean, round(answers("exp:2000,8192").mean)
    (2048.0, 50.5, 1967)
    """
    if text.strip().replace("_", "").isdecimal() and float(text):
        return Lengths.of([_allowed(text.strip())])
    name, _, rest = text.partition(":")
    if name not in LAWS:
        refuse(
            name.lstrip("+-").replace(".", "").isdecimal(),
            f"must be a whole number of tokens above 0, got {text!r}",
            key="answers",
        )
        try:
            return Lengths.parse(text)
        except ConfigError as error:
            hint = "" if Path(text).exists() or (":" in text and name == "uniform") else f"; or {FORMS}"
            raise ConfigError(f"{str(error).removeprefix('lengths: ')}{hint}", key="answers") from None
    return _law(name, rest, text)


def _allowed(number: str) -> int:
    """Read how long an answer may be. Raises `ConfigError` where that is more than any sequence may be."""
    refuse(
        (longest := float(number)) > LONGEST, f"must be at most {LONGEST:,} tokens, got {number[:40]}", key="answers"
    )
    return int(longest)


def stated_longest(text: str, lengths: Lengths) -> int:
    """Tokens of the longest answer that a text allows, which of a law may be more than ever comes.

    >>> stated_longest("exp:10,8192", answers("exp:10,8192")), answers("exp:10,8192").longest < 8192
    (8192, True)
    """
    name, _, rest = text.partition(":")
    return int(float(rest.split(",")[-1])) if name in LAWS else lengths.longest


@functools.lru_cache(8)
def _law(name: str, rest: str, text: str) -> Lengths:
    """The distribution of a law. Raises `ConfigError`"""
    try:
        numbers = [float(parameter) for parameter in rest.split(",")]
        longest = int(numbers[-1])
    except (ValueError, OverflowError):
        numbers, longest = [], 0
    if len(numbers) != LAWS[name] or not all(0 < number < math.inf for number in numbers) or longest < 1:
        example = "exp:2000,8192" if name == "exp" else "lognormal:1500,0.8,8192"
        raise ConfigError(f"must be like {example}, got {text!r}", key="answers")
    _allowed(rest.split(",")[-1].strip())
    if name == "exp":
        return _capped(lambda x: -math.expm1(-x / numbers[0]), longest)
    median, sigma, _ = numbers
    return _capped(lambda x: 0.5 * math.erfc(-math.log(x / median) / (sigma * math.sqrt(2))), longest)


def _capped(below: Callable[[float], float], longest: int) -> Lengths:
    """The distribution whose share below x is given, up to the longest. A length counts what rounds up to it."""
    step = max(1, longest // 8192)
    values = [*range(step, longest, step), longest]
    counts = {
        value: round(DRAWS * upper) - round(DRAWS * lower)
        for value, lower, upper in zip(
            values, [0.0, *map(below, values[:-1])], [*map(below, values[:-1]), 1.0], strict=True
        )
    }
    return Lengths.histogram({value: count for value, count in counts.items() if count})
