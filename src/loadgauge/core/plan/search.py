"""The best layouts of a space: all of them evaluated at once, the best ones estimated again one by one.

The array reading ranks; what is reported is the exact `estimate` of each layout. No layout is left out beforehand.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Literal, get_args

import msgspec

from loadgauge.core.base.errors import ConfigError, LayoutError, NothingFits, NotModelled
from loadgauge.core.base.hooks import need
from loadgauge.core.base.units import gib, in_gib
from loadgauge.core.base.verdict import RANK
from loadgauge.core.definitions.hardware.calibration import Efficiencies, of_cluster
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.time import cost as money
from loadgauge.core.estimate.unsaid import overlap_ends, with_unsaid
from loadgauge.core.plan.batch.best import Best, Estimates, Rank, Ranked, Row
from loadgauge.core.plan.batch.evaluate import BatchEvaluator
from loadgauge.core.plan.batch.kept import Kept
from loadgauge.core.plan.batch.memo import Memo
from loadgauge.core.plan.batch.types import Batch, May, Wanted, untimed
from loadgauge.core.plan.sample import Sampler
from loadgauge.core.plan.space.constraints import Constraints
from loadgauge.core.plan.space.space import SIZES, Space
from loadgauge.core.resolve.reproduce import layout_flags

Objective = Literal["time", "throughput", "money", "gpus", "headroom", "network", "goodput"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
KEPT = 20
"""Best layouts that are estimated one by one, besides the Pareto front."""
NETWORK_KEPT, NETWORK_SLACK = 1000, 1.05
"""For the objective network: how many of the fastest layouts are compared, and how much longer they may take."""
GOODPUT_KEPT = 100
"""For the objective goodput: how many layouts, the best by their step and by the replicas that are left, are compared in full."""
USUAL = {
    "tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8, 16), "vpp": (1, 4), "cp": (1,), "ep": (1, 8, 32), "etp": (1,), "zero": (1,),
    "replicas": (1,), "micro_batch": (1,),
}  # fmt: skip
"""Values of a first look."""
GOOD = USUAL | {"pp": (1, 4, 8, 16, 32), "cp": (1, 2, 4, 8), "ep": (1, 8), "zero": (2,)}
"""Values that layouts with little to hold and to send often have: the first to be beaten in a space that is narrowed down."""
SLOW = ("network", "goodput")
"""Objectives that estimate many layouts one by one."""
Progress = Callable[[int, int], None]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster to plan for, and the layouts on it.

    price: of a GPU-hour; locks: the values of axes that the user wants, which a changed job keeps (None: those of the space)
    others: other ways in which the run may train, for what is not said
    fleet: failures, spares and recovery, for the objective goodput
    overlap_open: nothing is said of what hides, and the range of a time is from all communication hidden to none
    """

    space: Space
    training: Training
    cluster: Cluster
    efficiencies: Efficiencies | None = None
    price: float | None = None
    locks: dict[str, tuple[Any, ...]] | None = None
    others: tuple[Training, ...] = ()
    fleet: Any = None
    overlap_open: bool = False

    def evaluator(self) -> BatchEvaluator:
        """The evaluator of all layouts of the case at once."""
        return BatchEvaluator(self.space, self.training, self.cluster, self.efficiencies or of_cluster(self.cluster))

    def batches(
        self,
        progress: Progress | None = None,
        wanted: Wanted | None = None,
        may: May | None = None,
        seed: Callable[[Batch], None] | None = None,
    ) -> Iterator[Batch]:
        """Yield the valid layouts, structure by structure, with memory [bytes] and step time [s].

        With sequence lengths, the time is of a mean micro-batch, the memory of the fullest of an epoch, and its upper end of one
        with the longest sequences only.
        """
        batches = self.evaluator().batches(progress, wanted, may if self.space.lengths is None else None, seed)
        if self.space.lengths is None:
            yield from batches
            return
        import numpy

        full, longest = (
            msgspec.structs.replace(self, space=msgspec.structs.replace(self.space, **change))
            for change in ({"at_peak": True}, {"lengths": None})
        )
        worst = (case.evaluator().batches(None, untimed) for case in (full, longest))
        for batch, own, other in zip(batches, *worst, strict=True):
            yield batch._replace(memory=own.memory, high=numpy.maximum(own.high, other.high))

    def estimate(self, layout: Layout) -> Estimate:
        """Estimate one layout exactly; with sequence lengths, the range of its memory goes up to the longest alone."""
        mean = estimate(
            self.space.model,
            layout,
            self.training,
            cluster=self.cluster,
            efficiencies=self.efficiencies,
        )
        mean = with_unsaid(mean, self.others)
        if self.space.lengths is None:
            return mean
        equal_lengths = msgspec.structs.replace(layout, tokens=None, pairs=None, fullest=None)
        worst = estimate(self.space.model, equal_lengths, self.training, self.cluster.gpu)
        return mean.replace(memory=mean.memory.up_to(worst.memory, "--lengths"))

    def ranged(self, exact: Estimate) -> Estimate:
        """Return an estimate of this search with the range of its time over what may hide, where nothing is said of that."""
        if not self.overlap_open or exact.time is None:
            return exact
        return exact.replace(time=overlap_ends(exact)[0])


class SearchResult(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The best layouts, best first, the Pareto front of step time and memory, and how many layouts were searched.

    evaluated: combinations of all axes; valid: those that can exist
    bounded: of these, how many have only a lower bound of their step time, which was too long for the answer, or of their
    memory, which was too much
    tighter: a TIGHT layout that is better than the best, which fits; stored: what of the search is on disk
    """

    cases: tuple[Case, ...]
    objective: Objective
    margin: float
    layouts: Sequence[Estimate]
    pareto: Sequence[Estimate]
    evaluated: int
    valid: int
    seconds: float
    ranked: Ranked
    bounded: int = 0
    tighter: Estimate | None = None
    counted: int | None = None
    stored: Kept

    @cached_property
    def fitting(self) -> int:
        """Number of valid layouts that fit as assumed: the memory of all of them, which the search did not need."""
        if self.counted is not None:
            return self.counted
        if self.stored.state.fits is not None:
            return self.stored.state.fits
        rooms = [(case.cluster.gpu.capacity, case.batches(None, untimed)) for case in self.cases]
        self.stored.state.fits = sum(
            int(((batch.memory <= room - self.margin) & (batch.high <= room)).sum())
            for room, batches in rooms
            for batch in batches
        )
        self.stored.save(counted=True)
        return self.stored.state.fits

    @property
    def moved(self) -> int:
        """Number of the best that changed ranks with their exact estimates."""
        return self.ranked.moved


def search(
    cases: Sequence[Case],
    *,
    objective: Objective = "time",
    margin: float = 0.0,
    top: int = 10,
    exhaustive: bool = False,
    progress: Progress | None = None,
    sampler: Sampler | None = None,
    front: bool = True,
) -> SearchResult:
    """Search the layouts of all cases together and return the best ones and the Pareto front.

    objective: network compares the `NETWORK_KEPT` fastest layouts within `NETWORK_SLACK` of the best time, goodput the
    `GOODPUT_KEPT` best by step and lost replicas; the others compare all layouts
    margin: memory to be left free on each GPU [bytes]; top: how many layouts to return
    exhaustive: simulate every schedule, even of layouts that do not fit or cannot be among the best by a lower bound of
    their time, which cannot change the answer; front: look for the Pareto front too

    Raises `LayoutError` where no layout is valid, and `NothingFits` where none fits.

    >>> from loadgauge import cluster, gpu, model, training
    >>> space = Space(model=model("llama-3.1-8b"), gpus=8, global_batch=8, seq_len=4096)
    >>> result = search([Case(space=space, training=training("torchtitan"), cluster=cluster(gpu("h100-sxm5-80gb"), 8))])
    >>> result.layouts[0].layout.zero, result.evaluated, result.valid
    (2, 8, 4)
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"unknown objective {objective!r} (known: {', '.join(OBJECTIVES)})", key="objective")
    compared = {"network": NETWORK_KEPT, "goodput": GOODPUT_KEPT}.get(objective, 0)
    best = Best(kept := max(KEPT, top, compared), front)
    stored = Kept(best, cases, objective, margin, kept, front, usual=sampler is None and not exhaustive)
    usual = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)  # many objects are made and few are thrown away
    try:
        return _searched(best, stored, cases, objective, margin, top, exhaustive, progress, sampler)
    except KeyboardInterrupt:
        if stored.file is None:
            raise
        raise KeyboardInterrupt(*_so_far(best, cases), "the same command goes on from here") from None
    finally:
        gc.set_threshold(*usual)
        stored.save()


def _so_far(best: Best, cases: Sequence[Case]) -> list[str]:
    """Return the best layout of those that were timed so far and fit, in words; none where there is none."""
    row = min(best.sure.rows or best.seeds.rows, key=lambda row: row[:4], default=None)
    if row is None:
        return []
    exact = cases[row.case].estimate(row.layout)
    return [f"the best so far is {layout_flags(exact)}: {row.step:,.4g} s a step"]


def _searched(
    best: Best,
    stored: Kept,
    cases: Sequence[Case],
    objective: Objective,
    margin: float,
    top: int,
    exhaustive: bool,
    progress: Progress | None,
    sampler: Sampler | None,
) -> SearchResult:
    """Search what is left of all cases. stored: how far the search is"""
    for number, case in enumerate(cases):
        if number < stored.state.cases:
            continue
        capacity = case.cluster.gpu.capacity
        limit = capacity - margin
        own = partial(_score, objective, case)
        wanted, may = None, None
        if not exhaustive:
            wanted, may = best.wanted(number, own, limit, capacity), best.may(number, own, limit)
        if wanted is not None and sampler is not None:
            wanted, may = sampler.widen(wanted, capacity), None

        def seed(batch: Batch) -> None:
            best.seed(number, batch, _scores(objective, case, batch), limit, capacity)  # noqa: B023

        if may is not None and case.space.narrowed:
            best.narrowed.add(number)
            with contextlib.suppress(LayoutError, NotModelled):
                for batch in some_of(case, GOOD).batches(None, wanted):
                    seed(batch)
        for batch in case.batches(progress, wanted, may, seed):
            if sampler is not None:
                sampler.take(batch, capacity)
            best.add(number, batch, _scores(objective, case, batch), limit, capacity)
        stored.passed()
    if not best.valid:
        raise LayoutError(no_layout(cases))
    for pool in (best.sure, best.tight):
        pool.trim()
    evaluated, rows = sum(case.space.size for case in cases), best.pool.rows
    if not rows:
        least = stored.state.least = stored.state.least or _least(cases)
        nothing = nothing_fits(cases, *least, margin)
        nothing.counts = {"evaluated": evaluated, "valid": best.valid, "fitting": 0, "seconds": stored.seconds}
        raise nothing
    if objective == "network":
        slowest = NETWORK_SLACK * min(row.step for row in rows)
        rows = [row for row in rows if row.step <= slowest]
    estimates = Memo()

    def exact(row: Row) -> Estimate:
        return estimates.once((row.case, layout := row.layout), cases[row.case].estimate, layout)

    def rank(row: Row, estimate: Estimate) -> Rank:
        second = seconds(estimate) if objective == "network" else estimate.memory.total
        word = RANK[estimate.memory.verdict]
        return word, score(objective, cases[row.case], estimate), second, _simplicity(estimate.layout)

    front = best.front
    ranked = stored.ranked = Ranked(rows, exact, rank, close=objective not in SLOW, ranks=stored.state.ranks)
    first = ranked.at(0)
    ranged = case_of(cases, first).ranged(first)
    return SearchResult(
        cases=tuple(cases),
        objective=objective,
        margin=margin,
        layouts=Estimates(min(top, len(rows)), lambda index: ranked.at(index) if index else ranged),
        pareto=Estimates(len(front), lambda index: exact(front[index])),
        evaluated=evaluated,
        valid=best.valid,
        counted=best.fitting if best.seen == best.valid else None,
        seconds=stored.seconds,
        stored=stored,
        ranked=ranked,
        bounded=best.valid - best.timed,
        tighter=_tighter(cases, objective, exact, best, first) if best.sure.fronted else None,
    )


def first_look(cases: Sequence[Case], objective: Objective = "time", margin: float = 0.0) -> Estimate | None:
    """Return a good layout of the first search within a tenth of a second: the best of the `USUAL` values; None if none fits.

    >>> from loadgauge import cluster, gpu, model, training
    >>> space = Space(model=model("llama-3.1-8b"), gpus=8, global_batch=8, seq_len=4096, tp=(1, 2, 8))
    >>> case = Case(space=space, training=training("torchtitan"), cluster=cluster(gpu("h100-sxm5-80gb"), 8))
    >>> first_look([case]).layout.zero
    1
    """
    usual: Objective = "time" if objective in SLOW else objective
    with contextlib.suppress(LayoutError, NothingFits):
        return search([some_of(cases[0], USUAL)], objective=usual, margin=margin, top=1, front=False).layouts[0]
    return None


def some_of(case: Case, values: dict[str, tuple[int, ...]]) -> Case:
    """Return a case with some values of its axes alone, or with the first where it has none of these."""
    space = case.space
    few = {name: tuple(value for value in getattr(space, name) if value in some) for name, some in values.items()}
    few = {name: some or getattr(space, name)[:1] for name, some in few.items()} | {"recompute": space.recompute[-1:]}
    return msgspec.structs.replace(case, space=msgspec.structs.replace(space, **few))


def _least(cases: Sequence[Case]) -> tuple[Layout, int]:
    """The layout that needs the least memory, and the number of its case."""
    least: list[Row] = []

    def less(low: Any, _: Any) -> Any:
        return low < (least[0].memory if least else float("inf"))

    for number, case in enumerate(cases):
        for batch in case.batches(None, untimed, less):
            if len(batch.places) and less(batch.memory.min(), None):
                least[:] = [Row.of(number, batch, batch.memory, int(batch.memory.argmin()))]
    return least[0].layout, least[0].case


def _scores(objective: Objective, case: Case, batch: Batch) -> Any:
    """Return the quantity to minimise for each layout of a batch. For goodput it grows with the GPUs that a failed host idles."""
    scores = _score(objective, case, batch.step, batch.memory)
    if objective != "goodput":
        return scores
    import numpy

    # Where bounds rule every layout of a batch out, its places are none, of no type.
    rows, _, copies = numpy.unravel_index(numpy.asarray(batch.places, dtype=numpy.intp), batch.grid.dims)
    zero, pp = batch.structure.zero, batch.structure.pp
    group = batch.grid.rows["tp"][rows] * batch.grid.rows["cp"][rows] * pp
    if zero == 3 or (zero == 2 and case.training.framework.fully_shards):
        group = case.space.gpus / batch.grid.replicas[copies]
    return scores / need("OBJECTIVES").replicas_left(case.fleet, case.cluster.gpus, case.cluster.gpus_per_node)(group)


def _score(objective: Objective, case: Case, step: Any, memory: Any) -> Any:
    """Return the quantity to minimise, for each layout; it never falls where the time grows."""
    if objective == "headroom":
        return memory - case.cluster.gpu.capacity
    gpus = case.space.gpus
    return {
        "time": step,
        "network": step,  # the fastest are asked one by one what they send
        "goodput": step,  # and how much of their time is progress
        "throughput": step * gpus,
        "money": step * gpus * (1.0 if case.price is None else case.price),
        "gpus": gpus + 1 - 1 / (step + 1),
    }[objective]


def score(objective: Objective, case: Case, estimate: Estimate) -> float:
    """Return the quantity that an objective minimises, for an exact estimate."""
    if objective == "network":
        return carried(estimate)
    if objective == "goodput":
        return -float(need("OBJECTIVES").steady(estimate, case.fleet))
    return float(_score(objective, case, seconds(estimate), estimate.memory.total))


def cost_per_billion_tokens(price: float, estimate: Estimate) -> float:
    """Return the cost of training on 10^9 tokens, in the currency of `price`, that of one GPU-hour (`progress`)."""
    assert estimate.time is not None
    share, _ = money.progress(price, estimate.layout.gpus)
    cost: float = price / share * estimate.layout.gpus * estimate.time.step / 3600 / estimate.time.tokens * 1e9
    return cost


def carried(estimate: Estimate) -> float:
    """Return the mean traffic of a GPU's network adapter over a step [byte/s]."""
    nbytes: float = sum(row.adapter * row.calls_per_step for row in estimate.network)
    return nbytes / seconds(estimate)


def seconds(estimate: Estimate) -> float:
    """Return the step time of an estimate that has one [s]."""
    assert estimate.time is not None
    return estimate.time.step


def case_of(cases: Sequence[Case], exact: Estimate) -> Case:
    """Return the case of the search that an estimate is of: as many GPUs, and what of its training follows from its layout."""

    def of(training: Training) -> tuple[object, ...]:
        return training.host.activations, training.kernels.masks, training.kernels.dispatch, training.overlap

    same = (case for case in cases if case.space.gpus == exact.layout.gpus)
    return next(case for case in same if of(case.training) == of(exact.training))


def _tighter(
    cases: Sequence[Case], objective: Objective, exact: Callable[[Row], Estimate], leaders: Best, best: Estimate
) -> Estimate | None:
    """The best of the tight layouts, where it is better than the best, which fits."""
    if not leaders.sure.rows or not leaders.tight.rows:
        return None
    own = score(objective, case_of(cases, best), best)
    row = min(leaders.tight.rows, key=lambda row: row[:4])
    return tight if score(objective, cases[row.case], tight := exact(row)) < own else None


def _simplicity(layout: Layout) -> tuple[int, ...]:
    """Of two layouts as good, the one with fewer things to set up comes first."""
    return layout.pp * layout.vpp, layout.tp, layout.cp, layout.zero, layout.replicas


# -- when there is none -------------------------------------------------------------------------------------------------


def no_layout(cases: Sequence[Case]) -> str:
    """Explain in one line why no layout of the searches is valid: the constraints that none satisfies."""
    reasons: dict[str, None] = {}
    for case in cases:
        space = case.space
        left_out: dict[str, int] = {}
        looked = 0
        for grid in space.grids():
            limits = Constraints(grid)
            for structure in space.structures():
                looked += grid.size
                for name, mask in limits.masks(structure):
                    left_out[name] = left_out.get(name, 0) + grid.size - limits.count(mask)
        if not looked:
            reasons[
                f"{space.model.num_hidden_layers} layers cannot be split over pp {_list(space.pp)}"
                f" with vpp {_list(space.vpp)}"
            ] = None
            continue
        all_out = [name for name, count in left_out.items() if count == looked]
        most = max(((count, name) for name, count in left_out.items()), default=None)
        names = all_out or ([most[1]] if most else [])
        problems = example(space)
        reasons[f"{' and '.join(names)}: not one of {looked:,} does{f' ({problems})' if problems else ''}"] = None
    return f"no layout can exist on {_list(tuple(case.space.gpus for case in cases))} GPUs; {'; '.join(reasons)}"


def example(space: Space) -> str:
    """Return the first objection of `Layout.valid` where tp, pp and cp have one value each; empty where they are open."""
    if len(space.tp) > 1 or len(space.pp) > 1 or len(space.cp) > 1:
        return ""
    for structure in space.structures():
        within = space.tp[0] * space.cp[0] * structure.pp
        if space.gpus % within:
            return f"{space.gpus} over {within} leaves {space.gpus % within}"
        first = {name: getattr(space, name)[0] for name in SIZES}
        problems = space.layout(structure, first).valid(space.model)
        return problems[0] if problems else ""
    return ""


def _list(values: Sequence[int]) -> str:
    shown = list(dict.fromkeys(values))
    return ", ".join(map(str, shown if len(shown) < 8 else [*shown[:3], "...", shown[-1]]))


def nothing_fits(cases: Sequence[Case], layout: Layout, number: int, margin: float) -> NothingFits:
    """Return the error for when nothing fits: the layout that needs least, estimated, and the memory it lacks [bytes].

    number: which of the cases that layout is of; margin: memory to be left free [bytes]
    """
    case = cases[number]
    nearest = case.estimate(layout)
    memory = nearest.memory
    missing = memory.total + margin - case.cluster.gpu.capacity
    spare = f" with {margin / 2**30:.1f} GiB to spare" if margin else ""
    short = memory.verdict == "does not fit" or margin > 0
    text = (
        f"no layout of {case.space.model.name} {'fits' if short else 'is sure to fit'} {case.cluster.gpu.name}{spare}: the nearest"
        f" needs {in_gib(memory.total, 1)} of {gib(case.cluster.gpu.capacity, 1)} a GPU, range {in_gib(memory.low, 1)}-"
        f"{gib(memory.high, 1)}{f', {gib(missing, 1)} too much' if short else ''}"
    )
    return NothingFits(text, nearest=nearest, missing=missing)
