"""Operators that keep less for backward than PyTorch's graph of the same formula, as article 5 teaches.

Each is an `autograd.Function` that keeps inputs, which are there anyway, and works the rest out again in backward:
arithmetic for memory. They run on every device and in every floating dtype, and are differentiable once. Where a fused
kernel of a library fits (Liger, Apex, cuDNN), it is faster; these show what can be saved, and save it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loadgauge.core.base.errors import ConfigError, refuse


class _Product(torch.autograd.Function):
    """(x + 1)(y + 1); d/dx = y + 1, d/dy = x + 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        z = x + 1
        z *= y + 1
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        of_x, of_y = ctx.needs_input_grad
        return (y + 1).mul_(grad) if of_x else None, (x + 1).mul_(grad) if of_y else None


def shifted_product(x: Tensor, y: Tensor) -> Tensor:
    """(x + 1) (y + 1), of one shape. Keeps nothing beside x and y (PyTorch: both factors); peak: one tensor.

    >>> import torch
    >>> shifted_product(torch.tensor(1.0), torch.tensor(2.0))
    tensor(6.)
    """
    if x.shape != y.shape:
        raise ConfigError(f"shifted_product: shapes {tuple(x.shape)} and {tuple(y.shape)} differ")
    result: Tensor = _Product.apply(x, y)
    return result


class _SigmoidChain(torch.autograd.Function):
    """The derivative of a chain is the product of y (1 - y) over its links, so one pass forward gives it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.length = length
        y = torch.sigmoid(x)
        for _ in range(length - 1):
            y.sigmoid_()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        slope = grad.clone()
        y = torch.sigmoid(x)
        for link in range(ctx.length):
            if link:
                y.sigmoid_()
            # slope y (1 - y) = (slope y) - (slope y) y, in place
            slope.mul_(y).addcmul_(slope, y, value=-1)
        return slope, None


def sigmoid_chain(x: Tensor, length: int) -> Tensor:
    """`length` sigmoids in a row. Keeps x alone (PyTorch: every output, `length` tensors); peak: nothing more.

    >>> import torch
    >>> sigmoid_chain(torch.tensor(0.0), 1)
    tensor(0.5000)
    """
    refuse(length < 1, f"sigmoid_chain: length must be at least 1, got {length}")
    result: Tensor = _SigmoidChain.apply(x, length)
    return result


class _SwiGlu(torch.autograd.Function):
    """silu(g) u, with s = sigmoid(g): d/du = g s, d/dg = u s (1 + g (1 - s))."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        result = torch.nn.functional.silu(gate)
        result *= up
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_up = torch.nn.functional.silu(gate)
        of_up *= grad
        of_gate = torch.ops.aten.silu_backward(grad, gate)
        of_gate *= up
        return of_gate, of_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up, of one shape. Keeps nothing beside gate and up (PyTorch: silu(gate) as well); peak: nothing more.

    Source: "glu", Shazeer 2020 (arXiv:2002.05202).

    >>> import torch
    >>> swiglu(torch.tensor([0.0, 20.0]), torch.tensor([5.0, 3.0]))
    tensor([ 0., 60.])
    """
    if gate.shape != up.shape:
        raise ConfigError(f"swiglu: shapes {tuple(gate.shape)} and {tuple(up.shape)} differ")
    result: Tensor = _SwiGlu.apply(gate, up)
    return result


class _RmsNorm(torch.autograd.Function):
    """y = w x r with r = (mean(x^2) + eps)^-1/2 in single precision; with n = x r and d = w grad,
    dx = r (d - n mean(d n)) and dw = sum over rows of grad n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x.dtype)
        root = (x.to(wide).square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, root)
        normal = x.to(wide, copy=True)
        normal *= root
        return normal.to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, root = ctx.saved_tensors
        normal = x.to(root.dtype) * root
        of_weight = (grad.to(root.dtype) * normal).flatten(0, -2).sum(0).to(weight.dtype)
        slope = grad.to(root.dtype) * weight.to(root.dtype)
        slope.addcmul_(normal, (slope * normal).mean(-1, keepdim=True), value=-1)
        slope *= root
        return slope.to(x.dtype), of_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension: x [..., h], weight [h]. Keeps x and one number per row; statistics in float32.

    (transformers' module keeps a float32 copy of x and the normalised x as well.) Source: Zhang and Sennrich 2019
    (arXiv:1910.07467).

    >>> import torch
    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    if weight.shape != x.shape[-1:]:
        raise ConfigError(f"rms_norm: weight has shape {tuple(weight.shape)}, x {tuple(x.shape)}")
    result: Tensor = _RmsNorm.apply(x, weight, eps)
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    """Logits live for one chunk of tokens at a time, in forward and again in backward; kept: one number per token.

    With p = softmax(logits), the gradient of the logits is (p - onehot(target)) scale.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, ignored: int, chunk: int) -> Tensor:
        wide = _wide(hidden.dtype)
        counted = target != ignored
        safe = target.where(counted, 0)
        total = hidden.new_zeros((), dtype=wide)
        sums = hidden.new_empty(hidden.shape[0], dtype=wide)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = (hidden[part] @ weight.t()).to(wide)
            picked = logits.gather(1, safe[part, None])[:, 0]
            # logsumexp in place: PyTorch's takes another chunk of logits.
            top = logits.amax(-1, keepdim=True)
            logits -= top
            sums[part] = logits.exp_().sum(-1).log_() + top[:, 0]
            del logits
            total += ((sums[part] - picked) * counted[part]).sum()
        count = counted.sum()
        ctx.save_for_backward(hidden, weight, target, sums, count)
        ctx.ignored, ctx.chunk = ignored, chunk
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, target, sums, count = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Added up over chunks in the wide dtype: in 16 bit the small parts would be lost.
        of_weight = torch.zeros_like(weight, dtype=sums.dtype) if ctx.needs_input_grad[1] else None
        counted = target != ctx.ignored
        safe = target.where(counted, 0)
        scale = grad / count
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            slope = (hidden[part] @ weight.t()).to(sums.dtype)
            slope -= sums[part, None]
            slope.exp_()
            slope.scatter_add_(1, safe[part, None], slope.new_full((slope.shape[0], 1), -1.0))
            slope *= (counted[part] * scale)[:, None]
            narrow = slope.to(hidden.dtype)
            del slope
            if of_hidden is not None:
                of_hidden[part] = narrow @ weight
            if of_weight is not None:
                of_weight += narrow.t() @ hidden[part]
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100, chunk: int = 1024
) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T`: hidden [tokens, h], weight [vocabulary, h], target [tokens].

    Keeps one number per token beside its inputs (PyTorch: the logits in 16 bit, in float32 and their log-softmax); at
    most `chunk` rows of logits live at once. Costs the product of hidden and weight once more.

    >>> import torch
    >>> hidden, weight = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([0, -100]))
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden[:1] @ weight.t(), torch.tensor([0])))
    True
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ConfigError(
            "linear_cross_entropy: wants hidden [tokens, h] and weight [vocabulary, h], got"
            f" {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if target.shape != hidden.shape[:1]:
        raise ConfigError(f"linear_cross_entropy: {hidden.shape[0]} tokens, but targets {tuple(target.shape)}")
    refuse(chunk < 1, f"linear_cross_entropy: chunk must be at least 1, got {chunk}")
    result: Tensor = _LinearCrossEntropy.apply(hidden, weight, target, ignore_index, chunk)
    return result


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: float32 for 16 bit, else the same."""
    return torch.promote_types(dtype, torch.float32)
