"""Suggested next changes: single changes of the flags, each estimated, the one that helps most first."""

from typing import Any

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.axes import DEGREES
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.advise.advice import advice
from loadgauge.core.plan.advise.changes import NEXT, Run, changes as listed
from loadgauge.core.plan.advise.try_ import Tried, complete, flags as words, try_change
from loadgauge.core.resolve.setup import Setup

MOST = 14
"""Rows that are shown."""


def changes(setup: Setup) -> list[dict[str, Any]]:
    """Rows with the changed flags, bytes and seconds of the other run, and the difference to this one.

    `step_delta` compares steps of as many tokens: it is the other step, rescaled to this one's tokens, less this step.
    `speed` is tokens a second there over here. Where this run does not fit, what makes it fit goes first; what takes more
    or fewer GPUs, or another batch, comes last.
    """
    before = setup.estimate()
    rows: dict[str, dict[str, Any]] = {}
    if before.memory.fits is False:
        for trial in advice(setup):
            fields = {name: trial.fields[name] for name in Job.__struct_fields__ if name in trial.fields}
            rows[trial.flags] = _row(setup, before, trial, fields)
    for change in listed(Run.of_setup(setup), NEXT):
        fields = complete(setup, change.fields)
        key = words(fields) or ", ".join(fields)
        if key not in rows:
            alone = try_change(setup, change.fields, change.why)
            if alone is not None:
                rows[key] = _row(setup, before, alone, fields)
    worth = [row for row in rows.values() if row["memory_delta"] or row["step_delta"]]
    return sorted(worth, key=lambda row: _rank(row, before))[:MOST]


def _rank(row: dict[str, Any], before: Estimate) -> tuple[Any, ...]:
    """Return what helps most first: to fit where it does not, else the time, then the memory."""
    step = row["step_delta"]
    gain = 0.0 if step is None or before.time is None else step / before.time.step
    memory = row["memory_delta"] / before.memory.total
    elsewhere = bool(row["flags"].keys() & {"gpus", "global-batch"})
    if before.memory.fits is False:
        return not row["fits"], elsewhere, gain if row["fits"] else memory
    return row["fits"] is False, elsewhere, gain if gain < -0.001 else 0.0, memory


def _row(setup: Setup, before: Estimate, trial: Tried, change: dict[str, Any]) -> dict[str, Any]:
    other = trial.result
    step: float | None = None
    speed: float | None = None
    if before.time is not None and other.time is not None:
        speed = (other.time.tokens / other.time.step) / (before.time.tokens / before.time.step)
        step = before.time.step / speed - before.time.step
    return {
        "label": label(setup, change),
        "flags": flags(change),
        "memory": other.memory.total,
        "memory_delta": other.memory.total - before.memory.total,
        "step": None if other.time is None else other.time.step,
        "step_delta": step,
        "speed": speed,
        "mfu": None if other.time is None else other.time.mfu,
        "fits": other.memory.fits,
        "verdict": other.memory.verdict,
        "note": trial.note,
        "numerics": bool(change.keys() & NUMERICS),
    }


NUMERICS = {"precision", "optimizer", "qlora", "lora_rank"}
"""Flags that change what is computed, and not only where and how fast."""


def flags(change: dict[str, Any]) -> dict[str, str | None]:
    """The changed flags as the page has them; None takes a flag out.

    >>> flags({"tp": 4, "sequence_parallel": True, "vpp": None, "mtp": False})
    {'tp': '4', 'sequence-parallel': 'true', 'vpp': None, 'mtp': None}
    """
    return {
        name.replace("_", "-"): None if value in (None, False) else "true" if value is True else str(value)
        for name, value in change.items()
    }


def label(setup: Setup, change: dict[str, Any]) -> str:
    """The change in words: what it was, and what it becomes."""
    words = []
    for name, value in change.items():
        if name == "measured":
            continue
        was, title = _was(setup, name), name.replace("_", "-")
        if value in (None, False):
            words.append(f"no {title}")
        elif value is True:
            words.append(title)
        else:
            words.append(f"{title} {was} → {value}" if was not in ("", "None") else f"{title} {value}")
    return ", ".join(words)


def _was(setup: Setup, name: str) -> str:
    asked = getattr(setup.job, name)
    if asked is not None:
        return str(asked)
    layout, kind = setup.layout, setup.training
    if name in (*DEGREES, "zero", "micro_batch", "global_batch", "recompute", "gpus", "schedule"):
        return str(getattr(layout, name))
    return {
        "loss": kind.kernels.loss,
        "attention": kind.kernels.attention,
        "optimizer": kind.optimizer.name,
        "precision": kind.precision.name,
        "offload": kind.offload,
    }.get(name, "")
