"""The answer of `plan --task`, and its document."""

import functools
from typing import Any

import msgspec

from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.post_training import answered, time_document
from loadgauge.core.answers.why.of_task import TOPICS
from loadgauge.core.base import NO, YES, ConfigError, need, needs
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan import posttrain
from loadgauge.core.plan.advise import task_fits
from loadgauge.core.plan.space.task_space import Space
from loadgauge.core.resolve.resolve import names_job_file

MOST_GPUS = 2**16
SOUGHT = {
    "samples": ("samples", "global_batch"),
    "answers": ("answers",),
    "seq_len": ("seq_len",),
    "gpus": ("gpus", "gpus_per_node", "placement"),
    "staleness": ("staleness", "placement"),
}
"""Fields of a job file that are not taken from it, by what is looked for."""


def planned(job: Job, options: dict[str, tuple[Any, ...]], sought: str | None = None) -> Answer:
    """Return the plan of a run of a task. Raises `ConfigError`.

    options: axes that are locked or narrowed; sought: a field, whose largest value that fits (of gpus the smallest) is looked for
    """
    asked, reading, space = job, None, None
    sought = "answers" if sought == "seq_len" and "answers" in posttrain.sought_of(str(job.task)) else sought
    if names_job_file(job.model):
        reading = need("DIALECTS").from_job_file(job)
        whole = reading.job
        if sought in SOUGHT and getattr(job, sought) is None:
            whole = whole.replace(**dict.fromkeys(SOUGHT[sought]))
        job, space = posttrain.opened(job, whole, options)
    value = None if sought is None else posttrain.find_value(job, options, sought, reading)
    if sought is not None and value is not None:
        job, options = posttrain.with_value(job, options, sought, value)
        asked, space = posttrain.with_value(asked, options, sought, value)[0], None
    elif sought == "gpus":
        job = job.replace(gpus=MOST_GPUS)
    try:
        plan = posttrain.plan_task(job, space or Space.of(job, options), reading=reading)
    except posttrain.Unstarted as error:
        helps = task_fits.remedies(job, options, reading)
        if not helps:
            raise
        raise ConfigError(f"{error}; a layout fits with {' or '.join(each.flags for each in helps)}") from None
    others = task_fits.remedies(job, options, reading) if plan.best is None and sought is None else []
    if reading is not None:
        of_file = functools.partial(posttrain.beside_file, asked=asked, whole=reading.job)
        chosen = {name: of_file(getattr(plan, name)) for name in ("best", "runner_up", "nearest")}
        plan = msgspec.structs.replace(plan, **chosen)
        others = [each._replace(choice=of_file(each.choice) or each.choice) for each in others]
    shown = plan.best or plan.nearest
    plain = {} if sought is None else {"find": sought, "value": value}
    return Answer(
        form="plan.task",
        writer="loadgauge.core.text.plan.posttrain_plan:write",
        topics=TOPICS,
        explains=None if shown is None else lambda topic: answered(shown.job).why(topic),
        shown=(plan, sought, value, others),
        document=lambda: document(plan) | {"remedies": [_remedy(each) for each in others]} | plain,
        verdict="" if shown is None else shown.memory.verdict,
        code=NO if plan.best is None else YES,
        command="" if shown is None else shown.job.command(),
    )


def _remedy(each: task_fits.Remedy) -> dict[str, Any]:
    held, time = each.choice.memory, each.choice.time
    plain = {"change": each.words, "flags": each.flags, "command": each.choice.job.command()}
    return plain | {"total": held.total, "step": time.step}


def document(plan: posttrain.Found) -> dict[str, Any]:
    """Return the document of `--json`."""

    def one(choice: posttrain.Choice | None) -> dict[str, Any] | None:
        if choice is None:
            return None
        held = choice.memory
        return {
            "command": choice.job.command(),
            "memory": needs(held) | {"moment": held.worst.name},
            **time_document(choice.time, "", choice.job),
        }

    return {
        "best": one(plan.best),
        "runner_up": one(plan.runner_up),
        "nearest": one(plan.nearest),
        "why": plan.why,
        "candidates": plan.candidates,
        "refused": plan.refused,
        "looked": plan.looked,
    }
