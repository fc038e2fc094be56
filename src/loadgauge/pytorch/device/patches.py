"""Places in other libraries that look at values and would take another way under fake tensors."""

import contextlib
import importlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from loadgauge.pytorch.device.facts.facts import UNKNOWN

MISSING = object()


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replaces attributes in its body: (owner, name, value). Those that an owner does not have itself are deleted at the end.

    >>> with replaced((torch, "float", torch.half)):
    ...     torch.float
    torch.float16
    """
    before = [(owner, name, vars(owner).get(name, MISSING)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def removing(handles: Iterable[Any]) -> Iterator[None]:
    """A context that removes hooks at its end. handles: what PyTorch returned when they were registered"""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def no_packed_sequences() -> Iterator[None]:
    """transformers builds a whole attention mask where it cannot see that sequences are not packed into one row; a
    real run without packing sees it, and builds none (releases up to 4.57.1 do not look, and build it always). It may be
    imported in the body, at the latest before the first module runs."""
    patches = contextlib.ExitStack()
    patched = False
    waiting: list[Any] = []

    def replace(*_: Any) -> None:
        nonlocal patched
        masking: Any = sys.modules.get("transformers.masking_utils")
        if hasattr(masking, "find_packed_sequence_indices") and not patched:
            patched = True
            with _disable_current_modes(), torch.device("cpu"):
                looks = masking.find_packed_sequence_indices(torch.arange(2)[None]) is None
            if looks:
                patches.enter_context(replaced((masking, "find_packed_sequence_indices", lambda position_ids: None)))
        if patched and waiting:
            waiting.pop().remove()

    if "transformers" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("transformers.masking_utils")
    replace()
    if not patched:
        waiting.append(register_module_forward_pre_hook(replace))
    with patches, removing(waiting):
        yield


RANDOM = ("_no_grad_normal_", "_no_grad_trunc_normal_", "_no_grad_uniform_", "kaiming_normal_", "kaiming_uniform_",
          "normal_", "orthogonal_", "sparse_", "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_")  # fmt: skip
"""Functions of `torch.nn.init` that draw values. The first are what others, taken from there before, come to."""


@contextlib.contextmanager
def no_random_values() -> Iterator[None]:
    """A context in which `torch.nn.init` draws nothing for tensors without memory, which stay as they are: drawing again until all
    values lie in a range, as `trunc_normal_` does, would not end. Constants are set as ever.
    """

    def drawing(usual: Any) -> Any:
        def draw(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            result: torch.Tensor = tensor if isinstance(tensor, FakeTensor) else usual(tensor, *arguments, **named)
            return result

        return draw

    with replaced(*((nn.init, name, drawing(getattr(nn.init, name))) for name in RANDOM if hasattr(nn.init, name))):
        yield


@contextlib.contextmanager
def numbers_as_text() -> Iterator[None]:
    """A tensor that is one known number is written as the number, as a real one is: modules are looked up by such names."""
    shown: Any = torch.Tensor.__format__

    def text(self: Any, spec: str) -> str:
        value = self if self.dim() else self.fake_mode.facts.item(self, str)
        return shown(self, spec) if isinstance(value, torch.Tensor) or value is UNKNOWN else format(value, spec)

    with replaced((FakeTensor, "__format__", text)):
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Set PyTorch's default dtype in the body, and restore the one before at its end. None: leave it."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype or usual)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


@contextlib.contextmanager
def casting_on(device: str) -> Iterator[None]:
    """Autocast of CUDA is of the simulated device, `place`, and so are questions about it that name CUDA or no device."""
    asked, dtype, autocast = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast.__init__

    def named(device_type: str | None) -> str:
        return device if device_type in (None, "cuda") else str(device_type)

    def cast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, named(device_type), *args, **kwargs)

    with replaced(
        (torch, "is_autocast_enabled", lambda device_type=None: asked(named(device_type))),
        (torch, "get_autocast_dtype", lambda device_type: dtype(named(device_type))),
        (torch.autocast, "__init__", cast),
    ):
        yield


@contextlib.contextmanager
def modules_that_move() -> Iterator[None]:
    """`module.to(...)` and similar calls would swap the insides of fake parameters, which PyTorch cannot; here they are
    replaced, tied ones together, and in the optimizers that hold them. A deep copy of a tensor is a clone, where PyTorch would
    copy the bytes that are not there."""
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    depth = 0
    optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    add_group = torch.optim.Optimizer.add_param_group

    def added(self: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        optimizers.add(self)
        add_group(self, group)

    def follow() -> None:
        news = {id(old): new for old, new in moved.values() if new is not old}
        for optimizer in optimizers if news else ():
            for group in optimizer.param_groups:
                group["params"] = [news.get(id(parameter), parameter) for parameter in group["params"]]
            for old in [old for old in optimizer.state if id(old) in news]:
                optimizer.state[news[id(old)]] = optimizer.state.pop(old)

    def move(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        nonlocal depth
        depth += 1
        try:
            for child in self.children() if recurse else ():
                child._apply(fn)
            for name, parameter in self._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in moved:
                    with torch.no_grad():
                        result = fn(parameter)
                        # What is there already stays the same object: an optimizer may hold it.
                        new = parameter if result is parameter else nn.Parameter(result, parameter.requires_grad)
                        if parameter.grad is not None and new is not parameter:
                            new.grad = fn(parameter.grad)
                    moved[id(parameter)] = (parameter, new)
                self._parameters[name] = moved[id(parameter)][1]
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        finally:
            depth -= 1
            if not depth:
                follow()
                moved.clear()
        return self

    def copied(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        result: torch.Tensor = memo[id(self)]
        return result

    with replaced(
        (nn.Module, "_apply", move),
        (FakeTensor, "__deepcopy__", copied),
        (torch.optim.Optimizer, "add_param_group", added),
    ):
        yield
