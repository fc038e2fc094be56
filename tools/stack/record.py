"""Records a case on the simulated device: the live bytes of each phase of its steps, and what they are made of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from loadgauge.pytorch.device.kernels.counters import Counters
from loadgauge.pytorch.device.patches import replaced
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device
from loadgauge.pytorch.parallel.distributed import fake_process_group
from loadgauge.pytorch.record.allocations import Frame, Stream, any_layer, dtype_name, op_name
from loadgauge.pytorch.record.observe import BACKWARD, FORWARD, STEP, Observer, observing
from loadgauge.pytorch.trace.programs.script import always_step, redirect_cuda
from loadgauge.pytorch.why.snapshot import PYTORCH
from stack.case import Case
from stack.libraries import simulated_libraries
from stack.training import train

PHASES = ("load", "prepare", "forward", "loss", "backward", "clip", "step", "after", "evaluation", "saving")
AROUND = ("evaluation", "saving")
"""Phases that are marked by their own names, and last until the end."""
ENTERED, LEFT, LAYERS = "decoder entered", "decoder left", "backward of the layers"
LARGEST = 60
"""Groups of tensors that are listed of each peak."""


class Held(msgspec.Struct, frozen=True):
    """Alike tensors that were live at a peak [bytes]. `line`: of the library that asked for the first of them."""

    nbytes: int
    count: int
    category: str
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    line: str


class Peak(msgspec.Struct, frozen=True):
    """The most that was live in a phase [bytes], by category, and its largest groups of tensors."""

    nbytes: int
    categories: dict[str, int]
    held: tuple[Held, ...]


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """A case as it ran. All in bytes of the tensors, without the allocator's rounding.

    loaded, prepared: live when the model is there, and when the first step begins; first, second: the phases of the two
        steps; kept: live at the end of each step; host: the most that lay on the host
    """

    case: Case
    loaded: int
    prepared: int
    first: dict[str, Peak]
    second: dict[str, Peak]
    kept: tuple[int, ...]
    host: int
    trainable: int
    seconds: float

    @property
    def phases(self) -> dict[str, int]:
        """The highest live bytes of each phase of the second step, and what is kept after it."""
        return {name: peak.nbytes for name, peak in self.second.items()} | {"kept": self.kept[-1]}


class Marks:
    """Puts the marks of a training into the observer's phases."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.loaded = self.prepared = 0
        self.ends: list[int] = []
        self.trainer: Any = None
        self.entered = self.around = False

    def __call__(self, what: str, thing: Any) -> None:
        if what == "loaded":
            self.loaded = self.observer.tracker.live()
            self._watch(thing)
        elif what == "prepared":
            self.prepared = self.observer.tracker.live()
            self.trainer = thing
        elif what in AROUND:
            self.around = True
            self.observer.begin(what)
        else:
            self.ends.append(self.observer.tracker.live())

    def _watch(self, model: Any) -> None:
        """Marks where the decoder begins, where its last layer ends, and where the backward of the layers begins."""
        decoder = model.get_decoder()

        def entered(*_: Any) -> None:
            if self.around:
                return
            if not self.entered:
                self.entered, self.prepared = True, self.observer.tracker.live()
            self.observer.begin(ENTERED)

        def left(_: Any, inputs: Any) -> None:
            if self.around:
                return
            self.observer.begin(LEFT)
            if inputs[0].requires_grad:
                inputs[0].register_hook(lambda _: self.observer.begin(LAYERS))

        decoder.register_forward_pre_hook(entered)
        # The last norm is of the head, as the formula counts it.
        norms = [module for name, module in decoder.named_children() if "norm" in name or name == "ln_f"]
        norms[-1].register_forward_pre_hook(left)


@contextlib.contextmanager
def simulated(case: Case, stacks: bool) -> Iterator[Observer]:
    """The libraries see the simulated device in its body. `stacks`: name the lines that made the tensors."""
    device = simulated_device()
    counters = Counters()
    # Neither FLOPs nor saved tensors are wanted; to read those that TRL has offloaded would bring them back.
    unwatched = replaced((Observer, "_note_saved", lambda *_: None), (Observer, "_saw", lambda *_: None))
    with (
        unwatched,
        simulated_libraries(case.ranks), fake_tensors() as mode, observing(device, stacks) as observer,
        redirect_cuda(device, counters), always_step(), _world(case, observer),
    ):  # fmt: skip
        mode.cuda = torch.device(device, 0)
        counters.follow(observer.stream)
        observer.begin(FORWARD)
        yield observer


def record(case: Case, stacks: bool = True) -> Traced:
    """Trains a case on the simulated device, in this process. `stacks`: name the lines that made the tensors."""
    begun = time.perf_counter()
    with simulated(case, stacks) as observer:
        marks = Marks(observer)
        train(case, marks)
        observer.finish()
        steps = phases(observer.stream)
        made = [_peaks(observer.stream, step) for step in steps]
        trainable = sum(getattr(p, "ds_numel", p.numel()) for p in marks.trainer.model.parameters() if p.requires_grad)
        return Traced(
            case=case, loaded=marks.loaded, prepared=marks.prepared, first=made[0], second=made[-1], kept=tuple(marks.ends),
            host=observer.tracker.elsewhere[1], trainable=trainable, seconds=time.perf_counter() - begun,
        )  # fmt: skip


@contextlib.contextmanager
def _world(case: Case, observer: Observer) -> Iterator[None]:
    if case.ranks == 1:
        yield
        return
    # Of the ranks of ZeRO 1 and 2 the last one has the head, whose gradient comes first and is held through the backward.
    rank = case.ranks - 1 if case.wrapper in ("zero1", "zero2") else 0
    with fake_process_group(case.ranks, rank, observer):
        yield


def phases(stream: Stream) -> list[dict[str, list[tuple[int, int]]]]:
    """For each step, the stretches of events of each phase, from the marks in the order in which they were made."""
    steps: list[dict[str, list[tuple[int, int]]]] = [{}]
    name = "prepare"
    ends = [first for first, _ in stream.phases[1:]] + [len(stream.ids)]
    for (first, mark), end in zip(stream.phases, ends, strict=True):
        if mark == ENTERED:
            if name == "after":
                steps.append({})
            name = "forward"
        elif mark in AROUND:
            name = mark
        elif mark == LEFT:
            name = "loss"
        elif mark == LAYERS:
            name = "backward"
        elif mark == STEP:
            name = "step"
        elif mark == FORWARD:
            name = {"backward": "clip", "loss": "clip", "step": "after"}.get(name, name)
        assert name in PHASES, (mark, BACKWARD)
        steps[-1].setdefault(name, []).append((first, end))
    return steps


def _peaks(stream: Stream, phases: dict[str, list[tuple[int, int]]]) -> dict[str, Peak]:
    """The highest moment of each phase; what a phase finds at its beginning counts."""
    live = [0]
    for change in stream.changes:
        live.append(live[-1] + change)
    result = {}
    for name, stretches in phases.items():
        best = max((place for first, end in stretches for place in range(first, end + 1)), key=live.__getitem__)
        result[name] = _peak(stream, best)
    return result


def _peak(stream: Stream, place: int) -> Peak:
    """What was live before event `place`."""
    if not place:
        return Peak(0, {}, ())
    held = stream.live(place - 1)
    groups: dict[tuple[Any, ...], list[int]] = {}
    categories: dict[str, int] = {}
    for number, nbytes in held.items():
        record, category = stream.records[number], stream.category(number)
        categories[category] = categories.get(category, 0) + nbytes
        where = any_layer(record.module)
        line = _line(stream.stacks.get(number, ()))
        key = (category, op_name(record.op), where, tuple(map(int, record.shape)), dtype_name(record.dtype), line)
        groups.setdefault(key, []).append(nbytes)
    rows = [Held(sum(sizes), len(sizes), *key) for key, sizes in groups.items()]
    rows.sort(key=lambda row: -row.nbytes)
    return Peak(sum(held.values()), categories, tuple(rows[:LARGEST]))


def _line(frames: tuple[Frame, ...]) -> str:
    """The innermost line outside PyTorch's own files; else the node of the graph that was run backward."""
    for frame in frames:
        if not PYTORCH.search(frame.filename) and frame.filename != "??":
            return f"{_short(frame.filename)}:{frame.line}"
    return frames[-1].name.removeprefix("torch::autograd::generated::").removesuffix("::apply") if frames else ""


def _short(path: str) -> str:
    return path.rpartition("-packages/")[2] or path
