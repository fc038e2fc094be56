"""A plan as text: the best layouts, why the others are slower, the Pareto front; or the nearest miss."""

from collections.abc import Sequence
from typing import Any

import msgspec

from loadgauge.core.answers.plan.layouts import CLOSE, Missed, Planned, why
from loadgauge.core.base import ConfigError, gib, in_gib, need, seconds
from loadgauge.core.definitions.layout.axes import DEGREES
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.advise.replan import Replanned
from loadgauge.core.plan.answer import Plan
from loadgauge.core.plan.batch.best import SLOWEST
from loadgauge.core.plan.request import file_estimate
from loadgauge.core.plan.search import (
    SearchResult,
    carried,
    cost_per_billion_tokens,
)
from loadgauge.core.plan.space.axis_values import out_of_reach
from loadgauge.core.resolve.reproduce import layout_flags
from loadgauge.core.resolve.setup import Setup
from loadgauge.core.text.estimate.setup import batch_words, print_assumed, rate, unit
from loadgauge.core.text.table import (
    ABOVE,
    SCREEN,
    Column,
    Paper,
    draw,
    first_line,
    height,
    plain,
    points,
    section,
    show_command,
)
from loadgauge.core.text.verdict import WORDS, question_words

LEAST = ("net GB/s", "speed", "MFU", "#", "cost/1B", "schedule")
"""Columns that a narrow terminal does without, the first ones first."""


def text(plan: Plan) -> str:
    """Return what `loadgauge plan` prints for a plan, as lines of at most 110 characters."""
    return plain(lambda target: show(target, plan), 110).rstrip()


def write(answer: Planned, target: Paper, *, brief: bool = False) -> None:
    """Write a plan, or the job file that is asked for in its place."""
    request = answer.plan.request
    asked_more = request.why_not is not None or request.what_next
    if request.export is not None:
        if request.out is None and asked_more:
            raise ConfigError("only the file is written to the terminal; give --out", key="export")
        need("DIALECTS").export_plan(answer.plan, as_json=False)
    if request.export is None or request.out is not None:
        show(target, answer.plan, answer.changes, answer.refused, brief=brief and not asked_more)


def write_missed(answer: Missed, target: Paper, *, brief: bool = False) -> None:
    """Write the nearest miss, and what would make it fit; brief: without what was assumed."""
    nearest = answer.nearest
    nothing = answer.verdict == "does not fit" or answer.request.margin_bytes > 0
    word, style = ("NOTHING FITS", "bold red") if nothing else WORDS[nearest.memory.verdict]
    first_line(target, f"{word}  {answer.error}.", word, style)
    points(target, [f"The nearest: {layout_flags(nearest)}; its peak is {nearest.memory.moment}."], "")
    if not brief:
        show_command(target, answer.command)
    if answer.changes:
        change_table(target, answer.changes, "What would make it fit, each re-planned")
    else:
        tried = "nothing that was tried: offload, an 8-bit optimizer, LoRA, QLoRA, more GPUs, half the length"
        section(target, "What would make it fit", [tried])
    if not brief:
        assumptions(target, msgspec.structs.replace(answer.setup, file=""))


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
    points(target, told := [*headline(result), *([asked] if asked else [])], "")
    show_command(target, command := plan.best.command())
    own = file_estimate(request)
    if own is not None:
        points(target, [_of_file(own, result.layouts[0])], "")
    if brief:
        more = "--full: the best layouts, the front of memory and time, and what was assumed."
        slower = [line for line in why(result)[:1] if height([*ABOVE, *told, "", command, line, more]) <= SCREEN]
        points(target, [*slower, more], "", style="dim")
        return
    table(target, shown, "The best layouts" if len(shown) > 1 else "The best layout", price=price)
    reasons = why(result)
    section(target, f"Why the {'runner-up is' if len(reasons) == 1 else 'others are'} slower", reasons)
    section(target, f"Why not {request.why_not}", refused)
    until = f", up to {SLOWEST:g} x the fastest's" if plan.case.space.narrowed else ""
    table(target, _thinned(result.pareto), f"Pareto front: memory vs. step time{until}", price=price)
    if changes:
        change_table(target, changes, "Single changes, each re-planned")
    section(target, "Out of reach for every layout", out_of_reach(plan.case.space))
    timed = f"{result.valid - result.bounded:,} timed, the rest ruled out by bounds"
    end = (
        f"{result.evaluated:,} combinations searched: {result.valid:,} valid,"
        f" {timed if result.counted is None else f'{result.counted:,} fit'}; {result.seconds:,.1f} s"
        f"{', kept from before (--no-cache searches again)' if result.stored.found else ''}."
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
        f"{best.model.name} on {best.layout.gpus:,} x {card}: a step of {_batch(best)} takes"
        f" {seconds(time.step)} ({seconds(time.low)} to {seconds(time.high)}), {rate(time.tokens_per_second_per_gpu)}"
        f" {unit(best.model)}/s/GPU, MFU {time.mfu:.1%}; {in_gib(memory.total, 1)} of {gib(memory.capacity, 1)}"
        f"{longest}, {WORDS[memory.verdict][0]}.",
        *tighter(result),
    ]


def _batch(best: Estimate) -> str:
    rows = best.layout.global_batch
    return f"{rows:,} sequence{'s' * (rows > 1)}" if best.model.own.has_length else batch_words(best.model, rows, 1)


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
    every, memories = [result.layout for result in results], [result.memory for result in results]
    times = [result.time for result in results if result.time is not None]
    degrees = [n for n in ("dp", *DEGREES, "zero") if any(getattr(layout, n) > int(n != "zero") for layout in every)]
    hosted = [result.training.host.activations for result in results]
    own_schedule = any(layout.schedule not in ("1f1b", "interleaved") for layout in every)
    counted = {unit(result.model) for result in results}
    speed = "tok/s/GPU" if counted == {"tokens"} else f"{counted.pop()}/s/GPU" if len(counted) == 1 else "per s/GPU"
    cells: dict[str, list[str]] = {
        "#": [str(number) for number in range(1, len(every) + 1)],
        "GPUs": [f"{layout.gpus:,}" for layout in every] if len({layout.gpus for layout in every}) > 1 else [],
        "step": [seconds(time.step) for time in times],
        speed: [rate(time.tokens_per_second_per_gpu) for time in times],
        "MFU": [f"{time.mfu:.1%}" for time in times],
        "GiB": [in_gib(memory.total, 1) for memory in memories],
        "net GB/s": [f"{carried(result) / 1e9:.3g}" for result in results] if any(map(carried, results)) else [],
        "verdict": [WORDS[memory.verdict][0] for memory in memories]
        if len({memory.verdict for memory in memories}) > 1
        else [],
        "cost/1B": [] if price is None else [f"{cost_per_billion_tokens(price, result):,.2f}" for result in results],
        **{name: [_degree(layout, name) for layout in every] for name in degrees},
        "micro": [str(layout.micro_batch) for layout in every],
        "recompute": [str(layout.recompute) for layout in every],
        "off the card": hosted if any(word != "none" for word in hosted) else [],
        "schedule": [layout.schedule if layout.pp > 1 else "" for layout in every] if own_schedule else [],
    }
    cells = {name: column for name, column in cells.items() if column}
    rank = {speed if name == "speed" else name: len(LEAST) - index for index, name in enumerate(LEAST)}
    draw(
        target,
        [
            Column(
                name,
                "left" if name in ("verdict", "recompute", "off the card", "schedule") else "right",
                rank=rank.get(name, 0),
            )
            for name in cells
        ],
        list(zip(*cells.values(), strict=True)),
        title,
    )


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
    return [results[index] for index in places]


def change_table(target: Paper, changes: Sequence[Replanned], title: str) -> None:
    """Print changes of a job, one per row."""
    compared = any(change.speed is not None for change in changes)
    draw(
        target,
        [
            *([Column("tokens/s", "right")] if compared else []),
            Column("step", "right"),
            Column("GiB", "right"),
            Column("change"),
            Column("flags", wrap=True),
        ],
        [
            [
                *([f"x {change.speed:.2f}"] if change.speed is not None else []),
                seconds(change.step),
                in_gib(change.best.memory.total, 1),
                change.what,
                change.flags,
            ]
            for change in changes
        ],
        title,
    )
