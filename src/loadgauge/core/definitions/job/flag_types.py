"""The fields of `Job` as keywords with types. Type checkers read `flag_types.pyi`, which `docs/generate.py` writes by these."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, get_args, get_type_hints

from loadgauge.core.definitions.job.job import POSTTRAIN, Job, fields


def kinds_of_flags() -> dict[str, Any]:
    """Return the type of each flag but the model, by its field in `Job`.

    >>> kinds_of_flags()["zero"], get_args(kinds_of_flags()["save"])
    (<class 'int'>, ('sharded', 'full'))
    """
    hints = get_type_hints(Job)
    return {
        name: Literal[field.choices] if field.kind == "choice" and name != "task" else get_args(hints[name])[0]
        for name, field in fields().items()
        if name != "model"
    }


KINDS = kinds_of_flags()
Flags = TypedDict(  # type: ignore[misc]
    "Flags", {name: kind for name, kind in KINDS.items() if name not in ("gpu", *POSTTRAIN)}, total=False
)
TaskFlags = TypedDict("TaskFlags", KINDS, total=False)  # type: ignore[misc]
