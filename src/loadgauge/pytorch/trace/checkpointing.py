"""Selective activation checkpointing: which results of operations are kept, and which are recomputed in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from loadgauge.core.base.errors import ConfigError, NotModelled

DEFAULT_KEEP = (
    "mm", "addmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu", "reduce_scatter_tensor",
)  # fmt: skip
"""Matrix products, attention and communication: torchtitan's list, except that it recomputes every second product."""


def contexts(names: Iterable[str]) -> Callable[[], Any]:
    """A `context_fn` for `torch.utils.checkpoint` that keeps the results of operations with these names, as PyTorch
    dispatches them (`mm`, `aten::mm`). Raises ConfigError for a name that no operation has.

    >>> first, again = contexts(["mm"])()
    """
    try:
        from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
    except ImportError:
        raise NotModelled(
            f"keep: PyTorch {torch.__version__} has no selective checkpointing by a policy; 2.5 and newer have"
        ) from None

    kept = {_operation(name) for name in names}

    def policy(_: Any, op: Any, *args: Any, **keywords: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op._overloadpacket in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def _operation(name: str) -> Any:
    space, _, short = name.strip().rpartition("::")
    for where in (space,) if space else ("aten", "_c10d_functional"):
        result = getattr(getattr(torch.ops, where), short, None)
        if result is not None:
            return result
    raise ConfigError(f"keep: PyTorch has no operation {name!r}")
