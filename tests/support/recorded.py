"""What PyTorch itself keeps and computes: saved tensors by storage, and FLOPs, of a real module on CPU."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from loadgauge.core.layers.operations.operations import Layer

aten = torch.ops.aten


class _Held:
    """Stands for a saved tensor as long as its graph lives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def kept_bytes(
    module: torch.nn.Module, call: Callable[[], Any], elsewhere: Iterable[torch.Tensor] = (), *, detached: bool = False
) -> list[int]:
    """Bytes of every storage that autograd holds after the forward, each once, sorted.

    Parameters, buffers and the tensors of `elsewhere` (rotary tables, counted with another layer) are left out, and so
    is what a dead branch of the graph held (DeepSeek's choice among groups of experts). detached: hold no graph of
    a saved result, which would keep a dead branch alive
    """
    owned = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers(), *elsewhere)}
    held: list[weakref.ref[_Held]] = []

    def pack(tensor: torch.Tensor) -> _Held:
        one = _Held(tensor.detach() if detached else tensor)
        held.append(weakref.ref(one))
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        output = call()
    gc.collect()
    alive = {}
    for reference in held:
        one = reference()
        if one is not None:
            storage = one.tensor.untyped_storage()
            alive[storage._cdata] = storage.nbytes()
    del output
    return sorted(size for storage, size in alive.items() if storage not in owned)


def _grouped(first: tuple[int, ...], second: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Products of groups of rows: (S, k) by (E, k, n), or, for the gradient of the weights, (m, S) by (S, n)."""
    return 2 * math.prod(first) * second[-1] if len(second) == 3 else 2 * first[0] * first[1] * second[1]


def _flash(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: Any, **__: Any) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def _flash_backward(
    gradient: tuple[int, ...], query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: Any, **__: Any
) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (3 * width + 2 * value[-1])


FORMULAS = {
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
}
"""What PyTorch's counter does not know, and would take for nothing."""


def flops(call: Callable[[], Any]) -> tuple[int, int]:
    """FLOPs of the forward and of the backward."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        output = call()
        forward = counter.get_total_flops()
        (output[0] if isinstance(output, tuple) else output).sum().backward()
    return forward, counter.get_total_flops() - forward


def stored(layer: Layer) -> list[int]:
    """Bytes of every storage that the list keeps, sorted. A view holds the whole of what it is a view of."""
    whole = {}
    for operation in layer:
        if operation.kind == "view":
            whole.update((output.name, operation.inputs[0]) for output in operation.outputs)
    held = {}
    for tensor in layer.kept():
        one = whole.get(tensor.name, tensor)
        held[one.name] = one.nbytes
    return sorted(held.values())
