"""RWKV's attention as its CUDA kernel runs it: one operation for all positions, in place of a loop over them.

transformers takes the kernel on CUDA where the packages `kernels` and `ninja` are installed (`RwkvLinearAttention` in its
modeling_rwkv.py, whose tensors these are); without them its loop makes some twenty tensors a token in each layer.
"""

from importlib import import_module
from typing import Any

import torch


class WeightedKeys(torch.autograd.Function):
    """One call of the kernel."""

    @staticmethod
    def forward(ctx: Any, time_decay: Any, time_first: Any, key: Any, value: Any) -> Any:
        """Return the output, shaped as `key`: (sequences, tokens, channels). time_decay, time_first: (channels,)"""
        ctx.dtype = key.dtype
        time_decay = -torch.exp(time_decay.float().contiguous())
        if key.dtype == torch.float16:
            time_first, key, value = time_first.float(), key.float(), value.float()
        time_first, key, value = time_first.contiguous(), key.contiguous(), value.contiguous()
        output = torch.empty_like(key, memory_format=torch.contiguous_format)
        ctx.save_for_backward(time_decay, time_first, key, value, output)
        return output.to(ctx.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of what `forward` takes."""
        time_decay, *others, _ = ctx.saved_tensors
        of_decay = torch.bfloat16 if ctx.dtype == torch.bfloat16 else torch.float32
        gradients = [torch.empty_like(time_decay, dtype=of_decay)]
        gradients += [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in others]
        grad = grads[0].float() if ctx.dtype == torch.float16 else grads[0]
        grad.contiguous()
        return tuple(tensor.to(ctx.dtype) for tensor in gradients)


def use_cuda_rwkv(device: str) -> None:
    """Let transformers' RWKV take the kernel for tensors on the simulated device `place`; others go on as before."""
    module: Any = import_module("transformers.models.rwkv.modeling_rwkv")
    usual = module.rwkv_linear_attention
    if getattr(usual, "simulated", False):
        return

    def attend(decay: Any, first: Any, key: Any, value: Any, state: Any = None, return_state: bool = False) -> Any:
        if key.device.type != device or state is not None or return_state:
            return usual(decay, first, key, value, state=state, return_state=return_state)
        return WeightedKeys.apply(decay, first, key, value), None

    attend.simulated = True  # type: ignore[attr-defined]
    module.rwkv_linear_attention = attend
