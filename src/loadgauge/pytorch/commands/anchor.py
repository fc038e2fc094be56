"""`loadgauge anchor`: what this card measures, as a file that later predictions take."""

from pathlib import Path
from typing import Any

import click

from loadgauge.core.base import seconds
from loadgauge.core.command_line.options.options import complete_model
from loadgauge.core.command_line.options.param_types import Whole
from loadgauge.core.command_line.options.spoken import Spoken
from loadgauge.core.definitions.hardware.hardware import gpu as find_gpu
from loadgauge.core.definitions.job.flag_types import STEP
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.commands.torch_options import calibrated, job_options, script_output


@click.command("anchor", cls=Spoken)
@click.argument("model", shell_complete=complete_model)
@click.option("--gpu", metavar="GPU", required=True, help="Which GPU it is (`loadgauge gpus` lists them).")
@click.option(
    "--output", metavar="FILE.toml", default="anchor.toml", show_default=True, help="Where to write the file."
)
@click.option(
    "--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True, help="cpu tries it out."
)
@job_options(STEP)
@click.option("--steps", type=Whole(1, 1000), default=5, show_default=True, help="Steps to time.")
def command(model: str, gpu: str, output: str, device: str, layers: int | None, steps: int, **flags: Any) -> None:
    """Time this card's kernels and some steps of MODEL, and write a file by which `estimate`, `plan` and `fleet` move times.

    Two minutes. The steps are of one card; under torchrun collectives inside the node are timed too. A job that trains with
    another framework than plain PyTorch is anchored by a step of its own: write its flags and its step into the file, in place
    of those of [run].

    \b
    loadgauge anchor llama-3.1-8b --layers 4 --recompute full --gpu h100-sxm5-80gb
    loadgauge estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 64 --zero 3 --anchor anchor.toml
    """
    card, job = find_gpu(gpu), Job(model=model, **flags)
    calibration = calibrated("anchor", device, card, output)
    if calibration is None:
        return
    from loadgauge.pytorch.measure.anchor import anchor_text
    from loadgauge.pytorch.measure.train_steps import measure_request
    from loadgauge.pytorch.trace.subprocess import Request, in_child

    measured = in_child(measure_request, Request(job, device, layers), script_output(model), timed=steps)
    Path(output).write_text(anchor_text(job, layers, card, calibration, measured), encoding="utf-8")
    click.echo(
        f"A step took {seconds(measured.step or 0.0)}. --anchor {output} moves predictions for {card.id} by it and by its kernels."
    )
