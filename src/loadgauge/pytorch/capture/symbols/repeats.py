"""Operations with symbols that ran before: what one makes of shapes that are the same expressions is made again, unasked.

Layers and steps repeat, and PyTorch asks dozens of questions about sizes for each operation. A repeated one would ask the same and
get the same answers, so no guard is lost. Keys compare expressions as they are written, never as sizes, which would be a guard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._guards import SLoc
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from loadgauge.pytorch.device.fake import describe, new_fake, suits

_FRESH, _VIEW, _SAME = range(3)


class Repeats:
    """Cached results of operations of one fake mode: new tensors, views of their arguments, or these; the rest goes to PyTorch."""

    def __init__(self, mode: FakeTensorMode, env: Env) -> None:
        self.mode, self.env = mode, env
        self._plans: dict[Any, Any] = {}
        self._template: dict[str, Any] = {}

    def key(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what the result of an operation depends on, and its tensors; None where that is more than can be compared."""
        if not suits(func) or torch._C.is_inference_mode_enabled():
            return None
        tensors: list[Any] = []
        parts: list[Any] = [func, torch.get_default_dtype(), *kwargs]
        if not describe(self.mode, (*args, *kwargs.values()), parts, tensors, _note):
            return None
        return tuple(parts), tensors

    def again(self, key: Any) -> Any:
        """The result made again; None where there was none."""
        plan = self._plans.get(key[0])
        if plan is None:
            return None
        kind, steps = plan
        tensors = [self._make(step, key[1]) for step in steps]
        return tensors[0] if kind is None else kind(tensors)

    def note(self, key: Any, out: Any) -> None:
        """Remember a result, if it can be made again."""
        several = isinstance(out, tuple | list)
        results = list(out) if several else [out]
        steps = [self._step(result, key[1]) for result in results]
        fresh = [result for result, step in zip(results, steps, strict=True) if step is not None and step[0] == _FRESH]
        apart = len({tensor.untyped_storage()._cdata for tensor in fresh}) == len(fresh)
        if results and None not in steps and apart:
            self._plans[key[0]] = ((list if isinstance(out, list) else tuple) if several else None), steps

    def _step(self, result: Any, tensors: list[Any]) -> Any:
        if not isinstance(result, FakeTensor) or result.constant is not None or result.layout is not torch.strided:
            return None
        for number, tensor in enumerate(tensors):
            if result is tensor:
                return (_SAME, number)
        if result.is_conj() or result.is_neg():
            return None
        storage = result.untyped_storage()._cdata
        of = next((at for at, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage), None)
        kind = result.dtype, result.fake_device
        if of is None:
            step: Any = (_FRESH, tuple(result.shape), result.stride(), *kind)
        elif kind == (tensors[of].dtype, tensors[of].fake_device):
            step = (_VIEW, tuple(result.shape), result.stride(), of, result.storage_offset())
        else:
            return None
        try:
            with self.env.settled():  # else the same question of a later operation could find its answer, and no guard
                return step if _layout(self._make(step, tensors)) == _layout(result) else None
        except Unsettled:
            return None

    def _make(self, step: Any, tensors: list[Any]) -> Any:
        if step[0] == _SAME:
            return tensors[step[1]]
        with self.env.suppress_guards():  # `note` saw that there are none: a view lies where the first one lay
            if step[0] == _FRESH:
                meta, device = torch.empty_strided(step[1], step[2], dtype=step[3], device="meta"), step[4]
            else:
                source = tensors[step[3]]
                device = source.fake_device
                with in_kernel_invocation_manager(self.mode):
                    meta = torch.as_strided(source, step[1], step[2], step[4])
            return new_fake(self.mode, self._template, meta, device)


def _note(value: Any, parts: list[Any]) -> bool:
    """Append a size, the expression of one, or how a tensor lies; False where an expression is not known."""
    if isinstance(value, FakeTensor):
        parts += (len(value.shape), value.dtype, value.fake_device)
        return all(_note(size, parts) for size in (*value.shape, *value.stride(), value.storage_offset()))
    if type(value) is torch.SymInt:
        value = getattr(value.node, "_expr", None)
    parts.append(value)
    return value is not None


def _layout(tensor: Any) -> list[Any] | None:
    """Sizes, strides, offset and bytes of a tensor as they are written."""
    parts: list[Any] = []
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
    return parts if all(_note(size, parts) for size in sizes) else None


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
