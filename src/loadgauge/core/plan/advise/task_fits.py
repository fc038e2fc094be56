"""Changes with which a run of a task fits: locks that are loosened, states off the card, adapters, then more GPUs."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import msgspec

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.plan.posttrain import Choice, plan_task
from loadgauge.core.plan.space.task_space import Space


class Remedy(NamedTuple):
    """A change with which a run fits: in words, its flags, and the best run with it."""

    words: str
    flags: str
    choice: Choice


CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("the trainer's states on the host while answers are made", {"rollout_offload": "all"}),
    ("optimizer on the host", {"offload": "optimizer"}),
    ("optimizer and weights on the host", {"offload": "all"}),
    ("adapters on a frozen base", {"lora_rank": 16}),
    ("adapters on a frozen base in 4 bits", {"qlora": True}),
)
"""Changes that are tried where no layout fits, before more GPUs: ZeRO, recomputation, sleep, shares and micro-batches have been
where they are open, and are tried first where they are locked (`_unlocked`)."""
LEANEST: dict[str, tuple[str, tuple[Any, ...]]] = {
    "zero": ("weights sharded too", (3,)), "recompute": ("all layers run again", ("full",)),
    "share": ("a smaller share for the engine", (0.5, 0.4, 0.3)), "micro_batch": ("a sequence at a time", (1,)),
    "logprob_batch": ("log-probs of a sequence at a time", (1,)),
}  # fmt: skip
"""Values that locked axes may have instead, in the order in which they are tried."""


Loosened: TypeAlias = "tuple[str, dict[str, Any], dict[str, tuple[Any, ...]]]"
"""A change of what is locked: in words, fields of the job, and axes."""


def _unlocked(job: Job, stated: dict[str, tuple[Any, ...]]) -> Iterator[Loosened]:
    """Yield what is locked and may be leaner; an engine that stays awake sleeps before its share is smaller."""
    engine = None if job.rollout is None else Engine.parse(job.rollout)
    locked = Space.of(job, stated)
    for name, (words, values) in LEANEST.items():
        if name == "share" and engine is not None and not engine.sleep and not job.staleness and engine.kind != "hf":
            asleep = msgspec.structs.replace(engine, sleep=1).text()
            yield "the engine sleeps through the update", {"rollout": asleep}, {}
        fixed = name in stated or (name == "share" and engine is not None and len(locked.share) == 1)
        if fixed and not set(values) & set(getattr(locked, name)):
            yield words, {}, {name: values}


def remedies(job: Job, stated: dict[str, tuple[Any, ...]], reading: Any = None) -> list[Remedy]:
    """Return the changes with which some layout fits, the fewest GPUs last; of leanest layouts, as `find_value` looks at them.

    What is locked is loosened first, each thing alone or, where that is not enough, one after another.
    """
    lean: dict[str, tuple[Any, ...]] = {"recompute": ("full",), "micro_batch": (1,)}
    rows: list[Remedy] = []

    def look(words: list[str], axes: dict[str, tuple[Any, ...]], **flags: Any) -> bool:
        changed, axes = job.replace(**flags), stated | axes
        with contextlib.suppress(Error):
            best = plan_task(changed, Space.of(changed, lean | axes), nearest=False, reading=reading).best
            if best is not None:
                moved = [name for name, values in axes.items() if stated.get(name) != values and name != "share"]
                own = flags | {name: getattr(best.job, name) for name in moved}
                own |= {"rollout": best.job.rollout} if "share" in axes else {}
                rows.append(Remedy(", ".join(words), Job(model="", **own).flags(), best))
                return True
        return False

    loose = list(_unlocked(job, stated))
    every: list[str] = []
    fields_of: dict[str, Any] = {}
    axes_of: dict[str, tuple[Any, ...]] = {}
    alone = [look([words], axes, **own) for words, own, axes in loose]
    if not any(alone):
        for words, own, axes in loose:
            every, fields_of, axes_of = [*every, words], fields_of | own, axes_of | axes
            if len(every) > 1 and look(every, axes_of, **fields_of):
                break
    every, fields_of, axes_of = ([], {}, {}) if rows else (every, fields_of, axes_of)
    for words, flags in CHANGES:
        if all(getattr(job, name) is None for name in flags):
            look([*every, words], axes_of, **fields_of, **flags)
    for power in range(1, 7):
        gpus = 2**power * (job.gpus or 1)
        if look([*every, f"{gpus} GPUs"], axes_of, **fields_of, gpus=gpus):
            break
    return rows
