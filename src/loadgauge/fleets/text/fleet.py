"""The text of `loadgauge fleet`: the verdict, the reason and the next step, then where the time goes."""

from typing import Any

import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.answers.plan.progress import clear, say
from loadgauge.core.base import ConfigError, count, days_words, exit_code, gib, seconds
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.time.cost import HOUR
from loadgauge.core.plan.request import PlanRequest, fleet_options
from loadgauge.core.resolve.reproduce import layout_flags
from loadgauge.core.text.estimate.setup import layout_words, print_assumed
from loadgauge.core.text.table import Column, Paper, draw, first_line, points, section
from loadgauge.core.text.verdict import question_words
from loadgauge.fleets.fleet import NOT_COUNTED, Fleet, Options, fleet
from loadgauge.fleets.layouts import chosen, most_goodput
from loadgauge.fleets.text import fleet_sites
from loadgauge.fleets.text.fleet_reasons import reason
from loadgauge.fleets.what_if import FEW, Change, best_interval, best_spares, changed, most_oversubscription

SLACK = 0.01
"""Extra time that the most oversubscription, or the most sites, may cost."""


def _chosen(job: Job, options: dict[str, Any]) -> tuple[Estimate, dict[str, str], str]:
    """The run of a job, found with progress on the terminal."""
    try:
        return chosen(job, options, say)
    finally:
        clear()


def simulated(job: Job, options: dict[str, Any], what_if: bool) -> Answer:
    """Simulate the run of a job; its code is 1 where its step does not fit."""
    result, assumed, searched = _chosen(job, options)
    run = fleet(result, job.tokens or "", Options(**options), price=job.price)
    verdict, assumed = result.memory.verdict, assumed | run.assumed

    def document() -> dict[str, Any]:
        plain = run.to_dict() | {"assumed": assumed, "layout_flags": layout_flags(result)}
        if what_if:
            plain["what_if"] = [
                {
                    "flags": change.flags,
                    "what": change.what,
                    "days": change.fleet.days[1],
                    "goodput": change.fleet.goodput[1],
                    "gpu_hours": change.fleet.gpu_hours,
                }
                for change in changed(run)
            ]
        return plain

    return Answer(
        form="fleet.run",
        writer="loadgauge.fleets.text.fleet:write",
        explains=lambda topic: reason(run, topic),
        pivots=(Pivot("Where the time goes", "shares", "of", "shares"),),
        tried=lambda: [(change.flags, change.fleet) for change in changed(run)],
        shown=(run, searched, what_if),
        document=document,
        verdict=verdict,
        code=exit_code(verdict),
        assumed=assumed,
        not_counted=NOT_COUNTED,
        command=job.command("fleet"),
    )


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write a simulated run; brief: the verdict, what is lost, and the next step"""
    run, searched, what_if = answer.shown
    changes = list(changed(run))
    _verdict(target, run, searched, changes)
    if brief:
        return
    _where(target, run)
    _tiers(target, run)
    if what_if:
        _what_if(target, run, changes)
    print_assumed(target, answer.assumed)
    section(target, "Not counted", answer.not_counted)


def verdict(run: Fleet) -> str:
    """Return the first line: goodput, days and their range."""
    low, middle, high = run.days
    least, share, most = run.goodput
    gpu = run.estimate.gpu
    spare = f" and {run.run.spares * run.run.node:,} spare" if run.run.spares else ""
    return (
        f"{days_words(middle).upper()}  {run.estimate.model.name}, {count(run.tokens)} tokens on {run.run.gpus:,}{spare} x"
        f" {gpu or 'GPU'}: 80 % of runs take {days_words(low)} to {days_words(high)},"
        f" goodput {share:.1%} ({least:.1%} to {most:.1%})"
    )


def _verdict(target: Paper, result: Fleet, searched: str, changes: list[Change]) -> None:
    line = verdict(result)
    first_line(target, line, line.partition("  ")[0], "bold")
    run, layout = result.run, result.estimate.layout
    steps = result.tokens / (result.tokens / run.work * result.step)
    lines = [f"{searched} {layout_words(layout)}; a step of {seconds(result.step)}.".strip()]
    lines.append(
        f"{steps:,.0f} steps alone take {days_words(run.work / 86_400)}; {count(result.tokens_per_second)} tokens/s of progress."
    )
    memory = result.estimate.memory
    if memory.fits is False and memory.capacity is not None:
        size = f"{gib(memory.total, 1)} of {gib(memory.capacity, 1)}"
        fits = {
            "tight": f"IS TIGHT: {size}; it may run out of memory (loadgauge estimate shows the range).",
            "depends": f"DEPENDS: {size}; {question_words(memory)}",
        }.get(memory.verdict, f"DOES NOT FIT: {size}; what follows cannot be run.")
        lines.insert(0, f"THE STEP {fits}")
    low, middle, high = result.interruptions
    if middle or high:
        every = result.days[1] * 24 / max(middle, 1)
        between = f"{every:,.1f} h" if every >= 2 else f"{60 * every:,.0f} min"
        lines.append(
            f"{middle:,.0f} interruptions ({low:,.0f} to {high:,.0f}), one in {between}: {result.failures.name}."
        )
    lost = sorted(((share, name) for name, share in result.names.items() if name != "progress"), reverse=True)[:3]
    words = ", ".join(f"{name} {share:.1%}" for share, name in lost if share >= 0.0005)
    if words:
        lines.append(f"Most of what is lost: {words}.")
    money = "" if result.price is None else f", {result.price * result.gpu_hours:,.0f} at {result.price:g} each"
    energy = "" if result.kilowatt_hours is None else f"; at most {result.kilowatt_hours / 1e3:,.3g} MWh"
    lines.append(f"{count(result.gpu_hours)} GPU-hours{money}{energy}.")
    better = min(changes, key=lambda change: change.fleet.gpu_hours, default=None)
    if better is not None and better.fleet.gpu_hours < 0.998 * result.gpu_hours:
        gain = 1 - better.fleet.gpu_hours / result.gpu_hours
        lines.append(f"Next: {better.what} ({better.flags}) saves {gain:.1%} of the GPU-hours.")
    else:
        lines.append("Next: no single change of checkpoints, spares or recovery saves 0.2 % of the GPU-hours.")
    points(target, lines, "")


def _where(target: Paper, result: Fleet) -> None:
    names = result.names
    hours = float(result.outcome.seconds.mean()) / HOUR * result.gpus
    rows = [[name, f"{share:.2%}", count(share * hours)] for name, share in names.items() if share > 5e-6]
    rows.append(["all", "100%", count(hours)])
    draw(
        target,
        [Column("a second of a GPU is"), Column("share", "right"), Column("GPU-hours", "right")],
        rows,
        f"Where the time goes (mean of {result.options.runs:,} runs)",
        [len(rows) - 1],
    )


def _tiers(target: Paper, result: Fleet) -> None:
    if result.load:
        draw(
            target,
            [
                Column("tier"),
                Column("GPUs", "right"),
                Column("GB/s a GPU", "right"),
                Column("narrower by", "right"),
                Column("GB a step", "right"),
                Column("busy", "right"),
                Column("axes", wrap=True),
            ],
            [
                [
                    load.tier,
                    f"{load.span:,}",
                    f"{load.bandwidth / 1e9:,.3g}",
                    f"{load.oversubscription:.3g}",
                    f"{load.carried / 1e9:.3g}",
                    f"{load.busy:.1%}",
                    ", ".join(load.axes),
                ]
                for load in result.load
            ],
            "How busy a GPU's share of each tier is in a step",
        )


def _what_if(target: Paper, base: Fleet, changes: list[Change]) -> None:
    columns = [
        Column("with"),
        Column("days", "right"),
        Column("goodput", "right"),
        Column("GPU-hours", "right"),
        Column("change", "right"),
        Column("flags", wrap=True),
    ]

    def row(name: str, changed_run: Fleet, flags: str) -> list[str]:
        change = changed_run.gpu_hours / base.gpu_hours - 1
        return [
            name,
            f"{changed_run.days[1]:,.1f}",
            f"{changed_run.goodput[1]:.1%}",
            count(changed_run.gpu_hours),
            f"{change:+.1%}" if changed_run is not base else "",
            flags,
        ]

    draw(
        target,
        columns,
        [row("the run as it is", base, ""), *(row(change.what, change.fleet, change.flags) for change in changes)],
        "What if",
        [0],
    )


def write_sought(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the answer to an inverse question; brief: without what was tried"""
    head, searched, names, tried, best = answer.shown
    target.print(head, style="bold", soft_wrap=True)
    points(target, [searched], "")
    if not brief:
        draw(target, [Column(names[0]), *(Column(name, "right") for name in names[1:])], tried, "Tried", [best])


def find_planned(request: PlanRequest) -> Answer:
    """Answer an inverse question about the run of the layout with the most goodput."""
    options, local = fleet_options(request.fleet, request.find)
    planned = msgspec.structs.replace(request, find=None, tokens=None, fleet=None, objective="goodput")
    try:
        best = most_goodput(planned, options, say)
    finally:
        clear()
    assert request.find is not None
    assert request.tokens is not None
    return _find(best, request.find, request.tokens, options, local, price=request.price)


def find(job: Job, options: dict[str, Any], question: str, slack: float, local: dict[str, Any]) -> Answer:
    """Answer an inverse question about a job."""
    layout = _chosen(job, options)
    if question in ("oversubscription", "sites"):
        _of_steps(layout[2], options, f"--find {question}")
    return _find(layout, question, job.tokens or "", Options(**options), local, slack, job.price)


def _find(
    layout: tuple[Estimate, dict[str, str], str],
    question: str,
    tokens: str,
    options: Options,
    local: dict[str, Any],
    slack: float = SLACK,
    price: float | None = None,
) -> Answer:
    result, assumed, searched = layout
    if question == "sites":
        return fleet_sites.most_sites(result, local, slack, assumed)
    base = fleet(result, tokens, msgspec.structs.replace(options, runs=min(options.runs, FEW)), price=price)
    plain: dict[str, Any]
    names: tuple[str, ...]
    if question == "checkpoint-interval":
        best, tried = best_interval(base)
        rows = [[seconds(every) if every < 60 else f"{every / 60:,.1f} min", f"{share:.2%}"] for every, share in tried]
        head, names = f"EVERY {best / 60:,.3g} MIN  {base.checkpoint.way} checkpoints lose least", ("every", "goodput")
        plain = {"every": best, "tried": [{"every": a, "goodput": b} for a, b in tried]}
        strong = [every for every, _ in tried].index(best)
    elif question == "spares":
        number, table = best_spares(base)
        rows = [[f"{hosts:,}", f"{days:,.2f}", count(hours)] for hosts, days, hours in table]
        head = f"{number:,} SPARE HOSTS  of {base.run.node} GPUs: the fewest GPU-hours, spares included"
        names = ("spare hosts", "days", "GPU-hours")
        plain = {"spares": number, "tried": [{"spares": a, "days": b, "gpu_hours": c} for a, b, c in table]}
        strong = [row[0] for row in table].index(number)
    else:
        factor, steps = most_oversubscription(base, slack)
        rows = [
            [f"{steps_between:g}:1", seconds(step), f"{step / steps[0][1] - 1:+.2%}"] for steps_between, step in steps
        ]
        head = f"{factor:g}:1  above the leaves makes a step at most {slack:.2%} longer"
        names = ("oversubscription", "step", "change")
        plain = {"oversubscription": factor, "tried": [{"oversubscription": a, "step": b} for a, b in steps]}
        strong = [steps_between for steps_between, _ in steps].index(factor)
    words = f"{searched} {layout_words(result.layout)}; a step of {seconds(base.step)}.".strip()
    return Answer(
        form="fleet.find",
        writer="loadgauge.fleets.text.fleet:write_sought",
        shown=(head, words, names, rows, strong),
        document=plain | {"assumed": assumed | base.assumed},
        assumed=assumed | base.assumed,
    )


def sites(job: Job, options: dict[str, Any], local: dict[str, Any]) -> Answer:
    """Answer for several sites."""
    result, assumed, searched = _chosen(job, options)
    _of_steps(searched, options, "--sites")
    return fleet_sites.split(result, local, searched, job, assumed)


def _of_steps(searched: str, options: dict[str, Any], question: str) -> None:
    """Refuses options of a fleet where only steps are asked about, and no layout was searched by goodput."""
    stated = [name for name in options if name not in ("runs", "seed")]
    if stated and not searched:
        raise ConfigError(
            f"does not affect {question}, which is about steps without failures; leave it out", key=stated[0]
        )
