"""Writes down a list of operations: the linear layers, norms, dropouts and sums that every block is made of.

Legend: T tokens, i and o the width of a matrix's input and output, t tensor-parallel ranks, r ranks that share the
tokens outside the matrix products (t with sequence parallelism, else 1).
"""

from __future__ import annotations

import msgspec

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.model.kernels import written_norm_bytes
from loadgauge.core.definitions.model.lora import MIXERS
from loadgauge.core.definitions.model.model import Norm
from loadgauge.core.layers.adapters.adapters import (
    JOINT,
    AdapterShape,
    adapted,
    as_stored,
    fused_adapter,
    passed_by,
    peft_adapted,
    quantised_result,
    saved_copy,
)
from loadgauge.core.layers.adapters.tuners import after, before
from loadgauge.core.layers.operations.gradients import with_gradients
from loadgauge.core.layers.operations.operations import (
    Collective,
    Gemm,
    Layer,
    Operation,
    OperationKind,
    Tensor,
    Weight,
)
from loadgauge.core.layers.operations.writer import Writer


class Builder(Writer):
    """A writer that knows linear layers, norms and what stands around tensor-parallel regions."""

    def layer(self, name: str, *, reached: bool = True) -> Layer:
        """The operations written so far, as a `Layer`; reached: whether what goes in needs a gradient."""
        operations = as_stored(self.view.lora, self.operations)
        if reached and self.trained is None:
            return Layer(name, operations)
        return Layer(name, with_gradients(operations, reached=reached, autocast=self.autocast))

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
        trained = self.trains(name)
        weights = [Weight(f"{name}.weight", size, shards, "vector", trained)] if spec.weight else []
        if spec.bias:
            weights.append(Weight(f"{name}.bias", size, shards, "vector", trained))
        lora = self.view.lora
        # Layer norms are on autocast's list of what runs in float32, the written-out ones of some models are not.
        autocast = self.autocast or (lora is not None and lora.casts)
        widened = autocast and spec.kind == "layernorm" and spec.arithmetic != "written" and x.itemsize != 4
        # A float32 gain makes a float32 result of a 16-bit row.
        wide = self.wide_weights and self.residual_itemsize == self.dtypes.activation
        of_gain = (wide or (lora is not None and lora.upcast != "none")) and spec.weight
        output = Tensor(name, rows * width, 4 if widened or of_gain else x.itemsize)
        statistic = self.dtypes.norm_statistic
        keeps: list[Tensor]
        workspace: Size = 0
        moves = self.norm_moves(x, output, gain=bool(weights), trained=trained)
        written = spec.arithmetic == "written" and self.kernels.norm == "upcast"
        if spec.kind.startswith("layernorm") and not written:
            moves = None
            upcast = widened or (spec.arithmetic == "float32" and self.kernels.norm == "upcast" and x.itemsize != 4)
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
            if spec.root_kept:
                keeps.append(Tensor(f"{name}.variance", rows, 4, "statistic"))
            if spec.weight and (spec.kind == "rmsnorm_plus_one" or ((written or spec.gain_copied) and copied)):
                keeps.append(self.float32(f"{name}.gain", size))
            if trained and spec.weight:
                wide = spec.kind == "rmsnorm_plus_one" or written or spec.gain_float32
                keeps.append(Tensor(f"{name}.normalised", x.numel, 4 if wide else x.itemsize))
            # In the backward of the square five float32 tensors are alive beside the copy; the input's gradient and the
            # normalised value, which the walk counts, are not among them.
            workspace = 20 * x.numel - x.nbytes - sum(t.nbytes for t in keeps if t.name.endswith(".normalised"))
        self.operations.append(
            Operation(
                name, "norm", (x,), (output,), weights=tuple(weights), keeps=tuple(keeps), backward_workspace=workspace,
                moves=moves,
            ),
        )  # fmt: skip
        return output

    def norm_moves(
        self, x: Tensor, output: Tensor, *, gain: bool = True, trained: bool = True
    ) -> tuple[Size, Size] | None:
        """The bytes of the kernels of a norm that is written out, forward and backward; None where one kernel makes it."""
        if self.kernels.norm_kernel != "written":
            return None
        forward, backward = written_norm_bytes(x.itemsize, output.itemsize, gain=gain, trained=trained)
        return forward * x.numel, backward * x.numel

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
        around: tuple[Tensor, ...] = (),
        called: bool = True,
    ) -> Tensor:
        """y[rows, o] = x[rows, i] w[i, o] (+ bias): 2 rows i o FLOPs forward, as much for each gradient.

        Keeps `kept_input` (x itself unless a shard stands for it) when the weight is trainable, and only then.
        `adapter` names it among the LoRA targets. `weight=False`: the matrix is another operation's (tied embeddings).
        `exact`: no recipe of 8 or 4 bits applies to it; `held`: its input is kept in 16 bits by another operation;
        `operation`: the kind of operation that it is; `around`: what the module that calls it holds meanwhile;
        `called`: its module is, so that PEFT's adapter runs: a kernel that reads the matrix itself passes it by.
        """
        lora, low = self.view.lora, None if exact else self.low
        adapter = name if name.partition(".")[0] in MIXERS else adapter
        base = (
            lora is not None and not lora.experts_only and called and (bool(adapter) or (lora.joint and kind == "head"))
        )
        trained = self.trains(name)
        matrix = Weight(
            f"{name}.weight",
            i * o,
            shards,
            kind,
            trained,
            base=base,
            quantised=low is not None,
            shape=(o, i),
        )
        weights = [matrix] if weight else []
        if bias:
            of_bias = shards if bias_shards is None else bias_shards
            weights.append(Weight(f"{name}.bias", o, of_bias, "vector", trained))
        out = output or self.tensor(name, rows * o)
        tuned = lora is not None and lora.method != "lora" and adapter in lora.targets
        shape = AdapterShape(rows, i, o, shards, bias)
        if tuned and called:
            x = before(self, name, adapter, x, shape)
        kept, adapter_input = kept_input or x, x
        peft = lora is not None and lora.peft
        if (self.autocast or peft) and x.itemsize != self.dtypes.activation:
            # Autocast caches its 16-bit copies of weights, not of activations: each product makes and keeps its own.
            x = kept = self.compute_copy(x, name, moved=peft)
        gemm, read_again = Gemm(rows, o, i), False
        keeps = (kept,) if trained else ()
        saved = saved_copy(lora, kind, weights[0] if weight else matrix)
        if saved:
            matrix = msgspec.structs.replace(matrix, cast=False)  # its copy is read instead
            weights = [matrix, *weights[1:]] if weight else weights
        if lora is not None and kind == "head" and (lora.upcast == "all" or saved):
            keeps = (kept,) if saved else ()
            if lora.upcast == "all" and self.dtypes.activation != 4:
                # Autocast copies the float32 matrix for the product, and its backward reads the copy.
                keeps = (*keeps, self.tensor(f"{name}.weight.cast", i * o))
        if lora is not None and base and lora.stored is not None and lora.stored.keeps_input:
            keeps = (adapter_input,)
        elif lora is not None and base and lora.keeps_inputs:
            keeps = (*keeps, x)
        if low is not None:
            copied = low.keeps and not (held and low.shares)
            if trained and copied:
                keeps = (self.quantised(kept),)
            elif low.keeps:
                # Modules that share an input are one product to Transformer Engine, which quantises it once.
                read_again = any(
                    earlier.inputs
                    and earlier.inputs[0].name == x.name
                    and any(each.quantised for each in earlier.weights)
                    for earlier in self.operations
                )
            # Of a row-parallel matrix, `leave` counts the gathered gradient.
            if not (forward_comm and self.view.sequence_parallel):
                workspace = workspace + low.inside(rows * i, rows * o, i * o, trained=trained, kept=copied)
        four = base and lora is not None and lora.stored is not None
        inputs: tuple[Tensor, ...] = (x,)
        again: Size = 0
        fused = lora is not None and lora.fuses(adapter)
        if four and fused:
            # Forward uses the buffer that all of them share, backward for all but the last matrix another one.
            again = 0 if adapter == "down" else self.dtypes.activation * i * o
        elif four:
            # Made in 16 bits for as long as the product takes, forward and backward.
            workspace = workspace + self.dtypes.activation * i * o
        if fused:
            inputs = (x, fused_adapter(self, name, x, shape, adapter))
        self.operations.append(
            Operation(
                name,
                operation,
                inputs,
                (out,),
                (*weights, *saved),
                keeps=keeps,
                gemms=(gemm,),
                forward_flops=gemm.flops,
                input_gradient_flops=gemm.flops,
                weight_gradient_flops=gemm.flops if trained or saved else 0,
                forward_comm=forward_comm,
                backward_comm=backward_comm,
                workspace=workspace,
                backward_workspace=again,
                borrows=() if weight else (matrix,),
                holds=around,
                read_again=read_again,
            )
        )
        if lora is None:
            return out
        if fused:
            return out
        if four and peft:
            out = quantised_result(self, name, out, adapter_input, x, copied=adapter in lora.targets)
        if (adapter or kind) not in lora.targets:
            return out
        if lora.joint and adapter in JOINT:
            return out  # all of them at once: `joint_adapted`
        written = len(self.operations)
        if tuned and not called:
            before(self, name, adapter, x, shape)
        if tuned:
            both = after(self, name, adapter, adapter_input, out, shape, around)
        elif peft:
            both = peft_adapted(self, name, adapter_input, out, shape, around)
        else:
            return adapted(self, name, x, kept, out, shape)
        if called:
            return both
        passed_by(self, name, written)
        return out

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
                name,
                "collective",
                (x,),
                (gathered,),
                forward_comm=(gather,),
                backward_comm=(*again, Collective("reduce_scatter", "tp", full, view.tp)),
            )
        )
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
