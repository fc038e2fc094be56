"""Load of each tier of a network in a step, and how long its collectives take where they share it."""

import msgspec

from loadgauge.core.base.by_key import sums
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.time.collectives import Group, bus_factor
from loadgauge.core.estimate.time.traffic import Traffic, layout_groups
from loadgauge.fleets.flows import Flow, finish

PAIRS = ("all_to_all", "gather", "scatter")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a GPU's share of a tier carries in a step, at which bandwidth [byte/s], and the share of the step it is busy."""

    tier: str
    span: int
    bandwidth: float
    oversubscription: float
    carried: float
    busy: float
    axes: dict[str, float]


def crossing(row: Traffic, group: Group, below: int) -> float:
    """Return the bytes of one call that leave a unit of `below` GPUs, over each GPU's share of its links.

    Over all tiers of a tree they are those of `collectives.adapter_bytes`: a ring leaves a unit once, over the shares of all its
    members there.
    """
    if group.domains(below) == 1:
        return 0.0
    members = group.members(below)
    if row.collective == "send_recv":
        return float(row.payload)
    if row.collective in PAIRS:
        return float(row.payload * (group.ranks - members) / group.ranks)
    return float(row.payload * bus_factor(row.collective, group.ranks) / members)


def loads(result: Estimate) -> tuple[Load, ...]:
    """Return the load of every tier beyond the node; none without a topology, or on one node."""
    cluster, time = result.cluster, result.time
    if cluster is None or time is None or cluster.topology is None:
        return ()
    groups = layout_groups(result.layout)
    below, listed = cluster.links[0].domain, []
    for tier in cluster.topology.cut(cluster.gpus, below).beyond:
        sent = ((row.axis, row.calls_per_step * crossing(row, groups[row.group], below)) for row in result.network)
        axes = sums((axis, nbytes) for axis, nbytes in sent if nbytes)
        carried = sum(axes.values())
        listed.append(
            Load(
                tier=tier.name,
                span=tier.span,
                bandwidth=tier.reached,
                oversubscription=tier.oversubscription,
                carried=carried,
                busy=carried / tier.reached / time.step,
                axes=axes,
            )
        )
        below = tier.span
    return tuple(listed)


def together(listed: tuple[Load, ...]) -> dict[str, float]:
    """Return when each axis is done if the collectives of all begin at once and share every tier fairly [s].

    The step's own time overlaps what its framework overlaps; this bounds what sharing links could add.
    """
    names = sorted({axis for load in listed for axis in load.axes})
    links, flows = {}, []
    for axis in names:
        # Over several tiers a flow is as large as on the one where it is largest.
        most = max(load.axes.get(axis, 0.0) for load in listed)
        crossed = tuple(load.tier for load in listed if load.axes.get(axis, 0.0) > 0)
        flows.append(Flow(nbytes=most, links=crossed))
    for load in listed:
        links[load.tier] = load.bandwidth
    return dict(zip(names, finish(flows, links), strict=True))
