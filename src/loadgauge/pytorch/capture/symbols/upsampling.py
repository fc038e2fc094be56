"""Pictures made larger, with symbols for their sizes: one kernel, as eager PyTorch runs, where the Python dispatcher has many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._prims_common import suggest_memory_format

_OWN = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_KINDS = {
    "nearest1d": 1,
    "nearest2d": 2,
    "nearest3d": 3,
    "linear1d": 1,
    "bilinear2d": 2,
    "bicubic2d": 2,
    "trilinear3d": 3,
}
_NAMES = {**{f"upsample_{kind}": count for kind, count in _KINDS.items()},
          **{f"_upsample_nearest_exact{count}d": count for count in (1, 2, 3)}}  # fmt: skip


def overloads() -> list[Any]:
    """The operators whose rules are replaced."""
    return [getattr(getattr(torch.ops.aten, name), one) for name in _NAMES for one in ("default", "vec")] + _backward()


def _backward() -> list[Any]:
    """Return those whose shapes C++ works out with numbers alone."""
    return [getattr(torch.ops.aten, f"upsample_{kind}_backward").default for kind in _KINDS if "nearest" not in kind]


def as_one_kernel() -> None:
    """Take the rules of `overloads` away: those with a size are their kernel, those with factors work out the size first."""
    for name, count in _NAMES.items():
        kernel, of_factors = getattr(torch.ops.aten, name).default, getattr(torch.ops.aten, name).vec
        for key in _OWN:
            kernel.py_kernels.pop(key, None)
            if key in of_factors.py_kernels:
                of_factors.py_kernels[key] = _sized(kernel, count)
    for func in _backward():
        func.py_kernels[DispatchKey.Meta] = _gradient if func in _ALWAYS_CONTIGUOUS else _gradient_laid_as_given


_ALWAYS_CONTIGUOUS = (
    torch.ops.aten.upsample_linear1d_backward.default,
    torch.ops.aten.upsample_bicubic2d_backward.default,
)
"""Those whose kernel writes rows of pixels, however the gradient that it is given lies."""


def _gradient(grad: torch.Tensor, size: Any, of: Any, *_: Any, **__: Any) -> torch.Tensor:
    return grad.new_empty(of)


def _gradient_laid_as_given(grad: torch.Tensor, size: Any, of: Any, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(of, dtype=grad.dtype, device=grad.device, memory_format=suggest_memory_format(grad))


def _sized(kernel: Any, count: int) -> Callable[..., Any]:
    def run(x: Any, size: Any, *more: Any) -> Any:
        *flags, factors = more
        if size is None:
            size = [_times(side, factor) for side, factor in zip(x.shape[2:], factors, strict=True)]
        return kernel(x, size, *flags, *(factors or [None] * count))

    return run


def _times(side: Any, factor: float) -> Any:
    return side * int(factor) if factor == int(factor) else torch.sym_int(side * factor)
