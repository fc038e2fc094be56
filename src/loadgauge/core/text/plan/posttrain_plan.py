"""The plain text of `plan --task`: the fastest step that fits, its command, and why the next one lost."""

from __future__ import annotations

from typing import Any

from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.post_training import answered, time_document
from loadgauge.core.answers.why.of_task import TOPICS
from loadgauge.core.base import NO, YES, gib, in_gib, needs
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan.posttrain import Choice, Found, Space, find_value, plan_task
from loadgauge.core.resolve.posttrain import resolve_posttrain
from loadgauge.core.text.post_training.posttrain_time import lines, seconds
from loadgauge.core.text.table import Column, Paper, draw, points
from loadgauge.core.text.verdict import WORDS

MOST_GPUS = 2**16
FOUND = {
    "seq_len": "The longest sequence that fits [tokens]", "answers": "The longest answers that fit [tokens]",
    "gpus": "The fewest GPUs that fit, of powers of two",
}  # fmt: skip


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


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the plan; brief: the best run alone."""
    found, sought, value = answer.shown
    if value is not None:
        target.print(f"{FOUND[str(sought)]}: {value:,}", style="bold", soft_wrap=True)
    counted = f"{found.candidates:,} candidates timed, {found.looked:,} looked at in memory"
    if found.best is None:
        if found.nearest is None:
            points(target, [f"Nothing fits: {counted}."], "")
            return
        held = found.nearest.memory
        short, worst = held.verdict == "does not fit", held.decisive
        word, style = ("NOTHING FITS", "bold red") if short else WORDS[held.verdict]
        target.print(
            f"{word}  no layout {'fits' if short else 'is sure to fit'}: in the nearest {worst.name} needs {in_gib(worst.total, 1)}"
            f" of {gib(held.capacity or 0, 1)}, range {in_gib(worst.low, 1)}-{gib(worst.high, 1)}.",
            soft_wrap=True,
            style=style,
        )
        points(target, [found.nearest.job.command(), "", f"{counted}."], "")
        return
    best = found.best
    time, worst = best.time, best.memory.decisive
    target.print(
        f"{seconds(time.step)} s a step, {seconds(time.low)}-{seconds(time.high)} s; {gib(worst.total, 1)} in {worst.name}",
        soft_wrap=True,
    )
    run, _ = resolve_posttrain(best.job)
    points(target, [best.job.command(), *lines(run, time, best.job)], "")
    if brief:
        return
    rows = [_row("best", best)]
    if found.runner_up is not None:
        rows.append(_row("runner-up", found.runner_up))
    names = ["", "placement", "tp pp zero", "recompute", "micro-batch", "log-probs", "rollout", "s", "GiB"]
    right = (Column(one, "right") for one in names[7:])
    draw(target, [*(Column(one) for one in names[:7]), *right], rows, counted, [0])
    if found.why:
        points(target, [f"The runner-up lost: {found.why}."])


def _row(name: str, choice: Choice) -> list[str]:
    job = choice.job
    return [
        name,
        job.placement or "",
        f"{job.tp or 1}  {job.pp or 1}  {job.zero}",
        job.recompute or "",
        str(job.micro_batch),
        "" if job.logprob_batch is None else str(job.logprob_batch),
        job.rollout or "",
        seconds(choice.time.step),
        in_gib(choice.memory.decisive.total, 1),
    ]


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
