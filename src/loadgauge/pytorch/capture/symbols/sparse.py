"""Embedding tables with sparse gradients, of the rows that a step looked up: `nn.Embedding(sparse=True)`, `EmbeddingBag`."""

from __future__ import annotations

import torch
from torch import nn

from loadgauge.core.base.errors import NotModelled


def sparse_table(module: nn.Module) -> str:
    """The name of a module's first table with sparse gradients; "" without one.

    >>> sparse_table(nn.Sequential(nn.Linear(4, 4), nn.Embedding(9, 4, sparse=True))), sparse_table(nn.Embedding(9, 4))
    ('1', '')
    """
    for name, one in module.named_modules():
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse and one.weight.requires_grad:
            return name or type(one).__name__
    return ""


def check_sparse(module: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int) -> None:
    """Raise NotModelled where sparse gradients meet an optimizer or an addition for which PyTorch's rows are data.

    Plain SGD adds rows to a table as they are; Adagrad and SparseAdam join equal ones first, of which there are taken to be none
    (`trace.device.sparse_rows`). Momentum joins the rows of all steps, and all else refuses them.
    """
    name = sparse_table(module)
    if not name:
        return
    plain = isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad | torch.optim.SparseAdam) and not any(
        optimizer.defaults.get(key) for key in ("momentum", "weight_decay", "maximize")
    )
    if not plain or accumulate > 1:
        what = type(optimizer).__name__ if not plain else "more than one micro-batch"
        raise NotModelled(f"{name}: sparse gradients with {what}; --optimizer sgd or adagrad, or sparse=False")
