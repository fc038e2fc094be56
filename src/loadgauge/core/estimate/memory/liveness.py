"""Liveness within one layer: the peak of its forward and of its backward, walked operation by operation.

Gradients of activations are made and dropped as autograd does it: an operation turns the gradient of its output into
gradients of its inputs, then drops the former and what it kept; a residual sum hands its gradient on without a copy.
"""

from collections.abc import Collection

import msgspec

from loadgauge.core.base.algebra import Size, maximum
from loadgauge.core.layers.operations.gradients import with_gradients
from loadgauge.core.layers.operations.operations import NOTHING, Layer, Operation, Recompute, Tensor
from loadgauge.core.layers.operations.profile import Profile, most

_FLOAT32 = 4


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


def forward_peak(
    layer: Layer,
    recompute: Recompute = NOTHING,
    held: tuple[str, ...] = (),
    until: int | None = None,
    *,
    hosts: Collection[str] = (),
) -> Size:
    """Return the largest number of bytes alive at once during the forward of a layer, including what it keeps.

    Tensors live from the operation that writes them to the last one that reads them, those kept for backward to the end.
    held: names of tensors that the caller holds until the layer returns; until: the operation whose kept tensors
        are the last that is wanted; hosts: tensors that go to host memory, and are not counted
    """
    if layer.profile is not None and until is None:
        whole = bool(hosts) or recompute.checkpointed == layer.names
        return most(layer.profile.bare if whole else layer.profile.forward)
    kept = {tensor.name for tensor in layer.kept(recompute)}.difference(hosts).union(held)
    last_use = {
        tensor.name: index for index, operation in enumerate(layer) for tensor in (*operation.inputs, *operation.holds)
    }
    alive = _Alive()
    peak: Size = 0
    for index, operation in enumerate(layer):
        # What an operation keeps is kept before it runs.
        results = () if index == until else operation.outputs
        for tensor in (*operation.inputs, *results, *operation.keeps):
            alive.add(tensor)
        peak = maximum(peak, alive.nbytes + operation.workspace)
        if index == until:
            break
        for tensor in (*operation.inputs, *operation.holds, *results, *operation.keeps):
            if tensor.name not in kept and last_use.get(tensor.name, index) <= index:
                alive.drop(tensor.name)
    return peak


def idle_kept(layer: Layer, copy: Size = 0) -> Size:
    """Return the bytes that a layer would keep, and does not where nothing before it is trained (`layers.gradients`).

    copy: bytes of an element of the copies of matrices that autocast makes, which only gradients of inputs need
    """
    first = Layer(layer.name, with_gradients(layer.operations, reached=False, autocast=False))
    return layer.saved() - first.saved() + copy * (_copied(layer) - _copied(first))


def _copied(layer: Layer) -> Size:
    """Elements of frozen matrices that autocast copies, and that stay for the gradients of inputs."""
    return sum(
        weight.numel
        for operation in layer
        if operation.into_inputs
        for weight in (*operation.weights, *operation.borrows)
        if weight.cast and not weight.trainable and weight.kind in ("matrix", "head")
    )


def keeps_input(layer: Layer) -> bool:
    """Return whether a layer keeps its input for the backward."""
    return any(tensor.name == "input" for tensor in layer.kept())


def returned(head: Layer) -> Size:
    """Return the bytes of the logits that a model returns, and of a copy of them in float32."""
    logits = [product.outputs[0] for product in head if product.name == "head.logits"]
    return sum(tensor.nbytes + 4 * tensor.numel for tensor in logits)


def rerun_peak(layer: Layer) -> Size:
    """Return the most alive while a whole layer runs again for its backward [bytes], with the gradients made before.

    It runs again when backward first asks for a tensor that it would have kept, and only until the last of these is made
    (`torch.utils.checkpoint` without `use_reentrant`).
    """
    last = max((index for index, operation in enumerate(layer) if operation.keeps), default=None)
    gradients = _Gradients(layer)
    for operation in reversed(layer.operations):
        if operation.keeps:
            break
        reached, _ = gradients.through(operation)
        for name in reached:
            gradients.drop(name)
    return forward_peak(layer, held=("input",), until=last) + gradients.nbytes


class _Gradients:
    """Gradient buffers by tensor; one that several tensors share is counted once and lives until the last drops it.

    It begins with those of what a layer returns.
    """

    def __init__(self, layer: Layer) -> None:
        self.buffer: dict[str, int] = {}
        self.size: dict[int, Size] = {}
        self.users: dict[int, int] = {}
        self.next = 0
        self.nbytes: Size = 0
        for tensor in layer.operations[-1].outputs:
            self.make(tensor.name, tensor.nbytes)

    def through(self, operation: Operation) -> tuple[list[str], Size]:
        """Make the gradients of an operation's inputs; returns the outputs that have one, and bytes of sums being made.

        A sum hands its gradient on as it is; of two dtypes, the narrower term gets a copy (`validate_outputs` of autograd).
        """
        reached = [tensor.name for tensor in operation.outputs if tensor.name in self.buffer]
        extra: Size = 0
        if not reached:
            return reached, 0
        widest = max(tensor.itemsize for tensor in operation.outputs)
        produced = {
            tensor.name: tensor
            for tensor in operation.inputs
            if tensor.dtype != "index" and tensor.name not in operation.spares
        }
        for name, tensor in produced.items():
            if name in self.buffer:
                # A second contribution: the sum is a new buffer while both terms are alive.
                extra = extra + tensor.nbytes
                self.drop(name)
                self.make(name, tensor.nbytes)
            elif operation.shares_gradient and (len(produced) == 1 or tensor.itemsize >= widest):
                self.share(name, reached[0])
            else:
                self.make(name, tensor.nbytes)
        return reached, extra

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
    hosts: Collection[str] = (),
) -> Size:
    """Return the largest number of bytes alive at once during the backward of a layer, including what it keeps.

    weight_gradient: bytes per trainable parameter of gradients allocated here, which stay; with `accumulating`, each is
        added to an existing one and dropped (a tied table's waits for its other part)
    recompute: what it drops is alive again from the moment the walk reaches it
    split: gradients of matrices are computed later, and what they need stays (`Operation.trains_matrix`)
    hosts: tensors that are in host memory, and come back operation by operation
    """
    operations = layer.operations
    if not operations or not operations[-1].gradients:
        return 0
    if layer.profile is not None:
        return _seen(layer, layer.profile, weight_gradient, recompute, accumulating=accumulating, hosts=hosts)
    whole, freed = _keepers(layer)
    stays = {tensor.name for operation in layer if split and operation.trains_matrix for tensor in operation.keeps}
    if recompute.checkpointed == layer.names:
        stays.add("input")  # the checkpoint's own
    tensors = _Alive()
    for tensor in layer.kept(recompute) if recompute else whole.values():
        if tensor.name not in hosts:
            tensors.add(tensor)
    gradients = _Gradients(layer)
    weights: Size = 0
    peak: Size = tensors.nbytes + gradients.nbytes
    for index in range(len(operations) - 1, -1, -1):
        operation = operations[index]
        for tensor in (*_remade(operations, index, recompute), *(operation.keeps if hosts else ())):
            if recompute or tensor.name in hosts:
                tensors.add(tensor)
        reached, summed = gradients.through(operation)
        if not reached:
            continue
        if operation.overwrites:
            for tensor in operation.keeps:
                tensors.drop(tensor.name)
        extra: Size = operation.workspace + summed
        own, borrowed = (
            sum(
                (_FLOAT32 if weight.wide and weight_gradient else weight_gradient) * weight.numel
                for weight in read
                if weight.trainable
            )
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


def _seen(
    layer: Layer,
    profile: Profile,
    weight_gradient: Size,
    recompute: Recompute,
    *,
    accumulating: bool,
    hosts: Collection[str],
) -> Size:
    """The same of a layer that was captured: what was alive when its code ran, less what is dropped and not made again yet."""
    rows = profile.backward
    if recompute.checkpointed == layer.names:
        rows = (*profile.rerun, *(msgspec.structs.replace(row, live=row.live + profile.entering) for row in rows))
    elif recompute or hosts:
        held = {tensor.name for tensor in layer.kept(recompute)}.difference(hosts)
        last = {tensor.name: index for index, operation in enumerate(layer) for tensor in operation.keeps}
        inside = [index for index, operation in enumerate(layer) if operation.name in recompute.checkpointed]
        # A region runs again as one, when backward reaches its end.
        last = {name: max(inside) if index in inside else index for name, index in last.items()}
        gone = {name: tensor.nbytes for name, tensor in _keepers(layer)[0].items() if name not in held}
        rows = tuple(
            msgspec.structs.replace(
                row, live=row.live - sum(nbytes for name, nbytes in gone.items() if last[name] < row.at)
            )
            for row in profile.each()
        )
    return most(rows, weight_gradient, accumulating=accumulating)


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
    """Return the dropped tensors that the backward of an operation needs: a checkpointed region runs again as one."""
    if not recompute:
        return []
    needed = list(operations[index].keeps)
    again, after = recompute.checkpointed, index + 1
    # The last of a region makes what all of it keeps; the others find it.
    if operations[index].name in again and (after == len(operations) or operations[after].name not in again):
        for operation in reversed(operations[:index]):
            if operation.name not in recompute.checkpointed:
                break
            needed.extend(operation.keeps)
    return needed
