"""Trainings to trace, by the fields of a `Job`."""

from __future__ import annotations

from typing import Any

from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.trace.torch_run import TorchRun


def torch_run(rank: int = 0, keep: tuple[str, ...] = (), **fields: Any) -> TorchRun:
    """How a model is trained that is given as a config."""
    return TorchRun.of(Job(model="", **fields), rank, keep)
