"""A simulated device: fake tensors on it take the decisions that CUDA would take, without a GPU.

PyTorch without CUDA cannot run backward on fake `cuda` tensors (the CPU build ends the process). Its key for devices of
others, PrivateUse1, can; where an operation asks whether it is on the CPU, it takes the other branch, as CUDA does. What
CUDA decides by name is put there by `cuda_kernels`. Private parts of PyTorch are used: see `TESTED`.
"""

import contextlib
import ctypes
import functools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from loadgauge.core.base.errors import NotModelled
from loadgauge.pytorch.device.fake import FakeMode
from loadgauge.pytorch.device.kernels.cuda_kernels import fall_through, register_cuda_kernels
from loadgauge.pytorch.device.kernels.cuda_packed import padded_to_symbols
from loadgauge.pytorch.device.kernels.streams import DEFAULT, Event, Stream, answering, current, set_current, within
from loadgauge.pytorch.device.patches import modules_that_move, no_packed_sequences, no_random_values, numbers_as_text

NAME = "simulated"
TESTED = ("2.4", "2.6", "2.13")
"""Releases of PyTorch with which this was tested; docs/versions.md says what works in each."""


def _backend() -> Any:
    """Functions that PyTorch expects of a device's module."""
    return types.SimpleNamespace(
        Stream=Stream,
        Event=Event,
        is_initialized=answering(True),
        is_available=answering(True),
        _is_in_bad_fork=answering(False),
        current_device=answering(0),
        device_count=answering(1),
        manual_seed_all=answering(None),
        # CUDA's refuses none (torchtitan's router).
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16, torch.float32],
        is_bf16_supported=answering(True),
        get_rng_state=lambda *_, **__: torch.empty(0),
        set_rng_state=answering(None),
        synchronize=answering(None),
        set_device=answering(None),
        empty_cache=answering(None),
        set_stream=set_current,
        current_stream=lambda *_, **__: current(),
        default_stream=answering(DEFAULT),
        stream=within,
        device=lambda _: contextlib.nullcontext(),
    )


def _register(module: Any) -> str:
    """Registers a module as that of the device, and returns the device's name. Raises NotModelled where PyTorch lets nobody."""
    from torch.utils import backend_registration

    register = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if register is not None:
        register(NAME, backend_module=module)
        return NAME
    share_device_guard()  # first: nothing is registered where it cannot be
    # Once it is renamed, backward asks it for hooks that only C++ can give.
    name: str = torch._C._get_privateuse1_backend_name()
    torch.utils.generate_methods_for_privateuse1_backend()  # type: ignore[attr-defined,unused-ignore]
    torch._register_device_module(name, module)
    fall_through("AutogradPrivateUse1")  # as for the other devices: collectives have no backward of their own
    return name


def share_device_guard() -> None:
    """Give the device of others a device guard that does nothing: that of `meta`. Raises NotModelled where there is none.

    Backward asks the guard for streams. PyTorch before 2.10 lets only C++ register one, in a table of one pointer for each kind
    of device; so it is put there by hand. Sources: c10/core/DeviceType.h, c10/core/impl/DeviceGuardImplInterface.h.
    """
    try:
        library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libc10.[sd]*"))))
        table = (ctypes.c_void_p * (PRIVATE_USE + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    except (StopIteration, OSError, ValueError):
        table = None
    of_meta = table[META] if table is not None else None
    if table is None or of_meta is None:
        raise NotModelled(
            f"tracing as CUDA needs PyTorch 2.10 or newer here (this is {torch.__version__}); trace on `cpu` instead"
        )
    if table[PRIVATE_USE]:
        return
    # An object without fields is a pointer to its table of functions, before which lie two words about its type.
    functions = ctypes.cast(of_meta, ctypes.POINTER(ctypes.c_void_p))[0]
    assert functions is not None
    copied = (ctypes.c_void_p * (2 + FUNCTIONS)).from_buffer_copy(ctypes.string_at(functions - 16, 8 * (2 + FUNCTIONS)))
    copied[2 + GET_DEFAULT_STREAM] = copied[2 + GET_STREAM]  # that of `meta` refuses
    guard = ctypes.c_void_p(ctypes.addressof(copied) + 16)
    for forever in (copied, guard):  # PyTorch's threads use it to the very end
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(forever))
    table[PRIVATE_USE] = ctypes.addressof(guard)


META, PRIVATE_USE = 14, 20
"""Places in the table of guards."""
GET_STREAM, GET_DEFAULT_STREAM, FUNCTIONS = 5, 6, 24
"""Places in a guard's table of functions, and how many there are at least."""


@functools.cache
def simulated_device() -> str:
    """Registers the device, once in a process, and returns its name. Raises NotModelled where PyTorch cannot.

    >>> simulated_device()
    'simulated'
    """
    try:
        name = _register(_backend())
    except RuntimeError as error:
        raise NotModelled(f"another backend has taken the place of the simulated device: {error}") from None
    register_cuda_kernels(name)
    return name


@contextlib.contextmanager
def fake_tensors(mode: Any = None, *inside: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
    """Makes tensors in its body fake, and patches what would ask for their values in PyTorch and transformers.

    mode: what makes them, a `FakeMode` unless stated; inside: further contexts, entered right after it

    Backward runs on the calling thread: a thread of its own for the simulated device would abort at exit.
    """
    from torch.optim import optimizer

    supported = optimizer._foreach_supported_types
    devices = list(supported)
    try:
        supported.append(FakeTensor)  # else optimizers would not take their usual way
        with contextlib.ExitStack() as stack, torch.autograd.set_multithreading_enabled(False):
            fake_mode = stack.enter_context(mode or FakeMode())
            patches = (no_packed_sequences, no_random_values, modules_that_move, numbers_as_text, padded_to_symbols)
            for more in (*inside, *(patch() for patch in patches)):
                stack.enter_context(more)
            yield fake_mode
    finally:
        supported[:] = devices
