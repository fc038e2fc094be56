"""Autocast with CUDA's lists of operations, on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

FLOAT32 = ("layer_norm", "pow.Tensor_Scalar", "rsqrt")
"""Of CUDA's list of operations that run in float32, those that these models use (ATen/autocast_mode.h)."""
OUTPUT_FLOAT32 = ("softmax.int", "log_softmax.int")
"""Of those that are told to return float32; their third argument is the dtype. A CPU's lists name none of all these."""


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Autocast to bfloat16. Matrix products are on the list of 16-bit operations on both devices."""
    library = torch.library.Library("aten", "IMPL")
    for name in FLOAT32 + OUTPUT_FLOAT32:
        library.impl(name, _kernel(name), "AutocastCPU")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        library._destroy()


def _kernel(name: str) -> Any:
    base, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, base), overload or "default")
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def up(value: Any) -> Any:
        narrow = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
        return value.float() if narrow else value

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            if name in FLOAT32:
                return operation(*map(up, arguments), **keywords)
            dtype = arguments[2] if len(arguments) > 2 else keywords.get("dtype")
            return operation(*arguments[:2], dtype=torch.float32 if dtype is None else dtype)

    return kernel
