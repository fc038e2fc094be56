"""`Usage`: the memory and time of one block of code, measured or traced."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch.utils._pytree import tree_leaves


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
        made = sum(storage_bytes(results).values())
        return self.persistent - made, self.peak - made


def storage_bytes(values: Any) -> dict[int, int]:
    """The storages of all tensors in `values`, in any nesting, with their bytes; views of one storage count once."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
