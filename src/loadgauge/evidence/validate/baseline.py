"""What a time model must beat, and what one measured run of the user's own brings.

The baseline: model FLOPs at one constant share of the 16-bit peak, times the 1F1B bubble. The constant is fitted to the very
rows that it is judged by, for each kind of GPU.
"""

from collections.abc import Sequence

import msgspec

from loadgauge.core.base.errors import Error
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.time.flops import step_flops
from loadgauge.core.resolve.setup import Setup
from loadgauge.evidence.validate.runs import Run, setup_of
from loadgauge.evidence.validate.summary import configuration_weights, grouped, quantile
from loadgauge.evidence.validate.validate import Record


def ideal_seconds(setup: Setup) -> float:
    """Return the step time [s] at the full 16-bit peak, with the 1F1B bubble (p - 1) / (v m) (source: narayanan2021)."""
    assert setup.gpu is not None
    layout = setup.layout
    flops = step_flops(setup.model, layout, setup.training.kernels, view_of(layout, setup.training)).model
    bubble = (layout.pp - 1) / (layout.num_microbatches * layout.vpp)
    return float(flops / (layout.gpus * setup.gpu.peak("bf16")) * (1 + bubble))


def baseline(records: Sequence[Record], runs: Sequence[Run]) -> tuple[Record, ...]:
    """Return the records of time that have a prediction, with the baseline's instead."""
    by_id = {run.id: run for run in runs}
    timed: list[tuple[Record, float]] = []
    for record in records:
        if record.quantity != "time" or record.error is None or record.id not in by_id:
            continue
        try:
            timed.append((record, ideal_seconds(setup_of(by_id[record.id]))))
        except Error:
            continue
    by_gpu = grouped([record for record, _ in timed], lambda record: record.gpu)
    ideal = {record.id: seconds for record, seconds in timed}
    share = {}
    for gpu, group in by_gpu.items():
        ratios = [ideal[record.id] / record.measured for record in group if record.measured]
        share[gpu] = quantile(ratios, configuration_weights(group), 0.5) or 1.0
    return tuple(_replaced(record, seconds / share[record.gpu]) for record, seconds in timed)


def rescaled(records: Sequence[Record]) -> tuple[Record, ...]:
    """Return the records of time, rescaled by one measured run: the first row of each source, model and hardware gives the
    scale and is left out.
    """
    result: list[Record] = []
    predicted = [record for record in records if record.quantity == "time" and record.error is not None]
    for group in grouped(predicted, lambda record: repr((record.source, *record.configuration[1:3]))).values():
        first = group[0]
        if len({record.configuration for record in group}) < 2 or first.error is None:
            continue
        scale = 1 / (1 + first.error)
        result += [_replaced(record, record.predicted * scale) for record in group[1:] if record.predicted]
    return tuple(result)


def _replaced(record: Record, predicted: float) -> Record:
    assert record.measured is not None
    return msgspec.structs.replace(record, predicted=predicted, error=predicted / record.measured - 1)
