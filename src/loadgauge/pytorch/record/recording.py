"""A training run on the simulated device and written down: what `trace`, `capture`, `compare` and `why` read."""

import contextlib
import functools
import gc
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from loadgauge.pytorch.device.fake import FakeMode, channels_together
from loadgauge.pytorch.device.kernels import cuda_kernels
from loadgauge.pytorch.device.simulated import fake_tensors
from loadgauge.pytorch.record.allocations import Stream, op_name
from loadgauge.pytorch.record.flops import formula
from loadgauge.pytorch.record.observe import FORWARD, Observer, observing
from loadgauge.pytorch.record.sizes import leaves
from loadgauge.pytorch.record.tracker import next_node, node_key
from loadgauge.pytorch.trace.programs.call import where
from loadgauge.pytorch.trace.programs.training import Traceable

STEPS = 2
"""The optimizer's states are made in the first step."""
ASKED = "loadgauge_asked"
"""Of an error: the last line before it that decided by a value which nobody knows."""


class Op(msgspec.Struct):
    """One dispatched operation. reads, makes: numbers of storages; node: of the graph, in backward; events: how many came before
    its end; `flops` None: its kind has work that no formula is known for. order: the number of the node that its forward made, or
    whose backward it is; shapes: of the tensors it reads, where it has FLOPs; causal: whether attention sees the past alone;
    copies: whether it makes a copy in another dtype or place; marks: whether it only marks a place for a profiler;
    packs: whether it is one of bitsandbytes' own, of packed matrices and their scales
    groups: of a convolution, below 0 of a transposed one; strided: whether its channels do not lie together; steps: whether its
        filter moves on by more than one place
    turns: of a recurrence, how many layers run one after another at each position, and which size of its input counts positions;
        -1: of packed sequences, all turns."""

    name: str
    module: str
    phase: str
    node: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    flops: Any
    events: int
    order: int = -1
    shapes: tuple[tuple[Any, ...], ...] = ()
    causal: bool = False
    copies: bool = False
    marks: bool = False
    packs: bool = False
    groups: int = 0
    strided: bool = False
    steps: bool = False
    turns: tuple[int, int] = (0, 0)


class Recording(msgspec.Struct):
    """The steps of a training, written down. ops: every operation, where asked for; starts: where each step begins in them."""

    observer: Observer
    mode: FakeMode
    begun: float
    ops: list[Op] = []
    starts: list[int] = []

    @property
    def stream(self) -> Stream:
        """The stream of allocations."""
        return self.observer.stream

    @property
    def seconds(self) -> float:
        """Seconds since the training began to be prepared."""
        return time.perf_counter() - self.begun


@contextlib.contextmanager
def recording(
    job: Traceable,
    device: str = "cuda",
    steps: int = STEPS,
    *,
    gpus: int | None = None,
    rank: int = 0,
    stacks: bool = False,
    tensors: contextlib.AbstractContextManager[Any] | None = None,
    by_operation: bool = False,
) -> Iterator[Recording]:
    """Run the steps of a training as on `device` (cuda or cpu), and yield what was written down before anything of it is let go.

    gpus, rank: this process simulates `rank` of `gpus` ranks (FSDP, DDP, tensor, sequence and pipeline parallel code);
        None: there is no process group
    stacks: record the lines of the program with each allocation, for the memory viewer and for `why`
    tensors: makes the tensors without memory; default: those of plain sizes
    by_operation: write down every operation; no circles of garbage are freed between them then
    """
    device_type = where(device)
    cuda_kernels.ATTENTION.clear()
    begun = time.perf_counter()
    with (
        fake_tensors() if tensors is None else tensors as mode,
        job.prepared(mode, device_type) as step,
        observing(device_type, stacks) as observer,
        contextlib.ExitStack() as more,
    ):
        if gpus is not None:
            from loadgauge.pytorch.parallel.distributed import fake_process_group

            more.enter_context(fake_process_group(gpus, rank, observer))
        job.introduce(observer)
        result = Recording(observer, mode, begun)
        if by_operation:
            observer.tracker.watchers.append(
                lambda *call: None if views(call[0]) else result.ops.append(_op(observer, *call))
            )
        observer.begin(FORWARD)
        with _no_collection() if by_operation else contextlib.nullcontext():
            for _ in range(steps):
                result.starts.append(len(result.ops))
                try:
                    step(observer)
                except Exception as error:  # what it read before may be why
                    error.__dict__[ASKED] = next(reversed(mode.read.branches), "")
                    raise
        yield result


@functools.cache
def views(func: Any) -> bool:
    """Return whether an operation only looks at its argument in another way, which takes neither memory nor time."""
    schema = getattr(func, "_schema", None)
    if func is torch.ops.aten._unsafe_view.default:  # does not say so
        return True
    returns = [] if schema is None else schema.returns
    return bool(returns) and all(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _op(observer: Observer, func: Any, args: Any, kwargs: Any, out: Any) -> Op:
    tracker = observer.tracker

    def storages(tree: Any) -> tuple[int, ...]:
        numbers = (tracker.take(leaf, "external") for leaf in leaves((tree,)) if isinstance(leaf, torch.Tensor))
        return tuple(dict.fromkeys(number for number in numbers if number is not None))

    count = formula(func)
    flops = 0 if count is None else None if isinstance(count, str) else count(args, kwargs, out)
    node = node_key(torch._C._current_autograd_node())
    module = tracker.module or (observer.module_of(node) if node >= 0 else "")
    shapes = (
        ()
        if count is None or isinstance(count, str)
        else tuple(tuple(tensor.shape) for tensor in leaves(args) if isinstance(tensor, torch.Tensor))
    )
    return Op(
        op_name(func),
        module,
        observer.phase,
        node,
        storages((args, kwargs)),
        storages(out),
        flops,
        len(observer.stream.ids),
        node if node >= 0 else next_node() - 1,
        shapes,
        bool(shapes) and _causal(func, args, kwargs),
        func is torch.ops.aten._to_copy.default,
        func.namespace == "profiler",
        func.namespace == "bitsandbytes",
        *_convolved(func, args),
        _recurring(func, args),
    )


def _recurring(func: Any, args: Any) -> tuple[int, int]:
    """Layers that wait for one another, and the place of the positions; of both directions each layer takes the whole sequence.

    Of one direction, the layers of cuDNN run beside each other, each a position behind.
    """
    if func is not torch.ops.aten._cudnn_rnn.default:
        return 0, 0
    turns = args[9] if args[13] else 1
    return (turns * len(args[14]), -1) if args[14] else (turns, int(args[10]))


def _convolved(func: Any, args: Any) -> tuple[int, bool, bool]:
    """The groups of a convolution, below 0 where it is transposed, whether it reads channels that do not lie together, and moves on
    by more than one place."""
    if func is not torch.ops.aten.convolution.default:
        return 0, False, False
    return -args[8] if args[6] else args[8], not channels_together(*args[:2]), max(args[3]) > 1


def _causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation is told to look at the past alone."""
    names = [argument.name for argument in func._schema.arguments] if hasattr(func, "_schema") else []
    if "is_causal" not in names:
        return False
    position = names.index("is_causal")
    return bool(args[position] if position < len(args) else (kwargs or {}).get("is_causal", False))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage is collected before and after only: a collection in between would free circles at another operation each time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
