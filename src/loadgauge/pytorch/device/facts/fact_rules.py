"""Rules that derive facts about an operation's results: one for each kind of operation."""

import functools
import math
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from loadgauge.pytorch.device.facts.fact_kinds import (
    Among,
    Chosen,
    Counts,
    Drawn,
    Ids,
    Known,
    Mask,
    Number,
    Range,
    Rank,
    Rows,
    Same,
    Tokens,
    axis,
    limited,
    share,
    view_of_mask,
)

_MOST = 4096
"""Of so many experts at most an index is one: of more, it is a place in something else, such as a vocabulary."""
_SMALL = 65_536


class Facts(Protocol):
    """What rules ask: the facts of tensors, and to hold one (`facts.Facts`)."""

    def of(self, tensor: Any) -> Any:
        """Return what is known of a tensor, or None."""

    def keep(self, tensor: Any, fact: Any) -> None:
        """Note what is known of a tensor."""


def _real(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """The operation itself, on real values, where all are known."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    facts_of = {id(tensor): facts.of(tensor) for tensor in tensors}
    if not tensors or not all(isinstance(fact, Known) for fact in facts_of.values()):
        return None
    if sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)) > _SMALL:
        return None

    def value(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return facts_of[id(leaf)].value
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    with _disable_current_modes():
        try:
            result = func(*tree_map(value, args), **tree_map(value, kwargs))
        except RuntimeError:
            return None
    return Known(result) if isinstance(result, torch.Tensor) else tuple(Known(part) for part in result)


def _pointwise(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    special = _compared(facts, func, args) or _calculated(facts, func, args, kwargs, out)
    if special is not None:
        return special
    if args and isinstance(args[0], FakeTensor) and facts.of(args[0]) is None:  # of most tensors nothing is known
        return None
    leaves = tree_leaves((args, kwargs))
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    facts_of = {id(tensor): facts.of(tensor) for tensor in tensors}
    if not tensors or any(fact is None for fact in facts_of.values()):
        return None
    if all(isinstance(fact, Known) for fact in facts_of.values()):
        return _real(facts, func, args, kwargs, out)
    if not all(isinstance(fact, Same | Among) for fact in facts_of.values()) or not isinstance(out, torch.Tensor):
        return None
    among = [tensor for tensor in tensors if isinstance(facts_of[id(tensor)], Among)]
    together = among and _alike(among, out) and len({id(facts_of[id(tensor)].of) for tensor in among}) == 1
    if len(among) > 1 and not together:  # which goes with which is not known
        return None

    def value(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            fact = facts_of[id(leaf)]
            values = fact.value.reshape(-1)
            return values if leaf.dim() or isinstance(fact, Among) else values[0]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    with _disable_current_modes():
        try:
            result = _functional(func)(*tree_map(value, args), **tree_map(value, kwargs))
        except (RuntimeError, TypeError):
            return None
        return (
            _among(result.reshape(-1), facts_of[id(among[0])].of if together else None)
            if result.dtype == out.dtype
            else None
        )


def _calculated(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """A whole number made of two, of which one may be a symbol, as where a size is divided by `torch.div`."""
    name = name_of(func)
    if name not in ("add", "sub", "mul", "div", "floor_divide") or len(args) < 2:
        return None
    if not isinstance(args[0], torch.SymInt) and not isinstance(facts.of(args[0]), Number):
        return None
    left, right = _number(facts, args[0]), _number(facts, args[1])
    if left is None or right is None or out.dim() or out.is_floating_point() or kwargs.get("alpha", 1) != 1:
        return None
    if name in ("add", "sub", "mul"):
        return Number(left + right if name == "add" else left - right if name == "sub" else left * right)
    rounded = name == "floor_divide" or kwargs.get("rounding_mode") in ("floor", "trunc")
    return Number(left // right) if rounded and left >= 0 and right > 0 else None  # of symbols, these are guards


def _number(facts: Facts, operand: Any) -> Any:
    """A whole number, or the one that a tensor is known to be; None of all else."""
    if isinstance(operand, torch.Tensor):
        fact = facts.of(operand)
        operand = fact.value if isinstance(fact, Number) else None
    return operand if type(operand) in (int, torch.SymInt) else None


def _among(values: torch.Tensor, of: object = None) -> Any:
    """One of these values; of: what decides which, if it decides for other tensors too."""
    distinct = values.unique()
    if distinct.numel() < 2:
        return Same(distinct) if distinct.numel() else None
    return Among(values, of) if of is not None else Among(distinct, object())


def _alike(tensors: list[Any], out: Any) -> bool:
    """Return whether all have the shape of a result; symbols are not compared, which would be a guard, but read."""
    return all([*map(str, tensor.shape)] == [*map(str, out.shape)] for tensor in tensors)


def _elsewhere(fact: Any) -> Any:
    """The same values at other places, which no longer go with those of another tensor."""
    return fact._replace(of=object()) if isinstance(fact, Among) else fact


def _padded(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Return what there was, and what it is padded with."""
    fact, value = facts.of(args[0]), args[2] if len(args) > 2 else kwargs.get("value", 0)
    if not isinstance(fact, Same | Among) or type(value) not in (int, float, bool):
        return None
    with _disable_current_modes():
        more = torch.full((1,), value, dtype=fact.value.dtype)
        return _among(torch.cat([fact.value.reshape(-1), more]))


def _either(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """`where`: the values of one or of the other, whichever it takes."""
    fact_of_values = _pointwise(facts, func, args, kwargs, out)
    if fact_of_values is not None or len(args) != 3:
        return fact_of_values
    values: list[torch.Tensor] = []
    with _disable_current_modes():
        for choice in args[1:]:
            fact = facts.of(choice) if isinstance(choice, torch.Tensor) else None
            if isinstance(fact, Same | Among):
                values.append(fact.value.reshape(-1).to(out.dtype))
            elif type(choice) in (int, float, bool):
                values.append(torch.full((1,), choice, dtype=out.dtype))
            else:
                return None
        return _among(torch.cat(values))


def _functional(func: Any) -> Any:
    """An operation that writes to its argument, as one that does not: the argument's known value stays as it is."""
    if not func._schema.is_mutable:
        return func
    packet = getattr(torch.ops.aten, func._schema.name.partition("::")[2].rstrip("_"))
    return getattr(packet, func._overloadname)


def _compared(facts: Facts, func: Any, args: Any) -> Any:
    """Masks: of ids that equal an expert, of experts that were chosen at all, of those that still have room."""
    name, first = name_of(func), facts.of(args[0]) if args else None
    other = args[1] if len(args) > 1 else None
    if name in ("_to_copy", "clone") or isinstance(first, Same | Known):
        return first if isinstance(first, Ids | Range | Counts | Chosen | Number | Rows) else None
    if isinstance(first, Rows) and name in ("bitwise_or", "logical_or") and isinstance(second := facts.of(other), Rows):
        return Rows(first.count + second.count, True)
    if isinstance(first, Range) and type(other) is int and other == 0:
        with _disable_current_modes():
            return first if name in ("add", "sub") else Same(torch.ones(1, dtype=torch.bool)) if name == "ge" else None
    if isinstance(first, Tokens) and name == "eq" and type(other) is int:
        return next((Rows(count) for token, count in first.counts if token == other), None)
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
            return Known(torch.tensor([bool(share(first.total, first.of, expert) > 0) for expert in range(size)]))
    if isinstance(first, Rank) and name in ("le", "lt") and type(other) is int:
        return first._replace(within=other - (name == "lt"))
    if isinstance(first, Chosen) and name == "mul" and isinstance(rank := facts.of(other), Rank):
        return limited(first, rank)
    return None


def _view(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Another look at the same values."""
    fact, name = facts.of(args[0]), name_of(func)
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
    if isinstance(fact, Rows):  # the same elements, in another shape or order, or each of them so many times
        if name == "expand" and not fact.marked:
            return Rows(fact.count * _times(args[0].shape, out.shape))
        return fact if name in _WHOLE else None
    if isinstance(fact, Counts):
        if name == "select" and args[0].dim() == 1:
            expert = args[2] if args[2] >= 0 else args[2] + int(args[0].shape[0])
            return fact._replace(expert=expert)
        if name == "unbind" and args[0].dim() == 1:
            return tuple(fact._replace(expert=expert) for expert in range(len(out)))
        return fact if name in ("detach", "alias", "view", "_unsafe_view") and out.dim() == args[0].dim() else None
    return view_of_mask(fact, name, args, out) if isinstance(fact, Chosen | Rank) and not several else None


def _times(before: Any, after: Any) -> Any:
    """How often each element is there after it was expanded; symbols are compared as they are written."""
    whole = (1,) * (len(after) - len(before)) + tuple(before)
    return math.prod(big for length, big in zip(whole, after, strict=True) if str(length) != str(big))


def _chosen(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """topk, argmax and the like: which of a small number had the largest."""
    dim = args[1] if len(args) > 1 and name_of(func) != "topk" else args[2] if len(args) > 2 else kwargs.get("dim", -1)
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
    name = name_of(func)
    if name == "arange":
        whole = args[1:] if len(args) == 2 and type(args[0]) is int and args[0] == 0 else args
        if len(whole) == 1 and type(whole[0]) is int and not out.is_floating_point():
            return Range(whole[0])
        return None
    if "zero" in name:
        value: Any = 0
    elif "ones" in name:
        value = 1
    else:
        last = args[-1] if len(args) > 1 or name == "scalar_tensor" else None
        value = kwargs.get("fill_value", kwargs.get("value", last))
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
    fact, name = facts.of(args[0]), name_of(func)
    if isinstance(fact, Same):
        return _summed_alike(fact, name, args, out)
    if isinstance(fact, Known):
        return _real(facts, func, args, kwargs, out)
    if isinstance(fact, Ids) and len(args) == 1 and name in ("max", "min"):
        return Number(fact.of - 1 if name == "max" else 0)
    if isinstance(fact, Counts) and len(args) == 1 and fact.expert is None and not fact.ends:
        extreme = {"max": share(fact.total, fact.of, 0), "min": fact.total // fact.of, "sum": fact.total}.get(name)
        return None if extreme is None else Number(extreme)
    if isinstance(fact, Rows) and len(args) == 1 and name == "any" and not fact.marked:
        return Number(bool(fact.count > 0))
    if not isinstance(fact, Chosen) or name not in ("sum", "any", "count_nonzero"):
        return None
    dims = args[0].dim()
    dims_named = args[1] if len(args) > 1 else None
    reduced = {
        dim % dims
        for dim in (
            (dims_named,) if type(dims_named) is int else range(dims) if dims_named in (None, []) else dims_named
        )
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
            return Known(torch.tensor([bool(share(counts.total, counts.of, expert) > 0) for expert in range(size)]))
    return None


def _turned(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Where a mask is not true, which of the mask itself is noted too."""
    mask, fact = args[0], facts.of(args[0])
    if mask.dtype is not torch.bool or not isinstance(fact, Mask | Rows | None):
        return _pointwise(facts, func, args, kwargs, out)
    if isinstance(fact, Rows):
        return None if fact.marked else Rows(mask.numel() - fact.count)
    if fact is None:
        fact = Mask(object(), False)
        facts.keep(mask, fact)
    return fact._replace(turned=not fact.turned)


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
    """Return what an index takes of a tensor."""
    fact = facts.of(args[0])
    if isinstance(fact, Same | Among | Ids):
        return _elsewhere(fact)
    if isinstance(fact, Chosen) and fact.dim is not None and fact.dim % args[0].dim() == 0 and name_of(func) == "index":
        index = facts.of(args[1][0]) if len(args[1]) == 1 else None
        if isinstance(index, Known) and index.value.numel() == 1:
            with _disable_current_modes():
                return fact._replace(dim=None, expert=int(index.value))
        return None
    if isinstance(fact, Known):
        indices = args[1] if name_of(func) == "index" else ()
        return _real(facts, func, (args[0], list(indices)), {}, out) if indices and None not in indices else None
    return None


def _joined(facts: Facts, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    parts = [facts.of(tensor) for tensor in args[0]]
    first = parts[0] if parts else None
    if isinstance(first, Ids) and all(part == first for part in parts):
        return first
    if isinstance(first, Mask) and len(parts) == 2 and parts[1] == first._replace(turned=not first.turned):
        return Rows(args[0][0].numel())
    if isinstance(first, Rows) and all(isinstance(part, Rows) for part in parts):
        return Rows(sum(part.count for part in parts), any(part.marked for part in parts))
    if isinstance(first, Same) and all(isinstance(part, Same) for part in parts):
        with _disable_current_modes():
            return first if all(bool(part.value == first.value) for part in parts) else None
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
    "uniform_": _uniform, "where": _either, "bitwise_not": _turned, "logical_not": _turned,
}  # fmt: skip
_BY_RULE = ((_VIEWS, _view), (_FILLS, _filled), (_SUMS, _summed), (_CHOICES, _chosen), (_TAKES, _taken))
_RULES: dict[str, Any] = {name: rule for names, rule in _BY_RULE for name in names.split()} | _MORE


@functools.cache
def name_of(func: Any) -> str:
    """The name of an operator of ATen, "" of any other."""
    schema = getattr(func, "_schema", None)
    return "" if schema is None or not schema.name.startswith("aten::") else schema.name.partition("::")[2]


@functools.cache
def rule_of(func: Any) -> tuple[Any, bool]:
    """Return what to do after an operation, and whether it writes to an argument."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return None, bool(getattr(getattr(func, "_schema", None), "is_mutable", False))
    rule = _RULES.get(name_of(func))
    written = func._schema.is_mutable
    if rule is None and torch.Tag.pointwise in func.tags and not written and len(func._schema.returns) == 1:
        rule = _pointwise
    return rule, written
