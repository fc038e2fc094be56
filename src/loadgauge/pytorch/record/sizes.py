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


def leaves(tree: Any, found: list[Any] | None = None) -> list[Any]:
    """What lies in lists, tuples and dictionaries: PyTorch's `tree_leaves`, which asks more, for the arguments of operations.

    >>> leaves(((1, [2, None]), {"a": 3}))
    [1, 2, None, 3]
    """
    found = [] if found is None else found
    for one in tree.values() if type(tree) is dict else tree:
        kind = type(one)
        if kind is list or kind is tuple or kind is dict or (isinstance(one, tuple | list) and kind is not torch.Size):
            leaves(one, found)
        else:
            found.append(one)
    return found


def present(nbytes: Any) -> bool:
    """Return whether there are any bytes; a symbol, which nobody asks for its value, has some. ``present(0) is False``"""
    return isinstance(nbytes, torch.SymInt) or nbytes > 0
