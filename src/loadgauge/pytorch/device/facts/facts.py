"""Facts about the values of fake tensors: all elements alike, ids of experts, masks and counts of who was chosen.

A fake tensor has no values, but some are certain (a mask of ones), and some have an expectation that a program's sizes hang on:
which rows an expert gets is data, how many it gets is a share. Experts are taken as equally busy: of n choices among E experts,
expert i gets (n + E - 1 - i) // E, which add up to n. Every line where that decides a size is kept in `Facts.assumed`.

A fact belongs to a tensor and is void once its storage is written to.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from loadgauge.pytorch.device.facts.fact_kinds import (
    Chosen,
    Counts,
    Drawn,
    Ids,
    Known,
    Mask,
    Number,
    Placed,
    Rows,
    Run,
    Same,
    Tiled,
    share,
)
from loadgauge.pytorch.device.facts.fact_rules import name_of, rule_of
from loadgauge.pytorch.device.facts.stated_rows import StatedRows, fills, marks
from loadgauge.pytorch.device.facts.tiled import repeats, tiled

_FACT = "_loadgauge_fact"
_EMPTY = torch.ops.aten.empty_strided.default
UNKNOWN: Any = object()
_NONZERO = torch.ops.aten.nonzero.default
_PUTS = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")


class _Held(NamedTuple):
    fact: Any
    storage: int
    epoch: int

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # of a copied tensor it is void: its storage is another


class Facts:
    """Facts about the tensors of one fake mode. `assumed`: by line, what was taken for granted of who is chosen."""

    def __init__(self) -> None:
        self.assumed: dict[str, str] = {}
        self.stated = StatedRows({}, self.assumed)
        self._epochs: dict[int, int] = {}
        self._tiled = False

    def of(self, tensor: Any) -> Any:
        """Return what is known of a tensor, or None."""
        held = getattr(tensor, "__dict__", {}).get(_FACT) if isinstance(tensor, FakeTensor) else None
        if held is None:
            return None
        there = held.storage == tensor.untyped_storage()._cdata and held.epoch == self._epochs.get(held.storage, 0)
        return held.fact if there else None

    def keep(self, tensor: Any, fact: Any) -> None:
        """Note what is known of a tensor."""
        if fact is not None and isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()._cdata
            self._tiled = self._tiled or isinstance(fact, Tiled | Placed)
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
            return sum(share(fact.total, fact.of, part) for part in parts)
        if isinstance(fact, Drawn):
            self.assumed[line()] = f"a number drawn between {fact.low:g} and {fact.high:g} is in the middle"
            return (fact.low + fact.high) / 2
        return fact.value if isinstance(fact, Number) else UNKNOWN

    def instead(self, func: Any, args: Any, kwargs: Any, line: Callable[[], str], go: Callable[..., Any]) -> Any:
        """The result of an operation whose shape hangs on values, where they are known; else `UNKNOWN`.

        go: runs an operation on fake tensors. Raises what the operation does without.
        """
        name = name_of(func)
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
        if name in _PUTS and fills(args, self.of(args[2])):
            return self._filled(func, args, kwargs, go)
        if name in ("index", "_unsafe_index", *_PUTS):
            places = self._places(args[1], line, go)
            if places is not None:
                before = self.of(args[0]) if any(index is not None and 0 in index.shape for index in places) else None
                out = go(func, (), (args[0], places, *args[2:]), kwargs)
                self.after(func, args, kwargs, out)
                if name in _PUTS and func._schema.is_mutable:  # nowhere
                    self.keep(args[0], before)
                return out
        if name == "bincount" and isinstance(fact := self.of(args[0]), Ids) and (len(args) == 1 or args[1] is None):
            size = max(fact.of, args[2] if len(args) > 2 else kwargs.get("minlength", 0))
            result = self._made(args[0], (size,), None, go)
            self.keep(result, Counts(args[0].numel(), fact.of, None, False))
            return result
        if name == "bincount" and (size := args[2] if len(args) > 2 else kwargs.get("minlength", 0)):
            self.assumed[line()] = f"what is counted lies below {size}"
            return self._made(
                args[0], (size,), None, go, torch.int64 if len(args) < 2 or args[1] is None else args[1].dtype
            )
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

    def _filled(self, func: Any, args: Any, kwargs: Any, go: Any) -> Any:
        """A number that is written where a mask is true: nowhere, where it is known to be false; else `UNKNOWN`."""
        fact = self.of(next(index for index in args[1] if index is not None))
        with _disable_current_modes():
            if not isinstance(fact, Same | Known) or bool(fact.value.any()):
                return UNKNOWN
        before = self.of(args[0])
        out = go(func, (), args, kwargs)
        self.after(func, args, kwargs, out)
        self.keep(args[0] if func._schema.is_mutable else out, before)
        return out

    def _made(self, like: Any, shape: Any, real: Any, go: Any, dtype: Any = torch.int64) -> Any:
        """A new tensor of places. CUDA writes those of `nonzero` dimension by dimension."""
        strides = (1, shape[0]) if len(shape) == 2 else tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        tensor = go(_EMPTY, (), (shape, strides), {"dtype": dtype, "device": like.device})
        self.keep(tensor, None if real is None else Known(real))
        return tensor

    def _rows(self, mask: Any, line: Callable[[], str]) -> Any:
        """How many elements of a mask are not 0; None where nobody knows."""
        fact = self.of(mask)
        if isinstance(fact, Chosen):
            self._assume(fact.of, line)
            return fact.total if fact.dim is not None else share(fact.total, fact.of, fact.expert or 0)
        if isinstance(fact, Rows) and not fact.marked:
            return fact.count
        if isinstance(fact, Tiled):
            with _disable_current_modes():
                return int(fact.value.count_nonzero()) * repeats(mask, fact)
        if isinstance(fact, Run):
            return fact.tokens * mask.shape[0]
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
        dense: list[Any] = []
        masks = 0
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                dense.append(index)
                continue
            fact = self.of(index)
            if isinstance(fact, Known):
                with _disable_current_modes():
                    rows: Any = int(fact.value.count_nonzero())
            else:
                rows = self._rows(index, line)
            if rows is None:
                return None
            masks += 1
            dense += [self._made(index, (rows,), None, go) for _ in range(index.dim())]
        return dense if masks else None

    def _assume(self, of: int, line: Callable[[], str]) -> None:
        at = line()
        if at:
            self.assumed[at] = f"{of} experts are equally busy: each gets 1/{of} of the rows that were chosen for any"

    # -- after operations --------------------------------------------------------------------------------------------------

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note what an operation makes known of its results, and what it makes void."""
        marked = None
        if name_of(func) in _PUTS:
            self._put(*args[:3])
            if args[2].requires_grad and torch.is_grad_enabled():
                self._counted(args[1])
            marked = marks(args[0], args[1], args[2], self.of(args[0]), self.of(args[2]))
        rule, written = rule_of(func)
        fact = tiled(self, func, name_of(func), args, kwargs or {}, out) if self._tiled else None
        if fact is None and rule is not None:
            fact = rule(self, func, args, kwargs or {}, out)
        if written:
            self._void(func, args, kwargs or {})
        if marked is not None:
            self.keep(args[0] if written else out, marked)
        if fact is not None:
            if isinstance(out, torch.Tensor):
                self.keep(out, fact)
            elif isinstance(fact, tuple) and type(fact) is tuple:
                for result, part in zip(out, fact, strict=False):
                    self.keep(result, part)

    def _put(self, self_: Any, indices: Any, values: Any) -> None:
        """Rows that are put where a mask is true say how many it has: backward asks for them."""
        first, *others = indices
        if first is None or first.dtype is not torch.bool or others or not isinstance(self.of(first), Mask | None):
            return
        if values.dim() != self_.dim() - first.dim() + 1:
            return
        rows = values.shape[0]
        if isinstance(rows, torch.SymInt) and not rows.node.has_hint():  # itself unknown
            return
        if rows != 1:  # no one row for all
            self.keep(first, Rows(rows))

    def _counted(self, indices: Any) -> None:
        """Raise for a mask of which nobody knows how many places it has: backward, where no line asks, takes the gradient there."""
        for index in indices:
            if (
                index is not None
                and index.dtype is torch.bool
                and not isinstance(self.of(index), Chosen | Known | Rows | Same)
            ):
                raise DynamicOutputShapeException(_NONZERO)

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
