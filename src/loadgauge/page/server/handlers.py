"""Answers to the page's questions as plain values; each raises an `Error` of one line where there is no answer."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

import msgspec

from loadgauge.core.answers.estimate import estimate_document
from loadgauge.core.answers.figure import figures
from loadgauge.core.answers.figures.network import what_if as adapter
from loadgauge.core.answers.figures.trace_points import Found, dots
from loadgauge.core.base import ConfigError, Door, host_holds, load, refuse
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup
from loadgauge.core.text.estimate.setup import unit
from loadgauge.page.inputs.changes import changes as changed
from loadgauge.page.inputs.flags import State, command_line, job_of, named
from loadgauge.page.inputs.uploads import Uploads, plain_name
from loadgauge.page.panels.captured import facts
from loadgauge.page.panels.reasons import reason

PYTORCH, JOB_FILES = Door("pytorch"), Door("job_files")

RANGED = (
    "step", "mfu", "hfu", "tokens_per_second_per_gpu", "model_tflops_per_gpu", "days", "gpu_hours", "cost", "energy_kwh",
    "gpus_needed",
)  # fmt: skip
"""Figures that depend on the step time, and have a range because it has one."""
ENDINGS = {"json": "json", "yaml": "yaml", "toml": "toml", "argv": "sh", "python": "py"}
NAMES = {"deepspeed": "ds_config"}
"""File names from the documentation of a tool, where they differ from its name."""


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question about the flags. want: the figures to draw (None: all); dots: traces and measurements that were dropped."""

    flags: State
    want: list[str] | None = None
    dots: Annotated[list[Found], msgspec.Meta(max_length=2)] = []


class OfBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question about one block of the treemap, or about a figure of the page (`reasons.reason`)."""

    flags: State
    id: str


class OfError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error of memory that ran out, and the run that it may be of."""

    flags: State
    text: str


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job file of another tool: the name of its dialect, `flags`, or `html`."""

    flags: State
    dialect: str


class WhatIf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same run with another network adapter. nic: bandwidth [byte/s]."""

    flags: State
    nic: float


def estimate(question: Question, uploads: Uploads) -> dict[str, Any]:
    """Estimate the run: the document of `loadgauge estimate --json`, the command line that prints it, and the figures."""
    setup = job_of(question.flags, uploads)
    result = setup.estimate()
    names = [each.name for each in figures()]
    wanted = names if question.want is None else question.want
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise ConfigError(f"no figure {unknown[0][:40]!r} (known: {', '.join(names)})", key="want")
    answer = told(setup, result, wanted, whole=question.want is None)
    if "moments" in answer["panels"]:
        model = plain_name(uploads.name(str(question.flags["model"])))
        answer["panels"]["moments"]["dots"] = [dots(result, points, model) for points in question.dots]
    return {**answer, "command": command_line(setup, result, uploads)}


def told(setup: Setup, result: Estimate, wanted: Iterable[str], *, whole: bool = False) -> dict[str, Any]:
    """Return what the page draws of an estimate: its document, the verdict, the ranges, and the figures that are wanted.

    whole: with the worst routing of experts, which the page does not show
    """
    return {
        "estimate": estimate_document(setup, result, worst=whole),
        "verdict": result.memory.verdict,
        "host": _on_host(setup, result),
        "counted": unit(setup.model),
        "captured": facts(setup.model, setup.assumed.get("model", "")),
        "ranges": ranges(setup, result),
        "panels": {each.name: each.data(result) for each in figures() if each.name in wanted},
    }


def _on_host(setup: Setup, result: Estimate) -> dict[str, Any] | None:
    """What the GPUs of a node keep in its memory, and whether that of the flags holds it; None where they keep nothing."""
    nbytes, stated = setup.on_host(result), setup.job.host_memory
    return {"bytes": nbytes, "of": stated, "holds": host_holds(nbytes, stated)} if nbytes else None


def ranges(setup: Setup, result: Estimate) -> dict[str, list[float]]:
    """The lowest and highest value of each figure in `RANGED`, computed from the fastest and the slowest step."""
    if result.time is None:
        return {}
    ends: list[dict[str, Any]] = []
    for step in (result.time.low, result.time.high):
        other = msgspec.structs.replace(result, time=msgspec.structs.replace(result.time, step=step))
        budget = setup.budget(other)
        ends.append({**other.timing.to_dict(), **({} if budget is None else budget.to_dict())})
    return {
        name: sorted(end[name] for end in ends) for name in RANGED if all(end.get(name) is not None for end in ends)
    }


def explain(question: OfBlock, uploads: Uploads) -> dict[str, Any]:
    """Explain a block of the treemap or a figure: rule, formulas, summands and sources. Raises `ConfigError` for another id."""
    setup = job_of(question.flags, uploads)
    return reason(setup, setup.estimate(), question.id)


def changes(question: Question, uploads: Uploads) -> dict[str, Any]:
    """List single changes of the flags, each estimated, the most helpful first."""
    return {"rows": changed(job_of(question.flags, uploads))}


def fitting(question: OfError, uploads: Uploads) -> dict[str, Any]:
    """Estimate the run of an error, and the changes with which it fits, those for the tensor of its traceback first [bytes].

    size: the tensors of the run that have the size which was asked for. Raises `ConfigError` for a text without such an error.
    """
    setup, failure = job_of(question.flags, uploads), PYTORCH.answer(question.text)
    memory = setup.estimate().memory
    return {
        "total": memory.total,
        "moment": memory.moment,
        "verdict": memory.verdict,
        "micro_batch": setup.layout.micro_batch,
        "seq_len": setup.layout.seq_len,
        "vocabulary": getattr(setup.model, "vocab_size", None),
        "capacity": memory.capacity,
        "size": failure.same_size(setup),
        "changes": [PYTORCH.describe_change(change) for change in PYTORCH.changes(setup, failure.place)],
    }


def what_if(question: WhatIf, uploads: Uploads) -> dict[str, Any]:
    """Estimate the network rows and the step time with another adapter. Raises `ConfigError` without a network."""
    refuse(not 0 < question.nic < float("inf"), "must be a bandwidth above 0 [byte/s]", key="nic")
    answer = adapter(job_of(question.flags, uploads), question.nic)
    if answer is None:
        raise ConfigError("there is no network to change: a --gpu is needed, and no --measured", key="nic")
    return answer


def export(question: Export, uploads: Uploads) -> dict[str, Any]:
    """Write the run as a job file of another tool, or as one page: file name, text, and what the tool's keys cannot express."""
    setup = job_of(question.flags, uploads)
    if question.dialect == "html":
        text, _ = load("loadgauge.page.single:page")(
            setup, setup.estimate(), named(setup.job, uploads), partial(resolve_job, model=setup.model)
        )
        return {"filename": "loadgauge.html", "text": text, "not_expressed": []}
    if question.dialect == JOB_FILES.FLAGS:
        return {
            "filename": "loadgauge.sh",
            "text": f"{command_line(setup, setup.estimate(), uploads)}\n",
            "not_expressed": [],
        }
    refuse(
        question.dialect not in JOB_FILES.FILES,
        f"unknown {question.dialect[:40]!r} (known: {', '.join(JOB_FILES.FILES)})",
        key="dialect",
    )
    setup = msgspec.structs.replace(setup, job=named(setup.job, uploads))
    written = JOB_FILES.export(setup, question.dialect)
    ending = ENDINGS[JOB_FILES.dialect(question.dialect).syntaxes[0]]
    name = NAMES.get(question.dialect, question.dialect)
    return {"filename": f"{name}.{ending}", "text": written.text, "not_expressed": list(written.left_out)}
