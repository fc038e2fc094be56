"""What to change next: single changes of the flags, each estimated anew, the one that helps most first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from loadgauge.advise.advice import _single, advice, whole
from loadgauge.errors import Error
from loadgauge.estimate.result import Estimate
from loadgauge.resolve.resolve import resolve_job
from loadgauge.resolve.setup import Setup
from loadgauge.spec.axes import DEGREES
from loadgauge.spec.job import Job
from loadgauge.spec.model import Moe

MOST = 14
"""Rows that are shown."""


def changes(given: Setup) -> list[dict[str, Any]]:
    """Rows with the changed flags, bytes and seconds of the other run, and the difference to this one.

    `step_delta` compares steps of as many tokens: it is the other step, rescaled to this one's tokens, less this step.
    `speed` is tokens a second there over here. Where this run does not fit, what makes it fit goes first; what takes more
    or fewer GPUs, or another batch, comes last.
    """
    before = given.estimate()
    found: dict[str, dict[str, Any]] = {}
    wanted = [(change, note) for change, note in (*_single(given), *_faster(given))]
    if before.memory.fits is False:
        for one in advice(given):
            found[one.flags] = _row(given, before, one.result, _changed(one.job, given), one.note)
    for single, note in wanted:
        change = whole(given, single)
        words = Job(model="", **{name: value for name, value in change.items() if value is not None}).flags()
        key = words or ", ".join(change)
        if key in found:
            continue
        try:
            other = resolve_job(msgspec.structs.replace(given.job, **change), given.model).estimate()
        except Error:
            continue
        found[key] = _row(given, before, other, change, note)
    rows = [row for row in found.values() if row["memory_delta"] or row["step_delta"]]
    return sorted(rows, key=lambda row: _rank(row, before))[:MOST]


def _rank(row: dict[str, Any], before: Estimate) -> tuple[Any, ...]:
    """What helps most first: to fit where it does not, else the time, then the memory."""
    step = row["step_delta"]
    gain = 0.0 if step is None or before.time is None else step / before.time.step
    memory = row["memory_delta"] / before.memory.total
    elsewhere = bool(row["flags"].keys() & {"gpus", "global-batch"})
    if before.memory.fits is False:
        return not row["fits"], elsewhere, gain if row["fits"] else memory
    return row["fits"] is False, elsewhere, gain if gain < -0.001 else 0.0, memory


def _row(given: Setup, before: Estimate, other: Estimate, change: dict[str, Any], note: str) -> dict[str, Any]:
    step: float | None = None
    speed: float | None = None
    if before.time is not None and other.time is not None:
        speed = (other.time.tokens / other.time.step) / (before.time.tokens / before.time.step)
        step = before.time.step / speed - before.time.step
    return {
        "label": label(given, change),
        "flags": flags(change),
        "memory": other.memory.total,
        "memory_delta": other.memory.total - before.memory.total,
        "step": None if other.time is None else other.time.step,
        "step_delta": step,
        "speed": speed,
        "mfu": None if other.time is None else other.time.mfu,
        "fits": other.memory.fits,
        "verdict": other.memory.verdict,
        "note": note,
        "numerics": bool(change.keys() & NUMERICS),
    }


NUMERICS = {"precision", "optimizer", "qlora", "lora_rank"}
"""Flags that change what is computed, and not only where and how fast."""


def flags(change: dict[str, Any]) -> dict[str, str | None]:
    """The changed flags as the page has them; None takes a flag out.

    >>> flags({"tp": 4, "sequence_parallel": True, "vpp": None, "mtp": False})
    {'tp': '4', 'sequence-parallel': 'true', 'vpp': None, 'mtp': None}
    """
    return {
        name.replace("_", "-"): None if value in (None, False) else "true" if value is True else str(value)
        for name, value in change.items()
    }


def label(given: Setup, change: dict[str, Any]) -> str:
    """The change in words: what it was, and what it becomes."""
    words = []
    for name, value in change.items():
        if name == "measured":
            continue
        was, title = _was(given, name), name.replace("_", "-")
        if value in (None, False):
            words.append(f"no {title}")
        elif value is True:
            words.append(title)
        else:
            words.append(f"{title} {was} → {value}" if was not in ("", "None") else f"{title} {value}")
    return ", ".join(words)


def _was(given: Setup, name: str) -> str:
    said = getattr(given.job, name)
    if said is not None:
        return str(said)
    layout, kind = given.layout, given.training
    if name in (*DEGREES, "zero", "micro_batch", "global_batch", "recompute", "gpus", "schedule"):
        return str(getattr(layout, name))
    return {
        "loss": kind.kernels.loss, "attention": kind.kernels.attention, "optimizer": kind.optimizer.name,
        "precision": kind.precision.name, "offload": kind.offload,
    }.get(name, "")  # fmt: skip


def _changed(job: Job, given: Setup) -> dict[str, Any]:
    """The fields that a changed job gives and this one does not."""
    return {
        name: value
        for name in Job.__struct_fields__[1:]
        if (value := getattr(job, name)) is not None and value != getattr(given.job, name)
    }


def _faster(given: Setup) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes that may make a run faster, or that take it elsewhere."""
    layout, training = given.layout, given.training
    batches = layout.num_microbatches
    if batches % 2 == 0:
        yield {"micro_batch": 2 * layout.micro_batch}, "larger matrix products, fewer micro-batches"
    if layout.recompute.mode == "full":
        yield {"recompute": "selective"}, "only attention runs again"
    if layout.recompute.mode != "none":
        yield {"recompute": "none"}, "nothing runs again in backward"
    if layout.tp > 1 and layout.tp % 2 == 0:
        fewer: dict[str, Any] = {"tp": layout.tp // 2}
        if layout.tp == 2 and layout.sequence_parallel:
            fewer["sequence_parallel"] = False
        yield fewer, "less communication inside the layers"
    yield from _pipelines(given)
    if layout.zero == 3:
        yield {"zero": 1}, "weights are not gathered with every micro-batch"
    if given.gpu is not None and training.overlap is not None and given.job.overlap != "all":
        yield {"overlap": "all"}, "all communication beside compute, where it can be"
    if layout.cp == 1 and layout.dp % 2 == 0 and layout.seq_len >= 16384:
        yield {"cp": 2}, "shares each sequence over two ranks"
    if any(isinstance(block.mlp, Moe) for block in given.model.blocks):
        for factor in (0.5, 2):
            ep = int(layout.ep * factor)
            if ep >= 1 and ep != layout.ep:
                yield {"ep": ep}, "other groups of experts"
    if training.precision.products is None and training.lora is None:
        yield {"precision": "fp8"}, "8-bit matrix products"
    for factor in (2, 0.5):
        gpus = int(layout.gpus * factor)
        batch = {} if given.job.global_batch is not None else {"global_batch": int(layout.global_batch)}
        word = "twice" if factor > 1 else "half"
        if gpus >= 1:
            yield {"gpus": gpus, **batch}, f"{word} the GPUs, the same batch"
    yield {"global_batch": 2 * int(layout.global_batch)}, "twice the batch: fewer steps, a smaller bubble"


def _pipelines(given: Setup) -> Iterator[tuple[dict[str, Any], str]]:
    """Other pipelines."""
    layout = given.layout
    if layout.pp == 1:
        return
    plain = {"stage_layers": None} if given.job.stage_layers else {}
    fewer: dict[str, Any] = {"pp": layout.pp // 2, **plain}
    if layout.pp == 2:
        fewer.update(schedule=None, vpp=None)
    if layout.pp % 2 == 0:
        yield fewer, "a smaller bubble, more layers on each GPU"
    if layout.schedule == "1f1b":
        layers = layout.layers_of(given.model)[0]
        for chunks in (2, 3, 4, 5, 8):
            if layers % chunks == 0 and not layout.stage_layers:
                yield {"vpp": chunks, "schedule": "interleaved"}, "interleaved: a smaller bubble, more sends"
    elif layout.schedule == "interleaved":
        yield {"vpp": None, "schedule": "1f1b"}, "fewer micro-batches in flight, a larger bubble"
    if not given.training.framework.only_own_schedules:
        yield {"vpp": None, "schedule": "zb-h1"}, "zero-bubble schedule of the same memory"
