"""The answer of `loadgauge estimate --task`: memory, time and remedies of a run after pre-training, and its document."""

from collections.abc import Sequence
from typing import Any

import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.answers.task_remedies import remedies
from loadgauge.core.answers.why.of_task import TOPICS, explain
from loadgauge.core.base import NO, exit_code, host_holds, needs
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.post_training.memory import PostMemory, memory
from loadgauge.core.post_training.roles import Run
from loadgauge.core.post_training.step import StepTime, timed
from loadgauge.core.resolve.posttrain import resolve_posttrain

NOT_COUNTED = (
    "rewards by rule and environments, on the host",
    "what collective libraries hold after groups are destroyed, and blocks that allocators leave idle beyond the range",
)


class RunOfTask(Answer, frozen=True, kw_only=True):
    """A run of a task. untimed: why there is no time; model: that of the job, where it was read before"""

    form: str = "estimate.posttrain"
    writer: str = "loadgauge.core.text.post_training.posttrain:write"
    topics: tuple[str, ...] = TOPICS
    pivots: tuple[Pivot, ...] = (
        Pivot("GiB on the fullest card, by phase and role", "memory.phases.parts.bytes", "phase", "role"),
    )
    job: Job
    run: Run
    memory: PostMemory
    time: StepTime | None
    untimed: str
    model: ModelSpec | None = None

    def alternatives(self) -> list[tuple[str, PostMemory]]:
        """Return flags that were tried where it may not fit, with the memory of the run under them."""
        if self.verdict not in ("tight", "does not fit"):
            return []
        engine = self.run.engine
        job = self.job if engine is None or self.job.rollout else self.job.replace(rollout=engine.text())
        return remedies(job, self.memory, model=self.model, layout=self.run.trained.layout)

    def why(self, topic: str) -> Answer:
        return explain(self.run, self.memory, topic, self.time) if topic in TOPICS else super().why(topic)

    def to_dict(self) -> dict[str, Any]:
        return self.plain(self.alternatives())

    def plain(self, remedies: Sequence[tuple[str, PostMemory]] = ()) -> dict[str, Any]:
        """Return the document of `--json`. remedies: flags that were tried, with the memory under them"""
        return _memory_document(self, remedies) | time_document(self.time, self.untimed, self.job)


def answered(job: Job, model: ModelSpec | None = None, *, allow_tight: bool = False) -> RunOfTask:
    """Return memory and time of a run, and what makes it fit. model: that of the job, where it was read before.

    Raises `ConfigError`, `LayoutError` or `NotModelled`.

    >>> found = answered(Job("qwen2.5-7b", task="dpo", gpu="h100-sxm5-80gb", gpus=8, zero=3))
    >>> found.to_dict()["worst"], found.time is not None
    ('reference', True)
    """
    run, _ = resolve_posttrain(job, model)
    memory_of_run = memory(run)
    time, untimed = timed(run, memory_of_run)
    held = host_holds(sum(memory_of_run.host.values()), job.host_memory)
    return RunOfTask(
        job=job,
        run=run,
        memory=memory_of_run,
        time=time,
        untimed=untimed,
        model=model,
        verdict=memory_of_run.verdict,
        code=exit_code(memory_of_run.verdict, allow_tight=allow_tight) if held else NO,
        assumed=run.assumed,
        not_counted=[*(item.note for item in run.uncounted if item.note), *NOT_COUNTED],
        unread=[item.document(memory_of_run.unread) for item in run.uncounted if item.file],
        command=job.command(),
    )


def _memory_document(answer: RunOfTask, remedies: Sequence[tuple[str, PostMemory]]) -> dict[str, Any]:
    """Return the document of `--json`: bytes and plain counts."""
    run, memory = answer.run, answer.memory
    sequences, engine = run.sequences, memory.engine
    document: dict[str, Any] = {
        "task": run.task.name,
        "model": {"name": run.trained.model.name, "params": run.trained.params},
        "gpu": None if run.gpu is None else run.gpu.id,
        "verdict": memory.verdict,
        "worst": memory.worst.name,
        "capacity": memory.capacity,
        "gpus": {"trainer": run.placement.trainer, "rollout": run.placement.rollout, "all": run.placement.gpus},
        "roles": {
            name: {
                "model": member.model.name,
                "params": member.params,
                "uses": list(member.role.uses),
                "shares": member.shares,
                "offloaded": member.offloaded,
            }
            for name, member in run.members.items()
        },
        "memory": {
            **needs(memory),
            "moment": memory.worst.name,
            "parts": memory.worst.parts,
            "phases": [
                {
                    "phase": phase.name,
                    "side": phase.side,
                    "total": phase.total,
                    "low": phase.low,
                    "high": phase.high,
                    "parts": [
                        {"role": resident.role, "part": resident.part, "bytes": resident.nbytes}
                        for resident in phase.residents
                    ],
                }
                for phase in memory.phases
            ],
        },
        "host": memory.host,
        "assumed": run.assumed,
        "remedies": [{"flags": flags, "memory": needs(remedy)} for flags, remedy in remedies],
        "not_counted": answer.not_counted,
        "unread": answer.unread,
    }
    if engine is not None and run.engine is not None:
        document["rollout"] = {
            "engine": run.engine.text(),
            "replicas": run.replicas,
            "cache": engine.pool,
            "cache_demand": engine.demand,
            "cache_of_a_token": engine.token,
            "at_once": engine.running,
            "asked": engine.asked,
        }
        document["sequences"] = {
            "prompts": sequences.prompts,
            "samples": sequences.samples,
            "prompt_len": sequences.prompt,
            "answer_mean": sequences.answers.mean,
            "answer_longest": sequences.answers.longest,
        }
    return document


def time_document(time: StepTime | None, untimed: str, job: Job) -> dict[str, Any]:
    """Return the `time` of `--json`: seconds."""
    if time is None:
        return {"time": None, "untimed": untimed}
    document = msgspec.to_builtins(time) | {"tokens_per_second_per_gpu": time.tokens_per_second_per_gpu}
    document["tokens_per_step"] = document.pop("tokens")
    document |= {"days": None, "cost": None}
    if job.steps is not None:
        days = time.days(job.steps)
        cost = None if job.price is None else time.money(job.steps, job.price)
        document |= {"steps": job.steps, "days": days, "gpu_hours": days * 24 * time.gpus, "cost": cost}
    return {"time": document}
