"""Seconds until new weights are where answers are generated: by route, with what sleeps, wakes and moves to the host and back.

Trainers gather each tensor, name it as the checkpoint does, and hand it on: to the process on the same card, or by a broadcast.
What that reaches is what software does, whatever the wire: 2.7 to 5.0 GB/s of dense models, 1.8 to 1.9 of experts (source: verl,
docs/advance/delta_weight_sync.md). NCCL from shard to shard, which is newer, reaches 0.4 of the adapter after 0.4 s: 16 to 24 GB/s
a card of 50 (source: nemo-rl, docs/design-docs/nccl-reshard-refit.md).

A delta is what an update changed, each element with where it is: each rank compares its shard with a copy on the host, and the
receiver writes into each matrix in turn (source: verl, checkpoint_engine/delta_sync). By files, a whole checkpoint or what changed
of it is written and read again; there the tensors are gathered first (source: slime, update_weight_from_disk_delta.py).
"""

from typing import Literal, cast

import msgspec

from loadgauge.core.base.errors import NotStated
from loadgauge.core.definitions.hardware.hardware import Link
from loadgauge.core.definitions.hardware.host import HOST_LINK
from loadgauge.core.definitions.model.model import ModelSpec, Moe
from loadgauge.core.definitions.serving.rollout import SYNCS
from loadgauge.core.post_training.roles import Run

Route = Literal["same card", "broadcast", "shard to shard", "delta", "disk", "delta on disk"]

GATHERED = {False: (2.7e9, 3.7e9, 5.0e9), True: (1.8e9, 1.85e9, 1.9e9)}
"""Bytes a second of weights that are gathered tensor by tensor, of dense models and of mixtures: least, usual, most."""
START, SHARE = 0.4, 0.4
"""Seconds of a transfer from shard to shard beside its bytes, and the share of the adapter that those reach."""
CHANGED = {False: 0.01, True: 0.0005}
"""Share of the weights that an update changes in bfloat16, of dense models and of mixtures: 0.88 to 3 %, and 0.02 to 0.05 % of the
first steps of one (source: verl, docs/advance/delta_weight_sync.md)."""
PLACED = 4 + 2
"""Bytes of an element that changed: where it is, and its value."""
DELTA_START, DELTA_MATRIX, DELTA_RATE = 1.6, 0.31e-3, 0.42e9
"""Seconds of a delta, seconds for each matrix of an expert, and bytes a second of what changed (source: verl, ibid.: seven
models on H100 and A100 take 2.2 to 14.9 s, and these are within a third of each)."""
STORAGE = 2e9
"""Bytes a second that files are written or read with, where nobody says: assumed."""
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
    """Return the way weights take, as said; else from shard to shard of a trainer that splits the model itself, else gathered."""
    if run.engine is not None and run.engine.sync is not None:
        return cast(Route, SYNCS[run.engine.sync])
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
    experts = member.model.has_experts
    if "delta" in route:
        received = sent_of(run)
    if route == "delta":
        parts = {"comparison": DELTA_START, "transfer": received / DELTA_RATE}
        if experts:
            parts["matrices of experts"] = DELTA_MATRIX * expert_matrices(member.model)
        return Sync(route=route, received=received, rate=DELTA_RATE, parts=parts, low=0.75, high=1.6)
    low, rate, high = GATHERED[experts]
    parts, within = {"transfer": nbytes / rate}, (rate / high, rate / low)
    if "disk" in route:
        # A delta is written and read, and put into a checkpoint on the engine's own disk, which is then read whole.
        storage, within = engine.disk or STORAGE, (0.5, 2.0)
        parts["written"], parts["read"] = received / storage, received / storage
        if route == "disk":
            parts["written"] = parts["read"] = nbytes / storage
        else:
            parts["put in place"] = nbytes / STORAGE
    return Sync(route=route, received=received, rate=rate, parts=parts, low=within[0], high=within[1])


def changed_of(run: Run) -> float:
    """Return the share of the weights that an update changes, as said or as usual."""
    share = None if run.engine is None else run.engine.changed
    return CHANGED[run.trained.model.has_experts] if share is None else share


def sent_of(run: Run) -> float:
    """Return the bytes of what an update changed, with where each element is."""
    return changed_of(run) * PLACED * run.trained.params


def expert_matrices(model: ModelSpec) -> int:
    """Return how many matrices a checkpoint has of a model's experts.

    >>> from loadgauge.core.families.catalogue import model
    >>> expert_matrices(model("qwen3-30b-a3b"))
    18432
    """
    layers = (model.blocks[kind].mlp for kind in model.pattern)
    return sum(int(mlp.num_experts) * (3 if mlp.gated else 2) for mlp in layers if isinstance(mlp, Moe))


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
