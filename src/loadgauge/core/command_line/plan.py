"""`loadgauge plan`: the best layout of all there are, the Pareto front, or the nearest miss; and plans by the sweep."""

import contextlib
from typing import Any, get_args

import click
import msgspec
from click.core import ParameterSource

from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.plan.find import found
from loadgauge.core.answers.plan.layouts import Missed, Planned, planned
from loadgauge.core.answers.plan.progress import clear, say
from loadgauge.core.base import ConfigError, Error, need, parse as parse_unit
from loadgauge.core.command_line.options import project
from loadgauge.core.command_line.options.answering import answering, refuse
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import complete_model, option, options, page_option, write_page
from loadgauge.core.command_line.options.param_types import Whole
from loadgauge.core.command_line.sizes import model_or_usage, size_options
from loadgauge.core.definitions.hardware.prices import read_prices, usual_prices
from loadgauge.core.definitions.job.job import POSTTRAIN, Field, Job, fields
from loadgauge.core.definitions.job.job_text import positive_number
from loadgauge.core.definitions.layout.axes import TRAINER_AXES
from loadgauge.core.definitions.serving.inference import FORMATS, fields as inference_fields
from loadgauge.core.definitions.training.tasks import TASKS
from loadgauge.core.plan import posttrain
from loadgauge.core.plan.batch.kept import KEEPING
from loadgauge.core.plan.request import JOB_FIELDS, OF_TASKS, OPEN_AXES, PlanRequest, fleet_finds, questions
from loadgauge.core.resolve.reproduce import completer
from loadgauge.core.resolve.resolve import names_job_file, resolve_job
from loadgauge.core.text.table import print_note

SWEEP = ("sweep", "output", "workers", "ray")
"""Options about a sweep."""


def _several(name: str, field: Field) -> Any:
    """The option of a field that may have several values."""
    if field.kind == "switch":
        return option(name, msgspec.structs.replace(field, help=f"{field.help} Only with it, or only without."))
    metavar = "N,N,..." if field.kind == "whole" else "WHAT;WHAT" if name == "recompute" else "NAME,..."
    help = f"{field.help} {'Several are compared.' if name == 'gpus' else 'Only these values.'}"
    return click.option(f"--{name.replace('_', '-')}", name, metavar=metavar, help=help)


def _options(command: Any) -> Any:
    """The fields of a job, those of the open axes with several values; and the questions of a plan."""
    for name, field in reversed(questions().items()):
        if field.kind == "switch":
            make = click.option(f"--{name.replace('_', '-')}", name, is_flag=True, default=None, help=field.help)
        else:
            make = option(name, field)
        command = make(command)
    for name in reversed(JOB_FIELDS):
        several = name in OPEN_AXES or name == "gpus"
        command = (_several if several else option)(name, fields()[name])(command)
    for name, field in reversed(inference_fields().items()):
        command = (_several if name in FORMATS else option)(name, field)(command)
    limits = {
        "max_ttft": ("TIME", "With --task generate: the longest time to a first token, such as 2s."),
        "max_tpot": ("TIME", "With --task generate: the longest time of a further token, such as 30ms."),
        "requests": ("RATE", "With --task generate: requests a second; the fewest GPUs that answer them."),
    }
    for name, (metavar, help) in limits.items():
        command = click.option(f"--{name.replace('_', '-')}", name, metavar=metavar, help=help)(command)
    help = "With --task generate: prompts are read, and answers generated, by servers of their own."
    command = click.option("--apart", "apart", is_flag=True, default=None, help=help)(command)
    task = fields()["task"]
    command = option("task", msgspec.structs.replace(task, choices=(*task.choices, "generate", "forward")))(command)
    return options(command, [name for name in POSTTRAIN if name != "task"])


def _task_of(model: str | None, flags: dict[str, Any]) -> str | None:
    """Return the task after pre-training that a job file has; None for none, and for a rollout of which something is asked that
    only a training run has: then its trainer alone is planned, if the engine leaves the card for it."""
    if model is None or not names_job_file(model):
        return None
    stated = [int(flags["gpus"])] if str(flags["gpus"]).isdecimal() else []
    for gpus in (None, *stated):  # a file's own layout may be of more of them
        with contextlib.suppress(Error):
            job = need("DIALECTS").from_job_file(Job(model=model, gpu=flags["gpu"], gpus=gpus))[0]
            task: str | None = job.task
            if task in (None, "sft"):
                return None
            find = flags["find"]
            other = [name for name in questions() if _typed(name) and name != "find"]
            other += ["find"] if find and find.replace("-", "_") not in posttrain.sought_of(str(task)) else []
            if TASKS[task].rollout and other:
                with contextlib.suppress(ConfigError):
                    need("DIALECTS").update_alone(job)
                    flag = other[0].replace("_", "-")
                    click.echo(
                        f"loadgauge: --{flag} is of a training run: the actor's update alone is planned;"
                        f" without it, the step with its rollout ({task})",
                        err=True,
                    )
                    return None
            return task
    return None


def _typed(name: str) -> bool:
    """Return whether a flag was on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


AXES_OF_TASK = (*TRAINER_AXES, "zero", "micro_batch", "recompute")
"""Flags that narrow the axes of a plan with --task down; other fields of a job it takes as they are."""


def _task(model: str, flags: dict[str, Any]) -> Answer:
    """Plans a run of a task."""
    from loadgauge.core.answers.plan.task import planned as planned_task

    options: dict[str, tuple[Any, ...]] = {}
    values: dict[str, Any] = {}
    sought = None
    for name, value in flags.items():
        if value is None or (name not in fields() and not _typed(name)):
            continue
        if name in AXES_OF_TASK:
            texts = [piece.strip() for piece in str(value).split(";" if name == "recompute" else ",")]
            options[name] = tuple(fields()[name].read(piece) for piece in texts)
        elif name == "gpus" or name in OPEN_AXES:
            values[name] = fields()[name].read(str(value))
        elif name in POSTTRAIN or name in fields():
            values[name] = value
        elif name == "find":
            sought = value.replace("-", "_")
        else:
            raise ConfigError("cannot be searched with --task; leave it out", key=name)
    if sought != "gpus" and "gpu" in values and not names_job_file(model):
        values.setdefault("gpus", 1)  # as a plan without --task
    if "logprob_batch" in values:
        options["logprob_batch"] = (values.pop("logprob_batch"),)
    return planned_task(Job.of(model, values), options, sought)


def _time(text: str | None, name: str) -> float | None:
    """Read a time [s]. Raises `ConfigError`."""
    if text is None:
        return None
    value, unit = parse_unit(text, name, "second")
    if unit != "second":
        raise ConfigError(f"--{name.replace('_', '-')} {text}: no time, such as 30ms")
    return value


def _serve(model: str, flags: dict[str, Any]) -> Answer:
    """Plans a server, or scores."""
    from loadgauge.core.answers.plan.server import server
    from loadgauge.core.plan import serving
    from loadgauge.core.resolve.inference import TAKEN
    from loadgauge.core.serving.passes import AXES_OF

    flags_given = {
        name: value for name, value in flags.items() if value is not None and _typed(name) and name != "task"
    }
    request = {name: flags_given.pop(name) for name in inference_fields() if name in flags_given}
    request |= {
        name: ",".join(str(inference_fields()[name].read(each.strip())) for each in request[name].split(","))
        for name in FORMATS
        if name in request
    }
    times = [_time(flags_given.pop(name, None), name) for name in ("max_ttft", "max_tpot")]
    rate = flags_given.pop("requests", None)
    requests = None if rate is None else positive_number(str(rate).removesuffix("/s"))
    limits = serving.Limits(first=times[0], token=times[1], requests=requests)
    prices = flags_given.pop("prices", None)
    sought, top = flags_given.pop("find", prices and "gpu"), int(flags_given.pop("top", 5))
    if sought not in (None, *get_args(serving.Sought)):
        raise ConfigError("with --task generate: give seq-len (the longest context), batch, gpus or gpu", key="find")
    if sought != "gpu":
        refuse({"prices": prices}, "needs --find gpu")
    elif "price" in flags_given:
        raise ConfigError("is of one kind of GPU; with --find gpu it is --prices GPU=2.5,GPU=1.8", key="price")
    if {"seq-len": "context"}.get(sought or "", sought) in {**flags_given, **request}:
        raise ConfigError(
            f"asks for what --{'context' if sought == 'seq-len' else sought} states; leave one of them out", key="find"
        )
    axes = {
        name: tuple(int(size) for size in str(flags_given.pop(name)).split(","))
        for name in AXES_OF
        if name in flags_given
    }
    split = flags_given.pop("apart", None)
    for name in flags_given:
        if name not in TAKEN:
            raise ConfigError("cannot be searched with --task generate; leave it out", key=name)
    job = Job.of(model, flags_given)
    if split:
        refuse({"find": sought}, "leave it out with --apart")
        plan = serving.plan_apart(job, request, axes, limits)
    elif sought == "gpu":
        try:
            own = read_prices(prices) if prices else usual_prices()
            plan = serving.cheapest_gpu(job, request, axes, limits, own, flags["task"], say)
        finally:
            clear()
    else:
        plan = serving.plan_serving(job, request, axes, limits, sought, flags["task"])
    return server(plan, "gpus" if requests is not None and sought != "gpu" else sought, top)


@click.command("plan", cls=Grouped)
@click.argument("model", required=False, shell_complete=complete_model)
@size_options
@_options
@click.option("--sweep", metavar="FILE", help="Plan every cell of a TOML file: lists of models, GPUs, sizes, links.")
@click.option("--output", metavar="FOLDER", help="Folder for the results of a sweep, as Parquet (FILE-results).")
@click.option("--workers", type=Whole(1, 10**5), help="How many plans of a sweep run at a time (one per processor).")
@click.option("--ray", metavar="ADDRESS", help="Plan a sweep on this Ray cluster: auto, or HOST:PORT.")
@click.option("--cache/--no-cache", default=True, help="Keep searches on disk, and go on from those that are there.")
@page_option
@answering(
    "the best layout, its step and memory, the next one, and the command that reproduces it",
    "Of the best layout, what `loadgauge estimate --explain` explains of it.",
    document="layouts (best first), pareto, evaluated, valid",
)
def command(model: str | None, page: str | None, cache: bool, **flags: Any) -> Answer:
    """Find the fastest (cheapest, smallest, ...) layout of MODEL by exhaustive search over all valid layouts.

    A layout flag locks its axis (--tp 8) or narrows it down (--tp 4,8); all other axes are open. Exit code: 0 a layout
    fits, 1 none fits (the nearest miss is printed), 2 cannot tell.

    \b
    loadgauge plan llama-3.1-70b --gpu h100-sxm5-80gb --gpus 64 --seq-len 8192 --global-batch 512
    loadgauge plan llama-3.1-8b --gpu rtx4090 --gpus 1 --qlora --global-batch 16 --margin 2
    loadgauge plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --find seq-len
    loadgauge plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 64 --global-batch 512 --export megatron
    loadgauge plan axolotl.yaml --gpu h100-sxm5-80gb --gpus 8 --export axolotl --out faster.yaml
    loadgauge plan mixtral-8x7b --gpu h100-sxm5-80gb --gpus 32,64,128 --objective money --global-batch 512
    loadgauge plan --sweep sweep.toml --output results
    loadgauge plan llama-3.1-405b --gpu h100 --gpus 100000 --tokens 30T --global-batch 12500 --find spares --fleet failures=llama3
    loadgauge plan llama-3.1-70b --gpu h100 --gpus 8 --task generate --context 8192 --answer 512 --max-tpot 30ms
    loadgauge plan llama-3.1-70b --gpu h100 --task generate --context 8192 --answer 512 --requests 20 --max-ttft 2s
    loadgauge plan qwen3-32b --gpu h100-sxm5-80gb --gpus 64 --task grpo --prompts 128 --samples 16 --prompt-len 512 \\
        --answers exp:3000,8192
    """
    KEEPING.set(cache)
    file, output, workers, ray = (flags.pop(name) for name in SWEEP)
    if file is not None:
        refuse({"html": page}, "draws the best layout of one plan; leave out --sweep")
        return _sweep(file, output, workers, ray, flags)
    refuse({"output": output, "workers": workers, "ray": ray}, "needs --sweep")
    if flags["gpu"] is None and flags["find"] != "gpu" and model is not None and names_job_file(model):
        cards = need("DIALECTS").gpus_asked([model])
        if cards is not None:
            flags["gpu"] = cards.gpu
            print_note(f"loadgauge: taken: {cards.words} as --gpu {cards.gpu}")
    flags["task"] = flags["task"] or _task_of(model, flags)
    if flags["task"] in ("generate", "forward"):
        return _drawn(_serve(model_or_usage(model, flags), flags), page)
    of_inference = (*inference_fields(), "max_ttft", "max_tpot", "requests", "apart")
    refuse({name: flags.pop(name) for name in of_inference}, "needs --task generate or forward")
    if flags["task"] is not None:
        return _drawn(_task(model_or_usage(model, flags), flags), page)
    if flags["find"] in OF_TASKS:
        raise ConfigError("needs --task", key="find")
    refuse({name: flags.pop(name) for name in POSTTRAIN}, "needs --task")
    request = PlanRequest.of(model_or_usage(model, flags), flags)
    request = msgspec.structs.replace(request, job=project.answered(request.job)[0])
    if request.find in fleet_finds():
        refuse({"html": page}, "draws the best layout; leave out --find")
        return need("OBJECTIVES").report(request)  # type: ignore[no-any-return]
    return _drawn(planned(request) if request.find is None else found(request), page)


def _drawn(answer: Answer, page: str | None) -> Answer:
    """Writes the best choice of a plan, or the nearest miss, to a file that is asked for; returns the plan."""
    if page is None:
        return answer
    pages = need("HTML")
    if isinstance(answer, Planned):
        drawing = pages.page(resolve_job(answer.plan.best.job), answer.plan.best.estimate)
    elif isinstance(answer, Missed):
        drawing = pages.page(resolve_job(completer(answer.setup.job)(answer.nearest)), answer.nearest)
    elif answer.form == "plan.find":
        _, _, answers, jobs, *_ = answer.shown
        drawing = pages.page(resolve_job(jobs[0]), answers[0].best)
    elif answer.form == "plan.serving":
        from loadgauge.core.answers.serving import served

        plan = answer.shown[0]
        choice = plan.choices[0] if plan.choices else plan.nearest
        drawing = choice and pages.page_of_server(
            served(choice.answer, assumed=plan.assumed), choice.job, {"task": choice.answer.asked.task} | choice.request
        )
    else:
        from loadgauge.core.answers.post_training import answered

        choice = answer.shown[0].best or answer.shown[0].nearest
        drawing = choice and pages.page_of_task(answered(choice.job))
    if drawing is None:
        raise ConfigError("there is no layout to draw", key="html")
    write_page(page, *drawing)
    return answer


def _sweep(file: str, output: str | None, workers: int | None, ray: str | None, flags: dict[str, Any]) -> Answer:
    """Plans every cell of a file that has no result yet."""
    for name in (*flags, "model"):
        if _typed(name):
            raise ConfigError("belongs in the sweep's file, not next to --sweep", key=name.replace("_", "-"))
    return need("FIGURES").sweep(file, output, workers, ray)  # type: ignore[no-any-return]
