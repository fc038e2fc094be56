"""`loadgauge check`: whether jobs still fit and stay within a budget, for a pull request or a commit hook."""

from __future__ import annotations

import contextlib
import os
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from loadgauge.core.base.errors import CANNOT_TELL, YES, ConfigError, Error, refuse
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import parse, run_options, whole_run_options
from loadgauge.core.definitions.job.job import Job

if TYPE_CHECKING:
    from loadgauge.job_files.exchange import JobFile

SETTINGS = "loadgauge.toml"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a `loadgauge.toml`: for all jobs, and for each by its file or model."""

    flags: str = ""
    budget: tuple[str, ...] = ()
    jobs: dict[str, Settings] = {}

    def job(self, name: str, flags: dict[str, Any]) -> Job:
        """Return a job: the flags of the command before its own, these before those of all."""
        own = self.jobs.get(name, Settings()).flags
        try:
            read = parse([name, *shlex.split(self.flags), *shlex.split(own)])
        except (click.UsageError, ValueError) as error:
            message = error.format_message() if isinstance(error, click.UsageError) else str(error)
            raise ConfigError(f"flags of {name}: {message}", file=SETTINGS) from None
        return read.replace(**{flag: value for flag, value in flags.items() if value is not None})


def settings(file: str | None) -> Settings:
    """Read the settings; without a `file`, those of this folder, if it has any. Raises `ConfigError`."""
    from loadgauge.core.base.files import read_text

    if file is None and not os.path.exists(SETTINGS):
        return Settings()
    try:
        return msgspec.convert(tomllib.loads(read_text(file or SETTINGS, 10**6)), Settings)
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(str(error), file=file or SETTINGS) from None


@contextlib.contextmanager
def base_folder(base: str) -> Iterator[str]:
    """A folder with the files as they were: `base` itself, or this folder at a revision of git. Raises `ConfigError`."""
    if os.path.isdir(base):
        yield base
        return
    import io
    import subprocess
    import tarfile
    import tempfile

    try:
        # `--end-of-options`: a revision is never read as an option of git.
        words = ["git", "archive", "--format=tar", "--end-of-options", base]
        done = subprocess.run(words, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ConfigError(f"{base!r} is no folder, and git cannot be run: {error.strerror}", key="against") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"{base!r} is neither a folder nor a revision: {' '.join(reason)}", key="against")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        archive.extractall(folder)
        yield folder


@click.command("check", cls=Grouped)
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@click.option(
    "--budget",
    multiple=True,
    metavar="NAME=VALUE",
    help="The most of memory, step, days, gpu-hours or cost (memory=22GiB,cost=500), and of growth over the base (growth=5%).",
)
@click.option(
    "--against",
    metavar="PLACE",
    help="What to compare with: a folder with the files as they were, or a revision of git.",
)
@click.option(
    "--settings", "file", metavar="FILE", help=f"Jobs with their flags and budgets. [{SETTINGS}, if there is one]"
)
@click.option("--allow-tight", is_flag=True, help="TIGHT is no failure: the card's memory lies inside the range.")
@run_options
@whole_run_options
@click.option(
    "--facts",
    is_flag=True,
    help="What JOBs that are job files say: each fact, and the key or the default that says it.",
)
@click.option("--markdown", "as_markdown", is_flag=True, help="A table in Markdown, for the summary of a pull request.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document: bytes, seconds and plain numbers.")
def command(
    jobs: tuple[str, ...],
    budget: tuple[str, ...],
    against: str | None,
    file: str | None,
    allow_tight: bool,
    facts: bool,
    as_markdown: bool,
    as_json: bool,
    **flags: Any,
) -> int:
    """Check that JOBs (job files of other tools, or models) fit their GPU and stay within a budget.

    Without a JOB, those of loadgauge.toml are checked, each with its flags and budget there:

    \b
    flags = "--price 2.50"
    budget = ["growth=5%"]
    [jobs."job.yaml"]
    flags = "--gpu 4090 --tokens 10M"
    budget = ["memory=22GiB", "cost=50"]

    Exit code: 0 every job fits within its budget, 1 one does not (or is TIGHT), 2 cannot tell.

    \b
    loadgauge check job.yaml --gpu 4090 --budget memory=22GiB
    loadgauge check job.yaml train.yaml --gpus 8 --gpu h100 --against origin/main
    """
    from loadgauge.core.command_line.main import say
    from loadgauge.core.plan.advise import budget as budgets

    refuse(as_json and as_markdown, "--json and --markdown exclude one another")
    budgets_file = settings(file)
    names = jobs or tuple(budgets_file.jobs)
    if not names:
        raise click.UsageError(f"Missing argument 'JOB': there is no {SETTINGS} with jobs either")
    if facts:
        _facts([budgets_file.job(name, flags) for name in names], as_json=as_json)
        return YES
    before: dict[str, budgets.Figures] = {}
    if against is not None:
        with base_folder(against) as folder, contextlib.chdir(folder):
            was = settings(None) if file is None and os.path.exists(SETTINGS) else budgets_file
            for name in names:
                # A job that is new, or could not be told before, has nothing to be compared with.
                with contextlib.suppress(Error):
                    before[name] = budgets.figures(was.job(name, flags))
    own = {name: budgets_file.jobs.get(name, Settings()).budget for name in names}
    checked = [
        budgets.check(
            name,
            budgets_file.job(name, flags),
            budgets.read_limits([*budgets_file.budget, *own[name], *budget]),
            before.get(name),
            allow_tight=allow_tight,
        )
        for name in names
    ]
    code = budgets.exit_code(checked)
    if code == CANNOT_TELL:  # As with every command, one line on stderr says why, before what could be told.
        say("; ".join(_named(check.name, check.error) for check in checked if check.error), code)
        if not (as_json or as_markdown or any(check.now is not None for check in checked)):
            return code
    if as_json or as_markdown:
        from loadgauge.core.text.table import document
        from loadgauge.job_files.commands.check_text import markdown

        ok, table = code == YES, markdown(checked)
        document({"jobs": [check.to_dict() for check in checked], "ok": ok, "table": table}) if as_json else click.echo(
            table
        )
    else:
        from loadgauge.job_files.commands.check_text import report

        report(checked)
    return code


def _named(name: str, error: str) -> str:
    """Return an error behind its job's name, once."""
    return error if error.startswith(f"{name}: ") else f"{name}: {error}"


def _facts(jobs: Sequence[Job], *, as_json: bool) -> None:
    """Print what job files say. Raises `ConfigError`."""
    from loadgauge.job_files.ideas.facts import FIELDS
    from loadgauge.job_files.job_file import flags_given, names_beside, read_files

    files = [
        file
        for job in jobs
        for file in read_files(
            [job.model, *names_beside(job)],
            job,
            {name: value for name, value in flags_given(job).items() if name in FIELDS},
        )
    ]
    if as_json:
        from loadgauge.core.text.table import document

        document({"files": [_facts_document(file) for file in files]})
        return
    from loadgauge.job_files.commands.check_text import report_facts

    for file in files:
        report_facts(file)


def _facts_document(file: JobFile) -> dict[str, Any]:
    from loadgauge.job_files.commands.check_text import line_of
    from loadgauge.job_files.reading.documents import load

    text = load(file.file)
    return {
        "file": file.file,
        "dialect": file.dialect,
        "version": file.version,
        "facts": [
            {
                "name": name,
                "value": str(fact.value),
                "key": fact.key,
                "default": fact.default,
                "line": line_of(text, fact.key),
            }
            for name, fact in file.facts.items()
        ],
        "not_read": list(file.unread),
        "aside": file.aside,
    }
