"""What the kernels of a training step read and write, operator by operator, on the simulated device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.trace import trace

PRODUCTS = ("mm", "linear", "bmm", "addmm", "_scaled_dot_product", "bitsandbytes")
"""Operators that are no pass over the elements."""
MOVE_NOTHING = ("detach", "_unsafe_view", "_reshape_alias", "empty", "prim", "alias")


class KernelBytes(TorchDispatchMode):
    """Bytes of every operator's inputs and outputs, each tensor once, by `forward` and `backward`; views move none.

    least: elements of the smallest result that counts (casts of the adapters' own weights are left out)
    """

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.phase = least, "forward"
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        aliases = any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
        if func.is_view or aliases or name.startswith((*MOVE_NOTHING, *PRODUCTS)):
            return out
        made = [one for one in tree_flatten(out)[0] if isinstance(one, torch.Tensor)]
        if made and max(one.numel() for one in made) >= self.least:
            read = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
            self.moved[self.phase] += sum({id(one): one.nbytes for one in (*read, *made)}.values())
        return out


def kernel_bytes(build: Callable[[], Callable[[], None]], least: int) -> dict[str, int]:
    """Return the bytes of a step's second run, forward and backward; `build` returns the step."""
    counted = KernelBytes(least)
    whole = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        counted.phase = "backward"
        whole(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        counted.phase = "step"

    def job() -> Callable[[], None]:
        step = build()

        def again() -> None:
            counted.moved.clear()
            counted.phase = "forward"
            torch.Tensor.backward = backward  # type: ignore[method-assign]
            try:
                with counted:
                    step()
            finally:
                torch.Tensor.backward = whole  # type: ignore[method-assign]

        return again

    trace(FunctionJob(job, "kernels"))
    return dict(counted.moved)
