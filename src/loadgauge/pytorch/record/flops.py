"""FLOPs of dispatched operations: PyTorch's own formulas, and those that its table lacks. A multiply-add is 2."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from loadgauge.pytorch.record.sizes import whole

Formula = Callable[..., Any]
"""Gives FLOP, as an int or a symbol."""
LOOKS_LIKE_A_PRODUCT = ("mm", "conv", "attention", "matmul", "einsum", "dot", "lstm", "gru", "rnn")
FUSED = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
"""Kernels of attention: queries, keys and values come first, in backward after the gradient."""
aten = torch.ops.aten


def _grouped_mm(a: Any, b: Any, offs: Any = None, *_: Any, **__: Any) -> Any:
    """Each row of `a` meets one matrix of `b`; of two matrices, the columns are split over groups."""
    if len(a) == 2 and len(b) == 3:
        return whole(2 * a[0] * a[1] * b[-1])
    if len(a) == 2 and len(b) == 2:
        return whole(2 * a[0] * a[1] * b[1])
    return whole(2 * math.prod(a) * b[-1])


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    return whole(sdpa_flop_count(q, _repeated(k, q), _repeated(v, q)))


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    return whole(sdpa_backward_flop_count(grad, q, _repeated(k, q), _repeated(v, q)))


def _repeated(of_keys: Any, of_queries: Any) -> Any:
    """A shape (batch, heads, positions, head_dim) with as many heads as the queries have: PyTorch's formulas before 2.8 take no
    other, and each query head computes with a key head of its own in any case."""
    return (*of_keys[:1], *of_queries[1:2], *of_keys[2:])


def _mv(a: Any, b: Any, *_: Any, **__: Any) -> Any:
    return whole(2 * a[0] * a[1])


def _dot(a: Any, b: Any, *_: Any, **__: Any) -> Any:
    return whole(2 * a[0])


def _recurrent(x: Any, weights: Any, *_: Any, **__: Any) -> Any:
    """At every position, each weight matrix of every layer and direction once."""
    return whole(2 * math.prod(x[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2))


def _recurrent_backward(x: Any, weights: Any, *_: Any, **__: Any) -> Any:
    return 2 * _recurrent(x, weights)


def _deformed(x: Any, weight: Any, offset: Any, *_: Any, **__: Any) -> Any:
    """A convolution, at the places where `offset` has rows: torchvision's deformable one."""
    return whole(2 * math.prod(weight) * offset[0] * math.prod(offset[-2:]))


def _deformed_backward(grad: Any, x: Any, weight: Any, offset: Any, *_: Any, **__: Any) -> Any:
    return 2 * _deformed(x, weight, offset)


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, **__: Any) -> Any:
    """For each gradient that is asked for, of the input and of the weights, what forward takes; PyTorch's formula counts the
    weights' as if each channel met all others, whatever the groups."""
    transposed, mask = rest[4], rest[7]
    batch, _, *pixels = x if transposed else grad
    return whole(2 * batch * math.prod(pixels) * math.prod(weight) * sum(mask[:2]))


_WANTED: dict[str, Formula] = {
    "_grouped_mm": _grouped_mm,
    **{f"_scaled_dot_product_{kernel}": _attention for kernel in FUSED},
    **{f"_scaled_dot_product_{kernel}_backward": _attention_backward for kernel in FUSED},
    "convolution_backward": _convolution_backward,
    "mv": _mv,
    "dot": _dot,
    "vdot": _dot,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
}
"""Operations that the registry of PyTorch counts as nothing, or refuses in some release."""
_SHAPED = {getattr(aten, name): formula for name, formula in _WANTED.items() if hasattr(aten, name)}
"""Formulas of the operations that this release has."""
_NAMED: dict[str, Formula] = {
    "torchvision::deform_conv2d": _deformed,
    "torchvision::_deform_conv2d_backward": _deformed_backward,
}
"""Operators of others, which may not be there yet."""


@functools.cache
def formula(func: Any) -> Callable[[Any, Any, Any], Any] | str | None:
    """How to count an operation from (arguments, keywords, result); its name where it should count but nothing is
    known; None where it does not count."""
    packet = getattr(func, "_overloadpacket", None)
    own = _SHAPED.get(packet) or _NAMED.get(str(getattr(packet, "_qualified_op_name", "")))
    if own is not None:
        return lambda args, kwargs, out: own(
            *(tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args), **(kwargs or {})
        )
    if packet in flop_registry:
        counted: Any = flop_registry[packet]
        return lambda args, kwargs, out: whole(counted(*args, **(kwargs or {}), out_val=out))
    name: str = func.name() if hasattr(func, "name") else str(func)
    short = name.rpartition("::")[2].partition(".")[0]
    if name.startswith(("aten::", "prims::")) and any(part in short for part in LOOKS_LIKE_A_PRODUCT):
        return name.partition(".")[0] if short not in _FREE else None
    return None


_FREE = {"_to_copy", "commit", "_fused_sdp_choice"} | {
    f"_thnn_fused_{cell}_cell{way}" for cell in ("lstm", "gru") for way in ("", "_backward", "_backward_impl")
}
