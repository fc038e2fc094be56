"""Failure rates and the time to run again, as data (`data/failures`, or a file of the user's own).

A rate is counted (so many in so many days on so many GPUs) or a range between published fleets, out of which each simulated run
draws its own. Times of recovery are ranges too: they belong to whoever runs the fleet.
"""

import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from loadgauge.core.base import ConfigError, above_zero, list_data, parse, read_data, refuse, suggest

DAY = 86_400.0
NODE = 8
"""GPUs of a node in studies that count nodes."""
Needs = Literal["host", "restart", "maintenance"]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cause of interruptions.

    needs: another `host`, a `restart` alone, or `maintenance`, which is planned: nothing is lost, and nothing is looked for
    count: how often, of all; wide: it reaches several hosts, so that copies in the memory of peers are lost with it
    silent_hours: on average, until it is noticed, after which all work since then is thrown away
    """

    name: str
    count: float
    needs: Needs = "host"
    wide: bool = False
    silent_hours: float = 0.0


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Interruptions of each GPU and second, `low` to `high` over fleets, planned ones included, and their causes."""

    id: str
    name: str
    source: tuple[str, ...]
    low: float
    high: float
    parts: tuple[Part, ...]

    @property
    def rate(self) -> float:
        """In the middle of the range [1/s for each GPU]."""
        return (self.low + self.high) / 2

    def unplanned(self) -> float:
        """Return the share of interruptions that nobody planned."""
        planned = sum(part.count for part in self.parts if part.needs == "maintenance")
        return 1 - planned / sum(part.count for part in self.parts) if self.parts else 1.0

    @property
    def of_hosts(self) -> float:
        """Share of the failures after which another host is needed."""
        return sum(self.share(part) for part in self.parts if part.needs == "host")

    def share(self, part: Part) -> float:
        """Return the share of interruptions that a part causes."""
        return part.count / sum(other.count for other in self.parts)


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    parts: tuple[Part, ...]
    source: tuple[str, ...] = ()
    gpus: int | None = None
    days: float | None = None
    per_thousand_node_days: tuple[float, float] | None = None


NONE = Failures(id="none", name="no failures", source=(), low=0.0, high=0.0, parts=())


def failures_ids() -> tuple[str, ...]:
    """Return the ids of the records that come along, sorted. ``"llama3" in failures_ids()``"""
    return tuple(sorted(list_data("failures", ".toml")))


def failures(text: str) -> Failures:
    """Read failures: an id, a TOML file, `none`, or the hours between failures of one GPU. Raises `ConfigError`.

    >>> round(1 / failures("llama3").rate / 3600 / 16384, 3)  # hours between interruptions on 16,384 GPUs
    2.781
    >>> failures("50000h").rate * 3600
    2e-05
    """
    if text == "none":
        return NONE
    if text.endswith("h") and text[:1].isdigit():
        value = above_zero(text, "failures", "second", "hours between failures of one GPU")
        every = Part(name="any", count=1)
        return Failures(
            id=text, name=f"one in {text} of a GPU", source=(), low=1 / value, high=1 / value, parts=(every,)
        )
    own = text.endswith(".toml")
    try:
        body = Path(text).read_text(encoding="utf-8") if own else read_data(f"failures/{text}.toml")
    except (OSError, UnicodeDecodeError):
        names = ("none", *failures_ids())
        hint = "" if own else suggest(text, names) or f" (known: {', '.join(names)}, or hours such as 50000h)"
        raise ConfigError(f"no failures {text!r}{hint}", key="failures") from None
    try:
        parsed = msgspec.convert(tomllib.loads(body), _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{text}: {error}", key="failures") from None
    refuse(
        not parsed.parts or min(part.count for part in parsed.parts) <= 0,
        f"{text}: needs parts with counts above 0",
        key="failures",
    )
    if parsed.per_thousand_node_days is not None:
        low, high = (rate / 1000 / NODE / DAY for rate in parsed.per_thousand_node_days)
    elif parsed.gpus and parsed.days:
        low = high = sum(part.count for part in parsed.parts) / parsed.gpus / (parsed.days * DAY)
    else:
        raise ConfigError(f"{text}: needs gpus and days, or per_thousand_node_days", key="failures")
    refuse(not 0 < low <= high, f"{text}: rates must be positive and rise", key="failures")
    return Failures(id=Path(text).stem, name=parsed.name, source=parsed.source, low=low, high=high, parts=parsed.parts)


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A time between `low` and `high` [s]; each simulated run has one of its own."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The time in the middle [s]."""
        return (self.low + self.high) / 2


def span(text: str, key: str) -> Span:
    """Read a time, or a range of times: 90s, 1min..10min. Raises `ConfigError`.

    >>> span("1min..10min", "detect"), span("0s", "detect").middle
    (Span(low=60.0, high=600.0), 0.0)
    """
    low, _, high = text.partition("..")
    ends = []
    for word in (low, high or low):
        value, unit = parse(word, key, "second")
        refuse(unit != "second", f"must be a time such as 5min or 1min..10min, got {text!r}", key=key)
        ends.append(value)
    refuse(ends[0] > ends[1], f"must rise, got {text!r}", key=key)
    return Span(*ends)


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a run's recovery from a failure [s].

    detect: until it is noticed; diagnose: until the host is known; swap: until a spare is in its place; restart: until all
    processes are connected, beside reading the checkpoint; warm: lost until steps are as fast as before
    maintenance: of a planned stop
    repair: until a host is back [s, mean]; regroup: of the ranks that are left, where they go on without a replica
    way: `restart` all on a full fleet; `elastic`: without the replicas that lack a host; `reroute`: the peers of a dead stage take
    its micro-batches
    """

    detect: Span = Span(10.0, 300.0)
    diagnose: Span = Span(60.0, 300.0)
    swap: Span = Span(30.0, 120.0)
    restart: Span = Span(120.0, 300.0)
    warm: Span = Span(0.0, 60.0)
    maintenance: Span = Span(900.0, 1800.0)
    regroup: Span = Span(10.0, 60.0)
    repair: float = 2 * DAY
    way: Literal["restart", "elastic", "reroute"] = "restart"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """When the state is saved. way: `sync`, all ranks wait; `async`, they wait for a copy in the host's memory, which is then
    written; `memory`, the copy goes to a peer, and to the storage every `storage` seconds; `none`

    every: seconds of work between two; None: the interval that loses least
    """

    way: Literal["sync", "async", "memory", "none"] = "async"
    every: float | None = None
    storage: float = 3600.0


def checkpoint(text: str) -> Checkpoint:
    """Read `--checkpoint`: sync, async, memory or none, and after a colon how often. Raises `ConfigError`.

    >>> checkpoint("async:5min").every, checkpoint("sync").every
    (300.0, None)
    """
    way, _, every = text.partition(":")
    refuse(
        way not in ("sync", "async", "memory", "none"),
        f"must be sync, async, memory or none, with an interval as in async:5min, got {text!r}",
        key="checkpoint",
    )
    if not every:
        return Checkpoint(way=way)  # type: ignore[arg-type]
    refuse(way == "none", f"none has no interval, got {text!r}", key="checkpoint")
    return Checkpoint(way=way, every=above_zero(every, "checkpoint", "second", "like async:5min"))  # type: ignore[arg-type]
