"""Command-line options of a training job, made from the fields of `spec.Job`, and the way back to a `Job`."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import click

from loadgauge.core.base import ConfigError, write_text
from loadgauge.core.command_line.options.param_types import Read
from loadgauge.core.definitions.job.job import POSTTRAIN, WHOLE_RUN, Field, Job, fields
from loadgauge.core.definitions.serving.inference import TASKS, fields as inference_fields

AFTER = fields()["task"].choices
"""The tasks of preference tuning, distillation and reinforcement learning."""
Command = TypeVar("Command", bound=Callable[..., Any])


def _completed(name: str, field: Field) -> Callable[..., list[str]] | None:
    """Return what completes the value of an option in a shell; None: what its type knows of itself."""
    if name != "gpu" and (field.kind == "choice" or not field.values):
        return None

    def values(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        from loadgauge.core.definitions.hardware.hardware import gpu_ids

        return [value for value in (gpu_ids() if name == "gpu" else field.values) if value.startswith(incomplete)]

    return values


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Complete a model: the names of the catalogue, otherwise files (a config.json, a job file, a folder)."""
    from click.shell_completion import CompletionItem

    from loadgauge.core.families.catalogue import models

    items = [CompletionItem(name) for name in models() if name.startswith(incomplete)]
    return items or [CompletionItem(incomplete, type="file")]


def _one_card(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> str | None:
    """Return the GPU that is named; several are cells of a sweep."""
    if len(set(names)) > 1:
        raise ConfigError(f"is given twice; to compare cards in a table: --sweep gpu={','.join(names)}", key="gpu")
    return names[-1] if names else None


def option(name: str, field: Field) -> Callable[[Command], Command]:
    """Make the option of a field of `Job`, as a decorator of a command."""
    flag, more = f"--{name.replace('_', '-')}", [f"--{alias}" for alias in field.aliases]
    if field.kind == "switch":
        return click.option(f"{flag}/--no-{flag[2:]}", *more, name, default=None, help=field.help)
    kind: Any = click.Choice(field.choices) if field.kind == "choice" else None
    if field.kind in ("whole", "positive", "count", "price"):
        kind = Read(field.read)
    completed = _completed(name, field)
    if field.repeats:
        joined: dict[str, Any] = {
            "multiple": True,
            "callback": lambda ctx, param, texts: ",".join(texts) if texts else None,
        }
        return click.option(flag, *more, name, metavar=field.metavar, help=field.help, **joined)
    repeated: dict[str, Any] = {"multiple": True, "callback": _one_card} if name == "gpu" else {}
    return click.option(
        flag, *more, name, type=kind, metavar=field.metavar, help=field.help, shell_complete=completed, **repeated
    )


def options(command: Command, names: Iterable[str]) -> Command:
    """Add the options of the named fields of `Job` to a command."""
    for name in reversed(list(names)):
        command = option(name, fields()[name])(command)
    return command


def run_options(command: Command, *without: str) -> Command:
    """Add the options that describe one step of a job to a command. without: fields that it has in a way of its own"""
    return options(command, [name for name in fields() if name not in ("model", *WHOLE_RUN, *POSTTRAIN, *without)])


def whole_run_options(command: Command) -> Command:
    """Add the options that describe a whole training run (`WHOLE_RUN`) to a command."""
    return options(command, WHOLE_RUN)


def task_options(command: Command) -> Command:
    """Add the flags of what comes after pre-training, and of a model that is only run forward, to a command; `--task` first."""
    command = options(command, [name for name in POSTTRAIN if name != "task"])
    for name, field in reversed(inference_fields().items()):
        command = option(name, field)(command)
    tasks = click.Choice(("train", *TASKS, *AFTER))
    return click.option(
        "--task",
        type=tasks,
        metavar="TASK",
        help="train (default); generate, with a cache; forward, which scores; quantise, layer by layer;"
        f" or, after pre-training, {', '.join(AFTER)}.",
    )(command)


@cache
def _reader() -> click.Command:
    """A command that takes the options of a job and does nothing."""
    return options(run_options(whole_run_options(click.Command("run", params=[click.Argument(["model"])]))), POSTTRAIN)


def parse(words: Sequence[str]) -> Job:
    """Parse the words of a command line, including the model; the inverse of `Job.words`. Raises `click.UsageError`.

    >>> parse(["gpt2", "--tp", "2"]) == Job(model="gpt2", tp=2)
    True
    """
    return Job(**_reader().make_context("run", list(words)).params)


page_option = click.option(
    "--html",
    "page",
    type=click.Path(),
    metavar="FILE",
    help="Write it as one page that opens anywhere, with formulas and with sliders over a table of its neighbours.",
)


def write_page(file: str, text: str, count: int) -> None:
    """Write one page with so many answers, and say so on stderr. Raises `ConfigError` where it cannot be written."""
    write_text(file, text)
    click.echo(f"{file}: {count:,} answers in one file that opens anywhere, without a network", err=True)
