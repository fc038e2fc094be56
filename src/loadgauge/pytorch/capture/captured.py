"""A captured training: what a step allocates, keeps and computes, as formulas of its sizes, and for which sizes they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from loadgauge.core.base import NotModelled, refuse, sums
from loadgauge.pytorch.capture.symbols.sizes import Formula, compiled

if TYPE_CHECKING:
    import numpy as np


BLOCK = 512
"""Granularity of CUDA's allocator [bytes]."""


class Operation(msgspec.Struct, frozen=True, gc=False):
    """One operation of the step. `first`, `last`: the events that it caused are those from `first` to before `last`."""

    name: str
    module: str
    phase: str
    flops: Formula | None
    """None: of a kind that no formula of FLOPs is known for."""
    first: int
    last: int


class Storage(msgspec.Struct, frozen=True, gc=False):
    """Memory that is got and freed as one: who asked for it, and what for."""

    category: str
    op: str
    module: str
    phase: str


class Captured(msgspec.Struct, frozen=True, dict=True):
    """A training step of a module. Sizes are those of `names`; bytes and FLOPs are exact where the `guards` hold.

    events: (storage, bytes that it grew or shrank by), in order, of two steps; `second` is the operation that begins the second.
    """

    target: str
    names: tuple[str, ...]
    sizes: dict[str, int]
    """Those at which it was captured and compared."""
    parameters: dict[str, int]
    operations: tuple[Operation, ...]
    storages: tuple[Storage, ...]
    events: tuple[tuple[int, Formula], ...]
    kept: tuple[Formula, ...]
    """Bytes of each storage that the graph keeps between forward and backward, beside parameters and inputs."""
    guards: tuple[str, ...]
    """Relations between sizes that the code found true: outside them it does something else."""
    values: tuple[str, ...]
    """Lines of the program that asked for a value of a tensor; they got 1, and what hangs on it is not known."""
    second: int
    seconds: float
    torch: str
    phases: tuple[tuple[int, str], ...]
    """The event with which each phase begins, and its name."""
    plain: str = ""
    """Why there are only numbers and no formulas, where that is so."""
    branches: tuple[str, ...] = ()
    """Lines among `values` that decide by it, and the line that came next."""
    assumed: tuple[str, ...] = ()
    """Lines where sizes hang on who was chosen, such as the rows of an expert, and what was taken for granted there."""
    pictures: tuple[tuple[str, int], ...] = ()
    """Width and height of each picture of a sequence, and how many tokens stand for it."""
    of_sound: int = 0
    """Tokens of each sequence that stand for its sound."""
    subject: str = ""
    """What a model with towers ran on, such as "text with one picture"."""

    def check(self, **sizes: int) -> None:
        """Raise NotModelled where the formulas do not hold for some sizes."""
        for guard in self.guards:
            if not compiled(guard)(sizes):
                shown = ", ".join(f"{name}={value}" for name, value in sizes.items())
                raise NotModelled(f"captured where {guard}, which {shown} is not; capture it at these sizes")
        for name, value in self.sizes.items():
            if (value == 1) != (sizes[name] == 1):
                raise NotModelled(
                    f"captured at {name}={value}: PyTorch treats 1 apart; capture it at {name}={sizes[name]}"
                )

    def holds(self, **sizes: int) -> bool:
        """Return whether the formulas hold for some sizes."""
        try:
            self.check(**sizes)
        except NotModelled:
            return False
        return True

    @property
    def where(self) -> tuple[str, ...]:
        """For which sizes the formulas hold: the guards, and on which side of 1 each size is, as PyTorch treats 1 apart."""
        sides = [f"{name} == 1" if value == 1 else f"{name} >= 2" for name, value in self.sizes.items()]
        bare = [guard[1:-1] if guard.startswith("(") and guard.endswith(")") else guard for guard in self.guards]
        return tuple(bare) if self.plain else (*sides, *bare)

    def changes(self, **sizes: int) -> list[int]:
        """Bytes that each event gets, or frees where negative. Raises NotModelled outside the guards."""
        self.check(**sizes)
        last: tuple[dict[str, int], list[int]] | None = self.__dict__.get("_changes")
        if last is None or last[0] != sizes:  # an answer asks for those of the same sizes several times
            different = {id(size): size for _, size in self.events}
            values = {key: int(size.at(sizes)) for key, size in different.items()}
            last = self.__dict__["_changes"] = sizes, [values[id(size)] for _, size in self.events]
        return last[1]

    def at_peak(self, **sizes: int) -> dict[str, int]:
        """Return what the bytes live at the peak are for, the largest first. Raises NotModelled outside the guards."""
        changes = self.changes(**sizes)
        live = list(accumulate(changes))
        last = live.index(max(live)) + 1 if live else 0
        alive = zip(self.events[:last], changes[:last], strict=True)
        by_category = sums((self.storages[number].category, change) for (number, _), change in alive)
        return {name: size for name, size in sorted(by_category.items(), key=lambda item: -item[1]) if size}

    def allocated(self, block: int = BLOCK, **sizes: int) -> int:
        """The peak with each storage rounded up to blocks, as CUDA's allocator does. Raises NotModelled outside the guards."""
        live = highest = 0
        held = [0] * len(self.storages)
        for (number, _), change in zip(self.events, self.changes(**sizes), strict=True):
            before = held[number]
            held[number] += change
            live += before // -block - held[number] // -block
            highest = max(highest, live)
        return highest * block

    def live(self, **sizes: int) -> np.ndarray[Any, Any]:
        """Bytes live after every event. Raises NotModelled outside the guards."""
        import numpy  # not at the top: an answer from the disk needs none, and it takes a tenth of a second

        bytes_alive: np.ndarray[Any, Any] = numpy.cumsum(numpy.array(self.changes(**sizes), dtype=numpy.int64))
        return bytes_alive

    def peak(self, **sizes: int) -> int:
        """The most bytes live at once in the two steps. Raises NotModelled outside the guards."""
        return max(accumulate(self.changes(**sizes)), default=0)

    def by_phase(self, **sizes: int) -> dict[str, int]:
        """The most bytes live at once in each phase of the two steps. Raises NotModelled outside the guards."""
        live = list(accumulate(self.changes(**sizes)))
        highest: dict[str, int] = {}
        ends = [*(first for first, _ in self.phases[1:]), len(self.events)]
        for (first, phase), end in zip(self.phases, ends, strict=True):
            if end > first:
                highest[phase] = max(highest.get(phase, 0), *live[first:end])
        return highest

    def flops(self, **sizes: int) -> int:
        """FLOPs of one step, a multiply-add as 2. Raises NotModelled outside the guards."""
        self.check(**sizes)
        return int(self.flops_formula.at(sizes))

    def kept_bytes(self, **sizes: int) -> int:
        """Bytes kept from forward to backward beside parameters and inputs. Raises NotModelled outside the guards."""
        self.check(**sizes)
        return sum(int(nbytes.at(sizes)) for nbytes in self.kept)

    @cached_property
    def kept_formula(self) -> Formula:
        """The bytes kept from forward to backward, as one sum."""
        return _total(self.kept)

    @cached_property
    def flops_formula(self) -> Formula:
        """The FLOPs of one step, as one sum."""
        return _total(operation.flops for operation in self.operations[self.second :] if operation.flops is not None)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Operations whose FLOPs no formula is known for."""
        return tuple(sorted({operation.name for operation in self.operations if operation.flops is None}))


def _total(sizes: Iterable[Formula]) -> Formula:
    terms = sums(term for size in sizes for term in size.terms)
    return Formula(tuple(sorted((product, factor) for product, factor in terms.items() if factor)))


T = TypeVar("T")


class Column(msgspec.Struct, Generic[T], frozen=True):
    """Many values of which few differ: `rows` are numbers in `kinds`."""

    kinds: list[T]
    rows: list[int]

    @classmethod
    def of(cls, values: Iterable[T]) -> Column[T]:
        """The column of some values. ``Column.of("aba").rows == [0, 1, 0]``"""
        numbers: dict[T, int] = {}
        rows = [numbers.setdefault(value, len(numbers)) for value in values]  # fills `numbers`
        return cls(list(numbers), rows)

    def values(self) -> tuple[T, ...]:
        """The values, equal ones as one object. Raises ConfigError where a row points at none.

        >>> Column.of("aba").values()
        ('a', 'b', 'a')
        """
        inside(self.rows, len(self.kinds))
        return tuple(map(self.kinds.__getitem__, self.rows))


class Packed(msgspec.Struct, frozen=True):
    """A capture, as it is written to disk. rest: all else of it"""

    rest: Captured
    names: Column[str]
    modules: Column[str]
    phases: Column[str]
    flops: Column[Formula | None]
    firsts: list[int]
    lasts: list[int]
    storages: Column[Storage]
    numbers: list[int]
    changes: Column[Formula]
    kept: Column[Formula]

    @classmethod
    def of(cls, captured: Captured) -> Packed:
        """A capture as columns."""

        def column(name: str) -> Column[Any]:
            return Column.of(getattr(op, name) for op in captured.operations)

        return cls(
            msgspec.structs.replace(captured, operations=(), storages=(), events=(), kept=()),
            column("name"),
            column("module"),
            column("phase"),
            column("flops"),
            [op.first for op in captured.operations],
            [op.last for op in captured.operations],
            Column.of(captured.storages),
            [number for number, _ in captured.events],
            Column.of(size for _, size in captured.events),
            Column.of(captured.kept),
        )

    def sizes(self) -> list[Formula]:
        """Every formula of it, once."""
        return [formula for of in (self.changes, self.kept, self.flops) for formula in of.kinds if formula is not None]

    def captured(self) -> Captured:
        """The capture. Raises ConfigError where columns have other lengths than others, or point at nothing."""
        rest = self.rest
        columns = (
            self.names.values(),
            self.modules.values(),
            self.phases.values(),
            self.flops.values(),
            self.firsts,
            self.lasts,
        )
        storages, changes = self.storages.values(), self.changes.values()
        refuse(len(set(map(len, columns))) > 1 or len(changes) != len(self.numbers), "not a capture")
        operations, events = tuple(map(Operation, *columns)), tuple(zip(self.numbers, changes, strict=True))
        inside(self.numbers, len(storages))
        inside([*self.firsts, *self.lasts, *(first for first, _ in rest.phases)], len(events) + 1)
        in_order = all(map(int.__le__, self.firsts, self.lasts)) and 0 <= rest.second <= len(operations)
        refuse(set(rest.sizes) != set(rest.names) or not in_order, "not a capture")
        return msgspec.structs.replace(
            rest, operations=operations, storages=storages, events=events, kept=self.kept.values()
        )


def inside(rows: Sequence[int], length: int) -> None:
    """Raise ConfigError unless all rows are numbers of a list of some length."""
    refuse(rows and not 0 <= min(rows) <= max(rows) < length, "not a capture")
