"""Runs one layer of experts on the simulated device: what it keeps, and the most alive in its forward and backward."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch._dynamo import config as dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from experts.case import Case
from experts.libraries import LIBRARIES
from loadgauge.pytorch.device.fake import FakeMode
from loadgauge.pytorch.device.kernels.counters import Counters
from loadgauge.pytorch.device.patches import replaced
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device
from loadgauge.pytorch.parallel.distributed import fake_process_group
from loadgauge.pytorch.record.observe import BACKWARD, FORWARD, Observer, observing
from loadgauge.pytorch.trace.programs import script
from loadgauge.pytorch.trace.programs.script import redirect_cuda

THEIRS = "torchtitan", "transformers", "megatron"
"""Libraries that are to see the device under the name `cuda`."""


class Measured(msgspec.Struct, frozen=True):
    """A layer as it ran, in bytes beside its weights, its input's gradient counted with it.

    kept: from forward to backward; forward, backward: the most alive in either; rerun: the same of both under a checkpoint
    """

    kept: int
    forward: int
    backward: int
    rerun: int


class _End(torch.autograd.Function):
    """What follows a layer: it takes the output without keeping it, and gives its gradient."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.like = output.shape, output.dtype, output.device
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device)


def measure(case: Case, held: list[str] | None = None) -> Measured:
    """Run a case twice: as it is, and under a checkpoint. held: takes the largest tensors at the peak of the backward"""
    kept, forward, backward = _run(case, held, again=False)
    return Measured(kept, forward, backward, max(_run(case, held, again=True)[1:]))


def _run(case: Case, held: list[str] | None, *, again: bool) -> tuple[int, int, int]:
    with simulated(case) as observer:
        built = LIBRARIES[case.library](case)
        gc.collect()
        call = built.call
        if again:
            call = built.rerun or (lambda x: checkpoint(built.call, x, use_reentrant=False))
        return _measured(case, observer, call, held)


def _measured(
    case: Case, observer: Observer, call: Callable[[Any], Any], held: list[str] | None
) -> tuple[int, int, int]:
    live = observer.tracker.live
    before, start = live(), len(observer.stream.changes)
    entered = torch.empty(case.shape, dtype=torch.bfloat16, device="cuda").requires_grad_()
    of_input = live() - before
    x = entered.clone()
    observer.begin(FORWARD)
    output = call(x)
    del x
    loss = _End.apply(output)
    del output
    middle = len(observer.stream.changes)
    kept = live() - before - of_input - loss.nbytes
    observer.begin(BACKWARD)
    loss.backward()
    changes = observer.stream.changes
    now, levels = sum(changes[:start]), []
    for change in changes[start:]:
        now += change
        levels.append(now)
    peaks = [max(part) - before - of_input for part in (levels[: middle - start], levels[middle - start :])]
    if held is not None:
        _list(observer.stream, middle, "kept", held)
        _list(observer.stream, start + 1 + levels.index(max(levels[: middle - start])), "forward", held)
        _list(
            observer.stream,
            middle + 1 + levels[middle - start :].index(max(levels[middle - start :])),
            "backward",
            held,
        )
    return kept, peaks[0], peaks[1]


def _list(stream: Any, place: int, title: str, held: list[str]) -> None:
    """The tensors that were live before an event, alike ones together, largest first."""
    groups: dict[str, list[int]] = {}
    for number, nbytes in stream.live(place - 1).items():
        one = stream.records[number]
        groups.setdefault(f"{one.op} {str(one.dtype)[6:]} {tuple(one.shape)} {one.module}", []).append(nbytes)
    for name, sizes in sorted(groups.items(), key=lambda pair: -sum(pair[1]))[:24]:
        held.append(f"{title:9} {sum(sizes) / 2**20:9.3f} {len(sizes):4} x {name}")


@contextlib.contextmanager
def simulated(case: Case) -> Iterator[Observer]:
    """The libraries see the simulated device in its body, and rows that are shared out evenly."""
    device = simulated_device()
    counters, own = Counters(), script._is_own_file
    sees = lambda path: any(f"{name}/" in path for name in THEIRS) or "/experts/" in path or own(path)  # noqa: E731
    changes: list[tuple[Any, str, Any]] = [
        (script, "_is_own_file", sees), (FakeMode, "dispatch", _evenly(case, FakeMode.dispatch)),
        (FakeTensor, "tolist", _even_list(case, FakeTensor.tolist)),
        (FakeTensor, "record_stream", lambda *_: None),
        (FakeTensor, "numpy", _even_array(case, FakeTensor.numpy)),
        (Observer, "_note_saved", lambda *_: None), (Observer, "_saw", lambda *_: None),
    ]  # fmt: skip
    with (
        replaced(*changes), dynamo.patch(disable=True), fake_tensors() as mode, observing(device, False) as observer,
        redirect_cuda(device, counters), _world(case, observer),
    ):  # fmt: skip
        mode.cuda = torch.device(device, 0)
        counters.follow(observer.stream)
        yield observer


@contextlib.contextmanager
def _world(case: Case, observer: Observer) -> Iterator[None]:
    if case.ranks == 1 and case.library == "transformers":
        yield
        return
    with fake_process_group(case.ranks, 0, observer):
        yield


_EMPTY = torch.ops.aten.empty.memory_format


def _evenly(case: Case, original: Any) -> Any:
    """Rows that values choose are shared out evenly: of a mask of tokens and experts, those that are routed."""
    aten = torch.ops.aten

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.masked_select.default:
            made = {"dtype": args[0].dtype, "device": args[0].fake_device}
            return original(self, _EMPTY, (), ((case.rows,),), made)
        if func is aten.nonzero.default:
            x = args[0]
            rows = case.experts if x.dim() == 1 else case.rows // case.experts
            return original(self, _EMPTY, (), ((rows, x.dim()),), {"dtype": torch.int64, "device": x.fake_device})
        if func is aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return False
        return original(self, func, types, args, kwargs)

    return dispatch


def _even_list(case: Case, original: Any) -> Any:
    def tolist(self: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return original(self)
        return _parts(case, self)

    return tolist


def _even_array(case: Case, original: Any) -> Any:
    import numpy

    def array(self: Any, *args: Any, **kwargs: Any) -> Any:
        return numpy.array(_parts(case, self)) if isinstance(self, FakeTensor) else original(self, *args, **kwargs)

    return array


def _parts(case: Case, counts: Any) -> list[int]:
    """Counts of rows that add up to all that a rank computes."""
    each, more = divmod(case.rows, counts.numel())
    assert not more, (case, counts.shape)
    return [each] * counts.numel()
