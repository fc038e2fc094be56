"""A training as FSDP2 runs it in mixed precision: parameters and inputs of each unit in 16 bits, buffers as they are made."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_map

from loadgauge.pytorch.capture.lists.blocks import blocks
from loadgauge.pytorch.trace.programs.training import Sized


def cast_by_fsdp(job: Sized) -> Sized:
    """A training of a float32 module whose parameters `fully_shard` casts to 16 bits as it gathers them.

    Floats that come into a unit (each block, and the whole) are cast too; buffers are not, so that one in float32 makes float32 of
    what it meets (source: pytorch, `MixedPrecisionPolicy(param_dtype)`, whose `cast_forward_inputs` is true).
    """

    def build(device: str) -> Any:
        module = job.build(device)
        own = [(one, dict(one._buffers)) for one in module.modules()]
        module.to(torch.bfloat16)
        for one, buffers in own:
            one._buffers.update(buffers)
        units = (path for stack in blocks(module, getattr(module, "config", None)).stacks for path in stack.paths)
        for path in dict.fromkeys(("", *units)):
            module.get_submodule(path).register_forward_pre_hook(_narrowed, with_kwargs=True)
        return module

    def inputs(device: str, module: Any, **sizes: Any) -> Any:
        return tree_map(_to(torch.float32), job.inputs(device, module, **sizes))

    return msgspec.structs.replace(job, build=build, inputs=inputs)


def _narrowed(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(_to(torch.bfloat16), (args, kwargs))


def _to(dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats else value

    return cast
