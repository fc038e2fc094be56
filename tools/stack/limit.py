"""A card of a few bytes: the real libraries train on the simulated device until an allocation does not fit.

The error is that of CUDA's allocator, raised where the tensor is made, and its traceback is the libraries' own.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

import loadgauge
from loadgauge.core.base.units import GIB, KIB, MIB
from loadgauge.pytorch.device.patches import replaced
from loadgauge.pytorch.record.allocations import Stream, any_layer, dtype_name, op_name
from loadgauge.pytorch.record.caching_allocator import LARGE_SEGMENT, OWN_SEGMENT, ROUND_LARGE, SMALL, SMALL_SEGMENT
from loadgauge.pytorch.record.tracker import Tracker

PACKAGE, STACK, TORCH = (Path(file).parent for file in (loadgauge.__file__, __file__, torch.__file__))
OURS = {STACK / name for name in ("limit.py", "libraries.py", "record.py")}
STANDS_IN = re.compile(
    r"_(ops|refs|decomp|prims|prims_common|library|subclasses|higher_order_ops|compile|dynamo)\b|overrides\.py|"
    r"utils/_(stats|pytree|python_dispatch)|.*_meta_registrations"
)
"""PyTorch's own files that do in Python what kernels do on a card, by their paths below its folder."""


class Failure(msgspec.Struct, frozen=True):
    """Where memory ran out, as the simulated device knows it, and the text that a person would see.

    asked: bytes of the tensor; backward: whether a node of the graph was being run
    """

    text: str
    asked: int
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    backward: bool


class Full(torch.OutOfMemoryError):
    """The error of a limit; it has what the text does not say. `within`: the frames that the engine's thread had."""

    failure: Failure
    within: tuple[traceback.FrameSummary, ...] = ()


class Card:
    """A card of `limit` bytes, which may be changed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit


@contextlib.contextmanager
def limited(limit: int) -> Iterator[Card]:
    """Every allocation on the simulated device that leaves more than `limit` bytes live raises `Full` in its body."""
    card = Card(limit)
    counted = [0, 0]  # events, bytes
    pending: list[Full] = []
    taken, changed, engine = Tracker.take, Tracker._change, torch.autograd.graph._engine_run_backward

    def check(stream: Stream) -> None:
        if pending:
            return
        while counted[0] < len(stream.changes):
            counted[1] += stream.changes[counted[0]]
            counted[0] += 1
        if counted[1] > card.limit:
            number = stream.ids[-1]
            error = refused(stream, number, card.limit, counted[1] - stream.changes[-1])
            if torch._C._current_autograd_node() is None:
                raise error
            # An error within the engine's thread would end the process here; it is raised when the engine is done.
            error.within = tuple(traceback.extract_stack())
            pending.append(error)

    def backward(*args: Any, **kwargs: Any) -> Any:
        result = engine(*args, **kwargs)
        if pending and torch._C._current_autograd_node() is None:
            raise pending[0]
        return result

    def take(self: Tracker, tensor: Any, op: Any) -> int | None:
        before = len(self.stream.ids)
        number = taken(self, tensor, op)
        if len(self.stream.ids) > before and self.stream.changes[-1] > 0:
            check(self.stream)
        return number

    def change(self: Tracker, entry: list[Any], nbytes: int) -> None:
        grows = nbytes > entry[2]
        changed(self, entry, nbytes)
        if grows:
            check(self.stream)

    with replaced(
        (Tracker, "take", take), (Tracker, "_change", change), (torch.autograd, "_engine_run_backward", backward),
        (torch.autograd.graph, "_engine_run_backward", backward),
    ):  # fmt: skip
        yield card


def refused(stream: Stream, number: int, limit: int, allocated: int) -> Full:
    """The error of CUDA's allocator for the last tensor of a stream (c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.13)."""
    record = stream.records[number]
    asked = stream.changes[-1]
    error = Full(
        f"CUDA out of memory. Tried to allocate {sized(segment(asked))}. GPU 0 has a total capacity of {sized(limit)} of which"
        f" {sized(limit - allocated)} is free. Of the allocated memory {sized(allocated)} is allocated by PyTorch, and 0 bytes is"
        " reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
        " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
    error.failure = Failure(
        "", asked, op_name(record.op), any_layer(record.module), tuple(map(int, record.shape)), dtype_name(record.dtype),
        record.node != -1,
    )  # fmt: skip
    return error


def segment(nbytes: int) -> int:
    """The bytes that the allocator asks the driver for, which its error names.

    >>> segment(100), segment(3 * MIB) // MIB, segment(11 * MIB + 1) // MIB
    (2097152, 20, 12)
    """
    if nbytes <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if nbytes < OWN_SEGMENT else -(-nbytes // ROUND_LARGE) * ROUND_LARGE


def sized(nbytes: int) -> str:
    """Bytes as the allocator's errors write them: `format_size` there.

    >>> sized(100), sized(3 * GIB)
    ('100 bytes', '3.00 GiB')
    """
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes > unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


def _engine(frames: tuple[traceback.FrameSummary, ...]) -> list[traceback.FrameSummary]:
    """The engine's own line, and what Python ran within it."""
    if not frames:
        return []
    graph = torch.autograd.graph.__file__
    lines = Path(graph).read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if ".run_backward(" in text)
    call = traceback.FrameSummary(graph, line, "_engine_run_backward")
    first = next((place for place, frame in enumerate(frames, 1) if frame.name == "_engine_run_backward"), 0)
    return [call, *(frame for frame in frames[first:] if not frame.filename.endswith("threading.py"))]


def simulated(filename: str) -> bool:
    """Whether a run on a card has no such frame: it is of the simulation, or of what Python does in place of kernels.

    >>> simulated(loadgauge.__file__), simulated(f"{TORCH}/_refs/__init__.py"), simulated(f"{TORCH}/optim/adamw.py")
    (True, True, False)
    >>> simulated("/home/user/loadgauge/.venv/lib/python3.11/site-packages/accelerate/accelerator.py")
    False
    """
    path = Path(filename)
    if path.is_relative_to(TORCH):
        return STANDS_IN.match(path.relative_to(TORCH).as_posix()) is not None
    return path.is_relative_to(PACKAGE) or path in OURS


def printed(error: Full) -> Failure:
    """The failure with the traceback that a run on a card would print."""
    trail = traceback.TracebackException.from_exception(error)
    kept = [frame for frame in [*trail.stack, *_engine(error.within)] if not simulated(frame.filename)]
    while kept and Path(kept[0].filename).parent == STACK:
        del kept[0]
    trail.stack = traceback.StackSummary.from_list(kept)
    trail.__cause__ = trail.__context__ = None
    text = "".join(trail.format()).replace("stack.limit.Full", "torch.OutOfMemoryError")
    return msgspec.structs.replace(error.failure, text=text)
