"""A stream of allocations and releases: who asked for what, what was live when, and what made up the peak."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base.by_key import sums

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer states"
SAVED, TEMPORARIES, INPUTS = "saved activations", "temporaries", "inputs"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, SAVED, TEMPORARIES, INPUTS)


class Frame(NamedTuple):
    """A line of a program."""

    filename: str
    line: int
    name: str


class Record:
    """One storage: who made it (operation, module, phase), on which stream (by number), and what for (category)."""

    __slots__ = ("category", "dtype", "module", "nbytes", "node", "op", "phase", "shape", "stream")

    def __init__(
        self, nbytes: int, op: Any, module: str, phase: int, shape: Any, dtype: Any, node: Any, stream: int = 0
    ) -> None:
        self.nbytes, self.op, self.module, self.phase = nbytes, op, module, phase
        self.shape, self.dtype, self.node, self.stream = shape, dtype, node, stream
        self.category = ""


class Piece(msgspec.Struct, frozen=True):
    """Storages that were live at a moment, of one category, operation, module, shape and dtype."""

    category: str
    op: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int


class Moment(msgspec.Struct, frozen=True):
    """How much was live at one moment [bytes], in all and by category. `event`: how many events came before."""

    total: int
    event: int
    phase: str
    op: str
    module: str
    categories: dict[str, int]


class Stream:
    """The events, in order: `ids[n]` is the storage, `changes[n]` the bytes it grew (or, negative, shrank) by.

    `phases` are (first event, name). Storages are numbered as they appear; `records` says what each is.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.changes: list[int] = []
        self.records: list[Record] = []
        self.phases: list[tuple[int, str]] = []
        self.stacks: dict[int, tuple[Frame, ...]] = {}
        """The lines that asked for each storage, where they were recorded; innermost first."""

    def begin(self, phase: str) -> None:
        """Begin a phase, by its name; the events that follow belong to it."""
        self.phases.append((len(self.ids), phase))

    def category(self, number: int) -> str:
        """Return what a storage is for, by its number; without a claim, an input if made before the first step, else temporary."""
        record = self.records[number]
        return record.category or (INPUTS if record.phase == 0 else TEMPORARIES)

    def walk(self, look: Callable[[int, int, int], None], rounded: int = 1) -> int:
        """Calls `look(event, storage, live bytes)` after every event; returns the highest live bytes.

        rounded: each storage takes a multiple of this many bytes
        """
        live = highest = 0
        sizes: dict[int, int] = {}
        for event, (number, change) in enumerate(zip(self.ids, self.changes, strict=True)):
            if rounded > 1:
                before = sizes.get(number, 0)
                sizes[number] = before + change
                change = round_up(before + change, rounded) - round_up(before, rounded)
            live += change
            highest = max(highest, live)
            look(event, number, live)
        return highest

    def peak(self, begin: int = 0, rounded: int = 1) -> Moment:
        """The moment with the most live bytes from event `begin` on; storages are rounded up to multiples of `rounded`."""
        highest, at = -1, 0

        def look(event: int, number: int, live: int) -> None:
            nonlocal highest, at
            if live > highest and event >= begin:
                highest, at = live, event

        self.walk(look, rounded)
        return self.moment(at, rounded)

    def moment(self, event: int, rounded: int = 1) -> Moment:
        """The bytes that were live after an event, by category; storages are rounded up to multiples of `rounded`."""
        if not self.ids:
            return Moment(0, 0, "", "", "", {})
        categories: Counter[str] = Counter()
        for number, nbytes in self.live(event).items():
            categories[self.category(number)] += round_up(nbytes, rounded)
        record = self.records[self.ids[event]]
        ordered = {name: categories[name] for name in CATEGORIES if categories[name]}
        return Moment(sum(categories.values()), event, self.phase_of(event), op_name(record.op), record.module, ordered)

    def live(self, event: int) -> dict[int, int]:
        """Return the storages that are live after an event: their numbers and bytes. event: index in the stream"""
        sizes = sums(zip(self.ids[: event + 1], self.changes[: event + 1], strict=True))
        return {number: nbytes for number, nbytes in sizes.items() if nbytes}

    def phase_of(self, event: int) -> str:
        """Return the name of the phase that an event, by its index, belongs to."""
        name = ""
        for first, phase in self.phases:
            if first > event:
                break
            name = phase
        return name

    def pieces(self, event: int) -> list[Piece]:
        """Return the storages that are live after an event, by index, similar ones grouped, the most bytes first."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, nbytes in self.live(event).items():
            record = self.records[number]
            kind = (self.category(number), op_name(record.op), record.module, tuple(record.shape), record.dtype)
            groups.setdefault(kind, []).append(nbytes)
        result = [
            Piece(category, op, module, tuple(map(int, shape)), dtype_name(dtype), len(sizes), sum(sizes))
            for (category, op, module, shape, dtype), sizes in groups.items()
        ]
        return sorted(result, key=lambda piece: -piece.nbytes)

    def by_phase(self) -> dict[str, int]:
        """The highest live bytes in each phase, by name."""
        starts = [*self.phases, (len(self.ids), "")]
        highest: dict[str, int] = {}
        live, current = 0, 0
        for event, change in enumerate(self.changes):
            live += change
            while current + 1 < len(starts) and starts[current + 1][0] <= event:
                current += 1
            name = starts[current][1]
            highest[name] = max(highest.get(name, 0), live)
        return highest

    def timeline(self, points: int = 1000) -> list[Moment]:
        """The highest moment of each of at most `points` equal stretches of events; the peak is among them."""
        if not self.ids:
            return []
        stretch = max(1, -(-len(self.ids) // points))
        tops: list[tuple[int, int]] = []

        def look(event: int, number: int, live: int) -> None:
            if event % stretch == 0:
                tops.append((live, event))
            elif live > tops[-1][0]:
                tops[-1] = (live, event)

        self.walk(look)
        return list(self._moments([event for _, event in tops]))

    def _moments(self, at: Iterable[int]) -> Iterable[Moment]:
        wanted = set(at)
        totals: Counter[str] = Counter()
        live = 0
        for event, (number, change) in enumerate(zip(self.ids, self.changes, strict=True)):
            totals[self.category(number)] += change
            live += change
            if event in wanted:
                record = self.records[number]
                ordered = {name: totals[name] for name in CATEGORIES if totals[name]}
                yield Moment(live, event, self.phase_of(event), op_name(record.op), record.module, ordered)


def op_name(op: Any) -> str:
    """Return the name of an operator of PyTorch, such as `aten::mul`."""
    if isinstance(op, str):
        return op
    name: str = op.name()
    return name.partition(".")[0]


def any_layer(module: str) -> str:
    """The name of a module with a star for each number, so that alike modules of all layers have one name.

    >>> any_layer("model.layers.3.mlp.experts.12")
    'model.layers.*.mlp.experts.*'
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype without its package, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def round_up(nbytes: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-nbytes // step) * step
