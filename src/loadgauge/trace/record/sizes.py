"""Sizes as PyTorch gives them: whole numbers, or symbols of a capture, which stay what they are."""

from __future__ import annotations

from typing import Any

import torch


def whole(size: Any) -> Any:
    """A size as an int, or unchanged where it is a symbol. ``whole(3.0) == 3``"""
    return size if isinstance(size, torch.SymInt) else int(size)


def nbytes_of(tensor: torch.Tensor) -> Any:
    """Bytes of a tensor's shape; `tensor.nbytes` would ask a symbol for its value. ``nbytes_of(torch.empty(3)) == 12``"""
    return whole(tensor.numel() * tensor.element_size())


def present(nbytes: Any) -> bool:
    """Whether there are any bytes; a symbol, which nobody asks for its value, has some. ``present(0) is False``"""
    return isinstance(nbytes, torch.SymInt) or nbytes > 0
