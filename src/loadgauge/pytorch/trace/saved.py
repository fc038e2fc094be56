"""Tensors that an expression or a module keeps for backward: every `_saved_*` field, by name, and the storages they share."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from loadgauge.pytorch.record.allocations import dtype_name
from loadgauge.pytorch.record.sizes import nbytes_of, whole
from loadgauge.pytorch.trace.graph import Hidden, fields, nodes


class SavedTensor(msgspec.Struct, frozen=True):
    """A tensor kept for backward. `nbytes` are the bytes of `shape` [elements]; `storage_nbytes` what it holds in
    memory: a view holds the whole of its storage. `owner` says what else holds the storage: an input, a parameter, the
    result, or that it is a plain `number` of the program, on the host; nothing else holds it where it is "". `made_by`: the part
    of an expression whose value it is, or `inside` which it was made. `stride` [elements] is empty where it is contiguous.
    """

    node: str
    field: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    storage: int
    storage_nbytes: int
    owner: str = ""
    module: str = ""
    made_by: str = ""
    stride: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, tensor: torch.Tensor, node: str, field: str, storage: int, owner: str = "", module: str = ""
    ) -> SavedTensor:
        """Describes a tensor that `node` keeps as `field`; `storage`: the number of its storage."""
        return cls(
            node=node,
            field=field,
            shape=tuple(map(whole, tensor.shape)),
            dtype=dtype_name(tensor.dtype),
            nbytes=nbytes_of(tensor),
            storage=storage,
            storage_nbytes=whole(tensor.untyped_storage().nbytes()),
            owner=owner,
            module=module,
            stride=() if tensor.is_contiguous() else tuple(map(whole, tensor.stride())),
        )


class Storage(msgspec.Struct, frozen=True):
    """A storage that one or several saved tensors share [bytes]."""

    number: int
    nbytes: int
    owner: str


class Saved(msgspec.Struct, frozen=True):
    """Tensors kept for backward. `made_again`: fields that checkpointing drops, as (node, field)."""

    tensors: tuple[SavedTensor, ...]
    made_again: tuple[tuple[str, str], ...] = ()

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Each storage once, in the order of the tensors."""
        result = {
            tensor.storage: Storage(tensor.storage, tensor.storage_nbytes, tensor.owner) for tensor in self.tensors
        }
        return tuple(result.values())

    @property
    def total(self) -> int:
        """Bytes kept in addition to inputs, parameters and buffers, each storage once; the result counts if kept."""
        return sum(storage.nbytes for storage in self.storages if storage.owner in ("", "result"))

    @property
    def beyond_result(self) -> int:
        """Bytes kept for backward alone: without inputs, parameters, buffers and the result."""
        return sum(storage.nbytes for storage in self.storages if not storage.owner)

    @property
    def of_parameters(self) -> int:
        """Bytes of parameters and buffers that backward reads."""
        return sum(storage.nbytes for storage in self.storages if storage.owner.startswith(("parameter ", "buffer ")))


class Packed:
    """Stands for a saved tensor while its graph is looked at. Detached: an output would hold itself in a cycle."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()


torch.utils._pytree.register_pytree_node(
    Packed, lambda packed: ([packed.tensor], None), lambda leaves, _: Packed(next(iter(leaves)))
)


def saved(function: Callable[..., Any], *inputs: Any, names: Mapping[str, Any] | None = None, **keywords: Any) -> Saved:
    """Runs a function or a module and returns what its result keeps for backward.

    `names` gives a name to tensors and modules; inputs without one are called `input 0`, ... Raises what the function
    raises. Sources: PyTorch's own graph; the names of its fields are private and may change between versions.

    >>> import torch
    >>> x, y = torch.ones(1024), torch.ones(1024, requires_grad=True)
    >>> kept = saved(lambda x, y: (x + 1) * (y + 1), x, y, names={"x": x, "y": y})
    >>> [(one.node, one.field, one.owner) for one in kept.tensors], kept.beyond_result
    ([('MulBackward0', 'self', '')], 4096)
    >>> kept = saved(torch.nn.Sigmoid(), y)
    >>> [(one.node, one.field, one.owner) for one in kept.tensors], kept.beyond_result
    ([('SigmoidBackward0', 'result', 'result')], 0)
    """
    with record_saved() as packed:
        result = function(*inputs, **keywords)
    owners = find_owners(function, inputs, keywords, names or {})
    return saved_by(result, owners, packed)


@contextlib.contextmanager
def record_saved() -> Iterator[list[weakref.ref[Packed]]]:
    """A context that yields a list, to which a weak reference to each tensor saved for backward in its body is added."""
    packed: list[weakref.ref[Packed]] = []

    def pack(tensor: torch.Tensor) -> Packed:
        placeholder = Packed(tensor)
        packed.append(weakref.ref(placeholder))
        return placeholder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda placeholder: placeholder.tensor):
        yield packed


def saved_by(
    result: Any,
    owners: Mapping[int, str] | None = None,
    packed: Sequence[weakref.ref[Packed]] = (),
    made: Mapping[int, str] | None = None,
) -> Saved:
    """Return what an existing result keeps for backward. `owners` names storages by `key`; `made`: the parts of an expression that
    made them.

    Raises ConfigError where backward has freed the graph.
    """
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    owner_of = dict(owners or {})
    for leaf in _leaves(outputs):
        owner_of.setdefault(key(leaf), "parameter ?")
    for output in outputs:
        owner_of.setdefault(key(output), "result")
    numbers: dict[int, int] = {}
    tensors, again, reached = [], [], set()

    def keep(tensor: torch.Tensor, node: str, field: str) -> None:
        storage = numbers.setdefault(key(tensor), len(numbers) + 1)
        one = SavedTensor.of(tensor, node, field, storage, owner_of.get(key(tensor), ""))
        source = "" if one.owner else (made or {}).get(key(tensor), "")
        tensors.append(msgspec.structs.replace(one, made_by=source) if source else one)

    for node in sorted(nodes(outputs), key=_order):
        for field in fields(node):
            if isinstance(field, Hidden):
                again.append((field.node, field.field))
                continue
            reached.add(id(field.packed))
            if field.packed is None and _is_number(field.tensor):
                owner_of.setdefault(key(field.tensor), "number")
            keep(field.tensor, field.node, field.field)
    for placeholder in (reference() for reference in packed):
        if placeholder is not None and id(placeholder) not in reached:  # held by a checkpoint, off the graph
            keep(placeholder.tensor, "checkpoint", "input")
    return Saved(tuple(tensors), tuple(again))


def find_owners(
    function: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any], names: Mapping[str, Any]
) -> dict[int, str]:
    """The other holder of each storage, by `key`: named tensors, parameters and buffers of modules, inputs."""
    result: dict[int, str] = {}

    def claim(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            result.setdefault(key(value), name)

    for name, value in names.items():
        claim(value, name)
    modules = {"": function, **names}
    for prefix, module in modules.items():
        if isinstance(module, nn.Module):
            before = f"{prefix}." if prefix else ""
            for name, parameter in module.named_parameters():
                claim(parameter, f"parameter {before}{name}")
            for name, buffer in module.named_buffers():
                claim(buffer, f"buffer {before}{name}")
    for number, value in enumerate(inputs):
        for leaf in tree_leaves(value):
            claim(leaf, f"input {number}")
    for name, value in keywords.items():
        for leaf in tree_leaves(value):
            claim(leaf, f"input {name}")
    return result


def key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage: equal for all its views while any of them, or a weak reference to the storage, lives."""
    return int(tensor.untyped_storage()._cdata)


def _leaves(outputs: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that gradients gather in."""
    for node in nodes(outputs):
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable


def _is_number(tensor: torch.Tensor) -> bool:
    """Return whether it is a Python number, as in `2 * x`: such tensors have a Python number's type and no hooks."""
    plain = (torch.int64, torch.float64, torch.complex128, torch.bool)
    return tensor.dim() == 0 and tensor.device.type == "cpu" and tensor.dtype in plain


def _order(node: Any) -> int:
    number: int = node._sequence_nr()
    return number
