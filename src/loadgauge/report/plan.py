"""A plan, told: the best layouts, why the others lost, the Pareto front; or the nearest miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.errors import ConfigError, LayoutError, NothingFits
from loadgauge.estimate.result import Estimate
from loadgauge.plan.axis_values import out_of_reach, space_for
from loadgauge.plan.changes import Change, what_next, what_would_fit
from loadgauge.plan.plan import Case, Objective, Plan, carried, plan
from loadgauge.report.progress import clear, progress, say
from loadgauge.report.step_time import LANES
from loadgauge.report.table import GLUE, Column, console, document, draw, heading, points
from loadgauge.resolve.reproduce import completer, documented, layout_flags, show_command
from loadgauge.resolve.setup import Setup
from loadgauge.spec.axes import DEGREES, MODEL_PARALLEL
from loadgauge.units import GIB, seconds

if TYPE_CHECKING:
    from rich.console import Console

CLOSE = 1e-4
"""Relative difference of two steps that are called as fast as each other."""
KINDS = (*MODEL_PARALLEL, "zero")
"""Axes by which two layouts are of another kind."""
KEPT = 20
LEAST = ("tok/s/GPU", "MFU", "#", "cost/1B", "schedule")
"""Columns that a narrow terminal does without, the first ones first."""


def answer(given: Setup, cases: list[Case], asked: dict[str, Any], *, as_json: bool) -> int:
    """Plans and prints; the exit code."""
    if (
        asked["export"] is not None
        and asked["out"] is None
        and not as_json
        and (asked["why_not"] or asked["what_next"])
    ):
        raise ConfigError("only the file is written to the terminal; give --out", key="export")
    try:
        result = plan(
            cases, objective=asked["objective"], margin=asked["margin"], top=max(asked["top"], KEPT), progress=progress
        )  # fmt: skip
    except NothingFits as error:
        clear()
        return _nothing(error, given, cases, asked, as_json=as_json)
    finally:
        clear()
    best = result.layouts[0]
    case = next(case for case in cases if case.space.gpus == best.layout.gpus)
    changes = what_next(case, best, asked["margin"], asked["objective"], say) if asked["what_next"] else []
    changes = _of_size(changes, cases, case)
    refused = _why_not(result, cases, asked) if asked["why_not"] else []
    clear()
    written = None
    if asked["export"] is not None:
        from loadgauge.report.export import exported

        written = exported(given, case, best, asked, as_json=as_json)
    if as_json:
        document(_plain(given, result, changes, refused, asked) | ({} if written is None else {"export": written}))
        return 0
    if written is not None and asked["out"] is None:
        return 0
    _told(given, case, result, changes, refused, asked)
    return 0


def _plain(
    given: Setup, found: Plan, changes: list[Change], refused: list[str], asked: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    complete = completer(given.job)
    return {
        "objective": found.objective,
        "margin": found.margin,
        "layouts": [documented(result, complete) for result in found.layouts[: asked["top"]]],
        "pareto": [documented(result, complete) for result in found.pareto],
        "evaluated": found.evaluated,
        "valid": found.valid,
        "fitting": found.fitting,
        "seconds": found.seconds,
        "why": why(found),
        "why_not": refused,
        "out_of_reach": out_of_reach(found.cases[-1].space),
        "changes": [change.to_dict() | {"command": complete(change.best).command()} for change in changes],
        "assumed": asked["assumed"],
    }


def _told(
    given: Setup, case: Case, found: Plan, changes: list[Change], refused: list[str], asked: dict[str, Any]
) -> None:  # fmt: skip
    target = console()
    shown = found.layouts[: asked["top"]]
    for line in headline(found):
        points(target, [line], "")
    show_command(target, completer(given.job)(found.layouts[0]).command())
    if asked["as_given"] is not None:
        points(target, [_as_given(asked["as_given"], found.layouts[0])], "")
    table(target, shown, "The best layouts" if len(shown) > 1 else "The best layout", price=case.price)
    reasons = why(found)
    if reasons:
        heading(target, "Why the second one lost" if len(reasons) == 1 else "Why others lost")
        points(target, reasons)
    if refused:
        heading(target, f"Why not {asked['why_not']}")
        points(target, refused)
    table(target, _thinned(found.pareto), "Less memory for more time: the Pareto front", price=case.price)
    if changes:
        change_table(target, changes, "What to change next, each planned anew")
    beyond = out_of_reach(case.space)
    if beyond:
        heading(target, "What no layout can have")
        points(target, beyond)
    end = (
        f"{found.evaluated:,} combinations looked at, {found.valid:,} layouts can exist, {found.fitting:,} fit;"
        f" {found.seconds:,.1f} s."
    )
    points(target, ["", end], "", style="dim")
    if found.moved:
        points(target, [f"Estimated one by one, {found.moved} of the first took another place."], "", style="dim")
    assumed(target, asked, given)


def assumed(target: Console, asked: dict[str, Any], given: Setup | None = None) -> None:
    """What the user did not say, and what of a job file says nothing here."""
    if asked["assumed"]:
        heading(target, "Assumed, as you did not say")
        glued = (f"{flag} {value}".replace(" ", GLUE) for flag, value in asked["assumed"].items())
        points(target, [", ".join(glued)], "")
    if given is not None and given.file:
        points(target, ["", f"{given.file}."], "", style="dim")


def headline(found: Plan) -> list[str]:
    """The best layout as flags, and what it takes."""
    best = found.layouts[0]
    assert best.time is not None
    memory, time = best.memory, best.time
    assert memory.capacity is not None
    card = best.cluster.gpu.name if best.cluster is not None else ""
    longest = "" if found.cases[0].space.lengths is None else " with the longest sequences alone"
    gpus = f" --gpus {best.layout.gpus}" if len({case.space.gpus for case in found.cases}) > 1 else ""
    return [
        f"BEST  {layout_flags(best)}{gpus}",
        f"{best.model.name} on {best.layout.gpus:,} x {card}: a step of {best.layout.global_batch:,} sequences takes"
        f" {seconds(time.step)} ({seconds(time.low)} to {seconds(time.high)}), {time.tokens_per_second_per_gpu:,.0f}"
        f" tokens/s/GPU, MFU {time.mfu:.1%}; {memory.total / GIB:,.1f} of {memory.capacity / GIB:,.1f} GiB"
        f"{longest} ({memory.verdict}).",
    ]


def _as_given(own: Estimate, best: Estimate) -> str:
    """How the layout that the user's job file has compares."""
    if own.time is None or best.time is None or own.memory.capacity is None:
        return ""
    memory = f"{own.memory.total / GIB:,.1f} GiB"
    if not own.memory.fits:
        return f"As the file has it, it does not fit: {layout_flags(own)} needs {memory}."
    speed = own.time.step / best.time.step * best.time.tokens / own.time.tokens
    than = f"the best is {speed:.2f} times as fast" if speed > 1 + CLOSE else "nothing is faster"
    return f"As the file has it: {layout_flags(own)}, a step of {seconds(own.time.step)}, {memory}; {than}."


def table(
    target: Console, results: tuple[Estimate, ...] | list[Estimate], title: str, *, price: float | None = None
) -> None:
    """Layouts, one a row; axes that none of them uses are left out, and what can be told from the rest where it is narrow."""
    every = [result.layout for result in results]
    several = len({layout.gpus for layout in every}) > 1
    cells: dict[str, list[str]] = {"#": [str(number) for number in range(1, len(every) + 1)]}
    if several:
        cells["GPUs"] = [f"{layout.gpus:,}" for layout in every]
    times = [result.time for result in results if result.time is not None]
    cells["step"] = [seconds(time.step) for time in times]
    cells["tok/s/GPU"] = [f"{time.tokens_per_second_per_gpu:,.0f}" for time in times]
    cells["MFU"] = [f"{time.mfu:.1%}" for time in times]
    cells["GiB"] = [f"{result.memory.total / GIB:,.1f}" for result in results]
    if price is not None:
        costs = [
            price * time.step * layout.gpus / 3600 / time.tokens * 1e9
            for time, layout in zip(times, every, strict=True)
        ]
        cells["cost/1B"] = [f"{cost:,.2f}" for cost in costs]
    for name in ("dp", *DEGREES, "zero"):
        if any(getattr(layout, name) > int(name != "zero") for layout in every):
            cells[name] = [_degree(layout, name) for layout in every]
    cells["micro"] = [str(layout.micro_batch) for layout in every]
    cells["recompute"] = [str(layout.recompute) for layout in every]
    if any(layout.schedule not in ("1f1b", "interleaved") for layout in every):
        cells["schedule"] = [layout.schedule if layout.pp > 1 else "" for layout in every]
    rank = {name: len(LEAST) - place for place, name in enumerate(LEAST)}
    columns = [
        Column(name, "left" if name in ("recompute", "schedule") else "right", rank=rank.get(name, 0)) for name in cells
    ]
    draw(target, columns, list(zip(*cells.values(), strict=True)), title)


def _degree(layout: Any, name: str) -> str:
    value = str(getattr(layout, name))
    if name == "tp" and layout.sequence_parallel:
        return f"{value} sp"
    return f"{value} / {layout.replicas}" if name == "zero" and layout.replicas > 1 else value


def _thinned(results: tuple[Estimate, ...], most: int = 8) -> list[Estimate]:
    """Some of the front, both ends among them."""
    if len(results) <= most:
        return list(results)
    places = sorted({round(number * (len(results) - 1) / (most - 1)) for number in range(most)})
    return [results[place] for place in places]


def why(found: Plan) -> list[str]:
    """Why the second layout lost, and the best one of another kind where the second is of the same."""
    best = found.layouts[0]
    lines = [f"{layout_flags(other)}: {lost(best, other, found.objective)}" for other in found.layouts[1:2]]
    kind = [[getattr(result.layout, name) for name in KINDS] for result in found.layouts]
    other = next((place for place in range(1, len(kind)) if kind[place] != kind[0]), 1)
    if other > 1:
        lines.append(f"{layout_flags(found.layouts[other])}: {lost(best, found.layouts[other], found.objective)}")
    return lines


def lost(best: Estimate, other: Estimate, objective: Objective) -> str:
    """What a layout spends more time on than the best, and what less; its memory where that decided."""
    assert best.time is not None
    assert other.time is not None
    less = other.memory.total - best.memory.total
    if objective == "headroom" and less > 0:
        return f"needs {less / GIB:,.2f} GiB more"
    if objective != "time" and other.layout.gpus != best.layout.gpus:
        share = other.layout.gpus * other.time.step / (best.layout.gpus * best.time.step) - 1
        return f"takes {other.layout.gpus:,} GPUs, and {share:+.1%} GPU-hours"
    if objective == "network" and carried(other) > carried(best):
        return f"its adapters carry {carried(other) / 1e9:,.2f} GB/s in the mean, and not {carried(best) / 1e9:,.2f}"
    more = other.time.step - best.time.step
    if abs(more) < CLOSE * best.time.step:
        word = f"needs {less / GIB:,.2f} GiB more" if less > 0 else "has more to set up"
        return f"as fast within 0.01 %, but {word}"
    changes = {lane: other.time.parts[lane] - best.time.parts[lane] for lane in best.time.parts}
    parts = [
        f"{seconds(abs(change))} {'more' if change > 0 else 'less'} in {LANES[lane]}"
        for lane, change in sorted(changes.items(), key=lambda item: -abs(item[1]))[:3]
        if abs(change) > 0.02 * abs(more) and change
    ]
    first = f"{seconds(abs(more))} ({abs(more) / best.time.step:.1%}) {'slower' if more > 0 else 'faster'} a step"
    return f"{first}: {', '.join(parts)}"


def _why_not(found: Plan, cases: list[Case], asked: dict[str, Any]) -> list[str]:
    """Why no layout with the values that the user asks about is the best: it cannot exist, does not fit, or loses."""
    locks = asked["why_not_locks"]
    narrow = []
    for case in cases:
        space = case.space
        kept = space_for(
            space.model, case.training, space.gpus, space.global_batch, space.seq_len, locks={**(case.locks or {}), **locks},
            stage_layers=space.stage_layers, lengths=space.lengths, base=space.base,
        )  # fmt: skip
        narrow.append(msgspec.structs.replace(case, space=kept))
    say("why not")
    try:
        other = plan(narrow, objective=found.objective, margin=found.margin, top=1).layouts[0]
    except (LayoutError, NothingFits) as error:
        return [str(error)]
    if other.layout == found.layouts[0].layout:
        return ["it is the best layout"]
    return [f"the best of them, {layout_flags(other)}: {lost(found.layouts[0], other, found.objective)}"]


def change_table(target: Console, changes: list[Change], title: str) -> None:
    """Changes of a job, one a row."""
    compared = any(change.speed is not None for change in changes)
    columns = [
        *([Column("tokens/s", "right")] if compared else []), Column("step", "right"), Column("GiB", "right"),
        Column("change"), Column("flags", wrap=True),
    ]  # fmt: skip
    rows = [
        [
            *([f"x {change.speed:.2f}"] if change.speed is not None else []), seconds(change.step),
            f"{change.best.memory.total / GIB:,.1f}", change.what, change.flags,
        ]
        for change in changes
    ]  # fmt: skip
    draw(target, columns, rows, title)


def _of_size(changes: list[Change], cases: list[Case], case: Case) -> list[Change]:
    """Changes of one case; where several numbers of GPUs were asked about, the flags say which one it has."""
    if len(cases) == 1:
        return changes
    return [change._replace(flags=f"--gpus {case.space.gpus} {change.flags}") for change in changes]


def _nothing(error: NothingFits, given: Setup, cases: list[Case], asked: dict[str, Any], *, as_json: bool) -> int:
    """The nearest miss and what would make it fit; exit code 1."""
    nearest: Any = error.nearest
    complete = completer(given.job)
    changes = _of_size(what_would_fit(cases, asked["margin"], asked["objective"], progress=say), cases, cases[-1])
    clear()
    if as_json:
        document(
            {
                "objective": asked["objective"], "layouts": [], "pareto": [], "nearest": documented(nearest, complete),
                "missing": error.missing,
                "changes": [change.to_dict() | {"command": complete(change.best).command()} for change in changes],
                "assumed": asked["assumed"],
            }
        )  # fmt: skip
        return 1
    target = console()
    target.print(f"NOTHING FITS  {error}.", soft_wrap=True, style="bold red")
    points(target, [f"The nearest: {layout_flags(nearest)}; its peak is {nearest.memory.moment}."], "")
    show_command(target, complete(nearest).command())
    if changes:
        change_table(target, changes, "What would make it fit, each planned")
    else:
        heading(target, "What would make it fit")
        points(target, ["nothing that was tried: offload, an 8-bit optimizer, LoRA, QLoRA, more GPUs, half the length"])
    assumed(target, asked)
    return 1
