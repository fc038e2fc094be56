"""A GPT and a Llama block in plain PyTorch, written as the papers describe them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Drop = Callable[[Tensor, float], Tensor]
Core = Callable[[Tensor, Tensor, Tensor], Tensor]
Block = Callable[[Tensor], Tensor]


class FusedRMSNorm(torch.autograd.Function):
    """A fused kernel: keeps its input and one float32 a token. (PyTorch's own is fused on CUDA only.)"""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, gain: Tensor) -> Tensor:
        scale = x.float().pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, gain, scale)
        return (x * scale).to(x.dtype) * gain

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, gain, scale = ctx.saved_tensors
        normed, (gradient,) = x * scale, gradients
        inner = gradient * gain
        through = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return through.to(x.dtype), (gradient * normed).sum((0, 1)).to(gain.dtype)


class Weights:
    """Makes parameters, and remembers them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.made: list[Tensor] = []

    def __call__(self, *shape: int) -> Tensor:
        self.made.append(torch.randn(*shape, dtype=self.dtype, requires_grad=True))
        return self.made[-1]


def eager_core(drop: Drop, probability: float) -> Core:
    """Scores, softmax, dropout and context, written out; keys and values are repeated where there are fewer."""

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.softmax(q @ k.transpose(-1, -2), -1)
        return (drop(scores, probability) if probability else scores) @ v

    return core


def flash_core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's fused kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def gpt(h: int, a: int, dtype: torch.dtype, core: Core, drop: Drop | None) -> tuple[Block, list[Tensor]]:
    """A GPT block: LayerNorm, one matrix for queries, keys and values, GELU; `drop` after each half."""
    make = Weights(dtype)
    wq, bq, wo, bo = make(3 * h, h), make(3 * h), make(h, h), make(h)
    w1, b1, w2, b2 = make(4 * h, h), make(4 * h), make(h, 4 * h), make(h)
    g1, c1, g2, c2 = make(h), make(h), make(h), make(h)

    def dropped(y: Tensor) -> Tensor:
        return y if drop is None else drop(y, 0.1)

    def run(x: Tensor) -> Tensor:
        b, s, _ = x.shape
        normed = F.layer_norm(x, (h,), g1, c1)
        q, k, v = F.linear(normed, wq, bq).view(b, s, 3, a, h // a).permute(2, 0, 3, 1, 4)
        y = x + dropped(F.linear(core(q, k, v).transpose(1, 2).reshape(b, s, h), wo, bo))
        inner = F.gelu(F.linear(F.layer_norm(y, (h,), g2, c2), w1, b1))
        return y + dropped(F.linear(inner, w2, b2))

    return run, make.made


def llama(h: int, a: int, k: int, d: int, f: int, dtype: torch.dtype, core: Core) -> tuple[Block, list[Tensor]]:
    """A Llama block: fused RMSNorm, `k` key-value heads, a gated MLP, no rotation (it keeps nothing of its own)."""
    make = Weights(dtype)
    wq, wk, wv, wo = make(a * d, h), make(k * d, h), make(k * d, h), make(h, a * d)
    wg, wu, wd, g1, g2 = make(f, h), make(f, h), make(h, f), make(h), make(h)

    def run(x: Tensor) -> Tensor:
        b, s, _ = x.shape

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(b, s, count, d).transpose(1, 2)

        n = FusedRMSNorm.apply(x, g1)
        context = core(heads(F.linear(n, wq), a), heads(F.linear(n, wk), k), heads(F.linear(n, wv), k))
        y = x + F.linear(context.transpose(1, 2).reshape(b, s, a * d), wo)
        n = FusedRMSNorm.apply(y, g2)
        return y + F.linear(F.silu(F.linear(n, wg)) * F.linear(n, wu), wd)

    return run, make.made
