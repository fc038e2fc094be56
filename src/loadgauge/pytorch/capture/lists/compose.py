"""Formulas at full depth from a run of few layers: a symbolic run of some blocks of each kind, and a plain one of all of them.

What comes and goes, and in which order, is that of the plain run. Each size in it takes the formula that the symbolic run has in
the same place (module up to the number of its block, operation, phase) and that gives the same number; where there is none, or two,
nothing is composed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from torch import nn

from loadgauge.core.base import NotModelled, lists
from loadgauge.pytorch.capture.inputs.small import DEPTHS
from loadgauge.pytorch.capture.lists.blocks import Blocks, Stack, Unordered, blocks
from loadgauge.pytorch.capture.lists.listed import Listing
from loadgauge.pytorch.capture.record import Recorded
from loadgauge.pytorch.record.allocations import op_name

COPIES = 2
"""Blocks of each kind that the run of few layers has: a first one and one that follows another."""
Value = Callable[[Any], int]
"""The number that an expression of symbols is at the sizes of the plain run."""


class Uncomposed(NotModelled):
    """A run of few layers that does not say what all of them do."""


class Few:
    """A module with only `COPIES` blocks of each kind, for the time of a run. `all`, `few`: its blocks before and meanwhile.

    A module that has hardly more stays as it is, and `few` is None.
    """

    def __init__(self) -> None:
        self.all = Blocks(())
        self.few: Blocks | None = None

    @contextlib.contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Leave blocks out in the body, in the module and in the lists and numbers of its configuration."""
        self.all = blocks(module, getattr(module, "config", None))
        shown = Shown(self.all, [_chosen(stack.pattern) for stack in self.all.stacks], [])
        layers = sum(len(stack.pattern) for stack in self.all.stacks)
        if not _numbered(self.all) or 2 * sum(map(len, shown.keeps)) > layers:
            yield
        else:
            self.few = shown.few
            with shown.within(module):
                yield


def _chosen(pattern: tuple[int, ...]) -> tuple[int, ...]:
    """The first `COPIES` of each kind.

    >>> _chosen((0, 0, 0, 1, 1, 1, 1))
    (0, 1, 3, 4)
    """
    return tuple(index for index, kind in enumerate(pattern) if pattern[:index].count(kind) < COPIES)


def left(stack: Stack, keep: tuple[int, ...]) -> Stack:
    paths = tuple(f"{stack.path}.{number}" for number in range(len(keep)))
    return Stack(stack.path, paths, tuple(stack.pattern[index] for index in keep))


def leave(root: nn.Module, stack: Stack, keep: tuple[int, ...], back: contextlib.ExitStack) -> None:
    held = root.get_submodule(stack.path)
    children = list(held._modules.values())
    back.callback(setattr, held, "_modules", held._modules)
    held._modules = {str(number): children[index] for number, index in enumerate(keep)}
    configs = {
        id(own_config): own_config
        for module in root.modules()
        if (own_config := getattr(module, "config", None)) is not None
    }
    for config in configs.values():
        for name, value in list(getattr(config, "__dict__", {}).items()):
            new: Any = None
            if isinstance(value, list | tuple) and len(value) == len(children):
                new = type(value)(value[index] for index in keep)
            elif name in DEPTHS and value == len(children):
                new = len(keep)
            if new is not None:
                back.callback(config.__dict__.__setitem__, name, value)
                config.__dict__[name] = new


def compose(run: Recorded, plain: Recorded, few: Few, value: Value) -> Recorded:
    """The plain run of all blocks with the formulas of the symbolic run of few. value: of an expression, at the plain run's sizes

    Raises Uncomposed where a size has no formula, or two; or where a block does what none of its kind does in the symbolic run.
    """
    assert few.few is not None
    small, large = _Kinds(few.few), _Kinds(few.all)
    if [name for _, name in run.stream.phases] != [name for _, name in plain.stream.phases]:
        raise Uncomposed("a step of few layers has other phases")
    keys, wanted = list(_ops(run, small)), list(_ops(plain, large))
    _same_blocks(run, keys, small, plain, wanted, large, value)

    work, memory, keeping = _learnt(run, keys, small, value)
    ops = []
    for key, op in zip(wanted, plain.ops, strict=True):
        flops, *flat = work.of(key, (op.flops, *itertools.chain(*op.shapes)))
        rest = iter(flat)
        shapes = tuple(tuple(itertools.islice(rest, len(shape))) for shape in op.shapes)
        ops.append(msgspec.structs.replace(op, flops=flops, shapes=shapes))

    others = _storages(plain, wanted, large)
    return msgspec.structs.replace(
        plain,
        ops=ops,
        changes=[
            memory.of(others[number], (change,))[0] for number, change in zip(plain.ids, plain.changes, strict=True)
        ],
        nbytes=[memory.of(others[number], (size,))[0] for number, size in enumerate(plain.nbytes)],
        kept=[keeping.of(key, (size,))[0] for key, size in zip(_keepers(plain, large), plain.kept, strict=True)],
        seconds=run.seconds + plain.seconds,
    )


def distinct(run: Recorded, few: Few, value: Value) -> bool:
    """Whether no two formulas of one place give the same number, so that a number says which it is. value: as for `compose`"""
    assert few.few is not None
    naming = _Kinds(few.few)
    return not any(formulas.same for formulas in _learnt(run, list(_ops(run, naming)), naming, value))


def _learnt(run: Recorded, keys: list[Any], naming: _Kinds, value: Value) -> tuple[_Formulas, _Formulas, _Formulas]:
    """The formulas of the operations, of what storages get and free, and of what is kept."""
    work, memory, keeping = _Formulas(value), _Formulas(value), _Formulas(value)
    for key, op in zip(keys, run.ops, strict=True):
        work.learn(key, (op.flops, *itertools.chain(*op.shapes)))
    places = _storages(run, keys, naming)
    for number, size in (*zip(run.ids, run.changes, strict=True), *enumerate(run.nbytes)):
        memory.learn(places[number], (size,))
    for keeper, size in zip(_keepers(run, naming), run.kept, strict=True):
        keeping.learn(keeper, (size,))
    return work, memory, keeping


class _Kinds:
    """Paths of modules with the kind of their block in place of its number."""

    def __init__(self, of: Blocks) -> None:
        self.blocks = of
        self._known: dict[str, tuple[str, tuple[int, int] | None]] = {}

    def of(self, path: str) -> tuple[str, tuple[int, int] | None]:
        """The path with a kind, and the block: (stack, child); None around them."""
        if path not in self._known:
            block = self.blocks.place(path)
            name = path
            if block is not None:
                stack = self.blocks.stacks[block[0]]
                name = f"{stack.path}.<{stack.pattern[block[1]]}>{path[len(stack.paths[block[1]]) :]}"
            self._known[path] = name, block
        return self._known[path]


class _Formulas:
    """Formulas by where they are found and the numbers that they give."""

    def __init__(self, value: Value) -> None:
        self.value = value
        self.known: dict[Any, Any] = {}
        self.same: list[Any] = []

    def learn(self, key: Any, expressions: tuple[Any, ...]) -> None:
        """Note formulas; two that give the same number in one place count as none."""
        at = (key, tuple(size if size is None else self.value(size) for size in expressions))
        if self.known.setdefault(at, expressions) != expressions:
            self.known[at] = None
            self.same.append(at)

    def of(self, key: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The formulas of some numbers. Raises Uncomposed where they are not known."""
        results: tuple[Any, ...] | None = self.known.get((key, values))
        if results is None:
            raise Uncomposed(
                f"few layers do not say how {key} comes to {values}{' alone' if (key, values) in self.known else ''}"
            )
        return results


def _ops(run: Recorded, naming: _Kinds) -> Iterator[tuple[Any, ...]]:
    """Where each operation is: its phase, name, and module by kind; within a block, also how many such ones came before it."""
    number, last = 0, ""
    before: Counter[tuple[Any, ...]] = Counter()
    for op in run.ops:
        number, last = number + (op.phase != last), op.phase
        module, block = naming.of(op.module)
        key = number, op.name, module
        if block is not None:
            before[key, block] += 1
        yield (*key, before[key, block])


def _storages(run: Recorded, ops: list[Any], naming: _Kinds) -> list[tuple[Any, ...]]:
    """Where each storage was got: by which operation, if by any."""
    makers = {number: key for key, op in zip(reversed(ops), reversed(run.ops), strict=True) for number in op.makes}
    return [
        (record.phase, op_name(record.op), naming.of(record.module)[0], makers.get(number))
        for number, record in enumerate(run.stream.records)
    ]


def _keepers(run: Recorded, naming: _Kinds) -> Iterator[tuple[Any, ...]]:
    before: Counter[tuple[str, str, str]] = Counter()
    for node, field, path in run.kept_by:
        module, block = naming.of(path)
        if block is not None:
            before[node, field, path] += 1
        yield node, field, module, before[node, field, path]


def _same_blocks(
    run: Recorded, keys: list[Any], small: _Kinds, plain: Recorded, wanted: list[Any], large: _Kinds, value: Value
) -> None:
    """Raise Uncomposed unless every block does, operation for operation, what one of its kind does in the symbolic run."""

    def done(of: Recorded, keys: list[Any], naming: _Kinds) -> dict[tuple[int, int], list[Any]]:
        return lists(
            (block, (key, None if op.flops is None else value(op.flops)))
            for key, op in zip(keys, of.ops, strict=True)
            if (block := naming.of(op.module)[1]) is not None
        )

    examples = {
        (stack, small.blocks.stacks[stack].pattern[child], tuple(ops))
        for (stack, child), ops in done(run, keys, small).items()
    }
    for (stack, child), ops in done(plain, wanted, large).items():
        if (stack, large.blocks.stacks[stack].pattern[child], tuple(ops)) not in examples:
            raise Uncomposed(f"{large.blocks.stacks[stack].paths[child]} does what no other block of its kind does")


class Shown:
    """As few blocks as show each kind first, last and between, with and without something that is trained before it.

    all, few: the module's blocks, and those that are run; keeps: for each list of blocks, the places of those
    """

    def __init__(self, every: Blocks, keeps: list[tuple[int, ...]], like: list[tuple[int, ...]]) -> None:
        self.all, self.keeps, self.like = every, keeps, like
        self.few = Blocks(tuple(left(stack, keep) for stack, keep in zip(every.stacks, keeps, strict=True)))

    @classmethod
    def of(cls, module: nn.Module, config: Any) -> Shown:
        """Choose the blocks of a module, whose frozen parameters say so themselves."""
        every = blocks(module, config)
        keeps, likes = [], []
        for stack in every.stacks:
            ways = _ways(module, stack)
            keep = tuple(layer for layer, way in enumerate(ways) if ways.index(way) == layer)
            keeps.append(keep)
            likes.append(tuple(keep.index(ways.index(way)) for way in ways))
        return cls(every, keeps, likes) if _numbered(every) else cls.of_all(every)

    @classmethod
    def of_all(cls, every: Blocks) -> Shown:
        """Choose all."""
        places = [tuple(range(len(stack.paths))) for stack in every.stacks]
        shown = cls(every, places, places)
        shown.few = every
        return shown

    @contextlib.contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Leave the other blocks out in the body, in the module and in its configuration."""
        with contextlib.ExitStack() as back:
            self._leave(module, back)
            yield

    def _leave(self, module: nn.Module, back: contextlib.ExitStack) -> nn.Module:
        for stack, keep in zip(self.all.stacks, self.keeps, strict=True):
            if len(keep) < len(stack.paths):
                leave(module, stack, keep, back)
        return module

    def keys(self, config: Any) -> dict[str, int]:
        """Keys of a configuration that count the blocks of a list, with as many as are run."""
        runs = {len(stack.paths): len(keep) for stack, keep in zip(self.all.stacks, self.keeps, strict=True)}
        return {
            key: runs[value]
            for key, value in dict(config or {}).items()
            if key.endswith("layers") and type(value) is int and value in runs
        }

    def cut(self, build: Callable[[str], Any], empty: nn.Module) -> Callable[[str], Any]:
        """Return what makes the module without the other blocks. build: makes it with all of them, on a device; empty: the
        module on the meta device, which loses them for good and is copied there"""
        less = functools.partial(self._leave, back=contextlib.ExitStack())
        less(empty)
        return lambda device: copy.deepcopy(empty) if device == "meta" else less(build(device))

    def pattern(self, listing: Listing) -> tuple[int, ...]:
        """For each block of the module, in the order in which they run, the place of its like in a list. Raises NotModelled."""
        likes = zip(self.few.stacks, self.like, strict=True)
        return in_order(listing, {few.path: [few.paths[layer] for layer in like] for few, like in likes})


def in_order(listing: Listing, likes: Mapping[str, Sequence[str]]) -> tuple[int, ...]:
    """For each block of a module, in the order in which they run, the place of its like in a list. likes: their paths, by list

    Raises Unordered where a list of blocks does not run.
    """
    order = list(dict.fromkeys(path.rpartition(".")[0] for path in listing.places))
    missing = [path for path in likes if path not in order]
    if missing:
        raise Unordered(missing[0], "does not run in a training step")
    return tuple(listing.places.index(like) for path in order for like in likes.get(path, listing.places))


def _numbered(of: Blocks) -> bool:
    """Return whether all blocks are called by numbers."""
    return all(path.rpartition(".")[2].isdigit() for stack in of.stacks for path in stack.paths)


def _ways(module: nn.Module, stack: Stack) -> list[tuple[int, bool, bool, bool]]:
    """Of each block: its kind, whether it is the first or the last, and whether something in the list is trained before it."""
    ways, below = [], False
    for layer, (path, kind) in enumerate(zip(stack.paths, stack.pattern, strict=True)):
        ways.append((kind, layer == 0, layer == len(stack.paths) - 1, below))
        below = below or any(parameter.requires_grad for parameter in module.get_submodule(path).parameters())
    return ways
