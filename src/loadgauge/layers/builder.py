"""Writes down a list of operations: the linear layers, norms, dropouts and sums that every block is made of.

Legend: T tokens, i and o the width of a matrix's input and output, t tensor-parallel ranks, r ranks that share the
tokens outside the matrix products (t with sequence parallelism, else 1).
"""

from __future__ import annotations

from loadgauge.algebra import Size, shard
from loadgauge.layers.operations import Collective, Gemm, Layer, Operation, OperationKind, Tensor, Weight
from loadgauge.layers.rank_view import View
from loadgauge.spec.kernels import LowPrecision
from loadgauge.spec.model import Norm


class Builder:
    """Collects operations; each method adds some and returns the tensor they make."""

    def __init__(self, view: View, low: LowPrecision | None = None) -> None:
        self.view = view
        self.low = low
        """The recipe of the matrix products, where these are the operations of a block."""
        self.kernels = view.kernels
        self.dtypes = view.kernels.dtypes
        self.residual_itemsize = self.dtypes.activation if self.dtypes.residual is None else self.dtypes.residual
        self.trainable = view.lora is None
        """Whether the model's own weights get gradients."""
        self.autocast = self.dtypes.residual is not None
        self.operations: list[Operation] = []
        self.local_tokens = shard(view.tokens, view.token_shards, "tokens of a micro-batch")

    def layer(self, name: str) -> Layer:
        """The operations written so far, as a `Layer`."""
        return Layer(name, tuple(self.operations))

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

    def quantised(self, x: Tensor) -> Tensor:
        """The copy of `x` in 8 or 4 bits that the products reading it keep together, scales included."""
        assert self.low is not None
        copy = Tensor(f"{x.name}.quantised", x.numel, self.low.element, "quantised")
        if all(operation.name != copy.name for operation in self.operations):
            self.operations.append(Operation(copy.name, "quantise", (x,), (copy,)))
        return copy

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
    ) -> Tensor:
        """An operation on each element: bound by memory, no FLOPs counted (as the papers and PyTorch's counter do)."""
        self.operations.append(
            Operation(
                name, kind, inputs, (output,), keeps=keeps, shares_gradient=shares_gradient,
                backward_workspace=backward_workspace,
            )
        )  # fmt: skip
        return output

    def add(self, name: str, first: Tensor, second: Tensor) -> Tensor:
        """A residual sum; keeps nothing."""
        output = Tensor(name, first.numel, self.residual_itemsize)
        return self.elementwise(name, (first, second), output, shares_gradient=True)

    def dropout(self, name: str, x: Tensor, probability: float, kind: OperationKind = "elementwise") -> Tensor:
        """Dropout; keeps its mask. Left out at probability 0, as PyTorch does."""
        if not probability:
            return x
        output = Tensor(name, x.numel, x.itemsize)
        return self.elementwise(name, (x,), output, keeps=(self.mask(f"{name}.mask", x.numel),), kind=kind)

    def norm(
        self,
        name: str,
        x: Tensor,
        spec: Norm,
        rows: Size,
        width: Size,
        *,
        gain: Size | None = None,
        shards: Size = 1,
        kept_input: Tensor | None = None,
    ) -> Tensor:
        """A norm over rows of `width`. What it keeps depends on the kernel (`Kernels.norm`).

        `gain`: elements of its gain, where rows differ in theirs; `shards`: ranks that hold parts of the gain;
        `kept_input`: what is held of `x`, where that is a view of something larger.
        """
        held = kept_input or x
        size = width if gain is None else gain
        weights = [Weight(f"{name}.weight", size, shards, "vector", self.trainable)] if spec.weight else []
        if spec.bias:
            weights.append(Weight(f"{name}.bias", size, shards, "vector", self.trainable))
        output = Tensor(name, rows * width, x.itemsize)
        statistic = self.dtypes.norm_statistic
        keeps: list[Tensor]
        workspace: Size = 0
        written = spec.arithmetic == "written" and self.kernels.norm == "upcast"
        if spec.kind.startswith("layernorm") and not written:
            upcast = spec.arithmetic == "float32" and self.kernels.norm == "upcast" and x.itemsize != 4
            keeps = [self.float32(f"{name}.float32", x.numel) if upcast else held]
            keeps += [Tensor(f"{name}.{each}", rows, statistic, "statistic") for each in ("mean", "rstd")]
            if spec.kind == "layernorm_plus_one":
                keeps.append(Tensor(f"{name}.gain", size, x.itemsize))
        elif self.kernels.norm == "fused":
            keeps = [held, Tensor(f"{name}.rstd", rows, statistic, "statistic")]
        else:
            # The module's own arithmetic is in float32; in float32 training the upcast is no copy.
            copied = x.itemsize != 4
            keeps = [self.float32(f"{name}.float32", x.numel) if copied else held]
            if written:
                # What is left of the mean is computed twice: for the square, and to be divided by its root.
                keeps = [self.float32(f"{name}.{each}", x.numel) for each in ("centred", "divided")]
            keeps.append(Tensor(f"{name}.rstd", rows, 4, "statistic"))
            if spec.kind == "rmsnorm_plus_one" or ((written or spec.gain_copied) and copied):
                keeps.append(self.float32(f"{name}.gain", size))
            if self.trainable and spec.weight:
                wide = spec.kind == "rmsnorm_plus_one" or written or spec.gain_float32
                keeps.append(Tensor(f"{name}.normalised", x.numel, 4 if wide else x.itemsize))
            # In the backward of the square five float32 tensors are alive beside the copy; the input's gradient and the
            # normalised value, which the walk counts, are not among them.
            workspace = 20 * x.numel - x.nbytes - sum(t.nbytes for t in keeps if t.name.endswith(".normalised"))
        self.operations.append(
            Operation(
                name, "norm", (x,), (output,), weights=tuple(weights), keeps=tuple(keeps), backward_workspace=workspace
            ),
        )
        return output

    def linear(
        self,
        name: str,
        x: Tensor,
        rows: Size,
        i: Size,
        o: Size,
        *,
        bias: bool = False,
        output: Tensor | None = None,
        kept_input: Tensor | None = None,
        shards: Size = 1,
        bias_shards: Size | None = None,
        forward_comm: tuple[Collective, ...] = (),
        backward_comm: tuple[Collective, ...] = (),
        workspace: Size = 0,
        adapter: str = "",
        kind: str = "matrix",
        weight: bool = True,
        exact: bool = False,
        held: bool = False,
        operation: OperationKind = "gemm",
    ) -> Tensor:
        """y[rows, o] = x[rows, i] w[i, o] (+ bias): 2 rows i o FLOPs forward, as much for each gradient.

        Keeps `kept_input` (x itself unless a shard stands for it) when the weight is trainable, and only then.
        `adapter` names it among the LoRA targets. `weight=False`: the matrix is another operation's (tied embeddings).
        `exact`: no recipe of 8 or 4 bits applies to it; `held`: its input is kept in 16 bits by another operation;
        `operation`: the kind of operation that it is.
        """
        lora, low = self.view.lora, None if exact else self.low
        base = bool(adapter) and lora is not None and not lora.experts_only
        matrix = Weight(
            f"{name}.weight", i * o, shards, kind, self.trainable,
            base=base, quantised=low is not None, factored=i + o,
        )  # fmt: skip
        weights = [matrix] if weight else []
        if bias:
            of_bias = shards if bias_shards is None else bias_shards
            weights.append(Weight(f"{name}.bias", o, of_bias, "vector", self.trainable))
        out = output or self.tensor(name, rows * o)
        kept = kept_input or x
        if self.autocast and x.itemsize != self.dtypes.activation:
            # Autocast caches its 16-bit copies of weights, not of activations: each product makes and keeps its own.
            x = kept = self.elementwise(f"{name}.cast", (x,), self.tensor(f"{name}.cast", x.numel))
        gemm = Gemm(rows, o, i)
        keeps = (kept,) if self.trainable else ()
        if low is not None:
            copied = low.keeps and not (held and low.shares)
            if self.trainable and copied:
                keeps = (self.quantised(kept),)
            # Of a row-parallel matrix, `leave` counts the gathered gradient.
            if not (forward_comm and self.view.sequence_parallel):
                workspace = workspace + low.inside(rows * i, rows * o, i * o, trained=self.trainable, kept=copied)
        if base and lora is not None and lora.stored is not None:
            # Made in 16 bits for as long as the product takes, forward and backward.
            workspace = workspace + self.dtypes.activation * i * o
        self.operations.append(
            Operation(
                name, operation, (x,), (out,), tuple(weights),
                keeps=keeps,
                gemms=(gemm,),
                forward_flops=gemm.flops,
                input_gradient_flops=gemm.flops,
                weight_gradient_flops=gemm.flops if self.trainable else 0,
                forward_comm=forward_comm, backward_comm=backward_comm, workspace=workspace,
                borrows=() if weight else (matrix,),
            )
        )  # fmt: skip
        if lora is not None and adapter in lora.targets:
            return self._adapter(name, x, kept, out, rows, i, o, shards)
        return out

    def _adapter(
        self, name: str, x: Tensor, kept: Tensor, base: Tensor, rows: Size, i: Size, o: Size, shards: Size
    ) -> Tensor:
        """The two low-rank products beside a frozen linear layer, and their sum with it."""
        lora = self.view.lora
        assert lora is not None
        rank = lora.rank
        source = x
        if lora.dropout:
            source = self.dropout(f"{name}.lora_dropout", x, lora.dropout)
            kept = source
        low = self.tensor(f"{name}.lora_a", rows * rank)
        high = self.tensor(f"{name}.lora_b", rows * o)
        # Of the two, the one on the sharded side of the base is sharded with it.
        column = base.numel is not None and name.rsplit(".", 1)[-1] not in ("output", "down")
        for part, inputs, output, keeps, gemm, split in (
            ("lora_a", source, low, kept, Gemm(rows, rank, i), 1 if column else shards),
            ("lora_b", low, high, low, Gemm(rows, o, rank), shards if column else 1),
        ):
            self.operations.append(
                Operation(
                    f"{name}.{part}", "gemm", (inputs,), (output,),
                    (Weight(f"{name}.{part}.weight", gemm.n * gemm.k, split),),
                    keeps=(keeps,), gemms=(gemm,), forward_flops=gemm.flops,
                    input_gradient_flops=gemm.flops, weight_gradient_flops=gemm.flops,
                )
            )  # fmt: skip
        total = self.tensor(f"{name}.adapted", base.numel)
        return self.elementwise(f"{name}.adapted", (base, high), total, shares_gradient=True)

    # -- tensor parallelism: Megatron's f and g (source: korthikanti2022, section 4.2) ---------------------------------

    def enter(self, name: str, x: Tensor, width: Size) -> tuple[Tensor, Tensor, tuple[Collective, ...], Size]:
        """Into a column-parallel region: (its input, what stands for it in backward, backward traffic, workspace).

        With sequence parallelism the tokens are gathered here, and gathered again in backward unless the gathered copy
        is kept; without it, the input's gradient is summed over the ranks in backward.
        """
        view = self.view
        full = self.dtypes.activation * view.tokens * width
        if not view.sequence_parallel:
            return x, x, (Collective("all_reduce", "tp", full, view.tp),), 0
        gathered = self.tensor(name, view.tokens * width)
        narrow = self.gathered_itemsize * view.tokens * width
        gather = Collective("all_gather", "tp", narrow, view.tp)
        again = () if self.kernels.keep_gathered else (gather,)
        self.operations.append(
            Operation(
                name, "collective", (x,), (gathered,),
                forward_comm=(gather,),
                backward_comm=(*again, Collective("reduce_scatter", "tp", full, view.tp)),
            )
        )  # fmt: skip
        if self.kernels.keep_gathered:
            return gathered, gathered, (), 0
        return gathered, x, (), narrow

    @property
    def gathered_itemsize(self) -> Size:
        """Bytes of an element on its way between tensor-parallel ranks that share tokens; sums are made in 16 bits."""
        return self.low.element if self.low is not None and self.low.keeps else self.dtypes.activation

    def leave(self, width: Size) -> tuple[tuple[Collective, ...], tuple[Collective, ...], Size]:
        """Out of a row-parallel matrix: (forward traffic, backward traffic, workspace of the unreduced result)."""
        view = self.view
        full = self.dtypes.activation * view.tokens * width
        if not view.sequence_parallel:
            return (Collective("all_reduce", "tp", full, view.tp),), (), 0
        return (
            (Collective("reduce_scatter", "tp", full, view.tp),),
            (Collective("all_gather", "tp", self.gathered_itemsize * view.tokens * width, view.tp),),
            full,
        )
