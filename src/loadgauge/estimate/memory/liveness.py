"""What is alive while one layer runs: the peak of its forward and of its backward, walked operation by operation.

Gradients of activations are made and dropped as autograd does it: an operation turns the gradient of its output into
gradients of its inputs, then drops the former and what it kept; a residual sum hands its gradient on without a copy.
"""

from __future__ import annotations

from loadgauge.algebra import Size, maximum
from loadgauge.layers.operations import NOTHING, Layer, Operation, Recompute, Tensor


class _Alive:
    """Tensors by name, and the bytes of all together."""

    def __init__(self) -> None:
        self.sizes: dict[str, Size] = {}
        self.nbytes: Size = 0

    def add(self, tensor: Tensor) -> None:
        """Add a tensor that is not alive yet."""
        if tensor.name not in self.sizes:
            size = self.sizes[tensor.name] = tensor.nbytes
            self.nbytes = self.nbytes + size

    def drop(self, name: str) -> None:
        """Free a tensor that is alive."""
        if name in self.sizes:
            self.nbytes = self.nbytes - self.sizes.pop(name)


def forward_peak(layer: Layer, recompute: Recompute = NOTHING, held: tuple[str, ...] = ()) -> Size:
    """Return the largest number of bytes alive at once during the forward of a layer, including what it keeps.

    Tensors live from the operation that writes them to the last one that reads them, those kept for backward to the end.
    held: names of tensors that the caller holds until the layer returns
    """
    kept = {tensor.name for tensor in layer.kept(recompute)}.union(held)
    last_use = {tensor.name: index for index, operation in enumerate(layer) for tensor in operation.inputs}
    alive = _Alive()
    peak: Size = 0
    for index, operation in enumerate(layer):
        for tensor in (*operation.inputs, *operation.outputs, *operation.keeps):
            alive.add(tensor)
        peak = maximum(peak, alive.nbytes + operation.workspace)
        for name in [n for n in alive.sizes if n not in kept and last_use.get(n, index) <= index]:
            alive.drop(name)
    return peak


class _Gradients:
    """Gradient buffers by tensor; one that several tensors share is counted once and lives until the last drops it."""

    def __init__(self) -> None:
        self.buffer: dict[str, int] = {}
        self.size: dict[int, Size] = {}
        self.users: dict[int, int] = {}
        self.next = 0
        self.nbytes: Size = 0

    def make(self, name: str, size: Size) -> None:
        """Allocate the gradient of a tensor, of `size` bytes, unless it exists."""
        self.next += 1
        self.buffer[name], self.size[self.next], self.users[self.next] = self.next, size, 1
        self.nbytes = self.nbytes + size

    def share(self, name: str, other: str) -> None:
        """Let the gradient of `name` be the buffer of `other`."""
        buffer = self.buffer[other]
        self.buffer[name] = buffer
        self.users[buffer] += 1

    def drop(self, name: str) -> None:
        """Drop a tensor's gradient; its buffer is freed with the last user."""
        buffer = self.buffer.pop(name)
        self.users[buffer] -= 1
        if not self.users[buffer]:
            del self.users[buffer]
            self.nbytes = self.nbytes - self.size.pop(buffer)

    def keep(self, name: str) -> None:
        """Never free this gradient's buffer."""
        del self.buffer[name]


def backward_peak(
    layer: Layer,
    weight_gradient: Size = 0,
    recompute: Recompute = NOTHING,
    *,
    accumulating: bool = False,
    split: bool = False,
) -> Size:
    """Return the largest number of bytes alive at once during the backward of a layer, including what it keeps.

    weight_gradient: bytes per trainable parameter of gradients allocated here, which stay; with `accumulating`, each is
        added to an existing one and dropped (a tied table's waits for its other part)
    recompute: what it drops is alive again from the moment the walk reaches it
    split: gradients of matrices are computed later, and what they need stays (`Operation.trains_matrix`)
    """
    operations = layer.operations
    whole, freed = _keepers(layer)
    stays = {tensor.name for operation in layer if split and operation.trains_matrix for tensor in operation.keeps}
    tensors = _Alive()
    for tensor in layer.kept(recompute) if recompute else whole.values():
        tensors.add(tensor)
    gradients = _Gradients()
    weights: Size = 0
    for tensor in operations[-1].outputs:
        gradients.make(tensor.name, tensor.nbytes)
    peak: Size = tensors.nbytes + gradients.nbytes
    for index in range(len(operations) - 1, -1, -1):
        operation = operations[index]
        for tensor in _remade(operations, index, recompute):
            tensors.add(tensor)
        reached = [tensor.name for tensor in operation.outputs if tensor.name in gradients.buffer]
        if not reached:
            continue
        if operation.overwrites:
            for tensor in operation.keeps:
                tensors.drop(tensor.name)
        extra: Size = operation.workspace
        made = {tensor.name: tensor for tensor in operation.inputs if tensor.dtype != "index"}
        for name, tensor in made.items():
            if name in gradients.buffer:
                # A second contribution: the sum is a new buffer while both terms are alive.
                extra = extra + tensor.nbytes
                gradients.drop(name)
                gradients.make(name, tensor.nbytes)
            elif operation.shares_gradient:
                gradients.share(name, reached[0])
            else:
                gradients.make(name, tensor.nbytes)
        own, borrowed = (
            weight_gradient * sum(weight.numel for weight in read if weight.trainable)
            for read in (operation.weights, operation.borrows)
        )
        weights = weights + borrowed
        if accumulating:
            extra = extra + own
        else:
            weights = weights + own
        others: Size = tensors.nbytes + extra + weights
        peak = maximum(peak, others + gradients.nbytes)
        for name in reached:
            if split and operation.trains_matrix:
                gradients.keep(name)
            else:
                gradients.drop(name)
        peak = maximum(peak, others + gradients.nbytes + operation.backward_workspace)
        for name in freed.get(index, ()):
            if name not in stays:
                tensors.drop(name)
    return peak


def _keepers(layer: Layer) -> tuple[dict[str, Tensor], dict[int, list[str]]]:
    """All that is kept without recomputation, and after which operation's backward each of it is free."""
    kept: dict[str, Tensor] = {}
    freed: dict[int, list[str]] = {}
    for index, operation in enumerate(layer):
        for tensor in operation.keeps:
            if tensor.name not in kept:
                freed.setdefault(index, []).append(tensor.name)
            kept[tensor.name] = tensor
    return kept, freed


def _remade(operations: tuple[Operation, ...], index: int, recompute: Recompute) -> list[Tensor]:
    """What the backward of an operation needs and finds dropped: a checkpointed region runs again as one."""
    if not recompute:
        return []
    needed = list(operations[index].keeps)
    if operations[index].name in recompute.checkpointed:
        for operation in reversed(operations[:index]):
            if operation.name not in recompute.checkpointed:
                break
            needed.extend(operation.keeps)
    return needed
