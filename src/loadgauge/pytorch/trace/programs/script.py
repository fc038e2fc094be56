"""A function of one's own, `script.py:function`, traced unchanged: its `cuda` is the simulated device."""

import contextlib
import functools
import importlib.util
import inspect
import os
import re
import runpy
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader

from loadgauge.core.base.errors import ConfigError, first_line, refuse
from loadgauge.pytorch.device.fake import FakeMode
from loadgauge.pytorch.device.kernels.counters import NAME as GPU, Counters, index_of
from loadgauge.pytorch.device.patches import casting_on, removing, replaced
from loadgauge.pytorch.record.observe import Observer
from loadgauge.pytorch.record.tracker import OWN
from loadgauge.pytorch.trace.programs.own_loops import settings
from loadgauge.pytorch.trace.subprocess import WHOLE


def check(target: str) -> tuple[Path, str]:
    """Splits `path/to/script.py:name` into the path and the name. Raises ConfigError where there is no such file."""
    path, _, name = target.rpartition(":")
    refuse(not path.endswith(".py") or not name.isidentifier(), f"{target!r} is not script.py:function")
    refuse(not Path(path).is_file(), "no such file", file=path)
    return Path(path), name


def function(target: str, *, redirected: bool = False) -> Callable[[], Any]:
    """The function that `path/to/script.py:name` names, or one that makes the module of that name by running the script anew.

    The script is run to find it, and its folder stays where modules are looked for, as with `python script.py`. Raises ConfigError.
    redirected: `cuda` is another device already; else it is the CPU meanwhile
    """
    file, name = check(target)
    with contextlib.nullcontext() if redirected else cuda_is("cpu", file):
        attribute = getattr(_executed(file), name, None)
    if not callable(attribute):
        raise ConfigError(f"has no function {name!r}", file=str(file))
    return _again(file, name) if isinstance(attribute, nn.Module) else attribute  # type: ignore[no-any-return]


def anew(step: Callable[..., Any]) -> Callable[[], Any]:
    """Return what hands out a function of a script from the script run again, so that what it trains is made where it runs."""
    file = _file_of(step)
    return _again(Path(file), step.__name__) if file else lambda: step


def _again(file: Path, name: str) -> Any:
    result: Any = functools.partial(_made, file, name)
    result.__name__ = name
    return result


def _made(file: Path, name: str) -> Any:
    return getattr(_executed(file), name)


def _file_of(maker: Any) -> str:
    """The file of what makes a module; "" where it has none."""
    if isinstance(maker, functools.partial) and maker.func is _made:
        return str(maker.args[0])
    try:
        return inspect.getsourcefile(inspect.unwrap(maker)) or ""
    except TypeError:
        return ""


def made(maker: Callable[..., Any], device: str) -> Any:
    """Return what a function makes on a device, from its script run again where it hands out what that made when it was read."""
    with torch.device(device), cuda_is(device, maker if device == "meta" else None):
        try:
            result = _called(maker)
        except (
            RuntimeError,
            NotImplementedError,
        ) as error:  # it reads rates of layers off a line of numbers, or moves layers
            if device != "meta" or "meta tensor" not in str(error):
                raise
            with _Valued(), replaced((nn.Module, "to", lambda module, *_, **__: module)):
                result = _called(maker)
        here = torch.empty(0).device
        if (first := _first(result)) is None or first.device == here:
            return result
        if first.is_meta:
            return result.to_empty(device=device)  # as the script would, before it reads its weights
        result = _called(again) if (again := _anew(maker)) else result
        return result.to(device) if getattr(_first(result), "device", here) != here else result


def _first(result: Any) -> Any:
    """The first parameter of what was made; None where there is none."""
    parameters = getattr(result, "parameters", None)
    return next(parameters(), None) if callable(parameters) else None


def _called(maker: Any) -> Any:
    """Return what a function or class makes, with its script's configuration where it needs one. Raises ConfigError without."""
    needed = settings(maker)
    if missing := [name for name, value in needed.items() if value is None]:
        name, words = getattr(maker, "__name__", "it"), ", ".join(missing)
        raise ConfigError(
            f"{name} needs {words}: give {'them defaults' if missing[1:] else 'it a default'}, or name a function that makes it:"
            f" `def model(): return {name}({', '.join(f'{word}=...' for word in missing)})`, {_file_of(maker) or 'FILE.py'}:model",
            key="target",
        )
    return maker(**needed)


def _anew(maker: Callable[..., Any]) -> Callable[..., Any] | None:
    spec = getattr(maker, "__globals__", {}).get("__spec__")
    file = None if spec is None or not spec.origin or not _is_own_file(spec.origin) else Path(spec.origin)
    return None if file is None else getattr(_executed(file), maker.__name__, None)


@contextlib.contextmanager
def cuda_is(device: str, maker: Any) -> Iterator[None]:
    """A context in which `cuda` is another device, where the file of what makes a module names it, with scalers that step."""
    file = str(maker) if isinstance(maker, Path) else _file_of(maker)
    other = device.partition(":")[0] != "cuda"
    named = other and bool(file) and Path(file).is_file() and b"cuda" in Path(file).read_bytes()
    with (
        redirect_cuda(device) if named else contextlib.nullcontext(),
        always_step() if named else contextlib.nullcontext(),
    ):
        yield


def _executed(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError("cannot be read as Python", file=str(file))
    module = importlib.util.module_from_spec(spec)
    _look_beside(file)
    arguments, sys.argv = sys.argv, [str(file)]
    try:
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if os.environ.get("LOADGAUGE_DEBUG"):
            raise
        raise ConfigError(f"{type(error).__name__}: {first_line(error)}", file=str(file)) from error
    finally:
        sys.argv = arguments
    return module


def _look_beside(file: Path) -> None:
    """Look for modules in a script's folder too."""
    folder = str(file.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)


OF_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
"""Arguments of a `DataLoader` about the processes that load for it."""


class _Enough(BaseException):
    """Each optimizer of a script has made its steps; no handler of the script's own stops this."""


def _run_whole(file: Path, arguments: tuple[str, ...], steps: int = 2) -> None:
    """Run a script as `python` does, until its first forward after so many steps of each of its optimizers."""
    counts: dict[int, int] = {}

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1

    def entered(*_: Any) -> None:
        if counts and min(counts.values()) >= steps:
            raise _Enough

    hooks = register_optimizer_step_post_hook(stepped), register_module_forward_pre_hook(entered)
    _look_beside(file)
    sys.argv = [str(file), *arguments]  # what calls this puts it back
    with removing(hooks), contextlib.suppress(_Enough):
        runpy.run_path(str(file), run_name=WHOLE)


class FunctionJob:
    """Runs a function that trains. If it returns a function, that one is a step, and is called for each step;
    otherwise it is called once, and does all its steps itself.

    `run`: the function, or None to take it from the script that `target` names, which is then read under the trace.
    arguments: of a script that is run whole
    """

    def __init__(self, run: Callable[[], Any] | None, target: str = "", arguments: tuple[str, ...] = ()) -> None:
        file, _, name = target.rpartition(":")
        self.run = functools.partial(_run_whole, Path(file), arguments) if name == WHOLE else run
        self.target = target or getattr(run, "__name__", "function")
        # One process has one device: with several, transformers' Trainer copies the model to each (DataParallel).
        self.counters = Counters(1 if name == WHOLE else None)
        self.assumed = {
            "cuda": f"{self.counters.devices} x {GPU}, simulated; values are never known (.item() gives 1), and"
            " memory never runs out",
            "steps": "counted by calls of an optimizer's step",
        }
        self._step: Any = None

    @contextlib.contextmanager
    def prepared(self, mode: FakeMode | None, device: str) -> Iterator[Callable[[Any], None]]:
        """A context in which `cuda` is the simulated device. Yields what trains one step; `introduce` calls the script."""

        def once(_: Any) -> None:
            if callable(self._step):
                self._guarded(self._step)

        if mode is None or device == "cpu":
            self.assumed.pop("cuda")
            yield once
        else:
            mode.cuda = torch.device(device, 0)
            folder = Path(self.target.rpartition(":")[0]).parent
            with redirect_cuda(device, self.counters), always_step(), real_tensors_in_imports(folder), self._plain():
                yield once

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """A context in which nothing is compiled or saved, and data are loaded by this process: others know no such device."""
        start = DataLoader.__init__

        def alone(loader: Any, *args: Any, **kwargs: Any) -> None:
            call = inspect.signature(start).bind(loader, *args, **kwargs)
            for name in OF_WORKERS:
                call.arguments.pop(name, None)
            start(*call.args, **call.kwargs)

        def eager(function: Any = None, *_: Any, **__: Any) -> Any:
            self.assumed["compile"] = "torch.compile is left out: compiled, a step keeps less"
            return eager if function is None else function

        def unsaved(*_: Any, **__: Any) -> None:
            self.assumed["torch.save"] = "writes nothing"

        changes = (torch, "compile", eager), (nn.Module, "compile", eager), (DataLoader, "__init__", alone)
        with replaced(*changes, (torch, "save", unsaved)):
            yield

    def introduce(self, observer: Observer) -> None:
        """Call the function; if it returns a step, the call itself was the preparation. Raises ConfigError for its errors."""
        self.counters.follow(observer.stream)
        if self.run is None:
            self.run = function(self.target, redirected=True)
        observer.begin("forward")
        self._step = self._guarded(self.run)
        if callable(self._step):
            for record in observer.stream.records:
                record.phase = 0
            observer.stream.phases[:] = [(first, "") for first, _ in observer.stream.phases]
        if len(self.counters.asked) > 1:
            named = ", ".join(map(str, sorted(self.counters.asked)))
            self.assumed["devices"] = (
                f"the code names cuda devices {named}: their memory is counted as that of one device"
            )

    def _guarded(self, call: Callable[[], Any]) -> Any:
        path, _, name = self.target.rpartition(":")
        before, sys.argv = sys.argv, [path or self.target]
        file = path if name == WHOLE else self.target
        try:
            return call()
        except SystemExit as error:
            if error.code in (None, 0):
                return None
            raise ConfigError(f"it left with SystemExit: {first_line(error)}", file=file) from error
        except Exception as error:
            if os.environ.get("LOADGAUGE_DEBUG"):
                raise
            text = f"{type(error).__name__}: {first_line(error)}"
            alone = re.search(r"\b(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR)\b", text)
            hint = f"; with --gpus 8 it is one of 8 ranks, and {alone[1]} is set" if alone else ""
            raise ConfigError(text + hint, file=file) from error
        finally:
            sys.argv = before


class _Renamed(TorchFunctionMode):
    """Reads `cuda` as another device, wherever a device is an argument; the program itself sees `cuda`."""

    def __init__(self, device: str, asked: set[int]) -> None:
        super().__init__()
        self.device, self.asked = device, asked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            result = func(*args, **kwargs)
            return result if is_program(sys._getframe(1)) else self.renamed(result)
        if func == _IS_CUDA and is_program(sys._getframe(1)):
            return args[0].device.type == self.device or func(*args)
        kwargs = {name: self.renamed(value) for name, value in kwargs.items()}
        if type(kwargs.get("device")) is int:
            kwargs["device"] = self.numbered(kwargs["device"])
        if func in _MOVES and args[1:] and type(args[1]) is int:
            args = (args[0], self.numbered(args[1]), *args[2:])
        return func(*(self.renamed(value) for value in args), **kwargs)

    def renamed(self, value: Any) -> Any:
        """A device or its name, `cuda` exchanged; other values as they are. Whichever of the GPUs it is: a process that
        plays a rank has one."""
        if isinstance(value, torch.device):
            return self.numbered(value.index) if value.type == "cuda" else value
        if isinstance(value, str) and value.partition(":")[0] == "cuda":
            return self.numbered(index_of(value))
        return value

    def numbered(self, index: int | None) -> torch.device:
        """The device in place of `cuda:index`."""
        if index is not None:
            self.asked.add(index)
        return torch.device(self.device, 0)


class _Valued(TorchFunctionMode):
    """Gives lines of numbers their values, which tensors on the meta device have not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lines = func in (torch.linspace, torch.arange, torch.tensor)
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if lines else {})})


_MOVES = (torch.Tensor.to, torch.Tensor.cuda)
_IS_CUDA: Any = vars(torch._C.TensorBase)["is_cuda"].__get__


def is_program(frame: Any) -> bool:
    """Return whether a frame of Python's stack belongs to the traced program, not to a library or to loadgauge."""
    return _is_own_file(frame.f_code.co_filename)


@functools.cache
def _is_own_file(path: str) -> bool:
    """Return whether a file of Python is a program's, not a library's or Python's own."""
    return not path.startswith((OWN, STANDARD, "<frozen")) and not any(part in path for part in LIBRARIES)


STANDARD = sysconfig.get_paths()["stdlib"]
LIBRARIES = ("site-packages", "dist-packages", f"{os.sep}torch{os.sep}")


@contextlib.contextmanager
def redirect_cuda(device: str, counters: Counters | None = None) -> Iterator[None]:
    """A context in which `cuda` means another device, by PyTorch's name; `counters` answer questions about its memory."""
    counters = counters or Counters()
    mode = _Renamed(device, counters.asked)
    to, to_empty, default = nn.Module.to, nn.Module.to_empty, torch.set_default_device
    real_device: Any = FakeTensor.device
    accelerators: Any = getattr(torch, "accelerator", None)  # from PyTorch 2.6 on, its memory functions from 2.9 on
    real_accelerator: Any = getattr(accelerators, "current_accelerator", None)

    def moved(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        named = {name: mode.renamed(value) for name, value in kwargs.items()}
        places: list[Any] = [mode.numbered(value) if type(value) is int else mode.renamed(value) for value in args]
        result: nn.Module = to(self, *places, **named)
        return result

    def on_cuda(self: Any, device: Any = None, *_: Any, **__: Any) -> Any:
        return self.to("cuda" if device is None else device)

    def device_of(self: FakeTensor) -> torch.device:
        real: torch.device = real_device.fget(self)
        return _CUDA if real.type == device and is_program(sys._getframe(1)) else real

    def accelerator(*args: Any, **kwargs: Any) -> Any:
        real = None if is_program(sys._getframe(1)) else real_accelerator(*args, **kwargs)
        return real or torch.device("cuda")  # a library that was told that there is one asks for its name

    changes: list[tuple[Any, str, Any]] = [
        (nn.Module, "to", moved),
        (nn.Module, "to_empty", lambda module, *, device, **how: to_empty(module, device=mode.renamed(device), **how)),
        (nn.Module, "cuda", on_cuda),
        (torch.Tensor, "cuda", on_cuda),
        (torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor),  # of the host, whose memory is not counted
        (torch, "set_default_device", lambda device_named: default(mode.renamed(device_named))),
        (FakeTensor, "device", property(device_of, real_device.fset)),
        *((torch.cuda, name, value) for name, value in counters.cuda().items()),
        *(
            (torch.cuda.memory, name, value)
            for name, value in counters.cuda().items()
            if hasattr(torch.cuda.memory, name)
        ),
    ]
    if not hasattr(torch._C, RAW_STREAM):  # bitsandbytes imports it where there is a GPU
        changes.append((torch._C, RAW_STREAM, lambda *_: 0))
    if accelerators is not None:
        memory: Any = getattr(accelerators, "memory", None)
        answers = counters.accelerator()
        changes.append((accelerators, "current_accelerator", accelerator))
        changes += [(accelerators, name, value) for name, value in answers.items()]
        changes += [(memory, name, value) for name, value in answers.items() if hasattr(memory, name)]
    with replaced(*changes), casting_on(device), mode:
        yield


_CUDA, RAW_STREAM = torch.device("cuda", 0), "_cuda_getCurrentRawStream"


@contextlib.contextmanager
def always_step() -> Iterator[None]:
    """A context in which a gradient scaler always steps: asked whether gradients are infinite, fake tensors say they are."""
    steps = "_maybe_opt_step", lambda _, optimizer, __, *args, **kwargs: optimizer.step(*args, **kwargs)
    with replaced((torch.amp.GradScaler, *steps)):
        yield


@contextlib.contextmanager
def real_tensors_in_imports(folder: Path) -> Iterator[None]:
    """A context in which imported modules create real tensors, except those in `folder`, the traced program's own."""
    bootstrap: Any = sys.modules["_frozen_importlib"]
    original, local = bootstrap._find_and_load, f"{folder}{os.sep}"

    without = False

    def load(name: str, import_: Any) -> Any:
        nonlocal without
        top = name.partition(".")[0]
        if without or os.path.isfile(f"{local}{top}.py") or os.path.isdir(local + top):
            return original(name, import_)
        without = True
        try:
            with _disable_current_modes():
                return original(name, import_)
        finally:
            without = False

    with replaced((bootstrap, "_find_and_load", load)):
        yield
