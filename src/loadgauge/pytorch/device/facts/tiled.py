"""Operations on masks and lengths that all sequences of a batch share, and on places in texts.

A batch has sounds of one length: what a program works out of them (frames that count, vectors that are left) is known for each
sequence, however many there are.
"""

import math
import operator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from loadgauge.pytorch.device.facts.fact_kinds import Edges, Known, Number, Placed, Range, Rows, Run, Same, Tiled

MOST = 1 << 24
"""Elements of the largest value that is worked out."""
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_REDUCES = frozenset(("sum", "any", "all", "max", "min", "amax", "amin", "count_nonzero", "mean", "prod"))
_LENGTHWISE = frozenset(
    ("unsqueeze", "squeeze", "select", "slice", "cumsum", "constant_pad_nd", "split", "split_with_sizes", "unbind")
)
_WHOLE = frozenset(("detach", "alias", "_to_copy", "clone", "lift_fresh"))
_SHAPED = frozenset(("view", "_unsafe_view", "expand"))


class Facts(Protocol):
    """What rules ask: the facts of tensors, and to hold one (`facts.Facts`)."""

    def of(self, tensor: Any) -> Any:
        """Return what is known of a tensor, or None."""


def repeats(tensor: Any, fact: Tiled) -> Any:
    """How often the known rows of a tensor stand in it."""
    return tensor.shape[0] // fact.value.shape[0]


def tiled(facts: Facts, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Any:
    """Return what an operation makes known where rows that repeat, or texts with places, are among its arguments; else None."""
    first = facts.of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
    if isinstance(first, Placed | Run | Number | Edges):
        return _of_places(facts, first, name, args, out)
    leaves = tree_leaves((args, kwargs))
    facts_of = {id(leaf): facts.of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if not any(isinstance(fact, Tiled) for fact in facts_of.values()):
        return None
    if isinstance(first, Tiled):
        if name in _REDUCES:
            return _reduced(func, name, args, kwargs, out, first)
        if name in _SHAPED:
            return _shaped(name, args, out, first)
        if name in _LENGTHWISE or name in ("transpose", "permute"):
            return _lengthwise(func, name, args, kwargs, out, first)
    if not (_pointwise(func, name) or name in _WHOLE) or not isinstance(out, torch.Tensor):
        return None
    if any(isinstance(leaf, _SYMBOLS) for leaf in leaves):
        return None
    if not all(isinstance(fact, Tiled | Known | Range | Same) for fact in facts_of.values()):
        return None

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
        fact = facts_of[id(leaf)]
        if isinstance(fact, Range):
            along = [at for at, step in enumerate(leaf.stride()) if step and leaf.shape[at] != 1]
            return torch.arange(fact.size, dtype=leaf.dtype).reshape(
                [fact.size if at in along else 1 for at in range(leaf.dim())]
            )
        return fact.value.reshape(()) if isinstance(fact, Same) else fact.value

    if not _fits(facts_of, leaves, out):
        return None
    with _disable_current_modes():
        values = tree_map(value, args)
    return _tile(func, values, tree_map(_cpu, kwargs), out)


def _pointwise(func: Any, name: str) -> bool:
    """Return whether an operation makes each element of those at its place; PyTorch does not say so of all."""
    tagged = torch.Tag.pointwise in getattr(func, "tags", ()) and not func._schema.is_mutable
    return tagged or name in ("floor_divide", "remainder", "fmod", "where")


def _fits(facts_of: Any, leaves: Any, out: Any) -> bool:
    """Return whether the rows that repeat lie along the first dimension of a result."""
    return all(leaf.dim() == out.dim() for leaf in leaves if isinstance(facts_of.get(id(leaf)), Tiled))


def _cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _tile(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """The rows of a result, of those of its arguments."""
    if not _plain(out.shape[1:]):
        return None
    with _disable_current_modes():
        try:
            tile = func(*args, **kwargs)
            tile = tile.expand(tile.shape[0], *out.shape[1:]) if tile.dim() else None
        except (RuntimeError, TypeError):
            return None
        return Tiled(tile) if tile is not None and tile.dtype == out.dtype and tile.numel() <= MOST else None


def _plain(shape: Any) -> bool:
    return all(type(size) is int for size in shape)


def _reduced(func: Any, name: str, args: Any, kwargs: Any, out: Any, fact: Tiled) -> Any:
    """Sums and the like, of each row or of all."""
    if not isinstance(out, torch.Tensor):
        return None
    dims = args[0].dim()
    dims_named = args[1] if len(args) > 1 else kwargs.get("dim")
    reduced = (
        set(range(dims))
        if dims_named in (None, [])
        else {dim % dims for dim in ((dims_named,) if type(dims_named) is int else dims_named)}
    )
    if 0 not in reduced:
        return _tile(func, (fact.value, *args[1:]), tree_map(_cpu, kwargs), out)
    if len(reduced) < dims or out.dim() or name in ("mean", "prod"):
        return None
    with _disable_current_modes():
        if name in ("sum", "count_nonzero"):
            total = fact.value.sum() if name == "sum" else fact.value.count_nonzero()
            return Number(total.item() * repeats(args[0], fact)) if not total.is_floating_point() else None
        return Same(func(fact.value).reshape(1))


def _shaped(name: str, args: Any, out: Any, fact: Tiled) -> Any:
    """Rows of another shape, where whole ones are as many elements as those that are known; dimensions that are repeated."""
    rest = out.shape[1:]
    if not out.dim() or not _plain(rest):
        return None
    with _disable_current_modes():
        if name == "expand":
            return Tiled(fact.value.expand(-1, *rest)) if out.dim() == args[0].dim() else None
        each = math.prod(rest)
        if not each or fact.value.numel() % each:
            return None
        return Tiled(fact.value.reshape(-1, *rest))


def _lengthwise(func: Any, name: str, args: Any, kwargs: Any, out: Any, fact: Tiled) -> Any:
    """Return what looks along other dimensions than that of the rows."""
    dims = args[0].dim()
    if name == "constant_pad_nd":
        return _tile(func, (fact.value, *args[1:]), kwargs, out) if len(args[1]) < 2 * dims else None
    if name == "permute":
        return _tile(func, (fact.value, *args[1:]), {}, out) if args[1][0] % dims == 0 else None
    if name == "transpose":
        return _tile(func, (fact.value, *args[1:]), {}, out) if args[1] % dims and args[2] % dims else None
    position = 2 if name in ("split", "split_with_sizes") else 1
    if name == "squeeze" and len(args) < 2:
        return None
    dim = args[position] if len(args) > position else kwargs.get("dim", 0)
    if type(dim) is not int:
        return None
    dim %= dims + (name == "unsqueeze")
    if not dim:
        return _of_rows(name, args, out, fact)
    if isinstance(out, torch.Tensor):
        return _tile(func, (fact.value, *args[1:]), kwargs, out)
    with _disable_current_modes():
        parts = func(fact.value, *args[1:], **kwargs)
    return tuple(Tiled(part) for part in parts)


def _of_rows(name: str, args: Any, out: Any, fact: Tiled) -> Any:
    """Single rows, and all of them."""
    rows = fact.value.shape[0]
    with _disable_current_modes():
        if name == "select" and type(args[2]) is int and args[2] >= 0:
            return Known(fact.value[args[2] % rows])
        if name == "unbind":
            return tuple(Known(fact.value[index % rows]) for index in range(len(out)))
        if name == "slice":
            start, end, step = (*args[2:], *(None, None, None)[len(args) - 2 :])[:3]
            return (
                fact
                if start in (None, 0) and (end is None or (type(end) is int and end > 2**62)) and step in (None, 1)
                else None
            )
    return None


def _of_places(facts: Facts, fact: Placed | Run | Number | Edges, name: str, args: Any, out: Any) -> Any:
    """Where tokens of one kind stand, and how many they are."""
    other = args[1] if len(args) > 1 else None
    if isinstance(fact, Placed):
        if name in _WHOLE or name == "view":
            return fact if out.shape == args[0].shape else None
        return Run(fact.tokens, 0) if name == "eq" and type(other) is int and other == fact.token else None
    if isinstance(fact, Number):
        if name in ("eq", "ne", "gt", "lt", "ge", "le") and type(other) is int:
            return Number(bool(getattr(operator, name)(fact.value, other)))
        return None
    if isinstance(fact, Edges):
        return Rows(args[0].shape[0]) if name == "eq" and type(other) is int and abs(other) == 1 else None
    if (
        name in _WHOLE
        or (name == "expand" and list(out.shape) == list(args[0].shape))
        or (name == "constant_pad_nd" and len(args[1]) == 2 and not (len(args) > 2 and args[2]))
    ):
        return fact
    if name == "slice" and args[1] % args[0].dim() == 1:
        start = args[2] if len(args) > 2 and args[2] is not None else 0
        return fact._replace(shift=fact.shift + start) if type(start) is int and 0 <= start <= 1 else None
    if name == "unsqueeze":
        return fact if args[1] in (-1, args[0].dim()) else None
    if name == "expand" and out.dim() == args[0].dim() == 3:
        return Rows(fact.tokens * args[0].shape[0] * out.shape[2])
    if name == "slice":
        return fact if out.shape[0] == args[0].shape[0] else None
    if name == "sub" and isinstance(second := facts.of(other), Run) and abs(fact.shift - second.shift) == 1:
        return Edges()
    if (
        name in ("bitwise_and", "logical_and")
        and isinstance(second := facts.of(other), Run)
        and second.tokens == fact.tokens
    ):
        return Run(max(0, fact.tokens - abs(fact.shift - second.shift)), max(fact.shift, second.shift))
    if name in ("sum", "count_nonzero") and not out.dim():
        return Number(fact.tokens * args[0].shape[0])
    if name == "any" and not out.dim():
        with _disable_current_modes():
            return Same(torch.tensor([fact.tokens > 0]))
    return None
