"""Rows of sparse gradients as CUDA joins and reads them, for optimizers that keep states of them: SparseAdam, Adagrad.

How many of a batch's ids are equal is data: none are taken to be, which is the most memory that there can be.
Sources: ATen/native/sparse/cuda/SparseCUDATensor.cu (`coalesce`), ATen/native/sparse/SparseTensor.cpp (`sparse_mask`), whose
product with a dense tensor is that of SparseTensorMath.cpp.
"""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

ASSUMED = (
    "no two ids of a batch are equal, so that a table's gradient has as many rows as ids (at most the whole table)"
)


def register_sparse_rows(library: torch.library.Library) -> None:
    """Give the simulated device CUDA's `coalesce` and `sparse_mask`, written out so that what they allocate is seen."""
    library.impl("_coalesce", joined, "AutogradPrivateUse1")
    library.impl("sparse_mask", masked, "AutogradPrivateUse1")


def joined(rows: Any) -> Any:
    """Compute `coalesce` of a sparse tensor: its ids sorted in a copy, beside two lists as long, and rows of their own."""
    indices, values = rows._indices(), rows._values()
    count, most = indices.shape[1], math.prod(rows.shape[: rows.sparse_dim()])
    if count < 2:
        return _sparse(indices.clone(), values.clone(), rows.shape)
    _assume()
    flat = _flat(indices, rows)
    order, places = torch.empty_like(flat), torch.empty_like(flat)
    kept = count if count <= most else most
    summed = values.new_empty((kept, *values.shape[1:]))
    ids = flat[:kept].unsqueeze(0) if len(indices) == 1 else indices.new_empty((len(indices), kept))
    del order, places
    return _sparse(ids, summed, rows.shape)


def masked(dense: Any, mask: Any, *_: Any) -> Any:
    """Compute `dense.sparse_mask(mask)`: the rows of a tensor that a sparse one has, times one, beside a copy of the ids."""
    if dense.layout is not torch.strided:
        raise NotImplementedError("sparse_mask of a sparse tensor")
    indices, values = mask._indices(), mask._values()
    ones = values.new_ones(1)
    chosen = dense[tuple(indices.unbind(0))]
    ids = indices.clone()
    products = chosen * ones.expand_as(values)
    return _sparse(ids, products, dense.shape)


def _flat(indices: Any, rows: Any) -> Any:
    """Ids of the rows as one list, a copy."""
    flat = indices[0].clone()
    for at in range(1, len(indices)):
        flat.mul_(rows.shape[at]).add_(indices[at])
    return flat


def _sparse(indices: Any, values: Any, shape: Any) -> Any:
    return torch.ops.aten._sparse_coo_tensor_unsafe.default(indices, values, shape, is_coalesced=True)


def _assume() -> None:
    for mode in _get_current_dispatch_mode_stack():
        facts = getattr(mode, "facts", None)
        if facts is not None:
            facts.assumed["the optimizer's step"] = ASSUMED
