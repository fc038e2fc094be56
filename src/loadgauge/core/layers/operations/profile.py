"""Recorded live bytes of a layer whose operations were captured from its code.

A row is a moment: the bytes alive, beside what earlier layers keep, and the elements of weight gradients made so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from loadgauge.core.base.algebra import Size, maximum


class Row(msgspec.Struct, frozen=True):
    """A moment of a layer: `at`, the operation at work (of backward: the one whose backward it is), and what is alive.

    live: bytes, gradients of weights left out; gradients: elements of those made so far; latest: by this operation alone
    """

    at: int
    live: Size
    gradients: Size = 0
    latest: Size = 0


class Profile(msgspec.Struct, frozen=True):
    """The moments of a layer's forward, and of its backward.

    bare: of a forward that keeps nothing; rerun: of a forward that runs again in backward
    outside: names of tensors that earlier layers made and hold for several
    """

    forward: tuple[Row, ...]
    bare: tuple[Row, ...]
    rerun: tuple[Row, ...]
    backward: tuple[Row, ...]
    entering: Size = 0
    """Bytes of its input, where it does not keep it by itself."""
    outside: frozenset[str] = frozenset()
    each: Callable[[], tuple[Row, ...]] = tuple
    """The moments of the backward of each operation, also those that another operation's always exceeds."""


def most(rows: Iterable[Row], gradient: float = 0, *, accumulating: bool = False) -> Size:
    """Return the most bytes alive in some rows. gradient: bytes of an element; accumulating: each is added to one that is there

    >>> most([Row(1, 10, gradients=2), Row(0, 4, gradients=6)], 2)
    16
    """
    peak: Size = 0
    for row in rows:
        own = row.latest if accumulating else row.gradients
        peak = maximum(peak, row.live + gradient * own if gradient else row.live)
    return peak
