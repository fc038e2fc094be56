"""The step time of published runs as a function of the efficiencies of their GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.hardware.calibration import Efficiencies
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.time.collectives import Fabric
from loadgauge.core.estimate.time.roofline import Machine
from loadgauge.core.estimate.time.step import StepModel
from loadgauge.evidence.validate.measured import step_seconds
from loadgauge.evidence.validate.runs import Run, setup_of
from loadgauge.evidence.validate.validate import machine


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step [s] of a run that can be expressed; `weight` is its share of its configuration."""

    id: str
    model: ModelSpec
    layout: Layout
    training: Training
    cluster: Cluster
    seconds: float
    weight: float = 1.0


def predictor(sample: Sample) -> Callable[[Efficiencies], float]:
    """The step time of a sample as a function of `Efficiencies`; what does not depend on them is worked out once."""
    facts = MemoryModel(sample.model, sample.layout, sample.training, view_of(sample.layout, sample.training))

    def seconds(efficiencies: Efficiencies) -> float:
        made = Machine.of(sample.cluster.gpu, efficiencies, sample.training, experts=sample.model.has_experts)
        return float(StepModel(facts, made, Fabric.of(sample.cluster, efficiencies)).step.step)

    return seconds


def samples(runs: Iterable[Run]) -> dict[str, list[tuple[Run, Sample]]]:
    """The measured steps of the runs that can be expressed, by GPU; each configuration weighs 1 in all."""
    by_gpu: dict[str, list[tuple[Run, Sample]]] = {}
    for run in runs:
        if run.job is None or run.untimed or not run.measured.timed:
            continue
        try:
            setup = setup_of(run)
            place, seconds = machine(setup), step_seconds(run, setup)
        except Error:
            continue
        sample = Sample(
            id=run.id, model=setup.model, layout=setup.layout, training=setup.training, cluster=place, seconds=seconds
        )
        by_gpu.setdefault(place.gpu.id, []).append((run, sample))
    return {gpu: _weighted(pairs) for gpu, pairs in by_gpu.items()}


def _weighted(pairs: Sequence[tuple[Run, Sample]]) -> list[tuple[Run, Sample]]:
    count: dict[object, int] = {}
    for run, _ in pairs:
        count[run.configuration] = count.get(run.configuration, 0) + 1
    return [(run, msgspec.structs.replace(sample, weight=1 / count[run.configuration])) for run, sample in pairs]
