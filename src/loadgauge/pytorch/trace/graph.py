"""Reading an autograd graph: its nodes, and the tensors that each keeps for backward, by the names PyTorch gives them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.utils._pytree import tree_leaves

from loadgauge.core.base.errors import ConfigError

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
        given = getattr(self.region, "get_inputs", None)
        return tuple(tensor for tensor in given() if isinstance(tensor, torch.Tensor)) if callable(given) else ()


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
    for cell in getattr(inspect.unwrap(hook), "__closure__", None) or ():
        if hasattr(cell.cell_contents, "get_inputs"):
            return cell.cell_contents
    return None


def _hooked(raw: Any) -> bool:
    return getattr(raw, "unpack_hook", None) is not None


def _read(node: Any, name: str) -> Any:
    try:
        return getattr(node, name)
    except RuntimeError as error:
        if "second time" in str(error) or "freed" in str(error):
            raise ConfigError("its graph was freed by backward(): ask before, or with retain_graph=True") from None
        raise
