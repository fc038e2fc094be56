"""`loadgauge network`: what the network must carry, how fast, and whether it can."""

from typing import Any

import click

from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.network import networked, side_by_side
from loadgauge.core.answers.why.of_needs import AXES
from loadgauge.core.base import ConfigError, Error, NotStated, above_zero
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import complete_model, run_options
from loadgauge.core.command_line.options.param_types import POSITIVE, Whole
from loadgauge.core.command_line.sizes import model_or_usage, size_options
from loadgauge.core.definitions.hardware.calibration import of_cluster
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.time import busbw as bandwidths
from loadgauge.core.estimate.time.bandwidth_needs import SHARE, Network, NetworkCase
from loadgauge.core.plan.space.estimates import cells, read_axes
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup


@click.command("network", cls=Grouped)
@click.argument("model", required=False, shell_complete=complete_model)
@size_options
@run_options
@click.option(
    "--share",
    type=POSITIVE,
    default=SHARE,
    show_default=True,
    help="Exposed communication that an axis may have, as a share of compute time.",
)
@click.option(
    "--achieved",
    metavar="TFLOP/s",
    help="Rate that each GPU achieves, such as 150TFLOP/s, instead of the calibrated time.",
)
@click.option("--oversubscription", type=POSITIVE, help="Factor by which bandwidth falls when all nodes send at once.")
@click.option("--pod", type=Whole(1, 10**7), help="GPUs that reach one another without passing oversubscribed links.")
@click.option("--rails", is_flag=True, help="GPUs at the same position in their nodes share a switch.")
@click.option(
    "--parameter-servers",
    "servers",
    type=Whole(1, 10**6),
    help="Compare with so many servers of the weights, each with a GPU's adapter, waiting for all ranks or for none.",
)
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="NAME=V,V",
    help="Lay runs side by side, a line each: --sweep tp=1,2,4,8 --sweep zero=1,3.",
)
@click.option(
    "--busbw",
    multiple=True,
    metavar="KIND=340GB/s:1GiB|FILE",
    help="Bus bandwidth that nccl-tests measured, or the text of its run (a file, or pasted), in place of the table; KIND:"
    " all_reduce, all_gather, reduce_scatter, all_to_all, ...",
)
@click.option(
    "--algbw", multiple=True, metavar="KIND=195GB/s:1GiB", help="The same as algorithm bandwidth: bytes over seconds."
)
@answering(
    "the verdict, the links, and what each axis needs of them",
    f"Of an axis, what it needs: {', '.join(AXES)}.",
    AXES,
    "bytes, seconds, byte/s and plain counts",
)
def command(
    model: str | None,
    share: float,
    achieved: str | None,
    oversubscription: float | None,
    pod: int | None,
    rails: bool,
    servers: int | None,
    sweeps: tuple[str, ...],
    busbw: tuple[str, ...],
    algbw: tuple[str, ...],
    **flags: Any,
) -> Answer:
    """Compare the bandwidth that training MODEL needs on each axis with what the links reach.

    Communication that overlaps compute must be hidden by it; other communication may take 5 % of its time (--share).
    Also reported: what other links and nodes would change, the largest tp that these links carry, and the smallest batch
    that makes up for data parallelism. Exit code: 0 the links are enough, 1 they are not, 2 cannot tell.

    \b
    loadgauge network llama-3.1-70b --gpu h100-sxm5-80gb --gpus 256 --tp 8 --pp 4 --sequence-parallel --global-batch 512
    loadgauge network llama-3.1-8b --gpu a100-sxm4-80gb --gpus 64 --zero 3 --oversubscription 4 --rails --pod 32
    loadgauge network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 64 --sweep tp=1,2,4,8
    """
    job = Job(model=model_or_usage(model, flags), **flags)
    rate = None if achieved is None else above_zero(achieved, "achieved", "FLOP/s", "a rate such as 150TFLOP/s")
    how: dict[str, Any] = {
        "share": share, "achieved": rate, "oversubscription": oversubscription, "pod": pod, "rails": rails, "servers": servers or 0,
        "busbw": (*busbw, *(text.replace("=", "=algbw:", 1) for text in algbw)),
    }  # fmt: skip
    if sweeps:
        return _side_by_side(job, sweeps, how)
    setup = resolve_job(job)
    if setup.open_layout and setup.cluster is not None:
        setup = setup.estimate().setup  # with the layout that `estimate` assumes
    return networked(setup, _setup(setup, **how))


def _side_by_side(job: Job, sweeps: tuple[str, ...], how: dict[str, Any]) -> Answer:
    """The networks of a sweep's cells; code 0 where the links are enough for one of them."""
    axes = read_axes(sweeps)
    rows: list[tuple[dict[str, Any], Network | Error]] = []
    for cell, run in cells(job, axes):
        try:
            rows.append((cell, _setup(resolve_job(run), **how).answer()))
        except Error as error:
            rows.append((cell, error))
    return side_by_side(job, list(axes), rows)


def _setup(
    setup: Setup, *, oversubscription: float | None, pod: int | None, rails: bool, busbw: tuple[str, ...], **how: Any
) -> NetworkCase:
    if setup.gpu is None:
        raise ConfigError("is missing: the links are those of a GPU (`loadgauge gpus` lists them)", key="gpu")
    if setup.job.measured is not None:
        raise ConfigError("rescales whole steps, and says nothing of links; use it with `estimate`", key="measured")
    if oversubscription is None and (pod is not None or rails):
        raise ConfigError("needs --oversubscription", key="rails" if rails else "pod")
    if setup.job.topology is not None and oversubscription is not None:
        raise ConfigError("is stated by --topology; give one of them", key="oversubscription")
    if setup.cluster is None:
        raise NotStated(setup.untimed)
    case = NetworkCase.of(
        setup.model,
        setup.layout,
        setup.training,
        setup.cluster,
        of_cluster(setup.cluster),
        oversubscription=oversubscription,
        pod=pod,
        rails=rails,
        **how,
    )
    points = [point for text in busbw for point in bandwidths.measured(text, case.fabric.domain)]
    return case.on(bandwidths.on(case.fabric, points)) if points else case
