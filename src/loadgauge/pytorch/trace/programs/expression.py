"""An expression that a person typed, such as `torch.nn.Sigmoid()(x)`, evaluated with PyTorch."""

import ast
import contextlib
import inspect
import itertools
import math
import runpy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_leaves

from loadgauge.core.base import ConfigError, first_line, is_script, no_function, refuse
from loadgauge.pytorch.device.patches import default_dtype, removing
from loadgauge.pytorch.device.simulated import fake_tensors
from loadgauge.pytorch.trace.programs.call import Call, fake_like, trace_call, where
from loadgauge.pytorch.trace.saved import Packed, Saved, key, record_saved, saved_by

NAMES = ("x", "y", "z")
LARGEST = 2**28
"""Elements of an input: beyond it a slip of the finger would fill the memory of this machine."""
LARGEST_WITHOUT_DATA = 2**40
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

    @property
    def of_one(self) -> int:
        """Bytes of x."""
        return math.prod(self.of("x")) * int(getattr(torch, self.dtype).itemsize)

    def check(self, used: set[str], most: int) -> None:
        """Raises ConfigError for names that there are not, and for an unusable shape or dtype."""
        unknown = (set(self.constant) | set(self.shapes)) - set(NAMES)
        refuse(unknown, f"the tensors are called x, y and z, not {', '.join(sorted(unknown))}")
        refuse(self.dtype not in DTYPES, f"dtype: must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in used:
            shape = self.of(name)
            refuse(
                any(size < 0 for size in shape) or math.prod(shape) > most,
                f"shape: {shape} must have 0 to {most:,} elements",
            )

    def made(self, used: set[str]) -> dict[str, torch.Tensor]:
        """Creates the tensors that are used, with random values. Raises ConfigError for an unusable shape or dtype."""
        return self._all(used, LARGEST, torch.rand, self.device)

    def without_data(self, used: set[str]) -> dict[str, torch.Tensor]:
        """Creates the tensors that are used, without data. Raises ConfigError for an unusable shape or dtype."""
        return self._all(used, LARGEST_WITHOUT_DATA, torch.empty, "meta")

    def _all(
        self, used: set[str], most: int, make: Callable[..., torch.Tensor], device: str
    ) -> dict[str, torch.Tensor]:
        self.check(used, most)
        kind = getattr(torch, self.dtype)
        tensors = {name: make(self.of(name), dtype=kind, device=device) for name in NAMES if name in used}
        return {name: tensor.requires_grad_(name not in self.constant) for name, tensor in tensors.items()}


def saved_by_expression(text: str, inputs: Inputs | None = None) -> Saved:
    """Evaluates an expression of `x`, `y`, `z`, `torch`, `nn` and `F`, or calls a function of a file (`file.py:name`, its
    arguments being x, y and z), and returns what it keeps for backward.

    It is Python and runs as such: evaluate only what you would run. Raises ConfigError, in one line, for whatever goes wrong
    in it. Where there is no CUDA device, it runs on `cuda` without data.

    >>> from loadgauge.pytorch.trace.programs.expression import saved_by_expression
    >>> [(one.field, one.owner) for one in saved_by_expression("1 / (1 + torch.exp(-x))").tensors]
    [('result', ''), ('result', ''), ('other', 'number')]
    >>> [one.made_by for one in saved_by_expression("(x + 1) * (y + 1)").tensors]
    ['y + 1', 'x + 1']
    """
    inputs_used = inputs or Inputs()
    program = _program(text)
    simulated = inputs_used.device == "cuda" and not torch.cuda.is_available()
    with default_dtype(getattr(torch, inputs_used.dtype)), contextlib.ExitStack() as stack:
        if simulated:
            stack.enter_context(fake_tensors())
            device_type = where("cuda")
            tensors = {
                name: fake_like(tensor, device_type) for name, tensor in inputs_used.without_data(program.names).items()
            }
        else:
            tensors = inputs_used.made(program.names)
        owned = stack.enter_context(_owned())
        packed = stack.enter_context(record_saved())
        result = program.run(tensors, packed)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        refuse(not outputs, f"{text} gives {type(result).__name__}, not a tensor")
        owners = {key(tensor): name for name, tensor in tensors.items()}
        for number, (name, tensor) in owned.items():
            owners.setdefault(number, name)
            del tensor
        return saved_by(result, owners, packed, program.sources())


def held_by_expression(text: str, inputs: Inputs | None = None) -> Call:
    """Traces the memory of one evaluation above its inputs, on tensors without data: what stays until backward, and the peak.

    Raises ConfigError as `saved_by_expression`, and where a result depends on data.

    >>> from loadgauge.pytorch.trace.programs.expression import Inputs, held_by_expression
    >>> held_by_expression("1 / (1 + torch.exp(-x))", Inputs(shape=(1024,))).extra
    (8192, 12288)
    """
    inputs_used = inputs or Inputs()
    program = _program(text)
    names = sorted(program.names)
    tensors = inputs_used.without_data(program.names)
    with default_dtype(getattr(torch, inputs_used.dtype)):
        return trace_call(
            lambda *values: program.run(dict(zip(names, values, strict=True))),
            *(tensors[name] for name in names),
            device=inputs_used.device,
        )


class _Program:
    """Code to be run on tensors. names: of x, y and z, those that it takes"""

    def __init__(self, text: str, names: set[str], plain: Callable[..., Any], noting: Callable[..., Any]) -> None:
        self.text, self.names, self._plain, self._noting = text, names, plain, noting
        self._made: dict[int, tuple[str, StorageWeakRef]] = {}
        self._seen = 0

    def run(self, tensors: dict[str, torch.Tensor], packed: Sequence[weakref.ref[Packed]] | None = None) -> Any:
        """Runs it. packed: what has been saved for backward so far; where it is there, what made each tensor is taken down"""
        try:
            result = self._plain(tensors) if packed is None else self._noting(tensors, partial(self.note, packed))
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{self.text}: {type(error).__name__}: {first_line(error)}") from None
        refuse(isinstance(result, nn.Module), f"{self.text} is a module: call it, as in {self.text}(x)")
        return result

    def note(self, packed: Sequence[weakref.ref[Packed]], value: Any, source: str) -> Any:
        """Takes down the part of an expression that made a storage, what views it keeps that name, and that of those which it
        has saved on the way."""
        if isinstance(value, torch.Tensor):
            self._name(value, source)
        inner = (reference() for reference in itertools.islice(packed, self._seen, None))
        self._seen = len(packed)
        for placeholder in inner:
            if placeholder is not None:
                self._name(placeholder.tensor, f"inside {source}")
        return value

    def _name(self, tensor: torch.Tensor, source: str) -> None:
        # While a weak reference to a storage is held, no other storage gets its address.
        self._made.setdefault(key(tensor), (source, StorageWeakRef(tensor.untyped_storage())))

    def sources(self) -> dict[int, str]:
        """The part that made each storage."""
        return {number: source for number, (source, _) in self._made.items()}


def _program(text: str) -> _Program:
    """The program of an expression, or of `file.py:name`."""
    if is_script(text):
        function, count = _function(text)

        def call(tensors: dict[str, torch.Tensor]) -> Any:
            return function(*(tensors[name] for name in NAMES[:count]))

        return _Program(text, set(NAMES[:count]), call, lambda tensors, _: call(tensors))
    if text.endswith(".py") and Path(text).is_file():
        raise no_function(text)
    modules = {"torch": torch, "nn": nn, "F": nn.functional}
    plain = compile(_parsed(text), "<expression>", "eval")
    noting = compile(ast.fix_missing_locations(_Noting().visit(_parsed(text))), "<expression>", "eval")
    names = {name for name in plain.co_names if name in NAMES}
    return _Program(
        text,
        names,
        lambda tensors: eval(plain, {**modules, **tensors}),
        lambda tensors, note: eval(noting, {**modules, **tensors, "__note__": note}),
    )


class _Noting(ast.NodeTransformer):
    """Wraps each part of an expression that may make a tensor in a call that takes it down."""

    def generic_visit(self, node: ast.AST) -> Any:
        source = ast.unparse(node) if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Call | ast.Subscript) else None
        super().generic_visit(node)
        if source is None or not isinstance(node, ast.expr):
            return node
        noted = ast.Call(ast.Name("__note__", ast.Load()), [node, ast.Constant(source)], [])
        return ast.copy_location(noted, node)


def _function(text: str) -> tuple[Callable[..., Any], int]:
    """What `file.py:name` calls, and how many of x, y and z it takes: a function, a module's class, or an autograd.Function."""
    file, _, name = text.rpartition(":")
    refuse(not Path(file).is_file(), "there is no such file", file=file)
    try:
        called_name = runpy.run_path(file, run_name="loadgauge_saved").get(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{type(error).__name__}: {first_line(error)}", file=file) from None
    if not callable(called_name):
        raise ConfigError(f"has no function {name!r}", file=file)
    called: Callable[..., Any] = called_name
    taken = list(inspect.signature(called_name).parameters) if not isinstance(called_name, type) else ["x"]
    if isinstance(called_name, type) and issubclass(called_name, torch.autograd.Function):
        called, taken = called_name.apply, list(inspect.signature(called_name.forward).parameters)[1:]
    elif isinstance(called_name, type) and issubclass(called_name, nn.Module):
        called, taken = called_name(), list(inspect.signature(called_name.forward).parameters)[1:]
    refuse(not 0 < len(taken) <= len(NAMES), f"{name} must take one to three tensors, not {len(taken)}", file=file)
    return called, len(taken)


def _parsed(text: str) -> ast.Expression:
    refuse(len(text) > 10_000, "the expression is longer than 10,000 letters")
    try:
        tree = ast.parse(text.strip(), "<expression>", "eval")
        compile(tree, "<expression>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"{text!r} is not one Python expression: {message}") from None
    return tree


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
