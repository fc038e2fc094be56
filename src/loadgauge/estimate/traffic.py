"""What the network carries: every collective of a step on the most loaded stage, by axis, with its bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from loadgauge.algebra import Size, where
from loadgauge.estimate.comm import Fabric, Group, groups, seconds, wire_bytes
from loadgauge.layout import Layout
from loadgauge.ops import Collective


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective on one axis, per GPU and step.

    payload: bytes of the full tensor, a call; wire: bytes one GPU sends, a call; seconds, exposed_seconds: of all calls
    """

    axis: str
    what: str
    collective: str
    calls_per_step: Size
    payload: Size
    wire: Size
    link: str
    ranks: Size
    seconds: Size
    exposed_seconds: Size

    def to_dict(self) -> dict[str, Any]:
        """A row of `network` in the JSON documents: bytes, seconds and plain counts."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


def layout_groups(layout: Layout, order: tuple[str, ...] = ("tp", "cp", "dp", "pp")) -> dict[str, Group]:
    """The group of each axis. Expert axes lie inside dp x cp x tp: etp where tp is, ep right after it."""
    made = groups({axis: getattr(layout, axis) for axis in order}, order)
    made["etp"] = Group("etp", layout.etp, 1)
    made["ep"] = Group("ep", layout.ep, layout.etp)
    # ZeRO shards over dp and cp together, and replicas of an expert are what dp x cp x tp leaves beside ep x etp.
    first = made["cp"] if order.index("cp") < order.index("dp") else made["dp"]
    made["zero"] = Group("dp", layout.zero_ranks, first.stride)
    made["expert_dp"] = Group("expert dp", layout.expert_dp, layout.ep * layout.etp)
    return made


def collective_seconds(collectives: Iterable[Collective], by_axis: dict[str, Group], fabric: Fabric) -> dict[str, Size]:
    """Seconds of a list of collectives, by axis."""
    total: dict[str, Size] = {}
    for collective in collectives:
        group = by_axis[collective.axis]
        total[collective.axis] = total.get(collective.axis, 0) + seconds(
            collective.kind, collective.nbytes, group, fabric
        )
    return total


def entry(
    axis: str,
    what: str,
    kind: str,
    calls: Size,
    payload: Size,
    group: Group,
    fabric: Fabric,
    *,
    exposed: Size = 1,
) -> Traffic:
    """One row of the table; `exposed`: the share of its seconds that nothing hides."""
    each = seconds(kind, payload, group, fabric)
    return Traffic(
        axis=axis,
        what=what,
        collective=kind,
        calls_per_step=calls * where(group.ranks > 1, 1, 0),
        payload=payload,
        wire=wire_bytes(kind, payload, group.ranks),
        link=group.link(fabric.domain) if isinstance(group.ranks, int) else "",
        ranks=group.ranks,
        seconds=calls * each,
        exposed_seconds=calls * each * exposed,
    )
