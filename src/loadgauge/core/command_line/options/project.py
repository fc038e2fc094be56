"""Answers to questions that decide a verdict, remembered for the project in a file of the folder where loadgauge is run."""

import sys
from pathlib import Path

from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.question import Question
from loadgauge.core.estimate.unsaid import spelled
from loadgauge.core.resolve.resolve import resolve_job

FILE = ".loadgauge.toml"
"""Flags by their names, such as `weights = "float32"`; delete it, or a line of it, to be asked again."""
ANSWERS = ("weights", "kbit_upcast", "loss", "optimizer")
"""Fields of a job that a question may be about."""


def remembered() -> dict[str, str]:
    """Return the answers that the project's file has, by field. Raises `ConfigError` for a file that is not such a list."""
    import tomllib

    try:
        answers = tomllib.loads(Path(FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(str(error), file=FILE) from None
    for name, value in answers.items():
        if name not in ANSWERS or not isinstance(value, str):
            raise ConfigError(
                f'is not one of {", ".join(ANSWERS)} with a text, such as weights = "float32"', key=name, file=FILE
            )
    return answers


def answered(job: Job) -> tuple[Job, dict[str, str]]:
    """Return the job with the remembered answers to what it leaves open, and these by flag, for the list of assumptions."""
    answers = remembered()
    if not answers:
        return job, {}
    try:
        setup = resolve_job(job)
    except Error:  # which whoever estimates the job says
        return job, {}
    open_flags = {spelled(setup.training, other)[0] for other in setup.others}
    fields = {name: value for name, value in answers.items() if f"--{name.replace('_', '-')}" in open_flags}
    return job.replace(**fields), {f"--{name.replace('_', '-')}": f"{value} ({FILE})" for name, value in fields.items()}


def ask(question: Question | None) -> dict[str, str]:
    """Ask on a terminal which answer holds, remember it, and return the fields that say it; never in a pipe."""
    if question is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return {}
    choices = [choice for choice in question.choices if choice.fields]
    if len(choices) < len(question.choices):
        return {}
    import click

    keys = "  ".join(f"[{number}] {choice.value}" for number, choice in enumerate(choices, 1))
    click.echo(f"Which is it, {question.flag}?  {keys}  [any other key] leave it open")
    key = click.getchar()
    if key not in map(str, range(1, len(choices) + 1)):
        return {}
    fields = dict(choices[int(key) - 1].fields)
    import tomlkit

    path = Path(FILE)
    file = tomlkit.parse(path.read_text(encoding="utf-8")) if path.exists() else tomlkit.document()
    file.update(fields)
    path.write_text(tomlkit.dumps(file), encoding="utf-8")
    click.echo(f"Remembered in {path.resolve()}; delete the file to be asked again.\n")
    return fields
