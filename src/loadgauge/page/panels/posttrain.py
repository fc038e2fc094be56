"""The page's post-training: the answer of `loadgauge estimate --task`, and how long the answers of a step are."""

import bisect
import itertools
import math
import re
from typing import Any

import msgspec

from loadgauge.core.answers.post_training import answered
from loadgauge.core.base.errors import refuse
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.job.job import AROUND, POSTTRAIN
from loadgauge.core.definitions.training.tasks import TASKS
from loadgauge.core.families.catalogue import names_file
from loadgauge.core.resolve.posttrain import OF_ROLLOUT, OF_WHOLE
from loadgauge.page.inputs.flags import State, model_of, named, request_of, written
from loadgauge.page.inputs.uploads import PREFIX, Uploads

MODELS = ("teacher", "reward_model", "critic")
"""Fields that name another model."""
LAW = re.compile(r"[0-9]{1,9}|(uniform|exp|lognormal):[0-9.,eE+]{1,60}")
"""Answers that need no file."""
SHORTEST, LONGEST, OCTAVE = 16, 2**20, 4
"""Lengths at the ends of the histogram [tokens], and its columns in an octave."""


class OfTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The flags of the page, and those of `--task`, by name."""

    flags: State
    asked: State


def answer(question: OfTask, uploads: Uploads) -> dict[str, Any]:
    """Answer as `loadgauge estimate --task --json` does, with the histogram of the answers. Raises `Error` without an answer.

    What only training has is left out of the flags, and named in `left_out`.
    """
    asked = {name.replace("-", "_"): written(name, value) for name, value in question.asked.items()}
    asked = {name: value for name, value in asked.items() if value}
    for name in asked:
        refuse(name not in POSTTRAIN, "is no flag of --task", key=name[:40])
    for name in MODELS:
        refuse(
            names_file(asked.get(name, "")) or asked.get(name, "").startswith(PREFIX),
            "a file cannot be named here; a model of the catalogue can",
            key=name,
        )
    refuse(
        "answers" in asked and not LAW.fullmatch(asked["answers"]),
        "a file of lengths cannot be named here",
        key="answers",
    )
    task = TASKS.get(asked.setdefault("task", "grpo"))
    flags = {name.replace("-", "_"): value for name, value in question.flags.items()}
    unread = {*OF_WHOLE, *AROUND, "measured", *POSTTRAIN}
    if "steps" not in asked:
        unread.add("price")
    if task is not None and task.rollout:
        unread |= {"seq_len", "lengths"}
    elif task is not None:
        asked = {name: value for name, value in asked.items() if name not in OF_ROLLOUT}
    left = [name.replace("_", "-") for name in flags if name in unread and written(name, flags[name])]
    state = {name: value for name, value in flags.items() if name not in unread} | asked
    job = request_of(state, uploads)
    answered_task = answered(job, model_of(job, uploads).spec)
    rollout = answered_task.run.engine is not None
    return {
        **answered_task.to_dict(),
        "command": named(job, uploads).command(),
        "left_out": left,
        "histogram": histogram(answered_task.run.sequences.answers) if rollout else None,
    }


def histogram(answers: Lengths) -> dict[str, Any]:
    """Return the share of the answers in each quarter of an octave of tokens, up to the column of the longest.

    >>> found = histogram(Lengths.of([100, 100, 100, 3000]))
    >>> round(sum(found["shares"]), 9), found["mean"], found["longest"]
    (1.0, 825.0, 3000)
    """
    columns = round(OCTAVE * math.log2(LONGEST / SHORTEST))
    edges = [SHORTEST * 2 ** (step / OCTAVE) for step in range(columns + 1)]
    edges[-1] = math.inf
    total = answers.cumulative[-1]
    below = [0.0]
    for edge in edges[1:]:
        upto = bisect.bisect_left(answers.values, edge)
        below.append(answers.cumulative[upto - 1] / total if upto else 0.0)
    shares = [upper - lower for lower, upper in itertools.pairwise(below)]
    return {
        "shares": shares,
        "shortest": SHORTEST,
        "octave": OCTAVE,
        "mean": answers.mean,
        "longest": answers.longest,
    }
