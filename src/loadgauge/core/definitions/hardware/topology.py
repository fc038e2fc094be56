"""Topologies: the tiers of a network from the node to the site, as data (`data/topologies`, or a file of the user's own).

A tier joins `units` of the tier below, each by `ports` links of one speed. Ports have to add up: the links down to the units and up
to the next tier (its `ports`) are those that `switches` of `radix` ports have. How much less a tier carries than the one below
(oversubscription) follows from the links, and is stated nowhere.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from loadgauge.core.base import ConfigError, list_data, parse, read_data, suggest

Kind = Literal["switch", "rail", "dragonfly", "torus", "ocs", "link"]
FIBRE = 4.9e-6
"""Seconds for each km of fibre: light at 1/1.468 of its speed in a vacuum (source: itu-g652)."""


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of a network.

    kind: `switch`, any two units at full speed; `rail`, a switch for each place in a node; `dragonfly`, groups with links to
    each other group; `torus`, links to the neighbours in each of `dims`; `ocs`, a torus of blocks joined by optical circuit
    switches; `link`, a line to a building or a site
    span: GPUs of a unit of this tier; below: of a unit of the tier below
    bandwidth: of the links from a unit below, for each of its GPUs and direction [byte/s]; oversubscription: that of the tier below
    over it; latency: of one message, beside that of its fibre; None: as calibrated [s]
    reduces: whether its switches sum (SHARP); congestion: by which its bandwidth falls under the traffic of other jobs
    """

    name: str
    kind: Kind
    units: int
    span: int
    below: int
    ports: int
    bandwidth: float
    oversubscription: float = 1.0
    switches: int = 0
    radix: int = 0
    dims: tuple[int, ...] = ()
    latency: float | None = None
    distance_km: float = 0.0
    reduces: bool = False
    congestion: float = 1.0
    reconfigure: float = 0.0

    @property
    def reached(self) -> float:
        """Bandwidth that is left by other jobs [byte/s]."""
        return self.bandwidth / self.congestion

    @property
    def light(self) -> float:
        """Seconds of a message in the fibre."""
        return FIBRE * self.distance_km


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The tiers of a network, the innermost first, which joins the GPUs of a node, a rack, or each to itself."""

    id: str
    name: str
    source: str
    tiers: tuple[Tier, ...]

    @property
    def domain(self) -> int:
        """GPUs that the innermost tier joins at full speed; 1 where it is a torus."""
        return self.tiers[0].span if self.tiers[0].kind == "switch" else 1

    @property
    def beyond(self) -> tuple[Tier, ...]:
        """The tiers beyond what the innermost joins at full speed."""
        return self.tiers[1:] if self.domain > 1 else self.tiers

    @property
    def gpus(self) -> int:
        """GPUs that it joins."""
        return self.tiers[-1].span

    def cut(self, gpus: int, used: int | None = None) -> Topology:
        """Return the topology as a job on `gpus` GPUs sees it: without tiers that it does not reach.

        used: GPUs of each node or rack that the job takes, where those are not all

        Raises `ConfigError` where it has fewer GPUs.

        >>> [tier.name for tier in topology("rail").cut(256).tiers], topology("rail").gpus
        (['node', 'leaf'], 131072)
        """
        if gpus > self.gpus:
            raise ConfigError(f"{self.name} joins {self.gpus:,} GPUs, not {gpus:,}", key="topology")
        tiers = self.tiers
        if used is not None and used != self.domain:
            tiers = tuple(
                msgspec.structs.replace(
                    tier, span=tier.span // self.domain * used, below=max(tier.below // self.domain * used, 1)
                )
                for tier in tiers
            )
        last = next((number for number, tier in enumerate(tiers) if tier.span >= gpus), None)
        if last is None:
            raise ConfigError(
                f"{self.name} joins {tiers[-1].span:,} GPUs in nodes of {used}, not {gpus:,}", key="topology"
            )
        return msgspec.structs.replace(self, tiers=tiers[: last + 1])

    def with_oversubscription(self, factor: float) -> Topology:
        """Return it with every switched tier above the first of the network that many times as narrow as the one below."""
        tiers = list(self.tiers)
        for number, tier in enumerate(tiers[2:], 2):
            if tier.kind in ("switch", "rail"):
                below = tiers[number - 1].bandwidth
                tiers[number] = msgspec.structs.replace(tier, bandwidth=below / factor, oversubscription=factor)
        return msgspec.structs.replace(self, tiers=tuple(tiers))


class _Tier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier as it stands in a file."""

    name: str
    kind: Kind = "switch"
    units: int
    ports: int = 1
    speed: str
    switches: int = 0
    radix: int = 0
    dims: tuple[int, ...] = ()
    latency: str | None = None
    distance_km: float = 0.0
    reduces: bool = False
    congestion: float = 1.0
    reconfigure: str | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    source: str = ""
    gpus: int | None = None
    tiers: tuple[_Tier, ...]


def topology_ids() -> tuple[str, ...]:
    """Return the ids of the topologies that come along, sorted. ``"rail" in topology_ids()``"""
    return tuple(sorted(list_data("topologies", ".toml")))


def topology(id: str) -> Topology:
    """Read a topology by its id, or from a TOML file of one's own. Raises `ConfigError`, also where its ports do not add up.

    >>> [(tier.name, tier.span) for tier in topology("rail").tiers][:2]
    [('node', 8), ('leaf', 256)]
    """
    own = id.endswith(".toml")
    try:
        text = Path(id).read_text(encoding="utf-8") if own else read_data(f"topologies/{id}.toml")
    except (OSError, UnicodeDecodeError):
        hint = "" if own else suggest(id, list(topology_ids())) or f" (known: {', '.join(topology_ids())})"
        raise ConfigError(f"no topology {id!r}{hint}", key="topology") from None
    try:
        parsed = msgspec.convert(tomllib.loads(text), _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{id}: {error}", key="topology") from None
    return _built(Path(id).stem if own else id, parsed)


def _built(id: str, parsed: _File) -> Topology:
    if len(parsed.tiers) < 1:
        raise ConfigError(f"{id}: a topology has at least one tier", key="topology")
    tiers: list[Tier] = []
    span = 1
    for number, raw in enumerate(parsed.tiers):
        # The adapters of a node are its GPUs', and take no ports of the switches inside it.
        above = parsed.tiers[number + 1].ports if 0 < number < len(parsed.tiers) - 1 else 0
        _check_ports(id, raw, above)
        bandwidth = raw.ports * _measure(id, raw, "speed", "byte/s") / span
        tiers.append(
            Tier(
                name=raw.name,
                kind=raw.kind,
                units=raw.units,
                span=span * raw.units,
                below=span,
                ports=raw.ports,
                bandwidth=bandwidth,
                oversubscription=tiers[-1].bandwidth / bandwidth if number > 1 else 1.0,
                switches=raw.switches,
                radix=raw.radix,
                dims=raw.dims,
                latency=None if raw.latency is None else _measure(id, raw, "latency", "second"),
                distance_km=raw.distance_km,
                reduces=raw.reduces,
                congestion=raw.congestion,
                reconfigure=0.0 if raw.reconfigure is None else _measure(id, raw, "reconfigure", "second"),
            )
        )
        span *= raw.units
    if parsed.gpus is not None and parsed.gpus != span:
        product = " x ".join(str(raw.units) for raw in parsed.tiers)
        raise ConfigError(f"{id}: states {parsed.gpus:,} GPUs, and its tiers join {product} = {span:,}", key="topology")
    return Topology(id=id, name=parsed.name, source=parsed.source, tiers=tuple(tiers))


def _measure(id: str, raw: _Tier, name: str, wanted: str) -> float:
    text: Any = getattr(raw, name)
    value, unit = parse(text, f"{id}: {raw.name}: {name}", wanted)
    if unit != wanted or value < 0 or (value == 0 and name == "speed"):
        raise ConfigError(f"{id}: {raw.name}: {name} must be in {wanted}, got {text!r}", key="topology")
    return value


def _check_ports(id: str, raw: _Tier, above: int) -> None:
    """Refuses a tier whose links and ports do not add up. above: links of a unit of it to the tier above."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{id}: tier {raw.name}: {why}", key="topology")

    if min(raw.units, raw.ports) < 1 or min(raw.switches, raw.radix) < 0 or raw.distance_km < 0 or raw.congestion < 1:
        raise refuse("units and ports must be positive, switches and distances not negative, congestion at least 1")
    if raw.switches:
        down, have = raw.units * raw.ports, raw.switches * raw.radix
        if down + above > have:
            raise refuse(
                f"{down:,} ports down ({raw.units} units x {raw.ports}) and {above:,} up are more than the {have:,} of"
                f" {raw.switches} switches of {raw.radix}"
            )
        if raw.kind == "rail" and raw.switches % raw.ports and raw.ports % raw.switches:
            raise refuse(f"{raw.ports} rails cannot share {raw.switches} switches evenly")
    elif raw.kind == "rail":
        raise refuse("rails need switches")
    if raw.kind in ("torus", "ocs"):
        if math.prod(raw.dims) != raw.units:
            raise refuse(f"dims {' x '.join(map(str, raw.dims)) or 'none'} are not its {raw.units} units")
        if raw.ports % (2 * len(raw.dims)):
            raise refuse(f"{raw.ports} ports are not two of each of {len(raw.dims)} dimensions")
    elif raw.dims:
        raise refuse('dims are for a torus: give kind = "torus"')
    if raw.kind == "dragonfly" and raw.ports < raw.units - 1:
        raise refuse(f"{raw.ports} ports do not reach each of the {raw.units - 1} other groups")
