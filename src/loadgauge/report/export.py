"""The best layout as the job file of another tool: the user's own, patched, or a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from loadgauge.errors import ConfigError
from loadgauge.estimate.result import Estimate
from loadgauge.formats.dialects import dialect as dialect_of
from loadgauge.formats.exchange import load, read, write
from loadgauge.formats.facts import Extra
from loadgauge.plan.plan import Case
from loadgauge.resolve.export import FLAGS, job_of, name_for_dialect
from loadgauge.resolve.job_file import is_job_file
from loadgauge.resolve.reproduce import completer, layout_flags
from loadgauge.resolve.setup import Setup
from loadgauge.units import GIB, seconds


def exported(given: Setup, case: Case, best: Estimate, asked: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Writes the best layout in the words of a dialect, to a file or to stdout; what it cannot say goes to stderr.

    The file that is patched is `--onto`, else the MODEL where that is a job file of the same dialect.
    """
    job, extra = job_of(msgspec.structs.replace(given, layout=best.layout, training=case.training)), Extra()
    template, file = None, asked["onto"] or ""
    if is_job_file(asked["model"]):
        own = read(load(asked["model"]), file=asked["model"])
        job, extra = job.replace(model=own.job.model), Extra(config=own.extra.config)
        if not file and own.dialect == asked["export"]:
            file = asked["model"]
    elif asked["export"] != FLAGS:
        job, extra = name_for_dialect(job, asked["export"], patched=bool(file))
    if file:
        template = load(file)
    left_out: tuple[str, ...] = ()
    if asked["export"] == FLAGS:
        dialect, text = FLAGS, completer(given.job)(best).command()
    else:
        written = write(job, asked["export"], template, extra=extra, file=file)
        dialect, text, left_out = written.dialect, written.text, written.left_out
    found: dict[str, Any] = {"dialect": dialect, "text": text, "left_out": list(left_out), "patched": file or None}
    if as_json:
        return found
    if asked["out"] is None:
        click.echo(text, nl=not text.endswith("\n"))
    else:
        try:
            Path(asked["out"]).write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot be written: {getattr(error, 'strerror', None) or error}", file=asked["out"]
            ) from None
    assert best.time is not None
    click.echo(
        f"loadgauge: {layout_flags(best)}: a step of {seconds(best.time.step)}, {best.memory.total / GIB:,.1f} GiB",
        err=True,
    )
    if dialect != FLAGS:
        title = dialect_of(dialect)
        what = f"{file}, patched" if file else "a new file"
        click.echo(f"loadgauge: {title.title} ({title.versions}), {what}", err=True)
    for line in left_out:
        click.echo(f"loadgauge: {dialect}: {line}", err=True)
    return found
