"""FLOPs of a step that really runs: those of the hardware, and those of the model, which recomputation is not part of."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loadgauge.pytorch.record.flops import formula

RERUN = 4 / 5
"""Of the five products that PyTorch counts in the backward of fused attention, the one that makes the scores again is
no model FLOPs."""


class FlopCounter(TorchDispatchMode):
    """Counts what runs in its body, backward included; costs a few microseconds an operation (measured on a CPU: 2 % of a
    step of 0.45 s).

    `hardware`: everything; `model`: without recomputation. What runs in backward with gradients enabled is a checkpoint
    that runs again. `uncounted`: operations that should count, but have no formula.

    >>> a, b = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4)
    >>> with FlopCounter() as counter:
    ...     (a @ b).sum().backward()
    >>> counter.hardware, counter.model
    (96, 96)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hardware = 0
        self.model = 0
        self.uncounted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and counts it."""
        for kind in types:
            if kind.__name__ == "DTensor":
                return NotImplemented  # its local tensors come by next
        out = func(*args, **(kwargs or {}))
        count = formula(func)
        if isinstance(count, str):
            self.uncounted[count] += 1
        elif count is not None:
            flops = count(args, kwargs, out)
            self.hardware += flops
            if torch._C._current_autograd_node() is None:
                self.model += flops
            elif not torch.is_grad_enabled():
                attention = "attention" in func._opname and "backward" in func._opname
                self.model += round(flops * RERUN) if attention else flops
        return out
