"""A capture as columns of numbers that point into short lists: tens of thousands of operations have few kinds and few sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.capture.captured import Captured, Operation, Storage
from loadgauge.pytorch.capture.symbols.sizes import Size

T = TypeVar("T")


class Column(msgspec.Struct, Generic[T], frozen=True):
    """Many values of which few differ: `rows` are numbers in `kinds`."""

    kinds: list[T]
    rows: list[int]

    @classmethod
    def of(cls, values: Iterable[T]) -> Column[T]:
        """The column of some values. ``Column.of("aba").rows == [0, 1, 0]``"""
        known: dict[T, int] = {}
        rows = [known.setdefault(value, len(known)) for value in values]
        return cls(list(known), rows)

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
    flops: Column[Size | None]
    firsts: list[int]
    lasts: list[int]
    storages: Column[Storage]
    numbers: list[int]
    changes: Column[Size]
    kept: Column[Size]

    @classmethod
    def of(cls, one: Captured) -> Packed:
        """A capture as columns."""

        def column(name: str) -> Column[Any]:
            return Column.of(getattr(op, name) for op in one.operations)

        return cls(
            msgspec.structs.replace(one, operations=(), storages=(), events=(), kept=()),
            column("name"),
            column("module"),
            column("phase"),
            column("flops"),
            [op.first for op in one.operations],
            [op.last for op in one.operations],
            Column.of(one.storages),
            [number for number, _ in one.events],
            Column.of(size for _, size in one.events),
            Column.of(one.kept),
        )

    def sizes(self) -> list[Size]:
        """Every formula of it, once."""
        return [one for of in (self.changes, self.kept, self.flops) for one in of.kinds if one is not None]

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
        if len(set(map(len, columns))) > 1 or len(changes) != len(self.numbers):
            raise ConfigError("not a capture")
        operations, events = tuple(map(Operation, *columns)), tuple(zip(self.numbers, changes, strict=True))
        inside(self.numbers, len(storages))
        inside([*self.firsts, *self.lasts, *(first for first, _ in rest.phases)], len(events) + 1)
        in_order = all(map(int.__le__, self.firsts, self.lasts)) and 0 <= rest.second <= len(operations)
        if set(rest.sizes) != set(rest.names) or not in_order:
            raise ConfigError("not a capture")
        return msgspec.structs.replace(
            rest, operations=operations, storages=storages, events=events, kept=self.kept.values()
        )


def inside(rows: Sequence[int], length: int) -> None:
    """Raise ConfigError unless all rows are numbers of a list of some length."""
    if rows and not 0 <= min(rows) <= max(rows) < length:
        raise ConfigError("not a capture")
