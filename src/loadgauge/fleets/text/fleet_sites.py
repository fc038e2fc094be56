"""The text of `loadgauge fleet --sites`: local training on several sites against one job on one site."""

from typing import Any

import msgspec

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.units import count, days_words, gib, parse_count, seconds
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.time.cost import DAY
from loadgauge.core.text.estimate.setup import layout_words
from loadgauge.core.text.table import Column, Paper, draw, points, section
from loadgauge.fleets.sites import Across, Local, Sites, across, local, most

NOT_COUNTED = (
    "what local steps, fewer bits, sparse or stale changes and unequal steps do to the loss: it is not modelled",
    "failures, spares and checkpoints: those of one site are simulated without --sites",
)


def _read(result: Estimate, options: dict[str, Any]) -> Sites:
    """The sites of the flags; where the topology ends in lines between sites, these are their links."""
    tiers = () if result.cluster is None or result.cluster.topology is None else result.cluster.topology.tiers
    last = tiers[-1] if tiers and tiers[-1].kind == "link" else None
    return Sites.of(
        options, None if last is None else last.reached * last.below, 0.0 if last is None else last.distance_km
    )


def bandwidth(value: float) -> str:
    """Format a bandwidth between sites.

    >>> bandwidth(12.5e9), bandwidth(12.5e6), bandwidth(2e12)
    ('100 Gbit/s', '0.1 Gbit/s', '16 Tbit/s')
    """
    if 8 * value >= 1e12:
        return f"{8 * value / 1e12:,.3g} Tbit/s"
    return f"{8 * value / 1e9:,.3g} Gbit/s"


def _plain(local: Local) -> dict[str, Any]:
    return {
        "sites": local.sites.sites,
        "inner_steps": list(local.steps),
        "step": local.estimate.timing.step,
        "round": local.compute,
        "sent": local.sent,
        "exchange": local.exchange,
        "exposed": local.shown,
        "waiting": local.waiting,
        "needed": local.needed,
        "outer_bytes_per_gpu": local.outer,
        "tokens_per_second": local.tokens_per_second,
        "of_one_site": local.ratio,
    }


def split(result: Estimate, options: dict[str, Any], searched: str, job: Job, assumed: dict[str, str]) -> Answer:
    """Return the run on the sites that the flags state."""
    asked = _read(result, options)
    here, others, tokens = local(result, asked), list(across(result, asked)), parse_count(job.tokens or "", "tokens")
    days = tokens / here.tokens_per_second / DAY
    hours = days * 24 * result.layout.gpus
    whole = {
        "days_without_failures": days,
        "gpu_hours": hours,
        "cost": None if job.price is None else job.price * hours,
    }
    document = _plain(here) | whole | {"one_job": [msgspec.structs.asdict(way) for way in others]}
    return Answer(
        form="fleet.sites",
        writer="loadgauge.fleets.text.fleet_sites:write",
        shown=(asked, here, others, searched, tokens, days, hours, job.price),
        document=document | {"assumed": assumed, "not_counted": list(NOT_COUNTED)},
        assumed=assumed,
        not_counted=NOT_COUNTED,
        command=job.command("fleet"),
    )


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the time and traffic of training on several sites."""
    asked, here, others, searched, tokens, days, hours, price = answer.shown
    time = here.estimate.timing
    target.print(
        f"{here.ratio:.1%} OF ONE SITE  {asked.sites} sites of {here.estimate.layout.gpus:,} GPUs, {max(here.steps)} local steps"
        f" between exchanges: {count(here.tokens_per_second)} tokens/s against {count(here.one)}",
        style="bold",
        soft_wrap=True,
    )
    hidden = "hidden under the next round" if not here.shown else f"of which {seconds(here.shown)} are not hidden"
    lines = [
        f"{searched} On each site {layout_words(here.estimate.layout)}; a step of {seconds(time.step)}.".strip(),
        f"Each site sends {here.sent / 1e9:,.4g} GB a round of {seconds(here.compute)}, at {bandwidth(asked.between)} in"
        f" {seconds(here.exchange)}, {hidden}.",
        f"{bandwidth(here.needed)} from each site hide it, with an outer step that is one round late (--stale).",
        f"{count(tokens)} tokens take {days_words(days)} without failures: {count(hours)} GPU-hours"
        f"{'' if price is None else f', {price * hours:,.0f} at {price:g} each'}.",
        f"The outer optimizer holds {gib(here.outer)} on each GPU.",
    ]
    if len(set(here.steps)) > 1:
        lines.append(
            f"Steps of each site in a round: {', '.join(map(str, here.steps))}; they wait {here.waiting:.1%} of it."
        )
    lines += [_words(way, asked) for way in others]
    points(target, lines, "")
    if not brief:
        section(target, "Not counted", answer.not_counted)


def _words(way: Across, asked: Sites) -> str:
    name = {"hsdp": "One job with replicas on each site (HSDP)", "pipeline": "One pipeline over the sites"}[way.way]
    return (
        f"{name}: {way.sent / 1e9:,.4g} GB of each site a step; {bandwidth(way.needed)} hide it, at {bandwidth(asked.between)}"
        f" a step takes {seconds(way.step)}."
    )


def most_sites(result: Estimate, options: dict[str, Any], slack: float, assumed: dict[str, str]) -> Answer:
    """Return the most sites that cost no more than `slack` of the tokens/s."""
    best, tried = most(result, _read(result, {**options, "sites": 1}), slack)
    plain = {"sites": best, "tried": [_plain(trial) for trial in tried]}
    return Answer(
        form="fleet.find-sites",
        writer="loadgauge.fleets.text.fleet_sites:write_most",
        shown=(best, tried, slack),
        document=plain | {"assumed": assumed, "not_counted": list(NOT_COUNTED)},
        assumed=assumed,
        not_counted=NOT_COUNTED,
    )


def write_most(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the most sites; brief: without what was tried"""
    best, tried, slack = answer.shown
    plural = "s" if best > 1 else ""
    target.print(
        f"{best} SITE{plural.upper()}  keep{'' if plural else 's'} {1 - slack:.1%} of one site's tokens/s",
        style="bold",
        soft_wrap=True,
    )
    if not brief:
        draw(
            target,
            [
                Column("sites", "right"),
                Column("tokens/s", "right"),
                Column("of one site", "right"),
                Column("GB a round", "right"),
                Column("exchange", "right"),
                Column("not hidden", "right"),
                Column("hidden at", "right"),
            ],
            [
                [
                    str(trial.sites.sites),
                    count(trial.tokens_per_second),
                    f"{trial.ratio:.1%}",
                    f"{trial.sent / 1e9:,.4g}",
                    seconds(trial.exchange),
                    seconds(trial.shown),
                    bandwidth(trial.needed),
                ]
                for trial in tried
            ],
            "Tried",
            [number for number, trial in enumerate(tried) if trial.sites.sites == best],
        )
        points(target, answer.not_counted, "", style="dim")
