"""`loadgauge estimate --task` of what comes after pre-training: memory by phase and role."""

from __future__ import annotations

from typing import Any

from loadgauge.core.base.errors import NO, ConfigError
from loadgauge.core.base.verdict import exit_code, host_holds
from loadgauge.core.definitions.job.job import Job

TOPICS = ("kv", "logprobs", "sync", "tail")
"""What `--explain` explains of a run with a rollout or log-probabilities."""


def task_of_file(job: Job) -> str | None:
    """Return the task that a job file in place of a model says; None where there is no file, or it says none."""
    from loadgauge.core.resolve.resolve import names_job_file

    if not names_job_file(job.model):
        return None
    from loadgauge.core.base.hooks import need

    task: str | None = need("DIALECTS").from_job_file(job)[0].task
    return task


def answer(job: Job, others: dict[str, Any], part: str | None, *, as_json: bool, allow_tight: bool, brief: bool) -> int:
    """Estimate a run of a task and print it. others: answers that only training has, by their flags. Raises `ConfigError`"""
    from loadgauge.core.answers.post_training import answered

    for flag, value in others.items():
        if value:
            raise ConfigError(f"{flag} is of --task train; --task {job.task} has one answer, also as --json")
    if part is not None and part not in TOPICS:
        raise ConfigError(f"--task {job.task} explains {', '.join(TOPICS)}, not {part}", key="explain")
    whole = answered(job)
    run, found, time = whole.run, whole.memory, whole.time
    if part is not None:
        from loadgauge.core.post_training.explain import explain
        from loadgauge.core.text.post_training.posttrain import explained

        explained(explain(run, found, part, time), as_json=as_json)
    elif as_json:
        from loadgauge.core.text.table import document as print_document

        print_document(whole.document())
    elif brief:
        from loadgauge.core.text.post_training.posttrain import brief as print_brief
        from loadgauge.core.text.post_training.posttrain_time import headline

        print_brief(run, found, whole.remedies, headline(time, whole.untimed))
    else:
        from loadgauge.core.text.post_training.posttrain import report
        from loadgauge.core.text.post_training.posttrain_time import headline
        from loadgauge.core.text.post_training.posttrain_time import report as report_time

        report(run, found, whole.remedies, headline(time, whole.untimed), job.host_memory)
        report_time(run, time, job)
    if not host_holds(sum(found.host.values()), job.host_memory):
        return NO
    return exit_code(found.verdict, allow_tight=allow_tight)
