"""`loadgauge measure`: what training steps that really run take."""

from typing import Any

import click
import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.base.optional_deps import needs_torch
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.command_line.options.options import complete_model
from loadgauge.core.command_line.options.param_types import Whole
from loadgauge.core.command_line.options.spoken import Spoken
from loadgauge.core.definitions.job.flag_types import STEP
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.commands.torch_options import job_options, script_output

PEAKS = {"fp32": "tf32", "bf16-pure": "bf16", "bf16-autocast": "bf16", "fp16-autocast": "fp16"}
"""The peak FLOP/s of a GPU that a precision can reach; PyTorch uses TF32 only on request."""


@click.command("measure", cls=Spoken)
@click.argument("target", shell_complete=complete_model)
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Where it runs.")
@job_options(STEP)
@click.option("--steps", type=Whole(0, 1000), default=3, show_default=True, help="Steps to time.")
@click.option("--gpu", metavar="GPU", help="Whose peak FLOP/s MFU is a share of (`loadgauge gpus` lists them).")
@answering("the peak, and what it is made of")
def command(target: str, device: str, layers: int | None, steps: int, gpu: str | None, **fields: Any) -> Answer:
    """Train TARGET for some steps, and measure them: peak and what stays, by module; seconds, FLOP/s, MFU.

    TARGET is a MODEL, with random weights, or script.py:function (see `loadgauge trace`). The steps that are timed run
    without any instrument.

    \b
    loadgauge measure gpt2 --seq-len 128 --layers 2
    loadgauge measure train.py:main --device cuda --gpu h100-sxm5-80gb
    """
    needs_torch("measure")
    from loadgauge.core.definitions.hardware.hardware import gpu as find_gpu
    from loadgauge.pytorch.measure.train_steps import measure_request
    from loadgauge.pytorch.trace.subprocess import Request, in_child
    from loadgauge.pytorch.trace.torch_run import TorchRun

    job = Job(model=target, **fields)
    precision = TorchRun.of(job).training.precision.name
    peak = None if gpu is None else find_gpu(gpu).peak(PEAKS[precision])
    request = Request(job, device, layers)
    measured = in_child(measure_request, request, script_output(target), timed=steps)
    more = {name: getattr(measured, name) for name in ("step", "flops_per_second", "overhead")}
    mfu = measured.mfu(peak) if peak else None
    return Answer(
        form="measure.steps",
        writer="loadgauge.pytorch.text.measure:write",
        shown=(measured, peak),
        document=lambda: msgspec.to_builtins(measured) | more | {"mfu": mfu},
        pivots=(
            Pivot("What stays allocated", "states", "states", "of"),
            Pivot("At the peak", "held.nbytes", "op", "of"),
        ),
    )
