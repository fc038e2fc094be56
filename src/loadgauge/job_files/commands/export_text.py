"""The best layout as the job file of another tool: the user's own, patched, or a new one."""

from typing import Any

import click
import msgspec

from loadgauge.core.base import GIB, seconds, write_text
from loadgauge.core.plan.answer import Plan
from loadgauge.core.plan.request import FLAGS
from loadgauge.core.resolve.reproduce import layout_flags
from loadgauge.job_files.dialects import dialect as dialect_of
from loadgauge.job_files.exchange import write
from loadgauge.job_files.export import job_of, name_for_dialect
from loadgauge.job_files.ideas.facts import Extra
from loadgauge.job_files.job_file import is_job_file, read_files
from loadgauge.job_files.reading.documents import load


def export_plan(plan: Plan, *, as_json: bool) -> dict[str, Any]:
    """Write the best layout of a plan in a framework's own format, to a file or to stdout; print the rest to stderr.

    The file that is patched is `onto`, else the MODEL where that is a job file of the same format. With `as_json` nothing
    is written. Returns the format, the text, what it cannot express and the file that was patched.
    """
    request, setup, best = plan.request, plan.setup, plan.best
    model, estimate = request.job.model, best.estimate
    assert request.export is not None
    job = job_of(msgspec.structs.replace(setup, layout=estimate.layout, training=plan.case.training))
    extra, template, file = Extra(), None, request.onto or ""
    if is_job_file(model):
        own = read_files([model], request.job, {})[0]
        job, extra = job.replace(model=own.job.model), Extra(config=own.extra.config)
        if not file and own.dialect == request.export:
            file = model
    elif request.export != FLAGS:
        job, extra = name_for_dialect(job, request.export, patched=bool(file))
    if file:
        template = load(file)
    left_out: tuple[str, ...] = ()
    if request.export == FLAGS:
        dialect, text = FLAGS, best.command()
    else:
        written = write(job, request.export, template, extra=extra, file=file)
        dialect, text, left_out = written.dialect, written.text, written.left_out
    exported: dict[str, Any] = {"dialect": dialect, "text": text, "left_out": list(left_out), "patched": file or None}
    if as_json:
        return exported
    if request.out is None:
        click.echo(text, nl=not text.endswith("\n"))
    else:
        write_text(request.out, text)
    step, memory = seconds(estimate.timing.step), estimate.memory.total / GIB
    click.echo(f"loadgauge: {layout_flags(estimate)}: a step of {step}, {memory:,.1f} GiB", err=True)
    if dialect != FLAGS:
        title = dialect_of(dialect)
        base = f"{file}, patched" if file else "a new file"
        click.echo(f"loadgauge: {title.title} ({title.versions}), {base}", err=True)
    for line in left_out:
        click.echo(f"loadgauge: {dialect}: {line}", err=True)
    return exported
