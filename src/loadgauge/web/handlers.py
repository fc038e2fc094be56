"""The answers of the page's questions, as plain values; what cannot be answered raises an `Error` of one line."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.estimate.result import Estimate
from loadgauge.figures import PANELS
from loadgauge.figures.network import what_if as adapter
from loadgauge.figures.trace_points import Found, dots
from loadgauge.report.document import estimate_document
from loadgauge.resolve.setup import Setup
from loadgauge.web.changes import changes as changed
from loadgauge.web.explain import explained
from loadgauge.web.flags import State, command_line, job_of
from loadgauge.web.uploads import Uploads, plain_name

RANGED = (
    "step", "mfu", "hfu", "tokens_per_second_per_gpu", "model_tflops_per_gpu", "days", "gpu_hours", "cost", "energy_kwh",
    "gpus_needed",
)  # fmt: skip
"""What depends on the time of a step, and has a range because that has one."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every question has: the flags. want: the figures to be drawn; None: all of them. dots: what was dropped."""

    flags: State
    want: list[str] | None = None
    dots: Annotated[list[Found], msgspec.Meta(max_length=2)] = []


class OfBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question about one block of the treemap."""

    flags: State
    id: str


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tool's words are wanted."""

    flags: State
    dialect: str


class WhatIf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another network adapter [byte/s]."""

    flags: State
    nic: float


def estimate(question: Question, uploads: Uploads) -> dict[str, Any]:
    """The document that `loadgauge estimate --json` prints, the command line that prints it, and the figures."""
    given = job_of(question.flags, uploads)
    result = given.estimate()
    wanted = list(PANELS) if question.want is None else question.want
    unknown = [name for name in wanted if name not in PANELS]
    if unknown:
        raise ConfigError(f"no figure {unknown[0][:40]!r} (known: {', '.join(PANELS)})", key="want")
    panels = {name: PANELS[name](result) for name in wanted}
    if "moments" in panels:
        model = plain_name(uploads.name(str(question.flags["model"])))
        panels["moments"]["dots"] = [dots(result, found, model) for found in question.dots]
    return {
        "estimate": estimate_document(given, result),
        "command": command_line(given, result, uploads),
        "verdict": result.memory.verdict,
        "ranges": ranges(given, result),
        "panels": panels,
    }


def ranges(given: Setup, result: Estimate) -> dict[str, list[float]]:
    """The lowest and the highest of what depends on the time of a step, each worked out as the value between them is."""
    if result.time is None:
        return {}
    ends: list[dict[str, Any]] = []
    for step in (result.time.low, result.time.high):
        other = msgspec.structs.replace(result, time=msgspec.structs.replace(result.time, step=step))
        assert other.time is not None
        budget = given.budget(other)
        ends.append({**other.time.to_dict(), **({} if budget is None else budget.to_dict())})
    return {
        name: sorted(end[name] for end in ends) for name in RANGED if all(end.get(name) is not None for end in ends)
    }  # fmt: skip


def explain(question: OfBlock, uploads: Uploads) -> dict[str, Any]:
    """What there is to say of one block."""
    return explained(job_of(question.flags, uploads).estimate(), question.id)


def changes(question: Question, uploads: Uploads) -> dict[str, Any]:
    """What to change next, each row estimated."""
    return {"rows": changed(job_of(question.flags, uploads))}


def what_if(question: WhatIf, uploads: Uploads) -> dict[str, Any]:
    """The network's rows and the step with another adapter."""
    if not 0 < question.nic < float("inf"):
        raise ConfigError("must be a bandwidth above 0 [byte/s]", key="nic")
    found = adapter(job_of(question.flags, uploads), question.nic)
    if found is None:
        raise ConfigError("there is no network to change: a --gpu is needed, and no --measured", key="nic")
    return found
