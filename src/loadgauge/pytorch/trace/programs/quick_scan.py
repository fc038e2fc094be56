"""transformers reads the files of all its models when it is imported, twice, to know what they export. Here once, and only the
end of each file, where that stands."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

SCANNER = "transformers.utils.import_utils"


def quick_scan() -> None:
    """Make the next import of transformers in this process quick; its result is the same."""
    if SCANNER not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The scanner's own module, which is changed after its code has run."""
        spec = PathFinder.find_spec(name, path) if name == SCANNER else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Quick(spec.loader)
        return spec


class _Quick(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self.loader.create_module(spec)

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

    def of(text: str) -> Any:
        return exported(text[text.rfind("\n__all__") + 1 :])

    return of
