"""Seconds until new weights are where answers are generated: by route, with what sleeps, wakes and moves to the host and back.

Trainers gather each tensor, name it as the checkpoint does, and hand it on: to the process on the same card, or by a broadcast.
What that reaches is what software does, whatever the wire: 2.7 to 5.0 GB/s of dense models, 1.8 to 1.9 of experts (source: verl,
docs/advance/delta_weight_sync.md). NCCL from shard to shard, which is newer, reaches 0.4 of the adapter after 0.4 s: 16 to 24 GB/s
a card of 50 (source: nemo-rl, docs/design-docs/nccl-reshard-refit.md).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgauge.core.base.errors import NotStated
from loadgauge.core.definitions.hardware.hardware import Link
from loadgauge.core.definitions.hardware.host import HOST_LINK
from loadgauge.core.post_training.roles import Run

Route = Literal["same card", "broadcast", "shard to shard"]

GATHERED = {False: (2.7e9, 3.7e9, 5.0e9), True: (1.8e9, 1.85e9, 1.9e9)}
"""Bytes a second of weights that are gathered tensor by tensor, of dense models and of mixtures: least, usual, most."""
START, SHARE = 0.4, 0.4
"""Seconds of a transfer from shard to shard beside its bytes, and the share of the adapter that those reach."""
SLEEP, WAKE = 1.7, 0.28
"""Seconds in which an engine frees its memory, and takes that of its cache again (source: nemo-rl, issue 1137)."""

OPTIMIZER = 12.0
"""Bytes of a parameter's optimizer states: two moments and the weights in 32 bits."""
SWITCH, SWITCH_PARAMS = 33.0, 32e9
"""Seconds in which a colocated step changes sides (refit, offload and reload of states, caches emptied), constant over steps of 401
and 247 s (source: skyrl, spec_decode.mdx): taken for that of this many parameters or more, and less in proportion below."""


class Sync(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a weight sync. received: bytes that a card of the rollout gets; rate: bytes a second

    parts: seconds by what takes them; low, high: factors on the transfer
    """

    route: Route
    received: float
    rate: float
    parts: dict[str, float]
    low: float
    high: float

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())


def route_of(run: Run) -> Route:
    """Return the way weights take: from shard to shard of a trainer that splits the model itself, else gathered."""
    if run.trained.training.framework.splits_model:
        return "shard to shard"
    return "same card" if run.placement.colocated else "broadcast"


def transfer(run: Run, route: Route) -> Sync:
    """Return the seconds of the weights alone on a route. Raises `NotStated` where the network between both sides is not known."""
    engine, member = run.engine, run.trained
    assert engine is not None
    nbytes = 2.0 * member.params
    received = nbytes / engine.replica
    if route == "shard to shard":
        links = _links(run)
        rate = SHARE * links[min(1, len(links) - 1)].bandwidth
        return Sync(
            route=route, received=received, rate=rate, parts={"transfer": START + received / rate}, low=0.7, high=1.5
        )
    low, rate, high = GATHERED[member.model.has_experts]
    return Sync(
        route=route, received=received, rate=rate, parts={"transfer": nbytes / rate}, low=rate / high, high=rate / low
    )


def _links(run: Run) -> tuple[Link, ...]:
    """Links of the GPUs of both sides. Raises `NotStated` where nobody states what joins them."""
    if run.joined is None:
        raise NotStated(run.apart)
    return run.joined.links


def moved_states(run: Run) -> float:
    """Return the bytes of a card's weights or optimizer states that `rollout_offload` moves to the host, and back."""
    member = run.trained
    layout, params = member.layout, member.params
    ranks = layout.tp * layout.pp * (layout.dp if layout.zero == 3 else 1)
    weights, optimizer = 2.0 * params / ranks, OPTIMIZER * params / (ranks if layout.zero == 0 else layout.gpus)
    # A role that leaves when idle is loaded for the hand-over, each pass of its own, and the update, which alone has states.
    own = (
        each for each in run.task.passes if each.role == member.role.name and each.does not in ("generate", "update")
    )
    turns = 2 + sum(1 for _ in own)
    of = {"weights": weights, "optimizer": optimizer, "states": optimizer, "all": weights + optimizer}
    of["idle"] = turns * weights + optimizer
    return float(of.get(run.rollout_offload, 0.0))


def sync(run: Run) -> Sync:
    """Return the seconds between an update and the next answers."""
    sent = transfer(run, route_of(run))
    engine = run.engine
    assert engine is not None
    parts = dict(sent.parts)
    if run.placement.colocated:
        parts["changing sides"] = SWITCH * min(1.0, run.trained.params / SWITCH_PARAMS)
        if engine.sleep:
            parts["sleep and wake"] = SLEEP + WAKE
        if engine.sleep == 1:
            parts["sleep's copy of the weights"] = sent.received / HOST_LINK
        moved = moved_states(run)
        if moved:
            parts["offload and reload"] = 2 * moved / HOST_LINK
    return msgspec.structs.replace(sent, parts=parts)
