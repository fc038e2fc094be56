"""Fake tensors, fast: what an operation makes of arguments of known shapes is worked out once, then reused.

PyTorch's own cache does the same, but spends longer on the key of an entry than on all the rest. This one keeps only
operations that read no values, change no shapes in place, and give new tensors, views or their own arguments; everything
else takes PyTorch's way.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from loadgauge.pytorch.device.facts.facts import UNKNOWN, Facts
from loadgauge.pytorch.device.read import Read, asking

_DEVICE_OF = torch.ops.prim.device.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_SETTING = frozenset({torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset})
_EMPTY = torch.ops.aten.empty.memory_format
GROUPED = torch.ops.aten._grouped_mm.default if hasattr(torch.ops.aten, "_grouped_mm") else None
_OF_SQUARES = torch.ops.aten.mse_loss_backward.default
_CONVOLUTION, _OF_CONVOLUTION = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
_ADD_TO = torch.ops.aten.add_.Tensor
_NEVER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_FRESH, _VIEW, _SAME, _OTHER = range(4)


def faking() -> bool:
    """Return whether tensors are made without memory now.

    >>> faking()
    False
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class FakeMode(FakeTensorMode):
    """Fake tensors that never need a value: `.item()` of one gives 1."""

    def __init__(self, env: Any = None) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=env)
        self.plans: dict[Any, Any] = {}
        self._template: dict[str, Any] = {}
        self.read, self.facts = Read(), Facts()
        self.cuda: torch.device | None = None
        """The device in place of `cuda`, where the code itself names devices."""

    @property
    def avoid_device_init(self) -> bool:
        """True, for PyTorch's base class: the simulated device has no kernels that could make a real tensor."""
        return True

    def __deepcopy__(self, memo: Any) -> Self:
        # A copied module would otherwise carry a mode of its own, which PyTorch refuses to mix.
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As the base class, without the wrapper that PyTorch puts around it."""
        return self.dispatch(func, types, args, kwargs)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator on fake tensors as the base class does, but faster, and without an error where a value is asked for.

        func, types, args, kwargs: those of `__torch_dispatch__`; returns fake tensors, and a made-up number for a value
        """
        if func is _DEVICE_OF and len(args) == 1 and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is _ITEM and getattr(args[0], "constant", None) is None:
            return self.read.item(args[0], self.facts)
        self._begin()
        kwargs = kwargs or {}
        out = self.facts.instead(func, args, kwargs, asking, self._run)
        if out is UNKNOWN:
            out = self._run(func, types, args, kwargs)
            self.facts.after(func, args, kwargs, out)
        return out

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.cuda is not None and kwargs and getattr(kwargs.get("device"), "type", "") == "cuda":
            kwargs = {**kwargs, "device": self.cuda}  # in backward no function mode could exchange it
        if func is _ADD_TO and getattr(args[1], "layout", None) is torch.sparse_coo:
            return args[0]  # sparse rows are added to a table in place, for which PyTorch has no rule on fake tensors
        if func is GROUPED and args[0].dtype is not torch.bfloat16:
            return super().dispatch(
                _EMPTY,
                (),
                (product_shape(args[0], args[1], args[2] if len(args) > 2 else (kwargs or {}).get("offs")),),
                _like(args[0]),
            )
        if func is _OF_SQUARES and args[1].numel() == 0:  # PyTorch's rule divides by the number of elements
            return super().dispatch(_EMPTY, (), (list(args[1].shape),), _like(args[1]))
        out = self._once(func, types, args, kwargs or {})
        if func is _CONVOLUTION and channels_together(*args[:2]):
            return self._together(out)
        if func is _OF_CONVOLUTION and channels_together(*args[1:3]):
            return (*(result if result is None else self._together(result) for result in out[:2]), out[2])
        return out

    def _together(self, tensor: Any) -> Any:
        """A tensor like one that an operation tensor, with its channels together."""
        laid = {"memory_format": torch.channels_last, **_like(tensor)}
        return super().dispatch(_EMPTY, (), (list(tensor.shape),), laid)

    def _begin(self) -> None:
        """Take note that an operation begins."""

    def _once(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator as PyTorch does, or as it did before on tensors of the same description."""
        if func in _SETTING:
            # PyTorch remembers what it was called with, and so would hold the storage.
            return self._uncached(func, types, args, kwargs)
        if not suits(func) or torch._C.is_inference_mode_enabled():
            return super().dispatch(func, types, args, kwargs)
        tensors: list[Any] = []
        parts: list[Any] = [func, torch.get_default_dtype()]
        if not describe(self, (*args, *kwargs, *kwargs.values()), parts, tensors, _lies):
            return super().dispatch(func, types, args, kwargs)
        key = tuple(parts)
        plan = self.plans.get(key)
        if plan is not None:
            return self._carry_out(plan, tensors)
        plan = self._of_columns(func, types, args, kwargs)
        if plan is not None:
            self.plans[key] = plan
            return self._carry_out(plan, tensors)
        shapes = [tensor.shape for tensor in tensors]
        # PyTorch's own cache forgets what of a storage no element lies in, such as the padding of attention's bias gradient: a
        # second run would be smaller than the first.
        out = self._uncached(func, types, args, kwargs)
        if shapes == [tensor.shape for tensor in tensors]:
            plan = self._plan(out, tensors)
            if plan is not None:
                self.plans[key] = plan
        return out

    def _uncached(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        before, self.cache_enabled = self.cache_enabled, False
        try:
            return super().dispatch(func, types, args, kwargs)
        finally:
            self.cache_enabled = before

    def _of_columns(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The plan of an operation on lists of tensors, from one of each kind, as parameters have few; None if it has none."""
        lists = [argument for argument in args if type(argument) is list or type(argument) is tuple]
        if not lists or kwargs or not func._schema.name.startswith("aten::_foreach_"):
            return None
        count = len(lists[0])
        if any(len(column) != count for column in lists):
            return None
        keys: list[Any] = []
        for column in zip(*lists, strict=True):
            parts: list[Any] = []
            if not describe(self, column, parts, [], _lies):
                return None
            keys.append(tuple(parts))
        firsts = {kind: at for at, kind in reversed(list(enumerate(keys)))}
        if 2 * len(firsts) > count:
            return None
        few = [
            [column[at] for at in firsts.values()] if type(column) is list or type(column) is tuple else column
            for column in args
        ]
        out = self._uncached(func, types, few, {})
        if out is None:
            return None, (_OTHER, None)
        tensors = [tensor for part in few if type(part) is list for tensor in part if isinstance(tensor, FakeTensor)]
        kind, steps = self._plan(out, tensors) or (None, ())
        if kind is None or any(step[0] != _FRESH for step in steps):
            return None
        of = dict(zip(firsts, steps, strict=True))
        return kind, [of[index] for index in keys]

    def _plan(self, out: Any, tensors: list[Any]) -> Any:
        """How to make such a result again; None where it cannot be."""
        several = isinstance(out, tuple | list)
        if any(
            getattr(result, "layout", torch.strided) is not torch.strided for result in (out if several else (out,))
        ):
            return None
        result, fresh = [], 0
        storages = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(tensors)}
        results = {
            tensor.untyped_storage()._cdata for tensor in (out if several else (out,)) if isinstance(tensor, FakeTensor)
        }
        for tensor in out if several else (out,):
            step = self._step(tensor, tensors, storages)
            if step is None:
                return None
            fresh += step[0] == _FRESH
            result.append(step)
        if fresh != len(results - storages.keys()):  # two results in one new storage
            return None
        return (list if isinstance(out, list) else tuple, result) if several else (None, result[0])

    def _step(self, result: Any, tensors: list[Any], storages: dict[int, int]) -> Any:
        if type(result) in PLAIN:
            return (_OTHER, result)
        if not isinstance(result, FakeTensor) or result.constant is not None or result.layout is not torch.strided:
            return None
        if result.is_conj() or result.is_neg():
            return None
        for number, tensor in enumerate(tensors):
            if result is tensor:
                return (_SAME, number)
        storage = result.untyped_storage()
        shape, stride, offset = tuple(result.shape), result.stride(), result.storage_offset()
        index = storages.get(storage._cdata)
        if index is not None:
            return (_VIEW, index, shape, stride, offset) if result.dtype == tensors[index].dtype else None
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if result.numel() else 0
        if offset or storage.nbytes() != extent * result.element_size():
            return None
        return (_FRESH, shape, stride, result.dtype, result.fake_device)

    def _carry_out(self, plan: Any, tensors: list[Any]) -> Any:
        kind, steps = plan
        if kind is None:
            return self._make(steps, tensors)
        return kind(self._make(step, tensors) for step in steps)

    def _make(self, step: Any, tensors: list[Any]) -> Any:
        how = step[0]
        if how == _FRESH:
            return new_fake(self, self._template, _empty(step[1], step[2], dtype=step[3], device="meta"), step[4])
        if how == _VIEW:
            source = tensors[step[1]]
            with in_kernel_invocation_manager(self):
                view = _as_strided(source, step[2], step[3], step[4])
            return new_fake(self, self._template, view, source.fake_device)
        return tensors[step[1]] if how == _SAME else step[1]


def _lies(tensor: Any, parts: list[Any]) -> bool:
    """Append how a tensor lies; a size that is a symbol does not belong here."""
    if type(tensor) is torch.SymInt:
        return False
    parts += (tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device, tensor.storage_offset())
    return True


def new_fake(mode: FakeTensorMode, template: dict[str, Any], meta: torch.Tensor, device: torch.device) -> Any:
    """`FakeTensor(mode, meta, device)`, without its checks. template: what all of a mode's have alike, empty at first"""
    if not template:
        template.update(vars(FakeTensor(mode, meta, device)))
    fake = _subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)  # copy.deepcopy asks for it
    state = fake.__dict__
    state.update(template)
    state["_fake_device"] = device
    return fake


def channels_together(x: Any, weight: Any) -> bool:
    """Return whether cuDNN writes the channels of a convolution's result together: where it reads such pictures or filters.

    >>> x, weight = torch.empty(2, 4, 8, 8), torch.empty(4, 4, 3, 3)
    >>> channels_together(x, weight), channels_together(x, weight.to(memory_format=torch.channels_last))
    (False, True)
    """
    return x.dim() == 4 and torch.channels_last in map(suggest_memory_format, (x, weight))


def product_shape(a: Any, b: Any, ends: Any) -> list[int]:
    """Of a grouped matrix product: PyTorch's own rule refuses what is not bfloat16, its kernels do not."""
    if a.dim() == 3:
        return [a.shape[1], b.shape[1]] if b.dim() == 2 else [a.shape[0], a.shape[1], b.shape[2]]
    return [a.shape[0], b.shape[2]] if b.dim() == 3 else [ends.shape[0], a.shape[0], b.shape[1]]


def _like(tensor: Any) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "device": tensor.fake_device}


_empty = torch._C._VariableFunctions.empty_strided
_as_strided = torch._C._VariableFunctions.as_strided
_subclass: Any = torch.Tensor._make_subclass


@functools.cache
def suits(func: Any) -> bool:
    """Return whether the result depends on shapes and plain values only, and the arguments keep theirs."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    schema = func._schema
    name = schema.name.partition("::")[2]
    if _NEVER & set(func.tags) or name.startswith(("resize", "set_", "lift", "sparse", "_sparse", "nonzero", "item")):
        return False
    if any(argument.is_out for argument in schema.arguments):
        return False
    if schema.is_mutable and not schema.returns:
        return name.startswith(("_foreach_", "_fused_"))
    return True


PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Kinds of values that are equal where they are written alike."""


def describe(
    mode: Any, values: Iterable[Any], parts: list[Any], tensors: list[Any], note: Callable[[Any, list[Any]], bool]
) -> bool:
    """Append to `parts` what a result may depend on, and to `tensors` the tensors; False where that is more than can be compared.

    mode: of which the tensors must be; note: appends how a tensor lies, or a size that is a symbol, and says whether it could

    >>> parts = []
    >>> describe(None, [[1, 2], 3.0, None], parts, [], lambda *_: False), len(parts)
    (True, 9)
    >>> describe(None, [object()], [], [], lambda *_: False)
    False
    """
    for value in values:
        kind = type(value)
        if isinstance(value, FakeTensor):
            if value.fake_mode is not mode or value.constant is not None or value.layout is not torch.strided:
                return False
            if value.is_conj() or value.is_neg() or not note(value, parts):
                return False
            tensors.append(value)
        elif kind in PLAIN:
            parts += (kind, value)
        elif kind is list or kind is tuple or kind is torch.Size:
            parts.append(len(value))
            if not describe(mode, value, parts, tensors, note):
                return False
        elif kind is not torch.SymInt or not note(value, parts):
            return False
    return True
