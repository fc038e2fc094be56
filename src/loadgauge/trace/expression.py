"""An expression that a person typed, such as `torch.nn.Sigmoid()(x)`, evaluated with PyTorch."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_leaves

from loadgauge.errors import ConfigError, first_line
from loadgauge.trace.device.patches import removing
from loadgauge.trace.saved import Saved, key, record_saved, saved_by

NAMES = ("x", "y", "z")
LARGEST = 2**28
"""Elements of an input: beyond it a slip of the finger would fill the memory of this machine."""
DTYPES = ("float64", "float32", "bfloat16", "float16")


class Inputs(msgspec.Struct, frozen=True):
    """The tensors x, y and z that an expression may name. `constant`: those that need no gradient.

    `shape` is that of all three; `shapes` gives a single one another.
    """

    shape: tuple[int, ...] = (1024, 1024)
    dtype: str = "float32"
    constant: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = {}
    device: str = "cpu"

    def of(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor of this name [elements]."""
        return self.shapes.get(name, self.shape)

    def made(self, used: set[str]) -> dict[str, torch.Tensor]:
        """Creates the tensors that are used, with random values. Raises ConfigError for an unusable shape, dtype or device."""
        unknown = (set(self.constant) | set(self.shapes)) - set(NAMES)
        if unknown:
            raise ConfigError(f"the tensors are called x, y and z, not {', '.join(sorted(unknown))}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype: must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device: there is no CUDA device here")
        made = {}
        for name in NAMES:
            if name not in used:
                continue
            shape = self.of(name)
            if any(size < 0 for size in shape) or math.prod(shape) > LARGEST:
                raise ConfigError(f"shape: {shape} is not from 0 to {LARGEST:,} elements")
            tensor = torch.rand(shape, dtype=getattr(torch, self.dtype), device=self.device)
            made[name] = tensor.requires_grad_(name not in self.constant)
        return made


def saved_by_expression(text: str, inputs: Inputs | None = None) -> Saved:
    """Evaluates an expression of `x`, `y`, `z`, `torch`, `nn` and `F` and returns what it keeps for backward.

    The expression is Python and runs as such: evaluate only what you would run. Raises ConfigError, in one line, for
    whatever goes wrong in it.

    >>> from loadgauge.trace.expression import saved_by_expression
    >>> [(one.field, one.owner) for one in saved_by_expression("1 / (1 + torch.exp(-x))").tensors]
    [('result', ''), ('result', ''), ('other', 'number')]
    """
    code = _compiled(text)
    used = {name for name in code.co_names if name in NAMES}
    tensors = (inputs or Inputs()).made(used)
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(getattr(torch, (inputs or Inputs()).dtype))
        with _owned() as owned, record_saved() as packed:
            result = eval(code, {"torch": torch, "nn": nn, "F": nn.functional, **tensors})
            if isinstance(result, nn.Module):
                raise ConfigError(f"{text} is a module: call it, as in {text}(x)")
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{text}: {type(error).__name__}: {first_line(error)}") from None
    finally:
        torch.set_default_dtype(dtype)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not outputs:
        raise ConfigError(f"{text} gives {type(result).__name__}, not a tensor")
    owners = {key(tensor): name for name, tensor in tensors.items()}
    for number, (name, tensor) in owned.items():
        owners.setdefault(number, name)
        del tensor
    return saved_by(result, owners, packed)


def _compiled(text: str) -> Any:
    if len(text) > 10_000:
        raise ConfigError("the expression is longer than 10,000 letters")
    try:
        return compile(ast.parse(text.strip(), "<expression>", "eval"), "<expression>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"{text!r} is not one Python expression: {message}") from None


@contextmanager
def _owned() -> Iterator[dict[int, tuple[str, torch.Tensor]]]:
    """The parameters and buffers of the modules that are made in its body, by storage. They are held until the end."""
    owned: dict[int, tuple[str, torch.Tensor]] = {}

    def note(kind: str) -> Any:
        def registered(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
            if tensor is not None:
                owned[key(tensor)] = (f"{kind} {type(module).__name__}.{name}", tensor)

        return registered

    handles = [
        modules.register_module_parameter_registration_hook(note("parameter")),
        modules.register_module_buffer_registration_hook(note("buffer")),
    ]
    with removing(handles):
        yield owned
