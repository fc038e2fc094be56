"""The tables of an article: printed values, from its data file, beside those that loadgauge computes."""

from __future__ import annotations

import functools
import tomllib
from typing import Any

import msgspec

from loadgauge.articles.quantities import QUANTITIES
from loadgauge.errors import ConfigError
from loadgauge.package_data import list_data, read_data


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One value of an article.

    printed: as the article prints it, "" where it prints none; by, of: the quantity that is right, and its sizes
    cut: its digits were cut off, not rounded; exact: it is meant to the last digit; at_most, at_least: it is a bound
    wrong: why the article is wrong; note: what else to know
    """

    what: str
    unit: str
    by: str
    of: dict[str, Any] = {}
    printed: str = ""
    cut: bool = False
    exact: bool = False
    at_most: bool = False
    at_least: bool = False
    last_digit: int = 0
    """Units of the last digit by which the article is off for no reason that is known."""
    wrong: str = ""
    note: str = ""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values that belong together. commands: what gives them, or more of them, for any model"""

    title: str
    row: tuple[Row, ...]
    commands: tuple[str, ...] = ()


class Article(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An article. unit: what it means by a unit that has two meanings"""

    number: int
    title: str
    about: str
    table: tuple[Table, ...]
    unit: str = ""


class Checked(msgspec.Struct, frozen=True):
    """A row and its right value; `agrees` is None where nothing is printed, `right` None where it cannot be computed here."""

    row: Row
    right: float | None
    agrees: bool | None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values for JSON."""
        row = self.row
        return {
            "what": row.what, "unit": row.unit, "printed": row.printed or None, "right": self.right, "agrees": self.agrees,
            "wrong": row.wrong or None, "note": row.note or None,
        }  # fmt: skip


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
    return msgspec.convert(tomllib.loads(read_data(f"articles/{number}.toml")), Article)


def check(row: Row) -> Checked:
    """Compute what is right of a row, and compare it with what is printed, to half a unit of its last digit."""
    right = QUANTITIES[row.by](**row.of)
    if right is None or not row.printed:
        return Checked(row, right, None)
    return Checked(row, right, meets(row, right))


def meets(row: Row, right: float) -> bool:
    """Whether a value is the one that is printed.

    >>> row = Row(what="", unit="", by="", printed="1.08")
    >>> meets(row, 1.0849), meets(row, 1.086)
    (True, False)
    """
    printed, slack = float(row.printed), 1e-9 * abs(right)
    if row.at_most or row.at_least:
        return right <= printed + slack if row.at_most else right >= printed - slack
    unit = 0.0 if row.exact else 10.0 ** -len(row.printed.partition(".")[2])
    if row.last_digit:
        return abs(right - printed) <= (row.last_digit + 0.5) * unit
    low, high = (0.0, unit) if row.cut else (-unit / 2, unit / 2)
    return low - slack <= right - printed <= high + slack
