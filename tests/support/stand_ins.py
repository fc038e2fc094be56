"""Stand-ins for GPU kernels: they save for backward what the kernels' own sources say, and compute nothing of use.

Each names the class whose `ctx.save_for_backward` it follows; shapes and layouts follow from the tensors it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SCAN_CHUNK = 2048
"""csrc/selective_scan/selective_scan.cpp: n_chunks = (seqlen + 2048 - 1) / 2048."""
DELTA_CHUNK = 64


class _Kernel(torch.autograd.Function):
    def __init_subclass__(cls) -> None:
        inner = cls.forward

        def forward(ctx: Any, *given: Any) -> Any:
            ctx.given = [(each.shape, each.dtype, each.device) if isinstance(each, Tensor) else None for each in given]
            return inner(ctx, *given)

        cls.forward = staticmethod(forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gradients of the right shapes, of whatever was in memory."""
        wanted = zip(ctx.given, ctx.needs_input_grad, strict=True)
        return tuple(
            torch.empty(how[0], dtype=how[1], device=how[2]) if how is not None and needed else None
            for how, needed in wanted
        )


class _SplitConvScan(_Kernel):
    """mamba_ssm, ops/triton/ssd_combined.py, MambaSplitConv1dScanCombinedFn."""

    @staticmethod
    def forward(ctx: Any, zxbcdt: Tensor, a: Tensor, options: dict[str, Any], *weights: Tensor | None) -> Tensor:
        batch, positions, _ = zxbcdt.shape
        out_x = zxbcdt.new_empty(batch, positions, a.shape[0], options["headdim"])
        norm, output, output_bias = options["rmsnorm_weight"], options["outproj_weight"], options["outproj_bias"]
        rstd = None
        if norm is not None:
            rstd = torch.empty(batch * positions * options["ngroups"], dtype=torch.float32, device=zxbcdt.device)
        ctx.save_for_backward(zxbcdt, out_x, a, rstd, norm, output, output_bias, *weights)
        return zxbcdt.new_empty(batch, positions, output.shape[0])


def split_conv_scan(
    zxbcdt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, dt_bias: Tensor, a: Tensor, **options: Any
) -> Tensor:
    return _SplitConvScan.apply(zxbcdt, a, options, conv_weight, conv_bias, dt_bias, options["D"])


class _CausalConv(_Kernel):
    """causal-conv1d, causal_conv1d_interface.py, CausalConv1dFn."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.stride(2) != 1 and x.stride(1) != 1:
            x = x.contiguous()
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    return _CausalConv.apply(x, weight, bias)


class _DeltaRule(_Kernel):
    """flash-linear-attention, ops/gated_delta_rule/chunk.py, ChunkGatedDeltaRuleFunction; inputs become contiguous."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g, beta = (each.contiguous() for each in (q, k, v, g, beta))
        normed = [torch.empty_like(each) for each in (q, k)]
        rstd = [torch.empty(each.shape[:-1], dtype=torch.float32, device=v.device) for each in (q, k)]
        sums = torch.empty(g.shape, dtype=torch.float32, device=v.device)
        inverse = k.new_empty(*v.shape[:3], DELTA_CHUNK)
        ctx.save_for_backward(normed[0], rstd[0], normed[1], rstd[1], v, sums, beta, inverse)
        return torch.empty_like(v)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, None]:
    assert options["use_qk_l2norm_in_kernel"]
    return _DeltaRule.apply(q, k, v, g, beta), None


class _KimiDelta(_Kernel):
    """flash-linear-attention, ops/kda/chunk.py, ChunkKDAFunction: of each chunk the scores of queries and the inverted system."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g, beta = (each.contiguous() for each in (q, k, v, g, beta))
        normed = [torch.empty_like(each) for each in (q, k)]
        rstd = [torch.empty(each.shape[:-1], dtype=torch.float32, device=v.device) for each in (q, k)]
        sums = torch.empty(g.shape, dtype=torch.float32, device=v.device)
        inside = [k.new_empty(*v.shape[:3], DELTA_CHUNK) for _ in range(2)]
        ctx.save_for_backward(*normed, *rstd, v, sums, beta, *inside)
        return torch.empty_like(v)


def kimi_delta(q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, None]:
    assert options["use_qk_l2norm_in_kernel"]
    return _KimiDelta.apply(q, k, v, g, beta), None


class _SelectiveScan(_Kernel):
    """mamba_ssm, ops/selective_scan_interface.py, SelectiveScanFn, with a gate."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        u, delta, a, b, c, d, z, bias = given
        u, delta, b, c, z = (each if each.stride(-1) == 1 else each.contiguous() for each in (u, delta, b, c, z))
        batch, channels, positions = u.shape
        chunks = -(-positions // SCAN_CHUNK)
        states = torch.empty(batch, channels, chunks, 2 * a.shape[1], dtype=torch.float32, device=delta.device)
        ctx.save_for_backward(u, delta, a, b, c, d, z, bias, states, torch.empty_like(delta))
        return torch.empty_like(z)


def selective_scan(
    u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, *, D: Tensor, z: Tensor, delta_bias: Tensor, **_: Any
) -> Tensor:
    return _SelectiveScan.apply(u, delta, a, b, c, D, z, delta_bias)


class _Inner(_Kernel):
    """mamba_ssm, ops/selective_scan_interface.py, MambaInnerFn, which makes convolution and steps again in backward."""

    @staticmethod
    def forward(ctx: Any, xz: Tensor, *given: Tensor | None) -> Tensor:
        convolution, bias, parameters, steps, output, _, a, d, step_bias = given
        xz = xz if xz.stride(-1) == 1 else xz.contiguous()
        batch, _, positions = xz.shape
        channels, state = a.shape
        x_dbl = xz.new_empty(batch * positions, parameters.shape[0])
        b, c = (xz.new_empty(batch, 1, state, positions) for _ in range(2))
        chunks = -(-positions // SCAN_CHUNK)
        states = torch.empty(batch, channels, chunks, 2 * state, dtype=torch.float32, device=xz.device)
        out = xz.new_empty(batch, channels, positions)
        ctx.save_for_backward(
            xz, convolution, bias, x_dbl, parameters, steps, output, a, b, c, d, step_bias, states, out
        )
        return xz.new_empty(batch, positions, output.shape[0])


def mamba_inner(
    xz: Tensor, convolution: Tensor, bias: Tensor | None, parameters: Tensor, steps: Tensor, output: Tensor,
    output_bias: Tensor | None, a: Tensor, b: None, c: None, d: Tensor, *, delta_bias: Tensor, **_: Any,
) -> Tensor:  # fmt: skip
    return _Inner.apply(xz, convolution, bias, parameters, steps, output, output_bias, a, d, delta_bias)


KERNELS = {
    "mamba2_split_conv1d_scan_combined": split_conv_scan,
    "causal_conv1d_fn": causal_conv,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": kimi_delta,
    "mamba_inner_fn": mamba_inner,
    "mamba_selective_scan": selective_scan,
}
"""By the names that transformers' modules call them."""
