"""Captured operations as those of `layers`: formulas of the sizes, which a view turns into a `Layer`.

One `Listing` holds where its guards do; a model has several (`road.OnDemand`), of which a view finds the one that holds.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from loadgauge.core.base.errors import ConfigError, NotModelled, refuse
from loadgauge.core.layers.operations.operations import Layer, Operation, Tensor, Weight
from loadgauge.core.layers.operations.profile import Profile, Row
from loadgauge.pytorch.capture.symbols.sizes import Formula, compiled

ENTRY, EXIT = "entry", "exit"
"""What lies before the first block and after the last."""


RANKS = {axis: Formula(((axis, 1),)) for axis in ("tp", "ep")}
"""Ranks of an axis, as a formula."""
_SIZED = re.compile(r"\b(Size|Formula|Tensor|Weight|Gemm|Collective|Operation|Row)\b")


@functools.cache
def _sized(kind: Any) -> tuple[str, ...]:
    """The fields of a structure that are sizes, or structures that have some."""
    return tuple(name for name in kind.__struct_fields__ if _SIZED.search(str(kind.__annotations__[name])))


def mapped(tree: Any, value: Callable[[Any], Any], shared: dict[Any, Any] | None = None) -> Any:
    """Return operations, rows or segments with each size in them exchanged. shared: tensors and weights so far, each made once

    >>> mapped((Row(0, Formula((("s", 1),))),), lambda size: size.at({"s": 5}) if isinstance(size, Formula) else size)
    (Row(at=0, live=5, gradients=0, latest=0),)
    """
    kind: Any = type(tree)
    if kind is tuple:
        return tuple([mapped(item, value, shared) for item in tree])
    if kind is Formula or not isinstance(tree, msgspec.Struct):
        return value(tree)
    if shared is not None and kind in (Tensor, Weight):
        if tree not in shared:
            shared[tree] = mapped(tree, value)
        return shared[tree]
    parts = ((name, getattr(tree, name)) for name in _sized(kind))
    mapped_parts = {name: mapped(part, value, shared) for name, part in parts if part is not None and part != ()}
    return msgspec.structs.replace(tree, **mapped_parts)


class Segment(msgspec.Struct, frozen=True):
    """The operations of one block, or of what lies before or after all of them, with formulas in place of sizes."""

    name: str
    operations: tuple[Operation, ...]
    forward: tuple[Row, ...]
    bare: tuple[Row, ...]
    rerun: tuple[Row, ...]
    backward: tuple[Row, ...]
    each: tuple[Row, ...]
    """Of the backward of each operation."""
    entering: Formula | int
    outside: frozenset[str] = frozenset()

    @property
    def tensors(self) -> Iterator[Tensor]:
        """Its tensors; some come more than once."""
        return (
            tensor
            for operation in self.operations
            for tensor in (*operation.inputs, *operation.outputs, *operation.keeps)
        )

    def layer(
        self,
        sizes: Mapping[str, Any],
        ranks: Mapping[str, int] | None = None,
        ragged: Ragged | None = None,
        *,
        own: bool = False,
    ) -> Layer:
        """Write the segment's operations at some sizes, by name; ints or arrays.

        ranks: of each axis that it is split over; ragged: sequences of unequal lengths, in place of `sizes`
        own: without what is trained, which was added
        """
        values: dict[str, Any] = dict(ranks or {})

        def value(size: Any) -> Any:
            if type(size) is not Formula:
                return size
            total: Any = 0
            for product, factor in size.terms:
                if product not in values:
                    values[product] = compiled(product)(sizes) if ragged is None else ragged.of(product)
                total = total + factor * values[product]
            return total

        operations = mapped(self.operations, value, {})
        if own:
            operations = tuple(
                msgspec.structs.replace(
                    operation, weights=tuple(weight for weight in operation.weights if not weight.trainable)
                )
                for operation in operations
            )
        forward, bare, rerun, backward = mapped((self.forward, self.bare, self.rerun, self.backward), value)
        entering = value(self.entering)
        each = functools.partial(mapped, self.each, value)
        return Layer(self.name, operations, Profile(forward, bare, rerun, backward, entering, self.outside, each))


def pack(segments: Iterable[Segment]) -> tuple[bytes, tuple[Formula, ...]]:
    """Return segments as they are stored, with whole numbers in place of sizes, and their formulas, which those below 0 count."""
    table: dict[Formula, int] = {}

    def number(size: Any) -> Any:
        if isinstance(size, Formula) and all(product == "1" for product, _ in size.terms):
            size = sum(factor for _, factor in size.terms)
        if not isinstance(size, Formula):
            if size >= 0:
                return size
            size = Formula((("1", size),))
        return -1 - table.setdefault(size, len(table))

    stored = [mapped(segment, number, {}) for segment in segments]
    return msgspec.msgpack.encode(stored, order="deterministic"), tuple(table)


class Listing(msgspec.Struct, frozen=True, dict=True):
    """One captured training step as segments in the order in which they run: entry, blocks, exit.

    packed, table: the segments as `pack` writes them; held: what entry makes that checkpoints of blocks hold, beside what is kept
    """

    names: tuple[str, ...]
    sizes: dict[str, int]
    guards: tuple[str, ...]
    packed: bytes
    table: tuple[Formula, ...]
    held: Formula
    places: tuple[str, ...] = ()
    """The path of each recorded block."""
    values: tuple[str, ...] = ()
    seconds: float = 0.0
    plain: str = ""
    unheard: str = ""
    """The argument by which the model takes a sound, where it ran on tokens alone."""
    of_sound: int = 0
    """Tokens of each sequence that stand for its sound."""
    assumed: tuple[str, ...] = ()
    """Lines where sizes hang on data, the loss, and what was taken for granted of each."""

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Entry, blocks and exit. Raises ConfigError or `msgspec.MsgspecError` where they are not as `pack` writes them."""

        def read(size: Any) -> Any:
            refuse(type(size) not in (int, float) or -size > len(self.table), "not a size of a captured list")
            return size if size >= 0 else self.table[-1 - size]

        stored = msgspec.msgpack.decode(self.packed, type=tuple[Segment, ...])
        try:
            segments: tuple[Segment, ...] = mapped(stored, read, {})
        except TypeError:  # a tensor with a size that is neither
            raise ConfigError("not a size of a captured list") from None
        refuse(len(segments) < len((ENTRY, EXIT)), "not a captured list")
        return segments

    @property
    def entry(self) -> Segment:
        """The segment before the first block."""
        return self.segments[0]

    @property
    def blocks(self) -> tuple[Segment, ...]:
        """The segments of the blocks, one for each place of the recorded model."""
        return self.segments[1:-1]

    @property
    def exit(self) -> Segment:
        """The segment after the last block."""
        return self.segments[-1]

    def formulas(self) -> list[Formula]:
        """Return every formula in it but the ranks of an axis."""
        return [self.held, *(size for size in self.table if size not in RANKS.values())]

    @property
    def squares(self) -> str:
        """The first tensor with as many elements as the length squared, or more; "" where there is none."""
        for segment in self.segments:
            for tensor in segment.tensors:
                terms = getattr(tensor.numel, "terms", ())
                if any((powers := degrees(product)) is not None and powers[1] > 1 for product, _ in terms):
                    return tensor.name
        return ""

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether its formulas hold for some sizes, by name."""
        sides = all((value == 1) == (sizes[name] == 1) for name, value in self.sizes.items())
        return sides and all(compiled(guard)(sizes) for guard in self.guards)


BATCH, LENGTH = "b", "s"


@functools.cache
def degrees(product: str) -> tuple[int, int] | None:
    """How often the batch and the length are factors of a term; None where it has another factor, such as a rounded quotient.

    >>> degrees("b*s*s"), degrees("1"), degrees("b*((s)//(2))")
    ((1, 2), (0, 0), None)
    """
    factors = [] if product == "1" else product.split("*")
    if any(factor not in (BATCH, LENGTH) for factor in factors):
        return None
    return factors.count(BATCH), factors.count(LENGTH)


class Ragged(msgspec.Struct, frozen=True):
    """A micro-batch of unequal lengths: its tokens, query-key pairs and sequences, and the longest of them (source: padfree2024).

    single: whether the formulas are those of one sequence, in which the batch is no letter
    """

    tokens: Any
    pairs: Any
    sequences: Any
    longest: Any
    single: bool = False

    def of(self, product: str) -> Any:
        """The value of a term. Raises NotModelled for one that is linear in none of these.

        >>> Ragged(30, 500, 2, 20).of("b*s"), Ragged(30, 500, 2, 20).of("b*s*s"), Ragged(30, 500, 2, 20).of("s")
        (30, 500, 20)
        """
        powers = degrees(product)
        if powers is not None and self.single:
            powers = (1, powers[1]) if powers[1] else powers
        values: dict[Any, Any] = {
            (0, 0): 1,
            (0, 1): self.longest,
            (0, 2): self.longest**2,
            (1, 0): self.sequences,
            (1, 1): self.tokens,
            (1, 2): self.pairs,
        }
        if powers in values:
            return values[powers]
        raise NotModelled(
            f"sequences of unequal lengths where a size is {product}: it is linear neither in tokens nor in query-key pairs"
        )
