"""Small tensors of integers whose values the code reads, such as the grid of a picture: they keep them beside fake tensors."""

import contextlib
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from loadgauge.pytorch.device.patches import replaced
from loadgauge.pytorch.record.sizes import leaves

MOST = 65_536
"""Elements of the largest tensor that keeps its values."""
_TENSOR = torch.tensor
_device_constructors()  # kept by PyTorch, which looks them up by identity
_ITEM = torch.ops.aten._local_scalar_dense.default
_EMPTY = torch.ops.aten.empty.memory_format
_EQUAL = torch.ops.aten.eq.Scalar
_INDEX = torch.ops.aten.index.Tensor
_SAME = frozenset(
    {"view", "reshape", "_unsafe_view", "_to_copy", "clone", "squeeze", "unsqueeze", "contiguous", "detach"}
)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_VALUE = "_loadgauge_value"
_WHOLE = "_loadgauge_whole"
_FACTORIES = frozenset(
    {
        "arange",
        "linspace",
        "zeros",
        "ones",
        "full",
        "scalar_tensor",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
    }
    | {"new_full", "tril_indices", "triu_indices", "eye", "empty"}
)
"""Operations that make values of nothing."""
_RANDOM = ("rand", "normal", "uniform", "bernoulli", "multinomial", "exponential")


def known(values: list[Any], device: str) -> torch.Tensor:
    """Return a tensor of integers on a device, which keeps its values in the body of `KeptValues`."""
    with _disable_current_modes():
        real = torch.tensor(values)
    return with_values(real, device)


def with_values(real: torch.Tensor, device: Any) -> torch.Tensor:
    """The same of a real tensor."""
    tensor = torch.empty(real.shape, dtype=real.dtype, device=device)
    setattr(tensor, _VALUE, real)
    return tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Say of a tensor that no value in it is 0, as of the pixels of a picture that is no padding; returns it."""
    setattr(tensor, _WHOLE, True)
    return tensor


def _of_items(data: Any, **how: Any) -> torch.Tensor:
    """`torch.tensor` of a list in which some numbers are tensors themselves: C++ would ask them where no mode sees it."""
    if isinstance(data, list | tuple) and any(isinstance(item, FakeTensor) for item in data):
        data = [item.item() if isinstance(item, FakeTensor) and item.numel() == 1 else item for item in data]
    return _TENSOR(data, **how)


class KeptValues(TorchDispatchMode):
    """Carries the values of `known` tensors, and of small integers that the code itself makes, through operations.

    To be entered inside a mode of fake tensors, which it leaves all else to.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listed = contextlib.ExitStack()
        self.changed: dict[int, Any] = {}
        """CPU storages whose values were overwritten with unknown ones, by address; held, so that none is used again."""

    def __enter__(self) -> Self:
        """Begin, so that what is known may also be read as an array of NumPy, which fake tensors refuse."""
        self._listed.enter_context(replaced((torch, "tensor", _of_items), (FakeTensor, "numpy", self._array)))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._listed.close()

    @property
    def _array(self) -> Any:
        def array(tensor: torch.Tensor, **how: Any) -> Any:
            value = self._value(tensor)
            with _disable_current_modes() if value is not None else contextlib.nullcontext():
                return torch.Tensor.numpy(tensor if value is None else value.clone(), **how)

        return array

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as for the tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation on fake tensors, and where all it reads is known, on their values too."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if type(first) is FakeTensor and func is not _INDEX and _VALUE not in vars(first) and _WHOLE not in vars(first):
            self._overwritten(func, args)  # most operations: not all that they read is known
            return func(*args, **kwargs)
        flat = leaves((args, kwargs))
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        name = func._schema.name.partition("::")[2] if isinstance(func, torch._ops.OpOverload) else ""
        plain = not any(isinstance(leaf, _SYMBOLS) for leaf in flat)
        if tensors and hasattr(tensors[0], _WHOLE):
            return self._of_whole(func, name, args, kwargs)
        if func is _INDEX and plain:
            args = (args[0], self._places(args[1]))
        if not plain or name.startswith(_RANDOM) or not name or not self._all_known(name, tensors):
            self._overwritten(func, args)
            return func(*args, **kwargs)
        if func is _ITEM:
            with _disable_current_modes():
                return self._value(args[0]).item()
        if not tensors:
            return self._made(func, args, kwargs)
        if torch.Tag.dynamic_output_shape in func.tags:
            real = self._real(func, args, kwargs)
            return tree_map(lambda value: with_values(value, tensors[0].device), real)
        out = func(*args, **kwargs)
        most = max(MOST, *(tensor.numel() for tensor in tensors))  # no more than what was given
        if all(leaf.numel() <= most for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            self._keep(out, self._real(func, args, kwargs))
        return out

    def _of_whole(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if func is _INDEX:
            args = (args[0], self._places(args[1]))
        out = func(*args, **kwargs)
        if name in _SAME or func is _INDEX:
            whole(out)
        elif func is _EQUAL and args[1] == 0 and not any(isinstance(size, torch.SymInt) for size in out.shape):
            with _disable_current_modes():
                self._keep(out, torch.zeros((), dtype=torch.bool).expand(*out.shape))
        return out

    def _places(self, indices: Any) -> list[Any]:
        """Indices with a known mask as the places where it is true, so that the size of what they choose is known."""
        dense: list[Any] = []
        for index in indices:
            mask = None if index is None or index.dtype is not torch.bool else self._value(index)
            if mask is None:
                dense.append(index)
            else:
                with _disable_current_modes():
                    places = mask.nonzero().unbind(1)
                dense += [with_values(places_of_mask, index.device) for places_of_mask in places]
        return dense

    def _all_known(self, name: str, tensors: list[Any]) -> bool:
        if not tensors:
            return name in _FACTORIES
        return all(self._value(tensor) is not None for tensor in tensors)

    def _value(self, tensor: Any) -> Any:
        value = getattr(tensor, _VALUE, None)
        small = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.numel() <= MOST
        if value is None and small:
            return tensor  # just made of a list
        if value is None or value.untyped_storage()._cdata in self.changed:
            return None
        return value

    def _overwritten(self, func: Any, args: Any) -> None:
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            for tensor in tree_leaves(args):
                value = getattr(tensor, _VALUE, None) if isinstance(tensor, torch.Tensor) else None
                if value is not None:
                    self.changed[value.untyped_storage()._cdata] = value.untyped_storage()

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        def value(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return self._value(leaf)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        with _disable_current_modes():
            out = func(*tree_map(value, args), **tree_map(value, kwargs))
            return out.zero_() if "empty" in func._schema.name else out  # to be written, by the code

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if (
            func is _EMPTY and out.device.type != "cpu"
        ):  # ids of tokens, and the like; those on the CPU are to be written
            return out
        planned = out.device.type == "cpu" or not out.dtype.is_floating_point  # numbers of a plan, not of a model
        if isinstance(out, FakeTensor) and planned and out.numel() <= MOST:
            self._keep(out, self._real(func, args, kwargs))
        return out

    def _keep(self, out: Any, real: Any) -> None:
        for leaf, value in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(leaf, FakeTensor) and isinstance(value, torch.Tensor):
                setattr(leaf, _VALUE, value)
