"""Training on several sites: with local steps (local SGD, DiLoCo), as one job whose gradients cross (HSDP), or as one pipeline.

Each site runs H steps alone, on its part of the batch; then the sites exchange how far each weight has come, and an outer
optimizer moves all to the mean (source: douillard2023). Counted: bytes, seconds and memory. What fewer exchanges,
fewer bits, missing or stale deltas do to the loss is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from loadgauge.core.base import ConfigError, LayoutError, above_zero, refuse, share
from loadgauge.core.definitions.hardware.cluster import cluster
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.hardware.topology import FIBRE
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.estimate.result import Estimate

INNER_STEPS, BITS, PLACE_BITS = 500, 32, 32
"""Steps between exchanges and bits of a change, of DiLoCo; bits of the place of a change, where only some are sent."""
OUTER_BYTES = 8
"""Of a weight's outer state: the weights of the last exchange and a momentum, in float32."""


OPTIONS = ("inner_steps", "between", "delta_bits", "sparse", "stale", "site_speeds")
"""Options of sites beside their number; each is a flag of `loadgauge fleet`."""


class Sites(msgspec.Struct, frozen=True, kw_only=True):
    """Ways that sites train together.

    sites: how many; inner_steps: steps between exchanges; between: bandwidth from each site to the others [byte/s]
    bits: of a change; sent: share of the changes that is sent; stale: whether the exchange runs beside the next steps
    speeds: of each site
    """

    sites: int
    inner_steps: int = INNER_STEPS
    between: float
    bits: int = BITS
    sent: float = 1.0
    stale: bool = False
    speeds: tuple[float, ...] = ()
    distance_km: float = 0.0

    @classmethod
    def of(cls, options: dict[str, object], link: float | None = None, distance_km: float = 0.0) -> Sites:
        """Read the flags of `loadgauge fleet`; link: what the topology's last tier has. Raises `ConfigError`."""
        between = link
        if options.get("between") is not None:
            between = above_zero(str(options["between"]), "between", "byte/s", "a bandwidth such as 100Gbit/s")
        if between is None:
            raise ConfigError("is missing: the bandwidth from a site to the others, such as 100Gbit/s", key="between")
        speeds: tuple[float, ...] = ()
        sites = int(str(options.get("sites") or 2))
        if options.get("site_speeds") is not None:
            try:
                speeds = tuple(float(word) for word in str(options["site_speeds"]).split(","))
            except ValueError:
                raise ConfigError("must be numbers such as 1,0.9", key="site_speeds") from None
            refuse(
                len(speeds) != sites or min(speeds) <= 0 or not all(map(math.isfinite, speeds)),
                f"must be {sites} numbers above 0",
                key="site_speeds",
            )
        return cls(
            sites=sites,
            inner_steps=int(str(options.get("inner_steps") or INNER_STEPS)),
            between=between,
            bits=int(str(options.get("delta_bits") or BITS)),
            sent=1.0 if options.get("sparse") is None else share(str(options["sparse"]), "sparse"),
            stale=bool(options.get("stale")),
            speeds=speeds,
            distance_km=distance_km,
        )


class Local(msgspec.Struct, frozen=True, kw_only=True):
    """Local training on several sites. Times in s, of one round of inner steps; rates in tokens/s of all sites; bytes of one site.

    compute: of the inner steps of the slowest site; exchange: of the deltas; shown: what of it nothing hides; waiting: share
    of the GPUs' time that faster sites wait, where all run as many steps; steps: each site's, where they run as long
    needed: bandwidth at which the exchange takes no longer than the next round [byte/s]; outer: bytes of the outer state on a GPU
    one: tokens/s of all GPUs on one site, the exchange of gradients on its own network
    """

    estimate: Estimate
    sites: Sites
    compute: float
    sent: float
    exchange: float
    shown: float
    waiting: float
    steps: tuple[int, ...]
    needed: float
    outer: float
    tokens_per_second: float
    one: float

    @property
    def ratio(self) -> float:
        """Tokens/s over those of one site."""
        return self.tokens_per_second / self.one


def delta_bytes(params: float, sites: Sites) -> float:
    """Return the bytes that a site sends in one exchange: all-reduced over the sites, 2 (s - 1)/s of its deltas.

    Sparse deltas are not the same places on each site: they are gathered, (s - 1) times.

    >>> of = Sites(sites=2, between=1.0)
    >>> [delta_bytes(1e9, one) for one in (of, Sites(sites=2, between=1.0, bits=4), Sites(sites=2, between=1.0, sent=0.01))]
    [4000000000.0, 500000000.0, 80000000.0]
    """
    number = sites.sites
    if sites.sent < 1:
        return params * sites.sent * (sites.bits + PLACE_BITS) / 8 * (number - 1)
    return params * sites.bits / 8 * 2 * (number - 1) / number


def on_one_site(result: Estimate, sites: int) -> Estimate:
    """Return the estimate of a site's part of a job: its share of the GPUs and of the batch. Raises `LayoutError`."""
    layout, machines = result.layout, result.cluster
    assert machines is not None
    refuse(
        layout.dp % sites or layout.global_batch % sites,
        f"dp {layout.dp:,} and the batch of {layout.global_batch:,} are not divisible by {sites} sites",
        LayoutError,
        dimension="sites",
        size=layout.dp,
        ranks=sites,
    )
    replicas = layout.replicas // math.gcd(layout.replicas, sites)
    part = msgspec.structs.replace(
        layout, dp=layout.dp // sites, global_batch=layout.global_batch // sites, replicas=replicas
    )
    return estimate(result.model, part, result.training, cluster=resized(result, part))


def resized(result: Estimate, layout: Layout) -> Cluster:
    """The cluster of fewer GPUs with the same links."""
    old = result.cluster
    assert old is not None
    if old.topology is not None:
        return cluster(old.gpu, layout.gpus, topology=old.topology)
    inner = old.links[0].bandwidth if old.links[0].domain > 1 else None
    outer = old.links[-1].bandwidth if len(old.links) > 1 else None
    return cluster(old.gpu, layout.gpus, old.gpus_per_node if layout.gpus > old.gpus_per_node else None, inner, outer)


def local(result: Estimate, sites: Sites) -> Local:
    """Return the time and traffic of local training on sites, from the estimate of the whole job on one site.

    Raises `LayoutError` where its data-parallel ranks are not whole sites.
    """
    part = on_one_site(result, sites.sites)
    step, rounds = part.timing.step, sites.inner_steps
    speeds = sites.speeds or (1.0,) * sites.sites
    # As long as the fastest site takes for its steps; the others run fewer. Without speeds all are alike.
    fastest = max(speeds)
    steps = tuple(max(1, round(rounds * speed / fastest)) for speed in speeds)
    compute = max(number * step / speed for number, speed in zip(steps, speeds, strict=True))
    waiting = 1 - sum(number * step / speed for number, speed in zip(steps, speeds, strict=True)) / (
        compute * sites.sites
    )
    sent = delta_bytes(float(result.params), sites) if sites.sites > 1 else 0.0
    light = 2 * (sites.sites - 1) * FIBRE * sites.distance_km
    exchange = sent / sites.between + light if sent else 0.0
    shown = max(0.0, exchange - compute) if sites.stale else exchange
    wall = compute + shown
    tokens = sum(steps) * part.timing.tokens
    return Local(
        estimate=part,
        sites=sites,
        compute=compute,
        sent=sent,
        exchange=exchange,
        shown=shown,
        waiting=waiting,
        steps=steps,
        needed=sent / max(compute - light, 1e-9) if sent else 0.0,
        outer=OUTER_BYTES * result.params / part.layout.gpus,
        tokens_per_second=tokens / wall,
        one=result.timing.tokens / result.timing.step,
    )


class Across(msgspec.Struct, frozen=True, kw_only=True):
    """One job whose steps cross from site to site. sent: bytes of a site in a step; needed: bandwidth that hides them [byte/s]

    seconds: that they take; under: of the step's work that they can hide under; step: with what is not hidden
    """

    way: str
    sent: float
    seconds: float
    under: float
    step: float
    needed: float


def across(result: Estimate, sites: Sites) -> tuple[Across, ...]:
    """Return the traffic of one job whose replicas (HSDP) or whose pipeline stages are split over the sites, on its own steps.

    HSDP: gradients are reduced inside a site first, and each site sends 2 (s - 1)/s of them once a step, under the backward of the
    last micro-batch. Pipeline: activations and their gradients cross s - 1 borders, once for each micro-batch of every replica.
    """
    time, layout = result.timing, result.layout
    number = sites.sites
    if number == 1:
        return ()
    precision = result.training.precision
    ways = []
    backward = time.parts.get("backward", 0.0) / max(1, layout.num_microbatches)
    gradients = float(result.params) * precision.gradient * 2 * (number - 1) / number
    ways.append(_across("hsdp", gradients, backward, time.step, sites))
    if layout.pp >= number:
        tokens = layout.global_batch * layout.seq_len
        hidden = result.model.hidden_size * precision.activation
        activations = 2.0 * tokens * hidden
        ways.append(_across("pipeline", activations, time.step, time.step, sites))
    return tuple(ways)


def _across(way: str, sent: float, under: float, step: float, sites: Sites) -> Across:
    seconds = sent / sites.between
    return Across(
        way=way,
        sent=sent,
        seconds=seconds,
        under=under,
        step=step + max(0.0, seconds - under),
        needed=sent / under if under else math.inf,
    )


def most(
    result: Estimate, sites: Sites, slack: float, numbers: Sequence[int] = (1, 2, 4, 8, 16, 32)
) -> tuple[int, list[Local]]:
    """Return the most sites at which tokens/s are within `slack` of one site's, and each that was tried."""
    tried = []
    for number in numbers:
        try:
            tried.append(local(result, msgspec.structs.replace(sites, sites=number, speeds=())))
        except (LayoutError, ConfigError):
            continue
    good = [site.sites.sites for site in tried if site.ratio >= 1 - slack]
    return max(good, default=1), tried
