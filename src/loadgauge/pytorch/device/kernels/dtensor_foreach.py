"""Optimizers on sharded weights, fast: an operation on lists of DTensors, element by element, is one on their parts.

DTensor comes to the same end, but asks for every element of the lists how it may be shared with every other, which for
a thousand weights takes as long as the rest of a trace.
"""

from typing import Any

import torch

NAMES = (
    "_foreach_add", "_foreach_sub", "_foreach_mul", "_foreach_div", "_foreach_sqrt", "_foreach_rsqrt", "_foreach_pow",
    "_foreach_neg", "_foreach_reciprocal", "_foreach_lerp", "_foreach_addcmul", "_foreach_addcdiv", "_foreach_maximum",
    "_foreach_abs", "_foreach_sign", "_foreach_zero", "_foreach_copy",
)  # fmt: skip
"""Operations that look at one element of each list, and no others."""


class Parts:
    """`func` on the rank's own parts, where that is the same; `ready` is False where DTensor has to be asked."""

    def __init__(self, func: Any, args: Any) -> None:
        name: str = getattr(func, "_opname", "")
        self.ready = name.rstrip("_") in NAMES and bool(args) and isinstance(args[0], list | tuple)
        if not self.ready:
            return
        self.whole = list(args[0])
        self.changes = name.endswith("_")
        self.args = []
        for arg in args:
            if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor):
                self.ready = self.ready and self._alike(arg)
                self.args.append([part._local_tensor for part in arg] if self.ready else arg)
            else:
                self.ready = self.ready and not _shared(arg)
                self.args.append(arg)

    def _alike(self, others: Any) -> bool:
        """Return whether a list is shared as the first one is, element by element."""
        return len(others) == len(self.whole) and all(
            _shared(first)
            and _shared(other)
            and first._spec.placements == other._spec.placements
            and first._spec.mesh is other._spec.mesh
            and first._local_tensor.shape == other._local_tensor.shape
            and not any(placement.is_partial() for placement in first._spec.placements)
            for first, other in zip(self.whole, others, strict=True)
        )

    def wrapped(self, out: Any) -> Any:
        """Return the result of a foreach operation, a list of local tensors or None, as DTensors of the inputs' placements."""
        if self.changes or out is None:
            return out
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        make: Any = DTensor
        result = []
        for part, whole in zip(out, self.whole, strict=True):
            meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
            spec = DTensorSpec(whole._spec.mesh, whole._spec.placements, tensor_meta=meta)
            result.append(make(part, spec, requires_grad=False))
        return result


def _shared(value: Any) -> bool:
    return type(value).__name__ in ("DTensor", "Parameter") and hasattr(value, "_local_tensor")
