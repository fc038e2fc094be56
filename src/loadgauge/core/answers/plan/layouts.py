"""The answers of `loadgauge plan`: the best layouts and why others are slower; or the nearest miss, and what would make it fit."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.answers.estimate import Estimated
from loadgauge.core.answers.figures.lanes import MEANING
from loadgauge.core.answers.plan.progress import clear, progress, say, so_far, terminal
from loadgauge.core.answers.why.of_estimate import TOPICS
from loadgauge.core.base import NO, LayoutError, NothingFits, gib, need, seconds
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.advise.replan import Replanned, what_next, what_would_fit
from loadgauge.core.plan.answer import Plan, answer as find_plan
from loadgauge.core.plan.request import PlanRequest, cases as planned_cases
from loadgauge.core.plan.search import (
    Case,
    Objective,
    SearchResult,
    carried,
    first_look,
    search,
)
from loadgauge.core.plan.space.axis_values import out_of_reach, space_for
from loadgauge.core.resolve.reproduce import completer, documented, layout_flags
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup

CLOSE = 1e-4
"""Relative difference below which two step times count as equal."""
KINDS = (*MODEL_PARALLEL, "zero")
"""Axes that make two layouts of a different kind."""


class Planned(Answer, frozen=True, kw_only=True):
    """A plan: its layouts, single changes of the best one each planned again, and why another one is not the best."""

    form: str = "plan.layouts"
    writer: str = "loadgauge.core.text.plan.plan:write"
    topics: tuple[str, ...] = (*PARTS, *TOPICS)
    pivots: tuple[Pivot, ...] = (Pivot("Seconds of a step", "layouts.time.parts", "command", "parts"),)
    plan: Plan
    changes: Sequence[Replanned] = ()
    refused: Sequence[str] = ()

    def alternatives(self) -> list[tuple[str, Any]]:
        return [(change.flags, change.best) for change in self.changes]

    def why(self, topic: str) -> Answer:
        best = self.plan.best
        return Estimated.of(resolve_job(best.job), best.estimate).why(topic)

    def to_dict(self) -> dict[str, Any]:
        more: dict[str, Any] = {"why": why(self.plan.result), "why_not": self.refused}
        if self.plan.request.export is not None:
            more["export"] = need("DIALECTS").export_plan(self.plan, as_json=True)
        return self.plan.to_dict() | more | {"changes": _documents(self.changes, self.plan.complete)}


class Missed(Answer, frozen=True, kw_only=True):
    """The nearest miss where no layout fits, and what would make it fit."""

    form: str = "plan.layouts"
    writer: str = "loadgauge.core.text.plan.plan:write_missed"
    topics: tuple[str, ...] = (*PARTS, *TOPICS)
    error: NothingFits
    request: PlanRequest
    setup: Setup
    case: Case
    changes: Sequence[Replanned]

    @property
    def nearest(self) -> Estimate:
        """The layout that lacks least."""
        nearest = self.error.nearest
        assert isinstance(nearest, Estimate)
        return nearest

    def alternatives(self) -> list[tuple[str, Any]]:
        return [(change.flags, change.best) for change in self.changes]

    def why(self, topic: str) -> Answer:
        return Estimated.of(resolve_job(completer(self.setup.job)(self.nearest)), self.nearest).why(topic)

    def to_dict(self) -> dict[str, Any]:
        complete = completer(self.setup.job)
        return {
            "objective": self.request.objective,
            "margin": self.request.margin_bytes,
            "layouts": [],
            "pareto": [],
            "tighter": None,
            **self.error.counts,
            "out_of_reach": out_of_reach(self.case.space),
            "assumed": self.setup.assumed,
            "nearest": documented(self.nearest, complete),
            "missing": self.error.missing,
            "why": [],
            "why_not": [],
            "changes": _documents(self.changes, complete),
        }


def planned(request: PlanRequest) -> Answer:
    """Return the plan of a request, or where nothing fits the nearest miss; with progress on the terminal."""
    setup, cases = planned_cases(request)
    try:
        if terminal() and (look := first_look(cases, request.objective, request.margin_bytes)) is not None:
            so_far(f"{layout_flags(look)}: {seconds(look.timing.step)}")
        plan = find_plan(request, setup, cases, progress)
        best = plan.result.layouts[0]
        changes = what_next(plan.case, best, request.margin_bytes, request.objective, say) if request.what_next else []
        changes = _of_size(changes, cases, plan.case)
        refused = _why_not(plan) if request.why_not is not None else []
    except NothingFits as error:
        fitting = what_would_fit(cases, request.margin_bytes, request.objective, progress=say)
        changes = _of_size(fitting, cases, cases[-1])
        nearest: Any = error.nearest
        command, verdict = completer(setup.job)(nearest).command(), nearest.memory.verdict
        return Missed(
            error=error,
            request=request,
            setup=setup,
            case=cases[-1],
            changes=changes,
            command=command,
            verdict=verdict,
            code=NO,
            assumed=setup.assumed,
        )
    finally:
        clear()
    return Planned(
        plan=plan,
        changes=changes,
        refused=refused,
        command=plan.best.command(),
        verdict=best.memory.verdict,
        assumed=setup.assumed,
        not_counted=plan.best.estimate.not_counted,
    )


def _documents(changes: Sequence[Replanned], complete: Callable[[Estimate], Job]) -> list[dict[str, Any]]:
    """Changes for JSON, each with its command line."""
    return [change.to_dict() | {"command": complete(change.best).command()} for change in changes]


def why(result: SearchResult) -> list[str]:
    """Return why the runner-up is slower, and the best layout of another kind where the runner-up is of the same kind."""
    best = result.layouts[0]
    lines = [f"{layout_flags(other)}: {compare(best, other, result.objective)}" for other in result.layouts[1:2]]
    kind = [getattr(best.layout, name) for name in KINDS]
    others = (other for other in result.layouts if [getattr(other.layout, name) for name in KINDS] != kind)
    other = next(others, None)
    if other is not None and other is not result.layouts[1]:
        lines.append(f"{layout_flags(other)}: {compare(best, other, result.objective)}")
    return lines


def compare(best: Estimate, other: Estimate, objective: Objective) -> str:
    """Explain in one line where a layout takes more time than the best and where less, or what else decided."""
    own, theirs = best.timing, other.timing
    less = other.memory.total - best.memory.total
    if objective == "headroom" and less > 0:
        return f"needs {gib(less)} more"
    if objective != "time" and other.layout.gpus != best.layout.gpus:
        share = other.layout.gpus * theirs.step / (best.layout.gpus * own.step) - 1
        return f"takes {other.layout.gpus:,} GPUs, and {share:+.1%} GPU-hours"
    if objective == "network" and carried(other) > carried(best):
        return f"its network adapters carry {carried(other) / 1e9:,.2f} GB/s on average, not {carried(best) / 1e9:,.2f}"
    if objective == "goodput" and theirs.step <= own.step:
        return (
            f"its step is {1 - theirs.step / own.step:.1%} shorter, but a host that fails takes"
            f" {need('OBJECTIVES').replica(other):,} GPUs with it, not {need('OBJECTIVES').replica(best):,}"
        )
    more = theirs.step - own.step
    if abs(more) < CLOSE * own.step:
        word = f"needs {gib(less)} more" if less > 0 else "has more to set up"
        return f"as fast within 0.01 %, but {word}"
    changes = {lane: theirs.parts[lane] - own.parts[lane] for lane in own.parts}
    parts = [
        f"{seconds(abs(change))} {'more' if change > 0 else 'less'} in {re.split('[:,]', MEANING[lane])[0]}"
        for lane, change in sorted(changes.items(), key=lambda item: -abs(item[1]))[:3]
        if abs(change) > 0.02 * abs(more) and change
    ]
    first = f"{seconds(abs(more))} ({abs(more) / own.step:.1%}) {'slower' if more > 0 else 'faster'} a step"
    return f"{first}: {', '.join(parts)}"


def _why_not(plan: Plan) -> list[str]:
    """Why no layout with the values that the user asks about is the best: it is not valid, does not fit, or is slower."""
    result, narrow = plan.result, []
    for case in plan.cases:
        space = case.space
        kept = space_for(
            space.model,
            case.training,
            space.gpus,
            space.global_batch,
            space.seq_len,
            locks={**(case.locks or {}), **plan.request.why_not_locks},
            stage_layers=space.stage_layers,
            lengths=space.lengths,
            base=space.base,
        )
        narrow.append(msgspec.structs.replace(case, space=kept))
    say("why not")
    try:
        other = search(narrow, objective=result.objective, margin=result.margin, top=1, front=False).layouts[0]
    except (LayoutError, NothingFits) as error:
        return [str(error)]
    if other.layout == result.layouts[0].layout:
        return ["it is the best layout"]
    return [f"the best of them, {layout_flags(other)}: {compare(result.layouts[0], other, result.objective)}"]


def _of_size(changes: list[Replanned], cases: list[Case], case: Case) -> list[Replanned]:
    """Changes of one case; where several numbers of GPUs were asked about, the flags say which one it has."""
    if len(cases) == 1:
        return changes
    return [change._replace(flags=f"--gpus {case.space.gpus} {change.flags}") for change in changes]
