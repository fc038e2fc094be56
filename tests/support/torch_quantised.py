"""Linear layers in 8 and 4 bits, as Transformer Engine and torchao have autograd keep their inputs, in plain PyTorch.

Both need a GPU for their kernels. What is kept is what counts here: tensors of PyTorch's own 8-bit formats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCKS = {"fp8-tensorwise": None, "fp8-delayed": None, "fp8-blockwise": 128, "mxfp8": 32, "nvfp4": 16}
"""Elements that share a scale along the tokens; None: all of the tensor."""
SCALES = {
    "fp8-tensorwise": torch.float32, "fp8-delayed": torch.float32, "fp8-blockwise": torch.float32,
    "mxfp8": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn,
}  # fmt: skip


def quantise(x: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """The values by columns, as the gradient of the weight reads them, and their scales."""
    columns = x.detach().reshape(-1, x.shape[-1]).t().float()
    block = BLOCKS[recipe]
    blocks = columns.reshape(1, -1) if block is None else columns.reshape(-1, block)
    largest = 6.0 if recipe == "nvfp4" else 448.0
    scales = blocks.abs().amax(-1).clamp(min=1e-6) / largest
    if SCALES[recipe] == torch.float8_e8m0fnu:
        scales = scales.log2().ceil().exp2()
    scaled = (blocks / scales[:, None]).reshape(columns.shape)
    if recipe == "nvfp4":
        # Two values a byte: sign and the nearest of the eight magnitudes.
        grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        codes = (scaled.abs()[..., None] - grid).abs().argmin(-1) + 8 * (scaled < 0)
        values = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    else:
        values = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scales.to(SCALES[recipe])


class Quantised(torch.autograd.Function):
    """Transformer Engine's linear layer: holds the quantised input, which layers on one input share here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(values, scales, weight)
        return x @ weight.t()


class Original(torch.autograd.Function):
    """One that holds its 16-bit input, and quantises it again in backward: torchao's, and where TE is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()


class Swiglu(torch.autograd.Function):
    """A fused activation, which saves its two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up
