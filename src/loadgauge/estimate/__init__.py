"""The estimate of a training job: memory, FLOPs, time and traffic. This package can be called.

    loadgauge.estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, seq_len=8192)
    loadgauge.estimate("llama-3.1-8b", loadgauge.Layout(dp=8, zero=3, global_batch=8, seq_len=8192))

The first form takes the flags of `loadgauge estimate`, with underscores. What is not given is assumed as the command
assumes it (see `Estimate.assumed`), and data parallelism is what tp, pp and cp leave of `gpus`. The second takes a
`Layout` and, if wanted, a `training`, a `gpu`, a `cluster`, `rates` and a `scale`. Both return an `Estimate`.
`help(loadgauge.api.estimate)` describes every argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

_calls: dict[str, Callable[..., Any]] = {}
"""What the package does when it is called, and what gives its signature; put here from above (see `make_callable`)."""


class _Estimate(ModuleType):
    """This package, as a module that can be called: `loadgauge.estimate` is a function and holds submodules."""

    def __call__(self, *args: Any, **flags: Any) -> Any:
        return _calls["call"](*args, **flags)

    @property
    def __signature__(self) -> Any:
        return _calls["signature"]()

    def __reduce__(self) -> Any:
        """By name, as functions are pickled: other modules cannot be."""
        return import_module, (self.__name__,)


def make_callable(call: Callable[..., Any], signature: Callable[[], Any]) -> None:
    """Has `call` answer `loadgauge.estimate(...)`. It is given from above, as nothing here imports what asks."""
    _calls.update(call=call, signature=signature)
    sys.modules[__name__].__class__ = _Estimate
