"""From a measured run to what is estimated: its job resolved, with the overrides that no field of a job can say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from loadgauge.errors import Error
from loadgauge.families.catalogue import find_model
from loadgauge.resolve.resolve import resolve_job
from loadgauge.resolve.setup import Setup
from loadgauge.spec.hardware import gpu
from loadgauge.spec.job import Job
from loadgauge.validate.overrides import Overrides, apply
from loadgauge.validate.runs import Run

NIC = "50GB/s"
"""Of one GPU to other nodes, where no source states it: 400 Gbit/s, the usual adapter since 2022."""


class Alternative(NamedTuple):
    """The setup of a run with another plausible value of something it does not state."""

    knob: str
    value: str
    setup: Setup


def setup_of(run: Run) -> Setup:
    """What a run is taken for. `ConfigError` and its kin where it cannot be; the run must have a job.

    >>> from loadgauge.validate.runs import published
    >>> kor = next(run for run in published().runs if run.id == "T-KOR-002")
    >>> setup_of(kor).layout.tp, setup_of(kor).model.num_hidden_layers
    (8, 48)
    """
    assert run.job is not None
    return resolve(run.job, run.overrides)


def alternatives(run: Run) -> Iterator[Alternative]:
    """The setups of the other values that are plausible, one open question at a time; those refused are left out."""
    assert run.job is not None
    for variant in run.variants:
        try:
            setup = resolve(run.job.replace(**variant.job), run.overrides, variant.overrides)
        except Error:
            continue  # a value that this job cannot have is not plausible
        yield Alternative(variant.knob, variant.value, setup)


def resolve(job: Job, *overrides: Overrides) -> Setup:
    """The setup of a job, with overrides applied in order. A node has no more GPUs than the job, and an adapter that
    nobody states is taken as `NIC`."""
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
