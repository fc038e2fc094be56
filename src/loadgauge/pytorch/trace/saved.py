"""Tensors that an expression or a module keeps for backward: every `_saved_*` field, by name, and the storages they share."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.record.allocations import dtype_name
from loadgauge.pytorch.record.sizes import nbytes_of, whole
from loadgauge.pytorch.record.tracker import node_key
from loadgauge.pytorch.trace.result import SavedTensor


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


def described(
    tensor: torch.Tensor, node: str, field: str, storage: int, owner: str = "", module: str = ""
) -> SavedTensor:
    """Return a tensor that `node` keeps as `field`, described. storage: the number of its storage"""
    return SavedTensor(
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
    return saved_by(result, find_owners(function, inputs, keywords, names or {}), packed)


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
    makers: Mapping[int, str] | None = None,
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
        saved = described(tensor, node, field, storage, owner_of.get(key(tensor), ""))
        source = "" if saved.owner else (makers or {}).get(key(tensor), "")
        tensors.append(msgspec.structs.replace(saved, made_by=source) if source else saved)

    for node in sorted(nodes(outputs), key=node_key):
        for field in fields(node):
            if isinstance(field, Hidden):
                again.append((field.node, field.field))
            else:
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
    for prefix, module in {"": function, **names}.items():
        if isinstance(module, nn.Module):
            before = f"{prefix}." if prefix else ""
            for kind, held in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
                for name, tensor in held:
                    claim(tensor, f"{kind} {before}{name}")
    for label, value in (*enumerate(inputs), *keywords.items()):
        for leaf in tree_leaves(value):
            claim(leaf, f"input {label}")
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


RAW = "_raw_saved_"


class Field(NamedTuple):
    """One tensor that a node keeps: `node` is its name, `field` the name of the argument or result."""

    node: str
    field: str
    tensor: torch.Tensor
    packed: Any
    """The placeholder of the tensor where saved-tensor hooks were active; None where none were."""


class Hidden(NamedTuple):
    """A tensor that a node needs, but that its saved-tensor hooks do not keep: checkpointing recomputes it."""

    node: str
    field: str
    region: Any = None
    """The checkpointed region."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors from which the checkpointed region is recomputed in backward."""
        inputs_of = getattr(self.region, "get_inputs", None)
        return (
            tuple(tensor for tensor in inputs_of() if isinstance(tensor, torch.Tensor)) if callable(inputs_of) else ()
        )


def nodes(roots: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield every node of the graph that backward of these tensors would visit, each once. roots: results, of any shape"""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for follower, _ in node.next_functions:
            if follower is not None and follower not in seen:
                seen.add(follower)
                waiting.append(follower)


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return what a kind of built-in node keeps, by name."""
    return tuple(name.removeprefix(RAW) for name in dir(kind) if name.startswith(RAW))


def fields(node: Any) -> Iterator[Field | Hidden]:
    """The tensors that a node keeps, from its `_saved_*` attributes; of a custom `Function` also what hangs on `ctx`.

    Reading does not run hooks: a checkpointed region is not computed again.
    """
    name, kind = node.name(), cast(Any, type(node))
    custom = isinstance(node, torch.autograd.function.BackwardCFunction)
    for field in _fields(kind):
        raw = _read(node, RAW + field)
        if custom and field == "tensors":
            yield from _each(name, "saved_tensors", raw, lambda: node.saved_tensors)
        else:
            yield from _each(name, field, raw, functools.partial(_read, node, f"_saved_{field}"))
    if custom:
        for field, value in vars(node).items():
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    yield Field(name, f"ctx.{field}", tensor, None)


def _each(node: str, field: str, raw: Any, read: Any) -> Iterator[Field | Hidden]:
    several = isinstance(raw, tuple | list)
    values = read() if several and not any(_hooked(item) for item in raw) else None
    for number, item in enumerate(raw if several else (raw,)):
        label = f"{field}[{number}]" if several and len(raw) > 1 else field
        if _hooked(item):
            packed = item.data
            tensors = [leaf for leaf in tree_leaves(packed) if isinstance(leaf, torch.Tensor)]
            if not tensors:
                yield Hidden(node, label, _region(item.unpack_hook))
            for tensor in tensors:
                yield Field(node, label, tensor, packed)
            continue
        if several and values is None:
            continue  # a place that holds no tensor (an index left open); reading the others would run their hooks
        value = values[number] if values is not None else read()
        if isinstance(value, torch.Tensor):
            yield Field(node, label, value, None)


def _region(hook: Any) -> Any:
    """Return what `torch.utils.checkpoint` keeps of a region; its hook closes over it (PyTorch 2.13)."""
    cells = getattr(inspect.unwrap(hook), "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "get_inputs")), None)


def _hooked(raw: Any) -> bool:
    return getattr(raw, "unpack_hook", None) is not None


def _read(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except RuntimeError as error:
        if "second time" in str(error) or "freed" in str(error):
            raise ConfigError("its graph was freed by backward(): ask before, or with retain_graph=True") from None
        raise
