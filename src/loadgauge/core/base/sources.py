"""Citation keys and the works they refer to, read from `data/sources.toml`."""

import functools
import tomllib

import msgspec

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.package_data import read_data


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cited work. `where` is an arXiv number, an address or a repository."""

    title: str
    where: str
    authors: str = ""
    year: int = 0

    def __str__(self) -> str:
        head = ", ".join(part for part in (self.authors, self.title) if part)
        return f"{head} ({self.where})"


@functools.cache
def sources() -> dict[str, Source]:
    """Return all cited works by key.

    >>> sources()["korthikanti2022"].where
    'arXiv:2205.05198'
    """
    text = read_data("sources.toml")
    return msgspec.convert(tomllib.loads(text), dict[str, Source])


def cite(key: str) -> Source:
    """Return the work that a citation key refers to. Raises `ConfigError` for an unknown key."""
    try:
        return sources()[key]
    except KeyError:
        raise ConfigError(f"no source has the key {key!r}", file="data/sources.toml") from None
