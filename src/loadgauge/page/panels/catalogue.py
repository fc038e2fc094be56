"""Choices that the page offers: models, GPUs, the fields of a `Job`, dialects of job files, presets and tasks to learn by."""

import functools
from typing import Any, get_args

from loadgauge.core.answers.figure import figures
from loadgauge.core.base import Door, read_table
from loadgauge.core.definitions.hardware.hardware import gpu_ids, gpus
from loadgauge.core.definitions.job.job import Field, fields
from loadgauge.core.definitions.training.tasks import TASKS, Reference, Task
from loadgauge.core.families.catalogue import find_model, models
from loadgauge.core.text.catalogue import gpu_row, model_row
from loadgauge.page.inputs.flags import CHOSEN

JOB_FILES = Door("job_files")

PRESETS: list[dict[str, Any]] = read_table("tasks.toml")["preset"]
"""Example runs to start from."""


TYPES = {"switch": "bool", "whole": "int", "positive": "number", "price": "number"}
"""The page's name for a kind of field, where it differs."""


@functools.cache
def catalogue() -> dict[str, Any]:
    """All that the page offers: models, GPUs, flags, dialects, figures, presets and tasks to learn by, as plain values."""
    return {
        "models": [model_row(find_model(name)) for name in models()],
        "gpus": [gpu_row(card) for card in gpus()],
        "flags": [flag_row(name, field) for name, field in fields().items() if _shown(name, field)],
        "dialects": list(JOB_FILES.OF_TEXT),
        "presets": PRESETS,
        "figures": [each.to_dict() for each in figures()],
        "tracks": read_table("tasks.toml")["tracks"],
        "tasks": read_table("tasks.toml")["task"],
        "posttrain": {"tasks": [task_row(task) for task in TASKS.values()], "references": get_args(Reference)},
    }


def task_row(task: Task) -> dict[str, Any]:
    """A task of post-training as the page reads it: what it has, beside the model that is trained.

    >>> task_row(TASKS["ppo"])
    {'name': 'ppo', 'rollout': True, 'reference': True, 'models': ['reward-model', 'critic'], 'forms': []}
    """
    return {
        "name": task.name,
        "rollout": task.rollout,
        "reference": task.reference is not None,
        "models": [role.field.replace("_", "-") for role in task.roles if role.field != "model"],
        "forms": list(task.objectives),
    }


def _shown(name: str, field: Field) -> bool:
    """Return whether a field is a control of the page: job files are dropped onto it, never named."""
    return name in CHOSEN or (name != "model" and field.group not in ("file", "posttrain"))


def flag_row(name: str, field: Field) -> dict[str, Any]:
    """A field of `Job` as the page reads it: type, bounds, choices, group and help.

    >>> row = flag_row("zero", fields()["zero"])
    >>> row["type"], row["min"], row["max"], row["group"]
    ('int', 0, 3, 'layout')
    """
    kind, choices = TYPES.get(field.kind, field.kind), field.choices or field.values
    if name == "gpu":
        kind, choices = "choice", gpu_ids()
    return {
        "name": name.replace("_", "-"),
        "type": kind,
        "choices": list(choices),
        "open": kind == "text",
        "min": field.low,
        "max": field.high,
        "default": None,
        "metavar": field.metavar,
        "group": field.group,
        "help": field.help,
    }
