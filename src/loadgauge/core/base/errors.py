"""The exception tree. On the command line each is one line on stderr and exit code 2 (`NothingFits`: 1).

Error
├── ConfigError  (ValueError)           a file, key or option that cannot be read or contradicts itself
├── LayoutError  (ValueError)           a dimension that does not divide over its ranks
├── NotModelled  (NotImplementedError)  valid, but loadgauge does not model it: never answered by a default
├── NotStated    (LookupError)          a hardware figure that no source read states
├── NotMeasured  (LookupError)          a figure that only a measurement gives; names the command that makes it
└── NothingFits  (Error)                no layout fits; carries the nearest miss
"""

from collections.abc import Iterable, Mapping
from typing import Any

YES, NO, CANNOT_TELL = 0, 1, 2
"""Exit codes: it fits, it does not, the question cannot be answered."""


class Error(Exception):
    """Whatever loadgauge refuses, in one clear line.

    >>> str(Error("needs --gpu"))
    'needs --gpu'
    """


def first_line(error: BaseException) -> str:
    """The first line of an exception's message.

    >>> first_line(ValueError("no such key")), first_line(ValueError())
    ('no such key', 'no message')
    """
    return next(iter(str(error).strip().splitlines()), "no message")


class ConfigError(Error, ValueError):
    """A configuration that cannot be read. `key` and `file` say where.

    >>> str(ConfigError("must be a whole number, got '7B'", key="hidden_size", file="config.json"))
    "config.json: hidden_size: must be a whole number, got '7B'"
    """

    def __init__(self, message: str, *, key: str = "", file: str = "") -> None:
        self.key, self.file = key, file
        super().__init__(": ".join(part for part in (file, key, message) if part))


class Untrained(ConfigError):
    """A job file that trains nothing: what it starts runs a model forward, or only loads it."""


class LayoutError(Error, ValueError):
    """A layout that cannot exist: `dimension` of `size` leaves `remainder` over `ranks`."""

    def __init__(self, message: str, *, dimension: str = "", size: int = 0, ranks: int = 0) -> None:
        self.dimension, self.size, self.ranks = dimension, size, ranks
        self.remainder = size % ranks if ranks else 0
        super().__init__(message)


class NotModelled(Error, NotImplementedError):
    """Valid, but outside what loadgauge models so far."""


class NotStated(Error, LookupError):
    """A hardware figure that none of the sources states."""


class NotMeasured(Error, LookupError):
    """A figure that only a measurement gives."""


class NothingFits(Error):
    """No layout fits. `nearest` is the closest one, `missing` the bytes it lacks, `counts` how many were looked at."""

    def __init__(
        self, message: str, *, nearest: object = None, missing: float = 0, counts: dict[str, float] | None = None
    ) -> None:
        self.nearest, self.missing, self.counts = nearest, missing, counts or {}
        super().__init__(message)


def closest(name: str, names: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The names that a misspelled one is most similar to, at most `count`; `cutoff`: similarity needed, from 0 to 1.

    >>> closest("megatronn", ["megatron", "deepspeed"])
    ['megatron']
    """
    from difflib import get_close_matches  # only on the way to an error

    return get_close_matches(name, list(names), n=count, cutoff=cutoff)


def suggest(name: str, names: Iterable[str]) -> str:
    """The end of an error message that suggests the known name most similar to a misspelled one; empty where none is.

    >>> suggest("megatronn", ["megatron", "deepspeed"]), suggest("x", ["megatron"])
    ('; did you mean megatron?', '')
    """
    return "".join(f"; did you mean {match}?" for match in closest(name, names))


def refuse(broken: object, message: str, kind: type[Error] = ConfigError, **where: Any) -> None:
    """Raise an error where a rule is broken: whether it is, what is wrong, and what says where, as the error takes it.

    >>> refuse(False, "needs --gpu", key="price")
    >>> refuse(3 % 2, "3 GPUs are not whole pairs", LayoutError, dimension="gpus", size=3, ranks=2)
    Traceback (most recent call last):
        ...
    loadgauge.core.base.errors.LayoutError: 3 GPUs are not whole pairs
    """
    if broken:
        raise kind(message, **where)


def refuse_fields(record: object, names: Iterable[str], why: str) -> None:
    """Raise `ConfigError` with the name of the first of these fields of a record that is stated: that is not None.

    >>> refuse_fields(NothingFits("none", nearest="a layout"), ["nearest"], "needs --tokens")
    Traceback (most recent call last):
        ...
    loadgauge.core.base.errors.ConfigError: nearest: needs --tokens
    """
    for name in names:
        if getattr(record, name) is not None:
            raise ConfigError(why, key=name)


class NotYet(Exception):
    """A capture that this process leaves to another: of which configuration, in which regime, at which sizes."""

    def __init__(self, name: str, about: str, keys: dict[str, Any], regime: Any, sizes: Mapping[str, int]) -> None:
        self.name, self.keys, self.regime, self.sizes = name, keys, regime, dict(sizes)
        super().__init__(f"{name} {about}, which has not run yet")
