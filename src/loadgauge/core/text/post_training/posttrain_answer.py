"""All that `loadgauge estimate --task` says of a run after pre-training: the command line and the page ask here."""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.post_training.memory import PostMemory, memory
from loadgauge.core.post_training.roles import Run
from loadgauge.core.post_training.step import StepTime, timed
from loadgauge.core.resolve.posttrain import remedies, resolve_posttrain
from loadgauge.core.text.post_training import posttrain, posttrain_time


class Answer(msgspec.Struct, frozen=True):
    """A run of a task. untimed: why there is no time; remedies: flags that were tried, with the memory under them"""

    job: Job
    run: Run
    memory: PostMemory
    time: StepTime | None
    untimed: str
    remedies: list[tuple[str, PostMemory]]

    def document(self) -> dict[str, Any]:
        """Return the document of `--json`: bytes, seconds and plain counts."""
        found = posttrain.document(self.run, self.memory, self.remedies)
        return found | posttrain_time.document(self.time, self.untimed, self.job)


def answered(job: Job, model: ModelSpec | None = None) -> Answer:
    """Return memory and time of a run, and what makes it fit. model: that of the job, where it was read before.

    Raises `ConfigError`, `LayoutError` or `NotModelled`.

    >>> found = answered(Job("qwen2.5-7b", task="dpo", gpu="h100-sxm5-80gb", gpus=8, zero=3))
    >>> found.document()["worst"], found.time is not None
    ('reference', True)
    """
    run, _ = resolve_posttrain(job, model)
    found = memory(run)
    time, untimed = timed(run, found)
    tried = remedies(job, found, model=model) if found.verdict in ("tight", "does not fit") else []
    return Answer(job, run, found, time, untimed, tried)
