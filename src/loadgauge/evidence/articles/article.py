"""The tables of an article: printed values, from its data file, beside those that loadgauge computes."""

import functools
import itertools
import math
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, list_data, lists, read_table
from loadgauge.evidence.articles.quantities import QUANTITIES


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value of an article.

    claim: the article's claim that it belongs to, as docs/articles.md numbers them
    printed: as the article prints it: a number, or "LOW to HIGH"; "" where it prints none
    by, of: the quantity that is right, and its sizes
    cut: its digits were cut off, not rounded; exact: it is meant to the last digit; at_most, at_least: it is a bound
    within: the share by which a round number may be off
    wrong: why the article is wrong; note: what else to know
    """

    what: str
    unit: str
    by: str
    claim: str
    of: dict[str, Any] = {}
    printed: str = ""
    cut: bool = False
    exact: bool = False
    at_most: bool = False
    at_least: bool = False
    within: float = 0.0
    wrong: str = ""
    note: str = ""

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the most that is as printed: to half a unit of the last digit, or a bound or range as it stands.

        >>> Row(what="", unit="", by="", claim="", printed="43").bounds
        (42.5, 43.5)
        >>> Row(what="", unit="", by="", claim="", printed="30 to 80", within=0.02).bounds
        (29.4, 81.6)
        """
        first, _, last = self.printed.partition(" to ")
        stands = last or self.exact or self.at_most or self.at_least
        digit = 0.0 if stands else 10.0 ** -len(first.partition(".")[2])
        below, above = (0.0, digit) if self.cut else (digit / 2, digit / 2)
        return (
            -math.inf if self.at_most else (float(first) - below) * (1 - self.within),
            math.inf if self.at_least else (float(last or first) + above) * (1 + self.within),
        )


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values that belong together.

    wrong: why those are wrong that give no reason of their own; commands: what gives their figures, or the formulas that do
    """

    title: str
    row: tuple[Row, ...]
    wrong: str = ""
    commands: tuple[str, ...] = ()


class Article(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An article. unit: what it means by a unit that has two meanings"""

    number: int
    title: str
    about: str
    table: tuple[Table, ...]
    unit: str = ""


class Checked(msgspec.Struct, frozen=True):
    """A row and its right value; `agrees` is None where nothing is printed, `right` None where it cannot be computed here.

    wrong: why the article is wrong, where it is
    """

    row: Row
    right: float | None
    agrees: bool | None
    wrong: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values for JSON."""
        row = self.row
        low, high = (None if math.isinf(end) else end for end in row.bounds) if row.printed else (None, None)
        return {
            "claim": row.claim,
            "what": row.what,
            "unit": row.unit,
            "printed": row.printed or None,
            "low": low,
            "high": high,
            "right": self.right,
            "agrees": self.agrees,
            "wrong": self.wrong or None,
            "note": row.note or None,
        }


@functools.cache
def numbers() -> tuple[int, ...]:
    """The numbers of the articles there are."""
    return tuple(sorted(int(name) for name in list_data("articles", ".toml")))


@functools.cache
def article(number: int) -> Article:
    """Read an article. Raises `ConfigError` for a number that none has.

    >>> article(2).table[0].row[0].printed
    '20'
    """
    if number not in numbers():
        raise ConfigError(f"there are articles {numbers()[0]} to {numbers()[-1]}", key="article")
    return msgspec.convert(read_table(f"articles/{number}.toml"), Article)


def check(row: Row, table: Table | None = None) -> Checked:
    """Compute what is right of a row, and compare it with what is printed.

    >>> first = article(2).table[0].row[0]
    >>> check(first).right, check(first).agrees
    (20.0, True)
    """
    right = QUANTITIES[row.by](**row.of)
    if right is None or not row.printed:
        return Checked(row, right, None)
    (low, high), slack = row.bounds, 1e-9 * abs(right)
    agrees = bool(low - slack <= right <= high + slack)
    return Checked(row, right, agrees, "" if agrees else row.wrong or (table.wrong if table else ""))


def check_all(number: int) -> list[list[Checked]]:
    """Check every row of an article, table by table. Raises `ConfigError` for a number that none has."""
    return [[check(row, table) for row in table.row] for table in article(number).table]


def verdicts(number: int) -> dict[str, str]:
    """Return of each claim of an article that has printed values whether these agree: "", "wrong" or "wrong in part"."""
    rows = itertools.chain.from_iterable(check_all(number))
    ends = lists((row.row.claim, row.agrees) for row in rows if row.agrees is not None)
    return {
        claim: ("wrong in part" if True in agree else "wrong") if False in agree else ""
        for claim, agree in ends.items()
    }
