"""PyTorch's compiler is not imported where nothing is compiled: its import is longer than many a captured step.

Eager code asks `torch._dynamo` for its settings, and marks functions for it, which does nothing without a compiler; `torch.compile`
gives what it is given, which runs eagerly. Whoever asks for more gets the compiler as it is.
"""

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._guards import Source

COMPILER = "torch._dynamo"
_OTHERS = re.compile(r"^(from|import) +(\.|torch\._dynamo)", re.MULTILINE)


def without_compiler() -> None:
    """Leave PyTorch's compiler out of this process until it is asked for; nothing where it is imported already.

    For processes of our own: functions that were marked for the compiler meanwhile are not known to it later.
    """
    if COMPILER in sys.modules:
        return
    for name, answers in _ANSWERS.items():
        spec = importlib.util.find_spec(name)
        if spec is not None and name not in sys.modules:
            module = importlib.util.module_from_spec(spec)
            module.__class__ = _Waiting
            vars(module).update(answers)
            parent, _, own = name.rpartition(".")
            sys.modules[name] = module
            setattr(sys.modules[parent], own, module)
    sys.meta_path.insert(0, _Submodules())
    torch.compile = _eager  # type: ignore[assignment]
    torch.nn.Module.compile = _no  # type: ignore[assignment,method-assign]


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if function is not None else _as_it_is


def _eager(function: Any = None, *_: Any, **__: Any) -> Any:
    file = sys._getframe(1).f_code.co_filename
    if not any(part in file for part in _LIBRARIES):
        asked.add(file)
    return _as_it_is(function)


_LIBRARIES = ("site-packages", "dist-packages", f"{os.sep}transformers{os.sep}", f"{os.sep}diffusers{os.sep}")
asked: set[str] = set()
"""Files of programs that asked for something to be compiled."""


def _no(*_: Any, **__: Any) -> bool:
    return False


class _Given(Source):
    """Where a size comes from: it is given under a name."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "given", name)

    @property
    def _name_template(self) -> str:
        return str(vars(self)["given"])


class _Random(Source):
    """Where a size does not come from."""


_ANSWERS: dict[str, dict[str, Any]] = {
    COMPILER: dict.fromkeys(("disable", "allow_in_graph", "assume_constant_result", "graph_break"), _as_it_is),
    f"{COMPILER}.source": {"ConstantSource": _Given, "RandomValueSource": _Random},
    "torch.fx.experimental.validator": {"translation_validation_enabled": _no},
}
"""What is asked of each module without a compiler."""


class _Waiting(ModuleType):
    """A module whose own code has not run."""

    def __getattr__(self, name: str) -> Any:
        """Run the module's own code, and the compiler's before one of its own, for all but what Python itself asks of a module."""
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ in _ANSWERS:
            _run()
        _run_one(self)
        return getattr(self, name)


def _run() -> None:
    """Run the compiler's package, if it still waits; nothing is answered in its place any more."""
    package = sys.modules[COMPILER]
    if isinstance(package, _Waiting):
        for name, answers in _ANSWERS.items():
            for answer in answers:
                vars(sys.modules[name]).pop(answer, None)
        _run_one(package)


def _run_one(module: ModuleType) -> None:
    loader = None if module.__spec__ is None else module.__spec__.loader
    if isinstance(module, _Waiting) and loader is not None:
        object.__setattr__(module, "__class__", ModuleType)
        loader.exec_module(module)


class _Submodules(MetaPathFinder):
    """Lets the compiler's package run before any of its submodules that imports another, as their order is the package's."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module that came with the package, if it is one of its own."""
        if not name.startswith(f"{COMPILER}.") or not isinstance(sys.modules[COMPILER], _Waiting) or _alone(name, path):
            return None
        _run()
        return ModuleSpec(name, _Imported(sys.modules[name])) if name in sys.modules else None


def _alone(name: str, path: Any) -> bool:
    """Return whether a submodule imports none of the others."""
    spec = PathFinder.find_spec(name, path)
    file = None if spec is None else spec.origin
    return file is not None and file.endswith(".py") and not _OTHERS.search(Path(file).read_text("utf-8"))


class _Imported(Loader):
    """Gives a module that has been imported meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module."""
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it has run. Its spec is its own again."""
        module.__spec__ = self.spec


SCANNER = "transformers.utils.import_utils"
ASSIGNMENT = "scipy.optimize"


def quick_scan(*, assignment: bool = False) -> None:
    """Make the next import of transformers in this process quick; its result is the same.

    assignment: SciPy's, which losses of detectors name, is imported where it is called
    """
    changed: dict[str, Any] = {SCANNER: _Quick, **({ASSIGNMENT: _Later} if assignment else {})}
    sys.meta_path.insert(0, _Finder({name: kind for name, kind in changed.items() if name not in sys.modules}))


class _Finder(MetaPathFinder):
    def __init__(self, changed: dict[str, Any]) -> None:
        self.changed = changed

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """One of the modules that run in another way than their own loaders run them."""
        spec = PathFinder.find_spec(name, path) if name in self.changed else None
        if spec is not None and spec.loader is not None:
            spec.loader = self.changed[name](spec.loader)
        return spec


class _Wrapped(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self.loader.create_module(spec)


class _Later(_Wrapped):
    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code when anything of it but its assignment is asked for, or that is called."""

        def assign(*args: Any, **how: Any) -> Any:
            vars(module).pop(assign.__name__, None)
            return getattr(module, assign.__name__)(*args, **how)

        assign.__name__ = "linear_sum_assignment"
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        vars(module)[assign.__name__] = assign
        module.__class__ = _Waiting


class _Quick(_Wrapped):
    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, and change the two functions that take long, where it has them."""
        self.loader.exec_module(module)
        names = vars(module)
        if callable(exported := names.get("fetch__all__")):
            names["fetch__all__"] = last_lines(exported)
        structure = getattr(names.get("create_import_structure_from_path"), "__wrapped__", None)
        if structure is not None:  # its cache of 128 forgets folders before they are asked for again
            names["create_import_structure_from_path"] = functools.lru_cache(maxsize=None)(structure)


def last_lines(exported: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function of a file's text that needs only its last `__all__`, given no more than that.

    >>> last_lines(len)("import this\\n__all__ = []")
    12
    """
    return lambda text: exported(text[text.rfind("\n__all__") + 1 :])
