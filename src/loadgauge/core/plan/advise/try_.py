"""A change of a job, tried with an estimate of the whole job."""

from typing import Any

import msgspec

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.training.frameworks import DEFAULT_SPLIT
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.reproduce import completer
from loadgauge.core.resolve.rescale import changed
from loadgauge.core.resolve.resolve import framework_of, resolve_job
from loadgauge.core.resolve.setup import Setup


class Tried(msgspec.Struct, frozen=True):
    """The fields of a change, why it may help, the whole job with it, and its estimate."""

    fields: dict[str, Any]
    note: str
    result: Estimate
    job: Job

    @property
    def flags(self) -> str:
        """The change as flags to add to a command line."""
        return flags(self.fields)

    @property
    def command(self) -> str:
        """The complete command line of the changed run."""
        return completer(self.job)(self.result).command()


def flags(fields: dict[str, Any]) -> str:
    """Return a change as flags to add to a command line; a field that is reset needs none.

    >>> flags({"zero": 3, "tp": 4, "vpp": None})
    '--tp 4 --zero 3'
    """
    return Job(model="", **fields).flags()


def complete(setup: Setup, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a change with what must be stated so that nothing else changes.

    Where another framework would become the default, it is named: the one that the change needs, else the one of the run. A
    measured run is described without the change.
    """
    job, fields = setup.job, dict(fields)
    if job.framework is None and "framework" not in fields and not setup.open_layout:
        before, after = framework_of(job), framework_of(job.replace(**fields))
        if before != after:
            fields["framework"] = DEFAULT_SPLIT
    if job.measured is not None:
        fields["measured"] = changed(job, fields)
    return fields


def try_change(setup: Setup, fields: dict[str, Any], why: str = "") -> Tried | None:
    """Return the changed job with its estimate, or None where the change cannot be applied or modelled."""
    fields = complete(setup, fields)
    job = setup.job.replace(**fields)
    try:
        run = resolve_job(job, setup.model)
        unread = tuple(item for item in setup.uncounted if item.file)
        run = msgspec.structs.replace(run, uncounted=(*run.uncounted, *unread))
        return Tried(fields, why, run.estimate(), job)
    except Error:
        return None


def effort(other: Estimate, result: Estimate) -> float:
    """Return the cost of a sequence in `other` relative to `result`: time where it is known, else FLOPs."""
    if other.time is not None and result.time is not None:
        return other.time.step / other.time.tokens / (result.time.step / result.time.tokens)
    here = result.flops.hardware / result.layout.global_batch
    return float(other.flops.hardware / other.layout.global_batch / here)
