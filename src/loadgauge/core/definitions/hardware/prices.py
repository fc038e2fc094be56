"""Prices of a GPU-hour: those of a job, by provider where there are several, and list prices (`data/prices.toml`)."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from loadgauge.core.base import ConfigError, above_zero, lists, read_table, read_text
from loadgauge.core.definitions.job.job_text import positive_number


class Prices(float):
    """The least of several prices of a GPU-hour, which knows them all.

    hours: between two times that an instance at this price is taken away, in the mean; None: never

    >>> Prices.read("runpod=1.89,lambda=2.75"), str(Prices.read("runpod=1.89,lambda=2.75")), Prices.read("2.5")
    (1.89, 'runpod=1.89,lambda=2.75', 2.5)
    >>> Prices.read("0.9@90min").hours
    1.5
    """

    offers: tuple[tuple[str, float], ...] = ()
    text = ""
    hours: float | None = None

    @classmethod
    def read(cls, text: str) -> float:
        """Read a number above 0, which is a plain one, with @ how long it lasts, or several. Raises `ConfigError`."""
        if "=" not in text:
            return cls._alone(text)
        offers = []
        for word in text.split(","):
            name, _, number = (part.strip() for part in word.partition("="))
            if not name:
                raise ConfigError(f"must be a price, or several as runpod=1.89,lambda=2.75, got {word.strip()[:40]!r}")
            offers.append((name, cls._alone(number)))
        offers.sort(key=lambda offer: offer[1])
        least = cls(offers[0][1])
        least.offers, least.text = tuple(offers), text
        return least

    @classmethod
    def _alone(cls, text: str) -> float:
        """Read one price."""
        number, lasts, hours = text.partition("@")
        if not lasts:
            return positive_number(number)
        each = cls(positive_number(number))
        each.text, each.hours = text, above_zero(hours, "price", "second", "a time such as 6h") / 3600
        return each

    def __str__(self) -> str:
        """The text that `read` reads."""
        return self.text or float.__str__(self)


class Offer(NamedTuple):
    """A list price [US dollars a GPU-hour]: of a provider, `on-demand`, `spot` or `reserved` for a year, read on a day."""

    cloud: str
    kind: str
    each: float
    read: str
    where: str


@cache
def listed() -> dict[str, tuple[Offer, ...]]:
    """Return the list prices of each GPU by its id, the cheapest first.

    >>> [offer.cloud for offer in listed()["a10"]], "trainium3" in listed()
    (['lambda'], False)
    """
    offers = lists(
        (gpu, Offer(row["cloud"], row["kind"], each, row["read"], row["where"]))
        for row in read_table("prices.toml")["offer"]
        for gpu, each in row["each"].items()
    )
    return {gpu: tuple(sorted(some, key=lambda offer: offer.each)) for gpu, some in offers.items()}


KINDS = ("on-demand", "spot", "reserved")
LARGEST = 2**20
"""Bytes of a file of prices."""


def usual_prices(kind: str = "on-demand") -> dict[str, float]:
    """Return the cheapest list price of a kind for each GPU that has one. ``usual_prices()["a10"] == 1.29``"""
    prices = {gpu: [offer.each for offer in offers if offer.kind == kind] for gpu, offers in listed().items()}
    return {gpu: min(some) for gpu, some in prices.items() if some}


def read_prices(text: str) -> dict[str, float]:
    """Return the prices of kinds of GPU: GPU=PRICE,..., a kind of list prices, or a file with a GPU and a price a line.

    Raises `ConfigError`.

    >>> read_prices("h100-sxm5-80gb=2.5,a100-sxm4-80gb=1.6")["a100-sxm4-80gb"], sorted(read_prices("reserved"))
    (1.6, ['h100-sxm5-80gb'])
    """
    if text.strip() in KINDS:
        return usual_prices(text.strip())
    words, of_file = text.split(","), Path(text).is_file()
    if of_file:
        lines = (line.partition("#")[0].strip() for line in read_text(text, LARGEST).splitlines())
        words = [
            re.sub(r'["\s$]*[,;:=\t][\s"$]*', "=", line.strip('"'))
            for line in lines
            if re.search(r"[,;:=\t].*\d(min|[hd])?\W*$", line)
        ]
    prices: dict[str, float] = {}
    for word in words:
        name, _, price = (part.strip() for part in word.partition("="))
        try:
            prices[name] = Prices.read(price)
        except ConfigError:
            where = "must be GPU=PRICE,GPU=PRICE, spot, reserved or a file, got"
            where = f"{text} has a line that is no GPU and price:" if of_file else where
            raise ConfigError(f"{where} {word.strip()[:60]!r}", key="prices") from None
    if not prices:
        raise ConfigError(f"{text}: has no line with a GPU and a price", key="prices")
    return prices
