"""The step time that a run measured, from whichever column it is printed in."""

from __future__ import annotations

import msgspec

from loadgauge.errors import NotModelled, NotStated
from loadgauge.estimate.estimate import view_of
from loadgauge.estimate.flops import Flops, step_flops
from loadgauge.resolve.setup import Setup
from loadgauge.validate.runs import Run

TERA = 1e12


def step_seconds(run: Run, setup: Setup) -> float:
    """Return the measured time of one optimizer step [s]: as printed, or from tokens/s, or from FLOP/s by the source's count.

    `setup` gives the batch and the FLOPs of the step. Raises `NotModelled` where no time follows from what is printed.
    """
    layout, measured = setup.layout, run.measured
    if measured.step_time_s is not None:
        return measured.step_time_s
    if measured.tokens_per_s_per_gpu is not None:
        return float(layout.global_batch * layout.seq_len / (layout.gpus * measured.tokens_per_s_per_gpu))
    flops = counted_flops(run, setup)
    if measured.model_tflops_per_gpu is not None:
        return float(flops.model / (layout.gpus * measured.model_tflops_per_gpu * TERA))
    if measured.mfu is not None:
        return float(flops.model / (layout.gpus * measured.mfu * _peak(setup)))
    if measured.hw_tflops_per_gpu is not None:
        return float(flops.hardware / (layout.gpus * measured.hw_tflops_per_gpu * TERA))
    if measured.hfu is not None:
        return float(flops.hardware / (layout.gpus * measured.hfu * _peak(setup)))
    raise NotModelled("measured: the row prints no time, rate or utilisation")


def counted_flops(run: Run, setup: Setup) -> Flops:
    """Return the FLOPs of a step as the run's source counts them: most count all query-key pairs, some the causal half."""
    view = view_of(setup.layout, setup.training)
    if run.causal_flops:
        view = msgspec.structs.replace(view, pairs=view.pairs / 2)
    # Megatron-LM's and NeMo's counts leave the padding of the vocabulary out, as ours does.
    return step_flops(setup.model, setup.layout, setup.training.kernels, view)


def _peak(setup: Setup) -> float:
    """The 16-bit peak of the card [FLOP/s]."""
    if setup.gpu is None:
        raise NotModelled("measured: only a utilisation is printed, and the card is not in the catalogue")
    try:
        return setup.gpu.peak("bf16")
    except NotStated as error:
        raise NotModelled(f"measured: only a utilisation is printed, and {error}") from None
