"""The step time that a run measured, from whichever column it is printed in."""

import msgspec

from loadgauge.core.base.errors import NotModelled, NotStated
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.time.flops import Flops, step_flops
from loadgauge.core.resolve.setup import Setup
from loadgauge.evidence.validate.runs import Run

TERA = 1e12
IMPOSSIBLE = 1.0
"""Share of a card's peak that model FLOPs cannot exceed."""
CONTRADICTS = 1.7
"""From how many times the FLOPs of its own batch a row contradicts itself: more than recomputation and attention make."""


def step_seconds(run: Run, setup: Setup) -> float:
    """Return the measured time of one optimizer step [s]: as printed, or from tokens/s, or from FLOP/s by the source's count.

    `setup` gives the batch and the FLOPs of the step. Raises `NotModelled` where no time follows from what is printed, or one that
    no card could have.
    """
    seconds = _printed(run, setup)
    if setup.gpu is not None:
        products = setup.training.precision.products
        try:
            peak = setup.gpu.peak("bf16" if products is None else products.format)
        except NotStated:
            return seconds
        share = counted_flops(run, setup).model / (seconds * setup.layout.gpus * peak)
        if share > IMPOSSIBLE:
            raise NotModelled(f"measured: {share:.0%} of the peak of {setup.gpu.name}, so it is another card or batch")
    return seconds


def _printed(run: Run, setup: Setup) -> float:
    """The same, whatever it is."""
    layout, measured = setup.layout, run.measured
    if measured.step_time_s is not None:
        _check(run, setup)
        return measured.step_time_s
    if measured.tokens_per_s_per_gpu is not None:
        return float(layout.global_batch * layout.seq_len / (layout.gpus * measured.tokens_per_s_per_gpu))
    flops = counted_flops(run, setup)
    for rate, counted, share in (
        (measured.model_tflops_per_gpu, flops.model, False),
        (measured.mfu, flops.model, True),
        (measured.hw_tflops_per_gpu, flops.hardware, False),
        (measured.hfu, flops.hardware, True),
    ):
        if rate is not None:
            return float(counted / (layout.gpus * rate * (_peak(setup) if share else TERA)))
    raise NotModelled("measured: the row prints no time, rate or utilisation")


def _check(run: Run, setup: Setup) -> None:
    """Refuses a row whose time and FLOP/s are not of one batch: of one, they give its FLOPs, however these are counted."""
    measured, flops = run.measured, None
    for value, kind in ((measured.model_tflops_per_gpu, "model"), (measured.hw_tflops_per_gpu, "hardware")):
        if value is None or measured.step_time_s is None:
            continue
        flops = flops or counted_flops(run, setup)
        ratio = value * TERA * setup.layout.gpus * measured.step_time_s / getattr(flops, kind)
        if not 1 / CONTRADICTS < ratio < CONTRADICTS:
            raise NotModelled(
                f"measured: {measured.step_time_s:g} s and {value:g} TFLOP/s are {ratio:.2g} times the FLOPs of the batch that"
                " the row states"
            )


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
