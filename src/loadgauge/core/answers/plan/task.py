"""The answer of `plan --task`, and its document."""

from __future__ import annotations

from typing import Any

from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.post_training import answered, time_document
from loadgauge.core.answers.why.of_task import TOPICS
from loadgauge.core.base import NO, YES, needs
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan.posttrain import Choice, Found, Space, find_value, plan_task

MOST_GPUS = 2**16


def planned(job: Job, given: dict[str, tuple[Any, ...]], sought: str | None = None) -> Answer:
    """Return the plan of a run of a task. Raises `ConfigError`.

    given: axes that are locked or narrowed; sought: a field, whose largest value that fits (of gpus the smallest) is looked for
    """
    value = None if sought is None else find_value(job, given, sought)
    if sought is not None and value is not None:
        job = job.replace(**{sought: str(value) if sought == "answers" else value})
    elif sought == "gpus":
        job = job.replace(gpus=MOST_GPUS)
    found = plan_task(job, Space.of(job, given))
    shown = found.best or found.nearest
    plain = {} if sought is None else {"find": sought, "value": value}
    return Answer(
        form="plan.task",
        writer="loadgauge.core.text.plan.posttrain_plan:write",
        topics=TOPICS,
        explains=None if shown is None else lambda topic: answered(shown.job).why(topic),
        shown=(found, sought, value),
        document=lambda: document(found) | plain,
        verdict="" if shown is None else shown.memory.verdict,
        code=NO if found.best is None else YES,
        command="" if shown is None else shown.job.command(),
    )


def document(found: Found) -> dict[str, Any]:
    """Return the document of `--json`."""

    def one(choice: Choice | None) -> dict[str, Any] | None:
        if choice is None:
            return None
        held = choice.memory
        return {
            "command": choice.job.command(),
            "memory": needs(held) | {"moment": held.worst.name},
            **time_document(choice.time, "", choice.job),
        }

    return {
        "best": one(found.best),
        "runner_up": one(found.runner_up),
        "nearest": one(found.nearest),
        "why": found.why,
        "candidates": found.candidates,
        "refused": found.refused,
        "looked": found.looked,
    }
