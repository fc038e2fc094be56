"""A simulated device: fake tensors on it take the decisions that CUDA would take, without a GPU.

PyTorch without CUDA cannot run backward on fake `cuda` tensors (the CPU build ends the process). Its key for devices of
others, PrivateUse1, can; where an operation asks whether it is on the CPU, it takes the other branch, as CUDA does. What
CUDA decides by name is put there by `cuda_kernels`. Private parts of PyTorch are used: see `PINNED`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from loadgauge.errors import NotModelled
from loadgauge.trace.device.fake import FakeMode
from loadgauge.trace.device.patches import modules_that_move, no_packed_sequences

NAME = "simulated"
PINNED = ("2.13",)
"""Releases of PyTorch with which this was tested."""


class Stream:
    """The only stream of the simulated device; it is always idle."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.device_index, self.stream_id = torch.device(NAME, 0), 0, 0

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class Event:
    """An event of the simulated device; it is always complete."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        """Not a number [ms]: nothing runs, so nothing takes time."""
        return math.nan


def _backend() -> Any:
    from torch.utils.backend_registration import _DummyBackendModule

    class Backend(_DummyBackendModule):
        """What PyTorch asks of a device's module."""

        Stream, Event = Stream, Event

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

        def is_bf16_supported(self, including_emulation: bool = True) -> bool:
            return True

        def get_rng_state(self, device: Any = None) -> torch.Tensor:
            return torch.empty(0)

        def set_rng_state(self, state: Any, device: Any = None) -> None: ...
        def synchronize(self, device: Any = None) -> None: ...
        def set_device(self, device: Any) -> None: ...
        def empty_cache(self) -> None: ...
        def set_stream(self, stream: Any) -> None: ...

        def current_stream(self, device: Any = None) -> Any:
            return Stream()

        def default_stream(self, device: Any = None) -> Any:
            return Stream()

        def stream(self, stream: Any) -> Any:
            return contextlib.nullcontext()

        def device(self, device: Any) -> Any:
            return contextlib.nullcontext()

    return Backend()


@functools.cache
def simulated_device() -> str:
    """Registers the device, once in a process, and returns its name. Raises NotModelled where PyTorch cannot.

    >>> simulated_device()
    'simulated'
    """
    try:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
    except ImportError:
        raise NotModelled(
            f"tracing as CUDA needs PyTorch {PINNED[0]} (this is {torch.__version__}); trace on `cpu` instead"
        ) from None
    try:
        register(NAME, backend_module=_backend())
    except RuntimeError as error:
        raise NotModelled(f"another backend has taken the place of the simulated device: {error}") from None
    from loadgauge.trace.device.cuda_kernels import register_cuda_kernels

    register_cuda_kernels(NAME)
    return NAME


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeMode]:
    """Makes tensors in its body fake, and patches what would ask for their values in PyTorch and transformers.

    Backward runs on the calling thread: a thread of its own for the simulated device would abort at exit.
    """
    from torch.optim import optimizer

    supported = optimizer._foreach_supported_types
    kinds = list(supported)
    try:
        supported.append(FakeTensor)  # else optimizers would not take their usual way
        with (
            FakeMode() as mode,
            no_packed_sequences(),
            modules_that_move(),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield mode
    finally:
        supported[:] = kinds
