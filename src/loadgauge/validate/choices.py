"""Published layouts held against the planner: each is one of the space's layouts, and nothing is slower than the best."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from loadgauge.errors import NothingFits
from loadgauge.estimate.result import Estimate
from loadgauge.plan.axis_values import RECOMPUTE, space_for
from loadgauge.plan.inverse import leanest
from loadgauge.plan.search import Case, search
from loadgauge.spec.axes import DEGREES
from loadgauge.spec.cluster import cluster
from loadgauge.spec.layout import Layout
from loadgauge.validate.expression import Job, express
from loadgauge.validate.runs import Run

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
    job: Job
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


def configurations(runs: Iterable[Run], series: Iterable[str] = SERIES) -> list[tuple[tuple[str, ...], Job]]:
    """The distinct jobs of the rows of some sources, with the ids of their rows; those that cannot be timed are left out.

    >>> from loadgauge.validate.runs import published
    >>> [(rows, job.layout.tp) for rows, job in configurations(published().runs, ["KOR"])][:2]
    [(('T-KOR-001',), 8), (('T-KOR-002',), 8)]
    """
    wanted = set(series)
    found: dict[object, tuple[list[str], Job]] = {}
    for run in runs:
        if run.series not in wanted:
            continue
        said = express(run)
        if said.job is None or said.untimed or said.job.gpu is None:
            continue
        job = said.job
        key = job.model.name, said.job.gpu.id, job.layout, job.training.precision.name, job.nic_bandwidth
        found.setdefault(key, ([], job))[0].append(run.id)
    return [(tuple(rows), job) for rows, job in found.values()]


def layout_of(job: Job) -> Layout:
    """The published layout; a ZeRO stage that has one rank to shard over is none."""
    own = job.layout
    return msgspec.structs.replace(own, zero=0) if own.dp * own.cp <= own.replicas else own


def case_of(job: Job, locked: tuple[str, ...] = ()) -> Case:
    """The job with every axis open that its framework has, but for some that are locked to its own layout."""
    assert job.gpu is not None
    own = layout_of(job)
    machines = cluster(job.gpu, own.gpus, job.gpus_per_node, None, job.nic_bandwidth)
    locks: dict[str, tuple[object, ...]] = {"recompute": tuple(dict.fromkeys((*RECOMPUTE, own.recompute)))}
    locks |= {name: (getattr(own, name),) for name in locked}
    space = space_for(
        job.model, job.training, own.gpus, own.global_batch, own.seq_len, locks=locks,
        stage_layers=own.stage_layers if "pp" in locked else None, base=own,
    )  # fmt: skip
    return Case(space=space, training=job.training, cluster=machines)


def _same(one: Layout | None, other: Layout) -> bool:
    """Whether two layouts differ in no size."""
    return one is not None and all(getattr(one, name) == getattr(other, name) for name in (*AXES, "dp", "stage_layers"))


def choose(rows: tuple[str, ...], job: Job) -> Choice:
    """What the planner makes of a published job; raises what speaks against timing it."""
    own = case_of(job, (*AXES, "recompute"))
    free = case_of(job)
    return Choice(
        rows=rows, job=job, published=free.estimate(layout_of(job)), found=_same(leanest(own)[1], layout_of(job)),
        best=_best(free, own), alike=_best(case_of(job, MEANS), own),
    )  # fmt: skip


def _best(*cases: Case) -> Estimate | None:
    try:
        return search(cases, top=1).layouts[0]
    except NothingFits:
        return None
