"""`loadgauge estimate`: does it fit, where does every byte go, how long does it take, what does it cost."""

from __future__ import annotations

from typing import Any, get_args

import click
import msgspec

from loadgauge.core.answers.why.of_estimate import TOPICS
from loadgauge.core.base.errors import NO, YES, ConfigError, Error, Untrained
from loadgauge.core.base.files import write_text
from loadgauge.core.base.hooks import need
from loadgauge.core.base.units import share
from loadgauge.core.base.verdict import exit_code, host_holds
from loadgauge.core.command_line import posttrain as after
from loadgauge.core.command_line.options import project
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import (
    AFTER,
    brief_option,
    complete_model,
    run_options,
    shortly,
    task_options,
    whole_run_options,
)
from loadgauge.core.command_line.sizes import model_or_usage, size_options
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.inference import fields as inference_fields
from loadgauge.core.definitions.training.memory_range import COUNTERS, Counter
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import Estimate, When
from loadgauge.core.estimate.tables import TABLES, TableName
from loadgauge.core.resolve.resolve import names_job_file, resolve_job

FIGURES = ("all", "bytes", "step", "time", "roofline", "schedule")


@click.command("estimate", cls=Grouped)
@click.argument("model", required=False, shell_complete=complete_model)
@size_options
@run_options
@whole_run_options
@task_options
@click.option("--mfu", metavar="SHARE", help="Model FLOPs utilisation to assume (40%), in place of the predicted one.")
@click.option("--hfu", metavar="SHARE", help="The same with recomputation counted (50%).")
@click.option(
    "--counter",
    type=click.Choice(COUNTERS),
    help="What this counter shows at the peak: torch.cuda.max_memory_allocated, active_bytes, max_memory_reserved, or the"
    " driver's.",
)
@click.option(
    "--allow-tight", is_flag=True, help="Exit code 0 where it is TIGHT: the card's memory lies inside the range."
)
@brief_option("the verdict, the largest parts, the step and the remedy")
@click.option("--json", "as_json", is_flag=True, help="One JSON document: bytes, FLOP and plain counts.")
@click.option(
    "--explain",
    "part",
    type=click.Choice((*PARTS, *TOPICS, *after.TOPICS)),
    metavar="PART",
    help=f"Explain one part: formula, your numbers, source. Of the memory: {', '.join(PARTS)}; else {', '.join(TOPICS)};"
    f" with --task of a rollout {', '.join(after.TOPICS)}.",
)
@click.option(
    "--at", type=click.Choice(get_args(When)), help="With --explain: the moment of the step (default: largest)."
)
@click.option(
    "--table",
    type=click.Choice(TABLES),
    help="A table by operation, of a micro-batch on the rank that needs the most memory.",
)
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="NAME=VALUES",
    help="Estimate every value of a flag (micro-batch=1,2,4..64); given again, every combination.",
)
@click.option("--output", metavar="FILE", help="With --sweep: write the cells to a .csv, .json or .parquet file.")
@click.option("--csv", "as_csv", is_flag=True, help="With --table or --sweep: CSV.")
@click.option(
    "--plot", "file", type=click.Path(), metavar="FILE", help="Draw the estimate, or the --sweep: .svg, .png or .pdf."
)
@click.option(
    "--html",
    "page",
    type=click.Path(),
    metavar="FILE",
    help="Write the estimate as one page that opens anywhere, with formulas and with sliders over a table of its neighbours.",
)
@click.option(
    "--timeline",
    type=click.Path(),
    metavar="FILE",
    help="Write the step's schedule, every piece of work of every stage, as a trace for Perfetto or chrome://tracing.",
)
@click.option(
    "--figure", type=click.Choice(FIGURES), default="all", help="Which figure --plot draws (all on one sheet)."
)
def command(
    model: str | None,
    counter: Counter | None,
    allow_tight: bool,
    brief: bool | None,
    as_json: bool,
    part: str | None,
    at: When | None,
    table: TableName | None,
    sweeps: tuple[str, ...],
    output: str | None,
    as_csv: bool,
    file: str | None,
    page: str | None,
    timeline: str | None,
    figure: str,
    task: str | None,
    mfu: str | None,
    hfu: str | None,
    **flags: Any,
) -> int:
    """Estimate the memory of the fullest rank at its peak, FLOPs, time and cost of training MODEL.

    MODEL is a name in the catalogue (`loadgauge models`), a Hugging Face config.json, its folder, or another tool's job
    file, whose run the flags change (`loadgauge convert --help` lists the tools); or sizes describe it (--size). Flags
    that are not given have defaults, which are listed.

    The verdict is of an 80 % range: FITS where the card holds its upper end, whatever is unsaid; TIGHT where the card's memory
    lies inside the range; DEPENDS where it fits as assumed and one thing that was not said decides; DOES NOT FIT where not
    even the lower end fits. Exit code: 0 FITS (or no --gpu is given), 1 TIGHT (0 with --allow-tight), DEPENDS or DOES NOT FIT,
    2 cannot tell.

    \b
    loadgauge estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3
    loadgauge estimate llama-3.1-70b --gpu h100-sxm5-80gb --gpus 64 --tp 8 --pp 2 --sequence-parallel \\
        --global-batch 512 --tokens 1T --price 2.50
    loadgauge estimate my-model/config.json --gpu rtx4090 --qlora --loss chunked
    loadgauge estimate --size 10B --family gpt --vocab 50k --gpu a100-sxm4-80gb --gpus 8 --zero 3
    loadgauge estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --sweep micro-batch=1,2,4..16 --sweep zero=1..3
    loadgauge estimate llama-3.1-70b --gpu h100-sxm5-80gb --task generate --context 4096 --batch 16 --tp 2
    loadgauge estimate qwen2.5-7b --gpu h100-sxm5-80gb --gpus 8 --zero 3 --task grpo --prompts 64 --samples 8 \\
        --prompt-len 1024 --answers exp:2000,8192 --rollout vllm:tp=2,utilization=0.6,sleep=1
    """
    model = model_or_usage(model, flags)
    for name, value in (("mfu", mfu), ("hfu", hfu)):
        if value is not None:
            if flags["measured"] is not None:
                raise ConfigError("scales times too, as --measured and the other utilisation; give one", key=name)
            if task not in (None, "train"):
                raise ConfigError("is of --task train", key=name)
            flags["measured"] = f"{name}={share(value, name)}"
    of_inference = {name: flags.pop(name) for name in inference_fields()}
    reader = None
    if task is None or (task == "generate" and names_job_file(model)):
        try:
            task = after.task_of_file(Job(model=model, **flags)) or task
        except Untrained as error:
            if task is None:
                raise ConfigError(f"{error}; --task generate estimates what it runs") from None
            reader = error
    if task not in (None, "train"):
        assert task is not None
        others = {
            "--sweep": sweeps,
            "--table": table,
            "--explain": part,
            "--plot": file,
            "--html": page,
            "--timeline": timeline,
            "--counter": counter,
            "--csv": as_csv,
            "--at": at,
            "--figure": figure != "all",
            "--output": output,
        }
        if task in AFTER:
            _not_of(of_inference, "generate or forward")
            del others["--explain"]
            job = Job(model=model, task=task, **flags)
            return after.answer(job, others, part, as_json=as_json, allow_tight=allow_tight, brief=shortly(brief))
        asked = Job(model=model, **flags)
        return _infer(
            asked, reader, task, of_inference, others, as_json=as_json, allow_tight=allow_tight, brief=shortly(brief)
        )
    _not_of(of_inference, "generate or forward")
    there = "there is no --explain" if part is None else f"{part} is of the whole step"
    for wrong, text, key in (
        (part in after.TOPICS, f"{part} is of a run with a rollout: --task grpo", "explain"),
        (not file and figure != "all", "says what --plot FILE draws; there is no --plot", "figure"),
        (
            at and part not in PARTS,
            f"--at chooses the moment at which --explain explains a part of the memory; {there}",
            "",
        ),
        (
            brief and (as_json or part),
            f"is the short text; {'--json' if as_json else '--explain'} is another answer",
            "brief",
        ),
        (sweeps and figure != "all", "is of one estimate; a sweep has one figure", "figure"),
        (sweeps and table, "is of one estimate; leave out --sweep", "table"),
        (sweeps and timeline, "is of one estimate; leave out --sweep", "timeline"),
        (sweeps and page, "has a table of its own; leave out --sweep", "html"),
        (output and not sweeps, "goes with --sweep", "output"),
    ):
        if wrong:
            raise ConfigError(text, key=key)
    answer = "--sweep" if sweeps else "" if table is None else "--table"
    drawn = None if sweeps else file
    _consistent(answer, part, as_csv=as_csv, as_json=as_json, brief=brief, file=drawn, counter=counter)
    if sweeps:
        return _sweep(
            Job(model=model, **flags), sweeps, output, file, as_csv=as_csv, as_json=as_json, allow_tight=allow_tight
        )
    job, answers = project.answered(Job(model=model, **flags))
    given = resolve_job(job)
    given = msgspec.structs.replace(given, assumed=given.assumed | answers)
    result = given.estimate()
    # It may be of another run, where the job leaves something open.
    given = msgspec.structs.replace(given, assumed=given.assumed | (result.setup or given).assumed)
    if file is not None:
        from pathlib import Path

        need("FIGURES").plot(given, result, Path(file), figure)
    if timeline is not None:
        from loadgauge.core.answers.figures.chrome_trace import chrome_trace

        write_text(timeline, msgspec.json.encode(chrome_trace(result)).decode())
    if page is not None:
        from pathlib import Path

        count = need("HTML").write(given, result, Path(page))
        click.echo(f"{page}: {count:,} answers in one file that opens anywhere, without a network", err=True)
    if table is not None:
        _table(result, table, as_csv=as_csv, as_json=as_json)
    elif as_json:
        from loadgauge.core.text.document import estimate_document
        from loadgauge.core.text.table import document

        document(estimate_document(given, result, part, at or "largest", outcomes=True))
    elif part in TOPICS:
        from loadgauge.core.answers.why.of_estimate import reason
        from loadgauge.core.text.estimate.reason import show as show_reason

        show_reason(reason(result, part, given.budget(result)))
    elif part is not None:
        from loadgauge.core.text.estimate.explanation import show

        show(result.explain(part, at or "largest"))
    else:
        from loadgauge.core.text.estimate import brief as short
        from loadgauge.core.text.estimate.estimate import report

        if shortly(brief):
            short.brief(given, result, counter)
        else:
            report(given, result, counter=counter)
        if fields := project.ask(result.memory.question):
            given = resolve_job(job.replace(**fields))
            result = given.estimate()
            short.brief(given, result, counter)
    if not host_holds(given.on_host(result), given.job.host_memory):
        return NO
    return exit_code(result.memory.verdict, allow_tight=allow_tight)


def _not_of(given: dict[str, Any], tasks: str) -> None:
    """Raises `ConfigError` where a flag of other tasks is given."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"goes with --task {tasks}", key=name)


def _infer(
    job: Job,
    why: Untrained | None,
    task: str,
    given: dict[str, Any],
    others: dict[str, Any],
    *,
    as_json: bool,
    allow_tight: bool,
    brief: bool,
) -> int:
    """Estimates a forward pass or generation and prints it.

    why: a job file in place of a model trains nothing; others: answers that only training has, by their flags
    """
    from loadgauge.core.resolve.inference import resolve_inference

    for flag, value in others.items():
        if value:
            raise ConfigError(f"{flag} is of training; --task {task} has one answer, also as --json")
    unread: dict[str, Any] = {}
    if why is None:
        answer, assumed = resolve_inference(job, task, given)  # type: ignore[arg-type]
    else:
        read = need("DIALECTS").served(job, why)
        merged = read.given | {name: value for name, value in given.items() if value is not None}
        answer, assumed = resolve_inference(read.job, "generate", merged, model=read.model)
        assumed |= read.assumed
        unread = {"unread": read.unread}
        if not as_json and read.unread:
            assumed["keys that are not read"] = ", ".join(one["key"] for one in read.unread)
    if as_json:
        from loadgauge.core.text.table import document

        document(answer.to_dict() | {"assumed": assumed} | unread)
    elif brief:
        from loadgauge.core.text.inference import brief as print_brief

        print_brief(answer)
    else:
        from loadgauge.core.text.inference import report as report_inference

        report_inference(answer, assumed)
    return exit_code(answer.memory.verdict, allow_tight=allow_tight)


def _consistent(answer: str, part: str | None, *, as_csv: bool, as_json: bool, **texts: Any) -> None:
    """Raises `ConfigError` where one answer is asked for in two ways. answer: --table, --sweep or neither"""
    if not answer:
        if as_csv:
            raise ConfigError("goes with --table or --sweep", key="csv")
        return
    for name, value in {"explain": part, **texts}.items():
        if value:
            raise ConfigError(f"is another answer than {answer}", key="plot" if name == "file" else name)
    if as_csv and as_json:
        raise ConfigError("--csv and --json exclude one another")


def _table(result: Estimate, name: TableName, *, as_csv: bool, as_json: bool) -> None:
    """Prints a table by operation."""
    from loadgauge.core.estimate.tables import table as table_of

    found = table_of(result.workings, name)
    if as_json:
        from loadgauge.core.text.table import document

        document(found.to_dict())
    elif as_csv:
        from loadgauge.core.text.rows import print_csv

        print_csv(found.rows, list(found.rows[0]))
    else:
        from loadgauge.core.text.estimate.operations import report as report_table

        report_table(found)


def _sweep(
    job: Job,
    texts: tuple[str, ...],
    output: str | None,
    file: str | None,
    *,
    as_csv: bool,
    as_json: bool,
    allow_tight: bool,
) -> int:
    """Estimates every cell and prints them; the exit code: 0 one fits, 1 none does, 2 no cell is a run."""
    from loadgauge.core.plan.space.estimates import CANNOT_TELL as UNTOLD
    from loadgauge.core.plan.space.estimates import columns, read_axes, swept
    from loadgauge.core.text import rows as files

    axes = read_axes(texts)
    if output is not None:
        files.ending(output)
    rows = list(swept(job, axes))
    names = columns(list(axes))
    if output is not None:
        files.write(output, rows, names)
    if file is not None:
        from pathlib import Path

        need("FIGURES").plot_sweep(rows, axes, Path(file), job.command())
    if as_json:
        from loadgauge.core.text.table import document

        document({"axes": axes, "cells": rows})
    elif as_csv:
        files.print_csv(rows, list(names))
    else:
        from loadgauge.core.text.estimate.estimates import report as report_cells

        report_cells(rows, axes, job.command())
        if output is not None:
            click.echo(f"Every column: {output}")
    outcomes = {row["outcome"] for row in rows}
    if any(exit_code(word, allow_tight=allow_tight) == YES for word in outcomes - {UNTOLD}):
        return YES
    if not outcomes - {UNTOLD}:
        raise Error(f"no cell of the sweep is a run: {rows[0]['error']}")
    return NO
