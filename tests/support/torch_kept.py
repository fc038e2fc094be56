"""What PyTorch's autograd really keeps, by storage: the truth of the tests in this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

Storages = dict[int, tuple[int, torch.UntypedStorage]]
"""Bytes by address. The storage is held, so that no other takes its address."""


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Where these tensors lie: what is not an activation."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def owned(model: nn.Module) -> set[int]:
    """Where a model's parameters and buffers lie."""
    return addresses([*model.parameters(), *model.buffers()])


@contextlib.contextmanager
def keeping(own: set[int]) -> Iterator[Storages]:
    """Records what is saved for backward, each storage once and whole (a view pins all of it), except `own`."""
    seen: Storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in own:
            seen.setdefault(storage.data_ptr(), (storage.nbytes(), storage))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield seen


def total(storages: Storages) -> int:
    """Bytes, all together."""
    return sum(nbytes for nbytes, _ in storages.values())


def kept_by(run: Callable[[Tensor], object], own: Iterable[Tensor], *shape: int) -> int:
    """Bytes that `run` saves for backward of an input of this shape, beside the parameters in `own`."""
    parameters = list(own)
    x = torch.randn(*shape, dtype=parameters[0].dtype, requires_grad=True)
    with keeping(addresses(parameters)) as seen:
        result = run(x)  # what it returns holds the graph until the count is done
        count = total(seen)
    del result
    return count


def native_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """What CUDA runs: its mask has one byte an element; the CPU's has the dtype of the input."""
    return torch.native_dropout(x, p, training)[0] if training and p else x


@pytest.fixture
def cuda_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout as CUDA does it."""
    monkeypatch.setattr(torch.nn.functional, "dropout", native_dropout)
