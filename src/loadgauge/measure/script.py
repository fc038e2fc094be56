"""A function of one's own, `script.py:function`, traced as it stands: what it asks of `cuda` goes to the simulated device."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from loadgauge.errors import ConfigError
from loadgauge.measure.fake import FakeMode

if TYPE_CHECKING:
    from loadgauge.measure.observe import Observer

DEVICES = 8
"""How many GPUs the code is told there are."""


def function(target: str) -> Callable[[], Any]:
    """The function that `path/to/script.py:name` names. The script is run to find it. Raises ConfigError."""
    path, _, name = target.rpartition(":")
    file = Path(path)
    if not path.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"{target!r} is not script.py:function")
    if not file.is_file():
        raise ConfigError("no such file", file=path)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError("cannot be read as Python", file=path)
    module = importlib.util.module_from_spec(spec)
    folder = str(file.parent.resolve())
    sys.path.insert(0, folder)
    try:
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{type(error).__name__}: {_first_line(error)}", file=path) from error
    finally:
        sys.path.remove(folder)
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"has no function {name!r}", file=path)
    result: Callable[[], Any] = found
    return result


class FunctionJob:
    """Runs a function that trains. If it returns a function, that one is a step, and is called for each step;
    otherwise it is called once, and does all its steps itself."""

    def __init__(self, run: Callable[[], Any], target: str = "") -> None:
        self.run = run
        self.target = target or getattr(run, "__name__", "function")
        self.assumed = {
            "cuda": f"{DEVICES} devices, all of them simulated; values are never known (.item() gives 1)",
            "steps": "counted by calls of an optimizer's step",
        }
        self._step: Any = None

    @contextlib.contextmanager
    def prepared(self, mode: FakeMode | None, device: str) -> Iterator[Callable[[Any], None]]:
        """`cuda` is the simulated device; the function itself is called by `introduce`."""

        def once(_: Any) -> None:
            if callable(self._step):
                self._guarded(self._step)

        with contextlib.nullcontext() if mode is None or device == "cpu" else cuda_is(device):
            yield once

    def introduce(self, observer: Observer) -> None:
        """Calls the function. If it returns a step, what it did was the preparation."""
        observer.begin("forward")
        self._step = self._guarded(self.run)
        if callable(self._step):
            for record in observer.stream.records:
                record.phase = 0
            observer.stream.phases[:] = [(first, "") for first, _ in observer.stream.phases]

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            if os.environ.get("LOADGAUGE_DEBUG"):
                raise
            raise ConfigError(f"{type(error).__name__}: {_first_line(error)}", file=self.target) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


class _Renamed(TorchFunctionMode):
    """Reads `cuda` as another device, wherever a device is an argument."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device and args and args[0] == "cuda":
            return torch.device(self.device, 0)
        kwargs = {name: renamed(value, self.device) for name, value in (kwargs or {}).items()}
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device(self.device, 0)
        if func in _MOVES and args[1:] and type(args[1]) is int:
            args = (args[0], torch.device(self.device, 0), *args[2:])
        return func(*(renamed(value, self.device) for value in args), **kwargs)


_MOVES = (torch.Tensor.to, torch.Tensor.cuda)


def renamed(value: Any, device: str) -> Any:
    """A device or its name, `cuda` exchanged; other values as they are. Whichever of the GPUs it is: a process that
    plays a rank has one."""
    if isinstance(value, torch.device):
        return torch.device(device, 0) if value.type == "cuda" else value
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return torch.device(device, 0)
    return value


@contextlib.contextmanager
def cuda_is(device: str) -> Iterator[None]:
    """Code that asks for `cuda` gets another device."""
    to, autocast = nn.Module.to, torch.autocast.__init__

    def moved(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        named = {name: renamed(value, device) for name, value in kwargs.items()}
        places: list[Any] = [
            torch.device(device, 0) if type(value) is int else renamed(value, device) for value in args
        ]
        result: nn.Module = to(self, *places, **named)
        return result

    def cast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, device if device_type == "cuda" else device_type, *args, **kwargs)

    replaced: list[tuple[Any, str, Any]] = [
        (nn.Module, "to", moved),
        (nn.Module, "cuda", lambda self, *_: self.to(device)),
        (torch.Tensor, "cuda", lambda self, *_, **__: self.to(device)),
        (torch.autocast, "__init__", cast),
        *((torch.cuda, name, _answer(value)) for name, value in _ANSWERS.items()),
    ]
    missing = object()
    before = [(owner, name, vars(owner).get(name, missing)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        with _Renamed(device):
            yield
    finally:
        for owner, name, value in before:
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_ANSWERS: dict[str, Any] = {
    "is_available": True, "device_count": DEVICES, "current_device": 0, "get_device_capability": (9, 0),
    "get_device_name": "simulated", "is_bf16_supported": True, "memory_allocated": 0, "max_memory_allocated": 0,
    "memory_reserved": 0, "set_device": None, "synchronize": None, "empty_cache": None, "manual_seed": None,
    "manual_seed_all": None, "reset_peak_memory_stats": None,
}  # fmt: skip


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value
