"""The step time that a row measured, from whichever column it is printed in."""

from __future__ import annotations

import msgspec

from loadgauge.errors import NotStated
from loadgauge.estimate.estimate import view_of
from loadgauge.estimate.flops import Flops, step_flops
from loadgauge.validate import words
from loadgauge.validate.expression import Job
from loadgauge.validate.models import Inexpressible
from loadgauge.validate.runs import Run

TERA = 1e12


def has_time(run: Run) -> bool:
    """Whether a row prints anything that is a step time in other words."""
    return any(
        value is not None
        for value in (
            run.step_time_s,
            run.tokens_per_s_per_gpu,
            run.model_tflops_per_gpu,
            run.hw_tflops_per_gpu,
            run.mfu,
            run.hfu,
        )
    )


def step_seconds(run: Run, job: Job) -> float:
    """Seconds of one optimizer step: as printed, or from tokens/s, or from FLOP/s by the source's own count of FLOPs."""
    layout = job.layout
    if run.step_time_s is not None:
        return run.step_time_s
    if run.tokens_per_s_per_gpu is not None:
        return float(layout.global_batch * layout.seq_len / (layout.gpus * run.tokens_per_s_per_gpu))
    flops = counted(run, job)
    if run.model_tflops_per_gpu is not None:
        return float(flops.model / (layout.gpus * run.model_tflops_per_gpu * TERA))
    if run.mfu is not None:
        return float(flops.model / (layout.gpus * run.mfu * _peak(job)))
    if run.hw_tflops_per_gpu is not None:
        return float(flops.hardware / (layout.gpus * run.hw_tflops_per_gpu * TERA))
    if run.hfu is not None:
        return float(flops.hardware / (layout.gpus * run.hfu * _peak(job)))
    raise Inexpressible("measured: the row prints no time, rate or utilisation")


def counted(run: Run, job: Job) -> Flops:
    """FLOPs of a step as the row's source counts them: most count all query-key pairs, some the causal half."""
    view = view_of(job.layout, job.training)
    if any(word in run.framework for word in words.CAUSAL_FLOPS):
        view = msgspec.structs.replace(view, pairs=view.pairs / 2)
    # Megatron-LM's and NeMo's counts leave the padding of the vocabulary out, as ours does.
    return step_flops(job.model, job.layout, job.training.kernels, view)


def _peak(job: Job) -> float:
    if job.gpu is None:
        raise Inexpressible("measured: only a utilisation is printed, and the card is not in the catalogue")
    try:
        return job.gpu.peak("bf16")
    except NotStated as error:
        raise Inexpressible(f"measured: only a utilisation is printed, and {error}") from None
