"""Backward operations where not all weights are trained, and what the reduced ones keep.

Autograd makes the gradient of a tensor only where something before it is trained. Below the lowest trained weight nothing is
kept and nothing runs backward; at it, an operation keeps what the gradient of its weight needs and not what that of its
input would (source: pytorch, `tools/autograd/derivatives.yaml` and the `requires_grad` of each saved tensor).
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from loadgauge.core.base.algebra import same
from loadgauge.core.layers.operations.operations import Operation, Tensor

NORMALISED = ".normalised"
"""End of the name of what the gradient of a norm's gain reads."""


def with_gradients(operations: Sequence[Operation], *, reached: bool, autocast: bool) -> tuple[Operation, ...]:
    """Return the operations of a layer as they run where some of their weights are frozen.

    reached: whether the layer's inputs need gradients; autocast: a frozen float32 matrix is cast for each product alone

    >>> from loadgauge.core.layers.operations.operations import Weight
    >>> x, y, z = (Tensor(name, 4, 2) for name in "xyz")
    >>> first = Operation("first", "gemm", (x,), (y,), (Weight("first.weight", 4, trainable=False),))
    >>> second = Operation("second", "gemm", (y,), (z,), (Weight("second.weight", 4),), keeps=(y,))
    >>> [(each.gradients, each.into_inputs) for each in with_gradients((first, second), reached=False, autocast=False)]
    [(False, False), (True, False)]
    """
    produced = {tensor.name for operation in operations for tensor in operation.outputs}
    needing: set[str] = set()
    result = []
    for operation in operations:
        spares = frozenset(
            tensor.name
            for tensor in operation.inputs
            if tensor.name not in needing and not (reached and tensor.name not in produced)
        )
        into = any(tensor.name not in spares and tensor.dtype != "index" for tensor in operation.inputs)
        own = (*operation.weights, *operation.borrows)
        # What is made of nothing is a copy of a weight, which is kept for the gradients of others.
        copies = not operation.inputs and not own and (reached or bool(needing))
        if into or copies or any(weight.trainable for weight in own):
            needing.update(tensor.name for tensor in operation.outputs)
            result.append(_with_less(operation, spares, into) if spares else operation)
        else:
            result.append(_forward_only(operation, spares, autocast))
    return tuple(result)


def _forward_only(operation: Operation, spares: frozenset[str], autocast: bool) -> Operation:
    """An operation with nothing trained before it or in it."""
    cast = [weight for weight in (*operation.weights, *operation.borrows) if weight.kind in ("matrix", "head")]
    copied = sum(2 * weight.numel for weight in cast if weight.cast) if autocast and operation.gemms else 0
    moves = operation.moves
    return msgspec.structs.replace(
        operation,
        weights=tuple(msgspec.structs.replace(weight, cast=False) for weight in operation.weights),
        keeps=(),
        input_gradient_flops=0,
        weight_gradient_flops=0,
        rerun_flops=0,
        backward_comm=(),
        workspace=operation.workspace + copied,
        backward_workspace=0,
        overwrites=False,
        moves=None if moves is None else (moves[0], 0),
        spares=spares,
        gradients=False,
    )


def _with_less(operation: Operation, spares: frozenset[str], into: bool) -> Operation:
    """An operation of which some inputs need no gradient."""
    keeps = operation.keeps
    if operation.kind == "norm" and not into:
        # Of the steps of a written-out norm, only the product with the gain runs backward.
        keeps = tuple(tensor for tensor in keeps if tensor.name.endswith(NORMALISED)) or keeps
    elif not into and operation.gemms and operation.inputs:
        # Copies of matrices are for the gradients of what they are multiplied with.
        copies = {f"{weight.name}.cast" for weight in (*operation.weights, *operation.borrows)}
        keeps = tuple(tensor for tensor in keeps if tensor.name not in copies)
    elif spared := spared_factor(operation, {tensor.name for tensor in operation.inputs} - spares):
        keeps = tuple(tensor for tensor in keeps if tensor.name not in spared)
    elif operation.kind == "elementwise" and len(operation.inputs) == 2 and not operation.weights:
        # Of a product, each factor is kept for the gradient of the other.
        both = {tensor.name for tensor in operation.inputs}
        if both <= {tensor.name for tensor in keeps}:
            keeps = tuple(tensor for tensor in keeps if _other(operation.inputs, tensor).name not in spares)
    changes: dict[str, object] = (
        {} if into else {"input_gradient_flops": 0, "backward_workspace": 0, "backward_comm": ()}
    )
    of_two = operation.kind == "gemm" and len(operation.inputs) == 2 and not operation.weights
    if into and of_two and same(operation.input_gradient_flops, 2 * operation.forward_flops):
        changes["input_gradient_flops"] = operation.forward_flops  # of one factor
    return msgspec.structs.replace(operation, keeps=keeps, spares=spares, **changes)


def spared_factor(operation: Operation, reached: Container[str]) -> set[str]:
    """Return the names of what stands for a matrix that an adapter made, where what it is multiplied with needs no gradient.

    reached: the tensors that need one
    """
    if operation.kind != "gemm" or operation.weights or len(operation.inputs) != 2:
        return set()
    first, matrix = operation.inputs
    return set() if first.name in reached else {matrix.name, f"{matrix.name}.cast"}


def _other(pair: tuple[Tensor, ...], than: Tensor) -> Tensor:
    return next((tensor for tensor in pair if tensor.name != than.name), than)
