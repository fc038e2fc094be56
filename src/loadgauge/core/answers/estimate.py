"""The answers of `loadgauge estimate` about training: an estimate, a table of its operations, and a sweep of estimates."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.answers.why.of_estimate import TOPICS, reason
from loadgauge.core.answers.why.of_memory import memory_reason, moment_reason
from loadgauge.core.answers.why.of_task import TOPICS as OF_A_TASK
from loadgauge.core.base import NO, ConfigError, Error, exit_code, host_holds, need, needs
from loadgauge.core.definitions.training.memory_range import Counter
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import Estimate, When
from loadgauge.core.plan.advise.assumptions import assumptions
from loadgauge.core.resolve.large_runs import MANY
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup, worst_routing

MOMENT = "moment"
"""The topic of all that is held at a moment (`--at`)."""


class Estimated(Answer, frozen=True, kw_only=True):
    """An estimate of a job. counter: one whose reading is asked for; at: the moment at which parts of the memory are explained;
    next: what is shown after its text"""

    form: str = "estimate.train"
    writer: str = "loadgauge.core.text.estimate.estimate:write"
    topics: tuple[str, ...] = (*PARTS, *TOPICS)
    pivots: tuple[Pivot, ...] = (Pivot("Through one step", "memory.moments.parts", "name", "parts"),)
    given: Setup
    result: Estimate
    counter: Counter | None = None
    at: When = "largest"
    next: Callable[[], Answer | None] | None = None

    @classmethod
    def of(cls, setup: Setup, result: Estimate, *, allow_tight: bool = False, **more: Any) -> Estimated:
        """Return the answer that an estimate of a setup is."""
        held = host_holds(setup.on_host(result), setup.job.host_memory)
        return cls(
            given=setup,
            result=result,
            verdict=result.memory.verdict,
            code=exit_code(result.memory.verdict, allow_tight=allow_tight) if held else NO,
            assumed=setup.assumed,
            unread=setup.unread(result),
            not_counted=result.not_counted,
            command=setup.job.command(),
            **more,
        )

    def alternatives(self) -> list[tuple[str, Any]]:
        from loadgauge.core.plan.advise.advice import advice  # only where it is asked for

        return [(change.flags, change.result) for change in advice(self.given)]

    def why(self, topic: str) -> Answer:
        if topic == MOMENT:
            behind = moment_reason(self.result, self.at)
            plain = behind.to_dict()
        elif topic in PARTS:
            explained = self.result.explain(topic, self.at)
            behind, plain = memory_reason(explained), explained.to_dict()
        elif topic in TOPICS:
            behind = reason(self.result, topic, self.given.budget(self.result))
            plain = behind.to_dict()
        elif topic in OF_A_TASK:
            raise ConfigError(f"{topic} is of a run with a rollout: --task grpo", key="explain")
        else:
            return super().why(topic)
        document = estimate_document(self.given, self.result) | {"explain": plain}
        return msgspec.structs.replace(behind, document=document, form=self.form)

    def plot(self, file: Path, figure: str) -> None:
        need("FIGURES").plot(self.given, self.result, file, figure)

    def follow(self) -> Answer | None:
        return None if self.next is None else self.next()

    def to_dict(self) -> dict[str, Any]:
        return estimate_document(self.given, self.result, outcomes=True)


class Tried(NamedTuple):
    """Estimates by micro-batch and kind of recomputation; words: the kinds there are"""

    words: tuple[str, ...] = ()
    rows: Mapping[int, Mapping[str, Estimate]] = {}


def neither_said(setup: Setup) -> Tried:
    """Estimate a large run with each micro-batch and kind of recomputation, where neither is said; nothing where one is.

    >>> from loadgauge.core.definitions.job.job import Job
    >>> neither_said(resolve_job(Job("gpt2", gpu="l4"))).rows
    {}
    """
    job = setup.job
    told = setup.file or job.micro_batch or job.recompute or setup.lengths or job.adapts or job.task
    if told or job.gpu is None or setup.layout.gpus < MANY:
        return Tried()
    words = ("none", "selective", "full") if setup.training.framework.recomputes_parts else ("none", "full")
    rows: dict[int, dict[str, Estimate]] = {}
    for size, word in itertools.product((1, 2, 4, 8), words):
        with contextlib.suppress(Error):
            tried = resolve_job(job.replace(micro_batch=size, recompute=word), setup.model).estimate()
            rows.setdefault(size, {})[word] = tried
    return Tried(words, rows)


def estimate_document(setup: Setup, result: Estimate, *, outcomes: bool = False, worst: bool = True) -> dict[str, Any]:
    """Return the document of `loadgauge estimate --json`: the estimate, the assumptions, and what else the job asks for.

    outcomes: with what each assumption's alternative comes to, an estimate each; worst: with the worst routing of experts, which
    is another. Bytes, seconds and FLOP.
    """
    document = result.to_dict()
    document["assumed"] = setup.assumed
    if outcomes:
        document["outcomes"] = [
            {
                "name": assumption.name,
                "value": assumption.value,
                "alternative": assumption.alternative,
                "total": result.memory.total + assumption.memory,
                "step": None if assumption.step is None or result.time is None else result.time.step + assumption.step,
            }
            for assumption in assumptions(setup, result)
        ]
    if setup.file:
        document["file"] = setup.file
        document["unread"] = setup.unread(result)
    budget = setup.budget(result) if setup.job.tokens else None
    if document["time"] is not None and budget is not None:
        document["time"].update(budget.to_dict())
    longest = setup.worst_case()
    if longest is not None and setup.lengths is not None:
        document["lengths"] = {
            "mean": setup.lengths.mean,
            "longest": setup.lengths.longest,
            "expected_tokens": setup.layout.tokens,
            "expected_pairs": setup.layout.pairs,
            "fullest_tokens": None if setup.layout.fullest is None else setup.layout.fullest.tokens,
            "worst_case": needs(longest.memory),
        }
    expected = setup.forecast()
    if expected is not None:
        document["forecast"] = expected.to_dict()
    routed = worst_routing(setup, result) if worst else None
    if routed is not None:
        document["experts"] = {
            "imbalance": setup.layout.expert_imbalance,
            "worst_imbalance": routed.layout.expert_imbalance,
            "worst_case": needs(routed.memory) | {"step": None if routed.time is None else routed.time.step},
        }
    return document
