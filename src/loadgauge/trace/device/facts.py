"""What is known of the values of fake tensors: all elements alike, ids of experts, masks and counts of who was chosen.

A fake tensor has no values, but some are certain (a mask of ones), and some have an expectation that a program's sizes hang on:
which rows an expert gets is data, how many it gets is a share. Experts are taken as equally busy: of n choices among E experts,
expert i gets (n + E - 1 - i) // E, which add up to n. Every line where that decides a size is kept in `Facts.assumed`.

A fact belongs to a tensor and is void once its storage is written to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from loadgauge.trace.device.fact_kinds import (
    Among,
    Chosen,
    Counts,
    Drawn,
    Ids,
    Known,
    Number,
    Range,
    Rank,
    Rows,
    Same,
    share,
)
from loadgauge.trace.device.mask_views import axis, limited, view_of_mask
from loadgauge.trace.device.stated_rows import StatedRows, marks

_FACT = "_loadgauge_fact"
_MOST = 4096
"""Of so many experts at most an index is one: of more, it is a place in something else, such as a vocabulary."""
_SMALL = 65_536
UNKNOWN: Any = object()
_PUTS = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")


class _Held(NamedTuple):
    fact: Any
    storage: int
    epoch: int

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # of a copied tensor it is void: its storage is another


class Facts:
    """What is known of the tensors of one fake mode. `assumed`: by line, what was taken for granted of who is chosen."""

    def __init__(self) -> None:
        self.assumed: dict[str, str] = {}
        self.stated = StatedRows({}, self.assumed)
        self._epochs: dict[int, int] = {}

    def of(self, tensor: Any) -> Any:
        """What is known of a tensor, or None."""
        held = getattr(tensor, "__dict__", {}).get(_FACT) if isinstance(tensor, FakeTensor) else None
        if held is None:
            return None
        there = held.storage == tensor.untyped_storage()._cdata and held.epoch == self._epochs.get(held.storage, 0)
        return held.fact if there else None

    def keep(self, tensor: Any, fact: Any) -> None:
        """Note what is known of a tensor."""
        if fact is not None and isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()._cdata
            setattr(tensor, _FACT, _Held(fact, storage, self._epochs.get(storage, 0)))

    # -- in place of operations --------------------------------------------------------------------------------------------

    def item(self, tensor: Any, line: Callable[[], str]) -> Any:
        """The value of a tensor with one element; `UNKNOWN` where it is not known. line: of the program that asks"""
        fact = self.of(tensor)
        if isinstance(fact, Same | Known):
            with _disable_current_modes():
                return fact.value.item()
        if isinstance(fact, Counts) and fact.expert is not None:
            self._assume(fact.of, line)
            parts = range(fact.expert + 1) if fact.ends else (fact.expert,)
            return sum(share(fact.total, fact.of, one) for one in parts)
        if isinstance(fact, Drawn):
            self.assumed[line()] = f"a number drawn between {fact.low:g} and {fact.high:g} is in the middle"
            return (fact.low + fact.high) / 2
        return fact.value if isinstance(fact, Number) else UNKNOWN

    def instead(self, func: Any, args: Any, kwargs: Any, line: Callable[[], str], go: Callable[..., Any]) -> Any:
        """The result of an operation whose shape hangs on values, where they are known; else `UNKNOWN`.

        go: runs an operation on fake tensors. Raises what the operation does without.
        """
        name = _name(func)
        if name in ("nonzero", "masked_select"):
            fact, mask = self.of(args[0 if name == "nonzero" else 1]), args[0 if name == "nonzero" else 1]
            if isinstance(fact, Known):
                with _disable_current_modes():
                    real = func(fact.value) if name == "nonzero" else fact.value.nonzero()
                return self._made(args[0], tuple(real.shape), real if name == "nonzero" else None, go)
            rows = self._rows(mask, line)
            if rows is None:
                return UNKNOWN
            shape = (rows, mask.dim()) if name == "nonzero" else (rows,)
            return self._made(args[0], shape, None, go, torch.int64 if name == "nonzero" else args[0].dtype)
        if name in ("index", "_unsafe_index", *_PUTS):
            places = self._places(args[1], line, go)
            if places is not None:
                before = self.of(args[0]) if any(one is not None and 0 in one.shape for one in places) else None
                out = go(func, (), (args[0], places, *args[2:]), kwargs)
                self.after(func, args, kwargs, out)
                if name in _PUTS and func._schema.is_mutable:  # nowhere
                    self.keep(args[0], before)
                return out
        if name == "bincount" and isinstance(fact := self.of(args[0]), Ids) and (len(args) == 1 or args[1] is None):
            size = max(fact.of, args[2] if len(args) > 2 else kwargs.get("minlength", 0))
            made = self._made(args[0], (size,), None, go)
            self.keep(made, Counts(args[0].numel(), fact.of, None, False))
            return made
        if name == "_unique2" and isinstance(fact := self.of(args[0]), Ids):
            self._assume(fact.of, line)
            with _disable_current_modes():
                ids = torch.arange(fact.of)
            whole = self._made(args[0], (fact.of,), ids, go)
            back = self._made(args[0], tuple(args[0].shape), None, go)
            counts = self._made(args[0], (fact.of,), None, go)
            self.keep(counts, Counts(args[0].numel(), fact.of, None, False))
            return whole, back, counts
        return UNKNOWN

    def _made(self, like: Any, shape: Any, real: Any, go: Any, dtype: Any = torch.int64) -> Any:
        """A new tensor of places. CUDA writes those of `nonzero` dimension by dimension."""
        strides = (1, shape[0]) if len(shape) == 2 else tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        made = go(_EMPTY, (), (shape, strides), {"dtype": dtype, "device": like.device})
        self.keep(made, None if real is None else Known(real))
        return made

    def _rows(self, mask: Any, line: Callable[[], str]) -> Any:
        """How many elements of a mask are not 0; None where nobody knows."""
        fact = self.of(mask)
        if isinstance(fact, Chosen):
            self._assume(fact.of, line)
            return fact.total if fact.dim is not None else share(fact.total, fact.of, fact.expert or 0)
        if isinstance(fact, Rows) and not fact.marked:
            return fact.count
        if isinstance(fact, Same):
            with _disable_current_modes():
                there = bool(fact.value != 0)
            return mask.numel() if there else 0
        rows = self.stated.rows(mask.numel(), line, fact.count if isinstance(fact, Rows) else None)
        if rows is not None:  # another line asks for the same rows
            self.keep(mask, Rows(rows))
        return rows

    def _places(self, indices: Any, line: Callable[[], str], go: Any) -> Any:
        """Indices whose masks are places; None where there is no mask of which anything is known."""
        found: list[Any] = []
        masks = 0
        for one in indices:
            if one is None or one.dtype not in (torch.bool, torch.uint8):
                found.append(one)
                continue
            fact = self.of(one)
            if isinstance(fact, Known):
                with _disable_current_modes():
                    rows: Any = int(fact.value.count_nonzero())
            else:
                rows = self._rows(one, line)
            if rows is None:
                return None
            masks += 1
            found += [self._made(one, (rows,), None, go) for _ in range(one.dim())]
        return found if masks else None

    def _assume(self, of: int, line: Callable[[], str]) -> None:
        at = line() if torch._C._current_autograd_node() is None else ""
        if at:
            self.assumed[at] = f"{of} experts are equally busy: each gets 1/{of} of the rows that were chosen for any"

    # -- after operations --------------------------------------------------------------------------------------------------

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note what an operation makes known of its results, and what it makes void."""
        marked = None
        if _name(func) in _PUTS:
            self._put(*args[:3])
            marked = marks(*args[:3], self.of(args[0]), self.of(args[2]))
        rule, written = _rule(func)
        fact = None if rule is None else rule(self, func, args, kwargs or {}, out)
        if written:
            self._void(func, args, kwargs or {})
        if marked is not None:
            self.keep(args[0] if written else out, marked)
        if fact is not None:
            if isinstance(out, torch.Tensor):
                self.keep(out, fact)
            elif isinstance(fact, tuple) and type(fact) is tuple:
                for one, known in zip(out, fact, strict=False):
                    self.keep(one, known)

    def _put(self, self_: Any, indices: Any, values: Any) -> None:
        """Rows that are put where a mask is true say how many it has: backward asks for them."""
        first, *others = indices
        if first is None or first.dtype is not torch.bool or others or self.of(first) is not None:
            return
        if values.dim() != self_.dim() - first.dim() + 1:
            return
        rows = values.shape[0]
        if isinstance(rows, torch.SymInt) and not rows.node.has_hint():  # itself unknown
            return
        if rows != 1:  # no one row for all
            self.keep(first, Rows(rows))

    def _void(self, func: Any, args: Any, kwargs: Any) -> None:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._forget(value)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in kwargs:
                self._forget(kwargs[argument.name])

    def _forget(self, value: Any) -> None:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()._cdata
                self._epochs[storage] = self._epochs.get(storage, 0) + 1


# -- rules: what a result is known to be ----------------------------------------------------------------------------------


def _real(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """The operation itself, on real values, where all are known."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    known = {id(tensor): facts.of(tensor) for tensor in tensors}
    if not tensors or not all(isinstance(fact, Known) for fact in known.values()):
        return None
    if sum(one.numel() for one in tree_leaves(out) if isinstance(one, torch.Tensor)) > _SMALL:
        return None

    def value(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return known[id(leaf)].value
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    with _disable_current_modes():
        try:
            made = func(*tree_map(value, args), **tree_map(value, kwargs))
        except RuntimeError:
            return None
    return Known(made) if isinstance(made, torch.Tensor) else tuple(Known(one) for one in made)


def _pointwise(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    special = _compared(facts, func, args)
    if special is not None:
        return special
    if args and isinstance(args[0], FakeTensor) and facts.of(args[0]) is None:  # of most tensors nothing is known
        return None
    leaves = tree_leaves((args, kwargs))
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    known = {id(tensor): facts.of(tensor) for tensor in tensors}
    if not tensors or any(fact is None for fact in known.values()):
        return None
    if all(isinstance(fact, Known) for fact in known.values()):
        return _real(facts, func, args, kwargs, out)
    if not all(isinstance(fact, Same | Among) for fact in known.values()) or not isinstance(out, torch.Tensor):
        return None
    among = [tensor for tensor in tensors if isinstance(known[id(tensor)], Among)]
    together = among and _alike(among, out) and len({id(known[id(tensor)].of) for tensor in among}) == 1
    if len(among) > 1 and not together:  # which goes with which is not known
        return None

    def value(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            fact = known[id(leaf)]
            one = fact.value.reshape(-1)
            return one if leaf.dim() or isinstance(fact, Among) else one[0]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    with _disable_current_modes():
        try:
            made = _functional(func)(*tree_map(value, args), **tree_map(value, kwargs))
        except (RuntimeError, TypeError):
            return None
        return (
            _among(made.reshape(-1), known[id(among[0])].of if together else None) if made.dtype == out.dtype else None
        )


def _among(values: torch.Tensor, of: object = None) -> Any:
    """One of these values; of: what decides which, if it decides for other tensors too."""
    distinct = values.unique()
    if distinct.numel() < 2:
        return Same(distinct) if distinct.numel() else None
    return Among(values, of) if of is not None else Among(distinct, object())


def _alike(tensors: list[Any], out: Any) -> bool:
    """Whether all have the shape of a result; symbols are not compared, which would be a guard, but read."""
    return all([*map(str, tensor.shape)] == [*map(str, out.shape)] for tensor in tensors)


def _elsewhere(fact: Any) -> Any:
    """The same values at other places, which no longer go with those of another tensor."""
    return fact._replace(of=object()) if isinstance(fact, Among) else fact


def _padded(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """What there was, and what it is padded with."""
    fact, value = facts.of(args[0]), args[2] if len(args) > 2 else kwargs.get("value", 0)
    if not isinstance(fact, Same | Among) or type(value) not in (int, float, bool):
        return None
    with _disable_current_modes():
        more = torch.full((1,), value, dtype=fact.value.dtype)
        return _among(torch.cat([fact.value.reshape(-1), more]))


def _functional(func: Any) -> Any:
    """An operation that writes to its argument, as one that does not: the argument's known value stays as it is."""
    if not func._schema.is_mutable:
        return func
    packet = getattr(torch.ops.aten, func._schema.name.partition("::")[2].rstrip("_"))
    return getattr(packet, func._overloadname)


def _compared(facts: Facts, func: Any, args: Any) -> Any:
    """Masks: of ids that equal an expert, of experts that were chosen at all, of those that still have room."""
    name, first = _name(func), facts.of(args[0]) if args else None
    other = args[1] if len(args) > 1 else None
    if name in ("_to_copy", "clone") or isinstance(first, Same | Known):
        return first if isinstance(first, Ids | Range | Counts | Chosen | Number | Rows) else None
    if isinstance(first, Rows) and name in ("bitwise_or", "logical_or") and isinstance(second := facts.of(other), Rows):
        return Rows(first.count + second.count, True)
    if isinstance(first, Range) and type(other) is int and other == 0:
        with _disable_current_modes():
            return first if name in ("add", "sub") else Same(torch.ones(1, dtype=torch.bool)) if name == "ge" else None
    if isinstance(first, Ids) and name == "eq":
        if type(other) is int:
            if 0 <= other < first.of:
                return Chosen(args[0].numel(), first.of, None, other, True)
            with _disable_current_modes():
                return Same(torch.zeros(1, dtype=torch.bool))
        if isinstance(facts.of(other), Range):
            return Chosen(args[0].numel(), first.of, axis(args[0], other), None, True)
    if isinstance(first, Chosen) and ((name in ("ne", "gt") and other == 0) or (name in ("eq", "ge") and other == 1)):
        return first._replace(ones=True) if name == "ne" or first.ones else None
    if (
        isinstance(first, Counts)
        and name in ("gt", "ne")
        and other == 0
        and first.expert is None
        and args[0].dim() == 1
    ):
        with _disable_current_modes():
            size = int(args[0].shape[0])
            return Known(torch.tensor([bool(share(first.total, first.of, one) > 0) for one in range(size)]))
    if isinstance(first, Rank) and name in ("le", "lt") and type(other) is int:
        return first._replace(within=other - (name == "lt"))
    if isinstance(first, Chosen) and name == "mul" and isinstance(rank := facts.of(other), Rank):
        return limited(first, rank)
    return None


def _view(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Another look at the same values."""
    fact, name = facts.of(args[0]), _name(func)
    if fact is None:
        return None
    if isinstance(fact, Known):
        return _real(facts, func, args, kwargs, out)
    several = isinstance(out, list | tuple)
    if isinstance(fact, Same | Among | Ids):
        return tuple(_elsewhere(fact) for _ in out) if several else _elsewhere(fact)
    if isinstance(fact, Range):
        return fact if name in ("view", "_unsafe_view", "unsqueeze", "detach", "alias", "squeeze", "expand") else None
    if isinstance(fact, Number):
        return None if several else fact
    if isinstance(fact, Rows):  # the same elements, in another shape or order
        return fact if name in _WHOLE else None
    if isinstance(fact, Counts):
        if name == "select" and args[0].dim() == 1:
            place = args[2] if args[2] >= 0 else args[2] + int(args[0].shape[0])
            return fact._replace(expert=place)
        if name == "unbind" and args[0].dim() == 1:
            return tuple(fact._replace(expert=place) for place in range(len(out)))
        return fact if name in ("detach", "alias", "view", "_unsafe_view") and out.dim() == args[0].dim() else None
    return view_of_mask(fact, name, args, out) if isinstance(fact, Chosen | Rank) and not several else None


def _chosen(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """topk, argmax and the like: which of a small number had the largest."""
    dim = args[1] if len(args) > 1 and _name(func) != "topk" else args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if type(dim) is not int or not args[0].dim():
        return None
    of = args[0].shape[dim]
    if type(of) is not int or not 1 < of <= _MOST or not args[0].is_floating_point():
        return None
    return Ids(of) if isinstance(out, torch.Tensor) else (None, Ids(of))


def _sorted(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    fact = facts.of(args[0])
    return (fact, None) if isinstance(fact, Ids | Same) else None


def _drawn(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    of = args[0].shape[-1]
    return Ids(of) if type(of) is int and 1 < of <= _MOST else None


def _uniform(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """A number that is drawn."""
    low, high = tuple(args[1:3]) + (0.0, 1.0)[len(args) - 1 :]
    return Drawn(float(low), float(high)) if type(out.numel()) is int and out.numel() == 1 else None


def _filled(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """zeros, ones, full and the like."""
    name = _name(func)
    if name == "arange":
        if len(args) == 1 and type(args[0]) is int and not out.is_floating_point():
            return Range(args[0])
        return None
    if "zero" in name:
        value: Any = 0
    elif "ones" in name:
        value = 1
    elif name == "scalar_tensor":
        value = args[0]
    else:
        value = kwargs.get("fill_value", kwargs.get("value", args[-1] if len(args) > 1 else None))
    if type(value) not in (int, float, bool):
        return None
    with _disable_current_modes():
        return Same(torch.full((1,), value, dtype=out.dtype))


def _scattered(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """1 for each expert that was chosen, put where 0 was."""
    self, dim, index = args[:3]
    before, ids = facts.of(self), facts.of(index)
    if not isinstance(before, Same) or not isinstance(ids, Ids):
        return None
    with _disable_current_modes():
        if bool(before.value != 0):
            return None
    value = args[3] if len(args) > 3 else kwargs.get("value")
    return Chosen(index.numel(), ids.of, dim if dim < 0 else dim - self.dim(), None, value == 1)


def _summed(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    fact, name = facts.of(args[0]), _name(func)
    if isinstance(fact, Same):
        return _summed_alike(fact, name, args, out)
    if isinstance(fact, Known):
        return _real(facts, func, args, kwargs, out)
    if isinstance(fact, Ids) and len(args) == 1 and name in ("max", "min"):
        return Number(fact.of - 1 if name == "max" else 0)
    if isinstance(fact, Counts) and len(args) == 1 and fact.expert is None and not fact.ends:
        extreme = {"max": share(fact.total, fact.of, 0), "min": fact.total // fact.of, "sum": fact.total}.get(name)
        return None if extreme is None else Number(extreme)
    if not isinstance(fact, Chosen) or name not in ("sum", "any", "count_nonzero"):
        return None
    dims = args[0].dim()
    given = args[1] if len(args) > 1 else None
    reduced = {
        one % dims for one in ((given,) if type(given) is int else range(dims) if given in (None, []) else given)
    }
    left = set(range(dims)) - reduced
    if fact.expert is not None and not left:
        if name == "any":
            return Number(bool(share(fact.total, fact.of, fact.expert) > 0))
        return Counts(fact.total, fact.of, fact.expert, False) if fact.ones or name != "sum" else None
    if fact.dim is not None and left == {fact.dim % dims} and out.dim() == 1 and (fact.ones or name != "sum"):
        counts = Counts(fact.total, fact.of, None, False)
        if name != "any":
            return counts
        with _disable_current_modes():
            size = int(out.shape[0])
            return Known(torch.tensor([bool(share(counts.total, counts.of, one) > 0) for one in range(size)]))
    return None


def _summed_alike(fact: Same, name: str, args: Any, out: Any) -> Any:
    if name in ("any", "all", "max", "min", "amax", "amin", "mean") and isinstance(out, torch.Tensor):
        with _disable_current_modes():
            return Same(fact.value.to(out.dtype))
    if name == "sum" and isinstance(out, torch.Tensor):
        count = args[0].numel() // max(1, out.numel()) if type(args[0].numel()) is int else None
        with _disable_current_modes():
            if count is not None:
                return Same((fact.value.to(out.dtype) * count).to(out.dtype))
            return Same(fact.value.to(out.dtype)) if bool(fact.value == 0) else None
    return None


def _added_up(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    fact = facts.of(args[0])
    if isinstance(fact, Counts) and fact.expert is None:
        return fact._replace(ends=True)
    if isinstance(fact, Chosen) and fact.ones and fact.dim is not None and type(args[1]) is int:
        return Rank(fact, args[0].shape[args[1]], None) if args[1] % out.dim() != fact.dim % out.dim() else None
    return _real(facts, func, args, kwargs, out)


def _taken(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """What an index takes of a tensor."""
    fact = facts.of(args[0])
    if isinstance(fact, Same | Among | Ids):
        return _elsewhere(fact)
    if isinstance(fact, Chosen) and fact.dim is not None and fact.dim % args[0].dim() == 0 and _name(func) == "index":
        place = facts.of(args[1][0]) if len(args[1]) == 1 else None
        if isinstance(place, Known) and place.value.numel() == 1:
            with _disable_current_modes():
                return fact._replace(dim=None, expert=int(place.value))
        return None
    if isinstance(fact, Known):
        indices = args[1] if _name(func) == "index" else ()
        return _real(facts, func, (args[0], list(indices)), {}, out) if indices and None not in indices else None
    return None


def _joined(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    known = [facts.of(one) for one in args[0]]
    first = known[0] if known else None
    if isinstance(first, Ids) and all(one == first for one in known):
        return first
    if isinstance(first, Rows) and all(isinstance(one, Rows) for one in known):
        return Rows(sum(one.count for one in known), any(one.marked for one in known))
    if isinstance(first, Same) and all(isinstance(one, Same) for one in known):
        with _disable_current_modes():
            return first if all(bool(one.value == first.value) for one in known) else None
    return None


def _histogram(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    fact = facts.of(args[0])
    bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
    return Counts(args[0].numel(), fact.of, None, False) if isinstance(fact, Ids) and bins == fact.of else None


_VIEWS = (
    "view _unsafe_view permute transpose t unsqueeze squeeze expand detach alias select slice unbind split split_with_sizes"
    " as_strided repeat lift_fresh"
)
_WHOLE = frozenset(("view", "_unsafe_view", "permute", "transpose", "t", "unsqueeze", "squeeze", "detach", "alias"))
_FILLS = (
    "zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill fill_ zero_ arange scalar_tensor"
)
_SUMS, _CHOICES, _TAKES = (
    "sum any all max min amax amin mean count_nonzero",
    "topk argmax argmin",
    "index index_select gather",
)
_MORE = {
    "sort": _sorted, "multinomial": _drawn, "scatter": _scattered, "scatter_": _scattered, "cumsum": _added_up,
    "cat": _joined, "stack": _joined, "histc": _histogram, "constant_pad_nd": _padded, "_to_copy": _pointwise, "clone": _pointwise,
    "uniform_": _uniform,
}  # fmt: skip
_BY_RULE = ((_VIEWS, _view), (_FILLS, _filled), (_SUMS, _summed), (_CHOICES, _chosen), (_TAKES, _taken))
_RULES: dict[str, Any] = {name: rule for names, rule in _BY_RULE for name in names.split()} | _MORE
_EMPTY = torch.ops.aten.empty_strided.default


@functools.cache
def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return "" if schema is None or not schema.name.startswith("aten::") else schema.name.partition("::")[2]


@functools.cache
def _rule(func: Any) -> tuple[Any, bool]:
    """What to do after an operation, and whether it writes to an argument."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return None, bool(getattr(getattr(func, "_schema", None), "is_mutable", False))
    rule = _RULES.get(_name(func))
    written = func._schema.is_mutable
    if rule is None and torch.Tag.pointwise in func.tags and not written and len(func._schema.returns) == 1:
        rule = _pointwise
    return rule, written
