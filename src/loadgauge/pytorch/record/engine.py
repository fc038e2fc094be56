"""Errors raised while backward's engine runs: kept aside, and raised again once the engine has ended.

A Python exception on its way through the engine passes the guard of the current stream. That of the simulated device asks Python
(`PythonDeviceGuard`, PyTorch 2.10 and newer), which cannot be called meanwhile: C++ ends the process. A result that the engine
cannot take is an error of C++, which passes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class Engine:
    """Keeps the first error of a backward."""

    def __init__(self) -> None:
        self._stopped: Exception | None = None

    def keep(self, error: Exception) -> Exception:
        """Keep an error; what is returned is to be given to the engine, which takes it for nothing that it knows."""
        self._stopped = self._stopped or error
        return error

    def run(self, backward: Callable[[], Any]) -> Any:
        """Call what runs the engine. Raises the error that was kept meanwhile.

        >>> def backward():
        ...     raise RuntimeError(f"cannot take {engine.keep(KeyError('rows'))!r}")
        >>> engine = Engine()
        >>> engine.run(backward)
        Traceback (most recent call last):
        KeyError: 'rows'
        """
        try:
            return backward()
        except (RuntimeError, TypeError):
            stopped, self._stopped = self._stopped, None
            if stopped is None:
                raise
            raise stopped from None

    @property
    def hooks(self) -> tuple[Any, str, Any]:
        """In place of PyTorch's function that takes hooks of saved tensors: errors of those that give a tensor back are kept.

        They run a checkpointed region again. Read by the engine, a hook that gives no tensor is an error of C++.
        """
        push = torch._C._autograd._push_saved_tensors_default_hooks

        def pushed(pack: Any, unpack: Any) -> None:
            @functools.wraps(unpack)
            def kept(packed: Any) -> Any:
                try:
                    return unpack(packed)
                except Exception as error:
                    return self.keep(error)

            push(pack, kept)

        return torch._C._autograd, "_push_saved_tensors_default_hooks", pushed
