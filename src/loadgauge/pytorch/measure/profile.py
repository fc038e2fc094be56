"""Memory and time of a block of code that really runs, on a CPU or on CUDA."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from loadgauge.core.base.errors import ConfigError, refuse
from loadgauge.pytorch.device.patches import removing
from loadgauge.pytorch.measure.cpu_allocator import MODULE, events, live, profiler, tensors
from loadgauge.pytorch.record.sizes import Usage

P = ParamSpec("P")
R = TypeVar("R")


class Block:
    """A measured block of code; `usage` is available after its end."""

    def __init__(self) -> None:
        self._usage: Usage | None = None

    @property
    def usage(self) -> Usage:
        """The memory and time of the block. Raises ConfigError before its end."""
        if self._usage is None:
            raise ConfigError("the block is not over: read its usage after the `with`")
        return self._usage


@contextmanager
def measured(device: str | None = None, model: nn.Module | None = None) -> Iterator[Block]:
    """Measures the memory and time of the code in its body.

    On a CPU the truth is the allocator's own event stream (PyTorch's profiler: measured 10 % of a step of 0.45 s, and
    about a second once per process); on CUDA the allocator's own counters (no cost but a synchronization at both ends).
    `model` attributes each allocation to a module, on a CPU. Two blocks on a CPU cannot be nested. Raises ConfigError for an
    unknown or missing device.

    >>> import torch
    >>> x = torch.ones(1024, requires_grad=True)
    >>> with measured("cpu") as block:
    ...     z = torch.sigmoid(torch.sigmoid(x))
    >>> block.usage.persistent, block.usage.peak, block.usage.beyond(z)
    (8192, 8192, (4096, 4096))
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind.startswith("cuda"):
        with _on_cuda(kind) as block:
            yield block
    elif kind == "cpu":
        with _on_cpu(model) as block:
            yield block
    else:
        raise ConfigError(f"device: measures on cpu and cuda, not on {kind}")


def measure(function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> tuple[R, Usage]:
    """Runs a function once and measures it; returns (its result, its usage)."""
    with measured() as block:
        result = function(*arguments, **keywords)
    return result, block.usage


def profiled(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: every call is measured; `function.usages` lists what each took.

    >>> import torch
    >>> @profiled
    ... def double(x):
    ...     return x + x
    >>> y = double(torch.ones(256))
    >>> [usage.peak for usage in double.usages]
    [1024]
    """
    usages: list[Usage] = []

    @functools.wraps(function)
    def wrapped(*arguments: P.args, **keywords: P.kwargs) -> R:
        result, usage = measure(function, *arguments, **keywords)
        usages.append(usage)
        return result

    wrapped.usages = usages  # type: ignore[attr-defined]
    return wrapped


@contextmanager
def _on_cpu(model: nn.Module | None) -> Iterator[Block]:
    refuse(
        torch._C._autograd._profiler_enabled(),
        "another profiler is running: on a CPU blocks cannot be measured inside one another",
    )
    block = Block()
    observed = profiler()
    with _named(model), observed:
        start = time.perf_counter()
        yield block
        seconds = time.perf_counter() - start
    everything = events(observed)
    memory = live(tensors(everything))
    block._usage = Usage(
        device="cpu",
        persistent=memory.end,
        peak=memory.peak,
        seconds=seconds,
        by_op=memory.by_op(),
        by_module=memory.by_module() if model is not None else {},
        scratch=live(everything).peak - memory.peak,
    )


@contextmanager
def _on_cuda(device: str) -> Iterator[Block]:
    refuse(not torch.cuda.is_available(), "device: there is no CUDA device here")
    block = Block()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free = torch.cuda.mem_get_info(device)[0]
    start = time.perf_counter()
    yield block
    torch.cuda.synchronize(device)
    block._usage = Usage(
        device=torch.cuda.get_device_name(device),
        persistent=torch.cuda.memory_allocated(device) - before,
        peak=max(0, torch.cuda.max_memory_allocated(device) - before),
        seconds=time.perf_counter() - start,
        reserved=torch.cuda.max_memory_reserved(device) - reserved,
        device_total=free - torch.cuda.mem_get_info(device)[0],
    )


@contextmanager
def _named(model: nn.Module | None) -> Iterator[None]:
    """Marks the time that each module's forward takes."""
    if model is None:
        yield
        return
    ranges: list[Any] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            ranges.append(torch.profiler.record_function(MODULE + name))
            ranges[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        if ranges:
            ranges.pop().__exit__(None, None, None)

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(name or type(module).__name__)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    with removing(handles):
        yield
