"""Sizes as PyTorch gives them: whole numbers, or symbols of a capture, which stay what they are."""

from typing import Any

import msgspec
import torch
from torch.utils._pytree import tree_leaves


def whole(size: Any) -> Any:
    """A size as an int, or unchanged where it is a symbol. ``whole(3.0) == 3``"""
    return size if isinstance(size, torch.SymInt) else int(size)


def nbytes_of(tensor: torch.Tensor) -> Any:
    """Bytes of a tensor's shape; `tensor.nbytes` would ask a symbol for its value. ``nbytes_of(torch.empty(3)) == 12``"""
    return whole(tensor.numel() * tensor.element_size())


def leaves(tree: Any, tensors: list[Any] | None = None) -> list[Any]:
    """What lies in lists, tuples and dictionaries: PyTorch's `tree_leaves`, which asks more, for the arguments of operations.

    >>> leaves(((1, [2, None]), {"a": 3}))
    [1, 2, None, 3]
    """
    tensors = [] if tensors is None else tensors
    for leaf in tree.values() if type(tree) is dict else tree:
        kind = type(leaf)
        if kind is list or kind is tuple or kind is dict or (isinstance(leaf, tuple | list) and kind is not torch.Size):
            leaves(leaf, tensors)
        else:
            tensors.append(leaf)
    return tensors


def present(nbytes: Any) -> bool:
    """Return whether there are any bytes; a symbol, which nobody asks for its value, has some. ``present(0) is False``"""
    return isinstance(nbytes, torch.SymInt) or nbytes > 0


class Usage(msgspec.Struct, frozen=True):
    """Memory that a block of code took above what was allocated before it [bytes], and its time.

    persistent: left allocated at the end: the result, and what the result keeps for backward
    peak: the most at any one time. On CUDA these are the caching allocator's figures (blocks of 512 bytes). On a CPU
        the release of memory older than the block is not seen, and scratch inside one kernel is left out
    seconds: wall time, the measurement's own cost included [s]
    by_op, by_module: bytes at the peak by operation and by module (CPU only)
    reserved, device_total: growth of the caching allocator's reservation and of the whole GPU's use (CUDA only)
    scratch: how much higher the CPU allocator's own peak was, scratch of kernels included (None on CUDA)
    """

    device: str
    persistent: int
    peak: int
    seconds: float
    by_op: dict[str, int] = {}
    by_module: dict[str, int] = {}
    reserved: int | None = None
    device_total: int | None = None
    scratch: int | None = None

    def beyond(self, *results: Any) -> tuple[int, int]:
        """Returns (persistent, peak) less the storages of `results` [bytes], as article 5 counts.

        results: tensors that the block has made itself, in any nesting; no input, and no view of one
        """
        results_bytes = sum(storage_bytes(results).values())
        return self.persistent - results_bytes, self.peak - results_bytes


def storage_bytes(values: Any) -> dict[int, int]:
    """The storages of all tensors in `values`, in any nesting, with their bytes; views of one storage count once."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
