"""`loadgauge evidence`: a measured run beside its prediction, as a file that others may have."""

from pathlib import Path
from typing import Any

import click

from loadgauge.core.base import parse, refuse, seconds
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import complete_model, run_options
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.rescale import evidence_text
from loadgauge.core.resolve.resolve import resolve_job


@click.command("evidence", cls=Grouped)
@click.argument("model", shell_complete=complete_model)
@run_options
@click.option("--step", required=True, metavar="3.1s", help="What one step of the optimizer took.")
@click.option("--allocated", metavar="42GiB", help="The most that PyTorch had allocated (max_memory_allocated).")
@click.option("--reserved", metavar="45GiB", help="The most that PyTorch had reserved (max_memory_reserved).")
@click.option("--card", metavar="47GiB", help="The most that the card showed (nvidia-smi).")
@click.option("--torch", "release", default="", metavar="2.13.0", help="The version of PyTorch.")
@click.option("--output", default="evidence.toml", show_default=True, metavar="FILE.toml", help="Where to write it.")
def command(model: str, step: str, release: str, output: str, **flags: Any) -> None:
    """Write what a run of MODEL (or of a job file) measured, beside what is predicted of it, and show it.

    The file has the flags of the job, versions, the measured step and memory, and the prediction: no paths, names, hosts or
    data. Nothing is sent. `loadgauge validate --runs FOLDER` predicts a folder of such files; CONTRIBUTING.md says how to
    add yours to the repository.

    \b
    loadgauge evidence llama-3.1-8b --gpu h100 --gpus 8 --zero 3 --step 1.2s --card 61GiB
    """
    measured = {"step": step} | {name: text for name in ("allocated", "reserved", "card") if (text := flags.pop(name))}
    for name, text in measured.items():
        unit = "second" if name == "step" else "byte"
        refuse(
            parse(text, name, unit)[1] != unit,
            f"{text!r} is not in {unit}s (such as {'3.1s' if name == 'step' else '42GiB'})",
            key=name,
        )
    result = resolve_job(Job(model=model, **flags)).estimate()
    text = evidence_text(result, measured, release)
    Path(output).write_text(text, encoding="utf-8")
    click.echo(f"{output} is written, and sent nowhere:\n\n{text}")
    if result.time is not None:
        click.echo(
            f"A step took {step}, {parse(step)[0] / result.time.step - 1:+.1%} against what is predicted"
            f" ({seconds(result.time.step)}). --anchor {output} moves later predictions by it."
        )
