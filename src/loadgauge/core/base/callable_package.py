"""Packages that can be called: `loadgauge.estimate` is a package with submodules and also the function that users expect."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import inspect


class CallablePackage(ModuleType):
    """A package that answers a call with a function of another module, which is imported at the first call."""

    _address: str

    def _function(self) -> Callable[..., Any]:
        return load(self._address)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **flags: Any) -> Any:
        return self._function()(*args, **flags)

    @property
    def __signature__(self) -> inspect.Signature:
        import inspect  # a tenth of a cold start

        return inspect.signature(self._function())

    def __reduce__(self) -> Any:
        """By name, as functions are pickled: other modules cannot be pickled."""
        return import_module, (self.__name__,)


def make_callable(package: str, address: str) -> None:
    """Has a package answer calls with the function at `address`, written `module:name` and imported at the first call.

    The package does not import that module, so the function may be defined in a layer above it (decision 0010).

    >>> make_callable("loadgauge.estimate", "loadgauge.api:estimate")
    >>> import loadgauge.estimate
    >>> loadgauge.estimate("gpt2").model.name
    'gpt2'
    """
    import_module(package)
    module = sys.modules[package]
    module.__class__ = CallablePackage
    module.__dict__["_address"] = address


def load(address: str) -> Any:
    """The object at `module:name`; the module is imported.

    >>> load("loadgauge.core.base.units:GIB")
    1073741824
    """
    module, _, name = address.partition(":")
    return getattr(import_module(module), name)
