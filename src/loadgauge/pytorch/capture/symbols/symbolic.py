"""Sizes that stay symbols while PyTorch runs: fake tensors whose batch and length are `SymInt`s under one `ShapeEnv`.

Every comparison that the code makes with a size is kept as a guard: it says for which sizes the run holds.

Operations with symbols that ran before: what one makes of shapes that are the same expressions is made again, unasked.

Layers and steps repeat, and PyTorch asks dozens of questions about sizes for each operation. A repeated one would ask the same and
get the same answers, so no guard is lost. Keys compare expressions as they are written, never as sizes, which would be a guard.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import SLoc
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from loadgauge.core.base.errors import NotModelled
from loadgauge.pytorch.device.fake import FakeMode, describe, new_fake, suits
from loadgauge.pytorch.device.kernels.cuda_rnn import RECURRENT
from loadgauge.pytorch.device.patches import (
    replaced,
)
from loadgauge.pytorch.device.simulated import fake_tensors

_DEVICE_OF = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default


_AS_THE_DEVICE = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.one_hot.default,
    *(getattr(getattr(torch.ops.aten, name), kind) for name in RECURRENT for kind in ("input", "data")),
)
"""Operations that are one kernel on the device, and several by their rules."""
MOST = 2**31
"""What every size is less than."""
MOST_OPERATIONS, MOST_QUESTIONS = 6000, 36_000
"""Operations of forward that are run with symbols, and questions about sizes that PyTorch may ask meanwhile: a loop over time or
chunks has more, and a plain run is faster by far."""


class TooMuch(NotModelled):
    """A program whose sizes take too long as symbols."""


class SymbolicMode(FakeMode):
    """Fake tensors with symbolic sizes; `.item()` of one that has no value gives 1."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.env = env
        self.cache_enabled = (
            False  # to compare symbols takes longer than to run an operation again, and makes guards of its own
        )
        self.operations, self.steps = 0, 2
        self.repeats = Repeats(self, env)
        self._within = False

    def _once(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self._within:  # parts of an operation, which is made again as a whole
            return self._uncached(func, types, args, kwargs)
        key = self.repeats.key(func, args, kwargs)
        out = None if key is None else self.repeats.again(key)
        if out is None:
            self._within = True
            try:
                out = self._uncached(func, types, args, kwargs)
            finally:
                self._within = False
            if key is not None:
                self.repeats.note(key, out)
        return out

    def _begin(self) -> None:
        """Raise TooMuch beyond the bounds; parts of an operation and what backward runs do not count.

        Before the first backward at half of the operations, as the second step has as many.
        """
        if self._within:
            return
        if torch._C._current_autograd_node() is not None:
            self.steps = 1
            return
        self.operations += 1
        asked = self.env.asked
        if self.operations * self.steps > MOST_OPERATIONS or asked > MOST_QUESTIONS:
            raise TooMuch(
                f"sizes as symbols take too long here: {self.operations} operations and {asked} questions in forward"
            )


class Symbols:
    """Sizes by name, each a `SymInt` with a hint, of one shape environment."""

    def __init__(self, hints: dict[str, int]) -> None:
        self.env = Env()
        self.hints = hints
        self.names: dict[Any, str] = {}
        self.sizes: dict[str, Any] = {}
        for name, hint in hints.items():
            if hint == 1:
                self.sizes[name] = 1
                continue
            source = ConstantSource(name)
            with _unlogged():
                symbol = self.env.create_symbol(
                    hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
                )
            # Bounded, PyTorch can tell that a slice to the end is all there is.
            self.env.constrain_symbol_range(symbol, compiler_min=2, compiler_max=MOST)
            self.names[symbol] = name
            self.sizes[name] = self.env.create_symintnode(symbol, hint=hint, source=source)

    def expression(self, size: Any) -> Any:
        """A size as a SymPy expression, or an int."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        simplified = self.env.simplify(size.node.expr)
        return simplified if simplified.free_symbols else int(simplified)

    @property
    def guards(self) -> tuple[Any, ...]:
        """Return what the code asked of the sizes, and found true."""
        return tuple(guard.expr for guard in self.env.guards)


def _unlogged() -> contextlib.AbstractContextManager[None]:
    """Nothing is written for PyTorch's log of shapes in the body, which would take a traceback for each question."""
    return replaced((logging.getLogger("torch.__trace"), "handlers", []))


@contextlib.contextmanager
def as_eager() -> Iterator[None]:
    """Takes away the rules of the Python dispatcher that run other operations than eager PyTorch does.

    Dropout with a share of 0 returns its argument, which its rule would copy; batch norm is one kernel; a product of batches is no
    view of another, so that what is added to it in place has no copy in backward; sequences are padded in place. What PyTorch
    only asks whether it knows for all
    sizes, such as that a slice is all there is, is asked of these sizes, and kept as a guard.
    """
    aten = torch.ops.aten
    dropout, matmul = aten.dropout.default.py_kernels, aten.matmul.default.py_kernels
    packed = aten.pad_sequence.default.py_kernels
    before = {
        func: dict(func.py_kernels)
        for func in (
            aten.dropout.default,
            aten.matmul.default,
            aten.pad_sequence.default,
            *_AS_THE_DEVICE,
            *overloads(),
        )
    }

    def around(rule: Any) -> Any:
        return lambda x, p, train: rule(x, p, train) if p and train else x

    def product(rule: Any) -> Any:
        def run(a: Any, b: Any, **more: Any) -> Any:
            batches = a.dim() > 2 and b.dim() > 2 and a.shape[:-2] == b.shape[:-2] and not more
            if not batches:
                return rule(a, b, **more)
            rows = math.prod(a.shape[:-2])
            product = a.reshape(rows, *a.shape[-2:]).bmm(b.reshape(rows, *b.shape[-2:]))
            return aten._unsafe_view.default(product, [*a.shape[:-1], b.shape[-1]])

        return run

    def asked(self: SymNode, file: str, line: int) -> bool:
        return self.guard_bool(file, line) if self.has_hint() else known_true(self, file, line)

    def padded(
        sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
    ) -> Any:
        longest, like = max(sequence.shape[0] for sequence in sequences), sequences[0]
        sizes = [len(sequences), longest] if batch_first else [longest, len(sequences)]
        batch = torch.full([*sizes, *like.shape[1:]], padding_value, dtype=like.dtype, device=like.device)
        for index, sequence in enumerate(sequences):
            start = longest - sequence.shape[0] if padding_side == "left" else 0
            batch.select(0 if batch_first else 1, index).narrow(0, start, sequence.shape[0]).copy_(sequence)
        return batch

    known_true = SymNode.statically_known_true
    try:
        SymNode.statically_known_true = asked  # type: ignore[method-assign]
        matmul.update({key: product(rule) for key, rule in matmul.items()})
        for func in _AS_THE_DEVICE:
            func.py_kernels.clear()
        as_one_kernel()
        dropout.update({key: around(rule) for key, rule in dropout.items()})
        packed.update(dict.fromkeys(packed, padded))
        for func in before:
            func._dispatch_cache.clear()
        yield
    finally:
        SymNode.statically_known_true = known_true  # type: ignore[method-assign]
        for func, rules in before.items():
            func.py_kernels.clear()
            func.py_kernels.update(rules)
            func._dispatch_cache.clear()


def symbolic_tensors(symbols: Symbols) -> contextlib.AbstractContextManager[SymbolicMode]:
    """Yield the mode of `fake_tensors`, with sizes that may be symbols.

    The Python dispatcher takes the symbolic rules of operators that C++ would ask for plain numbers.
    """
    return fake_tensors(SymbolicMode(symbols.env), enable_python_dispatcher(), as_eager(), _unlogged())


_OWN = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_KINDS = {
    "nearest1d": 1,
    "nearest2d": 2,
    "nearest3d": 3,
    "linear1d": 1,
    "bilinear2d": 2,
    "bicubic2d": 2,
    "trilinear3d": 3,
}
_NAMES = {**{f"upsample_{kind}": count for kind, count in _KINDS.items()},
          **{f"_upsample_nearest_exact{count}d": count for count in (1, 2, 3)}}  # fmt: skip


def overloads() -> list[Any]:
    """The operators whose rules are replaced."""
    return [
        getattr(getattr(torch.ops.aten, name), overload) for name in _NAMES for overload in ("default", "vec")
    ] + _backward()


def _backward() -> list[Any]:
    """Return those whose shapes C++ works out with numbers alone."""
    return [getattr(torch.ops.aten, f"upsample_{kind}_backward").default for kind in _KINDS if "nearest" not in kind]


def as_one_kernel() -> None:
    """Take the rules of `overloads` away: those with a size are their kernel, those with factors work out the size first."""
    for name, count in _NAMES.items():
        kernel, of_factors = getattr(torch.ops.aten, name).default, getattr(torch.ops.aten, name).vec
        for key in _OWN:
            kernel.py_kernels.pop(key, None)
            if key in of_factors.py_kernels:
                of_factors.py_kernels[key] = _sized(kernel, count)
    for func in _backward():
        func.py_kernels[DispatchKey.Meta] = _gradient if func in _ALWAYS_CONTIGUOUS else _gradient_laid_as_given


_ALWAYS_CONTIGUOUS = (
    torch.ops.aten.upsample_linear1d_backward.default,
    torch.ops.aten.upsample_bicubic2d_backward.default,
)
"""Those whose kernel writes rows of pixels, however the gradient that it is given lies."""


def _gradient(grad: torch.Tensor, size: Any, of: Any, *_: Any, **__: Any) -> torch.Tensor:
    return grad.new_empty(of)


def _gradient_laid_as_given(grad: torch.Tensor, size: Any, of: Any, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(of, dtype=grad.dtype, device=grad.device, memory_format=suggest_memory_format(grad))


def _sized(kernel: Any, count: int) -> Callable[..., Any]:
    def run(x: Any, size: Any, *more: Any) -> Any:
        *flags, factors = more
        if size is None:
            size = [_times(side, factor) for side, factor in zip(x.shape[2:], factors, strict=True)]
        return kernel(x, size, *flags, *(factors or [None] * count))

    return run


def _times(side: Any, factor: float) -> Any:
    return side * int(factor) if factor == int(factor) else torch.sym_int(side * factor)


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
