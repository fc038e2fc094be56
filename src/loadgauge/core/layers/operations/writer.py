"""Writes down operations one by one: tensors by their dtype, and what is done to each element."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from loadgauge.core.base.algebra import Size, maximum, shard
from loadgauge.core.definitions.model.kernels import LowPrecision
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.layers.operations.operations import Operation, OperationKind, Tensor
from loadgauge.core.layers.operations.rank_view import View


class Writer:
    """Collects operations; each method adds some and returns the tensor they make."""

    def __init__(self, view: View, low: LowPrecision | None = None, trained: frozenset[str] | None = None) -> None:
        self.view = view
        self.low = low
        self.trained = trained
        """Operations whose weights get gradients; None: all of them."""
        """The recipe of the matrix products, where these are the operations of a block."""
        self.kernels = view.kernels
        self.dtypes = view.kernels.dtypes
        self.residual_itemsize = self.dtypes.activation if self.dtypes.residual is None else self.dtypes.residual
        self.wide_weights = self.residual_itemsize != self.dtypes.activation
        """True where autocast reads float32 weights."""
        lora = view.lora
        self.autocast = self.dtypes.residual is not None or (lora is not None and lora.casts)
        self.operations: list[Operation] = []
        self.local_tokens = shard(view.tokens, view.token_shards, "tokens of a micro-batch")

    @property
    def adapter(self) -> Lora:
        """The adapters of the run, asked for where it has some."""
        assert self.view.lora is not None
        return self.view.lora

    def widen(self) -> None:
        """Make the residual stream float32 where 4-bit layers do so; the embedding, tables and masks are made before."""
        if self.view.lora is not None and self.view.lora.widens:
            self.residual_itemsize = 4

    @contextlib.contextmanager
    def as_wide_as(self, x: Tensor) -> Iterator[None]:
        """Work on elements and kernels that follow `x` in its dtype, float32 beside a quantised base that was prepared so."""
        usual = self.dtypes
        self.dtypes = msgspec.structs.replace(usual, activation=maximum(x.itemsize, usual.activation))
        yield
        self.dtypes = usual

    def trains(self, name: str) -> bool:
        """Return whether an operation's own weights get gradients."""
        return self.view.lora is None and (self.trained is None or name in self.trained)

    # -- tensors ------------------------------------------------------------------------------------------------------

    def tensor(self, name: str, numel: Size) -> Tensor:
        """An activation in the compute dtype."""
        return Tensor(name, numel, self.dtypes.activation)

    def mask(self, name: str, numel: Size) -> Tensor:
        """A dropout mask, one byte an element on CUDA."""
        return Tensor(name, numel, self.dtypes.mask, "mask")

    def float32(self, name: str, numel: Size) -> Tensor:
        """A tensor that stays in float32 whatever the compute dtype."""
        return Tensor(name, numel, 4, "float32")

    def hidden(self, name: str, width: Size) -> Tensor:
        """A tensor made by a matrix product, with its tokens shared under sequence parallelism."""
        return self.tensor(name, self.local_tokens * width)

    def residual(self, name: str, width: Size) -> Tensor:
        """A tensor of the residual stream: float32 under autocast, its tokens shared with sequence parallelism."""
        return Tensor(name, self.local_tokens * width, self.residual_itemsize)

    def compute_copy(self, x: Tensor, name: str, *, moved: bool = False) -> Tensor:
        """The copy of `x` in the compute dtype that the product `name` makes; compiled ones share it.

        moved: its bytes are counted as read and written once, forward and back
        """
        copy = self.tensor(f"{x.name}.cast" if self.kernels.compiled else f"{name}.cast", x.numel)
        if self.kernels.compiled and any(operation.name == copy.name for operation in self.operations):
            return copy
        both = x.nbytes + copy.nbytes
        return self.elementwise(copy.name, (x,), copy, moves=(both, both) if moved else None)

    def quantised(self, x: Tensor) -> Tensor:
        """The copy of `x` in 8 or 4 bits that the products reading it keep together, scales included."""
        assert self.low is not None
        copy = Tensor(f"{x.name}.quantised", x.numel, self.low.element, "quantised")
        if all(operation.name != copy.name for operation in self.operations):
            self.operations.append(Operation(copy.name, "quantise", (x,), (copy,)))
        return copy

    def hold(self, argument: Tensor) -> None:
        """Let a module's argument live until it returns, as transformers' layers have a name for it."""
        if self.kernels.written_mask:
            last = self.operations[-1]
            self.operations[-1] = msgspec.structs.replace(last, holds=(*last.holds, argument))

    # -- operations ---------------------------------------------------------------------------------------------------

    def elementwise(
        self,
        name: str,
        inputs: tuple[Tensor, ...],
        output: Tensor,
        keeps: tuple[Tensor, ...] = (),
        shares_gradient: bool = False,
        backward_workspace: Size = 0,
        kind: OperationKind = "elementwise",
        holds: tuple[Tensor, ...] = (),
        moves: tuple[Size, Size] | None = None,
    ) -> Tensor:
        """An operation on each element: bound by memory, no FLOPs counted (as the papers and PyTorch's counter do)."""
        self.operations.append(
            Operation(
                name,
                kind,
                inputs,
                (output,),
                keeps=keeps,
                shares_gradient=shares_gradient,
                backward_workspace=backward_workspace,
                holds=holds,
                moves=moves,
            )
        )
        return output

    def cast(self, name: str, x: Tensor, itemsize: Size, holds: tuple[Tensor, ...] = ()) -> Tensor:
        """A copy in another dtype; its gradient is cast back."""
        output = Tensor(name, x.numel, itemsize)
        both = x.nbytes + output.nbytes
        return self.elementwise(name, (x,), output, holds=holds, moves=(both, both))

    def add(self, name: str, first: Tensor, second: Tensor) -> Tensor:
        """A residual sum; keeps nothing. Under autocast it is as wide as the wider of the two."""
        lora = self.view.lora
        autocast = self.autocast or (lora is not None and lora.casts)
        itemsize = maximum(first.itemsize, second.itemsize) if autocast else self.residual_itemsize
        output = Tensor(name, first.numel, maximum(itemsize, self.residual_itemsize))
        return self.elementwise(name, (first, second), output, shares_gradient=True)

    def dropout(self, name: str, x: Tensor, probability: float, kind: OperationKind = "elementwise") -> Tensor:
        """Dropout; keeps its mask. Left out at probability 0, as PyTorch does."""
        if not probability:
            return x
        output = Tensor(name, x.numel, x.itemsize)
        return self.elementwise(name, (x,), output, keeps=(self.mask(f"{name}.mask", x.numel),), kind=kind)
