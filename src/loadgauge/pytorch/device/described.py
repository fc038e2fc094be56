"""The cache key of an operation: its arguments as they are written, and the layout of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Kinds of values that are equal where they are written alike."""


def describe(
    mode: Any, values: Iterable[Any], parts: list[Any], tensors: list[Any], note: Callable[[Any, list[Any]], bool]
) -> bool:
    """Append to `parts` what a result may depend on, and to `tensors` the tensors; False where that is more than can be compared.

    mode: of which the tensors must be; note: appends how a tensor lies, or a size that is a symbol, and says whether it could

    >>> parts = []
    >>> describe(None, [[1, 2], 3.0, None], parts, [], lambda *_: False), len(parts)
    (True, 9)
    >>> describe(None, [object()], [], [], lambda *_: False)
    False
    """
    for value in values:
        kind = type(value)
        if isinstance(value, FakeTensor):
            if value.fake_mode is not mode or value.constant is not None or value.layout is not torch.strided:
                return False
            if value.is_conj() or value.is_neg() or not note(value, parts):
                return False
            tensors.append(value)
        elif kind in PLAIN:
            parts += (kind, value)
        elif kind is list or kind is tuple or kind is torch.Size:
            parts.append(len(value))
            if not describe(mode, value, parts, tensors, note):
                return False
        elif kind is not torch.SymInt or not note(value, parts):
            return False
    return True
