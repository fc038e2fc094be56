"""Sizes that stay symbols while PyTorch runs: fake tensors whose batch and length are `SymInt`s under one `ShapeEnv`.

Every comparison that the code makes with a size is kept as a guard: it says for which sizes the run holds.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic

from loadgauge.core.base.errors import NotModelled
from loadgauge.pytorch.capture.symbols.repeats import Env, Repeats
from loadgauge.pytorch.device.fake import FakeMode
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
