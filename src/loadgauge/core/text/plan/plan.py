"""A plan as text: the best layouts, why the others are slower, the Pareto front; or the nearest miss."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.answers.estimate import Estimated
from loadgauge.core.answers.why.of_estimate import TOPICS
from loadgauge.core.base import NO, ConfigError, LayoutError, NothingFits, gib, in_gib, need, seconds
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import DEGREES, MODEL_PARALLEL
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.advise.replan import Replanned, what_next, what_would_fit
from loadgauge.core.plan.answer import Plan, answer as find_plan
from loadgauge.core.plan.request import PlanRequest, cases as planned_cases, file_estimate
from loadgauge.core.plan.search import (
    Case,
    Objective,
    SearchResult,
    carried,
    cost_per_billion_tokens,
    first_look,
    search,
)
from loadgauge.core.plan.space.axis_values import out_of_reach, space_for
from loadgauge.core.resolve.reproduce import completer, documented, layout_flags
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup
from loadgauge.core.text.estimate.setup import print_assumed
from loadgauge.core.text.estimate.step_time import LANES
from loadgauge.core.text.plan.progress import clear, progress, say, so_far, terminal
from loadgauge.core.text.table import Column, Paper, console, draw, heading, points, show_command
from loadgauge.core.text.verdict import WORDS, question_words

CLOSE = 1e-4
"""Relative difference below which two step times count as equal."""
KINDS = (*MODEL_PARALLEL, "zero")
"""Axes that make two layouts of a different kind."""
LEAST = ("net GB/s", "tok/s/GPU", "MFU", "#", "cost/1B", "schedule")
"""Columns that a narrow terminal does without, the first ones first."""


class Planned(Answer, frozen=True, kw_only=True):
    """A plan: its layouts, single changes of the best one each planned again, and why another one is not the best."""

    form: str = "plan.layouts"
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

    def text(self, paper: Any, *, brief: bool = False) -> None:
        request = self.plan.request
        asked_more = request.why_not is not None or request.what_next
        if request.export is not None:
            if request.out is None and asked_more:
                raise ConfigError("only the file is written to the terminal; give --out", key="export")
            need("DIALECTS").export_plan(self.plan, as_json=False)
        if request.export is None or request.out is not None:
            show(paper, self.plan, self.changes, self.refused, brief=brief and not asked_more)

    def to_dict(self) -> dict[str, Any]:
        more: dict[str, Any] = {"why": why(self.plan.result), "why_not": self.refused}
        if self.plan.request.export is not None:
            more["export"] = need("DIALECTS").export_plan(self.plan, as_json=True)
        return self.plan.to_dict() | more | {"changes": _documents(self.changes, self.plan.complete)}


class Missed(Answer, frozen=True, kw_only=True):
    """The nearest miss where no layout fits, and what would make it fit."""

    form: str = "plan.layouts"
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

    def text(self, paper: Any, *, brief: bool = False) -> None:
        nearest = self.nearest
        nothing = self.verdict == "does not fit" or self.request.margin_bytes > 0
        word, style = ("NOTHING FITS", "bold red") if nothing else WORDS[nearest.memory.verdict]
        paper.print(f"{word}  {self.error}.", soft_wrap=True, style=style)
        points(paper, [f"The nearest: {layout_flags(nearest)}; its peak is {nearest.memory.moment}."], "")
        show_command(paper, self.command)
        if self.changes:
            change_table(paper, self.changes, "What would make it fit, each re-planned")
        else:
            heading(paper, "What would make it fit")
            points(
                paper, ["nothing that was tried: offload, an 8-bit optimizer, LoRA, QLoRA, more GPUs, half the length"]
            )
        if not brief:
            assumptions(paper, msgspec.structs.replace(self.setup, file=""))

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
            assert look.time is not None
            so_far(f"{layout_flags(look)}: {seconds(look.time.step)}")
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


def text(plan: Plan) -> str:
    """Return what `loadgauge plan` prints for a plan, as lines of at most 110 characters."""
    lines = StringIO()
    show(console(lines, 110), plan)
    return lines.getvalue().rstrip()


def _documents(changes: Sequence[Replanned], complete: Callable[[Estimate], Job]) -> list[dict[str, Any]]:
    """Changes for JSON, each with its command line."""
    return [change.to_dict() | {"command": complete(change.best).command()} for change in changes]


def show(
    target: Paper,
    plan: Plan,
    changes: Sequence[Replanned] = (),
    refused: Sequence[str] = (),
    *,
    brief: bool = False,
) -> None:
    """Print a plan: the best layouts, why others are slower, the Pareto front, and the assumptions; or the best alone."""
    request, result, price = plan.request, plan.result, plan.case.price
    shown = result.layouts[: request.top]
    asked = question_words(result.layouts[0].memory)
    for line in (*headline(result), *([asked] if asked else [])):
        points(target, [line], "")
    show_command(target, plan.best.command())
    own = file_estimate(request)
    if own is not None:
        points(target, [_of_file(own, result.layouts[0])], "")
    if brief:
        more = "--full: the best layouts, the front of memory and time, and what was assumed."
        points(target, [*why(result)[:1], more], "", style="dim")
        return
    table(target, shown, "The best layouts" if len(shown) > 1 else "The best layout", price=price)
    reasons = why(result)
    if reasons:
        heading(target, "Why the runner-up is slower" if len(reasons) == 1 else "Why the others are slower")
        points(target, reasons)
    if refused:
        heading(target, f"Why not {request.why_not}")
        points(target, refused)
    table(target, _thinned(result.pareto), "Pareto front: memory vs. step time", price=price)
    if changes:
        change_table(target, changes, "Single changes, each re-planned")
    beyond = out_of_reach(plan.case.space)
    if beyond:
        heading(target, "Out of reach for every layout")
        points(target, beyond)
    timed = f"{result.valid - result.bounded:,} timed, the rest ruled out by bounds"
    end = (
        f"{result.evaluated:,} combinations searched: {result.valid:,} valid,"
        f" {timed if result.counted is None else f'{result.counted:,} fit'}; {result.seconds:,.1f} s."
    )
    points(target, ["", end], "", style="dim")
    if result.moved:
        points(target, [f"Exact estimates changed the rank of {result.moved} of the best."], "", style="dim")
    assumptions(target, plan.setup)


def assumptions(target: Paper, setup: Setup) -> None:
    """Print the assumptions, and how a job file was read."""
    print_assumed(target, setup.assumed)
    if setup.file:
        points(target, ["", f"{setup.file}."], "", style="dim")


def headline(result: SearchResult) -> list[str]:
    """Return the best layout as flags, its step time, throughput and memory, and a better one that is TIGHT."""
    best = result.layouts[0]
    assert best.time is not None
    memory, time = best.memory, best.time
    assert memory.capacity is not None
    card = best.cluster.gpu.name if best.cluster is not None else ""
    longest = "" if result.cases[0].space.lengths is None else " with the longest sequences alone"
    gpus = f" --gpus {best.layout.gpus}" if len({case.space.gpus for case in result.cases}) > 1 else ""
    return [
        f"BEST  {layout_flags(best)}{gpus}",
        f"{best.model.name} on {best.layout.gpus:,} x {card}: a step of {best.layout.global_batch:,} sequences takes"
        f" {seconds(time.step)} ({seconds(time.low)} to {seconds(time.high)}), {time.tokens_per_second_per_gpu:,.0f}"
        f" tokens/s/GPU, MFU {time.mfu:.1%}; {in_gib(memory.total, 1)} of {gib(memory.capacity, 1)}"
        f"{longest}, {WORDS[memory.verdict][0]}.",
        *tighter(result),
    ]


def tighter(result: SearchResult) -> list[str]:
    """Return a line about a TIGHT layout that is better than the best, which fits; none where there is no such layout."""
    best, other = result.layouts[0], result.tighter
    if other is None or best.time is None or other.time is None or other.memory.capacity is None:
        return []
    gain = best.time.step / best.time.tokens / (other.time.step / other.time.tokens) - 1
    words = f"{gain:.1%} faster" if gain > CLOSE else f"Better by {result.objective}"
    gpus = f" --gpus {other.layout.gpus}" if other.layout.gpus != best.layout.gpus else ""
    room = f"{in_gib(other.memory.total, 1)} of {gib(other.memory.capacity, 1)}"
    return [f"{words}, {room}, {WORDS[other.memory.verdict][0]}: {layout_flags(other)}{gpus}"]


def _of_file(own: Estimate, best: Estimate) -> str:
    """How the layout of the user's job file compares with the best."""
    if own.time is None or best.time is None or own.memory.capacity is None:
        return ""
    memory = f"{gib(own.memory.total, 1)}"
    if own.memory.verdict == "does not fit":
        return f"Your file's layout does not fit: {layout_flags(own)} needs {memory}."
    speed = own.time.step / best.time.step * best.time.tokens / own.time.tokens
    than = f"the best is {speed:.2f} times as fast" if speed > 1 + CLOSE else "nothing is faster"
    return f"Your file's layout: {layout_flags(own)}, a step of {seconds(own.time.step)}, {memory}; {than}."


def table(target: Paper, results: Sequence[Estimate], title: str, *, price: float | None = None) -> None:
    """Print layouts, one per row, without axes that none uses; a narrow terminal drops the columns in `LEAST`."""
    every = [result.layout for result in results]
    several = len({layout.gpus for layout in every}) > 1
    cells: dict[str, list[str]] = {"#": [str(number) for number in range(1, len(every) + 1)]}
    if several:
        cells["GPUs"] = [f"{layout.gpus:,}" for layout in every]
    times = [result.time for result in results if result.time is not None]
    cells["step"] = [seconds(time.step) for time in times]
    cells["tok/s/GPU"] = [f"{time.tokens_per_second_per_gpu:,.0f}" for time in times]
    cells["MFU"] = [f"{time.mfu:.1%}" for time in times]
    cells["GiB"] = [in_gib(result.memory.total, 1) for result in results]
    if any(carried(result) for result in results):
        cells["net GB/s"] = [f"{carried(result) / 1e9:.3g}" for result in results]
    if len({result.memory.verdict for result in results}) > 1:
        cells["verdict"] = [WORDS[result.memory.verdict][0] for result in results]
    if price is not None:
        cells["cost/1B"] = [f"{cost_per_billion_tokens(price, result):,.2f}" for result in results]
    for name in ("dp", *DEGREES, "zero"):
        if any(getattr(layout, name) > int(name != "zero") for layout in every):
            cells[name] = [_degree(layout, name) for layout in every]
    cells["micro"] = [str(layout.micro_batch) for layout in every]
    cells["recompute"] = [str(layout.recompute) for layout in every]
    if any(layout.schedule not in ("1f1b", "interleaved") for layout in every):
        cells["schedule"] = [layout.schedule if layout.pp > 1 else "" for layout in every]
    rank = {name: len(LEAST) - place for place, name in enumerate(LEAST)}
    columns = [
        Column(name, "left" if name in ("verdict", "recompute", "schedule") else "right", rank=rank.get(name, 0))
        for name in cells
    ]
    draw(target, columns, list(zip(*cells.values(), strict=True)), title)


def _degree(layout: Any, name: str) -> str:
    value = str(getattr(layout, name))
    if name == "tp" and layout.sequence_parallel:
        return f"{value} sp"
    return f"{value} / {layout.replicas}" if name == "zero" and layout.replicas > 1 else value


def _thinned(results: Sequence[Estimate], most: int = 8) -> list[Estimate]:
    """Some of the front, both ends among them."""
    if len(results) <= most:
        return list(results)
    places = sorted({round(number * (len(results) - 1) / (most - 1)) for number in range(most)})
    return [results[place] for place in places]


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
    assert best.time is not None
    assert other.time is not None
    less = other.memory.total - best.memory.total
    if objective == "headroom" and less > 0:
        return f"needs {gib(less)} more"
    if objective != "time" and other.layout.gpus != best.layout.gpus:
        share = other.layout.gpus * other.time.step / (best.layout.gpus * best.time.step) - 1
        return f"takes {other.layout.gpus:,} GPUs, and {share:+.1%} GPU-hours"
    if objective == "network" and carried(other) > carried(best):
        return f"its network adapters carry {carried(other) / 1e9:,.2f} GB/s on average, not {carried(best) / 1e9:,.2f}"
    if objective == "goodput" and other.time.step <= best.time.step:
        return (
            f"its step is {1 - other.time.step / best.time.step:.1%} shorter, but a host that fails takes"
            f" {need('OBJECTIVES').replica(other):,} GPUs with it, not {need('OBJECTIVES').replica(best):,}"
        )
    more = other.time.step - best.time.step
    if abs(more) < CLOSE * best.time.step:
        word = f"needs {gib(less)} more" if less > 0 else "has more to set up"
        return f"as fast within 0.01 %, but {word}"
    changes = {lane: other.time.parts[lane] - best.time.parts[lane] for lane in best.time.parts}
    parts = [
        f"{seconds(abs(change))} {'more' if change > 0 else 'less'} in {re.split('[:,]', LANES[lane])[0]}"
        for lane, change in sorted(changes.items(), key=lambda item: -abs(item[1]))[:3]
        if abs(change) > 0.02 * abs(more) and change
    ]
    first = f"{seconds(abs(more))} ({abs(more) / best.time.step:.1%}) {'slower' if more > 0 else 'faster'} a step"
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
        other = search(narrow, objective=result.objective, margin=result.margin, top=1).layouts[0]
    except (LayoutError, NothingFits) as error:
        return [str(error)]
    if other.layout == result.layouts[0].layout:
        return ["it is the best layout"]
    return [f"the best of them, {layout_flags(other)}: {compare(result.layouts[0], other, result.objective)}"]


def change_table(target: Paper, changes: Sequence[Replanned], title: str) -> None:
    """Print changes of a job, one per row."""
    compared = any(change.speed is not None for change in changes)
    columns = [
        *([Column("tokens/s", "right")] if compared else []),
        Column("step", "right"),
        Column("GiB", "right"),
        Column("change"),
        Column("flags", wrap=True),
    ]
    rows = [
        [
            *([f"x {change.speed:.2f}"] if change.speed is not None else []),
            seconds(change.step),
            in_gib(change.best.memory.total, 1),
            change.what,
            change.flags,
        ]
        for change in changes
    ]
    draw(target, columns, rows, title)


def _of_size(changes: list[Replanned], cases: list[Case], case: Case) -> list[Replanned]:
    """Changes of one case; where several numbers of GPUs were asked about, the flags say which one it has."""
    if len(cases) == 1:
        return changes
    return [change._replace(flags=f"--gpus {case.space.gpus} {change.flags}") for change in changes]
