"""Estimates of one job with some of its fields swept: `estimate --sweep micro-batch=1,2,4..64 --sweep zero=0,1,2,3`.

Unlike the cells of a sweep's file, which are planned, each cell is the job as it is said, estimated.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from loadgauge.core.base import ConfigError, Error, Needs, host_holds, suggest
from loadgauge.core.definitions.job.job import Job, fields
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.plan.space.grid import KINDS, Kind, Row
from loadgauge.core.post_training.memory import memory as task_memory
from loadgauge.core.post_training.step import timed
from loadgauge.core.resolve.posttrain import resolve_posttrain
from loadgauge.core.resolve.resolve import resolve_job

MOST_CELLS = 10_000
CANNOT_TELL = "cannot tell"
"""The outcome of a cell that is no run: a layout that cannot exist, or what is not modelled."""
NUMBERS = ("memory_total", "memory_low", "memory_high", "memory_capacity", "missing", "on_host")
TIMES = ("step", "tokens_per_second_per_gpu", "mfu", "hfu", "days", "cost")
RESULTS: dict[str, Kind] = {
    "outcome": "text", "error": "text", "counted": "text", **dict.fromkeys(NUMBERS, "number"), "moment": "text",
    **dict.fromkeys(PARTS, "number"), "largest_activations": "number", "flops_model": "number",
    "flops_hardware": "number", **dict.fromkeys(TIMES, "number"), "command": "text",
}  # fmt: skip
"""Columns of the results: bytes, FLOPs of a step, seconds, shares, and the command of the cell alone.

missing: what the card lacks for the whole range; on_host: of a node's memory; counted: tokens, or what a model has in their
place; the parts are those at the peak, largest_activations that of any moment.
"""


def read_axes(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Read the values of each swept field from texts `name=value,value`, one or several each. Raises `ConfigError`.

    Whole numbers may be ranges: `1..4` has all of them, `1,2,4..64` goes on as it began. Where values have commas of their
    own, semicolons divide them.

    >>> read_axes(["micro-batch=1,2,4..16", "recompute=none,full"])
    {'micro_batch': (1, 2, 4, 8, 16), 'recompute': ('none', 'full')}
    >>> read_axes(["tp=2,4,pp=1"])
    {'tp': (2, 4), 'pp': (1,)}
    >>> read_axes(["seq-len=1024,2048..4096", "zero=0..3"])
    {'seq_len': (1024, 2048, 4096), 'zero': (0, 1, 2, 3)}
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for text in (part for several in texts for part in re.split(r"[,;](?=[a-z][a-z_-]*=)", several)):
        flag, equals, values = text.partition("=")
        name = flag.strip().removeprefix("--").replace("-", "_")
        if not equals or not values.strip():
            raise ConfigError(f"must be NAME=VALUE,VALUE, got {text[:60]!r}", key="sweep")
        field = fields().get(name)
        if field is None or field.group == "file":
            flags = [key.replace("_", "-") for key, each in fields().items() if each.group != "file"]
            meant = "; it is the GPUs over tp x pp x cp: sweep gpus" if name == "dp" else suggest(flag, flags)
            raise ConfigError(f"no flag of a job is called {flag[:40]!r}{meant}", key="sweep")
        if name in axes:
            raise ConfigError(f"{flag} is swept twice; give all its values at once", key="sweep")
        words = [word.strip() for word in values.split(";" if ";" in values else ",")]
        try:
            if field.kind == "whole":
                words = list(_ranges(words, name))
            axes[name] = tuple(dict.fromkeys(field.read(word) for word in words))
        except ConfigError as error:
            raise ConfigError(str(error), key=f"sweep {name.replace('_', '-')}") from None
    cells = math.prod(map(len, axes.values()))
    if cells > MOST_CELLS:
        raise ConfigError(f"spans {cells:,} cells; at most {MOST_CELLS:,} are estimated", key="sweep")
    return axes


def _ranges(words: Sequence[str], name: str) -> Iterator[str]:
    """The words with each range `a..b` written out: in steps of the two values before its end, or of 1 at the beginning."""
    before: list[int] = []
    for word in words:
        first, dots, last = word.partition("..")
        if not dots:
            before += [_number(word, name)]
            yield word
            continue
        start, stop = _number(first, name), _number(last, name)
        if stop < start:
            raise ConfigError(f"{word} runs backwards")
        step = _progress([*before, start], word, name)
        while start <= stop:
            before += [start]
            yield str(start)
            start = step(start)
            if len(before) > MOST_CELLS:
                raise ConfigError(f"{word} has more than {MOST_CELLS:,} values")


def _progress(values: list[int], word: str, name: str) -> Any:
    """Return the step from one value of a range to the next: a sum, or where the last three say so a product."""
    if len(values) == 1:
        return lambda value: value + 1
    *_, before, two = values
    if two <= before:
        raise ConfigError(f"{word} does not go on from {before}")
    if before > 0 and two % before == 0 and (len(values) == 2 or values[-3] * two == before * before):
        return lambda value: value * (two // before)
    return lambda value: value + two - before


def _number(text: str, name: str) -> int:
    value = fields()[name].read(text)
    assert isinstance(value, int)
    return value


def columns(axes: Sequence[str]) -> dict[str, Kind]:
    """The columns of the rows, in order: the swept fields, then the results."""
    asked: dict[str, Kind] = {name: KINDS.get(fields()[name].kind, "text") for name in axes}
    return asked | RESULTS


def cells(job: Job, axes: dict[str, tuple[Any, ...]]) -> Iterator[tuple[dict[str, Any], Job]]:
    """Yield the values of each cell and its job, the last axis fastest. Raises `ConfigError` for a field that the job has."""
    for name in axes:
        if name != "model" and getattr(job, name) is not None:
            raise ConfigError("is swept, and given as well", key=name.replace("_", "-"))
    for values in itertools.product(*axes.values()):
        cell = dict(zip(axes, values, strict=True))
        yield cell, job.replace(**cell)


def swept(job: Job, axes: dict[str, tuple[Any, ...]]) -> Iterator[Row]:
    """Yield a row for each cell, the last axis fastest. A cell that is no run has an `error`, and no memory.

    >>> rows = list(swept(Job("gpt2", gpu="t4"), {"micro_batch": (1, 512)}))
    >>> [row["outcome"] for row in rows]
    ['fits', 'does not fit']
    """
    for cell, swept_job in cells(job, axes):
        try:
            cell_values = _found(swept_job)
        except Error as error:
            cell_values = {"outcome": CANNOT_TELL, "error": " ".join(str(error).split())}
        yield {**cell, **cell_values, "command": swept_job.command()}


def _held(memory: Needs, on_host: float, stated: str | None) -> Row:
    """The columns on memory, whatever the task; a host that is stated and does not hold its part fits no run."""
    outcome = memory.verdict if host_holds(on_host, stated) else "does not fit"
    row: Row = {"outcome": outcome, "memory_capacity": memory.capacity, "on_host": float(on_host)}
    row |= {f"memory_{name}": float(getattr(memory, name)) for name in ("total", "low", "high")}
    if memory.capacity is not None:
        row["missing"] = max(0.0, float(memory.high - memory.capacity))
    return row


def _of_task(job: Job) -> Row:
    run, _ = resolve_posttrain(job)
    memory = task_memory(run)
    time, _ = timed(run, memory)
    row = _held(memory, sum(memory.host.values()), job.host_memory) | {"moment": memory.worst.name, "counted": "tokens"}
    if time is not None:
        row |= {name: getattr(time, name) for name in TIMES[:2]}
    return row


def _found(job: Job) -> Row:
    if job.task is not None:
        return _of_task(job)
    setup = resolve_job(job)
    result = setup.estimate()
    memory, time = result.memory, result.time
    row: Row = {
        **_held(memory, setup.on_host(result), job.host_memory),
        "counted": setup.model.own.unit if setup.model.own.has_length else setup.model.own.sample,
        "moment": memory.moment,
        **{part: float(nbytes) for part, nbytes in memory.parts.items()},
        "largest_activations": float(memory.largest("activations").parts["activations"]),
        "flops_model": float(result.flops.model),
        "flops_hardware": float(result.flops.hardware),
    }
    if time is not None:
        row |= {name: getattr(time, name) for name in TIMES[:4]}
        budget = setup.budget(result)
        if budget is not None:
            plain = budget.to_dict()
            row |= {"days": plain["days"], "cost": plain["cost"]}
    return row
