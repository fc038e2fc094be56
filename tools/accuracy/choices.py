"""Published layouts held against the planner: each is one of the space's layouts, and nothing is slower than the best."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from loadgauge.core.base.errors import NothingFits
from loadgauge.core.definitions.layout.axes import DEGREES
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.inverse import leanest
from loadgauge.core.plan.search import Case, search
from loadgauge.core.plan.space.axis_values import RECOMPUTE, space_for
from loadgauge.core.resolve.setup import Setup
from loadgauge.evidence.validate.runs import Run, setup_of

SERIES = ("KOR", "SC21", "MB")
"""Sources whose layouts were chosen by people who tuned them."""
AXES = (*DEGREES, "zero", "sequence_parallel", "micro_batch", "replicas", "schedule")
MEANS = ("zero", "sequence_parallel", "replicas", "recompute")
"""What a layout does beside sharing out the model: a framework has it or not, a recipe uses it or not."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A published layout, its estimate, and the planner's best.

    rows: of the runs that have it; found: it is in the space; best: of all layouts; alike: of those with its ZeRO stage,
    sequence parallelism and recomputation; None: none fits by our memory model
    """

    rows: tuple[str, ...]
    setup: Setup
    published: Estimate
    found: bool
    best: Estimate | None
    alike: Estimate | None

    def gain(self, other: Estimate | None) -> float | None:
        """How many times as fast another layout is, by our model."""
        assert self.published.time is not None
        if other is None or other.time is None:
            return None
        return self.published.time.step / other.time.step


def configurations(runs: Iterable[Run], series: Iterable[str] = SERIES) -> list[tuple[tuple[str, ...], Setup]]:
    """The distinct setups of the rows of some sources, with the ids of their rows; those that cannot be timed are left out.

    >>> from loadgauge.evidence.validate.runs import published
    >>> [(rows, setup.layout.tp) for rows, setup in configurations(published().runs, ["KOR"])][:2]
    [(('T-KOR-001',), 8), (('T-KOR-002',), 8)]
    """
    wanted = set(series)
    found: dict[object, tuple[list[str], Setup]] = {}
    for run in runs:
        if run.series not in wanted:
            continue
        if run.job is None or run.untimed:
            continue
        setup = setup_of(run)
        if setup.gpu is None:
            continue
        key = setup.model.name, setup.gpu.id, setup.layout, setup.training.precision.name, run.job.nic_bandwidth
        found.setdefault(key, ([], setup))[0].append(run.id)
    return [(tuple(rows), setup) for rows, setup in found.values()]


def layout_of(setup: Setup) -> Layout:
    """The published layout; a ZeRO stage that has one rank to shard over is none."""
    own = setup.layout
    return msgspec.structs.replace(own, zero=0) if own.dp * own.cp <= own.replicas else own


def case_of(setup: Setup, locked: tuple[str, ...] = ()) -> Case:
    """The job with every axis open that its framework has, but for some that are locked to its own layout."""
    assert setup.cluster is not None
    own = layout_of(setup)
    locks: dict[str, tuple[object, ...]] = {"recompute": tuple(dict.fromkeys((*RECOMPUTE, own.recompute)))}
    locks |= {name: (getattr(own, name),) for name in locked}
    space = space_for(
        setup.model, setup.training, own.gpus, own.global_batch, own.seq_len, locks=locks,
        stage_layers=own.stage_layers if "pp" in locked else None, base=own,
    )  # fmt: skip
    return Case(space=space, training=setup.training, cluster=setup.cluster)


def _same(one: Layout | None, other: Layout) -> bool:
    """Whether two layouts differ in no size."""
    return one is not None and all(getattr(one, name) == getattr(other, name) for name in (*AXES, "dp", "stage_layers"))


def choose(rows: tuple[str, ...], setup: Setup) -> Choice:
    """What the planner makes of a published job; raises what speaks against timing it."""
    own = case_of(setup, (*AXES, "recompute"))
    free = case_of(setup)
    return Choice(
        rows=rows, setup=setup, published=free.estimate(layout_of(setup)), found=_same(leanest(own)[1], layout_of(setup)),
        best=_best(free, own), alike=_best(case_of(setup, MEANS), own),
    )  # fmt: skip


def _best(*cases: Case) -> Estimate | None:
    try:
        return search(cases, top=1).layouts[0]
    except NothingFits:
        return None
