"""`loadgauge network`: what the network must carry, how fast, and whether it can."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from loadgauge.core.answers.why.of_needs import AXES, closed_numbers, need_reason
from loadgauge.core.base.errors import ConfigError, Error, NotStated
from loadgauge.core.base.units import parse
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import complete_model, run_options
from loadgauge.core.command_line.options.param_types import POSITIVE, Whole
from loadgauge.core.command_line.sizes import model_or_usage, size_options
from loadgauge.core.definitions.hardware.calibration import of_cluster
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import SIZES
from loadgauge.core.estimate.time.bandwidth_needs import (
    SHARE,
    Network,
    NetworkCase,
    largest_tp,
    smallest_batch,
    what_if,
)
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup
from loadgauge.core.text.network import NOT_COUNTED, report


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
    "--explain", "axis", type=click.Choice(AXES), help="Explain what one axis needs: formula, your numbers, source."
)
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="NAME=V,V",
    help="Lay runs side by side, a line each: --sweep tp=1,2,4,8 --sweep zero=1,3.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document: bytes, seconds, byte/s and plain counts.")
def command(
    model: str | None,
    share: float,
    achieved: str | None,
    oversubscription: float | None,
    pod: int | None,
    rails: bool,
    axis: str | None,
    sweeps: tuple[str, ...],
    as_json: bool,
    **flags: Any,
) -> int:
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
    how: dict[str, Any] = {
        "share": share, "achieved": _achieved(achieved), "oversubscription": oversubscription, "pod": pod, "rails": rails,
    }  # fmt: skip
    if sweeps:
        if axis is not None:
            raise ConfigError("explains one run: leave --sweep out", key="--explain")
        return _side_by_side(job, sweeps, how, as_json=as_json)
    given = resolve_job(job)
    setup = _setup(given, **how)
    answer = setup.answer()
    if axis is not None:
        _explain(given, setup, answer, axis, as_json=as_json)
    elif as_json:
        from loadgauge.core.text.table import document

        document(_plain(given, setup, answer))
    else:
        report(given, setup, answer)
    return 0 if answer.enough else 1


def _side_by_side(job: Job, sweeps: tuple[str, ...], how: dict[str, Any], *, as_json: bool) -> int:
    """Print the networks of a sweep's cells; 0 where the links are enough for one of them."""
    from loadgauge.core.plan.space.estimates import cells, read_axes
    from loadgauge.core.text.network import compare
    from loadgauge.core.text.table import document

    axes = read_axes(sweeps)
    rows: list[tuple[dict[str, Any], Network | Error]] = []
    for cell, run in cells(job, axes):
        try:
            rows.append((cell, _setup(resolve_job(run), **how).answer()))
        except Error as error:
            rows.append((cell, error))
    if as_json:
        document({"cells": [_cell(job, cell, answer) for cell, answer in rows]})
    else:
        compare(job.command("network"), list(axes), rows)
    return 0 if any(not isinstance(answer, Error) and answer.enough for _, answer in rows) else 1


def _cell(job: Job, cell: dict[str, Any], answer: Network | Error) -> dict[str, Any]:
    document = {"swept": cell, "command": job.replace(**cell).command("network")}
    if isinstance(answer, Error):
        return document | {"error": str(answer)}
    needs = [need.to_dict() for need in answer.needs]
    return document | {"enough": answer.enough, "step": answer.step, "exposed": answer.exposed, "needs": needs}


def _explain(given: Setup, case: NetworkCase, answer: Network, axis: str, *, as_json: bool) -> None:
    from loadgauge.core.answers.equations.run_forms import bandwidth_lines
    from loadgauge.core.text.estimate.reason import show
    from loadgauge.core.text.table import document

    assert given.cluster is not None
    reason = need_reason(
        case, answer, axis, given.cluster.gpus_per_node, bandwidth_lines(axis, closed_numbers(case, answer))
    )
    if as_json:
        document(reason.to_dict())
    else:
        show(reason)


def _setup(given: Setup, *, oversubscription: float | None, pod: int | None, rails: bool, **how: Any) -> NetworkCase:
    if given.gpu is None:
        raise ConfigError("is needed: the links are the GPU's (`loadgauge gpus` lists them)", key="gpu")
    if given.job.measured is not None:
        raise ConfigError("rescales whole steps, and says nothing of links; use it with `estimate`", key="measured")
    if oversubscription is None and (pod is not None or rails):
        raise ConfigError("goes with --oversubscription", key="rails" if rails else "pod")
    if given.job.topology is not None and oversubscription is not None:
        raise ConfigError("is what --topology states", key="oversubscription")
    if given.cluster is None:
        raise NotStated(given.untimed)
    return NetworkCase.of(
        given.model,
        given.layout,
        given.training,
        given.cluster,
        of_cluster(given.cluster),
        oversubscription=oversubscription,
        pod=pod,
        rails=rails,
        **how,
    )


def _achieved(text: str | None) -> float | None:
    if text is None:
        return None
    value, unit = parse(text, "achieved", "FLOP/s")
    if unit != "FLOP/s" or value <= 0:
        raise ConfigError(f"must be a rate such as 150TFLOP/s, got {text!r}", key="achieved")
    return value


# -- JSON -------------------------------------------------------------------------------------------------------------


def _plain(given: Setup, setup: NetworkCase, answer: Network) -> dict[str, Any]:
    """The JSON document, in bytes, seconds, byte/s and plain counts."""
    layout = given.layout
    batch = smallest_batch(setup)
    return {
        "model": {"name": given.model.name},
        "gpu": setup.machine.efficiencies.gpu,
        "layout": {
            **{name: getattr(layout, name) for name in (*SIZES, "zero", "replicas")},
            "order": list(layout.order),
            "sequence_parallel": layout.sequence_parallel,
            "micro_batch": layout.micro_batch,
            "global_batch": layout.global_batch,
            "num_microbatches": layout.num_microbatches,
            "seq_len": layout.seq_len,
            "gpus": layout.gpus,
        },
        "enough": answer.enough,
        "share": setup.share,
        "step": answer.step,
        "stage": answer.stage,
        "exposed": answer.exposed,
        "efficiency": answer.efficiency,
        "compute": msgspec.structs.asdict(answer.compute),
        "fabric": msgspec.structs.asdict(setup.fabric),
        "network": [row.to_dict() for row in answer.traffic],
        "needs": [need.to_dict() for need in answer.needs],
        "what_if": [
            {
                "name": change.name,
                "step": change.result.step,
                "exposed": change.result.exposed,
                "enough": change.result.enough,
            }
            for change in what_if(setup, answer)
        ],
        "limits": {
            "largest_tp": largest_tp(setup),
            "smallest_batch": None if batch is None else msgspec.structs.asdict(batch),
        },
        "basis": _basis(given, setup),
        "assumed": given.assumed,
        "not_counted": list(NOT_COUNTED),
    }


def _basis(given: Setup, setup: NetworkCase) -> dict[str, str]:
    known, job = setup.machine.efficiencies, given.job
    return {
        "bytes": "derived",
        "inner_bandwidth": "given" if job.link_bandwidth or job.topology else "datasheet",
        "outer_bandwidth": "given" if job.nic_bandwidth or job.topology else "datasheet",
        "efficiencies": known.basis,
        "compute": "given" if setup.achieved else known.basis,
    }
