"""The answers of `loadgauge network`: what each axis needs of the links, of one run or of several side by side."""

from typing import Any

import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.answers.why.of_needs import AXES, closed_numbers, need_reason
from loadgauge.core.base.errors import NO, YES, Error
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import SIZES
from loadgauge.core.estimate.time.bandwidth_needs import Network, NetworkCase, largest_tp, smallest_batch, what_if
from loadgauge.core.resolve.setup import Setup

NOT_COUNTED = (
    "scalars: gradient norms, loss averages, the counts of tokens that experts expect",
    "traffic of storage, checkpoints and other jobs on the same network",
    "reduction inside the switches (NVLink SHARP, InfiniBand SHARP), which sends about half as much",
)


def networked(setup: Setup, case: NetworkCase) -> Answer:
    """Return what the network must carry in a step of a run, and whether it can."""
    result = case.answer()

    def explained(axis: str) -> Answer:
        from loadgauge.core.answers.equations.run_forms import bandwidth_lines  # brings SymPy

        assert setup.cluster is not None
        closed = bandwidth_lines(axis, closed_numbers(case, result))
        return need_reason(case, result, axis, setup.cluster.gpus_per_node, closed)

    return Answer(
        form="network.needs",
        writer="loadgauge.core.text.network:write",
        topics=AXES,
        explains=explained,
        pivots=(Pivot("Seconds of the collectives of a step", "network.seconds", "axis", "what"),),
        tried=lambda: [(change.name, change.result) for change in what_if(case, result)],
        shown=(setup, case, result),
        document=lambda: _plain(setup, case, result),
        verdict="enough" if result.enough else "not enough",
        code=YES if result.enough else NO,
        assumed=setup.assumed,
        not_counted=NOT_COUNTED,
        command=setup.job.command("network"),
    )


def side_by_side(job: Job, axes: list[str], cells: list[tuple[dict[str, Any], Network | Error]]) -> Answer:
    """Return the answer that networks of several runs are, or why one has none. axes: what is swept"""
    enough = any(not isinstance(answer, Error) and answer.enough for _, answer in cells)
    return Answer(
        form="network.sweep",
        writer="loadgauge.core.text.network:compare",
        shown=(axes, cells),
        document={"cells": [_cell(job, cell, answer) for cell, answer in cells]},
        command=job.command("network"),
        code=YES if enough else NO,
    )


def _cell(job: Job, cell: dict[str, Any], answer: Network | Error) -> dict[str, Any]:
    document = {"swept": cell, "command": job.replace(**cell).command("network")}
    if isinstance(answer, Error):
        return document | {"error": str(answer)}
    needs = [need.to_dict() for need in answer.needs]
    return document | {"enough": answer.enough, "step": answer.step, "exposed": answer.exposed, "needs": needs}


def _plain(planned: Setup, setup: NetworkCase, answer: Network) -> dict[str, Any]:
    """The JSON document, in bytes, seconds, byte/s and plain counts."""
    layout = planned.layout
    batch = smallest_batch(setup)
    return {
        "model": {"name": planned.model.name},
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
        "basis": _basis(planned, setup),
        "assumed": planned.assumed,
        "not_counted": list(NOT_COUNTED),
    }


def _basis(planned: Setup, setup: NetworkCase) -> dict[str, str]:
    efficiencies, job = setup.machine.efficiencies, planned.job
    return {
        "bytes": "derived",
        "inner_bandwidth": "given" if job.link_bandwidth or job.topology else "datasheet",
        "outer_bandwidth": "given" if job.nic_bandwidth or job.topology else "datasheet",
        "efficiencies": efficiencies.basis,
        "compute": "given" if setup.achieved else efficiencies.basis,
    }
