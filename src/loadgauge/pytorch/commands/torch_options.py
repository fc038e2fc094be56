"""Options of the commands that run PyTorch (`trace`, `measure`, `compare`): fields of `spec.Job`, and what is PyTorch's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click
import msgspec

from loadgauge.core.base import is_script, needs_torch
from loadgauge.core.command_line.options.options import option
from loadgauge.core.command_line.options.param_types import Whole
from loadgauge.core.definitions.job.job import fields
from loadgauge.core.definitions.training.optimizers import torch_optimizers

if TYPE_CHECKING:
    from loadgauge.core.definitions.hardware.hardware import Gpu
    from loadgauge.pytorch.measure.calibrate import Calibration

Command = TypeVar("Command", bound=Callable[..., Any])
HELP = {
    "precision": "bf16-pure (the default), bf16-autocast, fp16-autocast, fp32.",
    "optimizer": f"{', '.join(torch_optimizers())} (default: adamw).",
    "recompute": "none (the default) or full.",
    "seq_len": "Tokens per sequence (default: 4096).",
    "zero": "0 (the default): DDP; 2 and 3: FSDP2, fully_shard.",
    "gpus": "Total GPUs; one rank of them is simulated.",
}
"""Where PyTorch has fewer choices than an estimate, or a default of its own."""
COUNT = Whole(1, 10**9)


def calibrated(command: str, device: str, card: Gpu | None, output: str | None) -> Calibration | None:
    """Return what this device measures; under torchrun that of the first rank alone, None on others. output: a file beside which
    what is measured is kept until all of it is there. Raises `click.UsageError` where it has no folder."""
    needs_torch(command)
    from loadgauge.pytorch.measure.benchmarks import Saved, join_ranks
    from loadgauge.pytorch.measure.calibrate import calibrate

    if output is not None and not Path(output).resolve().parent.is_dir():
        raise click.UsageError(f"--output: no such folder: {Path(output).parent}")
    with join_ranks(device) as rank:
        saved = Saved(None if output is None else Path(f"{output}.part{rank or ''}"), device)
        calibration = calibrate(device, card, saved=saved)
        saved.done()
    return None if rank else calibration


def job_options(names: tuple[str, ...]) -> Callable[[Command], Command]:
    """Gives a command the options of some fields of a `Job`, and `--layers`."""

    def decorate(command: Command) -> Command:
        command = click.option("--layers", type=COUNT, help="Number of layers, instead of the model's.")(command)
        for name in reversed(names):
            field = fields()[name]
            command = option(name, msgspec.structs.replace(field, help=HELP.get(name, field.help)))(command)
        return command

    return decorate


def script_output(target: str) -> TextIO | None:
    """Where the output of a script goes: to stdout, or to stderr where a machine reads the answer; None for a model."""
    asked = click.get_current_context().params
    read = any(asked.get(form) for form in ("json", "csv", "markdown"))
    return None if not is_script(target) else sys.stderr if read else sys.stdout
