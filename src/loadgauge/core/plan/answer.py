"""`Plan`: the answer to a `PlanRequest`, each layout with the complete flags that give it; and `loadgauge.plan`."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, load
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.job.job import WHOLE_RUN, Job
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.request import JOB_FIELDS, PlanRequest, cases
from loadgauge.core.plan.search import KEPT, Case, Objective, Progress, SearchResult, case_of, search
from loadgauge.core.plan.space.axis_values import out_of_reach
from loadgauge.core.resolve.reproduce import completer
from loadgauge.core.resolve.setup import Setup


class PlannedLayout(msgspec.Struct, frozen=True):
    """A layout of a plan: its exact estimate, and the job with every flag that the estimate rests on."""

    estimate: Estimate
    job: Job

    def flags(self) -> str:
        """The complete flags, framework included: typed into `loadgauge estimate`, they give the same estimate."""
        return self.job.flags()

    def command(self) -> str:
        """The whole command line of `loadgauge estimate`."""
        return self.job.command()

    def to_dict(self) -> dict[str, Any]:
        """The estimate for JSON, with the command line that gives it."""
        return {**self.estimate.to_dict(), "command": self.command()}


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The best layouts of a job, the best first, and the Pareto front of memory and step time.

    setup: the job as settled, without its open axes; cases: a search for each number of GPUs
    """

    request: PlanRequest
    setup: Setup
    cases: tuple[Case, ...]
    result: SearchResult

    def __repr__(self) -> str:
        return f"<Plan of {self.setup.model.name}: {self.best.flags()}>"

    def __str__(self) -> str:
        """Return the text that `loadgauge plan` prints."""
        text: str = load("loadgauge.core.text.plan.plan:text")(self)
        return text

    @cached_property
    def complete(self) -> Callable[[Estimate], Job]:
        """Writes the job of an estimate of this plan, with every flag that it rests on."""
        return completer(self.setup.job)

    def _planned(self, estimate: Estimate) -> PlannedLayout:
        if estimate is not self.result.layouts[0]:  # the first has its range
            estimate = case_of(self.cases, estimate).ranged(estimate)
        return PlannedLayout(estimate, self.complete(estimate))

    @property
    def best(self) -> PlannedLayout:
        """The best layout by the objective."""
        return self._planned(self.result.layouts[0])

    @property
    def layouts(self) -> tuple[PlannedLayout, ...]:
        """The best layouts, as many as were asked for (`top`), the best first."""
        return tuple(map(self._planned, self.result.layouts[: self.request.top]))

    @property
    def pareto(self) -> tuple[PlannedLayout, ...]:
        """Layouts that no other one beats in both memory and step time, the fastest first."""
        return tuple(map(self._planned, self.result.pareto))

    @property
    def case(self) -> Case:
        """The search that has the best layout."""
        return case_of(self.cases, self.result.layouts[0])

    def to_dict(self) -> dict[str, Any]:
        """The plan for JSON: bytes, seconds, and counts of layouts."""
        result = self.result
        return {
            "objective": result.objective,
            "margin": result.margin,
            "layouts": [layout.to_dict() for layout in self.layouts],
            "pareto": [layout.to_dict() for layout in self.pareto],
            "tighter": None if result.tighter is None else self._planned(result.tighter).to_dict(),
            "evaluated": result.evaluated,
            "valid": result.valid,
            "fitting": result.fitting,
            "seconds": result.seconds,
            "cached": result.stored.found,
            "out_of_reach": out_of_reach(self.cases[-1].space),
            "assumed": self.setup.assumed,
            "nearest": None,
            "missing": None,
        }


def answer(request: PlanRequest, setup: Setup, searches: list[Case], progress: Progress | None = None) -> Plan:
    """The plan of a request and what `cases` makes of it. Raises `LayoutError` or `NothingFits` as `search` does."""
    result = search(
        searches,
        objective=request.objective,
        margin=request.margin_bytes,
        top=max(request.top, KEPT),
        progress=progress,
    )
    return Plan(request=request, setup=setup, cases=tuple(searches), result=result)


def plan(
    model: str | Path | ModelSpec | Job,
    *,
    gpu: str | Gpu | None = None,
    objective: Objective = "time",
    margin: float = 0.0,
    price: float | None = None,
    top: int = 5,
    **flags: Any,
) -> Plan:
    """The best layouts of a training job, found by exhaustive search over all valid ones.

    model: a name in the catalogue, the path of a config.json, of its folder or of another tool's job file, a `ModelSpec`, or
    a `Job`, whose fields go before `flags`
    objective: what the best layout has the least of (or the most: throughput, headroom)
    margin: memory to be left free on each GPU [GiB]; price: of one GPU-hour, in your currency
    flags: fields of `Job`. tp, pp, vpp, cp, ep, etp, zero, sequence_parallel, micro_batch, recompute,
    schedule and replicas are open: a value locks one, a tuple of values narrows it down. `gpus` may be a tuple too.

    Raises `NothingFits`, with the nearest layout, where none fits; `LayoutError` where none is valid; `ConfigError` for
    flags that cannot be read; `NotStated` where the links of the cluster are not known.

    >>> import loadgauge
    >>> best = loadgauge.plan("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, global_batch=64, tp=(1, 2), pp=1, cp=1).best
    >>> best.flags().partition(" --framework ")[2], best.estimate.memory.verdict
    ('megatron', 'fits')
    """
    spec = model if isinstance(model, ModelSpec) else None
    flags["gpu"] = gpu.id if isinstance(gpu, Gpu) else gpu
    if isinstance(model, Job):
        stated = {name: value for name in Job.__struct_fields__[1:] if (value := getattr(model, name)) is not None}
        flags, model = {**flags, **stated}, model.model
    for name in flags:
        if name not in JOB_FIELDS:
            why = "is about the whole run, not a plan" if name in WHOLE_RUN else "is no field of a job to plan"
            raise ConfigError(why, key=name)
    request = PlanRequest.of(
        model.name if isinstance(model, ModelSpec) else str(model),
        {**flags, "objective": objective, "margin": margin or None, "price": price, "top": top},
    )
    return answer(request, *cases(request, spec))
