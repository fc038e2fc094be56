"""Options of the commands that run PyTorch (`trace`, `measure`, `compare`): fields of `spec.Job`, and what is PyTorch's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TextIO, TypeVar

import click
import msgspec

from loadgauge.core.command_line.options.options import option
from loadgauge.core.command_line.options.param_types import Whole
from loadgauge.core.definitions.job.job import fields
from loadgauge.core.definitions.training.optimizers import torch_optimizers

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


def show(document: Any, as_json: bool, text: str, *arguments: Any) -> None:
    """Print an answer: as one JSON document, or by a function that prints text, `module:function` of `pytorch/text`."""
    if as_json:
        from loadgauge.core.text.table import document as printed

        printed(document)
    else:
        module, _, name = text.partition(":")
        getattr(import_module(f"loadgauge.pytorch.text.{module}"), name)(*arguments)


def warn(note: str) -> None:
    """Prints a note on stderr."""
    click.echo(f"loadgauge: {note}", err=True)


def job_options(names: tuple[str, ...]) -> Callable[[Command], Command]:
    """Gives a command the options of some fields of a `Job`, and `--layers`."""

    def decorate(command: Command) -> Command:
        command = click.option("--layers", type=COUNT, help="Number of layers, instead of the model's.")(command)
        for name in reversed(names):
            field = fields()[name]
            command = option(name, msgspec.structs.replace(field, help=HELP.get(name, field.help)))(command)
        return command

    return decorate


def script_output(target: str, as_json: bool) -> TextIO | None:
    """Where the output of a script goes: to stdout, or to stderr where a JSON document is printed; None for a model."""
    from loadgauge.core.base.files import is_script

    return None if not is_script(target) else sys.stderr if as_json else sys.stdout
