"""Releases of engines older than those that were measured: `data/engine_releases.toml`."""

import datetime
import functools
import math
import re

import msgspec

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.package_data import read_table


class Releases(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Releases of an engine, and from which on they are measured; sequence: of the host, for each sequence, before a release [s]"""

    measured: str
    source: str
    released: dict[str, datetime.date]
    sequence: dict[str, float] = {}


class Age(msgspec.Struct, frozen=True):
    """The time of a release's kernels over that of the measured ones: as taken, and at its least and most; sequence: its host's."""

    taken: float = 1.0
    least: float = 1.0
    most: float = 1.0
    sequence: float | None = None


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    yearly: float
    unnamed: float
    vllm: Releases
    sglang: Releases
    trtllm: Releases


@functools.cache
def _table() -> _Table:
    return msgspec.convert(read_table("engine_releases.toml"), _Table)


def measured_since(engine: str) -> str:
    """Return the release from which on an engine's servers were measured.

    >>> measured_since("vllm")
    '0.12'
    """
    own: Releases = getattr(_table(), engine)
    return own.measured


def numbered(version: str) -> tuple[int, ...]:
    """Return a version as numbers that sort. Raises `ConfigError` for a text that is none.

    >>> numbered("v0.6.3.post1"), numbered("1.2.0rc6"), numbered("0.10") > numbered("0.9")
    ((0, 6, 3), (1, 2, 0), True)
    """
    read = re.match(r"v?(\d+(?:\.\d+){0,2})(?![\d])", version.strip())
    if read is None or "." not in read[1]:
        raise ConfigError(f"must be a release such as 0.6 or 0.6.3, got {version[:40]!r}")
    return tuple(map(int, read[1].split(".")))


@functools.lru_cache(maxsize=256)
def age_of(engine: str, version: str | None) -> Age:
    """Return what an engine's release takes over those that were measured; None: of no release that is named.

    >>> age_of("vllm", "0.19") == Age(), age_of("vllm", "0.6.3").sequence, 1 < age_of("vllm", "0.6.3").taken < 1.4
    (True, 5e-05, True)
    >>> age_of("hf", None) == Age(), age_of("vllm", None).most > 1
    (True, True)
    """
    table = _table()
    own: Releases | None = getattr(table, engine, None)
    if own is None:
        return Age()
    if version is None:
        return Age(most=math.exp(table.yearly * table.unnamed / 2))
    number = numbered(version)
    older = [name for name in own.released if numbered(name) <= number] or list(own.released)[:1]
    years = (own.released[own.measured] - own.released[older[-1]]).days / 365.25
    sequence = next((seconds for before, seconds in own.sequence.items() if number < numbered(before)), None)
    return Age(math.exp(table.yearly * years / 2), 1.0, math.exp(table.yearly * years), sequence)
