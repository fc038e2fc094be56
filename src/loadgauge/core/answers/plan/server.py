"""The answer of `plan --task generate`, and its document."""

from typing import Any

from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.serving import TOPICS, served
from loadgauge.core.base import NO, YES, needs
from loadgauge.core.plan.serving import Choice, Plan, Sought
from loadgauge.core.resolve.inference import fitting
from loadgauge.core.serving.passes import AXES_OF


def server(plan: Plan, sought: Sought | None, top: int) -> Answer:
    """Return the answer that a plan of a server is. sought: what is looked for; top: how many choices are shown"""
    shown = plan.choices[0] if plan.choices else plan.nearest
    return Answer(
        form="plan.serving",
        writer="loadgauge.core.text.plan.serving_plan:write",
        topics=TOPICS,
        explains=None if shown is None else served(shown.answer).why,
        tried=lambda: _tried(plan),
        shown=(plan, sought, top),
        document=lambda: document(plan),
        assumed=plan.assumed,
        command="" if shown is None else shown.command,
        verdict="" if shown is None else shown.answer.memory.verdict,
        code=YES if plan.choices or plan.apart else NO,
    )


def _tried(plan: Plan) -> list[tuple[str, Any]]:
    """Return the other choices, with their commands; of none, changes that make the nearest one fit."""
    near = plan.nearest
    if near is not None and near.answer.memory.verdict != "fits":
        return list(fitting(near.job, near.answer.asked.task, near.request))
    return [(choice.command, choice) for choice in plan.choices[1:]]


def document(plan: Plan) -> dict[str, Any]:
    """Return the document of `--json`."""

    def described(row: Choice) -> dict[str, Any]:
        asked = row.answer.asked
        return {
            "command": row.command,
            "gpu": None if row.answer.gpu is None else row.answer.gpu.id,
            "gpus": row.answer.gpus,
            **{name: getattr(asked, name) for name in AXES_OF},
            "replicas": asked.replicas,
            "context": asked.context,
            "batch": asked.batch,
            "memory": needs(row.answer.memory),
            "first_seconds": row.first,
            "token_seconds": row.answer.token,
            "tokens_per_second": row.answer.tokens_per_second,
            "requests_per_second": row.requests,
            "money_per_million": row.answer.money_per_million,
            "money_per_hour": row.hourly or None,
        }

    split, beside = plan.apart, {}
    if split is not None:
        beside["apart"] = {
            "gpus": split.gpus,
            "requests_per_second": split.requests,
            "first_seconds": split.first,
            "handing_seconds": split.handing,
            "readers": split.readers,
            "reading": described(split.reading),
            "generators": split.generators,
            "generating": described(split.generating),
        }
    return {
        **beside,
        "choices": [described(row) for row in plan.choices],
        "front": [described(row) for row in plan.front],
        "nearest": None if plan.nearest is None else described(plan.nearest),
        "looked": plan.looked,
        "left_out": list(plan.left_out),
        "assumed": plan.assumed,
    }
