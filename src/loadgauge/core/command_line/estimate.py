"""`loadgauge estimate`: does it fit, where does every byte go, how long does it take, what does it cost."""

from functools import partial
from typing import Any, get_args

import click
import msgspec

from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.estimate import MOMENT, Estimated
from loadgauge.core.answers.why.of_estimate import TOPICS
from loadgauge.core.base import ConfigError, Untrained, need, share, write_text
from loadgauge.core.command_line.options import project
from loadgauge.core.command_line.options.answering import answering, refuse
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import (
    AFTER,
    complete_model,
    page_option,
    run_options,
    task_options,
    whole_run_options,
    write_page,
)
from loadgauge.core.command_line.sizes import model_or_usage, size_options
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.inference import TASKS, fields as inference_fields
from loadgauge.core.definitions.training.memory_range import COUNTERS, Counter
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import When
from loadgauge.core.estimate.tables import TABLES, TableName, table as table_of
from loadgauge.core.resolve.resolve import names_job_file, resolve_job
from loadgauge.core.text.table import print_note


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
@answering(
    "the verdict, the largest parts, the step and the remedy",
    f"Of the memory: {', '.join(PARTS)}; else {', '.join(TOPICS)}; with --task of a rollout kv, logprobs, sync, tail, of"
    " inference memory, first, token.",
)
@click.option(
    "--at",
    type=click.Choice(get_args(When)),
    help="What is held at this moment; with --explain, of one part (largest).",
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
@page_option
@click.option(
    "--timeline",
    type=click.Path(),
    metavar="FILE",
    help="Write the step's schedule, every piece of work of every stage, as a trace for Perfetto or chrome://tracing.",
)
def command(
    model: str | None,
    counter: Counter | None,
    allow_tight: bool,
    at: When | None,
    table: TableName | None,
    sweeps: tuple[str, ...],
    output: str | None,
    page: str | None,
    timeline: str | None,
    task: str | None,
    mfu: str | None,
    hfu: str | None,
    **flags: Any,
) -> Answer:
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
                raise ConfigError(
                    "scales times, as --measured and the other utilisation do; give one of them", key=name
                )
            if task not in (None, "train"):
                raise ConfigError("needs --task train", key=name)
            flags["measured"] = f"{name}={share(value, name)}"
    of_inference = {name: flags.pop(name) for name in inference_fields()}
    reader = None
    if task is None or (task == "generate" and names_job_file(model)):
        try:
            if names_job_file(model):
                task = need("DIALECTS").from_job_file(Job(model=model, **flags))[0].task or task
        except Untrained as error:
            task, reader = "generate", error
    of_training = {"table": table, "timeline": timeline, "counter": counter}
    if task not in (None, "train"):
        refuse(of_training | {"at": at}, "needs --task train")
    if task in TASKS:
        refuse({"sweep": sweeps}, f"plan --task {task} lays batches and layouts side by side")
    if sweeps:
        refuse(of_training | {"html": page}, "works for one estimate; leave out --sweep")
    elif output is not None:
        raise ConfigError("needs --sweep", key="output")
    job = Job(model=model, task=task if task in AFTER else None, **flags)
    if task in TASKS:
        return _infer(job, reader, task, of_inference, page, allow_tight=allow_tight)
    refuse(of_inference, "needs --task generate or forward; of training: --micro-batch and --seq-len")
    if sweeps:
        return _sweep(job, sweeps, output, allow_tight=allow_tight)
    if task in AFTER:
        from loadgauge.core.answers.post_training import answered

        run = answered(job, allow_tight=allow_tight)
        if page is not None:
            write_page(page, *need("HTML").page_of_task(run))
        return run
    return _estimate(job, counter=counter, at=at, table=table, page=page, timeline=timeline, allow_tight=allow_tight)


def _estimate(
    job: Job, *, at: When | None, table: TableName | None, page: str | None, timeline: str | None, **more: Any
) -> Answer:
    """Estimates a job, and writes the files that are asked for."""
    part = click.get_current_context().params["topic"]
    if at and part not in (None, *PARTS):
        raise ConfigError(
            f"--at chooses the moment at which --explain explains a part of the memory; {part} is of the whole step"
        )
    job, answers = project.answered(job)
    setup = resolve_job(job)
    setup = msgspec.structs.replace(setup, assumed=setup.assumed | answers)
    if at == "setup":
        around = msgspec.structs.replace(setup.training.around, load=True)
        setup = msgspec.structs.replace(setup, training=msgspec.structs.replace(setup.training, around=around))
    result = setup.estimate()
    # It may be of another run, where the job leaves something open.
    setup = msgspec.structs.replace(setup, assumed=setup.assumed | (result.setup or setup).assumed)
    if timeline is not None:
        from loadgauge.core.answers.figures.chrome_trace import chrome_trace

        write_text(timeline, msgspec.json.encode(chrome_trace(result)).decode())
    if page is not None:
        write_page(page, *need("HTML").page(setup, result))
    if table is not None:
        whole = Estimated.of(setup, result, allow_tight=more["allow_tight"])
        listing = table_of(result.workings, table)
        return Answer(
            form="estimate.table",
            writer="loadgauge.core.text.estimate.operations:write",
            shown=listing,
            document=listing.to_dict(),
            table=listing.rows,
            code=whole.code,
        )

    def follow() -> Answer | None:
        fields = project.ask(result.memory.question)
        if not fields:
            return None
        setup = resolve_job(job.replace(**fields))
        return Estimated.of(setup, setup.estimate(), **more)

    whole = Estimated.of(setup, result, at=at or "largest", next=follow, **more)
    return whole.why(MOMENT) if at and part is None else whole


def _infer(
    job: Job, why: Untrained | None, task: str, task_flags: dict[str, Any], page: str | None, *, allow_tight: bool
) -> Answer:
    """Estimates a forward pass or generation. why: a job file in place of a model trains nothing; page: a file to write"""
    from loadgauge.core.answers.serving import served
    from loadgauge.core.resolve.inference import fitting, resolve_inference

    if why is None:
        inferred, assumed = resolve_inference(job, task, task_flags)  # type: ignore[arg-type]
        tried = partial(fitting, job, task, task_flags)  # type: ignore[arg-type]
        answer = served(inferred, assumed=assumed, tried=tried, allow_tight=allow_tight)
        if page is not None:
            request = {"task": task} | {name: value for name, value in task_flags.items() if value is not None}
            write_page(page, *need("HTML").page_of_server(answer, job, request))
        return answer
    refuse({"html": page}, "draws a model, not another tool's file of a server")
    read = need("DIALECTS").served(job, why)
    if click.get_current_context().params["task"] is None:
        print_note(f"loadgauge: {why}; counted as --task generate")
    merged = read.given | {name: value for name, value in task_flags.items() if value is not None}
    inferred, assumed = resolve_inference(read.job, "generate", merged, model=read.model)
    return served(inferred, assumed=assumed | read.assumed, unread=list(read.unread), allow_tight=allow_tight)


def _sweep(job: Job, texts: tuple[str, ...], output: str | None, *, allow_tight: bool) -> Answer:
    """Estimates every cell; the code: 0 one fits, 1 none does, 2 no cell is a run."""
    from loadgauge.core.plan.space.estimates import columns, read_axes, swept
    from loadgauge.core.text import rows as files
    from loadgauge.core.text.estimate.estimates import Swept

    axes = read_axes(texts)
    if output is not None:
        files.ending(output)
    rows = list(swept(job, axes))
    if output is not None:
        files.write(output, rows, columns(list(axes)))
    return Swept.of(rows, axes, output=output, command=job.command(), allow_tight=allow_tight)
