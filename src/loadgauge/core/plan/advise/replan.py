"""Plans after one change of a job: each is planned again, none is extrapolated."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base import Error, needs, parse
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.training.training import Training, optimizer_of, spell_loss, training
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.advise.changes import REPLAN_FIT, REPLAN_NEXT, Change, Kind, Run, changes
from loadgauge.core.plan.inverse import best_of
from loadgauge.core.plan.reopen import reopen
from loadgauge.core.plan.search import Case, Objective
from loadgauge.core.resolve.adapters import LORA_RANK

Progress = Callable[[str], None]


class Replanned(NamedTuple):
    """A change of the job, and the best layout with it. before: seconds that as many tokens take without it."""

    what: str
    flags: str
    best: Estimate
    before: float | None = None

    @property
    def step(self) -> float:
        """Step time with the change [s]."""
        assert self.best.time is not None
        return self.best.time.step

    @property
    def speed(self) -> float | None:
        """Tokens per second relative to the run without the change; None where that does not fit."""
        return None if self.before is None else self.before / self.step

    def to_dict(self) -> dict[str, Any]:
        """Return the change with its layout as plain values for JSON."""
        return {
            "change": self.what,
            "flags": self.flags,
            "step": self.step,
            "memory": needs(self.best.memory),
            "step_before": self.before,
            "speed": self.speed,
            "layout": self.best.to_dict()["layout"],
        }


def what_would_fit(
    cases: Sequence[Case],
    margin: float,
    objective: Objective,
    most: int = 6,
    progress: Progress | None = None,
    seq_len: int | None = None,
) -> list[Replanned]:
    """Return the changes that make a layout fit, each with its best layout; those that cannot be modelled are left out.

    The mildest come first; more GPUs are tried only until they are enough. margin: free memory required [bytes]; most: how
    many changes to return; seq_len: of the runs, where it is not the cases'
    """
    rows: list[Replanned] = []
    case = reopen(cases[-1], seq_len=seq_len)
    for change in changes(Run.of_case(case), REPLAN_FIT):
        best = _best(case, change, margin, objective, progress)
        if best is not None:
            rows.append(Replanned(change.title, _flags(change), best))
            if len(rows) == most or change.kind is Kind.MORE_GPUS:
                break
    return rows


def what_next(
    case: Case, best: Estimate, margin: float, objective: Objective, progress: Progress | None = None
) -> list[Replanned]:
    """Re-plan with each single change, and return them by gain, the one with the most tokens per second first.

    best: the best layout without a change; margin: free memory required [bytes]
    """
    assert best.time is not None
    rows = []
    for change in changes(Run.of_case(case), REPLAN_NEXT):
        other = _best(case, change, margin, objective, progress)
        if other is not None:
            assert other.time is not None
            # What the old step would take for as many tokens on as many GPUs as it has.
            before = best.time.step * other.time.tokens / best.time.tokens
            rows.append(Replanned(change.title, _flags(change), other, before))
    return sorted(rows, key=lambda row: -(row.speed or 0))


def _best(
    case: Case, change: Change, margin: float, objective: Objective, progress: Progress | None
) -> Estimate | None:
    """The best layout with a change; None where it cannot be modelled, or nothing fits."""
    if progress is not None:
        progress(change.title)
    try:
        return best_of(_apply(case, change.fields), objective, margin)
    except Error:
        return None


def _flags(change: Change) -> str:
    return " ".join(Job(model="", **{name: value}).flags() for name, value in change.fields.items())


def _apply(case: Case, fields: dict[str, Any]) -> Case:
    """The case with some fields of `Job` changed; raises what the framework or the GPU has against it."""
    for tier, name in enumerate(("link_bandwidth", "nic_bandwidth")):
        if name in fields:
            links = list(case.cluster.links)
            links[tier] = msgspec.structs.replace(links[tier], bandwidth=parse(fields[name])[0])
            return msgspec.structs.replace(case, cluster=msgspec.structs.replace(case.cluster, links=tuple(links)))
    sizes = {name: fields.get(name) for name in ("gpus", "global_batch", "seq_len")}
    changed = _training(case, fields)
    again = reopen(case, **sizes, training=changed)
    return again if changed is None else msgspec.structs.replace(again, others=tuple(_others(case, fields, changed)))


def _others(case: Case, fields: dict[str, Any], changed: Training) -> Iterator[Training]:
    """The other ways in which the changed job may train, where the change does not say it."""
    for other in case.others:
        if not ({"optimizer", "offload"} & fields.keys() and other.optimizer != case.training.optimizer):
            also = _training(msgspec.structs.replace(case, training=other), fields)
            if also is not None and also != changed:
                yield also


def _training(case: Case, fields: dict[str, Any]) -> Training | None:
    """Training of the changed job; None where that does not change."""
    old = case.training
    if "precision" in fields:
        return _recast(case, fields["precision"])
    if "optimizer" in fields:
        return msgspec.structs.replace(old, optimizer=optimizer_of(old.framework, fields["optimizer"]))
    if "offload" in fields:
        return msgspec.structs.replace(old, offload=fields["offload"])
    if "overlap" in fields:
        return msgspec.structs.replace(old, overlap=Overlap.parse(fields["overlap"], old.overlap))
    if "lora_rank" in fields:
        return _adapted(old, Lora(rank=fields["lora_rank"]))
    if "qlora" in fields:
        lora = Lora(rank=LORA_RANK) if old.lora is None else old.lora
        upcast: Any = "all" if old.framework.peft else "none"
        return _adapted(old, msgspec.structs.replace(lora, quantised=True, upcast=upcast))
    return None


def _adapted(old: Training, lora: Lora) -> Training:
    """With adapters, as the framework runs them; a recipe that followed from the weights is then another one."""
    recipe = training(old.framework.name, old.precision.name[: 4 if old.weights else None], lora=lora)
    return msgspec.structs.replace(
        old,
        lora=recipe.lora,
        precision=recipe.precision,
        by_sharding=None,
        kernels=msgspec.structs.replace(
            old.kernels, dtypes=recipe.kernels.dtypes, softmax_float32=recipe.kernels.softmax_float32
        ),
    )


def _recast(case: Case, precision: str) -> Training:
    """In another precision; raises where the framework or the GPU has none."""
    old, kernels = case.training, case.training.kernels
    if precision == "fp8":
        case.cluster.gpu.peak("fp8")
    new = training(old.framework.name, precision, old.optimizer.name, kernels.attention, spell_loss(old))
    return msgspec.structs.replace(new, overlap=old.overlap, offload=old.offload)
