"""Places in other libraries that look at values and would take another way under fake tensors."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextlib.contextmanager
def no_packed_sequences() -> Iterator[None]:
    """transformers builds a whole attention mask where it cannot see that sequences are not packed into one row; a
    real run without packing sees it, and builds none. It may be imported in the body, at the latest before the first
    module runs."""
    replaced: list[tuple[Any, Any]] = []
    waiting: list[Any] = []

    def none(position_ids: Any) -> None:
        return None

    def replace(*_: Any) -> None:
        masking: Any = sys.modules.get("transformers.masking_utils")
        original = getattr(masking, "find_packed_sequence_indices", None)
        if original is not None and not replaced:
            replaced.append((masking, original))
            masking.find_packed_sequence_indices = none
        if replaced and waiting:
            waiting.pop().remove()

    if "transformers" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("transformers.masking_utils")
    replace()
    if not replaced:
        waiting.append(register_module_forward_pre_hook(replace))
    try:
        yield
    finally:
        for masking, original in replaced:
            masking.find_packed_sequence_indices = original
        for handle in waiting:
            handle.remove()


@contextlib.contextmanager
def modules_that_move() -> Iterator[None]:
    """`module.to(...)` and similar calls would swap the insides of fake parameters, which PyTorch cannot; here they are
    replaced, tied ones together."""
    original = nn.Module._apply
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    depth = 0

    def move(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        nonlocal depth
        depth += 1
        try:
            for child in self.children() if recurse else ():
                child._apply(fn)
            for name, parameter in self._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in moved:
                    with torch.no_grad():
                        new = nn.Parameter(fn(parameter), parameter.requires_grad)
                        if parameter.grad is not None:
                            new.grad = fn(parameter.grad)
                    moved[id(parameter)] = (parameter, new)
                self._parameters[name] = moved[id(parameter)][1]
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        finally:
            depth -= 1
            if not depth:
                moved.clear()
        return self

    nn.Module._apply = move  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
