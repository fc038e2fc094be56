"""`Operation`, and the tensors, weights and collectives that operations use.

An `Operation` states its shapes once; parameters, FLOPs, bytes kept for backward, bytes moved through HBM and traffic
are sums over a list of operations. All sizes are per rank and per micro-batch, and may be ints, arrays or symbols
(`loadgauge.core.base.algebra`). A tensor's name is its identity within one layer: one that two operations keep is kept once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

import msgspec

from loadgauge.core.base.algebra import Size, spread
from loadgauge.core.layers.operations.profile import Profile

Answer = TypeVar("Answer")
KEPT = 64
"""Answers that each layer keeps (`Layer.once`)."""
PASSES = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
}
"""Number of times that the bytes of the full tensor travel around a ring (times (n-1)/n)."""

Role = Literal["activation", "quantised", "float32", "statistic", "mask", "index"]
"""Use of a tensor, which decides its item size; `quantised`: a copy in 8 or 4 bits for the matrix products."""

LYING = "entry.inputs", "entry.buffers", "entry.held", "entry.rows"
"""Operations of captured layers that only stand for what lies there in the whole step, that of the optimizer too; the last, for
rows of sparse gradients, from the backward that makes them on (`backward_workspace`)."""
PIXELS, TYPED = "pixels", "pixels.typed"
"""The operations that stand for pictures and sounds, which the loop that trains holds, and for a copy that the model does while its
tower runs."""

OperationKind = Literal[
    "gemm", "router", "attention", "convolution", "scan", "solve", "norm", "elementwise", "residual_dropout", "lookup",
    "loss", "collective", "view", "quantise",
]  # fmt: skip
"""Kind of an operation, as far as its time or memory depends on it.

`router`: the product that scores the experts; `residual_dropout`: the dropout of what is added to the residual stream,
which some frameworks run in one kernel with the sum; `view`: moves nothing; `quantise`: makes the 8-bit or 4-bit copy
that matrix products read, whose gradient goes to the original.
"""


class Tensor(msgspec.Struct, frozen=True):
    """One rank's share of a tensor: `numel` elements of `itemsize` bytes; `dtype` is its role."""

    name: str
    numel: Size
    itemsize: Size
    dtype: Role = "activation"

    @property
    def nbytes(self) -> Size:
        """Size of the whole tensor [bytes]. ``Tensor("x", 10, 2).nbytes == 20``"""
        return self.numel * self.itemsize


class Weight(msgspec.Struct, frozen=True):
    """A parameter tensor's share on one rank, `numel` elements; `shards` ranks together hold one whole.

    `kind` is matrix, vector, table (an embedding) or head (the matrix of the logits). `base` is true for a matrix that
    LoRA freezes and QLoRA quantises, `trainable` says whether it gets a gradient.
    """

    name: str
    numel: Size
    shards: Size = 1
    kind: str = "matrix"
    trainable: bool = True
    base: bool = False
    expert: bool = False
    """Of a routed expert: sharded over the expert-parallel ranks, and replicated over fewer data-parallel ones."""
    quantised: bool = False
    """Read in 8 or 4 bits by a recipe that has such products."""
    cast: bool = True
    """Autocast reads a 16-bit copy of it where it is a matrix."""
    shape: tuple[Size, Size] | None = None
    """Rows and columns of a matrix or table, which some optimizers' states depend on; None: of one dimension."""
    copies: Size = 1
    """Matrices of this shape (experts) in the tensor."""
    wide: bool = False
    """Held in float32, with its gradient and moments, whatever the recipe."""
    unread: bool = False
    """Trainable, but nothing reads it: it has no gradient, and no state in an optimizer."""
    rows: bool = False
    """A table whose gradient is the rows that were looked up: it is not `trainable` as others are, and has its state."""


class Gemm(msgspec.Struct, frozen=True):
    """`batch` products of an (m, k) by a (k, n) matrix; a multiply-add is 2 FLOPs.

    >>> Gemm(m=1, k=3, n=2).flops
    12
    """

    m: Size
    n: Size
    k: Size
    batch: Size = 1

    @property
    def flops(self) -> Size:
        """FLOPs of all products, 2 m n k each [FLOP]."""
        return 2 * self.m * self.n * self.k * self.batch


class Collective(msgspec.Struct, frozen=True):
    """One collective over the `ranks` of an axis; `nbytes` is the full (gathered) tensor.

    `copies`: how many of an all-to-all's rows are copies of one token, where a domain is sent only one of them; `rows`: how many
    rows there are, where each takes time of its own; `groups`: of experts, and to how many of them a token may go.

    >>> Collective("all_reduce", "tp", 1024, 8).wire
    1792
    """

    kind: str
    axis: str
    nbytes: Size
    ranks: Size
    copies: Size = 1
    rows: Size = 0
    groups: tuple[int, int] = (1, 1)

    @property
    def wire(self) -> Size:
        """Bytes one rank sends around a ring: 2(n-1)/n of the tensor for all-reduce, (n-1)/n for the others."""
        return PASSES[self.kind] * (self.ranks - 1) * spread(self.nbytes, self.ranks)


class Operation(msgspec.Struct, frozen=True):
    """One operation of a layer.

    `keeps`: the tensors it holds from forward to backward; `holds`: those that live until its forward is done without
    being read (variables of the Python function around it). Of the FLOPs, `input_gradient_flops` and
    `weight_gradient_flops` are the two halves of backward; `rerun_flops` is what a fused kernel computes again inside
    its own backward (FlashAttention's scores), hardware work that model FLOPs do not count. `workspace` is bytes alive
    only inside the operation, such as the gathered input of a sequence-parallel linear; `backward_workspace` is bytes
    alive inside its backward beside the gradients of its inputs, when that of its output is dropped already.
    `shares_gradient` marks a sum or a view: the gradient of its output is handed to its inputs without a copy.
    `overwrites` marks one whose input's gradient is written over what it kept (a fused loss, over the logits).
    `borrows`: weights it reads that another operation owns (a tied table).
    `computed_share`: of the FLOPs, which count every query-key pair, what a causal kernel carries out.
    `spares`: inputs that need no gradient, as nothing before them is trained; `gradients`: whether any of its outputs needs
    one, so that it runs backward at all.
    `moves`: bytes that its kernels read and write forward and backward, where each of them is known (a cast, a copy); None:
    what goes in and out is counted, and what a calibration found that such operations move beside it.
    `read_again`: a product of 8 or 4 bits whose input another one has quantised before it.
    `again_comm`: what it exchanges when it runs again alone.
    `calls`: how often it runs, where its tensors are those of one time: of experts one after another, once for each.
    `implicit`: the product that a convolution is, of which no tensor holds the larger matrix, or one turn of a recurrence, of
    which `turns` wait for one another; `strided`: its channels do not lie together in memory, as those of `channels_last` do;
    `taps`: places of its filter, below 0 of a transposed one; `steps`: whether it moves on by more than one place.
    """

    name: str
    kind: OperationKind
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: tuple[Weight, ...] = ()
    keeps: tuple[Tensor, ...] = ()
    holds: tuple[Tensor, ...] = ()
    gemms: tuple[Gemm, ...] = ()
    forward_flops: Size = 0
    input_gradient_flops: Size = 0
    weight_gradient_flops: Size = 0
    rerun_flops: Size = 0
    forward_comm: tuple[Collective, ...] = ()
    backward_comm: tuple[Collective, ...] = ()
    again_comm: tuple[Collective, ...] = ()
    workspace: Size = 0
    backward_workspace: Size = 0
    shares_gradient: bool = False
    overwrites: bool = False
    borrows: tuple[Weight, ...] = ()
    computed_share: Size = 1
    moves: tuple[Size, Size] | None = None
    spares: frozenset[str] = frozenset()
    gradients: bool = True
    read_again: bool = False
    implicit: Gemm | None = None
    strided: bool = False
    taps: int = 1
    steps: bool = False
    turns: Size = 0
    calls: Size = 1

    def sent(self, direction: str) -> tuple[Collective, ...]:
        """Return what it exchanges: forward, backward, or when it runs again."""
        forward = self.forward_comm + (self.again_comm if direction == "again" else ())
        return self.backward_comm if direction == "backward" else forward

    @property
    def params(self) -> Size:
        """Parameters of this operation on this rank."""
        return sum(weight.numel for weight in self.weights)

    @property
    def backward_flops(self) -> Size:
        """FLOPs of the gradients of inputs and weights, without what a fused kernel computes again [FLOP]."""
        return self.input_gradient_flops + self.weight_gradient_flops

    @property
    def into_inputs(self) -> bool:
        """Return whether its backward makes a gradient of an input."""
        return not self.spares or any(tensor.name not in self.spares for tensor in self.inputs)

    @property
    def trains_matrix(self) -> bool:
        """Return whether its backward makes the gradient of a matrix, which zero-bubble schedules put off."""
        read = (*self.weights, *self.borrows)
        return any(weight.trainable and weight.kind in ("matrix", "head") for weight in read)

    def hbm_bytes(self, weight_itemsize: Size = 2) -> Size:
        """Bytes read and written by the forward: each input and weight once, each output once.

        A view moves none, and a quantised copy is counted with the products that read it.
        """
        if self.kind in ("view", "quantise"):
            return 0
        moved = sum(tensor.nbytes for tensor in (*self.inputs, *self.outputs))
        return moved + weight_itemsize * (self.params + sum(weight.numel for weight in self.borrows))


class Recompute(msgspec.Struct, frozen=True):
    """Operations of a layer that run again in backward.

    `checkpointed`: a region under `torch.utils.checkpoint`: what is made inside is dropped, except what an operation
    outside the region keeps. `discarded`: outputs that are dropped for everyone and made again before they are needed
    (Megatron's CheckpointWithoutOutput, PyTorch's selective checkpointing).
    """

    checkpointed: frozenset[str] = frozenset()
    discarded: frozenset[str] = frozenset()

    def __contains__(self, name: str) -> bool:
        return name in self.checkpointed or name in self.discarded

    def __bool__(self) -> bool:
        return bool(self.checkpointed or self.discarded)

    def rerun(self, layer: Layer, *, part: bool = False) -> Recompute:
        """Return the operations of a layer that run again: all of it, or of a checkpointed region the part that backward asks for.

        part: it stops at the last tensor that backward needs, before the product that only reads it
        """
        if not part or not self.checkpointed:
            return self
        needed: frozenset[str] = frozenset()
        for index, operation in reversed(tuple(enumerate(layer))):
            available = {tensor.name for tensor in operation.inputs}
            inside = operation.name in self.checkpointed and operation.keeps
            if inside:
                own = any(tensor.name not in available for tensor in operation.keeps)
                needed = frozenset(earlier.name for earlier in layer.operations[: index + own])
                break
        return Recompute(self.checkpointed & needed, self.discarded)


NOTHING = Recompute()


class Layer(msgspec.Struct, frozen=True, dict=True):
    """A list of operations, in forward order, and the sums over it."""

    name: str
    operations: tuple[Operation, ...]
    profile: Profile | None = None
    """Live tensors as recorded while its code ran; None: they follow from the operations (`estimate.memory.liveness`)."""

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def once(self, of: Callable[..., Answer], *how: Any, **more: Any) -> Answer:
        """Return a function of the layer and of how it is asked, worked out once for each: neither ever changes.

        The last `KEPT` answers stay, as long as the layer does. Whole numbers and floats are different questions.
        """
        answers = self.__dict__.setdefault("answers", {})
        key = of, how, tuple(map(type, how)), *more.items()
        if key not in answers:
            if len(answers) == KEPT:
                del answers[next(iter(answers))]
            answers[key] = of(self, *how, **more)
        answer: Answer = answers[key]
        return answer

    @property
    def names(self) -> frozenset[str]:
        """The names of all operations, in forward order."""
        return frozenset(operation.name for operation in self.operations)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All weights, in forward order."""
        return tuple(weight for operation in self.operations for weight in operation.weights)

    @property
    def params(self) -> Size:
        """Parameters of the layer on one rank."""
        return sum(weight.numel for weight in self.weights)

    @property
    def forward_flops(self) -> Size:
        """FLOPs of one forward of one micro-batch on one rank [FLOP]."""
        return sum(operation.forward_flops for operation in self.operations)

    @property
    def backward_flops(self) -> Size:
        """Model FLOPs of one backward of one micro-batch on one rank, without recomputation [FLOP]."""
        return sum(operation.backward_flops for operation in self.operations)

    def recompute_flops(self, recompute: Recompute = NOTHING) -> Size:
        """Hardware FLOPs beyond the model's: operations run again, and what fused kernels compute again themselves."""
        return sum(
            operation.rerun_flops + (operation.forward_flops if operation.name in recompute else 0)
            for operation in self.operations
        )

    def kept(self, recompute: Recompute = NOTHING) -> tuple[Tensor, ...]:
        """The tensors held from forward to backward, each once.

        A tensor is needed when an operation keeps it, or when an operation that runs again reads it. It is dropped when
        its maker runs again, unless the maker is only checkpointed and an operation outside the region keeps it.
        """
        if not recompute:
            return tuple({tensor.name: tensor for operation in self.operations for tensor in operation.keeps}.values())
        needed: dict[str, Tensor] = {}
        elsewhere = frozenset() if self.profile is None else self.profile.outside
        outside: set[str] = set()
        maker: dict[str, str] = {}
        for operation in self.operations:
            again = operation.name in recompute
            inputs = {tensor.name for tensor in operation.inputs}
            for tensor in operation.outputs:
                maker[tensor.name] = operation.name
            for tensor in operation.keeps:
                needed[tensor.name] = tensor
                if tensor.name not in inputs:
                    maker.setdefault(tensor.name, operation.name)
                if not again:
                    outside.add(tensor.name)
            if again:
                needed.update((tensor.name, tensor) for tensor in operation.inputs)
        return tuple(
            tensor
            for name, tensor in needed.items()
            if ((made_by := maker.get(name)) is None and name not in elsewhere)
            or (made_by is not None and made_by not in recompute)
            or (made_by in recompute.checkpointed and made_by not in recompute.discarded and name in outside)
        )

    def keepers(self, name: str, recompute: Recompute = NOTHING) -> tuple[str, ...]:
        """The operations for which a tensor is held: those that keep it, and those that read it when they run again."""
        return tuple(
            operation.name + (" (runs again)" if operation.name in recompute else "")
            for operation in self.operations
            if any(kept.name == name for kept in operation.keeps)
            or (operation.name in recompute and any(read.name == name for read in operation.inputs))
        )

    def saved(self, recompute: Recompute = NOTHING) -> Size:
        """Bytes held from forward to backward by one micro-batch on one rank [bytes]."""
        return sum(tensor.nbytes for tensor in self.kept(recompute))

    @property
    def comm(self) -> Iterable[Collective]:
        """Every collective of one forward and one backward, without recomputation."""
        return (c for operation in self.operations for c in (*operation.forward_comm, *operation.backward_comm))

    @property
    def wire(self) -> Size:
        """Bytes one rank sends for one forward and one backward of a micro-batch, without recomputation [bytes]."""
        return sum(collective.wire for collective in self.comm)
