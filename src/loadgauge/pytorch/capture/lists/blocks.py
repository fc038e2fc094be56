"""The blocks of a module: children of a `ModuleList` that repeat, told apart by kind, not by number.

Two blocks are of one kind where their modules have the same classes, plain attributes (a layer's type, a window, ...), and
parameters of the same shapes and dtypes, of which the same ones are an earlier block's; numbers that only count the blocks, such as
`layer_idx`, are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator
from typing import Any

import msgspec
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from loadgauge.core.base.errors import NotModelled

_PLAIN = (bool, int, float, str, type(None))


class Stack(msgspec.Struct, frozen=True):
    """Modules of one list, which run one after the other. path: of the list; pattern: the kind of each child, counted from 0.

    paths: of the children; kinds are those of this list alone.
    """

    path: str
    paths: tuple[str, ...]
    pattern: tuple[int, ...]

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first child of each kind."""
        return tuple(self.pattern.index(kind) for kind in range(max(self.pattern) + 1))


class Unordered(NotModelled):
    """Blocks without a place in an order: they run more than once in a step, or not at all.

    path: of one, or of their list; "" where they are all those of a module
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path or 'forward'} {why}")
        self.path = path


class Blocks(msgspec.Struct, frozen=True):
    """All lists of blocks of a module, none inside another; what is in no block lies around them."""

    stacks: tuple[Stack, ...]

    def without(self, paths: Collection[str]) -> Blocks:
        """Leave out the lists of which some paths are, or in which they lie; "" leaves out all."""
        return Blocks(
            tuple(
                one
                for one in self.stacks
                if not any(not path or f"{path}.".startswith(f"{one.path}.") for path in paths)
            )
        )

    def place(self, path: str) -> tuple[int, int] | None:
        """Return the stack, and the child in it, that a module's path lies in; None: around them.

        >>> Blocks((Stack("h", ("h.0", "h.1"), (0, 0)),)).place("h.1.mlp")
        (0, 1)
        """
        for number, stack in enumerate(self.stacks):
            above = f"{stack.path}." if stack.path else ""
            if path.startswith(above):
                child = above + path[len(above) :].partition(".")[0]
                if child in stack.paths:
                    return number, stack.paths.index(child)
        return None


def blocks(root: nn.Module, config: Any = None) -> Blocks:
    """Find the blocks of a module. config: an object whose lists with an entry a block tell blocks apart, such as `layer_types`

    >>> net = nn.Sequential(nn.Embedding(8, 4), nn.Sequential(*(nn.Linear(4, 4, bias=n > 1) for n in range(4))))
    >>> [(stack.path, stack.pattern) for stack in blocks(net).stacks]
    [('1', (0, 0, 1, 1))]
    """
    return Blocks(tuple(_stacks(root, "", list(_lists_of(config)))))


def signature(module: nn.Module, left_out: frozenset[str] = frozenset()) -> Hashable:
    """Return what makes a module a module of its kind. left_out: names of attributes that only count modules"""
    parts = []
    for path, part in module.named_modules():
        plain = tuple(
            (name, tuple(value) if isinstance(value, list) else value)
            for name, value in sorted(vars(part).items())
            if _plain(name, value) and name not in left_out
        )
        own = tuple(
            (name, None if tensor is None else (tuple(map(str, tensor.shape)), str(tensor.dtype), tensor.requires_grad))
            for name, tensor in sorted({**part._parameters, **part._buffers}.items())
        )
        parts.append((path, type(part).__module__, type(part).__qualname__, plain, own))
    return tuple(parts)


def _plain(name: str, value: Any) -> bool:
    if name.startswith("_"):
        return False
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and all(isinstance(v, _PLAIN) for v in value))


def _stacks(module: nn.Module, path: str, entries: list[tuple[Hashable, ...]]) -> Iterator[Stack]:
    children = list(module.named_children())
    if isinstance(module, ParametrizationList):  # its weights run as those of the module that has them
        return
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 0:
        below = [stack for name, child in children for stack in _stacks(child, _join(path, name), entries)]
        pattern = _pattern([child for _, child in children], entries)
        repeats = len(set(pattern)) < len(pattern)
        alike = isinstance(module, nn.ModuleList) and len({type(child) for _, child in children}) == 1
        weighs = any(True for _ in module.parameters())
        if weighs and (repeats or (alike and not below)) and not (below and not repeats):
            yield Stack(path, tuple(_join(path, name) for name, _ in children), pattern)
        else:
            yield from below
        return
    for name, child in children:
        yield from _stacks(child, _join(path, name), entries)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _pattern(children: list[nn.Module], entries: list[tuple[Hashable, ...]]) -> tuple[int, ...]:
    """The kind of each child, counted in the order in which they appear."""
    counting = _counting(children)
    numbers: dict[Hashable, int] = {}
    own = [values for values in entries if len(values) == len(children)]
    pattern = []
    owned: set[int] = set()
    for index, child in enumerate(children):
        weights = dict(child.named_parameters())
        borrowed = tuple(path for path, weight in weights.items() if id(weight) in owned)
        owned |= {id(weight) for weight in weights.values()}
        kind = (signature(child, counting), tuple(values[index] for values in own), borrowed)
        pattern.append(numbers.setdefault(kind, len(numbers)))
    return tuple(pattern)


def _counting(children: list[nn.Module]) -> frozenset[str]:
    """Names of whole numbers that grow by one from child to child, in every module of it that has one."""
    counting: set[str] = {"layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "idx"}
    if len(children) < 2:
        return frozenset(counting)
    grows: dict[str, bool] = {}
    for child, next_child in itertools.pairwise(children):
        others = dict(next_child.named_modules())
        for path, module in child.named_modules():
            for name, value in vars(module).items():
                if type(value) is int and path in others:
                    after = vars(others[path]).get(name)
                    grows[name] = grows.get(name, True) and type(after) is int and after == value + 1
    return frozenset(counting | {name for name, always in grows.items() if always})


def _lists_of(config: Any) -> Iterator[tuple[Hashable, ...]]:
    """Every list in a configuration, and in its parts."""
    tree = config.to_dict() if hasattr(config, "to_dict") else config
    if isinstance(tree, dict):
        for value in tree.values():
            if isinstance(value, dict):
                yield from _lists_of(value)
            elif isinstance(value, list | tuple) and value:
                yield tuple(entry if isinstance(entry, _PLAIN) else repr(entry) for entry in value)
