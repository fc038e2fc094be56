"""From a measured run to a `Setup`: its job is resolved, then its overrides are applied."""

from collections.abc import Iterator

import msgspec

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup
from loadgauge.evidence.validate.overrides import Overrides, apply
from loadgauge.evidence.validate.runs import Run

NIC = "50GB/s"
"""Bandwidth of one GPU to other nodes where no source states it: 400 Gbit/s, the usual adapter since 2022."""


def setup_of(run: Run) -> Setup:
    """Resolve the job of a run, with its overrides. Raises an `Error` where that is not possible; the run must have a job.

    >>> from loadgauge.evidence.validate.runs import published
    >>> kor = next(run for run in published().runs if run.id == "T-KOR-002")
    >>> setup_of(kor).layout.tp, setup_of(kor).model.num_hidden_layers
    (8, 48)
    """
    assert run.job is not None
    return resolve(run.job, run.overrides)


def variant_setups(run: Run) -> Iterator[tuple[str, Setup]]:
    """Yield the setups of a run's variants, each with its open question (knob); variants that are refused are left out."""
    assert run.job is not None
    for variant in run.variants:
        try:
            setup = resolve(run.job.replace(**variant.job), run.overrides, variant.overrides)
        except Error:
            continue  # a value that this job cannot have is not plausible
        yield variant.knob, setup


def resolve(job: Job, *overrides: Overrides) -> Setup:
    """Resolve a job and apply overrides in order. A node has at most the job's GPUs; a network adapter whose bandwidth no
    source states has that of `NIC`."""
    model = find_model(job.model)
    for changes in overrides:
        model = apply(model, changes.model)
    if job.gpu is not None:
        if job.nic_bandwidth is None and gpu(job.gpu).nic.bandwidth is None:
            job = job.replace(nic_bandwidth=NIC)
        if job.gpus_per_node is not None and job.gpus is not None:
            job = job.replace(gpus_per_node=min(job.gpus_per_node, job.gpus))
    setup = resolve_job(job, model)
    layout, training = setup.layout, setup.training
    for changes in overrides:
        layout, training = apply(layout, changes.layout), apply(training, changes.training)
    return msgspec.structs.replace(setup, layout=layout, training=training)
