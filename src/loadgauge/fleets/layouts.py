"""The layout of a fleet's run: the one that a job states, or the one with the most goodput."""

from collections.abc import Callable
from typing import Any

import msgspec

from loadgauge.core.base.errors import refuse
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import DEGREES
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.answer import answer
from loadgauge.core.plan.request import JOB_FIELDS, OPEN_AXES, PlanRequest, cases
from loadgauge.core.resolve.reproduce import layout_flags
from loadgauge.core.resolve.resolve import asks_for_files, resolve_job
from loadgauge.fleets.fleet import Options

DECIDES = (*DEGREES, "zero", "micro_batch")
"""Fields of a layout; where one is given, none is searched."""
Say = Callable[[str], object]


def _quiet(text: str) -> None:
    """Report no progress."""


def chosen(job: Job, options: dict[str, Any], say: Say = _quiet) -> tuple[Estimate, dict[str, str], str]:
    """Return the estimate of a job, what it assumes, and how its layout was found (empty where it was stated).

    options: fields of `Options`; say: told of progress. Raises `ConfigError` without the number of GPUs.
    """
    if asks_for_files(job) or any(getattr(job, name) is not None for name in DECIDES):
        setup = resolve_job(job)
        return setup.estimate(), dict(setup.assumed), ""
    fields = {name: getattr(job, name) for name in JOB_FIELDS if getattr(job, name) is not None}
    refuse(job.gpus is None, "is missing: the GPUs of the job", key="gpus")
    request = PlanRequest.of(job.model, {**fields, "gpus": str(job.gpus), "objective": "goodput"})
    return most_goodput(request, Options(**options), say)


def most_goodput(request: PlanRequest, options: Options, say: Say = _quiet) -> tuple[Estimate, dict[str, str], str]:
    """Return the layout with the most goodput, what it assumes, and how it was found."""
    say("searching layouts")
    setup, searches = cases(request)
    plan = answer(request, setup, [msgspec.structs.replace(case, fleet=options) for case in searches])
    best, first = plan.result.layouts[0], plan.result.pareto[0]
    way = f"The best of {plan.result.valid:,} layouts"
    if best.layout == first.layout:
        way += ", by its step and by goodput alike."
    else:
        way += (
            f" by goodput: {layout_flags(best)}; the fastest step, {first.timing.step / best.timing.step - 1:+.1%}, has"
            f" {layout_flags(first)}."
        )
    assumed = {
        flag: value for flag, value in plan.setup.assumed.items() if flag.lstrip("-").replace("-", "_") not in OPEN_AXES
    }
    return best, assumed, way
