"""In-place and fused paths that PyTorch takes only without a dispatch mode.

Its C++ code asks whether a tensor is "like a subclass", as any is under a mode, and then adds, scatters and fills into new tensors.
A trace is of a run without such a mode. Who else holds a tensor is PyTorch's own count, as a mode sees it.
Sources, of PyTorch 2.13: torch/csrc/autograd/input_buffer.cpp and FunctionsManual.cpp, ATen/native/Linear.cpp,
TensorAdvancedIndexing.cpp, ReduceOps.cpp and Loss.cpp, ATen/native/cuda/Loss.cu.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from loadgauge.pytorch.device.read import RUNS_BACKWARD
from loadgauge.pytorch.record.allocations import Record

aten = torch.ops.aten
_ADD = aten.add.Tensor
IN_PLACE = {
    _ADD: aten.add_.Tensor,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
}
"""Operations that such code has in both kinds."""
_ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)
_PRODUCTS = (aten.mm.default, aten.bmm.default)
_HELD, _STORED = 4, 2
"""How many hold a tensor and its storage where only a variable of C++ does: `torch.Tensor._use_count`. One in Python makes it 3."""
_ALONE = {aten.logsumexp.default: (1, False), aten.huber_loss.default: (1, False), aten.mse_loss.default: (1, True),
          aten.smooth_l1_loss.default: (1, True), aten.binary_cross_entropy.default: (0, True)}  # fmt: skip
"""Operations whose code, the same for CPU and CUDA, makes tensors as large as their input: how many that it drops before
it returns, and whether the result, one number, stays in the storage of as many."""


def in_place(func: Any, args: Any, records: list[Record], number: int | None) -> bool:
    """Return whether PyTorch has the operation write into its first argument, of which nothing else is then seen.

    records, number: all allocations, and which one is that of the first argument
    """
    held = args[0]
    if number is None or type(held) not in (FakeTensor, torch.Tensor) or held.layout is not torch.strided:
        return False
    node, record = torch._C._current_autograd_node(), records[number]
    alone = held._use_count() == _HELD and torch._C._storage_Use_Count(held.untyped_storage()._cdata) == _STORED
    if node is None or sys._getframe(4).f_code.co_name != RUNS_BACKWARD:
        # `torch.nn.functional.linear` of rows that do not lie behind one another adds its bias so.
        return func is _ADD and alone and record.op in _PRODUCTS and args[1].dim() == 1 < held.dim()
    if torch.is_grad_enabled():
        return False
    same = record.node == node._sequence_nr()
    if func is not _ADD:  # the gradient of what an operation picks: zeros, of which some become numbers
        return same and (record.op in _ZEROS or (func is aten.masked_fill.Scalar and alone))
    # Gradients that come together. A sum within the operation that is differentiated is of what that operation made itself.
    whole = record.nbytes == held.numel() * held.element_size()  # each byte once
    return alone and whole and (not same or len(set(node.next_functions)) < len(node.next_functions))


def made_alone(func: Any, args: Any, kwargs: Any) -> tuple[int, bool] | None:
    """How many tensors as large as its input an operation makes and drops, and whether its result keeps the storage of one."""
    found = _ALONE.get(func)
    if found is None or func is aten.logsumexp.default:
        return found
    place = 3 if func is aten.binary_cross_entropy.default else 2
    reduction = args[place] if len(args) > place else (kwargs or {}).get("reduction", 1)
    return found if reduction else None
