"""The fields of `Job` as keywords with types. Type checkers read `flag_types.pyi`, which `docs/generate.py` writes by these."""

from typing import Any, Literal, TypedDict, get_args, get_type_hints

from loadgauge.core.definitions.job.job import POSTTRAIN, Job, fields
from loadgauge.core.definitions.layout.axes import TRACED

STEP = ("seq_len", "micro_batch", "global_batch", "precision", "optimizer", "attention", "recompute")
"""Fields of a step that PyTorch runs on one GPU: traced, captured or measured."""
SPLIT = (*TRACED, "sequence_parallel", "schedule", "stage_layers", "zero", "replicas")
"""Fields that split a MODEL over GPUs there."""


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
CaptureFlags = TypedDict(  # type: ignore[misc]
    "CaptureFlags", {name: KINDS[name] for name in STEP if name not in ("seq_len", "micro_batch")}, total=False
)
TraceFlags = TypedDict("TraceFlags", {name: KINDS[name] for name in (*STEP, "gpus", *SPLIT)}, total=False)  # type: ignore[misc]
