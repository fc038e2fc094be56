"""Guards: counts PyTorch's questions about symbolic sizes, and skips those that earlier answers imply."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._guards import SLoc
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Unsettled(Exception):
    """A question about sizes whose answer would be a new guard."""


class Env(ShapeEnv):
    """A shape environment that counts the questions it is asked outside backward, and does not note who asked."""

    asked = 0
    _settled = False

    def _get_stack_summary(self, *_: Any, **__: Any) -> tuple[SLoc, str]:
        return SLoc(None, None), ""

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what a comparison of sizes comes to, as the base class says. Raises Unsettled within `settled`."""
        self.asked += torch._C._current_autograd_node() is None
        if self._settled and self._maybe_evaluate_static(sym_node.expr) is None:
            raise Unsettled(sym_node.expr)
        return super().evaluate_sym_node(sym_node, *args, **kwargs)

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """In the body, a question that the guards so far do not answer raises Unsettled."""
        self._settled = True
        try:
            yield
        finally:
            self._settled = False
