"""Bytes that a forward pass keeps for its backward, counted by PyTorch's own hooks, each storage once."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def saved_bytes(run: Callable[[], Any], parameters: Iterable[nn.Parameter] = ()) -> int:
    """Bytes kept for backward by `run`, without those of `parameters`; a storage that several operations keep counts once.

    >>> x = torch.zeros(10, requires_grad=True)
    >>> saved_bytes(lambda: (x.exp(), x.sin()))  # exp keeps its output, sin its input
    80
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        # Holding on to each storage keeps its address from being used again; a detached tensor leaves the graph alone.
        detached = tensor.detach()
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), detached)
        return detached

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del result
    return total
