"""A stream of allocations and releases: who asked for what, what was live when, and what made up the peak."""

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base.by_key import lists, sums

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

    def levels(self, rounded: int = 1) -> list[int]:
        """Return the live bytes after every event. rounded: each storage takes a multiple of this many bytes"""
        if rounded == 1:
            return list(itertools.accumulate(self.changes))
        levels, live = [], 0
        sizes: dict[int, int] = {}
        for number, change in zip(self.ids, self.changes, strict=True):
            before = sizes.get(number, 0)
            sizes[number] = before + change
            live += round_up(before + change, rounded) - round_up(before, rounded)
            levels.append(live)
        return levels

    def peak(self, begin: int = 0) -> Moment:
        """The moment with the most live bytes from event `begin` on."""
        levels = self.levels()
        return self.moment(max(range(begin, len(levels)), key=levels.__getitem__, default=0))

    def moment(self, event: int) -> Moment:
        """The bytes that were live after an event, by category."""
        if not self.ids:
            return Moment(0, 0, "", "", "", {})
        return self._moment(event, sums((self.category(number), size) for number, size in self.live(event).items()))

    def _moment(self, event: int, categories: Mapping[str, int]) -> Moment:
        record = self.records[self.ids[event]]
        ordered = {name: categories[name] for name in CATEGORIES if categories.get(name)}
        return Moment(sum(categories.values()), event, self.phase_of(event), op_name(record.op), record.module, ordered)

    def live(self, event: int) -> dict[int, int]:
        """Return the storages that are live after an event: their numbers and bytes. event: index in the stream"""
        sizes = sums(zip(self.ids[: event + 1], self.changes[: event + 1], strict=True))
        return {number: nbytes for number, nbytes in sizes.items() if nbytes}

    def phase_of(self, event: int) -> str:
        """Return the name of the phase that an event, by its index, belongs to."""
        begun = bisect.bisect_right(self.phases, event, key=lambda phase: phase[0])
        return self.phases[begun - 1][1] if begun else ""

    def pieces(self, event: int) -> list[Piece]:
        """Return the storages that are live after an event, by index, similar ones grouped, the most bytes first."""
        groups = lists((self._kind(number), nbytes) for number, nbytes in self.live(event).items())
        result = [
            Piece(category, op, module, tuple(map(int, shape)), dtype_name(dtype), len(sizes), sum(sizes))
            for (category, op, module, shape, dtype), sizes in groups.items()
        ]
        return sorted(result, key=lambda piece: -piece.nbytes)

    def _kind(self, number: int) -> tuple[str, str, str, tuple[Any, ...], Any]:
        record = self.records[number]
        return self.category(number), op_name(record.op), record.module, tuple(record.shape), record.dtype

    def by_phase(self) -> dict[str, int]:
        """The highest live bytes in each phase, by name; what was made before the first counts to it."""
        levels, highest = self.levels(), dict[str, int]()
        starts = [(0, self.phases[0][1] if self.phases else ""), *self.phases[1:], (len(levels), "")]
        for (first, name), (end, _) in itertools.pairwise(starts):
            if first < end:
                highest[name] = max(highest.get(name, 0), max(levels[first:end]))
        return highest

    def timeline(self, points: int = 1000) -> list[Moment]:
        """The highest moment of each of at most `points` equal stretches of events; the peak is among them."""
        levels = self.levels()
        stretch = max(1, -(-len(levels) // points))
        stretches = (range(first, min(first + stretch, len(levels))) for first in range(0, len(levels), stretch))
        return list(self._moments({max(events, key=levels.__getitem__) for events in stretches}))

    def _moments(self, wanted: Set[int]) -> Iterable[Moment]:
        totals: Counter[str] = Counter()
        for event, (number, change) in enumerate(zip(self.ids, self.changes, strict=True)):
            totals[self.category(number)] += change
            if event in wanted:
                yield self._moment(event, totals)


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
