"""`loadgauge fleet`: a whole run on a fleet: failures, spares, checkpoints, sites, and other runs beside it."""

from typing import Any

import click

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.command_line.options.answering import answering, refuse
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import complete_model, options
from loadgauge.core.command_line.options.param_types import POSITIVE, Whole
from loadgauge.core.command_line.sizes import model_or_usage, size_options
from loadgauge.core.definitions.job.job import POSTTRAIN, WHOLE_RUN, Job, fields
from loadgauge.fleets.sites import OPTIONS
from loadgauge.fleets.text import fleet as report, fleet_queue
from loadgauge.fleets.what_if import FINDS

OWN = (
    "failures", "spares", "checkpoint", "storage", "recover", "detect", "diagnose", "swap", "restart", "repair", "machines",
    "power_cap", "runs", "seed",
)  # fmt: skip
"""Options of a fleet."""


def _run_options(command: Any) -> Any:
    return options(
        command,
        [
            name
            for name in fields()
            if name not in ("model", *POSTTRAIN) and (name not in WHOLE_RUN or name in ("tokens", "price"))
        ],
    )


@click.command("fleet", cls=Grouped)
@click.argument("model", required=False, shell_complete=complete_model)
@size_options
@click.option(
    "--failures",
    metavar="WHAT",
    help="What fails how often: llama3, studies (the default), none, 50000h (between failures of one GPU), or a TOML file.",
)
@click.option("--spares", metavar="2%|HOSTS", help="Hosts that stand ready beside the job's (1%).")
@click.option(
    "--checkpoint",
    metavar="WAY:EVERY",
    help="sync, async, memory (of a peer) or none, and how often: async:5min. Without a time, what loses least.",
)
@click.option("--storage", metavar="2TB/s", help="Bandwidth of the storage for checkpoints (0.65 GB/s for each host).")
@click.option(
    "--recover",
    type=click.Choice(("restart", "elastic", "reroute")),
    help="After a failure: all restart on a full fleet; go on without the replica that lacks a host (elastic); or let the peers"
    " of its stage take its work (reroute).",
)
@click.option(
    "--detect",
    metavar="A..B",
    help="Time until a failure is noticed (10s..5min); each simulated run has one of its own.",
)
@click.option("--diagnose", metavar="A..B", help="Time until the host is known (1min..5min).")
@click.option("--swap", metavar="A..B", help="Time until a spare is in its place (30s..2min).")
@click.option(
    "--restart",
    metavar="A..B",
    help="Time until all processes are connected, beside reading the checkpoint (2min..5min).",
)
@click.option("--repair", metavar="TIME", help="Time until a broken host is back (2d).")
@click.option(
    "--machines",
    metavar="2%",
    help="Spread of the speeds of machines (their standard deviation): all wait for the slowest.",
)
@click.option("--power-cap", metavar="85%", help="Power that a GPU may take, of its thermal design power.")
@click.option("--runs", type=Whole(1, 10**6), help="How many runs are simulated (1000).")
@click.option("--seed", type=Whole(0, 2**31), help="The same seed gives the same runs (0).")
@click.option(
    "--sites",
    type=Whole(1, 1000),
    help="Train on so many sites of equal size with local steps (DiLoCo) instead of on one.",
)
@click.option("--inner-steps", type=Whole(1, 10**6), help="Steps of a site between two exchanges (500).")
@click.option("--between", metavar="100Gbit/s", help="Bandwidth from each site to the others.")
@click.option("--delta-bits", type=Whole(1, 32), help="Bits in which a weight's change is sent (32).")
@click.option("--sparse", metavar="10%", help="Share of the changes that is sent, with its places (100%).")
@click.option(
    "--stale/--no-stale",
    default=None,
    help="Exchange while the next inner steps run; the outer step is one round late.",
)
@click.option(
    "--site-speeds",
    metavar="1,0.9",
    help="Speeds of the sites, where they differ; all wait for the slowest, or run fewer inner steps.",
)
@click.option(
    "--jobs", metavar="FILE", help="TOML file with the runs that share the fleet, in the order of their priority."
)
@click.option(
    "--find",
    type=click.Choice(FINDS),
    help="The inverse question: the best interval or spares, the most oversubscription, the most sites.",
)
@click.option("--what-if", is_flag=True, help="The same run with one thing changed at a time.")
@click.option("--slack", type=POSITIVE, help="How much more time --find may accept (0.01).")
@click.option(
    "--sweep",
    metavar="KEY=A,B,..",
    multiple=True,
    help="Simulate every combination, such as --sweep spares=0,1%,2% --sweep gpus=16384,32768.",
)
@click.option(
    "--output",
    metavar="FILE",
    help="Where a sweep keeps its answers (JSON lines); what is there already is not simulated again.",
)
@click.option("--workers", type=Whole(1, 10**5), help="How many cells of a sweep run at a time (1).")
@click.option("--ray", metavar="ADDRESS", help="Run a sweep on this Ray cluster: auto, or HOST:PORT.")
@_run_options
@answering(
    "days, goodput, what is lost, and the next step",
    "days, goodput, failures, checkpoint, tiers, ...",
    document="seconds, bytes, byte/s, shares and plain counts",
)
def command(model: str | None, find: str | None, what_if: bool, **flags: Any) -> Answer:
    """Simulate the whole run of MODEL on a fleet: days, goodput, where the time goes, and what would help.

    Without a layout the best ones are searched, and ranked by goodput too. Exit code: 0 answered, 1 its step
    does not fit, 2 cannot tell.

    \b
    loadgauge fleet llama-3.1-405b --gpu h100 --gpus 16384 --tokens 15T --global-batch 2048 --failures llama3
    loadgauge fleet llama-3.1-405b --gpu h100 --gpus 100000 --topology rail --tokens 30T --spares 2% --checkpoint async:5min
    loadgauge fleet llama-3.1-70b --gpu h100 --gpus 4096 --tokens 2T --find spares
    """
    own = {name: flags.pop(name) for name in OWN}
    local = {name: flags.pop(name) for name in ("sites", *OPTIONS)}
    more = {name: flags.pop(name) for name in ("jobs", "slack", "sweep", "output", "workers", "ray")}
    options = {name: value for name, value in own.items() if value is not None}
    local = {name: value for name, value in local.items() if value is not None}
    if local and "sites" not in local and find != "sites":
        raise ConfigError("needs --sites", key=next(iter(local)))
    if more["slack"] is not None and find not in ("oversubscription", "sites"):
        raise ConfigError("needs --find oversubscription or sites", key="slack")
    if find is not None:
        _asked_for(find, options, flags)
    if not more["sweep"]:
        refuse({name: more[name] for name in ("output", "workers", "ray")}, "needs --sweep")
    asked = [
        name
        for name, value in (
            ("sites", local and find != "sites"),
            ("find", find),
            ("what-if", what_if),
            ("jobs", more["jobs"]),
            ("sweep", more["sweep"]),
        )
        if value
    ]
    if len(asked) > 1:
        raise ConfigError(f"cannot be combined with --{asked[0]}", key=asked[1])
    if more["jobs"] is not None:
        return fleet_queue.queue(more["jobs"], model, flags, options)
    job = Job(model=model_or_usage(model, flags), **flags)
    if job.gpu is None:
        raise ConfigError("is missing: failures depend on the kind of GPU (`loadgauge gpus` lists them)", key="gpu")
    if job.tokens is None:
        raise ConfigError("is missing: the length of the run, such as 15T", key="tokens")
    if more["sweep"]:
        return fleet_queue.sweep(job, options, more)
    if find is not None:
        return report.find(job, options, find, more["slack"] or report.SLACK, local)
    if local:
        return report.sites(job, options, local)
    return report.simulated(job, options, what_if)


def _asked_for(find: str, options: dict[str, Any], flags: dict[str, Any]) -> None:
    """Refuses options that say what an inverse question asks for, or that its answer has no place for."""
    if find == "spares" and "spares" in options:
        raise ConfigError("is what --find spares searches; leave it out", key="spares")
    if find == "checkpoint-interval" and ":" in options.get("checkpoint", ""):
        raise ConfigError(
            "has an interval, which --find checkpoint-interval searches; give the way alone, such as async",
            key="checkpoint",
        )
    if flags["price"] is not None:
        raise ConfigError(f"does not affect --find {find}; leave it out", key="price")
